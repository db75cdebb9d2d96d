// The AVX-512 intrinsics that csrc/cpu uses, in portable C++: each function follows the operation
// that Intel's intrinsics guide gives for it, lane by lane. Included before avx512.cpp, which is
// then compiled for AVX2, it lets any x86-64 processor with AVX2 run the AVX-512 kernel set.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace avx512_emulation {

typedef float F16 __attribute__((vector_size(64)));
typedef std::int32_t I16 __attribute__((vector_size(64)));

template <class To, class From>
inline To as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// lane(i) for each of sixteen lanes.
template <class Lane>
inline __m512 floats(Lane lane) {
  F16 x;
  for (int i = 0; i < 16; ++i) x[i] = lane(i);
  return as<__m512>(x);
}
template <class Lane>
inline __m512i ints(Lane lane) {
  I16 x;
  for (int i = 0; i < 16; ++i) x[i] = static_cast<std::int32_t>(lane(i));
  return as<__m512i>(x);
}
inline float f(__m512 x, int i) { return as<F16>(x)[i]; }
inline std::int32_t s(__m512i x, int i) { return as<I16>(x)[i]; }
inline std::uint32_t u(__m512i x, int i) { return static_cast<std::uint32_t>(s(x, i)); }

// Memory and moves.
inline __m512 loadu_ps(const void* p) {
  __m512 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, sizeof x); }
inline void stream_ps(void* p, __m512 x) {
  if (reinterpret_cast<std::uintptr_t>(p) % 64) __builtin_trap();  // the real one faults
  std::memcpy(p, &x, sizeof x);
}
inline __m512i loadu_si512(const void* p) {
  __m512i x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, sizeof x); }
inline __m512 set1_ps(float x) {
  return floats([=](int) { return x; });
}
inline __m512i set1_epi32(int x) {
  return ints([=](int) { return x; });
}
template <class... Lanes>
inline __m512i setr_epi32(Lanes... lanes) {
  const int all[] = {lanes...};
  static_assert(sizeof all == 64);
  return loadu_si512(all);
}
inline __m512i setzero_si512() { return set1_epi32(0); }
inline __m512 castsi512_ps(__m512i x) { return as<__m512>(x); }
inline __m512i castps_si512(__m512 x) { return as<__m512i>(x); }
inline __m256 castps512_ps256(__m512 x) {
  __m256 low;
  std::memcpy(&low, &x, sizeof low);
  return low;
}
inline __m256 extractf32x8_ps(__m512 x, int half) {
  __m256 y;
  std::memcpy(&y, reinterpret_cast<const char*>(&x) + 32 * (half & 1), sizeof y);
  return y;
}

// Floats. MINPS and MAXPS give the second operand for NaN and for zeros of both signs.
inline __m512 min_ps(__m512 a, __m512 b) {
  return floats([=](int i) { return f(a, i) < f(b, i) ? f(a, i) : f(b, i); });
}
inline __m512 max_ps(__m512 a, __m512 b) {
  return floats([=](int i) { return f(a, i) > f(b, i) ? f(a, i) : f(b, i); });
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return floats([=](int i) { return __builtin_fmaf(f(a, i), f(b, i), f(c, i)); });
}
inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return floats([=](int i) { return __builtin_fmaf(-f(a, i), f(b, i), f(c, i)); });
}

