// int8 and int4 over lanes. Included inside an instruction set's namespace.

template <class Codec>
INLINE void encode_uniform_tile(const float* v, std::size_t blocks, const int b,
                                std::uint8_t* scales, std::uint8_t* codes, float* e,
                                std::uint8_t* kept, const Ahead& ahead) {
  float scale[kTileBlocks], inverse[kTileBlocks];
  // Scales first, for all blocks: their divisions overlap instead of stalling each block.
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_grad(j, b);
    const std::uint32_t absmax = block_absmax(v + j * b, b);
    const std::uint16_t s = absmax >= kInfBits ? kBf16Nan : Codec::scale(from_bits(absmax));
    store(scales + 2 * j, s);
    kept[j] = s == kBf16Nan;
    // A zero or NaN block multiplies by 0: its codes are 0 and e = v.
    scale[j] = bf16_value(s);
    inverse[j] = s == kScaleZero ? 0.0f : 1.0f / scale[j];
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_residual(j, b);
    std::uint8_t* to = codes + j * b * Codec::kWidth / 8;
    if (__builtin_expect(kept[j], 0)) {
      std::memset(to, 0, b * Codec::kWidth / 8);
      continue;
    }
    const F s = splat(scale[j]), inv = splat(inverse[j]);
    const F top = splat(Codec::kMax), bottom = splat(-Codec::kMax);
    for (int i = 0; i < b; i += 32) {
      I c[kGroup];
      for (int g = 0; g < kGroup; ++g) {
        const F x = load_f(v + j * b + i + g * kLanes);
        c[g] = round_int(vmax(vmin(x * inv, top), bottom));
        if (e) store_f(e + j * b + i + g * kLanes, exact_nmadd(to_float(c[g]), s, x));
      }
      pack32<Codec::kWidth>(c, to + i * Codec::kWidth / 8);
    }
  }
}

template <class Codec>
void encode_uniform(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
                    std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  with_block(log2_block, [&](auto b) ALWAYS {
    encode_uniform_tile<Codec>(v, blocks, b, scales, codes, e, kept, ahead);
  });
}

// int8: bytes to floats. int4: a table of its 16 values.
struct Int8Values : Values32 {
  INLINE void operator()(const std::uint8_t* codes, F* q) const { unpack32_int8(codes, q); }
};
struct Int4Values : Values32 {
  Lut<4> lut;
  INLINE Int4Values() : lut(kTable) {}
  INLINE void operator()(const std::uint8_t* codes, F* q) const { lookup32(lut, codes, q); }
  static constexpr float kTable[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};

void decode_int8(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                 const Output& output) {
  sum_blocks<8>(Int8Values{}, wires, count, blocks, log2_block, output);
}
void decode_int4(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                 const Output& output) {
  sum_blocks<4>(Int4Values{}, wires, count, blocks, log2_block, output);
}
