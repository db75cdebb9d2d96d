// Encode calls for the native tests: how they are described, given residuals, and run.
#pragma once

#include <cstring>

#include "cpu/residual.h"
#include "tests/harness.h"

namespace zcomm::test {

// One encode call but for the instruction set.
struct Call {
  const Layout& layout;
  GradType grad_type = kGradF32;
  ResidualType residual_type = kResidualNone;
  bool separate = false;  // residuals in and out are different buffers
  int threads = 1;
  std::size_t shift = 0;  // of grad, residuals and wire
  double prescale = 1.0;
  bool checksum = true;
  bool keep_idle = false;
};

struct Encoded {
  Bytes wire;
  std::vector<Bytes> residuals;
};

inline std::string describe(const Call& call, int isa) {
  const Segment& s = call.layout.segments.front();
  return std::string(kIsaNames[isa]) + " codec " + std::to_string(s.codec) + " log2 block " +
         std::to_string(s.log2_block) + " n " + std::to_string(s.n) + " k " + std::to_string(s.k) +
         " grad " + std::to_string(call.grad_type) + " residual " +
         std::to_string(call.residual_type) + (call.separate ? " separate" : "") + " threads " +
         std::to_string(call.threads) + " shift " + std::to_string(call.shift);
}

inline int residual_log2_block(const Segment& s) {
  return s.log2_block ? s.log2_block : kPlainResidualLog2Block;
}

inline void run_encode(const Call& call, int isa, const Bytes& grad, const std::vector<Bytes>& in,
                       const std::vector<Bytes>& out, const Bytes& wire) {
  std::vector<std::uint64_t> from, to;
  for (const Bytes& r : in) from.push_back(reinterpret_cast<std::uintptr_t>(r.data()));
  for (const Bytes& r : out) to.push_back(reinterpret_cast<std::uintptr_t>(r.data()));
  encode({&call.layout, kernels(isa), call.threads, grad.data(), call.grad_type, call.prescale,
          from.data(), to.data(), call.residual_type, wire.data(), call.checksum, call.keep_idle});
}

inline Encoded run(const Call& call, int isa, const Bytes& grad, const std::vector<Bytes>& before) {
  Encoded result{Bytes(static_cast<std::size_t>(wire_nbytes(call.layout)), call.shift), {}};
  std::vector<Bytes>& out = result.residuals;
  for (const Bytes& r : before) {
    out.emplace_back(r.size(), call.shift);
    if (!call.separate) std::memcpy(out.back().data(), r.data(), r.size());
  }
  run_encode(call, isa, grad, call.separate ? before : out, out, result.wire);
  return result;
}

// An int8 residual is the body of an int8 segment.
inline Bytes int8_residual(const Segment& s, std::uint64_t seed, std::size_t shift) {
  const Layout layout = make_layout({part(kInt8, residual_log2_block(s), s.n)});
  const Call call{layout};
  const Bytes grad = make_grad(s.n, kGradF32, kGaussian, seed, 0);
  const Bytes wire = run(call, kIsaScalar, grad, {}).wire;
  Bytes residual(wire.size() - sizeof(Header), shift);
  std::memcpy(residual.data(), wire.data() + sizeof(Header), residual.size());
  return residual;
}

inline std::vector<Bytes> make_residuals(const Call& call, std::uint64_t seed) {
  std::vector<Bytes> residuals;
  if (call.residual_type == kResidualNone) return residuals;
  for (const Segment& s : call.layout.segments) {
    ++seed;
    if (call.residual_type == kResidualInt8) {
      residuals.push_back(int8_residual(s, seed, call.shift));
    } else {
      const GradType type = call.residual_type == kResidualF32 ? kGradF32 : kGradBf16;
      const int kind = seed % 5 ? kGaussian : kZeros;
      residuals.push_back(make_grad(s.n, type, kind, seed, call.shift));
    }
  }
  return residuals;
}

}  // namespace zcomm::test
