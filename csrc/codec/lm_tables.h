// Made by tools/make_tables.py; do not edit.
#pragma once

#include "codec/float.h"

namespace zcomm {

// Bit i % 64 of word i / 64 set: element i of a block changes its sign.
ZC_TABLE std::uint64_t kSignWords[16] = {
    0x1f9c6a90d09129f3ull, 0xd64117c2d301f4d2ull, 0x779c75bd3e4e122aull,
    0xa9287107a380b281ull, 0xdd13945254298ea9ull, 0xe8f5533e569c8546ull,
    0x95946bf7b2971fb1ull, 0xc783723bad881118ull, 0xcb562a037f0592bfull,
    0x887b18e91bc55bfaull, 0x4030eb9a79c7d0a0ull, 0x41ae8eb4afde2ee8ull,
    0xd8e1ce0ef9a45247ull, 0x13498e248eac8757ull, 0xeef3d7700e46327bull,
    0x1d95f1eadf18caedull,
};

// Thresholds are multiples of rms / kLmSteps.
inline constexpr float kLmSteps = 48;

ZC_TABLE float kLm4Levels[16] = {
    -2.734375f, -2.0625f, -1.6171875f, -1.2578125f, -0.94140625f, -0.65234375f,
    -0.3828125f, -0.12451171875f, 0.12451171875f, 0.3828125f, 0.65234375f, 0.94140625f,
    1.2578125f, 1.6171875f, 2.0625f, 2.734375f,
};
ZC_TABLE signed char kLm4Thresholds[7] = {
    12, 25, 38, 53, 69, 88, 115,
};

ZC_TABLE float kLm3Levels[8] = {
    -2.15625f, -1.3359375f, -0.75390625f, -0.2451171875f, 0.2451171875f, 0.75390625f,
    1.3359375f, 2.15625f,
};
ZC_TABLE signed char kLm3Thresholds[3] = {
    24, 50, 84,
};

ZC_TABLE float kLm2Levels[4] = {
    -1.5078125f, -0.451171875f, 0.451171875f, 1.5078125f,
};
ZC_TABLE signed char kLm2Thresholds[1] = {
    47,
};

}  // namespace zcomm
