#include "simt/traffic.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "simt/warp.h"

namespace emu {
namespace {

constexpr std::uint64_t kSectorNbytes = 32;

// One instruction of a warp: the n-th time that its lanes execute it.
struct WarpAccess {
  std::uint32_t instruction, n;
  std::size_t position;  // the earliest one among the lanes' accesses
  std::vector<std::uint64_t> sectors;
};

// The sectors that a warp used last.
class Window {
 public:
  // True if it was not there.
  bool add(std::uint64_t sector) {
    const auto found = std::find(recent_.begin(), recent_.end(), sector);
    const bool is_new = found == recent_.end();
    if (!is_new) {
      recent_.erase(found);
    } else if (recent_.size() == kRecentSectors) {
      recent_.erase(recent_.begin());
    }
    recent_.push_back(sector);
    return is_new;
  }

 private:
  std::vector<std::uint64_t> recent_;  // the last one is at the end
};

// Lanes run one after another, so what they did together is found by counting: a lane's n-th
// execution of an instruction belongs with the other lanes' n-th one.
class WarpLog {
 public:
  void add_lane(const std::vector<Access>& accesses) {
    std::unordered_map<std::uint32_t, std::uint32_t> executed;
    for (std::size_t i = 0; i < accesses.size(); ++i) {
      add(accesses[i], executed[accesses[i].instruction]++, i);
    }
  }

  Traffic count() {
    std::sort(all_.begin(), all_.end(), [](const WarpAccess& a, const WarpAccess& b) {
      return std::tie(a.position, a.instruction, a.n) < std::tie(b.position, b.instruction, b.n);
    });
    Window loads, stores;
    Traffic traffic;
    for (WarpAccess& access : all_) {
      const bool is_store = access.instruction & 1;
      const auto sectors = count_new(access.sectors, is_store ? stores : loads);
      (is_store ? traffic.stored : traffic.loaded) += kSectorNbytes * sectors;
    }
    return traffic;
  }

 private:
  void add(const Access& access, std::uint32_t n, std::size_t position) {
    const std::uint64_t key = std::uint64_t{access.instruction} << 32 | n;
    const auto [found, is_new] = index_.try_emplace(key, all_.size());
    if (is_new) all_.push_back({access.instruction, n, position, {}});
    WarpAccess& together = all_[found->second];
    together.position = std::min(together.position, position);
    const std::uint64_t last = (access.address + access.nbytes - 1) / kSectorNbytes;
    for (std::uint64_t s = access.address / kSectorNbytes; s <= last; ++s) {
      together.sectors.push_back(s);
    }
  }

  static std::uint64_t count_new(std::vector<std::uint64_t>& sectors, Window& window) {
    std::sort(sectors.begin(), sectors.end());  // the lanes' order is no order of the memory
    return static_cast<std::uint64_t>(std::count_if(
        sectors.begin(), sectors.end(), [&](std::uint64_t s) { return window.add(s); }));
  }

  std::vector<WarpAccess> all_;
  std::unordered_map<std::uint64_t, std::size_t> index_;
};

std::mutex mutex;
Traffic total;

}  // namespace

void AccessLog::clear(unsigned threads) {
  threads_.resize(threads);
  for (auto& accesses : threads_) accesses.clear();
}

Traffic AccessLog::count() const {
  Traffic sum;
  for (std::size_t first = 0; first < threads_.size(); first += kLanes) {
    WarpLog warp;
    const std::size_t end = std::min(first + kLanes, threads_.size());
    for (std::size_t t = first; t < end; ++t) warp.add_lane(threads_[t]);
    const Traffic traffic = warp.count();
    sum.loaded += traffic.loaded;
    sum.stored += traffic.stored;
  }
  return sum;
}

void add_traffic(const Traffic& more) {
  const std::lock_guard<std::mutex> lock(mutex);
  total.loaded += more.loaded;
  total.stored += more.stored;
  total.shuffles += more.shuffles;
}

Traffic traffic() {
  const std::lock_guard<std::mutex> lock(mutex);
  return total;
}

void reset_traffic() {
  const std::lock_guard<std::mutex> lock(mutex);
  total = {};
}

}  // namespace emu
