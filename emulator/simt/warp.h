// The lanes of a warp, and their meetings: shuffles and votes.
#pragma once

#include <cstdint>

#include "simt/simt.h"

namespace emu {

inline constexpr unsigned kLanes = 32;

enum class Meeting : std::uint8_t { kExchange, kBallot, kGather };

struct Warp {
  unsigned first = 0;  // thread of the CTA

  // Sets of lanes. A lane is in one of them, or it is the one that runs.
  std::uint32_t ready = 0, meeting = 0, at_barrier = 0, exited = 0;

  // What a lane brought to its meeting ...
  std::uint32_t mask[kLanes], value[kLanes];
  unsigned source[kLanes];
  Meeting kind[kLanes];
  // ... and what it takes away. By lane: others of the meeting may already be in their next one.
  std::uint32_t result[kLanes];
  Lanes* gathered[kLanes];

  std::uint64_t shuffles = 0;  // of all its lanes together

  // Whether all that wait came with the mask and for the purpose of the first of them, as is usual.
  bool is_uniform = true;
  std::uint32_t first_mask = 0;
  Meeting first_kind = Meeting::kExchange;

  void arrive(unsigned lane, Meeting how, std::uint32_t all) {
    mask[lane] = all;
    kind[lane] = how;
    if (!meeting) {
      first_mask = all;
      first_kind = how;
      is_uniform = true;
    }
    is_uniform &= (first_mask == all) & (first_kind == how);
    meeting |= 1u << lane;
  }

  bool is_complete(Meeting how, std::uint32_t all) const {
    return (meeting & all) == all && (is_uniform || all_came(how, all));
  }

  void complete(Meeting how, std::uint32_t all) {
    if (how == Meeting::kExchange) complete_exchange(all);
    if (how == Meeting::kBallot) complete_ballot(all);
    if (how == Meeting::kGather) complete_gather(all);
    meeting &= ~all;
    ready |= all;
  }

 private:
  bool all_came(Meeting how, std::uint32_t all) const {
    for (unsigned l = 0; l < kLanes; ++l) {
      if ((all >> l & 1) && (mask[l] != all || kind[l] != how)) return false;
    }
    return true;
  }
  void complete_exchange(std::uint32_t all) {
    ++shuffles;
    for (unsigned l = 0; l < kLanes; ++l) {
      if (all >> l & 1) result[l] = value[source[l]];
    }
  }
  void complete_ballot(std::uint32_t all) {
    std::uint32_t votes = 0;
    for (unsigned l = 0; l < kLanes; ++l) votes |= (all >> l & 1 & value[l]) << l;
    for (unsigned l = 0; l < kLanes; ++l) {
      if (all >> l & 1) result[l] = votes;
    }
  }
  void complete_gather(std::uint32_t all) {
    Lanes values;
    for (unsigned l = 0; l < kLanes; ++l) values.value[l] = all >> l & 1 ? value[l] : 0;
    for (unsigned l = 0; l < kLanes; ++l) {
      if (all >> l & 1) *gathered[l] = values;
    }
  }
};

}  // namespace emu
