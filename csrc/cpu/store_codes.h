// Codes that are bytes: found, looked up, packed. Included inside an instruction set's namespace.

// Up to 16 floats of 8 significant bits, as their two upper bytes, for a byte shuffle.
struct ByteLut {
  B low, high;
  INLINE ByteLut(const float* values, int count) {
    std::uint8_t lo[16] = {}, hi[16] = {};
    for (int i = 0; i < count; ++i) {
      lo[i] = static_cast<std::uint8_t>(bits(values[i]) >> 16);
      hi[i] = static_cast<std::uint8_t>(bits(values[i]) >> 24);
    }
    low = repeat_16(lo);
    high = repeat_16(hi);
  }
  // Codes as pack_halves() leaves them, to four vectors in order.
  INLINE void operator()(B codes, F* q) const {
    const B lo = shuffle_bytes(low, codes), hi = shuffle_bytes(high, codes);
    const B a = zip_low_bytes(lo, hi), b = zip_high_bytes(lo, hi), zero = {};
    q[0] = (F)zip_low_pairs(zero, a);
    q[1] = (F)zip_high_pairs(zero, a);
    q[2] = (F)zip_low_pairs(zero, b);
    q[3] = (F)zip_high_pairs(zero, b);
  }
};

// What to add to a magnitude so that its code fills the upper bits: an entry for every 8
// magnitudes, among which at most one is a threshold.
template <int Width>
struct LmOffsets {
  std::uint8_t offset[16];
  constexpr LmOffsets() : offset() {
    constexpr int half = Lm<Width>::kLevels / 2, unit = 256 >> Width;
    for (int i = 0; i < 16; ++i) {
      int cell = half, start = 8 * i;
      for (int k = 0; k < half - 1; ++k) {
        const int threshold = Lm<Width>::thresholds()[k];
        if (threshold < 8 * (i + 1)) ++cell;
        if (threshold < 8 * (i + 1) && threshold >= 8 * i) start = threshold;
      }
      offset[i] = static_cast<std::uint8_t>(unit * cell - start);
    }
  }
};

// The code of each signed byte, as Lm<Width>::code().
template <int Width>
struct LmCodes {
  B offsets;
  INLINE LmCodes() {
    static constexpr LmOffsets<Width> table;
    offsets = repeat_16(table.offset);
  }
  INLINE B operator()(B t) const {
    const B negative = all_signs(t), magnitude = t ^ negative;
    return ((magnitude + shuffle_bytes(offsets, magnitude >> 3)) ^ negative) >> (8 - Width);
  }
};

// For hadamard_columns(): butterflies between vectors S apart, of what lower(a, b) and upper(a, b)
// make of both. Additions have only two of four ports; a multiply-add by 1 rounds like a - b and
// takes the others. decode_sum of two wires: 6.4 cycles per 16 elements instead of 6.9 (Zen 5).
template <int S, class Lower, class Upper>
INLINE void swap_butterflies(F* x, Lower lower, Upper upper) {
  for (int i = 0; i < 8; ++i) {
    if (i & S) continue;
    const F a = lower(x[i], x[i + S]), b = upper(x[i], x[i + S]);
    x[i] = a + b;
    x[i + S] = exact_nmadd(b, splat(1), a);
  }
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
