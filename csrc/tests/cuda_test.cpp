// The source of the CUDA kernels, on the emulator, against the CPU's scalar kernels: the same
// wires, residuals and sums, whatever the order of threads; the same verdict on malformed wires,
// and the same wire named; scratch memory zero again; nothing touched outside of exact buffers (the
// address sanitizer looks).
//
// `cuda_test [CASES [FIRST]]`: a case depends on its number alone.
#include "tests/cuda_wires.h"

namespace zcomm::test {
namespace {

std::string where;  // the case, for messages

constexpr int kFaultKinds = cuda::kFaultTopkEntries + 1;

struct Counts {
  long encodes = 0, sums = 0, accepted = 0, refused = 0;
  long faults[kFaultKinds] = {};
};
Counts counts;

// ---- Encoding ----

Encoded encode_on(const Device& device, const Encoding& encoding) {
  ++counts.encodes;
  return encode_by(encoding, [&](const Bytes& from, const Bytes& to, const Bytes& wire) {
    CHECK(device.encode(encoding.call, encoding.grad, from, to, wire), where);
  });
}

// Twice on the device, in different orders of threads.
Encoded compare_encoders(Random& random, const Device& device, const Encoding& encoding) {
  const Encoding untouched = encoding;
  std::optional<Encoded> expected;
  {
    const GapGuard guard(device.layout(), encoding.grad, grad_width(encoding.call.grad_type));
    expected = encode_on_cpu(encoding);
    for (int turn = 0; turn < 2; ++turn) {
      set_schedule(random);
      const Encoded got = encode_on(device, encoding);
      CHECK(got.wire == expected->wire, where);
      CHECK(got.residuals == expected->residuals, where);
    }
  }
  CHECK(encoding.grad == untouched.grad && encoding.before == untouched.before, where);
  return std::move(*expected);
}

// One or two steps of feedback; their wires.
std::vector<Bytes> check_encoders(Random& random, const Device& device) {
  const Call call = random_call(random, device.layout());
  where += " grad " + std::to_string(call.grad_type) + " residual " +
           std::to_string(call.residual_type) + (call.keep_idle ? " idle" : "");
  Encoding encoding{call, random_feedback(random, call), random_grad(random, call),
                    random_residuals(random, call)};
  std::vector<Bytes> wires;
  for (std::int64_t steps = 1 + random.below(2); steps > 0; --steps) {
    Encoded after = compare_encoders(random, device, encoding);
    wires.push_back(std::move(after.wire));
    encoding.before = std::move(after.residuals);
    encoding.grad = random_grad(random, call);
  }
  return wires;
}

// ---- Decoding ----

std::vector<const std::uint8_t*> pointers(const std::vector<Bytes>& wires) {
  std::vector<const std::uint8_t*> found;
  for (const Bytes& wire : wires) found.push_back(wire.data());
  return found;
}

// What is wrong is named: a wire, and a frame or segment that the layout has.
void check_fault(const Layout& layout, std::uint64_t fault, const Fault& expected) {
  const std::uint64_t wire = fault >> 48 & 0x3fff, index = fault >> 24 & 0xffffff;
  const std::uint64_t kind = fault >> 16 & 0xff;
  const std::string seen = where + ": kind " + std::to_string(kind) + ", " + expected.message;
  CHECK(wire == static_cast<std::uint64_t>(expected.wire), seen);
  CHECK(index < (kind < 2 ? layout.frames.size() : layout.segments.size()), seen);
  if (CHECK(kind < kFaultKinds, seen)) ++counts.faults[kind];
}

// True if the wires are accepted.
bool compare_decoders(Random& random, const Device& device, const std::vector<Bytes>& wires,
                      bool verify) {
  const Layout& layout = device.layout();
  const auto at = pointers(wires);
  const Bytes expected = make_output(layout);
  const auto refused = decode(layout, kIsaScalar, 1, at, expected, verify);
  const Bytes out(expected.size(), random_shift(random, sizeof(float)));
  Device::Decoded got;
  {
    const GapGuard guard(layout, out, sizeof(float));
    set_schedule(random);
    got = device.decode(at, out, verify);
  }
  CHECK(got.clean, where);
  CHECK((got.fault != kNoFault) == refused.has_value(),
        where + ": " + (refused ? refused->message : "accepted"));
  if (refused && got.fault != kNoFault) check_fault(layout, got.fault, *refused);
  if (!refused) CHECK(out == expected, where);
  return !refused;
}

void check_sum(Random& random, const Device& device, const std::vector<Bytes>& wires, bool verify) {
  const std::vector<Bytes> untouched = wires;
  for (int turn = 0; turn < 2; ++turn) {
    ++counts.sums;
    CHECK(compare_decoders(random, device, wires, verify), where);
  }
  CHECK(wires == untouched, where);
}

void check_malformed(Random& random, const Device& device, const std::vector<Bytes>& valid) {
  const Layout& layout = device.layout();
  // A checksum that does not fit hides all else.
  constexpr Seal seals[] = {Seal::kLeft, Seal::kRecomputed, Seal::kRecomputed, Seal::kDropped};
  const Seal seal = seals[random.below(4)];
  const bool verify = seal == Seal::kLeft || (seal == Seal::kRecomputed && random.below(4) > 0);
  const auto any_valid = [&]() -> const Bytes& {
    return valid[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(valid.size())))];
  };
  std::vector<Bytes> wires;
  for (std::int64_t count = random.below(3) ? 1 : 2 + random.below(3); count > 0; --count) {
    wires.push_back(any_valid());
    const bool changed = wires.size() == 1 || random.below(2);
    for (std::int64_t changes = changed ? 1 + random.below(3) : 0; changes > 0; --changes) {
      change_wire(random, layout, any_valid(), wires.back().data());
    }
    seal_wire(layout, seal, wires.back().data());
  }
  ++(compare_decoders(random, device, wires, verify) ? counts.accepted : counts.refused);
}

