// One block at a time, element by element, straight from the formulas in codec/: the `scalar`
// kernel set, and the short last block of a segment for the others.
#pragma once

#include <algorithm>

#include "codec/fp8.h"
#include "codec/frame.h"
#include "codec/int4.h"
#include "codec/int8.h"
#include "codec/lm.h"
#include "codec/sign.h"
#include "cpu/kernels.h"

namespace zcomm::scalar {

inline std::uint32_t absmax_bits(const float* v, int m) {
  std::uint32_t a = 0;
  for (int i = 0; i < m; ++i) a = std::max(a, bits(v[i]) & kAbsMask);
  return a;
}

// How each codec fills a finite block: codes arrive cleared; d receives what they decode to.
template <int Width, int Q, std::uint16_t Cap>
std::uint16_t encode_finite(Uniform<Width, Q, Cap>, const float* v, int m, std::uint32_t absmax,
                            std::uint8_t* codes, float* d) {
  using U = Uniform<Width, Q, Cap>;
  const std::uint16_t scale = U::scale(from_bits(absmax));
  if (scale == kScaleZero) return scale;
  const float s = bf16_value(scale), inverse = 1.0f / s;
  for (int i = 0; i < m; ++i) {
    const float code = U::code(v[i], inverse);
    put_code(codes, Width, i, U::to_wire(code));
    d[i] = code * s;
  }
  return scale;
}

inline std::uint16_t encode_finite(Fp8, const float* v, int m, std::uint32_t absmax,
                                   std::uint8_t* codes, float* d) {
  const std::uint16_t scale = Fp8::scale(from_bits(absmax));
  if (scale == kScaleZero) return scale;
  const float s = bf16_value(scale), inverse = 1.0f / s;
  for (int i = 0; i < m; ++i) {
    codes[i] = static_cast<std::uint8_t>(Fp8::encode(v[i] * inverse));
    d[i] = Fp8::value(codes[i]) * s;
  }
  return scale;
}

inline std::uint16_t encode_finite(Sign, const float* v, int m, std::uint32_t absmax,
                                   std::uint8_t* codes, float* d) {
  const float factor = absmax >= Sign::kLarge ? Sign::kDown : 1.0f;
  float t[kMaxBlock] = {};
  for (int i = 0; i < m; ++i) t[i] = from_bits(bits(v[i]) & kAbsMask) * factor;
  const std::uint16_t scale = Sign::scale(tree_sum(t, 1 << log2_ceil(m)), m, absmax);
  if (scale == kScaleZero) return scale;
  for (int i = 0; i < m; ++i) {
    put_code(codes, 1, i, bits(v[i]) >> 31);
    d[i] = from_bits(bits(bf16_value(scale)) | (bits(v[i]) & ~kAbsMask));
  }
  return scale;
}

template <int Width>
std::uint16_t encode_finite(Lm<Width>, const float* v, int m, std::uint32_t absmax,
                            std::uint8_t* codes, float* d) {
  const int k = log2_ceil(m), b = 1 << k;
  const Exponent exponent = block_exponent(absmax);
  float y[kMaxBlock] = {}, t[kMaxBlock], q[kMaxBlock];
  unsigned code[kMaxBlock];
  for (int i = 0; i < m; ++i) y[i] = lm_flip(v[i] * exponent.down, i);
  for (int i = m; i < b; ++i) y[i] = lm_flip(0.0f, i);
  hadamard(y, b);
  for (int i = 0; i < b; ++i) t[i] = y[i] * y[i];
  const float gain = lm_gain(tree_sum(t, b), k);
  for (int i = 0; i < b; ++i) {
    code[i] = Lm<Width>::code(y[i] * gain);
    q[i] = Lm<Width>::level(code[i]);
    t[i] = y[i] * q[i];
  }
  const float yq = tree_sum(t, b);
  for (int i = 0; i < b; ++i) t[i] = q[i] * q[i];
  const std::uint16_t scale = lm_scale(yq, tree_sum(t, b), k, exponent);
  if (scale == kScaleZero) return scale;
  for (int i = 0; i < b; ++i) put_code(codes, Width, i, code[i]);
  for (int i = 0; i < b; ++i) q[i] = q[i] * bf16_value(scale);
  hadamard(q, b);
  for (int i = 0; i < m; ++i) d[i] = lm_flip(q[i], i);
  return scale;
}

// One block of m elements; true if its residual is kept.
template <class Codec>
bool encode_block(std::uint8_t codec, const float* v, int m, std::uint8_t* scale,
                  std::uint8_t* codes, float* e) {
  const int nbytes = (codes_in_block(codec, m) * Codec::kWidth + 7) / 8;
  std::fill_n(codes, nbytes, std::uint8_t{0});
  const std::uint32_t absmax = absmax_bits(v, m);
  if (absmax >= kInfBits) {
    store(scale, kBf16Nan);
    return true;
  }
  float d[kMaxBlock] = {};
  store(scale, encode_finite(Codec{}, v, m, absmax, codes, d));
  for (int i = 0; e && i < m; ++i) e[i] = is_lm(codec) ? lm_residual(v[i], d[i]) : v[i] - d[i];
  return false;
}

template <int Width, int Q, std::uint16_t Cap>
float code_value(Uniform<Width, Q, Cap>, const std::uint8_t* codes, int i) {
  return Uniform<Width, Q, Cap>::value(get_code(codes, Width, i));
}
inline float code_value(Fp8, const std::uint8_t* codes, int i) { return Fp8::value(codes[i]); }
inline float code_value(Sign, const std::uint8_t* codes, int i) {
  return get_code(codes, 1, i) ? -1.0f : 1.0f;
}
template <int Width>
float code_value(Lm<Width>, const std::uint8_t* codes, int i) {
  return Lm<Width>::level(get_code(codes, Width, i));
}

// The sum over wires of one block of m elements; wire(w) is its scale and codes in wire w.
template <class Codec, class Wire>
void sum_block(std::uint8_t codec, int count, Wire wire, int m, float* out) {
  const int b = codes_in_block(codec, m);
  float sum[kMaxBlock];
  const auto scale = [&](int w) { return bf16_value(load<std::uint16_t>(wire(w).scales)); };
  // A zero block's codes are 0, which lm* would read as -0: there sums start from +0.
  for (int i = 0; i < b; ++i) {
    const float d = code_value(Codec{}, wire(0).codes, i) * scale(0);
    sum[i] = is_lm(codec) ? 0.0f + d : d;
  }
  for (int w = 1; w < count; ++w) {
    const float s = scale(w);
    for (int i = 0; i < b; ++i) sum[i] = sum[i] + code_value(Codec{}, wire(w).codes, i) * s;
  }
  if (is_lm(codec)) {
    hadamard(sum, b);
    for (int i = 0; i < m; ++i) sum[i] = lm_flip(sum[i], i);
  }
  for (int i = 0; i < m; ++i) out[i] = canonical(sum[i]);
}

}  // namespace zcomm::scalar
