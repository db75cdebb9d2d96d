// lm4, lm3, lm2 over lanes. Included inside an instruction set's namespace.

// Butterflies between R vectors, strides 1 ... R/2.
template <int R>
INLINE void radix(F* x) {
  for (int h = 1; h < R; h *= 2) {
    for (int i = 0; i < R; ++i) {
      if (i & h) continue;
      const F a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
}

template <int R>
INLINE void load_apart(const float* work, int first, int stride, F* x) {
  for (int r = 0; r < R; ++r) x[r] = load_f(work + (first + r * stride) * kLanes);
}

// One pass in place over vectors in groups of R that lie `stride` apart.
template <int R>
INLINE void radix_pass(int vectors, int stride, float* work) {
  for (int base = 0; base < vectors; base += R * stride) {
    for (int i = base; i < base + stride; ++i) {
      F x[R];
      load_apart<R>(work, i, stride, x);
      radix<R>(x);
      for (int r = 0; r < R; ++r) store_f(work + (i + r * stride) * kLanes, x[r]);
    }
  }
}

// The strides of H that fit into 32 values.
INLINE void hadamard_group(F* x) {
  for (int g = 0; g < kGroup; ++g) x[g] = lane_butterflies(x[g]);
  radix<kGroup>(x);
}

// The other strides, over groups in `work`. finish(i, stride, x, R) takes the result's vectors i,
// i + stride, ..., R of them.
template <class Finish>
INLINE void hadamard_rest(int vectors, float* work, Finish finish) {
  int stride = kGroup;
  if (vectors / stride == 2) {
    for (int i = 0; i < stride; ++i) {
      F x[2];
      load_apart<2>(work, i, stride, x);
      radix<2>(x);
      finish(i, stride, x, std::integral_constant<int, 2>{});
    }
    return;
  }
  while (vectors / stride > 4) {
    if (vectors / stride == 8) {
      radix_pass<2>(vectors, stride, work);
      stride *= 2;
    } else {
      radix_pass<4>(vectors, stride, work);
      stride *= 4;
    }
  }
  for (int i = 0; i < stride; ++i) {
    F x[4];
    load_apart<4>(work, i, stride, x);
    radix<4>(x);
    finish(i, stride, x, std::integral_constant<int, 4>{});
  }
}

// H: get(k) reads vector k of the input, once.
template <class Get, class Finish>
INLINE void hadamard_lanes(int vectors, float* work, Get get, Finish finish) {
  for (int k = 0; k < vectors; k += kGroup) {
    F x[kGroup];
    for (int g = 0; g < kGroup; ++g) x[g] = get(k + g);
    hadamard_group(x);
    if (vectors == kGroup) return finish(0, 1, x, std::integral_constant<int, kGroup>{});
    for (int g = 0; g < kGroup; ++g) store_f(work + (k + g) * kLanes, x[g]);
  }
  hadamard_rest(vectors, work, finish);
}

INLINE F lm_signs(F x, int k) { return (F)((I)x ^ load_i(kSignMasks.mask + k * kLanes)); }

// The tree over R vectors that lie vectors / R apart: its first steps.
template <int R>
INLINE F apart_tree(const F* t) {
  if constexpr (R == 4) return (t[0] + t[2]) + (t[1] + t[3]);
  return t[0] + t[1];
}

// The last steps of a tree whose terms are t[0..count).
INLINE float finish_tree(F* t, int count) {
  for (int h = count / 2; h > 0; h /= 2) {
    for (int k = 0; k < h; ++k) t[k] = t[k] + t[k + h];
  }
  return lane_tree(t[0]);
}

// y = H(signs * v * down); gives tree(y * y).
INLINE float lm_rotate(const float* v, int vectors, float down, float* y) {
  const F factor = splat(down);
  F squares[kMaxBlock / kLanes];
  int count = 0;
  hadamard_lanes(
      vectors, y, [&](int k) ALWAYS { return lm_signs(load_f(v + k * kLanes) * factor, k); },
      [&](int i, int stride, const F* x, auto radix) ALWAYS {
        F t[radix];
        for (int r = 0; r < radix; ++r) {
          store_f(y + (i + r * stride) * kLanes, x[r]);
          t[r] = x[r] * x[r];
        }
        squares[i] = apart_tree<radix>(t);
        count = stride;
      });
  return finish_tree(squares, count);
}

struct Products {
  float yq, qq;
};

// Codes, and q over y; gives tree(y * q) and tree(q * q).
template <int Width>
INLINE Products lm_quantise(const LmQuantiser<Width>& quantise, float gain, int b, const float* y,
                            float* q, std::uint8_t* codes) {
  const F steps = splat(gain);
  F yq[kMaxBlock / kLanes], qq[kMaxBlock / kLanes];
  const auto group = [&](int i, bool add, F* product, F* norm) ALWAYS {
    F x[kGroup], level[kGroup];
    for (int g = 0; g < kGroup; ++g) x[g] = load_f(y + i + g * kLanes);
    quantise(x, steps, level, codes + i * Width / 8);
    for (int g = 0; g < kGroup; ++g) {
      store_f(q + i + g * kLanes, level[g]);
      const F p = x[g] * level[g];
      product[g] = add ? product[g] + p : p;
      norm[g] = add ? exact_madd(level[g], level[g], norm[g]) : level[g] * level[g];
    }
  };
  const int half = b / 2;
  for (int i = 0; i < b && (b == 32 || i < half); i += 32) {
    group(i, false, yq + i / kLanes, qq + i / kLanes);
    if (b > 32) group(i + half, true, yq + i / kLanes, qq + i / kLanes);
  }
  const int count = (b == 32 ? b : half) / kLanes;
  return {finish_tree(yq, count), finish_tree(qq, count)};
}

// e = v - signs * H(q * s); q is used up.
INLINE void lm_residuals(const float* v, int vectors, std::uint16_t scale, float* q, float* e) {
  const F s = splat(bf16_value(scale));
  hadamard_lanes(
      vectors, q, [&](int k) ALWAYS { return load_f(q + k * kLanes) * s; },
      [&](int i, int stride, const F* x, auto radix) ALWAYS {
        for (int r = 0; r < radix; ++r) {
          const int k = i + r * stride;
          store_f(e + k * kLanes, load_f(v + k * kLanes) - lm_signs(x[r], k));
        }
      });
}

// The steps run over all blocks of a tile in turn, so that one block's square root and divisions
// overlap with another's butterflies.
template <int Width>
INLINE void encode_lm_tile(const float* v, std::size_t blocks, const int b, std::uint8_t* scales,
                           std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  const int log2_size = __builtin_ctz(static_cast<unsigned>(b)), vectors = b / kLanes;
  alignas(64) float y[kTileSize], q[kTileSize];
  Exponent exponent[kTileBlocks];
  float squares[kTileBlocks];
  Products products[kTileBlocks];

  for (std::size_t j = 0; j < blocks; ++j) {
    const std::uint32_t absmax = block_absmax(v + j * b, b);
    kept[j] = absmax >= kInfBits;
    exponent[j] = block_exponent(absmax);
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_grad(j, b);
    squares[j] = lm_rotate(v + j * b, vectors, exponent[j].down, y + j * b);
  }
  const LmQuantiser<Width> quantise;
  for (std::size_t j = 0; j < blocks; ++j) {
    ahead.fetch_residual(j, b);
    products[j] = lm_quantise(quantise, lm_gain(squares[j], log2_size), b, y + j * b, q + j * b,
                              codes + j * b * Width / 8);
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    const std::uint16_t scale =
        kept[j] ? kBf16Nan : lm_scale(products[j].yq, products[j].qq, log2_size, exponent[j]);
    store(scales + 2 * j, scale);
    if (__builtin_expect(kept[j] || scale == kScaleZero, 0)) {
      std::memset(codes + j * b * Width / 8, 0, b * Width / 8);
      if (e && !kept[j]) std::memcpy(e + j * b, v + j * b, b * sizeof(float));
      continue;
    }
    if (!e) continue;
    lm_residuals(v + j * b, vectors, scale, q + j * b, e + j * b);
    if (__builtin_expect(lm_is_large(exponent[j]), 0)) {
      for (int i = 0; i < b; ++i) e[j * b + i] = lm_residual(e[j * b + i], 0.0f);
    }
  }
}

template <int Width>
void encode_lm(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
               std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  with_block(log2_block, [&](auto b) ALWAYS {
    encode_lm_tile<Width>(v, blocks, b, scales, codes, e, kept, ahead);
  });
}

template <int Width>
struct LmValues {
  Lut<Width> lut;
  INLINE LmValues() : lut(Lm<Width>::levels()) {}
  INLINE void operator()(const std::uint8_t* codes, F* q) const { lookup32(lut, codes, q); }
};

template <int Width>
INLINE void decode_lm_tile(const BlockWire* wires, int count, std::size_t blocks, const int b,
                           const Output& output) {
  const int vectors = b / kLanes;
  const LmValues<Width> values;
  alignas(64) float z[kMaxBlock];
  with_output(output, [&](auto put, auto fused) ALWAYS {
    for (std::size_t j = 0; j < blocks; ++j) {
      const auto finish = [&](int i, int stride, const F* x, auto radix) ALWAYS {
        for (int r = 0; r < radix; ++r) {
          const int k = i + r * stride;
          put(j * b + k * kLanes, lm_signs(x[r], k));
        }
      };
      sum_block<fused, Width>(values, wires, count, j, b, z, [&](int i, F* sum) ALWAYS {
        // A zero block's codes would give -0; the format starts from +0.
        for (int g = 0; g < kGroup && output.wild; ++g) sum[g] = sum[g] + splat(0.0f);
        hadamard_group(sum);
        if (vectors == kGroup) return finish(0, 1, sum, std::integral_constant<int, kGroup>{});
        for (int g = 0; g < kGroup; ++g) store_f(z + i + g * kLanes, sum[g]);
      });
      if (vectors > kGroup) hadamard_rest(vectors, z, finish);
    }
  });
}

template <int Width>
void decode_lm(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
               const Output& output) {
  with_block(log2_block,
             [&](auto b) ALWAYS { decode_lm_tile<Width>(wires, count, blocks, b, output); });
}
