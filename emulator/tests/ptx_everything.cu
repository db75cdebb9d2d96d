// Everything that kernels may use, in one. Compiled to PTX and translated, and compiled as C++ for
// the emulator, it must leave the same bytes.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/device.h"

struct Args {
  const float* values;
  const unsigned char* bytes;
  float* floats;
  unsigned* words;
  unsigned long long* longs;
  float* const* rows;
  long count;
  int mode;
  float levels[9];
};

__device__ static const unsigned short kSteps[5] = {1, 20, 300, 4000, 50000};

__device__ static float rounded(float x, int mode) {
  switch (mode) {
    case 0:
      return std::floor(x);
    case 1:
      return std::nearbyintf(x);
    case 2:
      return static_cast<float>(static_cast<double>(x) * 1.1);
    case 3:
      return std::fabs(x) < 1e9f ? static_cast<float>(static_cast<int>(x)) : 1.0f;
    case 4:
      return std::fabs(x) < 1e9f ? static_cast<float>(static_cast<long>(x) * 3) : 2.0f;
    case 5:
      return std::sqrt(std::fabs(x)) / 3.0f;
    case 6:
      return std::ceil(x) * 0.5f + std::trunc(x);
    default:
      return x < 1.0f ? -x : std::fabs(x) * x;
  }
}

__device__ static unsigned warp_words(float x, unsigned seed) {
  const unsigned all = 0xffffffffu;
  unsigned mix = __ballot_sync(all, x > 0.5f);
  mix += __any_sync(all, x > 1.9f) ? 3 : 5;
  mix ^= __all_sync(all, x > -9.0f) ? 0x100 : 0x200;
  mix += __reduce_max_sync(all, seed * 2654435761u);
  mix ^= __shfl_sync(all, mix + seed, (seed * 7) & 31);
  mix += __shfl_xor_sync(all, seed, 5) * 3 + __shfl_xor_sync(all, seed, 3, 8);
  mix ^= __shfl_up_sync(all, mix, 3) + __shfl_down_sync(all, seed, 4, 16);
  return mix + __popc(mix) * 64 + __ffs(seed) * 1024 + __clz(mix >> 3) * 4096;
}

__device__ static unsigned long long wide(unsigned long long x, unsigned by) {
  const auto signed_x = static_cast<long long>(x);
  const unsigned long long high = static_cast<unsigned long long>(signed_x >> (by & 63)) ^ (x << 7);
  return high / (by + 3) + x % (by + 1) + (x > high ? x - high : 11);
}

ZC_KERNEL(zc_everything, Args, 128, 1) {
  __shared__ float tile[128];
  __shared__ unsigned most;
  __shared__ unsigned long long least;
  ZC_DYNAMIC_SHARED(float4, quads);

  const unsigned t = threadIdx.x;
  const long i = static_cast<long>(blockIdx.x) * blockDim.x + t;
  const float4 v = reinterpret_cast<const float4*>(args.values)[i];
  quads[t] = v;
  tile[t] = v.x / v.y;
  if (t == 0) {
    most = 0;
    least = ~0ull;
  }
  __syncthreads();

  const float4 q = quads[(t + 5) % blockDim.x];
  float sum = tile[(t * 7) % blockDim.x] + args.levels[(t * 5) % 9] + kSteps[t % 5];
  for (long k = 0; k < args.count; ++k) sum = sum * 0.75f + q.z * static_cast<float>(k + 1);
  const float x = rounded(sum, args.mode);

  unsigned word;
  std::memcpy(&word, args.bytes + t + 1, 4);
  const ushort4 u = reinterpret_cast<const ushort4*>(args.bytes)[t];
  const unsigned mixed =
      warp_words(x, word ^ t) + __float_as_uint(__uint_as_float(word >> 2) * 1.5f);
  atomicAdd(&args.words[0], mixed);
  atomicMax(&args.words[1], mixed);
  atomicOr(&args.words[2], mixed & word);
  atomicAdd(&args.longs[0], static_cast<unsigned long long>(mixed) << 9);
  atomicMin(&args.longs[1], wide(mixed * 0x100000001ull, u.y));
  atomicMax(&most, mixed);
  atomicMin(&least, static_cast<unsigned long long>(word) * mixed);
  __syncwarp();
  __threadfence();
  __syncthreads();
  if (t == 0) {
    args.words[4 + blockIdx.x] = atomicExch(&most, 1u);
    args.longs[4 + blockIdx.x] = atomicExch(&least, 2ull);
  }

  args.rows[i][1] = x + u.x;
  args.floats[i] = q.y - x + static_cast<signed char>(args.bytes[t]) + static_cast<float>(mixed);
  const auto* pairs = reinterpret_cast<const uint2*>(args.bytes);
  auto* words = reinterpret_cast<uint4*>(args.words + 16);
  words[i] =
      make_uint4(mixed, word, pairs[t].x >> (word & 31), static_cast<unsigned>(wide(word, t)));
}
