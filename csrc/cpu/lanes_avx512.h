// Sixteen lanes of AVX-512. Included inside the namespace and target region of avx512.cpp.
//
// A fused multiply-add appears only where its product is exact, so that it rounds like the two
// separate operations of the format.

constexpr int kLanes = 16;
typedef float F __attribute__((vector_size(64)));
typedef std::int32_t I __attribute__((vector_size(64)));
typedef std::uint32_t U __attribute__((vector_size(64)));
typedef std::uint8_t B __attribute__((vector_size(64)));

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

// Hadamard strides inside a vector: lower lane a + b, upper lane a - b. The product is exact.
constexpr int kLaneStrides = 4;
template <int I>
INLINE F lane_butterfly(F x) {
  if constexpr (I == 0)
    return _mm512_fmadd_ps(x, F{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                           _mm512_permute_ps(x, 0xb1));
  if constexpr (I == 1)
    return _mm512_fmadd_ps(x, F{1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                           _mm512_permute_ps(x, 0x4e));
  if constexpr (I == 2)
    return _mm512_fmadd_ps(x, F{1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                           _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_fmadd_ps(x, F{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
                         _mm512_shuffle_f32x4(x, x, 0x4e));
}

// 32 codes of 16 lanes x 2 to 32 bytes in order.
INLINE __m256i pack_bytes(const I* c) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)c[1]), _mm512_cvtepi32_epi8((__m512i)c[0]));
}

// The lanes of each of four vectors folded to one number, in the order of the halving tree.
template <class Op>
INLINE __m128 fold4(const F* t, Op op) {
  const F ab = op(_mm512_shuffle_f32x4(t[0], t[1], 0x44), _mm512_shuffle_f32x4(t[0], t[1], 0xee));
  const F cd = op(_mm512_shuffle_f32x4(t[2], t[3], 0x44), _mm512_shuffle_f32x4(t[2], t[3], 0xee));
  F x = op(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  x = op(x, _mm512_permute_ps(x, 0x4e));
  x = op(x, _mm512_permute_ps(x, 0xb1));  // a quarter for each
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm256_castps256_ps128(_mm512_castps512_ps256(_mm512_permutexvar_ps(first, x)));
}

INLINE B repeat_16(const std::uint8_t* p) {
  return (B)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Within the quarters of a vector.
INLINE B shuffle_bytes(B x, B i) { return (B)_mm512_shuffle_epi8((__m512i)x, (__m512i)i); }
INLINE B zip_low_bytes(B x, B y) { return (B)_mm512_unpacklo_epi8((__m512i)x, (__m512i)y); }
INLINE B zip_high_bytes(B x, B y) { return (B)_mm512_unpackhi_epi8((__m512i)x, (__m512i)y); }
INLINE B zip_low_pairs(B x, B y) { return (B)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y); }
INLINE B zip_high_pairs(B x, B y) { return (B)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y); }
// All ones where the sign bit is set.
INLINE B all_signs(B x) { return (B)_mm512_movm_epi8(_mm512_movepi8_mask((__m512i)x)); }
INLINE I floor_int(F x) {
  return (I)_mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

// The lanes of four vectors as signed bytes: within each quarter of a vector four of each in turn.
INLINE B pack_halves(const I* c) {
  return (B)_mm512_packs_epi16(_mm512_packs_epi32((__m512i)c[0], (__m512i)c[1]),
                               _mm512_packs_epi32((__m512i)c[2], (__m512i)c[3]));
}
// The same bytes in order.
INLINE __m512i join_halves(B bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, (__m512i)bytes);
}

#include "cpu/store_codes.h"

// Stores the codes of `Vectors` vectors that pack_halves() left; higher bits are 0.
template <int Width, int Vectors>
INLINE void store_halves(B bytes, std::uint8_t* out) {
  const __m512i joined = join_halves(bytes);
  if constexpr (Width == 4 && Vectors == 4) {
    const __m512i pairs = _mm512_maddubs_epi16(joined, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
  } else {
    constexpr std::integral_constant<int, Width> width;
    store_codes(width, _mm512_castsi512_si256(joined), out);
    if (Vectors == 4) store_codes(width, _mm512_extracti64x4_epi64(joined, 1), out + 4 * Width);
  }
}

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
  explicit INLINE Lut(F values) : table(values) {}
  INLINE Lut times(F s) const { return Lut(table * s); }
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

// 128 codes to 16 lanes of 8, each in the lowest bits.
INLINE __m512i lanes_of_8(const Lut<4>&, const std::uint8_t* codes) {
  return _mm512_loadu_si512(codes);
}
INLINE __m512i lanes_of_8(const Lut<3>&, const std::uint8_t* codes) {
  const __m512i quarters =
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11),
                               _mm512_maskz_loadu_epi32(0x0fff, codes));
  static constexpr std::uint8_t order[16] = {0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11};
  return (__m512i)shuffle_bytes((B)quarters, repeat_16(order));
}
INLINE __m512i lanes_of_8(const Lut<2>&, const std::uint8_t* codes) {
  return _mm512_cvtepu16_epi32(load_256(codes));
}

template <int Width>
constexpr bool kHasColumns = true;
constexpr bool kLutScales = true;

// Vector p, lane d: code 8 * d + p.
template <int Width>
INLINE void lookup_columns(const Lut<Width>& lut, const std::uint8_t* codes, F* q) {
  const U words = (U)lanes_of_8(lut, codes);
  for (int p = 0; p < 8; ++p) q[p] = lut((__m512i)(words >> (Width * p)));
}

// The strides of H that fit into the eight vectors of lookup_columns().
INLINE void hadamard_columns(F* x) {
  const auto first = [&](F a, F) ALWAYS { return a; };
  const auto second = [&](F, F b) ALWAYS { return b; };
  const auto even = [&](F a, F b) ALWAYS { return (F)_mm512_shuffle_ps(a, b, 0x88); };
  const auto odd = [&](F a, F b) ALWAYS { return (F)_mm512_shuffle_ps(a, b, 0xdd); };
  const auto even4 = [&](F a, F b) ALWAYS { return (F)_mm512_shuffle_f32x4(a, b, 0x88); };
  const auto odd4 = [&](F a, F b) ALWAYS { return (F)_mm512_shuffle_f32x4(a, b, 0xdd); };
  swap_butterflies<1>(x, first, second);
  swap_butterflies<2>(x, first, second);
  swap_butterflies<4>(x, first, second);
  swap_butterflies<1>(x, even, odd);    // stride 8 takes the place of stride 1
  swap_butterflies<2>(x, even, odd);    // 16 that of 2
  swap_butterflies<4>(x, even4, odd4);  // 32 that of 4
  swap_butterflies<1>(x, even4, odd4);  // 64 that of 8
}

// Appends the lanes of x where mask is set.
INLINE std::size_t append(std::uint32_t* to, I x, I mask) {
  const __mmask16 m = _mm512_movepi32_mask((__m512i)mask);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(m, (__m512i)x));
  return static_cast<std::size_t>(__builtin_popcount(_cvtmask16_u32(m)));
}
