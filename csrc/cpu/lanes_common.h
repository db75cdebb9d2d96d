// What every lane width shares: tiles in and out, blocks, sums. Included inside an instruction
// set's namespace, after its lanes.

constexpr int kGroup = 32 / kLanes;  // vectors that 32 codes fill

// Calls body with the block size: as a constant where it is the usual 128, so that its loops
// unroll.
template <class Body>
INLINE void with_block(int log2_block, Body body) {
  if (log2_block == 7) {
    body(std::integral_constant<int, 128>{});
  } else {
    body(1 << log2_block);
  }
}

INLINE I absmax_lanes(const float* v, int n) {
  I a = splat_i(0), b = a;
  for (int i = 0; i < n; i += 2 * kLanes) {
    a = imax(a, (I)load_f(v + i) & 0x7fffffff);
    b = imax(b, (I)load_f(v + i + kLanes) & 0x7fffffff);
  }
  return imax(a, b);
}
INLINE std::uint32_t block_absmax(const float* v, int n) { return hmax(absmax_lanes(v, n)); }

// The steps of the halving tree between vectors: term(k) is vector k.
template <class Term>
INLINE F vector_tree(int vectors, Term term) {
  F t[kMaxBlock / kLanes / 2];
  int h = vectors / 2;
  t[0] = term(0) + term(h);
  for (int k = 1; k < h; ++k) t[k] = term(k) + term(k + h);
  for (h /= 2; h > 0; h /= 2) {
    for (int k = 0; k < h; ++k) t[k] = t[k] + t[k + h];
  }
  return t[0];
}

// What looks up 32 codes at a time.
struct Values32 {
  static constexpr int kVectors = kGroup;
  static constexpr bool kScales = false;  // no times(s), which looks up values * s
};

// Adds the terms value(code) * scale of K wires, in order, to a block; Values::kVectors at a time.
// start(i, sum) fills the first sum where there is one, finish(i, sum) takes the last. Not fused
// where a product can overflow: it must do so before the addition.
template <bool Fused, int Width, int K, bool First, class Values, class Start, class Finish>
INLINE void add_wires(const Values& values, const BlockWire* wires, std::size_t block, int b,
                      Start start, Finish finish) {
  constexpr int kVectors = Values::kVectors;
  F s[K];
  const std::uint8_t* codes[K];
  for (int w = 0; w < K; ++w) {
    s[w] = splat(bf16_value(load<std::uint16_t>(wires[w].scales + 2 * block)));
    codes[w] = wires[w].codes + block * b * Width / 8;
    for (int i = 0; i < b * Width / 8; i += 64) {
      __builtin_prefetch(codes[w] + i + elements_per_step(Width) * Width / 8);
    }
  }
  for (int i = 0; i < b; i += kVectors * kLanes) {
    F sum[kVectors], q[kVectors];
    if (!First) start(i, sum);
    for (int w = 0; w < K; ++w) {
      const std::uint8_t* const from = codes[w] + i * Width / 8;
      if constexpr (First && Values::kScales) {
        if (w == 0) {
          values.times(s[0])(from, q);
          for (int g = 0; g < kVectors; ++g) sum[g] = q[g];
          continue;
        }
      }
      values(from, q);
      for (int g = 0; g < kVectors; ++g) {
        if (First && w == 0) {
          sum[g] = q[g] * s[w];
        } else {
          sum[g] = Fused ? exact_madd(q[g], s[w], sum[g]) : q[g] * s[w] + sum[g];
        }
      }
    }
    finish(i, sum);
  }
}

