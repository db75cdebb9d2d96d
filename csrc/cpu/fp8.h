// fp8 over lanes. Included inside an instruction set's namespace.

INLINE I fp8_codes(F x) {
  const I sign = (I)((U)x >> 24) & 0x80, u = (I)x & 0x7fffffff;
  const I normal = ((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - static_cast<int>(Fp8::kRebias);
  const F magic = splat(Fp8::kSubnormalMagic);
  const I small = (I)((F)u + magic) - (I)magic;
  I code = (F)u < splat(Fp8::kLeastNormal) ? small : normal;
  code = code > static_cast<int>(Fp8::kMaxCode) ? splat_i(Fp8::kMaxCode) : code;
  return code | sign;
}

INLINE F fp8_values(I code) {
  const F magnitude = (F)((code & 0x7f) << 20) * splat(Fp8::kValueScale);
  return (F)((I)magnitude | ((code & 0x80) << 24));
}

void encode_fp8(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
                std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  const int b = 1 << log2_block;
  for (std::size_t j = 0; j < blocks; ++j, v += b, codes += b) {
    ahead.fetch_grad(j, b);
    ahead.fetch_residual(j, b);
    const std::uint32_t absmax = block_absmax(v, b);
    const std::uint16_t scale = absmax >= kInfBits ? kBf16Nan : Fp8::scale(from_bits(absmax));
    store(scales + 2 * j, scale);
    kept[j] = scale == kBf16Nan;
    if (kept[j] || scale == kScaleZero) {
      std::memset(codes, 0, b);
      if (e && !kept[j]) std::memcpy(e + j * b, v, b * sizeof(float));
      continue;
    }
    const F s = splat(bf16_value(scale)), inverse = splat(1.0f / bf16_value(scale));
    for (int i = 0; i < b; i += 32) {
      I c[kGroup];
      for (int g = 0; g < kGroup; ++g) {
        const F x = load_f(v + i + g * kLanes);
        c[g] = fp8_codes(x * inverse);
        if (e) store_f(e + j * b + i + g * kLanes, exact_nmadd(fp8_values(c[g]), s, x));
        c[g] = (c[g] << 24) >> 24;  // the packing saturates signed numbers
      }
      pack32<8>(c, codes + i);
    }
  }
}

struct Fp8Values : Values32 {
  INLINE void operator()(const std::uint8_t* codes, F* q) const {
    I c[kGroup];
    unpack32_u8(codes, c);
    for (int g = 0; g < kGroup; ++g) q[g] = fp8_values(c[g]);
  }
};

void decode_fp8(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                const Output& output) {
  sum_blocks<8>(Fp8Values{}, wires, count, blocks, log2_block, output);
}