// Conversions. Out of range and NaN become the least integer.
inline std::int32_t to_int(float rounded) {
  return rounded >= -0x1p31f && rounded < 0x1p31f ? static_cast<std::int32_t>(rounded) : INT32_MIN;
}
inline __m512i cvtps_epi32(__m512 x) {
  return ints([=](int i) { return to_int(std::nearbyintf(f(x, i))); });
}
template <int Rounding>
inline __m512i cvt_roundps_epi32(__m512 x) {
  static_assert(Rounding == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  return ints([=](int i) { return to_int(std::floor(f(x, i))); });
}
inline __m512 cvtepi32_ps(__m512i x) {
  return floats([=](int i) { return static_cast<float>(s(x, i)); });
}
inline __m512i cvtepi8_epi32(__m128i x) {
  std::int8_t b[16];
  std::memcpy(b, &x, sizeof b);
  return ints([&](int i) { return b[i]; });
}
inline __m512i cvtepu8_epi32(__m128i x) {
  std::uint8_t b[16];
  std::memcpy(b, &x, sizeof b);
  return ints([&](int i) { return b[i]; });
}
inline __m512i cvtepu16_epi32(__m256i x) {
  std::uint16_t h[16];
  std::memcpy(h, &x, sizeof h);
  return ints([&](int i) { return h[i]; });
}
inline __m128i cvtepi32_epi8(__m512i x) {  // truncates
  std::uint8_t b[16];
  for (int i = 0; i < 16; ++i) b[i] = static_cast<std::uint8_t>(u(x, i));
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
}
inline __m128i cvtsepi32_epi8(__m512i x) {  // saturates
  std::int8_t b[16];
  for (int i = 0; i < 16; ++i) {
    b[i] = static_cast<std::int8_t>(s(x, i) > 127 ? 127 : s(x, i) < -128 ? -128 : s(x, i));
  }
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
}
inline __m256i cvtepi32_epi16(__m512i x) {  // truncates
  std::uint16_t h[16];
  for (int i = 0; i < 16; ++i) h[i] = static_cast<std::uint16_t>(u(x, i));
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h));
}
inline __m512 cvtph_ps(__m256i x) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  __m512 y;
  std::memcpy(&y, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&y) + 32, &high, sizeof high);
  return y;
}
template <int Rounding>
inline __m256i cvtps_ph(__m512 x) {
  const __m128i low = _mm256_cvtps_ph(castps512_ps256(x), Rounding);
  const __m128i high = _mm256_cvtps_ph(extractf32x8_ps(x, 1), Rounding);
  return _mm256_set_m128i(high, low);
}

// Integers.
inline __m512i add_epi32(__m512i a, __m512i b) {
  return ints([=](int i) { return u(a, i) + u(b, i); });
}
inline __m512i max_epi32(__m512i a, __m512i b) {
  return ints([=](int i) { return s(a, i) > s(b, i) ? s(a, i) : s(b, i); });
}
inline __m512i srlv_epi32(__m512i a, __m512i count) {
  return ints([=](int i) { return u(count, i) < 32 ? u(a, i) >> u(count, i) : 0u; });
}
inline int reduce_max_epi32(__m512i x) {
  std::int32_t most = s(x, 0);
  for (int i = 1; i < 16; ++i) most = s(x, i) > most ? s(x, i) : most;
  return most;
}

inline __m512i srli_epi32(__m512i a, unsigned count) {
  return ints([=](int i) { return count < 32 ? u(a, i) >> count : 0u; });
}

// Bytes and 16-bit lanes. What works within quarters does so with each half's AVX2 instruction.
inline __m256i half(__m512i x, int i) {
  __m256i y;
  std::memcpy(&y, reinterpret_cast<const char*>(&x) + 32 * (i & 1), sizeof y);
  return y;
}
inline __m512i join(__m256i low, __m256i high) {
  __m512i x;
  std::memcpy(&x, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&x) + 32, &high, sizeof high);
  return x;
}
template <class Op>
inline __m512i by_halves(__m512i a, __m512i b, Op op) {
  return join(op(half(a, 0), half(b, 0)), op(half(a, 1), half(b, 1)));
}
inline __m512i set1_epi16(short x) { return join(_mm256_set1_epi16(x), _mm256_set1_epi16(x)); }
inline __m512i broadcast_i32x4(__m128i x) {
  return join(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x));
}
inline __m256i castsi512_si256(__m512i x) { return half(x, 0); }
inline __m256i extracti64x4_epi64(__m512i x, int i) { return half(x, i); }
inline __m256i cvtepi16_epi8(__m512i x) {  // truncates
  std::uint16_t h[32];
  std::uint8_t b[32];
  std::memcpy(h, &x, sizeof h);
  for (int i = 0; i < 32; ++i) b[i] = static_cast<std::uint8_t>(h[i]);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
}
inline __mmask64 movepi8_mask(__m512i x) {
  const auto low = static_cast<std::uint32_t>(_mm256_movemask_epi8(half(x, 0)));
  const auto high = static_cast<std::uint32_t>(_mm256_movemask_epi8(half(x, 1)));
  return low | static_cast<std::uint64_t>(high) << 32;
}
inline __m512i movm_epi8(__mmask64 m) {
  std::uint8_t b[64];
  for (int i = 0; i < 64; ++i) b[i] = m >> i & 1 ? 0xff : 0;
  return loadu_si512(b);
}
inline __m512i maskz_loadu_epi32(__mmask16 m, const void* p) {
  std::int32_t x[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (m >> i & 1) std::memcpy(x + i, static_cast<const char*>(p) + 4 * i, 4);
  }
  return loadu_si512(x);
}