// The sum over all wires of one block. Up to four stay in registers; beyond, sums pass through
// work.
template <bool Fused, int Width, class Values, class Finish>
INLINE void sum_block(const Values& values, const BlockWire* wires, int count, std::size_t block,
                      int b, float* work, Finish finish) {
  const auto load_sum = [&](int i, F* sum) ALWAYS {
    for (int g = 0; g < Values::kVectors; ++g) sum[g] = load_f(work + i + g * kLanes);
  };
  const auto store_sum = [&](int i, F* sum) ALWAYS {
    for (int g = 0; g < Values::kVectors; ++g) store_f(work + i + g * kLanes, sum[g]);
  };
  if (count == 4)
    return add_wires<Fused, Width, 4, true>(values, wires, block, b, load_sum, finish);
  if (count == 2)
    return add_wires<Fused, Width, 2, true>(values, wires, block, b, load_sum, finish);
  if (count == 1)
    return add_wires<Fused, Width, 1, true>(values, wires, block, b, load_sum, finish);
  add_wires<Fused, Width, 2, true>(values, wires, block, b, load_sum, store_sum);
  int w = 2;
  for (; w + 2 < count; w += 2) {
    add_wires<Fused, Width, 2, false>(values, wires + w, block, b, load_sum, store_sum);
  }
  if (w + 2 == count) {
    add_wires<Fused, Width, 2, false>(values, wires + w, block, b, load_sum, finish);
  } else {
    add_wires<Fused, Width, 1, false>(values, wires + w, block, b, load_sum, finish);
  }
}

// Calls body with a function that writes one vector of the output as the output asks, and whether
// products are sure to be finite.
template <class Body>
INLINE void with_output(const Output& output, Body body) {
  float* const out = output.out;
  if (output.wild) {
    body([=](std::size_t i, F x) ALWAYS { store_f(out + i, canonical_nan(x)); }, std::false_type{});
  } else if (output.stream) {
    body([=](std::size_t i, F x) ALWAYS { stream_f(out + i, x); }, std::true_type{});
  } else {
    body([=](std::size_t i, F x) ALWAYS { store_f(out + i, x); }, std::true_type{});
  }
}

template <int Width, class Values>
INLINE void sum_blocks(const Values& values, const BlockWire* wires, int count, std::size_t blocks,
                       int log2_block, const Output& output) {
  alignas(64) float work[kMaxBlock];
  with_block(log2_block, [&](auto size) ALWAYS {
    const int b = size;
    with_output(output, [&](auto put, auto fused) ALWAYS {
      for (std::size_t j = 0; j < blocks; ++j) {
        sum_block<fused, Width>(values, wires, count, j, b, work, [&](int i, F* sum) ALWAYS {
          for (int g = 0; g < kGroup; ++g) put(j * b + i + g * kLanes, sum[g]);
        });
      }
    });
  });
}

// Gradients and residuals by their type: lanes, one element, bytes.
struct F32 {
  static constexpr std::size_t kBytes = 4;
  static INLINE F lanes(const std::uint8_t* p) { return load_f(p); }
  static INLINE float one(const std::uint8_t* p) { return load<float>(p); }
};
struct Bf16 {
  static constexpr std::size_t kBytes = 2;
  static INLINE F lanes(const std::uint8_t* p) { return load_bf16(p); }
  static INLINE float one(const std::uint8_t* p) { return bf16_value(load<std::uint16_t>(p)); }
};
struct Fp16 {
  static constexpr std::size_t kBytes = 2;
  static INLINE F lanes(const std::uint8_t* p) { return load_fp16(p); }
  static INLINE float one(const std::uint8_t* p) { return fp16_value(load<std::uint16_t>(p)); }
};
struct Nothing {
  static constexpr std::size_t kBytes = 0;
};

template <class Grad, class Residual>
void load_tile(const void* grad, float prescale, const void* residual, std::size_t n, float* v) {
  const auto* g = static_cast<const std::uint8_t*>(grad);
  const auto* r = static_cast<const std::uint8_t*>(residual);
  const F factor = splat(prescale);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    F x = Grad::lanes(g + i * Grad::kBytes) * factor;
    if constexpr (Residual::kBytes > 0) x = x + Residual::lanes(r + i * Residual::kBytes);
    store_f(v + i, x);
  }
  for (; i < n; ++i) {
    float x = Grad::one(g + i * Grad::kBytes) * prescale;
    if constexpr (Residual::kBytes > 0) x = x + Residual::one(r + i * Residual::kBytes);
    v[i] = x;
  }
}

// bf16 with finite staying finite: overflow to infinity is one above the largest magnitude.
INLINE U bf16_lanes(F x) {
  const U u = (U)x, a = u & kAbsMask, sign = (u >> 16) & 0x8000u;
  U h = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16;
  h = a < kInfBits && h > kBf16Max ? U{} + kBf16Max : h;
  return a > kInfBits ? U{} + kBf16Nan : h | sign;
}
INLINE U fp16_lanes(F x) {
  const U a = (U)x & kAbsMask, h = fp16_bits(x);
  const U saturated = a < kInfBits && (h & 0x7fffu) > kFp16Max ? (h & 0x8000u) | kFp16Max : h;
  return a > kInfBits ? U{} + kFp16Nan : saturated;
}

