#include "shm/plain.h"

#include <algorithm>
#include <cstring>

#include "codec/frame.h"
#include "cpu/float_mode.h"

namespace zcomm::shm {
namespace {

// A tile's sums and codes stay in the L1 cache between the kernels.
constexpr std::int64_t kTile = 1024;
// What a chunk takes of a slot, at most, times the ranks: the caller's memory that it is read from
// and written to should stay in the L2 cache from its first step to its last.
constexpr std::int64_t kRankNbytes = 128 << 10;
// A tensor is summed by every rank, in one exchange instead of two, if the ranks then read no more
// than this: it takes less time than to wait once more.
constexpr std::int64_t kAtOnce = 64 << 10;

std::int64_t width(GradType type) { return type == kGradF32 ? 4 : 2; }

// Where a strip goes on.
class Cursor {
 public:
  Cursor(const Strip& strip, Place place) : strip_(&strip), place_(place) {}

  std::uint8_t* address() const { return place_.at(strip_->runs[run_].at + done_); }
  // How many of the next n elements follow each other in memory.
  std::int64_t together(std::int64_t n) const { return std::min(n, strip_->runs[run_].n - done_); }
  void skip(std::int64_t n) {
    done_ += n;
    if (done_ == strip_->runs[run_].n) {
      ++run_;
      done_ = 0;
    }
  }

 private:
  const Strip* strip_;
  Place place_;
  std::size_t run_ = 0;
  std::int64_t done_ = 0;
};

// The numbers of one codec in a slot.
class Format {
 public:
  explicit Format(const PlainJob& job)
      : kernels_(*job.kernels), codec_(job.codec), bytes_(code_width(job.codec) / 8) {}

  std::int64_t bytes() const { return bytes_; }

  // NaNs keep their bits here: sums and get() give the canonical one.
  void put(const std::uint8_t* from, GradType type, float prescale, std::int64_t n,
           std::uint8_t* codes) const {
    if (codec_ == kNone) {
      kernels_.load[type][kResidualNone](from, prescale, nullptr, n,
                                         reinterpret_cast<float*>(codes));
      return;
    }
    alignas(64) float v[kTile];
    for (std::int64_t a = 0; a < n; a += kTile) {
      const std::int64_t m = std::min(kTile, n - a);
      kernels_.load[type][kResidualNone](from + a * width(type), prescale, nullptr, m, v);
      kernels_.encode_plain[codec_](v, m, codes + a * bytes_, nullptr);
    }
  }

  void get(const std::uint8_t* codes, std::int64_t n, std::uint8_t* to, GradType type) const {
    if (type == kGradF32) {
      sum(&codes, 1, n, reinterpret_cast<float*>(to));
    } else {
      std::memcpy(to, codes, n * bytes_);  // a half-precision tensor has the codec's own numbers
    }
  }

  void sum(const std::uint8_t* const* codes, int count, std::int64_t n, float* out) const {
    kernels_.decode_plain[codec_](codes, count, n, out, false);
  }

  // The sums once more as codes; at most a tile.
  void sum_codes(const std::uint8_t* const* codes, int count, std::int64_t n,
                 std::uint8_t* result) const {
    if (codec_ == kNone) return sum(codes, count, n, reinterpret_cast<float*>(result));
    alignas(64) float sums[kTile];
    sum(codes, count, n, sums);
    kernels_.encode_plain[codec_](sums, n, result, nullptr);
  }

  void add(const float* sums, std::int64_t n, float* to) const {
    kernels_.load[kGradF32][kResidualF32](sums, 1.0f, to, n, to);
  }

