// Eight lanes of AVX2. Included inside the namespace and target region of avx2.cpp.
//
// A fused multiply-add appears only where its product is exact, so that it rounds like the two
// separate operations of the format.

constexpr int kLanes = 8;
typedef float F __attribute__((vector_size(32)));
typedef std::int32_t I __attribute__((vector_size(32)));
typedef std::uint32_t U __attribute__((vector_size(32)));
typedef std::uint8_t B __attribute__((vector_size(32)));

INLINE F load_f(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
INLINE void store_f(void* p, F x) { _mm256_storeu_ps(static_cast<float*>(p), x); }
INLINE void stream_f(float* p, F x) { _mm256_stream_ps(p, x); }
INLINE I load_i(const void* p) { return (I)_mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE F splat(float x) { return _mm256_set1_ps(x); }
INLINE I splat_i(int x) { return (I)_mm256_set1_epi32(x); }
INLINE F vmin(F a, F b) { return _mm256_min_ps(a, b); }
INLINE F vmax(F a, F b) { return _mm256_max_ps(a, b); }
INLINE I imax(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE I round_int(F x) { return (I)_mm256_cvtps_epi32(x); }
INLINE F to_float(I x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE F exact_madd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F exact_nmadd(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE F canonical_nan(F x) {
  return _mm256_blendv_ps(x, splat(from_bits(kNanBits)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// The eight sign bits, lane 0 lowest.
INLINE unsigned sign_bits(F x) { return static_cast<unsigned>(_mm256_movemask_ps(x)); }
// x with its sign flipped where bit i of the byte at p is set.
INLINE F flip_by_bits(F x, const std::uint8_t* p) {
  const I shifted = splat_i(*p) << I{31, 30, 29, 28, 27, 26, 25, 24};
  return (F)((I)x ^ (shifted & splat_i(INT32_MIN)));
}

INLINE F load_bf16(const void* p) {
  return (F)((I)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))) << 16);
}
INLINE F load_fp16(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
INLINE void store_u16(void* p, U x) {  // the low halves; the high ones are 0
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}
INLINE U fp16_bits(F x) {
  return (U)_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE std::uint32_t hmax(I x) {
  __m128i m =
      _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
}
// The last three steps of the halving tree.
INLINE float lane_tree(F x) {
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  t = _mm_add_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}

// Hadamard strides inside a vector: lower lane a + b, upper lane a - b. The product is exact.
constexpr int kLaneStrides = 3;
template <int I>
INLINE F lane_butterfly(F x) {
  if constexpr (I == 0)
    return _mm256_fmadd_ps(x, F{1, -1, 1, -1, 1, -1, 1, -1}, _mm256_permute_ps(x, 0xb1));
  if constexpr (I == 1)
    return _mm256_fmadd_ps(x, F{1, 1, -1, -1, 1, 1, -1, -1}, _mm256_permute_ps(x, 0x4e));
  return _mm256_fmadd_ps(x, F{1, 1, 1, 1, -1, -1, -1, -1}, _mm256_permute2f128_ps(x, x, 1));
}

// The lanes of each of four vectors folded to one number, in the order of the halving tree.
template <class Op>
INLINE __m128 fold4(const F* t, Op op) {
  const F ab =
      op(_mm256_permute2f128_ps(t[0], t[1], 0x20), _mm256_permute2f128_ps(t[0], t[1], 0x31));
  const F cd =
      op(_mm256_permute2f128_ps(t[2], t[3], 0x20), _mm256_permute2f128_ps(t[2], t[3], 0x31));
  F x = op(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  x = op(x, _mm256_permute_ps(x, 0xb1));  // a a c c, b b d d
  return _mm_blend_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1), 0xa);
}

INLINE B repeat_16(const std::uint8_t* p) {
  return (B)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Within the halves of a vector.
INLINE B shuffle_bytes(B x, B i) { return (B)_mm256_shuffle_epi8((__m256i)x, (__m256i)i); }
INLINE B zip_low_bytes(B x, B y) { return (B)_mm256_unpacklo_epi8((__m256i)x, (__m256i)y); }
INLINE B zip_high_bytes(B x, B y) { return (B)_mm256_unpackhi_epi8((__m256i)x, (__m256i)y); }
INLINE B zip_low_pairs(B x, B y) { return (B)_mm256_unpacklo_epi16((__m256i)x, (__m256i)y); }
INLINE B zip_high_pairs(B x, B y) { return (B)_mm256_unpackhi_epi16((__m256i)x, (__m256i)y); }
// All ones where the sign bit is set.
INLINE B all_signs(B x) { return (B)_mm256_cmpgt_epi8(_mm256_setzero_si256(), (__m256i)x); }
INLINE I floor_int(F x) { return (I)_mm256_cvtps_epi32(_mm256_floor_ps(x)); }

// The lanes of four vectors as signed bytes: within each half of a vector four of each in turn.
INLINE B pack_halves(const I* c) {
  return (B)_mm256_packs_epi16(_mm256_packs_epi32((__m256i)c[0], (__m256i)c[1]),
                               _mm256_packs_epi32((__m256i)c[2], (__m256i)c[3]));
}
// The same bytes in order.
INLINE __m256i join_halves(B bytes) {
  return _mm256_permutevar8x32_epi32((__m256i)bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

#include "cpu/store_codes.h"

template <int Width>
INLINE void pack32(const I* c, std::uint8_t* out) {
  store_codes(std::integral_constant<int, Width>{}, join_halves(pack_halves(c)), out);
}

// Stores the codes of `Vectors` vectors that pack_halves() left; higher bits are 0.
template <int Width, int Vectors>
INLINE void store_halves(B bytes, std::uint8_t* out) {
  static_assert(Vectors == 4);
  if constexpr (Width == 4) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi16(0x1001));
    const __m256i packed = _mm256_packus_epi16(pairs, pairs);
    const __m128i joined =
        _mm_unpacklo_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), joined);
  } else {
    store_codes(std::integral_constant<int, Width>{}, join_halves(bytes), out);
  }
}

// 32 bytes, sign-extended, as floats.
INLINE void unpack32_int8(const std::uint8_t* codes, F* q) {
  for (int i = 0; i < 4; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
    q[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
}
INLINE void unpack32_u8(const std::uint8_t* codes, I* c) {
  for (int i = 0; i < 4; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
    c[i] = (I)_mm256_cvtepu8_epi32(bytes);
  }
}

// 2^Width floats of 8 significant bits.
template <int Width>
struct Lut {
  F table;
  explicit INLINE Lut(const float* values) {
    for (int i = 0; i < kLanes; ++i) table[i] = values[i % (1 << Width)];
  }
};
template <>
struct Lut<4> {
  ByteLut bytes;
  explicit INLINE Lut(const float* values) : bytes(values, 16) {}
};

INLINE void lookup32(const Lut<4>& lut, const std::uint8_t* codes, F* q) {
  // Bytes to 16-bit lanes, in the order of pack_halves(); then a nibble to each byte.
  const __m256i order =
      _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 2, -1, 3, -1, 6,
                       -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i c = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(packed), order);
  lut.bytes((B)(_mm256_or_si256(c, _mm256_slli_epi16(c, 4))) & 15, q);
}
INLINE void lookup32(const Lut<3>& lut, const std::uint8_t* codes, F* q) {
  for (int i = 0; i < 4; ++i) {
    // The last three bytes are read from one byte before, so as not to pass the end.
    const int three = i < 3 ? load<int>(codes + 3 * i) : load<int>(codes + 8) >> 8;
    const __m256i index =
        _mm256_srlv_epi32((__m256i)splat_i(three), _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21));
    q[i] = _mm256_permutevar8x32_ps(lut.table, index);
  }
}
INLINE void lookup32(const Lut<2>& lut, const std::uint8_t* codes, F* q) {
  for (int i = 0; i < 4; ++i) {
    const int two = load<std::uint16_t>(codes + 2 * i);
    const __m256i index =
        _mm256_srlv_epi32((__m256i)splat_i(two), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    q[i] = _mm256_permutevar_ps(lut.table, index);
  }
}

// lm4 only: 64 codes as bytes, then as halves of floats. Vector p, lane d: code 32 * d2 + 16 * p2 +
// 8 * d1 + 4 * d0 + 2 * p1 + p0, where p1 is bit 1 of p.
template <int Width>
constexpr bool kHasColumns = Width == 4;
constexpr bool kLutScales = false;  // a product has 16 bits, a byte shuffle's values 8

template <int Width>
INLINE void lookup_columns(const Lut<Width>& lut, const std::uint8_t* codes, F* q) {
  const B packed = (B)load_i(codes);
  for (int odd = 0; odd < 2; ++odd) {
    const B c = odd ? packed >> 4 : packed & 15;
    const B lo = shuffle_bytes(lut.bytes.low, c), hi = shuffle_bytes(lut.bytes.high, c);
    for (int upper = 0; upper < 2; ++upper) {
      const U pairs = (U)(upper ? zip_high_bytes(lo, hi) : zip_low_bytes(lo, hi));
      q[4 * upper + odd] = (F)(pairs << 16);
      q[4 * upper + 2 + odd] = (F)(pairs & 0xffff0000u);
    }
  }
}

// The strides of H that fit into the eight vectors of lookup_columns().
INLINE void hadamard_columns(F* x) {
  const auto first = [&](F a, F) ALWAYS { return a; };
  const auto second = [&](F, F b) ALWAYS { return b; };
  const auto even = [&](F a, F b) ALWAYS { return (F)_mm256_shuffle_ps(a, b, 0x88); };
  const auto odd = [&](F a, F b) ALWAYS { return (F)_mm256_shuffle_ps(a, b, 0xdd); };
  const auto low = [&](F a, F b) ALWAYS { return (F)_mm256_permute2f128_ps(a, b, 0x20); };
  const auto high = [&](F a, F b) ALWAYS { return (F)_mm256_permute2f128_ps(a, b, 0x31); };
  swap_butterflies<1>(x, first, second);
  swap_butterflies<2>(x, first, second);
  swap_butterflies<1>(x, even, odd);  // stride 4 takes the place of stride 1
  swap_butterflies<2>(x, even, odd);  // 8 that of 2
  swap_butterflies<4>(x, first, second);
  swap_butterflies<1>(x, low, high);  // 32 that of 4
}

// Appends the lanes of x where mask is set.
INLINE std::size_t append(std::uint32_t* to, I x, I mask) {
  const unsigned m = sign_bits((F)mask);
  const std::uint64_t spread = _pdep_u64(m, 0x0101010101010101ull) * 0xff;
  const std::uint64_t order = _pext_u64(0x0706050403020100ull, spread);
  const __m256i index = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(order)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_permutevar8x32_epi32((__m256i)x, index));
  return static_cast<std::size_t>(__builtin_popcount(m));
}
