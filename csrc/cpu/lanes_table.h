// The table of an instruction set whose bodies run over lanes. Included inside its namespace.

constexpr Kernels lanes_table() {
  Kernels k{};
  k.load[kGradF32][kResidualNone] = load_tile<F32, Nothing>;
  k.load[kGradF32][kResidualF32] = load_tile<F32, F32>;
  k.load[kGradF32][kResidualBf16] = load_tile<F32, Bf16>;
  k.load[kGradBf16][kResidualNone] = load_tile<Bf16, Nothing>;
  k.load[kGradBf16][kResidualF32] = load_tile<Bf16, F32>;
  k.load[kGradBf16][kResidualBf16] = load_tile<Bf16, Bf16>;
  k.load[kGradF16][kResidualNone] = load_tile<Fp16, Nothing>;
  k.load[kGradF16][kResidualF32] = load_tile<Fp16, F32>;
  k.load[kGradF16][kResidualBf16] = load_tile<Fp16, Bf16>;
  k.store_bf16 = store_bf16;
  k.encode_plain[kNone] = encode_plain<PlainNone>;
  k.encode_plain[kBf16] = encode_plain<PlainBf16>;
  k.encode_plain[kFp16] = encode_plain<PlainFp16>;
  k.decode_plain[kNone] = decode_plain<F32>;
  k.decode_plain[kBf16] = decode_plain<Bf16>;
  k.decode_plain[kFp16] = decode_plain<Fp16>;
  k.encode_blocks[kInt8] = encode_uniform<Int8>;
  k.encode_blocks[kFp8] = encode_fp8;
  k.encode_blocks[kInt4] = encode_uniform<Int4>;
  k.encode_blocks[kLm4] = encode_lm<4>;
  k.encode_blocks[kLm3] = encode_lm<3>;
  k.encode_blocks[kLm2] = encode_lm<2>;
  k.encode_blocks[kSign] = encode_sign;
  k.decode_blocks[kInt8] = decode_int8;
  k.decode_blocks[kFp8] = decode_fp8;
  k.decode_blocks[kInt4] = decode_int4;
  k.decode_blocks[kLm4] = decode_lm<4>;
  k.decode_blocks[kLm3] = decode_lm<3>;
  k.decode_blocks[kLm2] = decode_lm<2>;
  k.decode_blocks[kSign] = decode_sign;
  add_scans(k);
  k.scales_are_tame = scales_are_tame;
  k.find = find_largest;
  return k;
}
