// Where threads meet: shuffles, votes, reductions.
#pragma once

#include "simt/ptx_float.h"
#include "simt/ptx_integer.h"
#include "simt/simt.h"

namespace ptx {

PTX_INLINE u32 lanemask_eq(unsigned lane) { return u32{1} << lane; }
PTX_INLINE u32 lanemask_lt(unsigned lane) { return lanemask_eq(lane) - 1; }
PTX_INLINE u32 lanemask_le(unsigned lane) { return lanemask_eq(lane) | lanemask_lt(lane); }
PTX_INLINE u32 lanemask_gt(unsigned lane) { return ~lanemask_le(lane); }
PTX_INLINE u32 lanemask_ge(unsigned lane) { return ~lanemask_lt(lane); }

struct Shuffled {
  u32 value;
  bool in_range;
};

// `c` has the clamp in bits 0 to 4, and in bits 8 to 12 a mask of the lane bits that a shuffle
// keeps.
struct Segment {
  explicit Segment(u32 c) : lane(static_cast<int>(emu::self().lane)) {
    const int kept = static_cast<int>(c >> 8 & 31), clamp = static_cast<int>(c & 31);
    least = lane & kept;
    limit = least | (clamp & ~kept);
    free = ~kept & 31;
  }
  // A lane whose source is out of range receives its own value.
  Shuffled take(u32 mask, u32 value, int source, bool in_range) const {
    const auto from = static_cast<unsigned>(in_range ? source : lane);
    return {emu::exchange(mask, value, from), in_range};
  }
  int lane, least, limit, free;
};
inline Shuffled shfl_up(u32 value, u32 b, u32 c, u32 mask) {
  const Segment s(c);
  const int source = s.lane - static_cast<int>(b & 31);
  return s.take(mask, value, source, source >= s.limit);
}
inline Shuffled shfl_down(u32 value, u32 b, u32 c, u32 mask) {
  const Segment s(c);
  const int source = s.lane + static_cast<int>(b & 31);
  return s.take(mask, value, source, source <= s.limit);
}
inline Shuffled shfl_bfly(u32 value, u32 b, u32 c, u32 mask) {
  const Segment s(c);
  const int source = s.lane ^ static_cast<int>(b & 31);
  return s.take(mask, value, source, source <= s.limit);
}
inline Shuffled shfl_idx(u32 value, u32 b, u32 c, u32 mask) {
  const Segment s(c);
  const int source = s.least | (static_cast<int>(b & 31) & s.free);
  return s.take(mask, value, source, source <= s.limit);
}

inline bool vote_any(bool predicate, u32 mask) { return emu::ballot(mask, predicate) != 0; }
inline bool vote_all(bool predicate, u32 mask) { return emu::ballot(mask, predicate) == mask; }
inline bool vote_uni(bool predicate, u32 mask) {
  const u32 votes = emu::ballot(mask, predicate);
  return votes == 0 || votes == mask;
}

template <class Combine>
u32 reduce(u32 value, u32 mask, Combine combine) {
  const emu::Lanes lanes = emu::gather(mask, value);
  bool is_first = true;
  u32 total = 0;
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    total = is_first ? lanes.value[l] : combine(total, lanes.value[l]);
    is_first = false;
  }
  return total;
}
// Lambdas: a compiler that must inline a function cannot do so through its address.
#define PTX_REDUX(op, combine)                                                     \
  template <class T>                                                               \
  u32 redux_##op(u32 value, u32 mask) {                                            \
    return reduce(value, mask, [](u32 a, u32 b) -> u32 { return combine(a, b); }); \
  }
PTX_REDUX(add, add<T>)
PTX_REDUX(and, and_<T>)
PTX_REDUX(or, or_<T>)
PTX_REDUX(xor, xor_<T>)
#undef PTX_REDUX
// One lane's NaN must become the canonical one as well, hence the second min of the total.
template <class T>
u32 redux_min(u32 value, u32 mask) {
  const u32 total = reduce(value, mask, [](u32 a, u32 b) { return min<T>(a, b); });
  return min<T>(total, total);
}
template <class T>
u32 redux_max(u32 value, u32 mask) {
  const u32 total = reduce(value, mask, [](u32 a, u32 b) { return max<T>(a, b); });
  return max<T>(total, total);
}
inline u32 redux_min_nan(u32 value, u32 mask) {
  const u32 total = reduce(value, mask, [](u32 a, u32 b) { return min_nan(a, b); });
  return min_nan(total, total);
}
inline u32 redux_max_nan(u32 value, u32 mask) {
  const u32 total = reduce(value, mask, [](u32 a, u32 b) { return max_nan(a, b); });
  return max_nan(total, total);
}

}  // namespace ptx
