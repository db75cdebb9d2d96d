#include "shm/coded.h"

#include <algorithm>
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

class CodedSteps final : public Steps {
 public:
  CodedSteps(Ring& ring, const CodedJob& job)
      : ring_(ring),
        job_(job),
        call_(job.small ? as_one_exchange(job.call) : job.call),
        me_(ring.rank()),
        wires_(ring.world()) {}

  const Call& call() const { return call_; }

  bool publish(std::uint32_t t, std::uint32_t chunk) override {
    const CodedChunk& layouts = (*job_.chunks)[t];
    std::uint8_t* const slot = ring_.slot(me_, chunk);
    if (job_.call.reduce) {  // a small all-reduce, too
      encode(*layouts.wire, job_.source.base, job_.source.type, job_.prescale, tables(job_.sent, t),
             slot);
    } else {
      const OwnedPart& owned = (*job_.owned)[t];
      encode(*owned.layout, job_.own_at.at(owned.at), job_.own_at.type, 1.0, tables(job_.summed, t),
             slot + layouts.last[me_]);
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
           tables(job_.summed, t), ring_.slot(me_, chunk) + layouts.last[me_]);
    return true;
  }

  bool collect(std::uint32_t t, std::uint32_t chunk) override {
    if (is_small()) return sum_all(chunk);
    const CodedChunk& layouts = (*job_.chunks)[t];
    std::size_t frame = 0;
    for (int r = 0; r < ring_.world(); ++r) {
      if (r != me_) wires_[frame++] = ring_.slot(r, chunk) + layouts.last[r];
    }
    wires_[frame] = ring_.slot(me_, chunk) + layouts.last[me_];
    return decode(layouts);
  }

  // Why it ended: a wire was refused, while an owner's frames were summed or later.
  std::optional<Fault> fault;
  std::optional<int> summed;

 private:
  bool is_small() const { return job_.small != nullptr; }

  // An owner's frame in the slot of every rank.
  void find_frames(int owner, std::uint32_t chunk, const CodedChunk& layouts) {
    for (int r = 0; r < ring_.world(); ++r) {
      wires_[r] = ring_.slot(r, chunk) + layouts.start(owner, r);
    }
  }

  // A small all-reduce: the frames that the owners would share, and from them the tensor.
  bool sum_all(std::uint32_t chunk) {
    const CodedChunk& layouts = job_.chunks->front();
    for (int owner = 0; owner < ring_.world(); ++owner) {
      const Layout& layout = *(*job_.small)[owner].layout;
      find_frames(owner, chunk, layouts);
      if (!sum(owner, layout, job_.sums)) return false;
      encode(layout, reinterpret_cast<const std::uint8_t*>(job_.sums), kGradF32, 1.0, {},
             job_.frames + layouts.before[owner]);
    }
    std::size_t frame = 0;
    for (int r = 0; r < ring_.world(); ++r) {
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
    fault = decode_sum({&layout, job_.kernels, job_.threads, wires_.data(), ring_.world(), out,
                        job_.verify, false});
    if (fault) summed = owner;
    return !fault;
  }

  // Every owner's frame.
  bool decode(const CodedChunk& layouts) {
    fault = decode_sum({layouts.wire, job_.kernels, job_.threads, wires_.data(), 1,
                        reinterpret_cast<float*>(job_.target.base), job_.verify, true});
    return !fault;
  }

  Ring& ring_;
  const CodedJob& job_;
  Call call_;
  int me_;
  std::vector<const std::uint8_t*> wires_;
};

}  // namespace

CodedOutcome run(Ring& ring, const CodedJob& job) {
  CodedSteps steps(ring, job);
  const auto count = static_cast<std::uint32_t>(job.chunks->size());
  const Outcome end = take_turns(ring, steps.call(), count, steps);
  return {end, std::move(steps.fault), steps.summed};
}

}  // namespace zcomm::shm
