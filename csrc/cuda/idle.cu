// Finds idle segments: their gradient is all zero, they send zeros and keep their residual.
#include "cuda/residual.h"

namespace zcomm::cuda {

ZC_FN void copy_bytes(const std::uint8_t* from, std::uint8_t* to, std::int64_t nbytes) {
  for (std::int64_t i = threadIdx.x; i < nbytes; i += kThreads) to[i] = from[i];
}

// Pads the sections of int8 storage to multiples of 16 with 0, as an encode does.
ZC_FN void copy_residual(const EncodeArgs& args, const DeviceSegment& segment,
                         std::uint32_t index) {
  const auto* in = reinterpret_cast<const std::uint8_t*>(args.residual_in[index]);
  auto* out = reinterpret_cast<std::uint8_t*>(args.residual_out[index]);
  if (in == out) return;
  if (args.residual_type != kResidualInt8) {
    return copy_bytes(in, out, segment.n * (args.residual_type == kResidualF32 ? 4 : 2));
  }
  for (int i = 0; i < 2; ++i) {
    const std::int64_t start = i * segment.residual_codes, used = segment.residual_used[i];
    copy_bytes(in + start, out + start, used);
    const std::int64_t at = used + threadIdx.x;
    if (at < align16(used)) out[start + at] = 0;
  }
}

// The usual answer comes from the first few elements; only a segment of zeros is read to its end.
ZC_FN bool all_zero(const EncodeArgs& args, const DeviceSegment& segment) {
  __shared__ std::uint32_t found;
  const int bytes = args.grad_type == kGradF32 ? 4 : 2;
  const std::uint8_t* grad = args.grad + segment.offset * bytes;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (std::int64_t a = 0; a < segment.n; a += 4 * kThreads) {
    const std::int64_t first = a + 4 * threadIdx.x, left = segment.n - first;
    float x[4];
    read_floats(grad, args.grad_type, first,
                left < 0   ? 0
                : left > 4 ? 4
                           : static_cast<int>(left),
                x);
    std::uint32_t any = 0;
    ZC_UNROLL for (int j = 0; j < 4; ++j) any |= bits(x[j]) & kAbsMask;
    if (any) atomicOr(&found, 1u);
    __syncthreads();
    if (found) return false;
    __syncthreads();
  }
  return true;
}

}  // namespace zcomm::cuda

// One CTA for each segment of the layout.
ZC_KERNEL(zc_find_idle, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  using namespace zcomm::cuda;
  const std::uint32_t index = blockIdx.x;
  const DeviceSegment& segment = args.tables.segments[index];
  const bool idle = args.residual_in[index] && segment.n > 0 && all_zero(args, segment);
  if (threadIdx.x == 0) args.idle[index] = idle;
  if (idle) copy_residual(args, segment, index);
}