 private:
  const Kernels& kernels_;
  std::uint8_t codec_;
  std::int64_t bytes_;
};

class PlainSteps final : public Steps {
 public:
  PlainSteps(Ring& ring, const PlainJob& job)
      : ring_(ring),
        job_(job),
        is_small_(is_small(ring, job)),
        call_(is_small_ ? as_one_exchange(job.call) : job.call),
        format_(job),
        me_(ring.rank()),
        codes_(ring.world()),
        own_from_(call_.reduce ? (*job.strips)[me_] : *job.own,
                  call_.reduce ? job.source : job.own_at),
        own_to_(call_.gather ? (*job.strips)[me_] : *job.own,
                call_.gather ? job.target : job.own_at) {
    const int regions = call_.reduce ? ring.world() : 1;
    const std::int64_t most = std::min(ring.slot_nbytes(), ring.world() * kRankNbytes);
    region_nbytes_ = most / regions / 64 * 64;
    part_ = region_nbytes_ / format_.bytes();
    for (const Strip& strip : *job.strips) {
      longest_ = std::max(longest_, strip.numel);
      sent_.emplace_back(strip, job.source);
      collected_.emplace_back(strip, job.target);
    }
  }

  const Call& call() const { return call_; }

  // A job of nothing takes a chunk, in which its signature is compared.
  std::uint32_t count() const {
    return is_small_ ? 1 : static_cast<std::uint32_t>((longest_ + part_ - 1) / part_);
  }

  bool publish(std::uint32_t t, std::uint32_t chunk) override {
    if (is_small_) {
      put_all(ring_.slot(me_, chunk));
      return true;
    }
    if (!call_.reduce) {
      put_own(numel(me_, t), region(me_, chunk, me_));
      return true;
    }
    for (int k = 1; k < ring_.world(); ++k) {  // no two ranks begin with the same owner
      const int owner = (me_ + k) % ring_.world();
      put(sent_[owner], numel(owner, t), region(me_, chunk, owner));
    }
    return true;
  }

  bool reduce(std::uint32_t t, std::uint32_t chunk) override {
    const std::int64_t n = numel(me_, t);
    for (std::int64_t a = 0; a < n;) {
      const std::int64_t m = own_to_.together(own_from_.together(std::min(kTile, n - a)));
      sum_tile(chunk, a * format_.bytes(), m);
      own_from_.skip(m);
      own_to_.skip(m);
      a += m;
    }
    return true;
  }

  bool collect(std::uint32_t t, std::uint32_t chunk) override {
    if (is_small_) {
      sum_all(chunk);
      return true;
    }
    for (int k = 1; k < ring_.world(); ++k) {
      const int owner = (me_ + k) % ring_.world();
      get(region(owner, chunk, owner), numel(owner, t), collected_[owner]);
    }
    return true;
  }

 private:
  static bool is_small(const Ring& ring, const PlainJob& job) {
    std::int64_t nbytes = 0;
    for (const Strip& strip : *job.strips) nbytes += strip.numel * Format(job).bytes();
    return job.call.reduce && job.call.gather && nbytes <= ring.slot_nbytes() &&
           nbytes * ring.world() <= kAtOnce;
  }

  // A small all-reduce: every rank publishes all that it has ...
  void put_all(std::uint8_t* codes) {
    for (std::size_t owner = 0; owner < sent_.size(); ++owner) {
      const std::int64_t n = (*job_.strips)[owner].numel;
      put(sent_[owner], n, codes);
      codes += n * format_.bytes();
    }
  }

  // ... and sums all of it.
  void sum_all(std::uint32_t chunk) {
    std::int64_t at = 0;
    for (std::size_t owner = 0; owner < collected_.size(); ++owner) {
      const std::int64_t n = (*job_.strips)[owner].numel;
      sum_strip(chunk, at, n, collected_[owner]);
      at += n * format_.bytes();
    }
  }

  // How many elements of a rank's strip chunk t has.
  std::int64_t numel(int rank, std::uint32_t t) const {
    const std::int64_t left = (*job_.strips)[rank].numel - static_cast<std::int64_t>(t) * part_;
    return std::clamp<std::int64_t>(left, 0, part_);
  }

