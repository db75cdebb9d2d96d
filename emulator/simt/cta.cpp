#include "simt/cta.h"

#include <cstring>
#include <new>

namespace emu {
namespace {

// The CTA that this OS thread runs.
thread_local Cta* running = nullptr;

// Stacks begin at multiples of a page: without this, the frames of all threads would compete for
// the same few sets of the processor's caches.
std::size_t stack_offset(unsigned thread) { return thread * 448 % 8192; }

constexpr std::align_val_t kSharedAlignment{128};

std::byte* new_shared(std::size_t nbytes) {
  return static_cast<std::byte*>(::operator new(nbytes, kSharedAlignment));
}

void delete_shared(std::byte* shared) { ::operator delete(shared, kSharedAlignment); }

}  // namespace

// ---- Who runs next ----

// splitmix64
std::uint64_t Cta::random() {
  std::uint64_t z = random_state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

[[gnu::always_inline]] inline unsigned Cta::pick(std::uint32_t set) {
  if (schedule_ == Schedule::kReverse) return 31 - static_cast<unsigned>(__builtin_clz(set));
  if (schedule_ == Schedule::kForward) return static_cast<unsigned>(__builtin_ctz(set));
  // The first one from a random place on: not all orders are equally likely, but all are possible.
  const auto places = static_cast<std::uint64_t>(32 - __builtin_clz(set));
  const auto from = static_cast<unsigned>((random() >> 32) * places >> 32);
  return static_cast<unsigned>(__builtin_ctz(set >> from)) + from;
}

bool Cta::find_ready_warp() {
  std::uint32_t ready = 0;
  for (unsigned w = 0; w < warps_.size(); ++w) ready |= (warps_[w].ready ? 1u : 0u) << w;
  if (ready) warp_ = &warps_[pick(ready)];
  return ready != 0;
}

// A warp runs as long as one of its lanes can, so warps get as far apart as barriers allow: where a
// barrier is missing, the schedules show it. At random, one in 32 threads is of another warp.
[[gnu::always_inline]] inline Fiber& Cta::next_fiber() {
  if (schedule_ == Schedule::kRandom && random() % kLanes == 0) find_ready_warp();
  if (!warp_->ready && !find_ready_warp()) return origin_;
  const unsigned lane = pick(warp_->ready);
  warp_->ready &= ~(1u << lane);
  current_ = warp_->first + lane;
  return fibers_[current_];
}

[[gnu::always_inline]] inline void Cta::suspend() {
  Fiber& self = fibers_[current_];
  Fiber& next = next_fiber();
  if (&next != &self) self.switch_to(next);
}

// ---- A CTA from its start to its end ----

void Cta::prepare(const Launch& launch) {
  launch_ = &launch;
  schedule_ = launch.settings.schedule;
  const unsigned threads = launch.threads();
  stacks_.reserve(threads);
  fibers_.resize(threads);
  threads_.resize(threads);
  warps_.resize((threads + kLanes - 1) / kLanes);
  // Of the exact size, so that the address sanitizer sees what lies beyond.
  shared_ = {new_shared(launch.dynamic_shared_nbytes), delete_shared};
}

void Cta::place_threads() {
  const Dim grid = launch_->grid, block = launch_->block;
  const auto row = number_ / grid.x;
  const Dim cta{static_cast<unsigned>(number_ % grid.x), static_cast<unsigned>(row % grid.y),
                static_cast<unsigned>(row / grid.y)};
  for (unsigned t = 0; t < threads_.size(); ++t) {
    const Dim index{t % block.x, t / block.x % block.y, t / block.x / block.y};
    threads_[t] = {index, cta, block, grid, t % kLanes, t / kLanes, shared_.get()};
    fibers_[t].prepare(&Cta::entry, stacks_[t], Stacks::kNbytes, stack_offset(t));
  }
  for (unsigned w = 0; w < warps_.size(); ++w) {
    const std::size_t lanes = threads_.size() - w * kLanes;
    Warp& warp = warps_[w];
    warp.ready = lanes < kLanes ? (1u << lanes) - 1 : ~0u;
    warp.exited = ~warp.ready;
    warp.meeting = warp.at_barrier = 0;
    warp.shuffles = 0;
    warp.first = w * kLanes;
  }
}

void Cta::run(std::uint64_t number) {
  number_ = number;
  place_threads();
  // Shared memory holds nothing useful at the start.
  std::memset(shared_.get(), 0xcd, launch_->dynamic_shared_nbytes);
  if (launch_->settings.count_sectors) log_.clear(launch_->threads());
  unfinished_ = launch_->threads();
  at_barrier_ = 0;
  origin_ = Fiber();
  failure_ = nullptr;
  random_state_ = launch_->settings.seed + number_ * 0xd1342543de82ef95;

  running = this;
  find_ready_warp();
  origin_.switch_to(next_fiber());
  running = nullptr;

  if (failure_ || unfinished_) stacks_.forget_variables();
  if (failure_) std::rethrow_exception(failure_);
  if (unfinished_) throw Error(explain_stall());
  if (launch_->settings.count_sectors) add_traffic(moved());
}

Traffic Cta::moved() const {
  Traffic traffic = log_.count();
  for (const Warp& warp : warps_) traffic.shuffles += warp.shuffles;
  return traffic;
}

void Cta::entry() {
  Fiber::entered(running->origin_);
  running->run_thread();
  running->leave();
}

// An exception must not leave its fiber, nor the fiber be left while it is handled.
void Cta::run_thread() {
  try {
    launch_->kernel(launch_->args);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Cta::leave() {
  Fiber& self = fibers_[current_];
  warp().exited |= 1u << lane();
  --unfinished_;
  self.leave_for(failure_ ? origin_ : next_fiber());
  __builtin_unreachable();
}

// ---- Meetings ----

[[gnu::always_inline]] inline void Cta::meet(Meeting how, std::uint32_t mask) {
  Warp& w = warp();
  if (!(mask >> lane() & 1)) refuse_mask(how, mask);
  w.arrive(lane(), how, mask);
  if (w.is_complete(how, mask)) w.complete(how, mask);
  suspend();
}

void Cta::meet_at_barrier() {
  warp().at_barrier |= 1u << lane();
  if (++at_barrier_ == threads_.size()) {
    for (auto& warp : warps_) {
      warp.ready |= warp.at_barrier;
      warp.at_barrier = 0;
    }
    at_barrier_ = 0;
    find_ready_warp();
  }
  suspend();
}

// ---- What a kernel calls ----

const Thread& self() { return running->thread(); }

namespace detail {
void record(const void* address, unsigned nbytes, bool is_store, unsigned pc) {
  const Thread& thread = running->thread();
  running->log().add(thread.warp * kLanes + thread.lane,
                     {reinterpret_cast<std::uintptr_t>(address), nbytes, 2 * pc + is_store});
}
}  // namespace detail

extern "C" {
[[gnu::visibility("hidden")]] void emu_barrier() { running->meet_at_barrier(); }

[[gnu::visibility("hidden")]] std::uint32_t emu_exchange(std::uint32_t mask, std::uint32_t value,
                                                         unsigned source) {
  Cta& cta = *running;
  const unsigned lane = cta.lane();
  Warp& warp = cta.warp();
  if (source >= kLanes || !(mask >> source & 1)) cta.refuse_source(mask, source);
  warp.value[lane] = value;
  warp.source[lane] = source;
  cta.meet(Meeting::kExchange, mask);
  return warp.result[lane];
}

[[gnu::visibility("hidden")]] std::uint32_t emu_ballot(std::uint32_t mask, bool predicate) {
  Cta& cta = *running;
  const unsigned lane = cta.lane();
  Warp& warp = cta.warp();
  warp.value[lane] = predicate;
  cta.meet(Meeting::kBallot, mask);
  return warp.result[lane];
}

[[gnu::visibility("hidden")]] Lanes emu_gather(std::uint32_t mask, std::uint32_t value) {
  Cta& cta = *running;
  Lanes lanes;
  cta.warp().value[cta.lane()] = value;
  cta.warp().gathered[cta.lane()] = &lanes;
  cta.meet(Meeting::kGather, mask);
  return lanes;
}
}

#if defined(__x86_64__)

// A lane that goes on returns to its last shuffle, while its neighbour has just called the next
// one: predictions of returns, which remember calls, are nearly always wrong. A jump is predicted
// by where it went the last time, which is nearly always right. That makes a shuffle 1.5 times as
// fast.
#define EMU_RETURN_BY_JUMP(function)                   \
  asm("subq $8, %rsp\n\t.cfi_adjust_cfa_offset 8\n\t"  \
      "call " #function                                \
      "\n\t"                                           \
      "addq $8, %rsp\n\t.cfi_adjust_cfa_offset -8\n\t" \
      "popq %rcx\n\t.cfi_adjust_cfa_offset -8\n\t"     \
      "jmpq *%rcx")

[[gnu::naked]] void barrier() { EMU_RETURN_BY_JUMP(emu_barrier); }
[[gnu::naked]] std::uint32_t exchange(std::uint32_t, std::uint32_t, unsigned) {
  EMU_RETURN_BY_JUMP(emu_exchange);
}
[[gnu::naked]] std::uint32_t ballot(std::uint32_t, bool) { EMU_RETURN_BY_JUMP(emu_ballot); }
[[gnu::naked]] Lanes gather(std::uint32_t, std::uint32_t) { EMU_RETURN_BY_JUMP(emu_gather); }

#else

void barrier() { emu_barrier(); }
std::uint32_t exchange(std::uint32_t mask, std::uint32_t value, unsigned source) {
  return emu_exchange(mask, value, source);
}
std::uint32_t ballot(std::uint32_t mask, bool predicate) { return emu_ballot(mask, predicate); }
Lanes gather(std::uint32_t mask, std::uint32_t value) { return emu_gather(mask, value); }

#endif

}  // namespace emu
