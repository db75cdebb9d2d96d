// Collectives of none, bf16 and fp16 among the ranks of a host: numbers that need no frame.
//
// What a rank owns is a strip: runs of a flat tensor, one after the other. Chunk t of a collective
// is the t-th part of every strip; a slot has a region for each rank's part:
//
//   publish   this rank's numbers for each owner     -> the owner's region of its own slot
//   reduce    its region of all slots, in rank order -> the sum, and its region of its own slot
//   collect   the owners' regions of their slots     -> the tensor
//
// A small all-reduce takes one exchange: every rank publishes all of it, and sums all of it itself.
// The bits are those of encode, decode_sum, encode and decode with the same codec: they do not
// depend on where strips are cut.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "shm/turns.h"

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

struct PlainJob {
  Call call;
  const Kernels* kernels;
  std::uint8_t codec;  // kNone, kBf16 or kFp16
  float prescale;
  const std::vector<Strip>* strips;  // of all ranks, in the flat tensor
  Place source;                      // read by a reduction
  Place target;                      // written by a gathering
  const Strip* own;                  // where this rank's sums go, or what it owns comes from
  Place own_at;
  bool accumulate;  // sums are added to what is there
};

Outcome run(Ring& ring, const PlainJob& job);

}  // namespace zcomm::shm
