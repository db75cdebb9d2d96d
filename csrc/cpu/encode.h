// encode and decode_sum of a whole layout.
#pragma once

#include <optional>
#include <string>

#include "cpu/kernels.h"
#include "cpu/layout.h"

namespace zcomm {

struct EncodeArgs {
  const Layout* layout;
  const Kernels* kernels;
  int threads;
  const std::uint8_t* grad;
  GradType grad_type;
  double prescale;                    // rounded to fp32 in the tasks, where subnormals are kept
  const std::uint64_t* residual_in;   // an address per segment; 0: no residual
  const std::uint64_t* residual_out;  // the same addresses or others
  ResidualType residual_type;
  std::uint8_t* wire;
  bool checksum;
  bool keep_idle = false;              // segments whose gradient is all zero keep their residual
  const std::uint8_t* idle = nullptr;  // those segments; set by encode()
};

void encode(const EncodeArgs& args);

struct DecodeArgs {
  const Layout* layout;
  const Kernels* kernels;
  int threads;
  const std::uint8_t* const* wires;  // each begins with the first frame
  int count;
  float* out;
  bool verify;
  bool apart = false;  // one wire, whose frames lie apart: `wires` has the address of each

  // From where the offsets of a frame of wire w count.
  const std::uint8_t* wire(int w, std::size_t frame) const {
    return apart ? wires[frame] - layout->frames[frame].start : wires[w];
  }
};

// Why a wire is refused, and where: in a frame's header or checksum, or in a segment's body.
struct Fault {
  int wire;
  std::string message;
  std::optional<std::size_t> frame;
  std::optional<std::size_t> segment;
};

std::optional<Fault> decode_sum(const DecodeArgs& args);

}  // namespace zcomm
