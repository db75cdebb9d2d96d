// Collectives of encoded chunks among the ranks of a host.
//
// Every rank encodes a chunk into its own slot, one frame for each rank, its own frame last; its
// peers decode their frames where they lie, so each byte crosses memory once:
//
//   publish   the tensor                       -> its slot: a frame for each owner
//   reduce    its frame of every slot          -> the sum of what it owns, encoded once more over
//                                                 its own frame
//   collect   every owner's frame in its slot  -> the tensor
//
// A small all-reduce takes one exchange: every rank does for all owners what they would do. A job
// of one exchange also goes without a ring, in parcels that something else exchanges.
#pragma once

#include <optional>
#include <vector>

#include "cpu/encode.h"
#include "shm/turns.h"

namespace zcomm::shm {

// A chunk's layouts (all frames over the flat tensor; this rank's frame, packed), and where frames
// lie in slots: a rank's wire has the frames of the others in rank order, and its own one last.
struct CodedChunk {
  CodedChunk(int rank, int world, const Layout& wire, const Layout& own);

  // Where an owner's frame begins in a rank's wire.
  std::int64_t start(int owner, int rank) const {
    if (owner == rank) return last[rank];
    return before[owner] - (rank < owner ? nbytes[rank] : 0);
  }

  const Layout *wire, *own;
  std::vector<std::int64_t> nbytes;  // of every rank's frame
  std::vector<std::int64_t> before;  // the frames of lower ranks
  std::vector<std::int64_t> last;    // where every rank's own frame begins in its wire
};

// Where what this rank owns of a chunk lies: a layout, and elements from an address.
struct OwnedPart {
  const Layout* layout;
  std::int64_t at;
};

// The residuals of one encoding, as EncodeArgs has them.
struct ResidualTables {
  const std::uint64_t *in = nullptr, *out = nullptr;
  ResidualType type = kResidualNone;
};

struct CodedJob {
  Call call;
  const Kernels* kernels;
  int threads;
  double prescale;
  bool verify;
  const std::vector<CodedChunk>* chunks;
  // Per chunk: where this rank's sums go, or what it owns comes from. Not of an all-reduce.
  const std::vector<OwnedPart>* owned;
  Place source;  // read by a reduction
  Place target;  // fp32, written by a gathering
  Place own_at;
  float* sums;  // room for what this rank owns of any chunk, in an all-reduce
  // Of a small all-reduce, else null: each owner's frame, packed; `sums` has room for the longest,
  // and `frames` for all of them.
  const std::vector<OwnedPart>* small;
  std::uint8_t* frames;
  // Per chunk, or null.
  const std::vector<ResidualTables>*sent, *summed;
};

// A wire was refused: while an owner's frames were summed, or else while those of all were decoded.
struct Refusal {
  Fault fault;
  std::optional<int> summed;
};

struct CodedOutcome {
  Outcome end;
  std::optional<Refusal> refused;
};

CodedOutcome run(Ring& ring, const CodedJob& job);

// A parcel for each rank, or from each, one after the other, for a job of one exchange. A rank
// sends the same to all: its wire or, if nothing is reduced, its own frame.
struct Parcels {
  int rank, world;
  std::uintptr_t first;  // the address of rank 0's
  std::int64_t nbytes;
};

// Encodes what this rank sends, into every parcel.
void put(const Parcels& parcels, const CodedJob& job);
// Decodes what all ranks have sent, in a job's last step.
std::optional<Refusal> take(const Parcels& parcels, const CodedJob& job);

}  // namespace zcomm::shm
