#include "simt/simt.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "simt/cta.h"

namespace emu {
namespace detail {
bool counting = false;
}

namespace {

// A user may have set flush-to-zero (torch.set_flush_denormal) or another rounding; a GPU has
// neither.
class FloatMode {
 public:
  FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

// CTAs, with their stacks, that no OS thread uses at the moment.
class IdleCtas {
 public:
  std::unique_ptr<Cta> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Cta>();
    auto cta = std::move(idle_.back());
    idle_.pop_back();
    return cta;
  }
  void give(std::unique_ptr<Cta> cta) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(cta));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Cta>> idle_;
};

// Never destroyed: at the end of a process others may be gone already.
IdleCtas& idle_ctas = *new IdleCtas;

// A launch under way: OS threads take CTAs until there are none, or one has failed.
class Run {
 public:
  explicit Run(const Launch& launch) : launch_(launch) {}

  void work() {
    const FloatMode mode;
    auto cta = idle_ctas.take();
    std::uint64_t number = 0;
    try {
      cta->prepare(launch_);
      while (!failed_ && (number = next_.fetch_add(1)) < launch_.ctas()) cta->run(number);
    } catch (...) {
      keep(std::current_exception(), number);
    }
    idle_ctas.give(std::move(cta));
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // CTAs are begun in their order and run to their end: the first of those that fail is always
  // found, whichever fails first.
  void keep(std::exception_ptr error, std::uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_ || number < number_) {
      error_ = error;
      number_ = number;
    }
    failed_ = true;
  }

  const Launch& launch_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
  std::uint64_t number_ = 0;  // of the CTA that failed
};

void check(const Launch& launch) {
  const auto threads = std::uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads < 1 || threads > 1024) {
    throw Error("launch: expected 1 to 1024 threads in a CTA, got " + std::to_string(threads));
  }
  if (launch.ctas() < 1) throw Error("launch: expected at least 1 CTA, got a grid of 0");
}

}  // namespace

Settings& settings() {
  static Settings settings;
  return settings;
}

void launch(Kernel kernel, Dim grid, Dim block, std::size_t dynamic_shared_nbytes,
            const void* args) {
  const Launch launch{kernel, grid, block, dynamic_shared_nbytes, args, settings()};
  check(launch);
  detail::counting = launch.settings.count_sectors;
  Run run(launch);
  // One CTA needs no further thread: starting one takes as long as a small CTA.
  const auto wanted =
      std::min(launch.ctas(), static_cast<std::uint64_t>(std::max(1, launch.settings.threads)));
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < wanted) others.emplace_back([&run] { run.work(); });
  } catch (const std::system_error&) {
    // The machine has no more threads; those there are do the work.
  }
  run.work();
  for (auto& other : others) other.join();
  run.rethrow();
}

}  // namespace emu
