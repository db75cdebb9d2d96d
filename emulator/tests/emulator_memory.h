// Shared memory, places and orders of threads, atomics, floating point.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simt/cuda.h"
#include "tests/harness.h"

namespace zcomm::test {

struct SumArgs {
  unsigned* sums;
  unsigned* first_words;
};

// Sums 0 ... blockDim.x - 1 in static and in dynamic shared memory.
ZC_KERNEL(zc_sum, SumArgs, 256, 1) {
  __shared__ unsigned fixed[256];
  ZC_DYNAMIC_SHARED(unsigned, dynamic);
  const unsigned i = threadIdx.x;
  if (i == 0) args.first_words[blockIdx.x] = dynamic[255];
  __syncthreads();
  fixed[i] = dynamic[i] = i + blockIdx.x;
  for (unsigned h = blockDim.x / 2; h > 0; h /= 2) {
    __syncthreads();
    if (i < h) fixed[i] += fixed[i + h];
    if (i < h) dynamic[i] += dynamic[i + h];
  }
  if (i == 0) args.sums[blockIdx.x] = fixed[0] == dynamic[0] ? fixed[0] : 0;
}

inline void check_sums(const std::string& where) {
  std::vector<unsigned> sums(50), first_words(50);
  const SumArgs args{sums.data(), first_words.data()};
  emu::launch(zc_sum, {50}, {256}, 1024, &args);
  for (unsigned c = 0; c < 50; ++c) {
    CHECK(sums[c] == 255 * 128 + 256 * c, where);
    CHECK(first_words[c] == 0xcdcdcdcd, where);  // no sums of the CTA before
  }
}

struct PlaceArgs {
  unsigned* seen;
};

ZC_KERNEL(zc_place, PlaceArgs, 1024, 1) {
  const auto& cta = blockIdx;
  const auto& thread = threadIdx;
  const unsigned c = (cta.z * gridDim.y + cta.y) * gridDim.x + cta.x;
  const unsigned t = (thread.z * blockDim.y + thread.y) * blockDim.x + thread.x;
  const emu::Thread& self = emu::self();
  args.seen[c * blockDim.x * blockDim.y * blockDim.z + t] += self.warp * 32 + self.lane == t;
}

inline void check_places(emu::Dim grid, emu::Dim block) {
  std::vector<unsigned> seen(grid.x * grid.y * grid.z * block.x * block.y * block.z);
  const PlaceArgs args{seen.data()};
  emu::launch(zc_place, grid, block, 0, &args);
  for (const unsigned times : seen) CHECK(times == 1, std::to_string(block.x) + " threads");
}

struct OrderArgs {
  unsigned *before, *after;  // a barrier and a vote
};

ZC_KERNEL(zc_order, OrderArgs, 64, 1) {
  __shared__ unsigned turn;
  args.before[threadIdx.x] = turn++ % blockDim.x;
  __syncthreads();
  __syncwarp();
  args.after[threadIdx.x] = turn++ % blockDim.x;
}

using Orders = std::vector<unsigned>;

inline Orders orders(emu::Schedule schedule, std::uint64_t seed = 1) {
  Orders both(128);
  const OrderArgs args{both.data(), both.data() + 64};
  emu::settings().schedule = schedule;
  emu::settings().seed = seed;
  emu::launch(zc_order, {1}, {64}, 0, &args);
  emu::settings() = {};
  return both;
}

inline void check_orders() {
  Orders forward(128), reverse(128);
  for (unsigned t = 0; t < 128; ++t) forward[t] = t % 64, reverse[t] = 63 - t % 64;
  CHECK(orders(emu::Schedule::kForward) == forward, "forward");
  CHECK(orders(emu::Schedule::kReverse) == reverse, "reverse");
  const Orders random = orders(emu::Schedule::kRandom);
  CHECK(!std::equal(random.begin(), random.begin() + 64, random.begin() + 64), "a new order");
  CHECK(std::is_permutation(random.begin(), random.end(), forward.begin()), "all threads");
  CHECK(random == orders(emu::Schedule::kRandom), "a seed's order");
  CHECK(random != orders(emu::Schedule::kRandom, 2), "another seed");
}

struct Counters {
  unsigned sum, most, bits, last;
  unsigned long long long_sum, least, long_last;
};

struct AtomicsArgs {
  Counters* counters;
};

ZC_KERNEL(zc_atomics, AtomicsArgs, 96, 1) {
  __shared__ unsigned count;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  Counters& counters = *args.counters;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  for (int k = 0; k < 20; ++k) atomicAdd(&counters.sum, 1);
  atomicAdd(&counters.long_sum, 1ull << 33);
  atomicMax(&counters.most, i * 7);
  atomicMin(&counters.least, 1ull << 40 | (i + 5));
  atomicOr(&counters.bits, 1u << i % 32);
  atomicExch(&counters.last, 3);
  atomicExch(&counters.long_last, 1ull << 50);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && count != blockDim.x) atomicAdd(&counters.sum, 1u << 30);
}

inline void check_atomics() {
  const unsigned ctas = 500, threads = 96, all = ctas * threads;
  Counters c{};
  c.least = ~0ull;
  const AtomicsArgs args{&c};
  emu::launch(zc_atomics, {ctas}, {threads}, 0, &args);
  CHECK(c.sum == 20 * all && c.long_sum == std::uint64_t{all} << 33, "atomicAdd");
  CHECK(c.most == (all - 1) * 7 && c.least == (1ull << 40 | 5), "atomicMax, atomicMin");
  CHECK(c.bits == ~0u && c.last == 3 && c.long_last == 1ull << 50, "atomicOr, atomicExch");
}

inline void check_bits() {
  CHECK(__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64, "population");
  CHECK(__ffs(0) == 0 && __ffs(8) == 4 && __ffs(0x80000000) == 32, "first");
  CHECK(__clz(0) == 32 && __clz(1) == 31 && __clz(~0u) == 0, "leading zeros");
  CHECK(__float_as_uint(-2.0f) == 0xc0000000 && __uint_as_float(0x3f800000) == 1.0f, "bits");
  CHECK(__byte_perm(0x33221100, 0x77665544, 0x7162) == 0x77116622, "bytes");
  CHECK(alignof(float4) == 16 && alignof(uint4) == 16 && alignof(uint2) == 8, "alignment");
  CHECK(alignof(ushort4) == 8 && sizeof(ushort4) == 8, "alignment");
}

// ---- The caller's floating point ----

struct ProductArgs {
  float a, b;
  float* product;
};

ZC_KERNEL(zc_product, ProductArgs, 1, 1) { args.product[blockIdx.x] = args.a * args.b; }

inline void check_float_mode() {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr(), flushing = 0x9fc0 | 0x6000;  // and rounding to zero
  float products[4] = {};
  const ProductArgs args{0x1p-100f, 0x1.fffffep-30f, products};
  _mm_setcsr(flushing);
  emu::launch(zc_product, {4}, {1}, 0, &args);
  const unsigned after = _mm_getcsr() & ~0x3fu;
  _mm_setcsr(saved);
  CHECK(after == flushing, "the caller's mode");
  for (const float product : products) CHECK(product == 0x1p-129f, "a rounded subnormal");
#endif
}

}  // namespace zcomm::test
