// Hostile wires: a corpus of valid ones, mutated at random. `fuzz CASES [SEED]`.
//
// Every case is decoded by every instruction set. Each must accept exactly what the rules of
// docs/wire-format.md accept (they are written down once more here, plainly), name a wire that is
// malformed, and give the same message and the same sum as the others.
#include <algorithm>

#include "tests/harness.h"

namespace zcomm::test {
namespace {

using Wire = std::vector<std::uint8_t>;

struct Item {
  Layout layout;
  std::vector<Wire> wires;  // of different gradients
};

// ---- The rules ----

bool all_zero(const std::uint8_t* p, std::int64_t nbytes) {
  return std::all_of(p, p + nbytes, [](std::uint8_t b) { return b == 0; });
}

std::uint64_t checksum_of(const std::uint8_t* frame, std::int64_t nbytes) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < nbytes / 8; ++i) {
    if (i != 3) sum += load<std::uint64_t>(frame + 8 * i) * static_cast<std::uint64_t>(2 * i + 1);
  }
  return sum;
}

bool header_is_valid(const Frame& frame, const std::uint8_t* at, bool verify) {
  const auto flags = at[7];
  const auto checksum = load<std::uint64_t>(at + 24);
  if (std::memcmp(at, "ZCOM", 4) || load<std::uint16_t>(at + 4) != 1 || at[6] != frame.codec ||
      flags > 1 || load<std::uint64_t>(at + 8) != static_cast<std::uint64_t>(frame.elements) ||
      load<std::uint32_t>(at + 16) != static_cast<std::uint32_t>(frame.nbytes / 16) ||
      load<std::uint32_t>(at + 20) != frame.hash) {
    return false;
  }
  if (verify) return flags == 1 && checksum == checksum_of(at, frame.nbytes);
  return flags == 1 || checksum == 0;
}

bool code_occurs(std::uint8_t codec, unsigned code) {
  if (codec == kInt8) return code != 0x80;
  if (codec == kInt4) return code != 0x8;
  if (codec == kFp8) return code != 0x7f && code != 0xff;
  return true;
}

bool block_is_valid(std::uint8_t codec, std::uint16_t scale, const std::uint8_t* codes, int count) {
  const int width = code_width(codec), nbytes = (count * width + 7) / 8;
  const bool normal = scale >= 0x0080 && scale <= 0x7f7f;
  if (!normal && scale != 0 && scale != 0x7fc0) return false;
  if (!normal && !all_zero(codes, nbytes)) return false;
  for (int i = 0; i < count; ++i) {
    if (!code_occurs(codec, get_code(codes, width, i))) return false;
  }
  const int unused = nbytes * 8 - count * width;
  return unused == 0 || codes[nbytes - 1] >> (8 - unused) == 0;
}

bool blocks_are_valid(const Segment& s, const std::uint8_t* wire) {
  const std::int64_t b = std::int64_t{1} << s.log2_block;
  const std::uint8_t *scales = wire + s.section(0), *codes = wire + s.section(1);
  for (std::int64_t at = 0; at < s.n; at += b) {
    const int m = static_cast<int>(std::min(b, s.n - at));
    const auto scale = load<std::uint16_t>(scales + at / b * 2);
    if (!block_is_valid(s.codec, scale, codes + at * code_width(s.codec) / 8,
                        codes_in_block(s.codec, m))) {
      return false;
    }
  }
  return true;
}

bool topk_is_valid(const Segment& s, const std::uint8_t* wire) {
  const std::uint8_t *counts = wire + s.section(0), *offsets = wire + s.section(1),
                     *values = wire + s.section(2);
  const std::int64_t ranges = (s.n + 65535) / 65536;
  if (ranges > 0 && load<std::uint32_t>(counts) == 0xffffffffu) {
    for (std::int64_t r = 0; r < ranges; ++r) {
      if (load<std::uint32_t>(counts + 4 * r) != 0xffffffffu) return false;
    }
    return all_zero(offsets, 2 * s.k) && all_zero(values, 2 * s.k);
  }
  std::int64_t entry = 0;
  for (std::int64_t r = 0; r < ranges; ++r) {
    const std::int64_t count = load<std::uint32_t>(counts + 4 * r);
    const std::int64_t width = std::min<std::int64_t>(65536, s.n - r * 65536);
    if (count > width || entry + count > s.k) return false;
    for (std::int64_t i = entry, last = -1; i < entry + count; ++i) {
      const std::int64_t offset = load<std::uint16_t>(offsets + 2 * i);
      if (offset <= last || offset >= width) return false;
      const auto value = load<std::uint16_t>(values + 2 * i);
      if ((value & 0x7fff) >= 0x7f80 || value == 0x8000) return false;
      last = offset;
    }
    entry += count;
  }
  return entry == s.k;
}

