// Python bindings of the ring: addresses and numbers in, what was seen out.
#include "python/ring.h"

#include <pybind11/stl.h>

#include <tuple>

#include "shm/plain.h"

namespace py = pybind11;

namespace zcomm::shm {
namespace {

std::uint8_t* pointer(std::uintptr_t address) { return reinterpret_cast<std::uint8_t*>(address); }

using Found = std::tuple<int, int, int, std::uint32_t, std::uint32_t, std::uint32_t>;

// None: there is nothing to wait for.
std::optional<Found> found(const Seen& seen) {
  if (seen.state == State::kReached) return std::nullopt;
  return Found{static_cast<int>(seen.state),
               seen.rank,
               static_cast<int>(seen.counter),
               seen.got,
               seen.least,
               seen.most};
}

Ring* make_ring(int rank, const std::vector<std::pair<std::uintptr_t, int>>& ranks, int slots,
                std::int64_t slot_nbytes) {
  std::vector<Peer> peers;
  for (const auto& [address, life_fd] : ranks) peers.push_back({pointer(address), life_fd});
  return new Ring(rank, std::move(peers), slots, slot_nbytes);
}

std::vector<Strip> make_strips(
    const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>& given) {
  std::vector<Strip> strips;
  for (const auto& runs : given) {
    std::vector<Run> converted;
    for (const auto& [at, n] : runs) converted.push_back({at, n});
    strips.emplace_back(std::move(converted));
  }
  return strips;
}

struct Strips {
  std::vector<Strip> all;
};

using AddressAndType = std::pair<std::uintptr_t, int>;

Place place(const AddressAndType& given) {
  return {pointer(given.first), static_cast<GradType>(given.second)};
}

std::tuple<std::optional<Found>, std::uint32_t, std::uint32_t> run_plain(
    Ring& ring, int isa, int codec, bool reduce, bool gather, std::uint64_t signature,
    double prescale, const Strips& strips, const AddressAndType& source,
    const AddressAndType& target, const Strips& own, const AddressAndType& own_at, bool accumulate,
    double timeout_s, int spins) {
  const PlainJob job{kernels_for(isa), static_cast<std::uint8_t>(codec),
                     reduce,           gather,
                     signature,        static_cast<float>(prescale),
                     &strips.all,      place(source),
                     place(target),    &own.all.at(0),
                     place(own_at),    accumulate,
                     timeout_s,        spins};
  Outcome outcome;
  {
    const py::gil_scoped_release release;
    outcome = run(ring, job);
  }
  return {found(outcome.seen), outcome.step, outcome.steps};
}

}  // namespace

void bind_ring(py::module_& m) {
  m.attr("CONTROL_NBYTES") = kControlBytes;
  py::class_<Strips>(m, "Strips")
      .def(py::init(
          [](const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>& given) {
            return Strips{make_strips(given)};
          }));
  py::class_<Ring>(m, "Ring")
      .def(py::init(&make_ring))
      .def("take", &Ring::take)
      .def("slot",
           [](const Ring& ring, int rank, std::uint32_t chunk) {
             return reinterpret_cast<std::uintptr_t>(ring.slot(rank, chunk));
           })
      .def("wait",
           [](Ring& ring, int counter, std::uint32_t chunk, double timeout_s, int spins) {
             const py::gil_scoped_release release;
             return found(ring.wait(static_cast<Counter>(counter), chunk, timeout_s, spins));
           })
      .def("wait_free",
           [](Ring& ring, double timeout_s, int spins) {
             const py::gil_scoped_release release;
             return found(ring.wait_free(ring.next(), timeout_s, spins));
           })
      .def("publish", &Ring::publish)
      .def("done", [](Ring& ring, int counter,
                      std::uint32_t chunk) { ring.done(static_cast<Counter>(counter), chunk); })
      .def("give_up", &Ring::give_up)
      .def("interrupt", &Ring::interrupt)
      .def("run_plain", &run_plain);
}

}  // namespace zcomm::shm
