#include "cuda/launch.h"

namespace zcomm::cuda {
namespace {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

EncodeArgs encode_args(const EncodeCall& call) {
  const EncodeScratch at = call.plan->encode_scratch();
  EncodeArgs args{};
  args.grad = pointer<const std::uint8_t>(call.grad);
  args.prescale = call.prescale;
  args.residual_in = pointer<const std::uint64_t>(call.residual_in);
  args.residual_out = pointer<const std::uint64_t>(call.residual_out);
  args.wire = pointer<std::uint8_t>(call.wire);
  args.sums = pointer<std::uint64_t>(call.scratch + at.sums);
  args.done = pointer<std::uint32_t>(call.scratch + at.done);
  args.topk = pointer<TopkSegment>(call.scratch + at.topk);
  args.strips = pointer<TopkStrip>(call.scratch + at.strips);
  if (call.keep_idle && call.residual_type != kResidualNone && call.plan->segments > 0) {
    args.idle = pointer<std::uint8_t>(call.scratch + at.idle);
  }
  args.grad_type = call.grad_type;
  args.residual_type = call.residual_type;
  args.checksum = call.checksum;
  return args;
}

}  // namespace

void encode(const Device& device, const EncodeCall& call) {
  EncodeArgs args = encode_args(call);
  const auto run = [&](Kernel kernel, const Group& group, unsigned ctas) {
    args.tables = call.plan->tables_at(call.tables, group);
    device.launch(kernel, ctas, kThreads, 0, call.stream, &args);
  };
  const Group& topk = call.plan->topk;
  if (args.idle) run(Kernel::zc_find_idle, topk, call.plan->segments);
  for (const Group& group : call.plan->groups) run(group.encode, group, group.tiles);
  if (topk.tiles == 0) return;
  for (const Kernel kernel : kTopkEncode) run(kernel, topk, topk.tiles);
}

void decode_sum(const Device& device, const DecodeCall& call) {
  const int count = static_cast<int>(call.wires.size());
  const DecodeScratch at = call.plan->decode_scratch(count);
  DecodeArgs args{};
  for (int w = 0; w < count && count <= kInlineWires; ++w) {
    args.wires[w] = pointer<const std::uint8_t>(call.wires[w]);
  }
  if (count > kInlineWires) args.more_wires = pointer<const std::uint8_t* const>(call.more_wires);
  args.count = count;
  args.frames = static_cast<std::int32_t>(call.plan->frames);
  args.out = pointer<float>(call.out);
  args.sums = pointer<std::uint64_t>(call.scratch + at.sums);
  args.done = pointer<std::uint32_t>(call.scratch + at.done);
  args.fault = pointer<std::uint64_t>(call.fault);
  args.verify = call.verify;
  const auto run = [&](const Group& group) {
    args.tables = call.plan->tables_at(call.tables, group);
    device.launch(group.decode, group.tiles, kThreads, count * sizeof(std::uint64_t), call.stream,
                  &args);
  };
  for (const Group& group : call.plan->groups) run(group);
  if (call.plan->topk.tiles > 0) run(call.plan->topk);
}

}  // namespace zcomm::cuda
