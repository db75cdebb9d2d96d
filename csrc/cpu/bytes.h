// Plain loops over wire bytes that the compiler vectorizes for each instruction set. Included
// inside an instruction set's namespace.

// The checksum's part, and whether `is_bad`, which gives all ones or zero for each byte of a
// vector, holds for any byte: both in one pass. With s the sum of the words and t the sum of its
// earlier values, sum of k * w_k = (K - 1) s - t: two additions a word, no multiplication. Two
// vectors take turns, so that one addition need not wait for the last.
template <class IsBad>
inline std::uint64_t scan(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                          bool* bad, IsBad is_bad) {
  typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes)));
  typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
  constexpr std::size_t lanes = sizeof(Words) / 8;
  const std::size_t steps = count / (2 * lanes);
  Words s[2] = {}, t[2] = {};
  Bytes found[2] = {};
  for (std::size_t k = 0; k < steps; ++k) {
    for (int i = 0; i < 2; ++i) {
      Words w;
      std::memcpy(&w, words + (2 * k + i) * sizeof w, sizeof w);
      t[i] += s[i];
      s[i] += w;
      found[i] |= (Bytes)is_bad((Bytes)w);
    }
  }
  Words rest[2] = {};
  std::uint64_t sum = 0;
  for (std::size_t i = 2 * steps * lanes; i < count; ++i) {
    const auto word = load<std::uint64_t>(words + 8 * i);
    rest[i / lanes % 2][i % lanes] = word;
    sum += word * (2 * (first + i) + 1);
  }
  const Words both = s[0] + s[1], earlier = t[0] + t[1];
  const Words any =
      (Words)(found[0] | found[1] | (Bytes)is_bad((Bytes)rest[0]) | (Bytes)is_bad((Bytes)rest[1]));
  std::uint64_t all = 0;
  for (std::size_t l = 0; l < lanes; ++l) {
    const std::uint64_t ranked = (steps - 1) * both[l] - earlier[l];
    sum += (2 * (first + l) + 1) * both[l] + 2 * lanes * (2 * ranked + s[1][l]);
    all |= any[l];
  }
  *bad = all != 0;
  return sum;
}

// For codecs in which every code occurs, and for all other bytes.
std::uint64_t scan_any(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                       bool* bad) {
  return scan(words, count, first, bad, [](auto x) { return x ^ x; });
}
// -128 does not occur.
std::uint64_t scan_int8(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                        bool* bad) {
  return scan(words, count, first, bad, [](auto x) { return x == 0x80; });
}
// -8 does not occur.
std::uint64_t scan_int4(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                        bool* bad) {
  return scan(words, count, first, bad,
              [](auto x) { return ((x & 0x0f) == 0x08) | ((x & 0xf0) == 0x80); });
}
// NaN does not occur.
std::uint64_t scan_fp8(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                       bool* bad) {
  return scan(words, count, first, bad, [](auto x) { return (x & 0x7f) == 0x7f; });
}

constexpr void add_scans(Kernels& k) {
  for (auto& entry : k.scan) entry = scan_any;
  k.scan[kInt8] = scan_int8;
  k.scan[kFp8] = scan_fp8;
  k.scan[kInt4] = scan_int4;
}

bool scales_are_tame(const std::uint8_t* scales, std::size_t count) {
  constexpr std::uint16_t limit = 0x7180;  // 2^100
  std::uint16_t wild = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto above = static_cast<std::uint16_t>(load<std::uint16_t>(scales + 2 * i) - kScaleMin);
    wild |= above > limit - kScaleMin ? 1 : 0;
  }
  return wild == 0;
}
