// Shuffles and votes, against the PTX manual's words for them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "simt/cuda.h"
#include "tests/harness.h"

namespace zcomm::test {

enum Shuffle { kIdx, kUp, kDown, kXor, kShuffles };

struct ShuffleArgs {
  int how, operand, width;
  unsigned* words;
  double* doubles;
};

template <class T>
T shuffle(const ShuffleArgs& args, T value) {
  const auto delta = static_cast<unsigned>(args.operand);
  if (args.how == kIdx) return __shfl_sync(~0u, value, args.operand, args.width);
  if (args.how == kUp) return __shfl_up_sync(~0u, value, delta, args.width);
  if (args.how == kDown) return __shfl_down_sync(~0u, value, delta, args.width);
  return __shfl_xor_sync(~0u, value, args.operand, args.width);
}

ZC_KERNEL(zc_shuffle, ShuffleArgs, 64, 1) {
  const unsigned thread = threadIdx.x;
  args.words[thread] = shuffle(args, thread);
  args.doubles[thread] = shuffle(args, thread + 1 / 3.0);
}

// The PTX manual's words for shfl.sync.
inline unsigned shuffle_source(int how, unsigned lane, unsigned b, unsigned width) {
  const int segments = static_cast<int>(32 - width), clamp = how == kUp ? 0 : 31;
  const int max_lane = (static_cast<int>(lane) & segments) | (clamp & ~segments);
  const int min_lane = static_cast<int>(lane) & segments, l = static_cast<int>(lane);
  const int delta = static_cast<int>(b & 31);
  if (how == kUp) return static_cast<unsigned>(l - delta >= max_lane ? l - delta : l);
  const int j = how == kDown ? l + delta : how == kXor ? l ^ delta : min_lane | (delta & ~segments);
  return static_cast<unsigned>(j <= max_lane ? j : l);
}

inline void check_shuffle(int how, int operand, int width) {
  std::vector<unsigned> words(64);
  std::vector<double> doubles(64);
  const ShuffleArgs args{how, operand, width, words.data(), doubles.data()};
  emu::launch(zc_shuffle, {1}, {64}, 0, &args);
  for (unsigned t = 0; t < 64; ++t) {
    const unsigned source =
        t / 32 * 32 +
        shuffle_source(how, t % 32, static_cast<unsigned>(operand), static_cast<unsigned>(width));
    const auto where = std::to_string(how) + " " + std::to_string(operand) + " " +
                       std::to_string(width) + " thread " + std::to_string(t);
    CHECK(words[t] == source, where);
    CHECK(doubles[t] == source + 1 / 3.0, where);
  }
}

inline void check_shuffles() {
  for (int how = 0; how < kShuffles; ++how) {
    for (int width = 1; width <= 32; width *= 2) {
      for (int operand = 0; operand < 32; ++operand) check_shuffle(how, operand, width);
    }
  }
}

struct VoteArgs {
  unsigned *ballots, *most, *any, *all, *halves;
};

ZC_KERNEL(zc_votes, VoteArgs, 32, 1) {
  const unsigned lane = threadIdx.x, odd = 0xaaaaaaaa, mine = lane % 2 ? odd : ~odd;
  args.ballots[lane] = __ballot_sync(~0u, lane % 3 == 0);
  args.most[lane] = __reduce_max_sync(mine, lane * 2654435761u);
  args.any[lane] = static_cast<unsigned>(__any_sync(mine, lane == 6));
  args.all[lane] = static_cast<unsigned>(__all_sync(mine, lane % 2));
  // Lane 0 waits for all while the others still meet among themselves.
  unsigned sum = lane;
  if (lane > 0) sum = __shfl_sync(~1u, sum, 31);
  __syncwarp();
  args.halves[lane] = sum + __shfl_sync(~0u, lane, 9);
}

inline void check_votes() {
  std::vector<unsigned> out[5];
  for (auto& values : out) values.resize(32);
  const VoteArgs args{out[0].data(), out[1].data(), out[2].data(), out[3].data(), out[4].data()};
  emu::launch(zc_votes, {1}, {32}, 0, &args);
  unsigned most[2] = {0, 0};
  for (unsigned l = 0; l < 32; ++l) most[l % 2] = std::max(most[l % 2], l * 2654435761u);
  for (unsigned l = 0; l < 32; ++l) {
    const auto where = "lane " + std::to_string(l);
    CHECK(out[0][l] == 0x49249249, where);
    CHECK(out[1][l] == most[l % 2], where);
    CHECK(out[2][l] == (l % 2 ? 0u : 1u), where);
    CHECK(out[3][l] == l % 2, where);
    CHECK(out[4][l] == (l ? 31u : 0u) + 9, where);
  }
}

}  // namespace zcomm::test
