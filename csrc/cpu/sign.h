// sign over lanes. Included inside an instruction set's namespace.

INLINE void encode_sign_tile(const float* v, std::size_t blocks, const int b, std::uint8_t* scales,
                             std::uint8_t* codes, float* e, std::uint8_t* kept,
                             const Ahead& ahead) {
  float scale[kTileBlocks];
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_grad(j, b);
    const float* x = v + j * b;
    I largest = splat_i(0);
    float sum = lane_tree(vector_tree(b / kLanes, [&](int k) ALWAYS {
      const I magnitude = (I)load_f(x + k * kLanes) & 0x7fffffff;
      largest = imax(largest, magnitude);
      return (F)magnitude;
    }));
    const std::uint32_t absmax = hmax(largest);
    if (__builtin_expect(absmax >= Sign::kLarge, 0)) {
      sum = lane_tree(vector_tree(b / kLanes, [&](int k) ALWAYS {
        return (F)((I)load_f(x + k * kLanes) & 0x7fffffff) * splat(Sign::kDown);
      }));
    }
    const std::uint16_t s = absmax >= kInfBits ? kBf16Nan : Sign::scale(sum, b, absmax);
    store(scales + 2 * j, s);
    kept[j] = s == kBf16Nan;
    scale[j] = bf16_value(s);
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_residual(j, b);
    std::uint8_t* to = codes + j * b / 8;
    if (kept[j] || scale[j] == 0.0f) {
      std::memset(to, 0, b / 8);
      if (e && !kept[j]) std::memcpy(e + j * b, v + j * b, b * sizeof(float));
      continue;
    }
    const I s = (I)splat(scale[j]);
    for (int i = 0; i < b; i += 32) {
      std::uint32_t group = 0;
      for (int g = 0; g < kGroup; ++g) {
        const F x = load_f(v + j * b + i + g * kLanes);
        group |= sign_bits(x) << (g * kLanes);
        if (e) store_f(e + j * b + i + g * kLanes, x - (F)(s | ((I)x & INT32_MIN)));
      }
      store(to + i / 8, group);
    }
  }
}

void encode_sign(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
                 std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  with_block(log2_block,
             [&](auto b) ALWAYS { encode_sign_tile(v, blocks, b, scales, codes, e, kept, ahead); });
}

struct SignValues : Values32 {
  INLINE void operator()(const std::uint8_t* codes, F* q) const {
    for (int g = 0; g < kGroup; ++g) {
      q[g] = flip_by_bits(splat(1.0f), codes + g * kLanes / 8);
    }
  }
};

void decode_sign(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                 const Output& output) {
  sum_blocks<1>(SignValues{}, wires, count, blocks, log2_block, output);
}
