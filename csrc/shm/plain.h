// Collectives of none, bf16 and fp16 among the ranks of a host: numbers that need no frame.
//
// What a rank owns is a strip: runs of a flat tensor, one after the other. Step t of a collective
// moves the t-th part of every strip; a slot has a region for each rank's part:
//
//   publish   this rank's numbers for each owner    -> the owner's region of its own slot
//   reduce    its region of all slots, in rank order -> the sum, and its region of its own slot
//   collect   the owners' regions of their slots     -> the tensor
//
// The three work on steps t, t - 1 and t - 2, so a rank that waits for another has work left. A
// small all-reduce takes one step: every rank publishes all of it, and sums all of it itself. The
// bits are those of encode, decode_sum, encode and decode with the same codec: they do not depend
// on where strips are cut.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/types.h"
#include "cpu/kernels.h"
#include "shm/ring.h"

namespace zcomm::shm {

// Elements [at, at + n) from an address on.
struct Run {
  std::int64_t at, n;
};

// What one rank owns, or a part of one tensor in the order of a strip.
struct Strip {
  std::vector<Run> runs;
  std::int64_t numel = 0;

  explicit Strip(std::vector<Run> given);
};

// A strip and the memory that its offsets count from.
struct Place {
  std::uint8_t* base = nullptr;
  GradType type = kGradF32;
};

struct PlainJob {
  const Kernels* kernels;
  std::uint8_t codec;  // kNone, kBf16 or kFp16
  bool reduce, gather;
  std::uint64_t signature;
  float prescale;
  const std::vector<Strip>* strips;  // of all ranks, in the flat tensor
  Place source;                      // read by a reduction
  Place target;                      // written by a gathering
  const Strip* own;                  // where this rank's sums go, or what it owns comes from
  Place own_at;
  bool accumulate;  // sums are added to what is there
  double timeout_s;
  int spins;
};

// How a job ended: what its last wait saw (kReached: all is done), in which step, of how many.
struct Outcome {
  Seen seen;
  std::uint32_t step, steps;
};

Outcome run(Ring& ring, const PlainJob& job);

}  // namespace zcomm::shm