// Permutations. permute_ps and shuffle_ps work in quarters of four lanes,
// shuffle_f32x4 on whole quarters.
inline __m512 permute_ps(__m512 x, int control) {
  return floats([=](int i) { return f(x, i / 4 * 4 + (control >> (i % 4 * 2) & 3)); });
}
inline __m512 shuffle_ps(__m512 a, __m512 b, int control) {
  return floats(
      [=](int i) { return f(i % 4 < 2 ? a : b, i / 4 * 4 + (control >> (i % 4 * 2) & 3)); });
}
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int control) {
  return floats([=](int i) {
    const int quarter = i / 4, from = control >> (quarter * 2) & 3;
    return f(quarter < 2 ? a : b, from * 4 + i % 4);
  });
}
inline __m512i permutexvar_epi32(__m512i index, __m512i x) {
  return ints([=](int i) { return s(x, s(index, i) & 15); });
}
inline __m512 permutexvar_ps(__m512i index, __m512 x) {
  return floats([=](int i) { return f(x, s(index, i) & 15); });
}

// Masks: bit i for lane i.
template <class Bit>
inline __mmask16 mask(Bit bit) {
  unsigned m = 0;
  for (int i = 0; i < 16; ++i) m |= (bit(i) ? 1u : 0u) << i;
  return static_cast<__mmask16>(m);
}
inline __mmask16 movepi32_mask(__m512i x) {
  return mask([=](int i) { return s(x, i) < 0; });
}
template <int Predicate>
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
  static_assert(Predicate == _CMP_GT_OQ || Predicate == _CMP_UNORD_Q);
  return mask([=](int i) {
    return Predicate == _CMP_GT_OQ ? f(a, i) > f(b, i) : __builtin_isunordered(f(a, i), f(b, i));
  });
}
inline __m512 mask_mov_ps(__m512 source, __mmask16 m, __m512 x) {
  return floats([=](int i) { return m >> i & 1 ? f(x, i) : f(source, i); });
}
inline __m512i mask_broadcastd_epi32(__m512i source, __mmask16 m, __m128i x) {
  const auto word = static_cast<std::uint32_t>(_mm_cvtsi128_si32(x));
  return ints([=](int i) { return m >> i & 1 ? word : u(source, i); });
}
inline __m512i mask_or_epi32(__m512i source, __mmask16 m, __m512i a, __m512i b) {
  return ints([=](int i) { return m >> i & 1 ? u(a, i) | u(b, i) : u(source, i); });
}
inline __m512i mask_xor_epi32(__m512i source, __mmask16 m, __m512i a, __m512i b) {
  return ints([=](int i) { return m >> i & 1 ? u(a, i) ^ u(b, i) : u(source, i); });
}
inline __m512i maskz_compress_epi32(__mmask16 m, __m512i x) {
  std::int32_t packed[16] = {};
  for (int i = 0, n = 0; i < 16; ++i) {
    if (m >> i & 1) packed[n++] = s(x, i);
  }
  return loadu_si512(packed);
}

}  // namespace avx512_emulation

