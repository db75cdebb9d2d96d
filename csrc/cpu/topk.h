// topk: exactly the k largest magnitudes of each segment, in two passes over memory.
#pragma once

#include <atomic>

#include "cpu/encode.h"

namespace zcomm {

// Encodes all topk segments of the layout; adds their bodies to the frames' sums.
void encode_topk(const EncodeArgs& args, std::atomic<std::uint64_t>* sums);

// Decodes one range of one segment; says what is wrong if a wire is malformed.
struct TopkFault {
  int wire;
  const char* expected;
  std::uint64_t got;
};
std::optional<TopkFault> decode_topk(const DecodeArgs& args, const Task& task);

// The words of a segment's body that task `i` of `count` sums.
ByteRange topk_slice(const Segment& segment, std::int64_t i, std::int64_t count);

}  // namespace zcomm
