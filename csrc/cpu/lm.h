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

// The strides of H that fit into G vectors.
template <int G, int I = 0>
INLINE void hadamard_group(F* x) {
  if constexpr (I < kLaneStrides) {
    for (int g = 0; g < G; ++g) x[g] = lane_butterfly<I>(x[g]);
    hadamard_group<G, I + 1>(x);
  } else {
    radix<G>(x);
  }
}

// The other strides, over four or more groups of G vectors in `work`. finish(i, stride, x, R) takes
// the result's vectors i, i + stride, ..., R of them.
template <int G, class Finish>
INLINE void hadamard_rest(int vectors, float* work, Finish finish) {
  int stride = G;
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

// H: get(k) reads vector k of the input, once; rotate(x) does the strides that fit into G vectors.
template <int G, class Get, class Rotate, class Finish>
INLINE void hadamard_groups(int vectors, float* work, Get get, Rotate rotate, Finish finish) {
  for (int k = 0; k < vectors; k += G) {
    F x[G];
    for (int g = 0; g < G; ++g) x[g] = get(k + g);
    rotate(x);
    if (vectors == G) return finish(0, 1, x, std::integral_constant<int, G>{});
    if (vectors == 2 * G && k == G) {  // the second group need not pass through memory
      for (int g = 0; g < G; ++g) {
        F pair[2] = {load_f(work + g * kLanes), x[g]};
        radix<2>(pair);
        finish(g, G, pair, std::integral_constant<int, 2>{});
      }
      return;
    }
    for (int g = 0; g < G; ++g) store_f(work + (k + g) * kLanes, x[g]);
  }
  hadamard_rest<G>(vectors, work, finish);
}

// In groups of up to eight vectors, which registers hold.
template <class Get, class Finish>
INLINE void hadamard_lanes(int vectors, float* work, Get get, Finish finish) {
  const auto of = [&](auto group) ALWAYS {
    constexpr int kVectors = group;
    const auto rotate = [&](F* x) ALWAYS { hadamard_group<kVectors>(x); };
    hadamard_groups<kVectors>(vectors, work, get, rotate, finish);
  };
  if (vectors >= 8) return of(std::integral_constant<int, 8>{});
  if (vectors == 4) return of(std::integral_constant<int, 4>{});
  of(std::integral_constant<int, 2>{});
}

INLINE F lm_signs(F x, int k) { return (F)((I)x ^ load_i(kSignMasks.mask + k * kLanes)); }

// The steps of a tree between its vectors t[0..count).
INLINE F finish_tree(F* t, int count) {
  for (int h = count / 2; h > 0; h /= 2) {
    for (int k = 0; k < h; ++k) t[k] = t[k] + t[k + h];
  }
  return t[0];
}

// y = H(signs * v * down); gives the lanes of tree(y * y).
INLINE F lm_rotate(const float* v, int vectors, float down, float* y) {
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
        squares[i] = finish_tree(t, radix);
        count = stride;
      });
  return finish_tree(squares, count);
}

// floor(y * gain) as bytes, from `Vectors` vectors, four or fewer, to a vector of bytes.
template <int Vectors>
INLINE void lm_floors(const float* y, int b, float gain, B* bytes) {
  const F factor = splat(gain);
  for (int i = 0; i < b; i += Vectors * kLanes) {
    I t[4] = {};
    for (int g = 0; g < Vectors; ++g) t[g] = floor_int(load_f(y + i + g * kLanes) * factor);
    *bytes++ = pack_halves(t);
  }
}

// Those bytes to codes, which stay in place as bytes, too.
template <int Width, int Vectors>
INLINE void lm_codes(int count, B* bytes, std::uint8_t* codes) {
  const LmCodes<Width> find;
  for (int k = 0; k < count; ++k) {
    bytes[k] = find(bytes[k]);
    store_halves<Width, Vectors>(bytes[k], codes + k * Vectors * kLanes * Width / 8);
  }
}

struct Products {
  F yq, qq;
};

