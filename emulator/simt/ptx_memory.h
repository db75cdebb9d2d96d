// Address spaces. All addresses are the host's, except in .shared, which has 32 bits: static
// variables from 0 on, dynamic memory from kDynamicShared on.
#pragma once

#include <cstring>
#include <exception>
#include <initializer_list>
#include <sstream>

#include "simt/ptx_integer.h"
#include "simt/simt.h"

namespace ptx {

inline constexpr u32 kDynamicShared = 1 << 24;
// Of any GPU so far. How much a launch asked for, a thread is not told.
inline constexpr u64 kMostSharedNbytes = 227 << 10;
inline constexpr u64 kLeastAddress = 1 << 16, kEndOfAddresses = u64{1} << 47;

enum Access { kLoad, kStore, kAtomic };

template <class T>
PTX_INLINE u64 address_of(const T& variable) {
  return reinterpret_cast<u64>(&variable);
}
struct Range {
  u64 begin, nbytes;
  bool has(u64 address) const { return address - begin < nbytes; }
};

// Static shared memory holds 0xcd when a CTA begins. The first of its threads to come sees to that;
// if one fails, the others may never come.
class SharedMemory {
 public:
  struct State {
    u64 awaited = 0;  // threads of the CTA
  };
  SharedMemory(State& state, std::byte* memory, std::size_t nbytes) : state_(state) {
    const auto& block = emu::self().block;
    if (state.awaited == 0) {
      std::memset(memory, 0xcd, nbytes);
      state.awaited = u64{block.x} * block.y * block.z;
    }
    --state.awaited;
  }
  ~SharedMemory() {
    if (std::uncaught_exceptions() > 0) state_.awaited = 0;
  }

 private:
  State& state_;
};

// A thread's address spaces. Each function gives the host address of an access of kNbytes, which is
// checked as hardware does, and counted if it is to global memory.
class Context {
 public:
  // `own`: memory that is no traffic, by a generic address. The first range is the module's tables,
  // the only one that has addresses in .global.
  Context(const char* file, const void* args, u64 args_nbytes, std::byte* shared, u64 shared_nbytes,
          std::initializer_list<Range> own)
      : thread(emu::self()),
        param(reinterpret_cast<u64>(args)),
        file_(file),
        param_nbytes_(args_nbytes),
        shared_(reinterpret_cast<u64>(shared)),
        shared_nbytes_(shared_nbytes),
        own_(own) {}

  const emu::Thread& thread;
  const u64 param;

  template <unsigned kNbytes, Access kAccess>
  PTX_INLINE char* global(u64 address, unsigned line) const {
    check<kNbytes>(address, line);
    if (kAccess != kAtomic && __builtin_expect(emu::detail::counting, false)) {
      count(address, kNbytes, kAccess == kStore, line, 1);
    }
    return reinterpret_cast<char*>(address);
  }
  // Global, or any other space by its generic address.
  template <unsigned kNbytes, Access kAccess>
  PTX_INLINE char* generic(u64 address, unsigned line) const {
    check<kNbytes>(address, line);
    if (kAccess != kAtomic && __builtin_expect(emu::detail::counting, false)) {
      count(address, kNbytes, kAccess == kStore, line, own_.size());
    }
    return reinterpret_cast<char*>(address);
  }
  template <unsigned kNbytes, Access>
  PTX_INLINE char* local(u64 address, unsigned line) const {
    check<kNbytes>(address, line);
    return reinterpret_cast<char*>(address);
  }
  template <unsigned kNbytes, Access kAccess>
  PTX_INLINE char* constant(u64 address, unsigned line) const {
    return local<kNbytes, kAccess>(address, line);
  }
  template <unsigned kNbytes, Access>
  PTX_INLINE char* shared(u32 address, unsigned line) const {
    const bool is_dynamic = address & kDynamicShared;
    const u32 offset = address & (kDynamicShared - 1);
    const u64 nbytes = is_dynamic ? kMostSharedNbytes : shared_nbytes_;
    if (address % kNbytes != 0 ||
        address - (is_dynamic ? kDynamicShared : 0) + u64{kNbytes} > nbytes) {
      fault(line, address, kNbytes, nbytes);
    }
    return reinterpret_cast<char*>(shared_base(is_dynamic) + offset);
  }
  template <unsigned kNbytes, Access>
  PTX_INLINE char* parameter(u64 address, unsigned line) const {
    const u64 offset = address - param;
    if (offset % kNbytes != 0 || offset + kNbytes > param_nbytes_) {
      fault(line, offset, kNbytes, param_nbytes_);
    }
    return reinterpret_cast<char*>(address);
  }

  [[noreturn, gnu::cold, gnu::noinline]] void trap(unsigned line) const {
    throw emu::Error(std::string(file_) + ":" + std::to_string(line) +
                     ": the kernel stopped itself");
  }