  // Where the numbers of `owner` are in the slot of `rank`.
  std::uint8_t* region(int rank, std::uint32_t chunk, int owner) const {
    return ring_.slot(rank, chunk) + (call_.reduce ? owner * region_nbytes_ : 0);
  }

  void put(Cursor& from, std::int64_t n, std::uint8_t* codes) const {
    while (n > 0) {
      const std::int64_t m = from.together(n);
      format_.put(from.address(), job_.source.type, job_.prescale, m, codes);
      from.skip(m);
      codes += m * format_.bytes();
      n -= m;
    }
  }

  // What this rank owns, into its slot, and from there to its own place in the tensor.
  void put_own(std::int64_t n, std::uint8_t* codes) {
    while (n > 0) {
      const std::int64_t m = own_to_.together(own_from_.together(std::min(kTile, n)));
      format_.put(own_from_.address(), job_.own_at.type, job_.prescale, m, codes);
      format_.get(codes, m, own_to_.address(), job_.target.type);
      own_from_.skip(m);
      own_to_.skip(m);
      codes += m * format_.bytes();
      n -= m;
    }
  }

  void sum_tile(std::uint32_t chunk, std::int64_t offset, std::int64_t n) {
    alignas(64) std::uint8_t own[4 * kTile];
    alignas(64) float sums[kTile];
    format_.put(own_from_.address(), job_.source.type, job_.prescale, n, own);
    for (int r = 0; r < ring_.world(); ++r) codes_[r] = region(r, chunk, me_) + offset;
    codes_[me_] = own;
    const std::uint8_t* const* codes = codes_.data();
    float* const out = reinterpret_cast<float*>(own_to_.address());
    if (call_.gather) {
      std::uint8_t* const result = region(me_, chunk, me_) + offset;
      format_.sum_codes(codes, ring_.world(), n, result);
      format_.get(result, n, own_to_.address(), job_.target.type);
    } else if (job_.accumulate) {
      format_.sum(codes, ring_.world(), n, sums);
      format_.add(sums, n, out);
    } else {
      format_.sum(codes, ring_.world(), n, out);
    }
  }

  // The sums of n elements that lie at an offset of every slot, as the owner would send them.
  void sum_strip(std::uint32_t chunk, std::int64_t offset, std::int64_t n, Cursor& to) {
    alignas(64) std::uint8_t result[4 * kTile];
    while (n > 0) {
      const std::int64_t m = to.together(std::min(kTile, n));
      for (int r = 0; r < ring_.world(); ++r) codes_[r] = ring_.slot(r, chunk) + offset;
      format_.sum_codes(codes_.data(), ring_.world(), m, result);
      format_.get(result, m, to.address(), job_.target.type);
      to.skip(m);
      offset += m * format_.bytes();
      n -= m;
    }
  }

  void get(const std::uint8_t* codes, std::int64_t n, Cursor& to) const {
    while (n > 0) {
      const std::int64_t m = to.together(n);
      format_.get(codes, m, to.address(), job_.target.type);
      to.skip(m);
      codes += m * format_.bytes();
      n -= m;
    }
  }

  Ring& ring_;
  const PlainJob& job_;
  bool is_small_;
  Call call_;
  Format format_;
  int me_;
  std::vector<const std::uint8_t*> codes_;  // of one tile, in rank order
  std::int64_t region_nbytes_, part_, longest_ = 1;
  std::vector<Cursor> sent_, collected_;
  Cursor own_from_, own_to_;
};

}  // namespace

Strip::Strip(std::vector<Run> given) {
  for (const Run& run : given) {
    if (run.n == 0) continue;
    if (!runs.empty() && runs.back().at + runs.back().n == run.at) {
      runs.back().n += run.n;
    } else {
      runs.push_back(run);
    }
    numel += run.n;
  }
}

Outcome run(Ring& ring, const PlainJob& job) {
  const FloatMode mode;
  PlainSteps steps(ring, job);
  return take_turns(ring, steps.call(), steps.count(), steps);
}

}  // namespace zcomm::shm
