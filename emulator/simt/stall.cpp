// What is wrong when no thread of a CTA can go on, or one asks for the impossible.
#include <cstdio>

#include "simt/cta.h"

namespace emu {
namespace {

const char* name_of(Meeting how) {
  switch (how) {
    case Meeting::kExchange:
      return "a shuffle";
    case Meeting::kBallot:
      return "a vote";
    default:
      return "a reduction";
  }
}

std::string hex(std::uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

}  // namespace

std::string Cta::name_of(const Warp& warp, unsigned lane) const {
  const auto number = static_cast<unsigned>(&warp - warps_.data());
  return "CTA " + std::to_string(number_) + ", warp " + std::to_string(number) + ", lane " +
         std::to_string(lane);
}

std::string Cta::state_of(const Warp& warp, unsigned lane) const {
  const auto thread = static_cast<std::size_t>(&warp - warps_.data()) * kLanes + lane;
  if (thread >= threads_.size()) return "does not exist";
  if (warp.exited >> lane & 1) return "has exited";
  if (warp.at_barrier >> lane & 1) return "waits at the barrier";
  return std::string("waits in ") + emu::name_of(warp.kind[lane]) + " of the lanes " +
         hex(warp.mask[lane]);
}

std::string Cta::explain_meeting(const Warp& warp, unsigned lane) const {
  const std::uint32_t mask = warp.mask[lane];
  unsigned other = 0;
  for (; other < kLanes; ++other) {
    const bool came = (warp.meeting >> other & 1) && warp.mask[other] == mask &&
                      warp.kind[other] == warp.kind[lane];
    if ((mask >> other & 1) && !came) break;
  }
  return name_of(warp, lane) + " " + state_of(warp, lane) + ", but lane " + std::to_string(other) +
         " " + state_of(warp, other) +
         ": all lanes of a mask must come, to the same operation with the same mask";
}

std::string Cta::explain_barrier() const {
  std::string waiting, missing;
  for (const Warp& warp : warps_) {
    for (unsigned l = 0; l < kLanes; ++l) {
      const auto thread = static_cast<std::size_t>(&warp - warps_.data()) * kLanes + l;
      if (thread >= threads_.size()) break;
      std::string& first = warp.at_barrier >> l & 1 ? waiting : missing;
      if (first.empty()) first = name_of(warp, l) + " " + state_of(warp, l);
    }
  }
  return waiting + ", but " + missing + ": expected all " + std::to_string(threads_.size()) +
         " threads of the CTA there, got " + std::to_string(at_barrier_);
}

std::string Cta::explain_stall() const {
  for (const Warp& warp : warps_) {
    if (warp.meeting) {
      return explain_meeting(warp, static_cast<unsigned>(__builtin_ctz(warp.meeting)));
    }
  }
  return explain_barrier();
}

void Cta::refuse_source(std::uint32_t mask, unsigned source) const {
  throw Error(name_of(warps_[current_ / kLanes], lane()) +
              " asks in a shuffle for the value of lane " + std::to_string(source) +
              ": expected one of the lanes " + hex(mask));
}

void Cta::refuse_mask(Meeting how, std::uint32_t mask) const {
  throw Error(name_of(warps_[current_ / kLanes], lane()) + " comes to " + emu::name_of(how) +
              " of the lanes " + hex(mask) + ": expected a mask with the lane itself in it");
}

}  // namespace emu