// ---- Cases ----

std::string describe(const Layout& layout) {
  std::string text;
  for (const Segment& s : layout.segments) {
    text += " " + std::to_string(s.codec) + ":" + std::to_string(s.n);
    if (s.log2_block) text += "/" + std::to_string(1 << s.log2_block);
  }
  return text;
}

void check_case(std::uint64_t number) {
  Random random(number);
  const Layout layout = random_layout(random);
  where = "case " + std::to_string(number) + describe(layout);
  const Device device(layout);
  std::vector<Bytes> wires = check_encoders(random, device);
  const bool sealed = load<std::uint8_t>(wires[0].data() + 7) & kHasChecksum;
  for (std::int64_t more = random.below(4); more > 0; --more) {
    wires.push_back(wire_of(layout, random_kind(random), random.next()));
  }
  check_sum(random, device, wires, sealed && random.below(4) > 0);
  const bool large = span(layout) > cuda::kTileElements;
  for (std::int64_t turn = 0; turn < (large ? 2 : 8); ++turn) {
    check_malformed(random, device, wires);
  }
}

// More wires than fit into a kernel's arguments, and than topk looks at together.
void check_many_wires() {
  Random random(1);
  std::vector<Part> parts;
  for (int codec = kNone; codec < kCodecs; ++codec) parts.push_back(part(codec, 5, 45 + codec));
  parts.push_back(part(kTopk, 0, 2500, 300));
  const Layout layout = make_layout(parts);
  const Device device(layout);
  where = "70 wires";
  std::vector<Bytes> wires;
  while (wires.size() < 70) wires.push_back(wire_of(layout, kGaussian, random.next()));
  check_sum(random, device, wires, true);
  for (std::size_t w : {0, 63, 64, 69}) {
    std::vector<Bytes> some = wires;
    some[w].data()[100] ^= 1;
    CHECK(!compare_decoders(random, device, some, true), where);
  }
}

// topk's counts of three ranges, hostile and well-formed ones, under a checksum that fits.
void check_topk_counts() {
  Random random(2);
  const std::uint32_t k = 1312, flag = kTopkNotFinite;
  const Layout layout = make_layout({part(kTopk, 0, 2 * kTopkRange + 77, k)});
  const Device device(layout);
  const Bytes grad = make_grad(span(layout), kGradF32, kGaussian, 3, 0);
  std::memset(grad.data() + 4 * kTopkRange, 0, grad.size() - 4 * kTopkRange);
  const Bytes originals[] = {wire_of(layout, kGaussian, 1), wire_of(layout, kWithNan, 2),
                             encode_on_cpu({Call{layout}, {}, grad, {}}).wire};  // {k, 0, 0}
  const std::uint32_t hostile[][3] = {
      {0, 0, 0},
      {k, 0, 0},
      {0, k, 0},
      {k - 77, 0, 77},
      {k - 78, 0, 78},
      {65536, 0, 0},
      {65537, 0, 0},
      {65536, 65536, 77},
      {flag, flag, flag},
      {flag, 0, k},
      {flag, flag, 0},
      {0, 0, flag},
      {k, 65537, 0},
      {k, 0, 78},
      {k, k, 77},
      {flag - 1, 1, k},
      {1u << 31, 1u << 31, k},
      {k, 1u << 31, 1u << 31},
  };
  for (const auto& ranges : hostile) {
    where = "topk counts " + std::to_string(ranges[0]) + " " + std::to_string(ranges[1]) + " " +
            std::to_string(ranges[2]);
    for (const Bytes& original : originals) {
      std::vector<Bytes> wires = {originals[0], original};
      std::memcpy(wires[1].data() + layout.segments[0].section(0), ranges, sizeof ranges);
      seal_wire(layout, Seal::kRecomputed, wires[1].data());
      ++(compare_decoders(random, device, wires, true) ? counts.accepted : counts.refused);
    }
  }
}

void run(std::uint64_t first, std::uint64_t cases) {
  for (std::uint64_t number = first; number < first + cases; ++number) {
    try {
      check_case(number);
    } catch (const emu::Error& error) {
      CHECK(false, where + ": " + error.what());
    }
  }
}

void print_counts(std::uint64_t cases) {
  std::printf(
      "%llu layouts: %ld encodes, %ld sums, malformed wires %ld times refused, %ld accepted\n",
      static_cast<unsigned long long>(cases), counts.encodes, counts.sums, counts.refused,
      counts.accepted);
  std::printf("faults by kind:");
  for (long count : counts.faults) std::printf(" %ld", count);
  std::printf("\n");
}

// A run of some length must have seen them all, or its wires are not what they should be.
void check_fault_kinds() {
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    CHECK(counts.faults[kind] > 0, "fault kind " + std::to_string(kind));
  }
}

}  // namespace
}  // namespace zcomm::test

int main(int argc, char** argv) {
  using namespace zcomm::test;
  const std::uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 100;
  check_many_wires();
  check_topk_counts();
  run(argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1, cases);
  print_counts(cases);
  if (cases >= 1000) check_fault_kinds();
  return tally.finish();
}
