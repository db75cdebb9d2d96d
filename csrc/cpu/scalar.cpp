// The scalar kernel set: portable C++, one element at a time, any processor.
#include "cpu/scalar.h"

#include <cstring>

namespace zcomm {
namespace {

constexpr int kVectorBytes = 16;  // SSE2 and NEON, which every target has

#include "cpu/bytes.h"

template <class Codec, std::uint8_t Id>
void encode_blocks(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
                   std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead&) {
  const int b = 1 << log2_block;
  for (std::size_t j = 0; j < blocks; ++j) {
    kept[j] =
        scalar::encode_block<Codec>(Id, v + j * b, b, scales + 2 * j,
                                    codes + j * b * Codec::kWidth / 8, e ? e + j * b : nullptr);
  }
}

template <class Codec, std::uint8_t Id>
void decode_blocks(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                   const Output& output) {
  const int b = 1 << log2_block;
  for (std::size_t j = 0; j < blocks; ++j) {
    scalar::sum_block<Codec>(
        Id, count,
        [&](int w) {
          return BlockWire{wires[w].scales + 2 * j, wires[w].codes + j * b * Codec::kWidth / 8};
        },
        b, output.out + j * b);
  }
}

float f32_one(const void* p) { return load<float>(p); }
float bf16_one(const void* p) { return bf16_value(load<std::uint16_t>(p)); }
float fp16_one(const void* p) { return fp16_value(load<std::uint16_t>(p)); }

template <float (*Grad)(const void*), int GradBytes, float (*Residual)(const void*),
          int ResidualBytes>
void load_tile(const void* grad, float prescale, const void* residual, std::size_t n, float* v) {
  const auto* g = static_cast<const std::uint8_t*>(grad);
  const auto* r = static_cast<const std::uint8_t*>(residual);
  for (std::size_t i = 0; i < n; ++i) {
    float x = Grad(g + i * GradBytes) * prescale;
    if (ResidualBytes > 0) x = x + Residual(r + i * ResidualBytes);
    v[i] = x;
  }
}

void store_bf16(const float* e, std::size_t n, void* residual) {
  for (std::size_t i = 0; i < n; ++i) {
    store(static_cast<std::uint8_t*>(residual) + 2 * i, bf16_saturate(e[i]));
  }
}

template <class Stored, Stored (*Code)(float), float (*Value)(const void*)>
bool encode_plain(const float* v, std::size_t n, std::uint8_t* codes, float* e) {
  bool not_finite = false;
  for (std::size_t i = 0; i < n; ++i) {
    not_finite |= !finite(v[i]);
    store(codes + i * sizeof(Stored), Code(v[i]));
    if (e) e[i] = v[i] - Value(codes + i * sizeof(Stored));
  }
  return not_finite;
}

template <float (*Value)(const void*), int Bytes>
void decode_plain(const std::uint8_t* const* codes, int count, std::size_t n, float* out, bool) {
  for (std::size_t i = 0; i < n; ++i) {
    float sum = Value(codes[0] + i * Bytes);
    for (int w = 1; w < count; ++w) sum = sum + Value(codes[w] + i * Bytes);
    out[i] = canonical(sum);
  }
}

std::size_t find_largest(const float* v, std::size_t n, std::uint32_t least, std::uint32_t* index,
                         const Ahead&) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if ((bits(v[i]) & kAbsMask) >= least) index[found++] = static_cast<std::uint32_t>(i);
  }
  return found;
}

template <class Codec, std::uint8_t Id>
constexpr void add_codec(Kernels& k) {
  k.encode_blocks[Id] = encode_blocks<Codec, Id>;
  k.decode_blocks[Id] = decode_blocks<Codec, Id>;
}

template <float (*Grad)(const void*), int Bytes>
constexpr void add_grad(Kernels& k, GradType type) {
  k.load[type][kResidualNone] = load_tile<Grad, Bytes, f32_one, 0>;
  k.load[type][kResidualF32] = load_tile<Grad, Bytes, f32_one, 4>;
  k.load[type][kResidualBf16] = load_tile<Grad, Bytes, bf16_one, 2>;
}

constexpr Kernels scalar_table() {
  Kernels k{};
  add_grad<f32_one, 4>(k, kGradF32);
  add_grad<bf16_one, 2>(k, kGradBf16);
  add_grad<fp16_one, 2>(k, kGradF16);
  k.store_bf16 = store_bf16;
  k.encode_plain[kNone] = encode_plain<float, canonical, f32_one>;
  k.encode_plain[kBf16] = encode_plain<std::uint16_t, bf16_saturate, bf16_one>;
  k.encode_plain[kFp16] = encode_plain<std::uint16_t, fp16_saturate, fp16_one>;
  k.decode_plain[kNone] = decode_plain<f32_one, 4>;
  k.decode_plain[kBf16] = decode_plain<bf16_one, 2>;
  k.decode_plain[kFp16] = decode_plain<fp16_one, 2>;
  add_codec<Int8, kInt8>(k);
  add_codec<Fp8, kFp8>(k);
  add_codec<Int4, kInt4>(k);
  add_codec<Lm<4>, kLm4>(k);
  add_codec<Lm<3>, kLm3>(k);
  add_codec<Lm<2>, kLm2>(k);
  add_codec<Sign, kSign>(k);
  add_scans(k);
  k.scales_are_tame = scales_are_tame;
  k.find = find_largest;
  return k;
}

}  // namespace

constexpr Kernels kScalarKernels = scalar_table();

#if defined(__x86_64__)
bool isa_is_built(int isa) { return isa >= 0 && isa < kIsas; }

static bool cpu_has(int isa) {
  __builtin_cpu_init();
  if (isa == kIsaAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         cpu_has(kIsaAvx2);
}

const Kernels* kernels_for(int isa) {
  static const bool has[kIsas] = {true, cpu_has(kIsaAvx2), cpu_has(kIsaAvx512)};
  if (!isa_is_built(isa) || !has[isa]) return nullptr;
  const Kernels* const table[kIsas] = {&kScalarKernels, &kAvx2Kernels, &kAvx512Kernels};
  return table[isa];
}
#else
bool isa_is_built(int isa) { return isa == kIsaScalar; }
const Kernels* kernels_for(int isa) { return isa == kIsaScalar ? &kScalarKernels : nullptr; }
#endif

}  // namespace zcomm
