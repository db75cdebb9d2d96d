// topk: the sum over wires of a tile, slice by slice in shared memory, wire after wire.
//
// A binary search in a range's offsets gives the entries of each slice. Whatever the offsets are, a
// search for a higher bound ends at the same place or later, so the slices' entries are adjacent,
// without gap or overlap: exactly one CTA reads each entry, checks it and adds it to the checksum.
#include "cuda/decode.h"

namespace zcomm::cuda {

inline constexpr int kSliceElements = 2048;
inline constexpr int kTileSlices = kTileElements / kSliceElements;
inline constexpr int kBatch = 64;  // wires handled together

// The range that a tile lies in.
struct TopkPlace {
  std::uint32_t segment, tile;
  std::int64_t range, n;  // its index; its elements
  std::int64_t first;     // the tile's first element, from the start of the segment
  int offset;             // and from the start of the range

  ZC_FN TopkPlace(const DecodeArgs& args, const DeviceSegment& s) {
    const Tile at = args.tables.tiles[blockIdx.x];
    segment = at.segment;
    tile = at.index;
    first = static_cast<std::int64_t>(tile) * kTileElements;
    range = first / kTopkRange;
    offset = static_cast<int>(first % kTopkRange);
    const std::int64_t left = s.n - range * kTopkRange;
    n = left < kTopkRange ? left : kTopkRange;
  }
};

// What a tile must know about a wire, in shared memory.
struct TopkWire {
  std::int64_t position;  // of the range's first entry among the segment's k
  std::uint32_t count;    // of the range; 0 if the wire's entries cannot be used
  std::uint32_t bounds[kTileSlices + 1];
};

// A segment's counts, summed up; the same in all lanes.
struct TopkCounts {
  std::int64_t before, own, total, flagged;  // of lower ranges; of the tile's; of all
  bool beyond;                               // some range has more entries than elements
};

ZC_FN TopkCounts sum_counts(const DeviceSegment& segment, const TopkPlace& place,
                            const Section& section, std::uint64_t& checksum) {
  TopkCounts sum = {};
  for (std::int64_t r = lane_index(); 4 * r < section.used; r += kWarp) {
    const auto count = read_piece<std::uint32_t>(section, 4 * r, place.tile == 0, checksum);
    const std::int64_t left = segment.n - r * kTopkRange;
    if (count == kTopkNotFinite) {
      ++sum.flagged;
    } else if (count > (left < kTopkRange ? left : kTopkRange)) {
      sum.beyond = true;
    } else {
      sum.total += count;
      if (r < place.range) sum.before += count;
      if (r == place.range) sum.own = count;
    }
  }
  const auto over_warp = [](std::int64_t x) {
    return static_cast<std::int64_t>(warp_sum(static_cast<std::uint64_t>(x)));
  };
  return {over_warp(sum.before), over_warp(sum.own), over_warp(sum.total), over_warp(sum.flagged),
          __any_sync(kAllLanes, sum.beyond) != 0};
}

// Why the counts are refused, or -1.
ZC_FN int counts_fault(const DeviceSegment& segment, const TopkCounts& counts) {
  if (counts.beyond) return kFaultTopkCount;
  if (counts.flagged != 0 && 4 * counts.flagged != segment.used[0]) return kFaultTopkFlags;
  if (counts.flagged == 0 && counts.total != segment.k) return kFaultTopkTotal;
  return -1;
}

// Entries that cannot be used: each tile's share still counts toward the checksum, and must be 0
// where the segment is flagged. For one warp.
ZC_FN std::uint64_t skip_entries(const DecodeArgs& args, const DeviceSegment& segment,
                                 const TopkPlace& place, int w, bool flagged) {
  const std::int64_t begin = segment.k * place.tile / segment.tiles;
  const std::int64_t end = segment.k * (place.tile + std::int64_t{1}) / segment.tiles;
  std::uint64_t checksum = 0;
  std::uint32_t any = 0;
  for (int i = 1; i < 3; ++i) {
    const Section section = section_of(args, segment, i, w);
    for (std::int64_t at = begin + lane_index(); at < end; at += kWarp) {
      any |= read_piece<std::uint16_t>(section, 2 * at, true, checksum);
    }
  }
  if (flagged && any != 0) refuse(args, kFaultTopkEntries, w, place.segment, 0);
  return checksum;
}

// Checks the counts of a wire; true if it is flagged as not finite. For one warp.
ZC_FN bool open_wire(const DecodeArgs& args, const DeviceSegment& segment, const TopkPlace& place,
                     int w, unsigned long long* parts, TopkWire& wire) {
  std::uint64_t checksum = 0;
  const TopkCounts counts = sum_counts(segment, place, section_of(args, segment, 0, w), checksum);
  const int fault = counts_fault(segment, counts);
  const bool flagged = fault < 0 && counts.flagged != 0, usable = fault < 0 && !flagged;
  if (lane_index() == 0) {
    if (fault >= 0) refuse(args, static_cast<std::uint32_t>(fault), w, place.segment, 0);
    wire.position = counts.before;
    wire.count = usable ? static_cast<std::uint32_t>(counts.own) : 0;
  }
  if (!usable) checksum += skip_entries(args, segment, place, w, flagged);
  add_part(args, parts, w, checksum);
  return flagged;
}

// How many of the range's entries come before slice `slice` of the tile.
ZC_FN std::uint32_t find_bound(const Section& offsets, const TopkPlace& place, const TopkWire& wire,
                               int slice) {
  const int bound = place.offset + slice * kSliceElements;
  if (bound == 0) return 0;
  if (bound >= place.n) return wire.count;
  std::uint32_t low = 0, high = wire.count;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    const std::int64_t byte = 2 * (wire.position + middle);
    if (read<std::uint16_t>(offsets.bytes + byte) < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Adds entries `begin` to `end` of the range to the slice's sums.
ZC_FN std::uint64_t add_entries(const DecodeArgs& args, const DeviceSegment& segment,
                                const TopkPlace& place, int w, std::int64_t position,
                                std::uint32_t begin, std::uint32_t end, int slice, float* sums) {
  const Section offsets = section_of(args, segment, 1, w), values = section_of(args, segment, 2, w);
  std::uint64_t checksum = 0;
  for (std::uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const std::int64_t byte = 2 * (position + i);
    const int offset = read_piece<std::uint16_t>(offsets, byte, true, checksum);
    const auto value = read_piece<std::uint16_t>(values, byte, true, checksum);
    const int last = i > 0 ? read<std::uint16_t>(offsets.bytes + byte - 2) : -1;
    if (offset <= last || offset >= place.n) {
      refuse(args, kFaultTopkOffset, w, place.segment, static_cast<std::uint32_t>(offset));
    }
    if ((value & 0x7fff) > kBf16Max || value == 0x8000) {
      refuse(args, kFaultTopkValue, w, place.segment, value);
    }
    // Offsets that do not increase may lie anywhere.
    const auto at = static_cast<unsigned>(offset - place.offset - slice * kSliceElements);
    if (at < kSliceElements) sums[at] += bf16_value(value);
  }
  return checksum;
}

// The sums of the wires before these: zero, or what they left in `out`.
ZC_FN void load_slice(const float* out, int n, bool any, float4* sums) {
  if (!any) {
    ZC_UNROLL for (int i = 0; i < kSliceElements / 4; i += kThreads) sums[i + threadIdx.x] = {};
    return;
  }
  auto* sum = reinterpret_cast<float*>(sums);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) sum[i] = out[i];
}

ZC_FN void store_slice(const float4* sums, int n, bool not_finite, float* out) {
  const float nan = from_bits(kNanBits);
  if (n == kSliceElements && is_aligned(out, sizeof(float4))) {
    auto* fours = reinterpret_cast<float4*>(out);
    ZC_UNROLL for (int i = 0; i < kSliceElements / 4; i += kThreads) {
      const float4 x = sums[i + threadIdx.x];
      fours[i + threadIdx.x] = not_finite ? float4{nan, nan, nan, nan} : x;
    }
    return;
  }
  const auto* sum = reinterpret_cast<const float*>(sums);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    out[i] = not_finite ? nan : sum[i];
  }
}

// Wires [base, base + count), after those before them.
ZC_FN void decode_slice(const DecodeArgs& args, const DeviceSegment& segment,
                        const TopkPlace& place, int base, int count, int slice, bool not_finite,
                        const TopkWire* wires, unsigned long long* parts) {
  __shared__ float4 sums[kSliceElements / 4];
  const std::int64_t first = place.first + slice * kSliceElements, left = segment.n - first;
  const int n = left < 0 ? 0 : left < kSliceElements ? static_cast<int>(left) : kSliceElements;
  float* out = args.out + segment.offset + first;
  load_slice(out, n, base > 0, sums);
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    const std::uint32_t begin = wires[i].bounds[slice], end = wires[i].bounds[slice + 1];
    if (begin == end) continue;
    const std::uint64_t checksum = add_entries(args, segment, place, base + i, wires[i].position,
                                               begin, end, slice, reinterpret_cast<float*>(sums));
    if (begin + kWarp * warp_index() < end) add_part(args, parts, base + i, checksum);
    __syncthreads();  // the next wire adds to the same elements
  }
  store_slice(sums, n, not_finite, out);
  __syncthreads();  // the next slice takes the place of this one
}

