#include "cpu/topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/pool.h"
#include "cpu/residual.h"

namespace zcomm {
namespace {

constexpr int kTile = kTileSize / 2;
constexpr int kSampleChunk = 128;        // whole residual blocks
constexpr std::int64_t kSample = 65536;  // enough for the threshold's third digit

// The candidates of one range: magnitudes at or above the segment's lower bound.
struct Range {
  Task task;
  std::uint32_t* found;  // room for the whole range; touched only where used
  std::size_t count;
  std::uint32_t above, ties;  // how many exceed the threshold; how many equal ones are taken
  std::int64_t position;      // of its first entry among the segment's k
};

struct State {
  const EncodeArgs& args;
  int segment;
  Range* ranges;
  std::size_t count;
  std::uint32_t least;      // candidates are at or above
  std::uint32_t threshold;  // the k-th largest magnitude
  bool not_finite, settled;

  const Segment& seg() const { return args.layout->segments[segment]; }
};

// A lower bound of the k-th magnitude from a sample, with room for error that grows with `slack`.
std::uint32_t guess_least(const State& state, double slack) {
  const Segment& segment = state.seg();
  if (segment.n < 4 * kSampleChunk) return 1;
  const ResidualTile residual(state.args, state.segment);
  const std::int64_t chunks = std::min(segment.n / (4 * kSampleChunk), kSample / kSampleChunk);
  CountedVector<std::uint32_t> sample(chunks * kSampleChunk);
  alignas(64) float v[kSampleChunk];
  for (std::int64_t i = 0; i < chunks; ++i) {
    // Spread evenly, with a hash, so that samples do not line up with a period of the data.
    const std::int64_t width = segment.n / chunks / kSampleChunk;
    const auto jitter = static_cast<std::int64_t>((i * 0x9e3779b97f4a7c15ull >> 33) % width);
    residual.load((i * width + jitter) * kSampleChunk, kSampleChunk, v);
    for (int j = 0; j < kSampleChunk; ++j) sample[i * kSampleChunk + j] = bits(v[j]) & kAbsMask;
  }
  const double expected = double(sample.size()) * double(segment.k) / double(segment.n);
  const double rank = slack * (expected + 4 * std::sqrt(expected) + 8);
  if (rank >= double(sample.size())) return 1;
  const auto nth = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), nth, sample.end(), std::greater<>());
  return std::clamp(*nth, std::uint32_t{1}, kInfBits);
}

void collect(const State& state, Range& range) {
  const ResidualTile residual(state.args, state.segment);
  alignas(64) float v[kTile];
  std::uint32_t index[kTile + 16];
  range.count = 0;
  for (std::int64_t a = range.task.begin; a < range.task.end; a += kTile) {
    const int n = static_cast<int>(std::min<std::int64_t>(kTile, range.task.end - a));
    residual.load(a, n, v);
    const std::size_t hits =
        state.args.kernels->find(v, n, state.least, index, residual.ahead(a + n));
    for (std::size_t i = 0; i < hits; ++i) {
      range.found[range.count + i] = bits(v[index[i]]) & kAbsMask;
    }
    range.count += hits;
  }
}

// The k-th largest candidate, eleven bits at a time from the top.
std::uint32_t kth_largest(const State& state, std::int64_t k) {
  std::uint32_t prefix = 0;
  CountedVector<std::int64_t> histogram;
  for (int shift : {20, 10, 0}) {
    const int width = shift == 20 ? 11 : 10;
    histogram.assign(std::size_t{1} << width, 0);
    for (std::size_t r = 0; r < state.count; ++r) {
      const Range& range = state.ranges[r];
      for (std::size_t i = 0; i < range.count; ++i) {
        const std::uint32_t u = range.found[i];
        if (shift == 20 || u >> (shift + width) == prefix) {
          ++histogram[(u >> shift) & ((1u << width) - 1)];
        }
      }
    }
    std::uint32_t digit = (1u << width) - 1;
    for (; histogram[digit] < k; --digit) k -= histogram[digit];
    prefix = prefix << width | digit;
  }
  return prefix;
}

