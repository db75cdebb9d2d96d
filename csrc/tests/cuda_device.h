// The CUDA kernels on the emulator, for native tests: what a device holds lies in heap memory that
// ends where it ends.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>

#include "cuda/launch.h"
#include "simt/simt.h"
#include "tests/encode_calls.h"

namespace zcomm::test {

inline constexpr std::uint64_t kNoFault = ~std::uint64_t{0};

inline std::uintptr_t address(const Bytes& bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes.data());
}

inline bool all_zero(const Bytes& bytes, std::int64_t begin, std::int64_t end) {
  return std::all_of(bytes.data() + begin, bytes.data() + end,
                     [](std::uint8_t byte) { return byte == 0; });
}

template <class T>
Bytes bytes_of(const std::vector<T>& items) {
  Bytes bytes(items.size() * sizeof(T));
  if (!items.empty()) std::memcpy(bytes.data(), items.data(), bytes.size());
  return bytes;
}

// What no result may depend on.
inline void set_schedule(Random& random) {
  emu::Settings& settings = emu::settings();
  settings.schedule = static_cast<emu::Schedule>(random.below(3));
  settings.seed = random.next();
  settings.threads = 1 + static_cast<int>(random.below(2));
}

// While it lives, whoever reads or writes elements between segments is caught by the address
// sanitizer, in whole words of 8 bytes.
class GapGuard {
 public:
  GapGuard(const Layout& layout, const Bytes& elements, std::size_t width) : elements_(elements) {
    std::size_t end = 0;
    for (const Segment& s : layout.segments) {
      const std::size_t begin = static_cast<std::size_t>(s.offset) * width;
      poison(end, begin);
      end = begin + static_cast<std::size_t>(s.n) * width;
    }
  }
  GapGuard(const GapGuard&) = delete;
  GapGuard& operator=(const GapGuard&) = delete;
  ~GapGuard() {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(elements_.data(), elements_.size());
#endif
  }

 private:
  void poison([[maybe_unused]] std::size_t begin, [[maybe_unused]] std::size_t end) const {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(elements_.data() + begin, end - begin);
#endif
  }

  const Bytes& elements_;
};

// A layout's tables, and calls that say what kernels left behind besides their results.
class Device {
 public:
  explicit Device(const Layout& layout)
      : layout_(layout),
        plan_(layout),
        tables_(bytes_of(std::vector<char>(plan_.tables.begin(), plan_.tables.end()))) {}

  const Layout& layout() const { return layout_; }

  // `from` and `to` hold an address for each segment. True if scratch memory is zero again; `idle`
  // need not be zero before either.
  bool encode(const Call& call, const Bytes& grad, const Bytes& from, const Bytes& to,
              const Bytes& wire) const {
    const cuda::EncodeScratch at = plan_.encode_scratch();
    const Bytes scratch(static_cast<std::size_t>(at.nbytes), 0, 0);
    std::memset(scratch.data() + at.idle, 0xa5, static_cast<std::size_t>(at.topk - at.idle));
    cuda::encode(cuda::linked_device(),
                 {&plan_, address(tables_), address(scratch), address(grad), address(from),
                  address(to), address(wire), 0, call.grad_type, call.residual_type, call.prescale,
                  call.checksum, call.keep_idle});
    return all_zero(scratch, 0, at.idle) && all_zero(scratch, at.topk, at.nbytes);
  }

  struct Decoded {
    std::uint64_t fault;
    bool clean;  // scratch memory is zero again
  };
  Decoded decode(const std::vector<const std::uint8_t*>& wires, const Bytes& out,
                 bool verify) const {
    const cuda::DecodeScratch at = plan_.decode_scratch(static_cast<int>(wires.size()));
    const Bytes scratch(static_cast<std::size_t>(at.nbytes), 0, 0), fault(sizeof kNoFault, 0, 0xff);
    std::vector<std::uintptr_t> inline_wires;
    for (const std::uint8_t* w : wires) inline_wires.push_back(reinterpret_cast<std::uintptr_t>(w));
    const bool many = wires.size() > cuda::kInlineWires;
    const Bytes more = many ? bytes_of(inline_wires) : Bytes(0);
    cuda::decode_sum(cuda::linked_device(),
                     {&plan_, address(tables_), address(scratch), address(out), address(more),
                      address(fault), 0, inline_wires, verify});
    return {load<std::uint64_t>(fault.data()), all_zero(scratch, 0, at.nbytes)};
  }

 private:
  const Layout& layout_;
  cuda::Plan plan_;
  Bytes tables_;
};

}  // namespace zcomm::test
