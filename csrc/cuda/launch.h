// encode and decode_sum of a whole layout on a stream: launches only. No allocation, no
// synchronization.
#pragma once

#include "cuda/device_api.h"
#include "cuda/plan.h"

namespace zcomm::cuda {

// Addresses are of device memory, except `wires`, which is on the host.
struct EncodeCall {
  const Plan* plan;
  std::uintptr_t tables, scratch, grad, residual_in, residual_out, wire, stream;
  int grad_type, residual_type;
  double prescale;
  bool checksum, keep_idle;
};
struct DecodeCall {
  const Plan* plan;
  std::uintptr_t tables, scratch, out, more_wires, fault, stream;
  std::vector<std::uintptr_t> wires;
  bool verify;
};

// Throw std::runtime_error if the device refuses a launch.
void encode(const Device& device, const EncodeCall& call);
void decode_sum(const Device& device, const DecodeCall& call);

}  // namespace zcomm::cuda