  PTX_INLINE u64 from_shared(u64 address) const {
    return shared_base(address & kDynamicShared) + (address & (kDynamicShared - 1));
  }
  PTX_INLINE u64 to_shared(u64 address) const {
    if (address - shared_ < shared_nbytes_) return address - shared_;
    return kDynamicShared + (address - shared_base(true));
  }

 private:
  [[noreturn, gnu::cold, gnu::noinline]] void fault(unsigned line, u64 address, unsigned nbytes,
                                                    u64 end) const {
    std::ostringstream text;
    text << file_ << ":" << line << ": an access of " << nbytes << " bytes is ";
    if (address % nbytes != 0) {
      text << "misaligned: expected a multiple of " << nbytes << ", got address 0x" << std::hex
           << address;
    } else {
      text << "outside of memory: expected an address below 0x" << std::hex << end << ", got 0x"
           << address;
    }
    throw emu::Error(text.str());
  }

  template <unsigned kNbytes>
  PTX_INLINE void check(u64 address, unsigned line) const {
    const bool is_outside = address - kLeastAddress >= kEndOfAddresses - kLeastAddress;
    if (address % kNbytes != 0 || is_outside) fault(line, address, kNbytes, kEndOfAddresses);
  }
  PTX_INLINE u64 shared_base(bool is_dynamic) const {
    return is_dynamic ? reinterpret_cast<u64>(thread.shared) : shared_;
  }
  [[gnu::cold, gnu::noinline]] void count(u64 address, unsigned nbytes, bool is_store,
                                          unsigned line, std::size_t own_ranges) const {
    for (std::size_t i = 0; i < own_ranges; ++i) {
      if (own_.begin()[i].has(address)) return;
    }
    emu::touch(reinterpret_cast<const void*>(address), nbytes, is_store, line);
  }

  const char* file_;
  u64 param_nbytes_, shared_, shared_nbytes_;
  std::initializer_list<Range> own_;
};

template <class T, class Register>
PTX_INLINE Register read(const char* p) {
  Bits<T> value;
  std::memcpy(&value, p, sizeof value);
  return extend<T, Register>(value);
}
template <class T, class Register>
PTX_INLINE Register read_atomic(const char* p) {
  return extend<T, Register>(
      __atomic_load_n(reinterpret_cast<const Bits<T>*>(p), __ATOMIC_ACQUIRE));
}
template <class T>
PTX_INLINE void write(char* p, Bits<T> value) {
  std::memcpy(p, &value, sizeof value);
}
template <class T>
PTX_INLINE void write_atomic(char* p, Bits<T> value) {
  __atomic_store_n(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_RELEASE);
}

// Atomics return what was there before.
template <class T, class Change>
PTX_INLINE Bits<T> change(char* p, Change next) {
  auto* at = reinterpret_cast<Bits<T>*>(p);
  Bits<T> old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(at, &old, next(old), true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <class T>
PTX_INLINE Bits<T> atom_add(char* p, Bits<T> value) {
  return __atomic_fetch_add(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_SEQ_CST);
}
template <class T>
PTX_INLINE Bits<T> atom_and(char* p, Bits<T> value) {
  return __atomic_fetch_and(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_SEQ_CST);
}
template <class T>
PTX_INLINE Bits<T> atom_or(char* p, Bits<T> value) {
  return __atomic_fetch_or(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_SEQ_CST);
}
template <class T>
PTX_INLINE Bits<T> atom_xor(char* p, Bits<T> value) {
  return __atomic_fetch_xor(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_SEQ_CST);
}
template <class T>
PTX_INLINE Bits<T> atom_exch(char* p, Bits<T> value) {
  return __atomic_exchange_n(reinterpret_cast<Bits<T>*>(p), value, __ATOMIC_SEQ_CST);
}
template <class T>
PTX_INLINE Bits<T> atom_min(char* p, Bits<T> value) {
  return change<T>(p, [value](Bits<T> old) { return min<T>(old, value); });
}
template <class T>
PTX_INLINE Bits<T> atom_max(char* p, Bits<T> value) {
  return change<T>(p, [value](Bits<T> old) { return max<T>(old, value); });
}
template <class T>
PTX_INLINE Bits<T> atom_inc(char* p, Bits<T> most) {
  return change<T>(p, [most](Bits<T> old) { return old >= most ? 0 : old + 1; });
}
template <class T>
PTX_INLINE Bits<T> atom_dec(char* p, Bits<T> most) {
  return change<T>(p, [most](Bits<T> old) { return old == 0 || old > most ? most : old - 1; });
}
template <class T>
PTX_INLINE Bits<T> atom_cas(char* p, Bits<T> expected, Bits<T> value) {
  __atomic_compare_exchange_n(reinterpret_cast<Bits<T>*>(p), &expected, value, false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

PTX_INLINE void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace ptx
