#include "shm/coded.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

namespace zcomm::shm {

CodedChunk::CodedChunk(int rank, int world, const Layout& all, const Layout& packed)
    : wire(&all), own(&packed) {
  for (const Frame& frame : all.frames) nbytes.push_back(frame.nbytes);
  std::rotate(nbytes.begin() + rank, nbytes.end() - 1, nbytes.end());
  const auto total = std::accumulate(nbytes.begin(), nbytes.end(), std::int64_t{0});
  std::int64_t at = 0;
  for (int r = 0; r < world; ++r) {
    before.push_back(at);
    last.push_back(total - nbytes[r]);
    at += nbytes[r];
  }
}

namespace {

// Where a rank's wire of a chunk is.
using WireOf = std::function<std::uint8_t*(int rank, std::uint32_t chunk)>;

class CodedSteps final : public Steps {
 public:
  CodedSteps(int rank, int world, WireOf wire_of, const CodedJob& job)
      : wire_of_(std::move(wire_of)),
        job_(job),
        call_(job.small ? as_one_exchange(job.call) : job.call),
        me_(rank),
        world_(world),
        wires_(world) {}

  const Call& call() const { return call_; }

  bool publish(std::uint32_t t, std::uint32_t chunk) override {
    const CodedChunk& layouts = (*job_.chunks)[t];
    std::uint8_t* const wire = wire_of_(me_, chunk);
    if (job_.call.reduce) {  // a small all-reduce, too
      encode(*layouts.wire, job_.source.base, job_.source.type, job_.prescale, tables(job_.sent, t),
             wire);
    } else {
      const OwnedPart& owned = (*job_.owned)[t];
      encode(*owned.layout, job_.own_at.at(owned.at), job_.own_at.type, 1.0, tables(job_.summed, t),
             wire + layouts.last[me_]);
    }
    return true;
  }

  bool reduce(std::uint32_t t, std::uint32_t chunk) override {
    const CodedChunk& layouts = (*job_.chunks)[t];
    find_frames(me_, chunk, layouts);
    if (!job_.call.gather) {
      const OwnedPart& owned = (*job_.owned)[t];
      return sum(me_, *owned.layout, reinterpret_cast<float*>(job_.own_at.at(owned.at)));
    }
    if (!sum(me_, *layouts.own, job_.sums)) return false;
    encode(*layouts.own, reinterpret_cast<const std::uint8_t*>(job_.sums), kGradF32, 1.0,
           tables(job_.summed, t), wire_of_(me_, chunk) + layouts.last[me_]);
    return true;
  }

  bool collect(std::uint32_t t, std::uint32_t chunk) override {
    if (is_small()) return sum_all(chunk);
    const CodedChunk& layouts = (*job_.chunks)[t];
    std::size_t frame = 0;
    for (int r = 0; r < world_; ++r) {
      if (r != me_) wires_[frame++] = wire_of_(r, chunk) + layouts.last[r];
    }
    wires_[frame] = wire_of_(me_, chunk) + layouts.last[me_];
    return decode(layouts);
  }

  // Why a step ended it.
  std::optional<Refusal> refused;

 private:
  bool is_small() const { return job_.small != nullptr; }

  // An owner's frame in the wire of every rank.
  void find_frames(int owner, std::uint32_t chunk, const CodedChunk& layouts) {
    for (int r = 0; r < world_; ++r) wires_[r] = wire_of_(r, chunk) + layouts.start(owner, r);
  }

  // A small all-reduce: the frames that the owners would share, and from them the tensor.
  bool sum_all(std::uint32_t chunk) {
    const CodedChunk& layouts = job_.chunks->front();
    for (int owner = 0; owner < world_; ++owner) {
      const Layout& layout = *(*job_.small)[owner].layout;
      find_frames(owner, chunk, layouts);
      if (!sum(owner, layout, job_.sums)) return false;
      encode(layout, reinterpret_cast<const std::uint8_t*>(job_.sums), kGradF32, 1.0, {},
             job_.frames + layouts.before[owner]);
    }
    std::size_t frame = 0;
    for (int r = 0; r < world_; ++r) {
      if (r != me_) wires_[frame++] = job_.frames + layouts.before[r];
    }
    wires_[frame] = job_.frames + layouts.before[me_];
    return decode(layouts);
  }

  static ResidualTables tables(const std::vector<ResidualTables>* of_chunks, std::uint32_t t) {
    return of_chunks ? (*of_chunks)[t] : ResidualTables{};
  }

  void encode(const Layout& layout, const std::uint8_t* from, GradType type, double prescale,
              const ResidualTables& residuals, std::uint8_t* wire) const {
    zcomm::encode({&layout, job_.kernels, job_.threads, from, type, prescale, residuals.in,
                   residuals.out, residuals.type, wire, job_.verify, true});
  }

  // The sum of an owner's frames, of all ranks.
  bool sum(int owner, const Layout& layout, float* out) {
    return fine(decode_sum({&layout, job_.kernels, job_.threads, wires_.data(), world_, out,
                            job_.verify, false}),
                owner);
  }

  // Every owner's frame.
  bool decode(const CodedChunk& layouts) {
    return fine(decode_sum({layouts.wire, job_.kernels, job_.threads, wires_.data(), 1,
                            reinterpret_cast<float*>(job_.target.base), job_.verify, true}),
                std::nullopt);
  }

  bool fine(std::optional<Fault> fault, std::optional<int> summed) {
    if (!fault) return true;
    refused = {std::move(*fault), summed};
    return false;
  }

  WireOf wire_of_;
  const CodedJob& job_;
  Call call_;
  int me_, world_;
  std::vector<const std::uint8_t*> wires_;
};

std::uint8_t* parcel(const Parcels& parcels, int rank) {
  return reinterpret_cast<std::uint8_t*>(parcels.first) + rank * parcels.nbytes;
}

// Frames have their places in a wire, though a parcel may have one of them only.
CodedSteps steps_in(const Parcels& parcels, const CodedJob& job) {
  const auto wire = [&](int rank, std::uint32_t) {
    const std::int64_t missing = job.call.reduce ? 0 : job.chunks->front().last[rank];
    return parcel(parcels, rank) - missing;
  };
  return {parcels.rank, parcels.world, wire, job};
}

}  // namespace

CodedOutcome run(Ring& ring, const CodedJob& job) {
  const auto slot = [&ring](int rank, std::uint32_t chunk) { return ring.slot(rank, chunk); };
  CodedSteps steps(ring.rank(), ring.world(), slot, job);
  const auto count = static_cast<std::uint32_t>(job.chunks->size());
  const Outcome end = take_turns(ring, steps.call(), count, steps);
  return {end, std::move(steps.refused)};
}

void put(const Parcels& parcels, const CodedJob& job) {
  steps_in(parcels, job).publish(0, 0);
  const CodedChunk& layouts = job.chunks->front();
  const std::int64_t own = layouts.nbytes[parcels.rank];
  const std::int64_t sent = job.call.reduce ? layouts.last[parcels.rank] + own : own;
  for (int r = 0; r < parcels.world; ++r) {
    if (r != parcels.rank) std::memcpy(parcel(parcels, r), parcel(parcels, parcels.rank), sent);
  }
}

std::optional<Refusal> take(const Parcels& parcels, const CodedJob& job) {
  CodedSteps steps = steps_in(parcels, job);
  job.call.gather ? steps.collect(0, 0) : steps.reduce(0, 0);
  return std::move(steps.refused);
}

}  // namespace zcomm::shm
