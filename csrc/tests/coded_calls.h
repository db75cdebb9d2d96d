// Calls of the coded loop for the tests of the ring: random chunks of all codecs, and what each
// rank must end with, to the bit: what encode and decode_sum give without a ring.
#pragma once

#include <algorithm>

#include "shm/coded.h"
#include "tests/ring_calls.h"

namespace zcomm::test {

using shm::CodedChunk;
using shm::CodedJob;
using shm::OwnedPart;

// Elements of a flat tensor that one rank owns.
struct Owned {
  Part part;
  std::int64_t offset;
};

inline float* floats(const Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

// One chunk as one rank has it. Layouts stay where they are: native chunks point to them.
struct RankChunk {
  std::unique_ptr<Layout> wire;
  std::vector<std::unique_ptr<Layout>> packed;  // of every owner
};

class CodedCall {
 public:
  CodedCall(Collective collective, int world, int chunks, std::uint64_t seed)
      : collective_(collective), world_(world), seed_(seed), random_(seed) {
    for (int i = 0; i < chunks; ++i) add_chunk();
    for (int r = 0; r < world; ++r) add_rank(r);
    verify_ = random_.below(2) > 0;
    collective_ == kAllGather ? expect_gathered() : expect_sums();
  }

  CodedJob job(int rank, const Kernels* kernels, double timeout_s = 60, int spins = 0) const {
    const Rank& mine = ranks_[rank];
    const bool reduce = collective_ != kAllGather, gather = collective_ != kReduceScatter;
    const bool small = reduce && gather && chunks_.size() == 1;
    return {{reduce, gather, seed_, timeout_s, spins},
            kernels,
            1,
            0.25,
            verify_,
            &mine.native,
            &mine.owned,
            {mine.source.data(), kGradF32},
            {mine.target.data(), kGradF32},
            {reduce ? mine.target.data() : mine.source.data(), kGradF32},
            floats(mine.sums),
            small ? &mine.small : nullptr,
            mine.frames.data(),
            nullptr,
            nullptr};
  }

  std::int64_t slot_nbytes() const {
    std::int64_t most = 64 * world_;
    for (const RankChunk& chunk : ranks_[0].chunks) most = std::max(most, wire_nbytes(*chunk.wire));
    return (most + 63) / 64 * 64;
  }

  bool is_right(int rank) const { return ranks_[rank].target == ranks_[rank].expected; }
  // Only what has an owner is written.
  bool left_the_rest_alone(int rank) const {
    const Rank& r = ranks_[rank];
    Bytes written(r.target);
    for (std::int64_t i : r.writes) floats(written)[i] = floats(r.expected)[i];
    return written == r.expected;
  }
  std::string describe() const {
    return "collective " + std::to_string(collective_) + " chunks " +
           std::to_string(chunks_.size()) + " seed " + std::to_string(seed_);
  }

 private:
  // What every owner has of a chunk, in the flat tensor.
  using ChunkParts = std::vector<std::vector<Owned>>;

  struct Rank {
    std::vector<RankChunk> chunks;
    std::vector<CodedChunk> native;
    std::vector<OwnedPart> owned, small;
    std::vector<std::int64_t> writes;
    Bytes source{0}, target{0}, expected{0}, sums{0}, frames{0};
  };

  void add_chunk() {
    ChunkParts parts(static_cast<std::size_t>(world_));
    for (std::vector<Owned>& of_owner : parts) {
      for (std::int64_t i = random_.below(3); i > 0; --i) {
        const int codec = kNone + static_cast<int>(random_.below(kCodecs - kNone));
        const Part p = part(codec, 5 + static_cast<int>(random_.below(3)), 1 + random_.below(300));
        of_owner.push_back({p, numel_ += random_.below(3)});
        numel_ += p.n;
      }
    }
    chunks_.push_back(std::move(parts));
  }

  // The frames of some owners over the flat tensor, or over their packed elements.
  std::unique_ptr<Layout> layout(const ChunkParts& parts, const std::vector<int>& owners,
                                 bool packed) const {
    std::vector<Part> laid;
    std::int64_t at = 0;
    for (std::size_t f = 0; f < owners.size(); ++f) {
      for (const Owned& one : parts[owners[f]]) {
        laid.push_back(one.part);
        laid.back().frame = static_cast<int>(f);
        if (!packed) laid.back().gap = one.offset - at;
        at = one.offset + one.part.n;
      }
    }
    return std::make_unique<Layout>(make_layout(laid, static_cast<int>(owners.size())));
  }

  void add_rank(int r) {
    Rank rank;
    std::vector<int> order;
    for (int q = 0; q < world_; ++q) {
      if (q != r) order.push_back(q);
    }
    order.push_back(r);
    std::int64_t packed = 0, longest = 0, frames = 0;
    for (const ChunkParts& parts : chunks_) {
      RankChunk chunk{layout(parts, order, false), {}};
      for (int q = 0; q < world_; ++q) {
        chunk.packed.push_back(layout(parts, {q}, true));
        longest = std::max(longest, span(*chunk.packed.back()));
      }
      rank.native.emplace_back(r, world_, *chunk.wire, *chunk.packed[r]);
      rank.owned.push_back({chunk.packed[r].get(), packed});
      packed += span(*chunk.packed[r]) + 3;
      frames = std::max(frames, wire_nbytes(*chunk.wire));
      rank.chunks.push_back(std::move(chunk));
    }
    for (const auto& one : rank.chunks[0].packed) rank.small.push_back({one.get(), 0});
    const bool gathers = collective_ == kAllGather, scatters = collective_ == kReduceScatter;
    rank.source = make_grad(gathers ? packed : numel_, kGradF32, kKinds, random_.next(), 0);
    rank.target = Bytes(static_cast<std::size_t>(scatters ? packed : numel_) * 4);
    rank.expected = Bytes(rank.target);
    rank.sums = Bytes(static_cast<std::size_t>(longest) * 4);
    rank.frames = Bytes(static_cast<std::size_t>(frames));
    ranks_.push_back(std::move(rank));
  }

  Bytes encoded(const Layout& layout, const float* from, double prescale) const {
    Bytes wire(static_cast<std::size_t>(wire_nbytes(layout)));
    encode({&layout, kernels(kIsaScalar), 1, reinterpret_cast<const std::uint8_t*>(from), kGradF32,
            prescale, nullptr, nullptr, kResidualNone, wire.data(), true});
    return wire;
  }

  // An owner's packed values, to their places in every rank's tensor.
  void spread(const std::vector<Owned>& parts, const Bytes& values) {
    std::int64_t at = 0;
    for (const Owned& one : parts) {
      for (Rank& r : ranks_) {
        std::memcpy(floats(r.expected) + one.offset, floats(values) + at,
                    static_cast<std::size_t>(one.part.n) * 4);
        for (std::int64_t i = 0; i < one.part.n; ++i) r.writes.push_back(one.offset + i);
      }
      at += one.part.n;
    }
  }

  Bytes packed_of(const Rank& rank, const std::vector<Owned>& parts) const {
    std::vector<float> values;
    for (const Owned& one : parts) {
      const float* from = floats(rank.source) + one.offset;
      values.insert(values.end(), from, from + one.part.n);
    }
    Bytes packed(values.size() * 4);
    if (!values.empty()) std::memcpy(packed.data(), values.data(), packed.size());
    return packed;
  }

  void expect_gathered() {
    for (std::size_t t = 0; t < chunks_.size(); ++t) {
      for (int owner = 0; owner < world_; ++owner) {
        const Rank& rank = ranks_[owner];
        const Layout& own = *rank.chunks[t].packed[owner];
        const Bytes wire = encoded(own, floats(rank.source) + rank.owned[t].at, 1.0),
                    values(static_cast<std::size_t>(span(own)) * 4);
        test::decode(own, kIsaScalar, 1, {wire.data()}, values);
        spread(chunks_[t][owner], values);
      }
    }
  }

  void expect_sums() {
    for (std::size_t t = 0; t < chunks_.size(); ++t) {
      for (int owner = 0; owner < world_; ++owner) expect_sum(t, owner);
    }
  }

  void expect_sum(std::size_t t, int owner) {
    const std::vector<Owned>& parts = chunks_[t][owner];
    const Layout& own = *ranks_[owner].chunks[t].packed[owner];
    std::vector<Bytes> wires;
    std::vector<const std::uint8_t*> addresses;
    for (const Rank& r : ranks_) wires.push_back(encoded(own, floats(packed_of(r, parts)), 0.25));
    for (const Bytes& wire : wires) addresses.push_back(wire.data());
    Bytes sums(static_cast<std::size_t>(span(own)) * 4);
    test::decode(own, kIsaScalar, 1, addresses, sums);
    if (collective_ == kReduceScatter) {
      Rank& rank = ranks_[owner];
      std::memcpy(floats(rank.expected) + rank.owned[t].at, sums.data(), sums.size());
      for (std::int64_t i = 0; i < span(own); ++i) rank.writes.push_back(rank.owned[t].at + i);
      return;
    }
    const Bytes wire = encoded(own, floats(sums), 1.0);
    test::decode(own, kIsaScalar, 1, {wire.data()}, sums);
    spread(parts, sums);
  }

  Collective collective_;
  int world_;
  std::uint64_t seed_;
  Random random_;
  bool verify_ = true;
  std::int64_t numel_ = 0;
  std::vector<ChunkParts> chunks_;
  std::vector<Rank> ranks_;
};

}  // namespace zcomm::test
