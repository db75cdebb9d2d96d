// ldmatrix and stmatrix: a warp moves 8x8 matrices of 16 bits between shared memory and registers.
// Lane 8 m + r gives the address of row r of matrix m. Lane l holds two neighbours of each matrix:
// row l / 4, columns 2 (l % 4) and the next; transposed, those of the columns as rows.
#pragma once

#include "simt/ptx_memory.h"
#include "simt/simt.h"

namespace ptx {

inline constexpr u32 kWholeWarp = 0xffffffff;
inline constexpr unsigned kRowNbytes = 16;

template <unsigned kCount>
struct Fragments {
  u32 part[kCount];
};

// The rows that a lane's parts lie in, by their addresses in shared memory.
class MatrixRows {
 public:
  explicit MatrixRows(u32 address) : lanes_(emu::gather(kWholeWarp, address)) {}

  template <Access kAccess>
  char* row(const Context& c, unsigned matrix, unsigned row, unsigned line) const {
    return c.shared<kRowNbytes, kAccess>(lanes_.value[8 * matrix + row], line);
  }

 private:
  emu::Lanes lanes_;
};

template <unsigned kCount, bool kTransposed>
Fragments<kCount> ldmatrix(const Context& c, u32 address, unsigned line) {
  const MatrixRows rows(address);
  const unsigned lane = c.thread.lane, across = lane / 4, along = 2 * (lane % 4);
  Fragments<kCount> result;
  for (unsigned m = 0; m < kCount; ++m) {
    if (!kTransposed) {
      std::memcpy(&result.part[m], rows.row<kLoad>(c, m, across, line) + 2 * along, 4);
      continue;
    }
    u16 half[2];
    for (unsigned i = 0; i < 2; ++i) {
      std::memcpy(&half[i], rows.row<kLoad>(c, m, along + i, line) + 2 * across, 2);
    }
    result.part[m] = u32{half[1]} << 16 | half[0];
  }
  // A warp reads at once: no lane goes on to overwrite what another has yet to read.
  emu::ballot(kWholeWarp, true);
  return result;
}

template <unsigned kCount, bool kTransposed>
void stmatrix(const Context& c, u32 address, unsigned line, const Fragments<kCount>& given) {
  const MatrixRows rows(address);
  const unsigned lane = c.thread.lane, across = lane / 4, along = 2 * (lane % 4);
  for (unsigned m = 0; m < kCount; ++m) {
    if (!kTransposed) {
      std::memcpy(rows.row<kStore>(c, m, across, line) + 2 * along, &given.part[m], 4);
      continue;
    }
    for (unsigned i = 0; i < 2; ++i) {
      const auto half = static_cast<u16>(given.part[m] >> (16 * i));
      std::memcpy(rows.row<kStore>(c, m, along + i, line) + 2 * across, &half, 2);
    }
  }
}

}  // namespace ptx