bool segment_is_valid(const Segment& s, const std::uint8_t* wire) {
  for (int i = 0; i < 3; ++i) {
    const std::int64_t used = s.sections.used[i];
    if (!all_zero(wire + s.section(i) + used, align16(used) - used)) return false;
  }
  if (has_blocks(s.codec)) return blocks_are_valid(s, wire);
  return s.codec != kTopk || topk_is_valid(s, wire);
}

bool wire_is_valid(const Layout& layout, const std::uint8_t* wire, bool verify) {
  return std::all_of(layout.frames.begin(), layout.frames.end(),
                     [&](const Frame& f) { return header_is_valid(f, wire + f.start, verify); }) &&
         std::all_of(layout.segments.begin(), layout.segments.end(),
                     [&](const Segment& s) { return segment_is_valid(s, wire); });
}

// ---- The corpus ----

Wire encode_wire(const Layout& layout, int kind, std::uint64_t seed, bool checksum) {
  const Bytes grad = make_grad(span(layout), kGradF32, kind, seed, 0);
  Wire wire(static_cast<std::size_t>(wire_nbytes(layout)));
  encode({&layout, kernels(kIsaScalar), 1, grad.data(), kGradF32, 1.0, nullptr, nullptr,
          kResidualNone, wire.data(), checksum});
  return wire;
}

void add_item(std::vector<Item>& corpus, const std::vector<Part>& parts, int frames = 1) {
  Item item{make_layout(parts, frames), {}};
  for (int kind : {int{kGaussian}, int{kZeros}, int{kWithNan}, int{kHuge}, int{kKinds}}) {
    item.wires.push_back(
        encode_wire(item.layout, kind, corpus.size() * 7 + item.wires.size(), true));
  }
  corpus.push_back(std::move(item));
}

std::vector<Item> small_corpus() {
  std::vector<Item> corpus;
  for (int codec = kNone; codec < kCodecs; ++codec) {
    for (std::int64_t n : {1, 3, 31, 64, 129, 333}) add_item(corpus, {part(codec, 5, n)});
    for (int log2_block : {6, 7, 8, 10}) add_item(corpus, {part(codec, log2_block, 1100)});
  }
  std::vector<Part> mixed, frames;
  for (int codec = kNone; codec < kCodecs; ++codec) {
    mixed.push_back(part(codec, 5 + codec % 3, 20 * codec + 1));
    frames.push_back(part(codec, 5, 45));
    frames.back().frame = (codec - 1) / 4;
  }
  add_item(corpus, mixed);
  add_item(corpus, {part(kInt4, 5, 0), part(kTopk, 0, 0), part(kInt8, 5, 5)});
  add_item(corpus, frames, 3);
  add_item(corpus, {}, 2);
  return corpus;
}

// Several tasks, several topk ranges.
std::vector<Item> large_corpus() {
  std::vector<Item> corpus;
  for (int codec : {int{kInt8}, int{kLm3}, int{kSign}, int{kTopk}}) {
    add_item(corpus, {part(codec, 7, 140001, 300)});
  }
  return corpus;
}

// ---- Mutations ----

constexpr std::uint8_t kBytes[] = {0x00, 0x01, 0x7f, 0x80, 0x88, 0xff};
constexpr std::uint16_t kHalves[] = {0x0000, 0x0001, 0x007f, 0x0080, 0x7180, 0x7181,
                                     0x7b12, 0x7c01, 0x7e12, 0x7f7f, 0x7f80, 0x7fc0,
                                     0x7fc1, 0x8000, 0x8080, 0xff7f, 0xffff};
constexpr std::uint32_t kWords[] = {0,          1,          0xffff,     0x10000,   0x10001,
                                    0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};

template <class T, std::size_t N>
T pick(Random& random, const T (&from)[N]) {
  return from[random.below(N)];
}

