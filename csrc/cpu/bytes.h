// Plain loops over wire bytes that the compiler vectorises for each instruction set. Included
// inside an instruction set's namespace.

// With s the sum of the words and t the sum of its earlier values, sum of k * w_k = (K - 1) s - t:
// two additions a word, no multiplication.
std::uint64_t checksum(const std::uint8_t* words, std::size_t count, std::uint64_t first) {
  constexpr std::size_t lanes = 8;
  std::uint64_t s[lanes] = {}, t[lanes] = {}, sum = 0;
  const std::size_t steps = count / lanes;
  for (std::size_t k = 0; k < steps; ++k) {
    std::uint64_t w[lanes];
    std::memcpy(w, words + k * sizeof w, sizeof w);
    for (std::size_t l = 0; l < lanes; ++l) {
      t[l] += s[l];
      s[l] += w[l];
    }
  }
  for (std::size_t l = 0; l < lanes; ++l) {
    const std::uint64_t ranked = (steps - 1) * s[l] - t[l];
    sum += (2 * (first + l) + 1) * s[l] + 2 * lanes * ranked;
  }
  for (std::size_t i = steps * lanes; i < count; ++i) {
    sum += load<std::uint64_t>(words + 8 * i) * (2 * (first + i) + 1);
  }
  return sum;
}

bool has_unused_int8(const std::uint8_t* codes, std::size_t nbytes) {
  std::uint8_t found = 0;
  for (std::size_t i = 0; i < nbytes; ++i) found |= codes[i] == 0x80 ? 1 : 0;
  return found != 0;
}

bool has_unused_int4(const std::uint8_t* codes, std::size_t nbytes) {
  std::uint8_t found = 0;
  for (std::size_t i = 0; i < nbytes; ++i) {
    found |= ((codes[i] & 0x0f) == 0x08 || (codes[i] & 0xf0) == 0x80) ? 1 : 0;
  }
  return found != 0;
}

bool has_unused_fp8(const std::uint8_t* codes, std::size_t nbytes) {
  std::uint8_t found = 0;
  for (std::size_t i = 0; i < nbytes; ++i) found |= (codes[i] & 0x7f) == 0x7f ? 1 : 0;
  return found != 0;
}
