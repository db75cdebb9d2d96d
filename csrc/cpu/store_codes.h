// Codes that are bytes, with AVX2: found, packed. Included inside an instruction set's namespace.

// The code of each signed byte t, as Lm<Width>::code().
template <int Width>
INLINE __m256i lm_codes(__m256i t) {
  constexpr int half = Lm<Width>::kLevels / 2;
  const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), t);
  const __m256i magnitude = _mm256_xor_si256(t, negative);
  __m256i cell = _mm256_setzero_si256();
  for (int i = 0; i < half - 1; ++i) {
    const __m256i below = _mm256_set1_epi8(static_cast<char>(Lm<Width>::thresholds()[i] - 1));
    cell = _mm256_sub_epi8(cell, _mm256_cmpgt_epi8(magnitude, below));
  }
  return _mm256_add_epi8(_mm256_xor_si256(cell, negative), _mm256_set1_epi8(half));
}

// Bytes that hold codes of some width to the bit string of the format: 32 codes, 4 * width bytes.
INLINE void store_codes(std::integral_constant<int, 8>, __m256i bytes, std::uint8_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
}
// Neighboring codes joined: 16-bit lanes of 2 codes.
template <int Width>
INLINE __m256i join_pairs(__m256i bytes) {
  const __m256i masked = _mm256_and_si256(bytes, _mm256_set1_epi8((1 << Width) - 1));
  return _mm256_maddubs_epi16(masked, _mm256_set1_epi16(1 | 1 << (Width + 8)));
}
// 32-bit lanes of 4 codes.
template <int Width>
INLINE __m256i join_quads(__m256i bytes) {
  return _mm256_madd_epi16(join_pairs<Width>(bytes), _mm256_set1_epi32(1 | 1 << (2 * Width + 16)));
}
INLINE void store_codes(std::integral_constant<int, 4>, __m256i bytes, std::uint8_t* out) {
  const __m256i pairs = join_pairs<4>(bytes);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}
INLINE void store_codes(std::integral_constant<int, 3>, __m256i bytes, std::uint8_t* out) {
  // The two 12-bit halves of each 64-bit lane make 3 bytes.
  const __m256i quads = join_quads<3>(bytes);
  const __m256i eights = _mm256_or_si256(quads, _mm256_srli_epi64(quads, 20));
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i gathered = _mm256_shuffle_epi8(eights, order);
  const auto lo = static_cast<std::uint64_t>(_mm256_extract_epi64(gathered, 0));
  const auto hi = static_cast<std::uint64_t>(_mm256_extract_epi64(gathered, 2));
  store(out, lo | hi << 48);
  store(out + 8, static_cast<std::uint32_t>(hi >> 16));
}
INLINE void store_codes(std::integral_constant<int, 2>, __m256i bytes, std::uint8_t* out) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i gathered = _mm256_shuffle_epi8(join_quads<2>(bytes), order);
  store(out, _mm256_extract_epi32(gathered, 0));
  store(out + 4, _mm256_extract_epi32(gathered, 4));
}