void mutate_header(Random& random, const Frame& frame, std::uint8_t* wire) {
  struct Field {
    int at, nbytes;
  };
  constexpr Field fields[] = {{0, 4}, {4, 2}, {6, 1}, {7, 1}, {8, 8}, {16, 4}, {20, 4}, {24, 8}};
  const Field field = pick(random, fields);
  const std::uint64_t values[] = {0,
                                  1,
                                  2,
                                  255,
                                  random.next(),
                                  ~std::uint64_t{0},
                                  load<std::uint32_t>(wire + frame.start + field.at) + 1u};
  const std::uint64_t value = pick(random, values);
  std::memcpy(wire + frame.start + field.at, &value, static_cast<std::size_t>(field.nbytes));
}

// One change. The scales and counts come first in a body and are few, so they are aimed at.
void mutate(Random& random, const Item& item, const Wire& other, std::uint8_t* wire,
            std::int64_t nbytes) {
  const auto& segments = item.layout.segments;
  const bool aim = !segments.empty() && random.below(2);
  std::int64_t first = 0, width = nbytes;
  if (aim) {
    const Segment& s = segments[random.below(static_cast<std::int64_t>(segments.size()))];
    const int section = static_cast<int>(random.below(3));
    first = s.section(section);
    width = align16(s.sections.used[section]);
    if (width == 0) return;
  }
  const std::int64_t at = first + random.below(width), even = at & ~std::int64_t{1};
  const std::int64_t word = at & ~std::int64_t{3};
  switch (random.below(10)) {
    case 0:
    case 1:
      wire[at] ^= static_cast<std::uint8_t>(1 << random.below(8));
      break;
    case 2:
      wire[at] = static_cast<std::uint8_t>(random.next());
      break;
    case 3:
      wire[at] = pick(random, kBytes);
      break;
    case 4:
    case 5:
      store(wire + even, pick(random, kHalves));
      break;
    case 6:
      store(wire + word, pick(random, kWords));
      break;
    case 7:
      mutate_header(
          random,
          item.layout.frames[random.below(static_cast<std::int64_t>(item.layout.frames.size()))],
          wire);
      break;
    case 8: {  // a piece of another wire, or of this one's own layout
      const auto room = std::min(nbytes - at, static_cast<std::int64_t>(other.size()));
      const std::int64_t length = 1 + random.below(std::min<std::int64_t>(room, 200));
      const std::int64_t from =
          static_cast<std::int64_t>(other.size()) > at + length && random.below(2)
              ? at
              : random.below(static_cast<std::int64_t>(other.size()) - length + 1);
      std::memcpy(wire + at, other.data() + from, static_cast<std::size_t>(length));
      break;
    }
    default: {  // two neighbours change places
      if (even + 4 > nbytes) break;
      const auto a = load<std::uint16_t>(wire + even);
      store(wire + even, load<std::uint16_t>(wire + even + 2));
      store(wire + even + 2, a);
    }
  }
}

void fix_checksums(const Layout& layout, std::uint8_t* wire) {
  for (const Frame& f : layout.frames) {
    store(wire + f.start + 24, checksum_of(wire + f.start, f.nbytes));
  }
}

void drop_checksums(const Layout& layout, std::uint8_t* wire) {
  for (const Frame& f : layout.frames) {
    wire[f.start + 7] = 0;
    store(wire + f.start + 24, std::uint64_t{0});
  }
}

// ---- One case ----

struct Counts {
  long accepted = 0, refused = 0, unchanged = 0, undetected = 0;
};

enum Seal { kLeft, kRecomputed, kDropped, kSeals };  // what happens to the checksum

std::string describe(const Item& item, long number, int isa, int seal) {
  const auto& s = item.layout.segments;
  return "case " + std::to_string(number) + " " + kIsaNames[isa] + " seal " + std::to_string(seal) +
         (s.empty() ? "" : " codec " + std::to_string(s[0].codec) + " n " + std::to_string(s[0].n));
}

