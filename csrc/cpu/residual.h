// Reads a tile's values and writes what the wire leaves out, for every storage of the residual.
#pragma once

#include "cpu/encode.h"

namespace zcomm {

// One segment of one encode call.
class ResidualTile {
 public:
  ResidualTile(const EncodeArgs& args, int segment);

  // v = grad * prescale + residual for elements [a, a + n).
  void load(std::int64_t a, int n, float* v) const;

  // The same values: in the gradient itself where it is v, else in `buffer`.
  const float* values(std::int64_t a, int n, float* buffer) const;

  // What load() will read from element a on.
  Ahead ahead(std::int64_t a) const;

  // Where e of element a may be written directly, or null if it has to pass through store().
  float* direct(std::int64_t a) const;

  // Writes e[0..n) to elements a ...
  void store(std::int64_t a, int n, const float* e) const;

  // Keeps elements [a, a + n) unchanged (copies them where input and output differ).
  void keep(std::int64_t a, int n) const;

  // Zeroes the padding of int8 storage; for the task that holds the segment's end.
  void clear_padding() const;

  // The stored residual, as fp32.
  void read(std::int64_t a, int n, float* r) const;

  bool any() const { return type_ != kResidualNone; }

 private:
  const EncodeArgs& args_;
  const std::uint8_t* grad_;
  int grad_bytes_;
  float prescale_;
  ResidualType type_;
  const std::uint8_t* in_ = nullptr;
  std::uint8_t* out_ = nullptr;
  int log2_block_;     // int8 storage
  Sections sections_;  // int8 storage
  std::int64_t codes_at_ = 0;
};

}  // namespace zcomm
