// A lane's four neighboring elements in and out of memory: 128 bits at once where the address
// allows, element by element where it does not. Addresses are multiples of the element's size, and
// wires begin at multiples of 16: kernels/cuda.py copies what lies elsewhere.
#pragma once

#include "cuda/args.h"
#include "cuda/device.h"

namespace zcomm::cuda {

ZC_FN bool is_aligned(const void* p, unsigned nbytes) {
  return (reinterpret_cast<std::uintptr_t>(p) & (nbytes - 1)) == 0;
}

template <class T>
ZC_FN T read(const std::uint8_t* p) {
  return *reinterpret_cast<const T*>(p);
}

template <class T>
ZC_FN void write(std::uint8_t* p, T x) {
  *reinterpret_cast<T*>(p) = x;
}

template <int Bytes>
struct Vector;
template <>
struct Vector<4> {
  using Type = std::uint32_t;
};
template <>
struct Vector<8> {
  using Type = uint2;
};
template <>
struct Vector<16> {
  using Type = uint4;
};

// Elements p[0..valid); the others are 0.
template <class T>
ZC_FN void read4(const std::uint8_t* p, int valid, T x[4]) {
  ZC_IS_GLOBAL(p);
  using V = typename Vector<4 * sizeof(T)>::Type;
  if (valid == 4 && is_aligned(p, sizeof(V))) {
    const V v = *reinterpret_cast<const V*>(p);
    memcpy(x, &v, sizeof v);
    return;
  }
  ZC_UNROLL for (int j = 0; j < 4; ++j) { x[j] = j < valid ? read<T>(p + j * sizeof(T)) : T(0); }
}

template <class T>
ZC_FN void write4(std::uint8_t* p, int valid, const T x[4]) {
  ZC_IS_GLOBAL(p);
  using V = typename Vector<4 * sizeof(T)>::Type;
  if (valid == 4 && is_aligned(p, sizeof(V))) {
    V v;
    memcpy(&v, x, sizeof v);
    *reinterpret_cast<V*>(p) = v;
    return;
  }
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    if (j < valid) write(p + j * sizeof(T), x[j]);
  }
}

template <class Index>
ZC_FN void read_floats(const std::uint8_t* base, int grad_type, Index first, int valid,
                       float x[4]) {
  if (grad_type == kGradF32) return read4(base + first * 4, valid, x);
  std::uint16_t h[4];
  read4(base + first * 2, valid, h);
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    x[j] = grad_type == kGradBf16 ? bf16_value(h[j]) : fp16_value(h[j]);
  }
}

// A piece of the wire in the sum of word_i * (2 i + 1): `weight` is that of the word that `byte`
// counts from.
template <class Index>
ZC_FN std::uint64_t checksum_part(std::uint64_t piece, std::uint64_t weight, Index byte) {
  return (piece << (8 * (byte & 7))) * (weight + static_cast<std::uint64_t>(byte >> 3 << 1));
}

}  // namespace zcomm::cuda