// Decodes on all instruction sets; true if accepted.
bool decode_alike(const Item& item, const std::vector<const std::uint8_t*>& wires,
                  const std::vector<bool>& valid, bool verify, int threads, long number, int seal) {
  const bool expected = std::find(valid.begin(), valid.end(), false) == valid.end();
  std::optional<Fault> first;
  std::optional<Bytes> sum;
  for (int isa : isas()) {
    const std::string where = describe(item, number, isa, seal);
    Bytes out = make_output(item.layout);
    const std::optional<Fault> fault = decode(item.layout, isa, threads, wires, out, verify);
    CHECK(!fault == expected, where + (fault ? ": " + fault->message : ": accepted"));
    if (fault) {
      CHECK(!valid[fault->wire], where + ": names wire " + std::to_string(fault->wire));
      if (!first) first = fault;
      CHECK(first->wire == fault->wire && first->message == fault->message, where);
      CHECK(first->frame == fault->frame && first->segment == fault->segment, where);
      CHECK(fault->frame.has_value() != fault->segment.has_value(), where);
    } else if (!sum) {
      sum.emplace(std::move(out));
    } else {
      CHECK(out == *sum, where);
    }
  }
  return expected;
}

void run_case(Random& random, const Item& item, const Item& stranger, long number, Counts& counts) {
  const int seal = static_cast<int>(random.below(kSeals));
  const bool verify = seal == kLeft || (seal == kRecomputed && random.below(4) > 0);
  const int count = random.below(3) ? 1 : static_cast<int>(2 + random.below(4));
  const std::int64_t nbytes = wire_nbytes(item.layout);
  std::vector<Bytes> copies;
  std::vector<const std::uint8_t*> wires;
  std::vector<bool> valid;
  bool changed = false;
  for (int w = 0; w < count; ++w) {
    const Wire& original = item.wires[random.below(static_cast<std::int64_t>(item.wires.size()))];
    copies.emplace_back(static_cast<std::size_t>(nbytes),
                        static_cast<std::size_t>(random.below(8)));
    std::uint8_t* wire = copies.back().data();
    std::memcpy(wire, original.data(), original.size());
    const std::int64_t changes = w == 0 || random.below(2) ? 1 + random.below(4) : 0;
    for (std::int64_t i = 0; i < changes; ++i) {
      const Item& from = random.below(4) ? item : stranger;
      mutate(random, item, from.wires[random.below(static_cast<std::int64_t>(from.wires.size()))],
             wire, nbytes);
    }
    changed |= std::memcmp(wire, original.data(), original.size()) != 0;
    if (seal == kRecomputed) fix_checksums(item.layout, wire);
    if (seal == kDropped) drop_checksums(item.layout, wire);
    wires.push_back(wire);
    valid.push_back(wire_is_valid(item.layout, wire, verify));
  }
  const int threads = static_cast<int>(1 + random.below(2));
  const bool accepted = decode_alike(item, wires, valid, verify, threads, number, seal);
  ++(accepted ? counts.accepted : counts.refused);
  counts.unchanged += !changed;
  counts.undetected += changed && accepted && seal == kLeft;
}

// Every bit of a few wires: none may go unnoticed.
void flip_every_bit(const Item& item, Counts& counts) {
  const Wire& wire = item.wires[0];
  Bytes copy(wire.size());
  std::memcpy(copy.data(), wire.data(), wire.size());
  for (std::size_t bit = 0; bit < wire.size() * 8; ++bit) {
    copy.data()[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    for (int isa : isas()) {
      const Bytes out = make_output(item.layout);
      CHECK(decode(item.layout, isa, 1, {copy.data()}, out).has_value(),
            "bit " + std::to_string(bit));
    }
    copy.data()[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    ++counts.refused;
  }
}

}  // namespace
}  // namespace zcomm::test

int main(int argc, char** argv) {
  using namespace zcomm::test;
  const long cases = argc > 1 ? std::atol(argv[1]) : 10000;
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1);
  const std::vector<Item> small = small_corpus(), large = large_corpus();
  Counts flips, counts;
  print_isas();
  for (std::size_t i = 0; i < small.size(); i += 10) flip_every_bit(small[i], flips);
  for (long i = 0; i < cases; ++i) {
    const bool big = random.below(1000) == 0;
    const std::vector<Item>& corpus = big ? large : small;
    const Item& item = corpus[random.below(static_cast<std::int64_t>(corpus.size()))];
    const Item& stranger = small[random.below(static_cast<std::int64_t>(small.size()))];
    run_case(random, item, stranger, i, counts);
  }
  std::printf(
      "%ld single flipped bits, all refused; %ld cases: %ld refused, %ld accepted "
      "(%ld of them not changed by their mutations, %ld with a checksum that fits all the same)\n",
      flips.refused, cases, counts.refused, counts.accepted, counts.unchanged, counts.undetected);
  return tally.finish();
}
