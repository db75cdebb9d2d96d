// Blocks over the lanes of a warp: a lane holds four neighboring elements of each row of 128. A
// block has Rows rows; blocks of fewer than 128 elements share a row, with `lanes` lanes each.
#pragma once

#include "codec/block.h"
#include "cuda/device.h"

namespace zcomm::cuda {

inline constexpr int kRow = 4 * kWarp;

// The part of a block that a lane holds. `n` is the number of elements from the group's first one
// to the end of the segment.
template <int Rows>
struct Place {
  int log2_block, lanes;  // a block's size and its lanes
  int block;              // which of the group's blocks
  int first;              // the index in its block of the lane's first element
  int m;                  // elements of the block, 0 if it lies past the segment's end

  ZC_FN Place(int log2, int n) : log2_block(log2) {
    const int in_row = 4 * lane_index();
    lanes = Rows > 1 || log2 > 7 ? kWarp : (1 << log2) / 4;
    block = Rows > 1 ? 0 : in_row >> log2;
    first = Rows > 1 ? in_row : in_row & ((1 << log2) - 1);
    const int left = n - (block << log2);
    m = left <= 0 ? 0 : left < (1 << log2) ? left : 1 << log2;
  }

  ZC_FN int index(int row) const { return row * kRow + first; }
  // How many of the lane's four elements in a row are among the block's first `size`.
  ZC_FN int valid(int row, int size) const {
    const int left = size - index(row);
    return left < 0 ? 0 : left > 4 ? 4 : left;
  }
  ZC_FN bool leads() const { return first == 0; }
};

template <int Rows>
ZC_FN std::uint32_t block_absmax(const float v[Rows][4], int lanes) {
  std::uint32_t most = 0;
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      const std::uint32_t a = bits(v[r][j]) & kAbsMask;
      most = a > most ? a : most;
    }
  }
#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 800
  if (lanes == kWarp) return __reduce_max_sync(kAllLanes, most);
#endif
  ZC_UNROLL for (int h = kWarp / 2; h > 0; h /= 2) {
    if (h < lanes) {
      const std::uint32_t other = __shfl_xor_sync(kAllLanes, most, h);
      most = other > most ? other : most;
    }
  }
  return most;
}

// The halving tree over a block, its result in all lanes. The first two strides between lanes halve
// the values that a lane holds: it keeps and sums the half that its partner does not.
template <int Rows>
ZC_FN float block_tree(float t[Rows][4], int lanes) {
  ZC_UNROLL for (int h = Rows / 2; h > 0; h /= 2) {
    ZC_UNROLL for (int r = 0; r < h; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) t[r][j] = t[r][j] + t[r + h][j];
    }
  }
  const int lane = lane_index(), high = lanes / 2, low = lanes / 4;
  const bool upper = lane & high, odd = lane & low;
  float pair[2];
  ZC_UNROLL for (int j = 0; j < 2; ++j) {
    const float kept = upper ? t[0][j + 2] : t[0][j], sent = upper ? t[0][j] : t[0][j + 2];
    pair[j] = kept + __shfl_xor_sync(kAllLanes, sent, high);
  }
  float sum = odd ? pair[1] : pair[0];
  sum = sum + __shfl_xor_sync(kAllLanes, odd ? pair[0] : pair[1], low);
  ZC_UNROLL for (int h = kWarp / 8; h > 0; h /= 2) {
    if (h < low) sum = sum + __shfl_xor_sync(kAllLanes, sum, h);
  }
  sum = sum + __shfl_xor_sync(kAllLanes, sum, high);  // elements 0 and 2, 1 and 3 of each four
  return sum + __shfl_xor_sync(kAllLanes, sum, low);
}

ZC_FN void butterfly(float& x, float& y) {
  const float sum = x + y, difference = x - y;
  x = sum;
  y = difference;
}

// The unnormalized Hadamard transform of the block's first `size` elements, a power of two.
template <int Rows, bool Full>
ZC_FN void block_hadamard(float t[Rows][4], int lanes, int size) {
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    float* x = t[r];
    if (Full || size > 1) butterfly(x[0], x[1]), butterfly(x[2], x[3]);
    if (Full || size > 2) butterfly(x[0], x[2]), butterfly(x[1], x[3]);
  }
  ZC_UNROLL for (int h = 1; h < kWarp; h *= 2) {
    if (h < lanes) {
      const std::uint32_t flip = lane_index() & h ? 0x80000000u : 0;
      ZC_UNROLL for (int r = 0; r < Rows; ++r) {
        ZC_UNROLL for (int j = 0; j < 4; ++j) {
          const float other = __shfl_xor_sync(kAllLanes, t[r][j], h);
          const float mixed = other + from_bits(bits(t[r][j]) ^ flip);
          if (Full || size > 4 * h) t[r][j] = mixed;
        }
      }
    }
  }
  ZC_UNROLL for (int h = 1; h < Rows; h *= 2) {
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        if (!(r & h) && (Full || size > kRow * h)) butterfly(t[r][j], t[r + h][j]);
      }
    }
  }
}

ZC_FN std::uint64_t warp_sum(std::uint64_t x) {
  ZC_UNROLL for (int h = kWarp / 2; h > 0; h /= 2) x += __shfl_xor_sync(kAllLanes, x, h);
  return x;
}

}  // namespace zcomm::cuda
