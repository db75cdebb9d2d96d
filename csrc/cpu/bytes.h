// Plain loops over wire bytes that the compiler vectorises for each instruction set. Included
// inside an instruction set's namespace.

// With s the sum of the words and t the sum of its earlier values, sum of k * w_k = (K - 1) s - t:
// two additions a word, no multiplication.
std::uint64_t checksum(const std::uint8_t* words, std::size_t count, std::uint64_t first) {
  typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes)));
  constexpr std::size_t lanes = sizeof(Words) / 8;
  const std::size_t steps = count / lanes;
  Words s = {}, t = {};
  for (std::size_t k = 0; k < steps; ++k) {
    t += s;
    Words w;
    std::memcpy(&w, words + k * sizeof(Words), sizeof w);
    s += w;
  }
  std::uint64_t sum = 0;
  for (std::size_t l = 0; l < lanes; ++l) {
    const std::uint64_t ranked = (steps - 1) * s[l] - t[l];
    sum += (2 * (first + l) + 1) * s[l] + 2 * lanes * ranked;
  }
  for (std::size_t i = steps * lanes; i < count; ++i) {
    sum += load<std::uint64_t>(words + 8 * i) * (2 * (first + i) + 1);
  }
  return sum;
}

// Whether `is_bad`, which gives all ones or zero for each byte of a vector, holds for any byte.
template <class IsBad>
inline bool any_byte(const std::uint8_t* bytes, std::size_t count, IsBad is_bad) {
  typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
  Bytes found = {};
  std::size_t i = 0;
  for (; i + sizeof(Bytes) <= count; i += sizeof(Bytes)) {
    Bytes x;
    std::memcpy(&x, bytes + i, sizeof x);
    found |= (Bytes)is_bad(x);
  }
  std::uint8_t any = 0;
  for (std::size_t l = 0; l < sizeof(Bytes); ++l) any |= found[l];
  for (; i < count; ++i) any |= is_bad(Bytes{} + bytes[i])[0] != 0;
  return any != 0;
}

bool has_unused_int8(const std::uint8_t* codes, std::size_t nbytes) {
  return any_byte(codes, nbytes, [](auto x) { return x == 0x80; });
}

bool has_unused_int4(const std::uint8_t* codes, std::size_t nbytes) {
  return any_byte(codes, nbytes,
                  [](auto x) { return ((x & 0x0f) == 0x08) | ((x & 0xf0) == 0x80); });
}

bool has_unused_fp8(const std::uint8_t* codes, std::size_t nbytes) {
  return any_byte(codes, nbytes, [](auto x) { return (x & 0x7f) == 0x7f; });
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