// Counts each range's share; the lower ranges take the ties.
void share(State& state) {
  std::int64_t left = state.seg().k;
  for (std::size_t r = 0; r < state.count; ++r) {
    Range& range = state.ranges[r];
    range.above = range.ties = 0;
    for (std::size_t i = 0; i < range.count; ++i) {
      range.above += range.found[i] > state.threshold;
      range.ties += range.found[i] == state.threshold;
    }
    if (state.threshold == 0) {
      range.ties = static_cast<std::uint32_t>(range.task.end - range.task.begin - range.count);
    }
    left -= range.above;
  }
  std::int64_t position = 0;
  for (std::size_t r = 0; r < state.count; ++r) {
    Range& range = state.ranges[r];
    range.ties = static_cast<std::uint32_t>(std::min<std::int64_t>(range.ties, left));
    left -= range.ties;
    range.position = position;
    position += range.above + range.ties;
  }
}

// Finds the threshold; leaves the segment unsettled if the bound was too high.
void settle(State& state) {
  std::int64_t total = 0;
  for (std::size_t r = 0; r < state.count; ++r) {
    const Range& range = state.ranges[r];
    total += static_cast<std::int64_t>(range.count);
    state.not_finite |= std::any_of(range.found, range.found + range.count,
                                    [](std::uint32_t u) { return u >= kInfBits; });
  }
  if (state.not_finite) {
    state.settled = true;
    return;
  }
  const std::int64_t k = state.seg().k;
  if (total < k && state.least > 1) return;
  state.threshold = total < k ? 0 : kth_largest(state, k);
  share(state);
  state.settled = true;
}

// One range's entries and residual, from the threshold on.
class Writer {
 public:
  Writer(const State& state, const Range& range)
      : state_(state), residual_(state.args, state.segment), ties_(range.ties) {
    const Segment& segment = state.seg();
    offsets_ = state.args.wire + segment.section(1) + 2 * range.position;
    values_ = state.args.wire + segment.section(2) + 2 * range.position;
  }

  void tile(std::int64_t begin, std::int64_t a, int n) {
    alignas(64) float buffer[kTile];
    std::uint32_t index[kTile + 16];
    // v becomes e where it lies: what is not sent stays in the residual.
    float* const direct = residual_.direct(a);
    float* const v = direct ? direct : buffer;
    residual_.load(a, n, v);
    const std::size_t hits = find(v, n, index, residual_.ahead(a + n));
    for (std::size_t i = 0; i < hits; ++i) {
      const float x = v[index[i]];
      const std::uint32_t u = bits(x) & kAbsMask;
      if (u == state_.threshold && ties_ == 0) continue;
      ties_ -= u == state_.threshold;
      const std::uint16_t value = topk_value(x);
      v[index[i]] = x - bf16_value(value);
      store(offsets_, static_cast<std::uint16_t>(a - begin + index[i]));
      store(values_, value);
      offsets_ += 2;
      values_ += 2;
    }
    if (!direct) residual_.store(a, n, v);
  }

 private:
  std::size_t find(const float* v, int n, std::uint32_t* index, const Ahead& ahead) const {
    if (state_.threshold > 0) {
      return state_.args.kernels->find(v, n, state_.threshold, index, ahead);
    }
    for (int i = 0; i < n; ++i) index[i] = static_cast<std::uint32_t>(i);
    return n;
  }

  const State& state_;
  ResidualTile residual_;
  std::uint32_t ties_;
  std::uint8_t *offsets_, *values_;
};

