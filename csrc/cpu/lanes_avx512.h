// Sixteen lanes of AVX-512. Included inside the namespace and target region of avx512.cpp.
//
// A fused multiply-add appears only where its product is exact, so that it rounds like the two
// separate operations of the format.

constexpr int kLanes = 16;
typedef float F __attribute__((vector_size(64)));
typedef std::int32_t I __attribute__((vector_size(64)));
typedef std::uint32_t U __attribute__((vector_size(64)));

INLINE F load_f(const void* p) { return _mm512_loadu_ps(p); }
INLINE void store_f(void* p, F x) { _mm512_storeu_ps(p, x); }
INLINE void stream_f(float* p, F x) { _mm512_stream_ps(p, x); }
INLINE I load_i(const void* p) { return (I)_mm512_loadu_si512(p); }
INLINE F splat(float x) { return _mm512_set1_ps(x); }
INLINE I splat_i(int x) { return (I)_mm512_set1_epi32(x); }
INLINE F vmin(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F vmax(F a, F b) { return _mm512_max_ps(a, b); }
INLINE I imax(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE I round_int(F x) { return (I)_mm512_cvtps_epi32(x); }
INLINE F to_float(I x) { return _mm512_cvtepi32_ps((__m512i)x); }
INLINE F exact_madd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F exact_nmadd(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE F canonical_nan(F x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), splat(from_bits(kNanBits)));
}

// The sixteen sign bits, lane 0 lowest.
INLINE unsigned sign_bits(F x) {
  return _cvtmask16_u32(_mm512_movepi32_mask(_mm512_castps_si512(x)));
}
// x with its sign flipped where bit i of the two bytes at p is set.
INLINE F flip_by_bits(F x, const std::uint8_t* p) {
  const __mmask16 mask = _cvtu32_mask16(load<std::uint16_t>(p));
  const __m512i u = _mm512_castps_si512(x);
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(u, mask, u, _mm512_set1_epi32(INT32_MIN)));
}

INLINE __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
INLINE F load_bf16(const void* p) { return (F)((I)_mm512_cvtepu16_epi32(load_256(p)) << 16); }
INLINE F load_fp16(const void* p) { return _mm512_cvtph_ps(load_256(p)); }
INLINE void store_u16(void* p, U x) {  // the low halves; the high ones are 0
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
}
INLINE U fp16_bits(F x) {
  return (U)_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE std::uint32_t hmax(I x) {
  return static_cast<std::uint32_t>(_mm512_reduce_max_epi32((__m512i)x));
}
// The last four steps of the halving tree.
INLINE float lane_tree(F x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  t = _mm_add_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}

// The Hadamard strides inside a vector: lower lane a + b, upper lane a - b. The product is exact.
INLINE F lane_butterflies(F x) {
  F other = _mm512_permute_ps(x, 0xb1);
  x = _mm512_fmadd_ps(x, F{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1}, other);
  other = _mm512_permute_ps(x, 0x4e);
  x = _mm512_fmadd_ps(x, F{1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1}, other);
  other = _mm512_shuffle_f32x4(x, x, 0xb1);
  x = _mm512_fmadd_ps(x, F{1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1}, other);
  other = _mm512_shuffle_f32x4(x, x, 0x4e);
  return _mm512_fmadd_ps(x, F{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}, other);
}

// 32 codes of 16 lanes x 2 to 32 bytes in order.
INLINE __m256i pack_bytes(const I* c) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)c[1]), _mm512_cvtepi32_epi8((__m512i)c[0]));
}

#include "cpu/store_codes.h"

template <int Width>
INLINE void pack32(const I* c, std::uint8_t* out) {
  store_codes(std::integral_constant<int, Width>{}, pack_bytes(c), out);
}

INLINE __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// 32 bytes, sign-extended, as floats.
INLINE void unpack32_int8(const std::uint8_t* codes, F* q) {
  for (int i = 0; i < 2; ++i) {
    q[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(codes + 16 * i)));
  }
}
INLINE void unpack32_u8(const std::uint8_t* codes, I* c) {
  for (int i = 0; i < 2; ++i) c[i] = (I)_mm512_cvtepu8_epi32(load_128(codes + 16 * i));
}

// All 2^Width values in one register, repeated.
template <int Width>
struct Lut {
  F table;
  explicit INLINE Lut(const float* values) {
    for (int i = 0; i < kLanes; ++i) table[i] = values[i % (1 << Width)];
  }
  INLINE F operator()(__m512i index) const { return _mm512_permutexvar_ps(index, table); }
};

// Lanes 0 ... 7 get the word at `low`, the others that at `high`. A load gives a word to all lanes;
// from a general register that would take a shuffle.
INLINE __m512i two_words(const std::uint8_t* low, const std::uint8_t* high) {
  const __m512i all = _mm512_set1_epi32(load<int>(low));
  return _mm512_mask_broadcastd_epi32(all, 0xff00, _mm_cvtsi32_si128(load<int>(high)));
}

// Codes into the low bits of lanes. Higher bits of a lane are those of later codes; a permute over
// repeated tables ignores them.
INLINE void lookup32(const Lut<4>& lut, const std::uint8_t* codes, F* q) {
  const __m512i shifts =
      _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  q[0] = lut(_mm512_srlv_epi32(two_words(codes, codes + 4), shifts));
  q[1] = lut(_mm512_srlv_epi32(two_words(codes + 8, codes + 12), shifts));
}
INLINE void lookup32(const Lut<3>& lut, const std::uint8_t* codes, F* q) {
  const __m512i shifts = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 3, 6, 9, 12, 15, 18, 21);
  q[0] = lut(_mm512_srlv_epi32(two_words(codes, codes + 3), shifts));
  // The last three bytes are read from one byte before, so as not to pass the end.
  const __m512i last = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 8, 11, 14, 17, 20, 23, 26, 29);
  q[1] = lut(_mm512_srlv_epi32(two_words(codes + 6, codes + 8), last));
}
INLINE void lookup32(const Lut<2>& lut, const std::uint8_t* codes, F* q) {
  const __m512i shifts =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  q[0] = lut(_mm512_srlv_epi32(_mm512_set1_epi32(load<int>(codes)), shifts));
  q[1] = lut(_mm512_srlv_epi32(_mm512_set1_epi32(load<int>(codes + 4)), shifts));
}

// 32 values to packed codes and levels; the cells are found on bytes, 32 at a time.
template <int Width>
struct LmQuantiser {
  Lut<Width> levels;

  INLINE LmQuantiser() : levels(Lm<Width>::levels()) {}
  static INLINE __m128i floor_bytes(F x) {
    return _mm512_cvtsepi32_epi8(
        _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }
  INLINE void operator()(const F* y, F gain, F* level, std::uint8_t* codes) const {
    const __m256i t = _mm256_set_m128i(floor_bytes(y[1] * gain), floor_bytes(y[0] * gain));
    const __m256i bytes = lm_codes<Width>(t);
    level[0] = levels(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)));
    level[1] = levels(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)));
    store_codes(std::integral_constant<int, Width>{}, bytes, codes);
  }
};

// Appends the lanes of x where mask is set.
INLINE std::size_t append(std::uint32_t* to, I x, I mask) {
  const __mmask16 m = _mm512_movepi32_mask((__m512i)mask);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(m, (__m512i)x));
  return static_cast<std::size_t>(__builtin_popcount(_cvtmask16_u32(m)));
}