ZC_FN void decode_topk_tile(const DecodeArgs& args, unsigned long long* parts) {
  __shared__ TopkWire wires[kBatch];
  __shared__ std::uint32_t not_finite;
  const DeviceSegment& segment = args.tables.segments[args.tables.tiles[blockIdx.x].segment];
  const TopkPlace place(args, segment);
  if (threadIdx.x == 0) not_finite = 0;
  __syncthreads();
  for (int base = 0; base < args.count; base += kBatch) {
    const int count = args.count - base < kBatch ? args.count - base : kBatch;
    for (int i = warp_index(); i < count; i += kWarps) {
      const bool flagged = open_wire(args, segment, place, base + i, parts, wires[i]);
      if (flagged && lane_index() == 0) atomicOr(&not_finite, 1u);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count * (kTileSlices + 1); i += kThreads) {
      TopkWire& wire = wires[i / (kTileSlices + 1)];
      const int w = base + i / (kTileSlices + 1), slice = i % (kTileSlices + 1);
      wire.bounds[slice] = find_bound(section_of(args, segment, 1, w), place, wire, slice);
    }
    __syncthreads();
    ZC_NO_UNROLL for (int slice = 0; slice < kTileSlices; ++slice) {
      decode_slice(args, segment, place, base, count, slice, not_finite, wires, parts);
    }
  }
}

}  // namespace zcomm::cuda

ZC_KERNEL(zc_decode_topk, zcomm::cuda::DecodeArgs, zcomm::cuda::kThreads, 6) {
  using namespace zcomm::cuda;
  ZC_DYNAMIC_SHARED(unsigned long long, parts);
  clear_parts(args, parts);
  const Strip strip(args.tables);
  decode_topk_tile(args, parts);
  if (strip.ends_segment) {
    check_paddings(args, strip.segment, parts);
  }
  finish_decode(args, strip.frame, parts);
}
