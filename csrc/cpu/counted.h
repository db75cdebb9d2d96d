// Counts the heap memory of the native core, for _core.allocated_nbytes().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zcomm {

// Bytes allocated now, and the most ever allocated.
class HeapCounter {
 public:
  void add(std::int64_t nbytes) {
    const std::int64_t now = now_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
    std::int64_t most = most_.load(std::memory_order_relaxed);
    while (now > most && !most_.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  void remove(std::int64_t nbytes) { now_.fetch_sub(nbytes, std::memory_order_relaxed); }

  std::int64_t now() const { return now_.load(std::memory_order_relaxed); }
  std::int64_t most() const { return most_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> now_{0}, most_{0};
};

inline HeapCounter heap_counter;

template <class T>
struct CountedAllocator {
  using value_type = T;

  CountedAllocator() = default;
  template <class U>
  CountedAllocator(const CountedAllocator<U>&) {}

  T* allocate(std::size_t n) {
    T* memory = std::allocator<T>().allocate(n);
    heap_counter.add(static_cast<std::int64_t>(n * sizeof(T)));
    return memory;
  }
  void deallocate(T* memory, std::size_t n) {
    heap_counter.remove(static_cast<std::int64_t>(n * sizeof(T)));
    std::allocator<T>().deallocate(memory, n);
  }

  template <class U>
  bool operator==(const CountedAllocator<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const CountedAllocator<U>&) const {
    return false;
  }
};

template <class T>
using CountedVector = std::vector<T, CountedAllocator<T>>;

// Room for n plain values, uninitialized: pages that are never written cost nothing.
template <class T>
class CountedScratch {
 public:
  explicit CountedScratch(std::size_t n) : size_(n), memory_(CountedAllocator<T>().allocate(n)) {}
  ~CountedScratch() { CountedAllocator<T>().deallocate(memory_, size_); }
  CountedScratch(const CountedScratch&) = delete;
  CountedScratch& operator=(const CountedScratch&) = delete;

  T* get() const { return memory_; }

 private:
  std::size_t size_;
  T* memory_;
};

}  // namespace zcomm
