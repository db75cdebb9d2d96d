// Python bindings of the ring: addresses and numbers in, what was seen out.
#include "python/ring.h"

#include <pybind11/stl.h>

#include <tuple>

#include "python/kernel_calls.h"
#include "shm/coded.h"
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

Call call(bool reduce, bool gather, std::uint64_t signature, double timeout_s, int spins,
          bool brief, std::optional<std::uint32_t> begun) {
  return {reduce, gather, signature, timeout_s, spins, brief, begun};
}

// What was seen (None: all is done), the step, the chunk, their count, an exchange that has begun,
// and the seconds of each step.
using End = std::tuple<std::optional<Found>, int, std::uint32_t, std::uint32_t,
                       std::optional<std::uint32_t>, double, double, double>;

End ended(const Outcome& end) {
  return {found(end.seen), static_cast<int>(end.step),
          end.t,           end.count,
          end.begun,       end.publish_s,
          end.reduce_s,    end.collect_s};
}

End run_plain(Ring& ring, const Call& call, int isa, int codec, double prescale,
              const Strips& strips, const AddressAndType& source, const AddressAndType& target,
              const Strips& own, const AddressAndType& own_at, bool accumulate) {
  const PlainJob job{call,
                     chosen_kernels(isa),
                     static_cast<std::uint8_t>(codec),
                     static_cast<float>(prescale),
                     &strips.all,
                     place(source),
                     place(target),
                     &own.all.at(0),
                     place(own_at),
                     accumulate};
  const py::gil_scoped_release release;
  return ended(run(ring, job));
}

// Native lists, and the layouts that they point to.
struct CodedChunks {
  std::vector<CodedChunk> all;
  py::list kept;
};
struct OwnedParts {
  std::vector<OwnedPart> all;
  py::list kept;
};
struct Tables {
  std::vector<ResidualTables> all;
};

CodedChunks make_chunks(int rank, int world, const py::list& given) {
  CodedChunks made;
  made.kept = given;
  for (const py::handle& one : given) {
    const auto layouts = one.cast<std::pair<const Layout*, const Layout*>>();
    made.all.emplace_back(rank, world, *layouts.first, *layouts.second);
  }
  return made;
}

OwnedParts make_owned(const py::list& given) {
  OwnedParts made;
  made.kept = given;
  for (const py::handle& one : given) {
    const auto part = one.cast<std::pair<const Layout*, std::int64_t>>();
    made.all.push_back({part.first, part.second});
  }
  return made;
}

Tables make_tables(const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, int>>& given) {
  Tables made;
  for (const auto& [in, out, type] : given) {
    made.all.push_back({reinterpret_cast<const std::uint64_t*>(in),
                        reinterpret_cast<const std::uint64_t*>(out),
                        static_cast<ResidualType>(type)});
  }
  return made;
}

// A refused wire, and the owner whose frames were summed then.
std::optional<std::pair<Refused, std::optional<int>>> told(const std::optional<Refusal>& refusal) {
  if (!refusal) return std::nullopt;
  return {{refused(refusal->fault), refusal->summed}};
}

CodedJob make_job(const Call& call, int isa, int threads, double prescale, bool verify,
                  const CodedChunks& chunks, const OwnedParts& owned, const AddressAndType& source,
                  const AddressAndType& target, const AddressAndType& own_at, std::uintptr_t sums,
                  const OwnedParts* small, std::uintptr_t frames, const Tables* sent,
                  const Tables* summed) {
  return {call,
          chosen_kernels(isa),
          threads,
          prescale,
          verify,
          &chunks.all,
          &owned.all,
          place(source),
          place(target),
          place(own_at),
          reinterpret_cast<float*>(sums),
          small ? &small->all : nullptr,
          pointer(frames),
          sent ? &sent->all : nullptr,
          summed ? &summed->all : nullptr};
}

}  // namespace

void bind_ring(py::module_& m) {
  m.attr("CONTROL_NBYTES") = kControlBytes;
  py::class_<Strips>(m, "Strips")
      .def(py::init(
          [](const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>& given) {
            return Strips{make_strips(given)};
          }));
  py::class_<Call>(m, "Call").def(py::init(&call));
  py::class_<CodedChunks>(m, "CodedChunks").def(py::init(&make_chunks));
  py::class_<OwnedParts>(m, "OwnedParts").def(py::init(&make_owned));
  py::class_<Tables>(m, "ResidualTables").def(py::init(&make_tables));
  py::class_<CodedJob>(m, "CodedJob")
      .def(py::init(&make_job), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(),
           py::keep_alive<1, 13>(), py::keep_alive<1, 15>(), py::keep_alive<1, 16>());
  py::class_<Parcels>(m, "Parcels")
      .def(py::init<int, int, std::uintptr_t, std::int64_t>())
      .def("put",
           [](const Parcels& parcels, const CodedJob& job) {
             const py::gil_scoped_release release;
             put(parcels, job);
           })
      .def("take", [](const Parcels& parcels, const CodedJob& job) {
        std::optional<Refusal> refusal;
        {
          const py::gil_scoped_release release;
          refusal = take(parcels, job);
        }
        return told(refusal);
      });
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
      .def("run_plain", &run_plain)
      .def("run_coded", [](Ring& ring, const CodedJob& job) {
        CodedOutcome outcome;
        {
          const py::gil_scoped_release release;
          outcome = run(ring, job);
        }
        return std::pair(ended(outcome.end), told(outcome.refused));
      });
}

}  // namespace zcomm::shm
