// lm4, lm3, lm2 over lanes. Included inside an instruction set's namespace.

// Butterflies between R vectors, strides R/2 ... 1.
template <int R>
INLINE void radix(F* x) {
  for (int h = R / 2; h > 0; h /= 2) {
    for (int i = 0; i < R; ++i) {
      if (i & h) continue;
      const F a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
}

// One pass over `vectors` vectors in groups of R that lie `stride` vectors apart.
template <int R, class Get, class Put>
INLINE void radix_pass(int vectors, int stride, Get get, Put put) {
  for (int base = 0; base < vectors; base += R * stride) {
    for (int i = base; i < base + stride; ++i) {
      F x[R];
      for (int r = 0; r < R; ++r) x[r] = get(i + r * stride);
      radix<R>(x);
      for (int r = 0; r < R; ++r) put(i + r * stride, x[r]);
    }
  }
}

// H over 2^log2_size values in vectors: get(k) reads vector k of the input once, put(k, x) takes
// vector k of the result; `work` holds what lies between the passes. The last pass does the
// strides that fit into R vectors and the lanes.
template <class Get, class Put>
INLINE void hadamard_lanes(int vectors, float* work, Get get, Put put) {
  const auto from_work = [&](int k) { return load_f(work + k * kLanes); };
  const auto to_work = [&](int k, F x) { store_f(work + k * kLanes, x); };
  const auto finish = [&](int k, F x) { put(k, lane_butterflies(x)); };
  constexpr int R = kLastRadix;
  if (vectors < R) {
    if (vectors == 2) {
      radix_pass<2>(2, 1, get, finish);
    } else {
      radix_pass<4>(4, 1, get, finish);
    }
    return;
  }
  if (vectors == R) {
    radix_pass<R>(R, 1, get, finish);
    return;
  }
  int stride = vectors;
  bool first = true;
  const auto pass = [&](auto width) {
    stride /= width;
    if (first) {
      radix_pass<width>(vectors, stride, get, to_work);
    } else {
      radix_pass<width>(vectors, stride, from_work, to_work);
    }
    first = false;
  };
  while (stride > R) {
    if (stride >= 4 * R) {
      pass(std::integral_constant<int, 4>{});
    } else {
      pass(std::integral_constant<int, 2>{});
    }
  }
  radix_pass<R>(vectors, 1, from_work, finish);
}

INLINE F lm_signs(F x, int k) {
  return (F)((I)x ^ load_i(kSignMasks.mask + k * kLanes));
}

// The steps run over all blocks of a tile in turn, so that one block's square root and divisions
// overlap with another's butterflies.
template <int Width, int Log2Block>
INLINE void encode_lm_tile(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
                           std::uint8_t* codes, float* e, std::uint8_t* kept) {
  const int log2_size = Log2Block ? Log2Block : log2_block;
  const int b = 1 << log2_size, vectors = b / kLanes, half = vectors / 2;
  alignas(64) float y[kTileSize], q[kTileSize];
  Exponent exponent[kTileBlocks];
  float squares[kTileBlocks], yq[kTileBlocks], qq[kTileBlocks];

  for (std::size_t j = 0; j < blocks; ++j) {
    const std::uint32_t absmax = block_absmax(v + j * b, b);
    kept[j] = absmax >= kInfBits;
    exponent[j] = block_exponent(absmax);
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    const float* x = v + j * b;
    float* to = y + j * b;
    const F down = splat(exponent[j].down);
    hadamard_lanes(
        vectors, to, [&](int k) { return lm_signs(load_f(x + k * kLanes) * down, k); },
        [&](int k, F z) { store_f(to + k * kLanes, z); });
    squares[j] = lane_tree(vector_tree(vectors, [&](int k) {
      const F z = load_f(to + k * kLanes);
      return z * z;
    }));
  }
  LmQuantiser<Width> quantise(0.0f);
  for (std::size_t j = 0; j < blocks; ++j) {
    quantise.set_rms(lm_rms(squares[j], log2_size));
    F products[kMaxBlock / kLanes / 2], norms[kMaxBlock / kLanes / 2];
    I code[kMaxBlock / kLanes];
    for (int k = 0; k < half; ++k) {
      const F y0 = load_f(y + j * b + k * kLanes), y1 = load_f(y + j * b + (k + half) * kLanes);
      const F q0 = quantise(y0, code[k]), q1 = quantise(y1, code[k + half]);
      store_f(q + j * b + k * kLanes, q0);
      store_f(q + j * b + (k + half) * kLanes, q1);
      products[k] = y0 * q0 + y1 * q1;
      norms[k] = q0 * q0 + q1 * q1;
    }
    for (int k = 0; k < vectors; k += 32 / kLanes) {
      LmQuantiser<Width>::pack(code + k, codes + (j * b + k * kLanes) * Width / 8);
    }
    for (int h = half / 2; h > 0; h /= 2) {
      for (int k = 0; k < h; ++k) {
        products[k] = products[k] + products[k + h];
        norms[k] = norms[k] + norms[k + h];
      }
    }
    yq[j] = lane_tree(products[0]);
    qq[j] = lane_tree(norms[0]);
  }
  for (std::size_t j = 0; j < blocks; ++j) {
    const std::uint16_t scale =
        kept[j] ? kBf16Nan : lm_scale(yq[j], qq[j], log2_size, exponent[j]);
    store(scales + 2 * j, scale);
    if (__builtin_expect(kept[j] || scale == kScaleZero, 0)) {
      std::memset(codes + j * b * Width / 8, 0, b * Width / 8);
      if (e && !kept[j]) std::memcpy(e + j * b, v + j * b, b * sizeof(float));
      continue;
    }
    if (!e) continue;
    const F s = splat(bf16_value(scale));
    float* work = q + j * b;
    hadamard_lanes(
        vectors, work, [&](int k) { return load_f(work + k * kLanes) * s; },
        [&](int k, F d) {
          store_f(e + j * b + k * kLanes, load_f(v + j * b + k * kLanes) - lm_signs(d, k));
        });
  }
}

template <int Width>
void encode_lm(const float* v, std::size_t blocks, int log2_block, std::uint8_t* scales,
               std::uint8_t* codes, float* e, std::uint8_t* kept) {
  if (log2_block == 7) {
    encode_lm_tile<Width, 7>(v, blocks, 7, scales, codes, e, kept);
  } else {
    encode_lm_tile<Width, 0>(v, blocks, log2_block, scales, codes, e, kept);
  }
}

template <int Width, int Log2Block>
INLINE void decode_lm_tile(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                           float* out, bool stream) {
  const int log2_size = Log2Block ? Log2Block : log2_block;
  const int b = 1 << log2_size, vectors = b / kLanes;
  const Lut<Width> lut(Lm<Width>::levels());
  alignas(64) float z[kMaxBlock];
  for (std::size_t j = 0; j < blocks; ++j) {
    for (int i = 0; i < b; i += 32) {
      F sum[32 / kLanes];
      // Sums start from +0: a zero block's codes would otherwise give -0.
      for (int g = 0; g < 32 / kLanes; ++g) sum[g] = splat(0.0f);
      for (int w = 0; w < count; ++w) {
        F q[32 / kLanes];
        const F s = splat(bf16_value(load<std::uint16_t>(wires[w].scales + 2 * j)));
        lookup32(lut, wires[w].codes + (j * b + i) * Width / 8, q);
        for (int g = 0; g < 32 / kLanes; ++g) sum[g] = exact_madd(q[g], s, sum[g]);
      }
      for (int g = 0; g < 32 / kLanes; ++g) store_f(z + i + g * kLanes, sum[g]);
    }
    float* to = out + j * b;
    const auto get = [&](int k) { return load_f(z + k * kLanes); };
    if (stream) {
      hadamard_lanes(vectors, z, get, [&](int k, F d) {
        stream_f(to + k * kLanes, canonical_nan(lm_signs(d, k)));
      });
    } else {
      hadamard_lanes(vectors, z, get, [&](int k, F d) {
        store_f(to + k * kLanes, canonical_nan(lm_signs(d, k)));
      });
    }
  }
}

template <int Width>
void decode_lm(const BlockWire* wires, int count, std::size_t blocks, int log2_block, float* out,
               bool stream) {
  if (log2_block == 7) {
    decode_lm_tile<Width, 7>(wires, count, blocks, 7, out, stream);
  } else {
    decode_lm_tile<Width, 0>(wires, count, blocks, log2_block, out, stream);
  }
}