void write_range(const State& state, const Range& range) {
  const Segment& segment = state.seg();
  const std::int64_t begin = range.task.begin, end = range.task.end;
  if (end == segment.n) ResidualTile(state.args, state.segment).clear_padding();
  const std::uint32_t count = state.not_finite ? kTopkNotFinite : range.above + range.ties;
  store(state.args.wire + segment.section(0) + begin / kTopkRange * 4, count);
  if (state.not_finite) {
    const ResidualTile residual(state.args, state.segment);
    if (residual.any()) residual.keep(begin, static_cast<int>(end - begin));
    return;
  }
  Writer writer(state, range);
  for (std::int64_t a = begin; a < end; a += kTile) {
    writer.tile(begin, a, static_cast<int>(std::min<std::int64_t>(kTile, end - a)));
  }
}

// Bytes no range writes: paddings, and all entries of a segment that is not finite.
void clear_rest(const State& state) {
  const Segment& segment = state.seg();
  for (int i = 0; i < 3; ++i) {
    std::uint8_t* section = state.args.wire + segment.section(i);
    const std::int64_t used = segment.sections.used[i];
    const std::int64_t from = state.not_finite && i > 0 ? 0 : used;
    std::memset(section + from, 0, align16(used) - from);
  }
}

CountedVector<State> make_states(const EncodeArgs& args, CountedVector<Range>& ranges) {
  CountedVector<State> states;
  for (Range& range : ranges) {
    if (states.empty() || states.back().segment != range.task.segment) {
      states.push_back({args, range.task.segment, &range, 0, 1, 0, false, false});
    }
    ++states.back().count;
  }
  return states;
}

void find_thresholds(const EncodeArgs& args, CountedVector<State>& states) {
  for (double slack : {1.25, 5.0, 1e300}) {
    CountedVector<std::pair<State*, Range*>> work;
    for (State& state : states) {
      if (state.settled) continue;
      state.least = guess_least(state, slack);
      for (std::size_t r = 0; r < state.count; ++r) work.emplace_back(&state, state.ranges + r);
    }
    parallel_for(args.threads, work.size(),
                 [&](std::size_t i) { collect(*work[i].first, *work[i].second); });
    parallel_for(args.threads, states.size(), [&](std::size_t i) {
      if (!states[i].settled) settle(states[i]);
    });
  }
}

std::size_t count_elements(const CountedVector<Task>& tasks) {
  std::int64_t count = 0;
  for (const Task& task : tasks) count += task.end - task.begin;
  return static_cast<std::size_t>(count);
}

}  // namespace

ByteRange topk_slice(const Segment& segment, std::int64_t i, std::int64_t count) {
  const std::int64_t words = segment.sections.nbytes() / 8;
  return {words * i / count * 8, words * (i + 1) / count * 8};
}

void encode_topk(const EncodeArgs& args, std::atomic<std::uint64_t>* sums) {
  const CountedVector<Task>& tasks = args.layout->topk_tasks;
  const CountedScratch<std::uint32_t> scratch(count_elements(tasks));
  CountedVector<Range> ranges;
  ranges.reserve(tasks.size());
  std::uint32_t* found = scratch.get();
  for (const Task& task : tasks) {
    ranges.push_back({task, found, 0, 0, 0, 0});
    found += task.end - task.begin;
  }
  CountedVector<State> states = make_states(args, ranges);
  find_thresholds(args, states);
  CountedVector<const State*> owner;
  for (const State& state : states) {
    owner.insert(owner.end(), state.count, &state);
    clear_rest(state);
  }
  parallel_for(args.threads, ranges.size(),
               [&](std::size_t i) { write_range(*owner[i], ranges[i]); });
  if (!args.checksum) return;
  parallel_for(args.threads, ranges.size(), [&](std::size_t i) {
    const Segment& segment = owner[i]->seg();
    const ByteRange slice = topk_slice(segment, &ranges[i] - owner[i]->ranges, owner[i]->count);
    const std::int64_t at = segment.body + slice.begin;
    const std::int64_t word = (at - args.layout->frames[segment.frame].start) / 8;
    sums[segment.frame] +=
        args.kernels->checksum(args.wire + at, (slice.end - slice.begin) / 8, word);
  });
}

}  // namespace zcomm