// q = level[code] unless it is null; gives the lanes of tree(y * q) and tree(q * q).
template <int Vectors>
INLINE Products lm_levels(const ByteLut& levels, const B* codes, int b, const float* y, float* q) {
  constexpr int kStep = Vectors * kLanes;
  F yq[kMaxBlock / kLanes], qq[kMaxBlock / kLanes];
  const auto group = [&](int i, bool add, F* product, F* norm) ALWAYS {
    F level[4];
    levels(codes[i / kStep], level);
    for (int g = 0; g < Vectors; ++g) {
      if (q) store_f(q + i + g * kLanes, level[g]);
      const F p = load_f(y + i + g * kLanes) * level[g];
      product[g] = add ? product[g] + p : p;
      norm[g] = add ? exact_madd(level[g], level[g], norm[g]) : level[g] * level[g];
    }
  };
  const int half = b / 2;
  for (int i = 0; i < b && (b == kStep || i < half); i += kStep) {
    group(i, false, yq + i / kLanes, qq + i / kLanes);
    if (b > kStep) group(i + half, true, yq + i / kLanes, qq + i / kLanes);
  }
  const int count = (b == kStep ? b : half) / kLanes;
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

// What is computed once per block, for four blocks at a time.
typedef float F4 __attribute__((vector_size(16)));
typedef std::int32_t I4 __attribute__((vector_size(16)));
typedef std::uint32_t U4 __attribute__((vector_size(16)));

// 2^-e and 2^e, as block_exponent().
INLINE F4 lm_down(I4 absmax) {
  const I4 e = absmax >> 23;
  return (F4)((e < 253 ? 254 - e : I4{} + 1) << 23);
}
INLINE F4 lm_up(I4 absmax) {
  const I4 e = absmax >> 23, less = (e >= 249) & 6;  // lm_is_large()
  return (F4)(((e < 253 ? e : I4{} + 253) - less) << 23);
}

// lm_gain().
INLINE F4 lm_gains(F4 sums_of_squares, int log2_size) {
  const F4 means = sums_of_squares * pow2_biased(127 - log2_size);
  return kLmSteps / (F4)_mm_sqrt_ps(means);
}

// lm_scale(); NaN where a block is not finite.
INLINE U4 lm_scales(I4 absmax, F4 yq, F4 qq, int log2_size) {
  const U4 u = (U4)(yq / qq * pow2_biased(127 - log2_size) * lm_up(absmax));
  const U4 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U4 scale = (absmax >> 23) == 0 || rounded < kScaleMin ? U4{} : rounded;
  return absmax >= static_cast<int>(kInfBits) ? U4{} + kBf16Nan : scale;
}

// Calls body(j, n) for the blocks j ... j + n of a tile: four, or what is left at its end.
template <class Body>
INLINE void in_fours(std::size_t blocks, Body body) {
  std::size_t j = 0;
  for (; j + 4 <= blocks; j += 4) body(j, std::integral_constant<std::size_t, 4>{});
  if (j < blocks) body(j, blocks - j);
}

// The steps run over all blocks of a tile in turn, so that one block's square root and divisions
// overlap with another's butterflies. Codes and levels take three passes: as one long chain they
// filled the schedulers with what had to wait, and took 12.5 cycles per 16 elements instead of 8.2
// (AVX2 on Zen 5).
template <int Width>
INLINE void encode_lm_tile(const float* v, std::size_t blocks, const int b, std::uint8_t* scales,
                           std::uint8_t* codes, float* e, std::uint8_t* kept, const Ahead& ahead) {
  const int log2_size = __builtin_ctz(static_cast<unsigned>(b)), vectors = b / kLanes;
  alignas(64) float y[kTileSize], q[kTileSize];
  B bytes[kTileSize / 32];
  float down[kTileBlocks], gain[kTileBlocks];
  std::uint32_t absmax[kTileBlocks], scale[kTileBlocks];
  const auto add = [&](F x, F y) ALWAYS { return x + y; };
  const auto larger = [&](F x, F y) ALWAYS { return (F)imax((I)x, (I)y); };

  in_fours(blocks, [&](std::size_t j, auto n) ALWAYS {
    F t[4];
    t[1] = t[2] = t[3] = splat(0);
    for (std::size_t i = 0; i < n; ++i) t[i] = (F)absmax_lanes(v + (j + i) * b, b);
    const I4 largest = (I4)fold4(t, larger);
    store(absmax + j, largest);
    store(down + j, lm_down(largest));
  });
  in_fours(blocks, [&](std::size_t j, auto n) ALWAYS {
    F t[4];
    t[1] = t[2] = t[3] = splat(0);
    for (std::size_t i = 0; i < n; ++i) {
      ahead.fetch_grad(j + i, b);
      t[i] = lm_rotate(v + (j + i) * b, vectors, down[j + i], y + (j + i) * b);
    }
    store(gain + j, lm_gains(fold4(t, add), log2_size));
  });
  const auto quantise = [&](auto vectors_per_step) ALWAYS {
    constexpr int kVectors = vectors_per_step, kStep = kVectors * kLanes;
    for (std::size_t j = 0; j < blocks; ++j) {
      ahead.fetch_residual(j, b);
      lm_floors<kVectors>(y + j * b, b, gain[j], bytes + j * b / kStep);
    }
    lm_codes<Width, kVectors>(static_cast<int>(blocks) * b / kStep, bytes, codes);
    const ByteLut levels(Lm<Width>::levels(), Lm<Width>::kLevels);
    const auto fit = [&](auto keep_levels) ALWAYS {
      in_fours(blocks, [&](std::size_t j, auto n) ALWAYS {
        F products[4], norms[4];
        products[1] = products[2] = products[3] = norms[1] = norms[2] = norms[3] = splat(0);
        for (std::size_t i = 0; i < n; ++i) {
          const std::size_t at = (j + i) * b;
          const Products sums = lm_levels<kVectors>(levels, bytes + at / kStep, b, y + at,
                                                    keep_levels ? q + at : nullptr);
          products[i] = sums.yq;
          norms[i] = sums.qq;
        }
        store(scale + j,
              lm_scales(load<I4>(absmax + j), fold4(products, add), fold4(norms, add), log2_size));
      });
    };
    if (e) {
      fit(std::true_type{});
    } else {
      fit(std::false_type{});
    }
  };
  if (vectors < 4) {
    quantise(std::integral_constant<int, 32 / kLanes>{});
  } else {
    quantise(std::integral_constant<int, 4>{});
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    kept[j] = scale[j] == kBf16Nan;
    store(scales + 2 * j, static_cast<std::uint16_t>(scale[j]));
    if (__builtin_expect(kept[j] || scale[j] == kScaleZero, 0)) {
      std::memset(codes + j * b * Width / 8, 0, b * Width / 8);
      if (e && !kept[j]) std::memcpy(e + j * b, v + j * b, b * sizeof(float));
      continue;
    }
    if (!e) continue;
    lm_residuals(v + j * b, vectors, static_cast<std::uint16_t>(scale[j]), q + j * b, e + j * b);
    if (__builtin_expect(lm_is_large(block_exponent(absmax[j])), 0)) {
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

// Levels in order, 32 at a time.
template <int Width>
struct LmValues : Values32 {
  Lut<Width> lut;
  INLINE LmValues() : lut(Lm<Width>::levels()) {}
  INLINE void operator()(const std::uint8_t* codes, F* q) const { lookup32(lut, codes, q); }
  static INLINE void rotate(F* x) { hadamard_group<kVectors>(x); }
};

// Levels of eight vectors at a time, in the order that takes the fewest steps. The Hadamard
// transform brings them into their places as it goes.
template <int Width>
struct LmColumns {
  static constexpr int kVectors = 8;
  static constexpr bool kScales = kLutScales;
  Lut<Width> lut;
  explicit INLINE LmColumns(Lut<Width> of = Lut<Width>(Lm<Width>::levels())) : lut(of) {}
  INLINE LmColumns times(F s) const { return LmColumns(lut.times(s)); }
  INLINE void operator()(const std::uint8_t* codes, F* q) const { lookup_columns(lut, codes, q); }
  static INLINE void rotate(F* x) {
    hadamard_columns(x);
    const F y[8] = {x[0], x[2], x[4], x[6], x[1], x[3], x[5], x[7]};
    for (int k = 0; k < 8; ++k) x[k] = y[k];
  }
};

// First the sums of a few blocks, then their transform: two short chains of steps instead of a long
// one.
template <int Width, class Values>
INLINE void decode_lm_tile(const BlockWire* wires, int count, std::size_t blocks, const int b,
                           const Output& output) {
  constexpr int kVectors = Values::kVectors;
  const int vectors = b / kLanes;
  const std::size_t at_once = b < 512 ? 512 / b : 1;
  const Values values;
  alignas(64) float z[kTileSize];
  with_output(output, [&](auto put, auto fused) ALWAYS {
    for (std::size_t first = 0; first < blocks; first += at_once) {
      const std::size_t n = blocks - first < at_once ? blocks - first : at_once;
      for (std::size_t j = 0; j < n; ++j) {
        float* const sums = z + j * b;
        sum_block<fused, Width>(values, wires, count, first + j, b, sums,
                                [&](int i, F* sum) ALWAYS {
                                  for (int g = 0; g < kVectors; ++g)
                                    store_f(sums + i + g * kLanes, sum[g]);
                                });
      }
      for (std::size_t j = 0; j < n; ++j) {
        float* const sums = z + j * b;
        const auto finish = [&](int i, int stride, const F* x, auto radix) ALWAYS {
          for (int r = 0; r < radix; ++r) {
            const int k = i + r * stride;
            put((first + j) * b + k * kLanes, lm_signs(x[r], k));
          }
        };
        // A zero block's codes would give -0; the format starts from +0.
        const auto get = [&](int k) ALWAYS {
          const F x = load_f(sums + k * kLanes);
          return output.wild ? x + splat(0.0f) : x;
        };
        const auto rotate = [&](F* x) ALWAYS { Values::rotate(x); };
        hadamard_groups<kVectors>(vectors, sums, get, rotate, finish);
      }
    }
  });
}

template <int Width>
void decode_lm(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
               const Output& output) {
  with_block(log2_block, [&](auto b) ALWAYS {
    if constexpr (kHasColumns<Width>) {
      if (b >= 8 * kLanes)
        return decode_lm_tile<Width, LmColumns<Width>>(wires, count, blocks, b, output);
    }
    decode_lm_tile<Width, LmValues<Width>>(wires, count, blocks, b, output);
  });
}