#define _cvtmask16_u32(m) static_cast<unsigned>(m)
#define _cvtu32_mask16(x) static_cast<__mmask16>(x)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, predicate) avx512_emulation::cmp_ps_mask<predicate>(a, b)
#undef _mm512_cvt_roundps_epi32
#define _mm512_cvt_roundps_epi32(x, rounding) avx512_emulation::cvt_roundps_epi32<rounding>(x)
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8 avx512_emulation::cvtsepi32_epi8
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) avx512_emulation::cvtps_ph<rounding>(x)
#undef _mm512_loadu_ps
#define _mm512_loadu_ps avx512_emulation::loadu_ps
#undef _mm512_storeu_ps
#define _mm512_storeu_ps avx512_emulation::storeu_ps
#undef _mm512_stream_ps
#define _mm512_stream_ps avx512_emulation::stream_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 avx512_emulation::loadu_si512
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 avx512_emulation::storeu_si512
#undef _mm512_set1_ps
#define _mm512_set1_ps avx512_emulation::set1_ps
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 avx512_emulation::set1_epi32
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 avx512_emulation::setr_epi32
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 avx512_emulation::setzero_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps avx512_emulation::castsi512_ps
#undef _mm512_castps_si512
#define _mm512_castps_si512 avx512_emulation::castps_si512
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 avx512_emulation::castps512_ps256
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps avx512_emulation::extractf32x8_ps
#undef _mm512_min_ps
#define _mm512_min_ps avx512_emulation::min_ps
#undef _mm512_max_ps
#define _mm512_max_ps avx512_emulation::max_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps avx512_emulation::fmadd_ps
#undef _mm512_fnmadd_ps
#define _mm512_fnmadd_ps avx512_emulation::fnmadd_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 avx512_emulation::cvtps_epi32
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps avx512_emulation::cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 avx512_emulation::cvtepi8_epi32
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 avx512_emulation::cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 avx512_emulation::cvtepu16_epi32
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 avx512_emulation::cvtepi32_epi8
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 avx512_emulation::cvtepi32_epi16
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps avx512_emulation::cvtph_ps
#undef _mm512_add_epi32
#define _mm512_add_epi32 avx512_emulation::add_epi32
#undef _mm512_max_epi32
#define _mm512_max_epi32 avx512_emulation::max_epi32
#undef _mm512_srlv_epi32
#define _mm512_srlv_epi32 avx512_emulation::srlv_epi32
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32 avx512_emulation::reduce_max_epi32
#undef _mm512_permute_ps
#define _mm512_permute_ps avx512_emulation::permute_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 avx512_emulation::shuffle_f32x4
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps avx512_emulation::permutexvar_ps
#undef _mm512_movepi32_mask
#define _mm512_movepi32_mask avx512_emulation::movepi32_mask
#undef _mm512_mask_mov_ps
#define _mm512_mask_mov_ps avx512_emulation::mask_mov_ps
#undef _mm512_mask_broadcastd_epi32
#define _mm512_mask_broadcastd_epi32 avx512_emulation::mask_broadcastd_epi32
#undef _mm512_mask_or_epi32
#define _mm512_mask_or_epi32 avx512_emulation::mask_or_epi32
#undef _mm512_mask_xor_epi32
#define _mm512_mask_xor_epi32 avx512_emulation::mask_xor_epi32
#undef _mm512_maskz_compress_epi32
#define _mm512_maskz_compress_epi32 avx512_emulation::maskz_compress_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 avx512_emulation::srli_epi32
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 avx512_emulation::set1_epi16
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 avx512_emulation::broadcast_i32x4
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256 avx512_emulation::castsi512_si256
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 avx512_emulation::extracti64x4_epi64
#undef _mm512_cvtepi16_epi8
#define _mm512_cvtepi16_epi8 avx512_emulation::cvtepi16_epi8
#undef _mm512_movepi8_mask
#define _mm512_movepi8_mask avx512_emulation::movepi8_mask
#undef _mm512_movm_epi8
#define _mm512_movm_epi8 avx512_emulation::movm_epi8
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 avx512_emulation::maskz_loadu_epi32
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps avx512_emulation::shuffle_ps
#undef _mm512_permutexvar_epi32
#define _mm512_permutexvar_epi32 avx512_emulation::permutexvar_epi32
#define ZC_BY_HALVES(op, a, b) \
  avx512_emulation::by_halves(a, b, [](__m256i x, __m256i y) { return op(x, y); })
#undef _mm512_packs_epi32
#define _mm512_packs_epi32(a, b) ZC_BY_HALVES(_mm256_packs_epi32, a, b)
#undef _mm512_packs_epi16
#define _mm512_packs_epi16(a, b) ZC_BY_HALVES(_mm256_packs_epi16, a, b)
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8(a, b) ZC_BY_HALVES(_mm256_shuffle_epi8, a, b)
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8(a, b) ZC_BY_HALVES(_mm256_unpacklo_epi8, a, b)
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8(a, b) ZC_BY_HALVES(_mm256_unpackhi_epi8, a, b)
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16(a, b) ZC_BY_HALVES(_mm256_unpacklo_epi16, a, b)
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16(a, b) ZC_BY_HALVES(_mm256_unpackhi_epi16, a, b)
#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16(a, b) ZC_BY_HALVES(_mm256_maddubs_epi16, a, b)
