#include "cpu/residual.h"

#include <cstring>

#include "cpu/blocks.h"

namespace zcomm {

ResidualTile::ResidualTile(const EncodeArgs& args, int index)
    : args_(args), prescale_(static_cast<float>(args.prescale)), type_(args.residual_type) {
  const Segment& segment = args.layout->segments[index];
  grad_bytes_ = args.grad_type == kGradF32 ? 4 : 2;
  grad_ = args.grad + segment.offset * grad_bytes_;
  log2_block_ = segment.log2_block ? segment.log2_block : kPlainResidualLog2Block;
  // Without a residual, or with one to leave alone, only the gradient is encoded.
  if (type_ != kResidualNone && (!args.residual_in[index] || (args.idle && args.idle[index])))
    type_ = kResidualNone;
  if (type_ == kResidualNone) return;
  in_ = reinterpret_cast<const std::uint8_t*>(args.residual_in[index]);
  out_ = reinterpret_cast<std::uint8_t*>(args.residual_out[index]);
  sections_ = sections(kInt8, log2_block_, segment.n, 0);
  codes_at_ = sections_.start(1);
}

void ResidualTile::load(std::int64_t a, int n, float* v) const {
  const std::uint8_t* g = grad_ + a * grad_bytes_;
  if (type_ == kResidualInt8) {
    alignas(64) float r[kTileSize];
    read(a, n, r);
    args_.kernels->load[args_.grad_type][kResidualF32](g, prescale_, r, n, v);
    return;
  }
  const int bytes = type_ == kResidualBf16 ? 2 : 4;
  args_.kernels->load[args_.grad_type][type_](g, prescale_, in_ + a * bytes, n, v);
}

const float* ResidualTile::values(std::int64_t a, int n, float* buffer) const {
  const std::uint8_t* g = grad_ + a * grad_bytes_;
  const bool aligned = reinterpret_cast<std::uintptr_t>(g) % alignof(float) == 0;
  if (args_.grad_type == kGradF32 && type_ == kResidualNone && prescale_ == 1.0f && aligned) {
    return reinterpret_cast<const float*>(g);
  }
  load(a, n, buffer);
  return buffer;
}

Ahead ResidualTile::ahead(std::int64_t a) const {
  constexpr int bytes[] = {0, 4, 2, 1};  // by ResidualType
  const std::uint8_t* residual = in_ ? in_ + codes_at_ * (type_ == kResidualInt8) : grad_;
  return {grad_ + a * grad_bytes_, residual + a * bytes[type_], grad_bytes_, bytes[type_]};
}

float* ResidualTile::direct(std::int64_t a) const {
  std::uint8_t* at = out_ + a * 4;
  const bool aligned = reinterpret_cast<std::uintptr_t>(at) % alignof(float) == 0;
  return type_ == kResidualF32 && aligned ? reinterpret_cast<float*>(at) : nullptr;
}

void ResidualTile::store(std::int64_t a, int n, const float* e) const {
  if (type_ == kResidualF32) {
    std::memcpy(out_ + a * 4, e, n * sizeof(float));
  } else if (type_ == kResidualBf16) {
    args_.kernels->store_bf16(e, n, out_ + a * 2);
  } else if (type_ == kResidualInt8) {
    std::uint8_t kept[kTileBlocks];
    encode_tile(*args_.kernels, kInt8, log2_block_, e, n, out_ + (a >> log2_block_) * 2,
                out_ + codes_at_ + a, nullptr, kept, {});
  }
}

void ResidualTile::keep(std::int64_t a, int n) const {
  if (in_ == out_) return;
  if (type_ == kResidualInt8) {
    const std::int64_t scale = (a >> log2_block_) * 2;
    const std::int64_t scales = ((n + (1 << log2_block_) - 1) >> log2_block_) * 2;
    std::memcpy(out_ + scale, in_ + scale, scales);
    std::memcpy(out_ + codes_at_ + a, in_ + codes_at_ + a, n);
    return;
  }
  const int bytes = type_ == kResidualBf16 ? 2 : 4;
  std::memcpy(out_ + a * bytes, in_ + a * bytes, static_cast<std::size_t>(n) * bytes);
}

void ResidualTile::clear_padding() const {
  for (int i = 0; i < 2 && type_ == kResidualInt8; ++i) {
    const std::int64_t used = sections_.used[i];
    std::memset(out_ + sections_.start(i) + used, 0, align16(used) - used);
  }
}

void ResidualTile::read(std::int64_t a, int n, float* r) const {
  if (type_ == kResidualInt8) {
    const BlockWire wire{in_ + (a >> log2_block_) * 2, in_ + codes_at_ + a};
    decode_tile(*args_.kernels, kInt8, log2_block_, &wire, 1, n, {r, false, false});
    return;
  }
  for (int i = 0; i < n; ++i) {
    r[i] = type_ == kResidualBf16 ? bf16_value(zcomm::load<std::uint16_t>(in_ + (a + i) * 2))
                                  : zcomm::load<float>(in_ + (a + i) * 4);
  }
}

}  // namespace zcomm
