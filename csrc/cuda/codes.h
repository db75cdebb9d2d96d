// The codes of a lane's four elements, in a register and on the wire. In a register a code has 8
// bits if its width is 8, else 4, so that a look-up by bytes can take all four at once.
#pragma once

#include "cuda/memory.h"

namespace zcomm::cuda {

// A section of a segment's body, or the part of it from a tile's first element on, where indices
// fit 32 bits. It begins at a multiple of 16 bytes.
template <class Index>
struct SectionFrom {
  std::uint8_t* bytes;
  std::uint64_t weight;  // of its first word in the checksum
  Index used;            // bytes before padding
};
using Section = SectionFrom<std::int64_t>;
using TileSection = SectionFrom<int>;

template <int Width>
inline constexpr int kCodeStride = Width == 8 ? 8 : 4;

// Pieces start at multiples of their own size, so one that starts inside the section ends inside
// its padding at the latest.
template <class T, class Index>
ZC_FN std::uint64_t write_piece(const SectionFrom<Index>& section, Index byte, T piece) {
  if (byte >= section.used) return 0;
  write(section.bytes + byte, piece);
  return checksum_part(piece, section.weight, byte);
}

// Adds the piece to `sum` if this lane counts it.
template <class T, class Index>
ZC_FN T read_piece(const SectionFrom<Index>& section, Index byte, bool counts, std::uint64_t& sum) {
  if (byte >= section.used) return 0;
  const T piece = read<T>(section.bytes + byte);
  sum += checksum_part(counts ? piece : 0, section.weight, byte);
  return piece;
}

// 4-bit fields and the 12, 8 or 4 bits that they hold.
template <int Width>
ZC_FN std::uint32_t pack_fields(std::uint32_t fields) {
  constexpr std::uint32_t mask = (1u << Width) - 1;
  std::uint32_t packed = 0;
  ZC_UNROLL for (int j = 0; j < 4; ++j) packed |= (fields >> (4 * j) & mask) << (Width * j);
  return packed;
}

template <int Width>
ZC_FN std::uint32_t unpack_fields(std::uint32_t packed) {
  constexpr std::uint32_t mask = (1u << Width) - 1;
  std::uint32_t fields = 0;
  ZC_UNROLL for (int j = 0; j < 4; ++j) fields |= (packed >> (Width * j) & mask) << (4 * j);
  return fields;
}

// Writes the codes of elements `first` to `first + 3`; all lanes of the warp call it. Returns their
// part of the checksum.
template <int Width>
ZC_FN std::uint64_t write_codes(const TileSection& section, int first, std::uint32_t codes) {
  const bool odd = lane_index() & 1;
  if (Width == 8) return write_piece(section, first, codes);
  if (Width == 4) return write_piece(section, first / 2, static_cast<std::uint16_t>(codes));
  const std::uint32_t packed = pack_fields<Width>(codes);
  if (Width == 2) return write_piece(section, first / 4, static_cast<std::uint8_t>(packed));
  // Two lanes share the bytes of eight codes: one byte of signs, or three of lm3.
  const std::uint32_t other = __shfl_xor_sync(kAllLanes, packed, 1);
  const int byte = first / 8 * Width;
  if (Width == 1) {
    return odd ? 0 : write_piece(section, byte, static_cast<std::uint8_t>(packed | other << 4));
  }
  if (odd) return write_piece(section, byte + 2, static_cast<std::uint8_t>(packed >> 4));
  return write_piece(section, byte, static_cast<std::uint8_t>(packed)) +
         write_piece(section, byte + 1, static_cast<std::uint8_t>(packed >> 8 | other << 4));
}

// How much read_codes reads at once. The last piece of a section may reach into its padding.
template <int Width>
inline constexpr int kPieceNbytes = Width == 8   ? 4
                                    : Width == 4 ? 2
                                                 : 1;

// Reads them; adds each byte to `sum` once.
template <int Width>
ZC_FN std::uint32_t read_codes(const TileSection& section, int first, std::uint64_t& sum) {
  const bool odd = lane_index() & 1;
  if (Width == 8) return read_piece<std::uint32_t>(section, first, true, sum);
  if (Width == 4) return read_piece<std::uint16_t>(section, first / 2, true, sum);
  if (Width == 2) {
    return unpack_fields<2>(read_piece<std::uint8_t>(section, first / 4, true, sum));
  }
  const int byte = first / 8 * Width;
  if (Width == 1) {
    const std::uint32_t signs = read_piece<std::uint8_t>(section, byte, !odd, sum);
    return unpack_fields<1>(odd ? signs >> 4 : signs);
  }
  const std::uint32_t middle = read_piece<std::uint8_t>(section, byte + 1, !odd, sum);
  const std::uint32_t end = read_piece<std::uint8_t>(section, odd ? byte + 2 : byte, true, sum);
  return unpack_fields<3>(odd ? middle >> 4 | end << 4 : end | middle << 8);
}

// The codes of elements past the block's end: `valid` of the four exist.
template <int Width>
ZC_FN std::uint32_t codes_beyond(std::uint32_t codes, int valid) {
  return valid == 4 ? 0 : codes >> (kCodeStride<Width> * valid);
}

}  // namespace zcomm::cuda