void store_bf16(const float* e, std::size_t n, void* residual) {
  auto* to = static_cast<std::uint8_t*>(residual);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_u16(to + 2 * i, bf16_lanes(load_f(e + i)));
  for (; i < n; ++i) store(to + 2 * i, bf16_saturate(e[i]));
}

// none, bf16, fp16 as a type: write lanes or one value, then read them back through Stored.
struct PlainNone {
  using Stored = F32;
  static INLINE void put(std::uint8_t* p, F x) { store_f(p, canonical_nan(x)); }
  static INLINE void put(std::uint8_t* p, float x) { store(p, canonical(x)); }
};
struct PlainBf16 {
  using Stored = Bf16;
  static INLINE void put(std::uint8_t* p, F x) { store_u16(p, bf16_lanes(x)); }
  static INLINE void put(std::uint8_t* p, float x) { store(p, bf16_saturate(x)); }
};
struct PlainFp16 {
  using Stored = Fp16;
  static INLINE void put(std::uint8_t* p, F x) { store_u16(p, fp16_lanes(x)); }
  static INLINE void put(std::uint8_t* p, float x) { store(p, fp16_saturate(x)); }
};

template <class Plain>
bool encode_plain(const float* v, std::size_t n, std::uint8_t* codes, float* e) {
  using Stored = typename Plain::Stored;
  I largest = splat_i(0);
  std::uint32_t rest = 0;
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F x = load_f(v + i);
    largest = imax(largest, (I)x & 0x7fffffff);
    Plain::put(codes + i * Stored::kBytes, x);
    if (e) store_f(e + i, x - Stored::lanes(codes + i * Stored::kBytes));
  }
  for (; i < n; ++i) {
    rest |= static_cast<std::uint32_t>(!finite(v[i]));
    Plain::put(codes + i * Stored::kBytes, v[i]);
    if (e) e[i] = v[i] - Stored::one(codes + i * Stored::kBytes);
  }
  return rest || hmax(largest) >= kInfBits;
}

template <class Stored>
void decode_plain(const std::uint8_t* const* codes, int count, std::size_t n, float* out,
                  bool stream) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    F sum = Stored::lanes(codes[0] + i * Stored::kBytes);
    for (int w = 1; w < count; ++w) sum = sum + Stored::lanes(codes[w] + i * Stored::kBytes);
    sum = canonical_nan(sum);
    stream ? stream_f(out + i, sum) : store_f(out + i, sum);
  }
  for (; i < n; ++i) {
    float sum = Stored::one(codes[0] + i * Stored::kBytes);
    for (int w = 1; w < count; ++w) sum = sum + Stored::one(codes[w] + i * Stored::kBytes);
    out[i] = canonical(sum);
  }
}

std::size_t find_largest(const float* v, std::size_t n, std::uint32_t least, std::uint32_t* index,
                         const Ahead& ahead) {
  std::size_t found = 0, i = 0;
  const I below = splat_i(static_cast<int>(least - 1));
  I lane = splat_i(0);
  for (int j = 0; j < kLanes; ++j) lane[j] = j;
  for (; i + 32 <= n; i += 32) {
    ahead.fetch_grad(i / 32, 32);
    ahead.fetch_residual(i / 32, 32);
    I hit[kGroup], any = splat_i(0);
    for (int g = 0; g < kGroup; ++g) {
      hit[g] = ((I)load_f(v + i + g * kLanes) & 0x7fffffff) > below;
      any |= hit[g];
    }
    if (!sign_bits((F)any)) continue;
    for (int g = 0; g < kGroup; ++g) {
      found += append(index + found, lane + static_cast<int>(i + g * kLanes), hit[g]);
    }
  }
  for (; i < n; ++i) {
    if ((bits(v[i]) & kAbsMask) >= least) index[found++] = static_cast<std::uint32_t>(i);
  }
  return found;
}
