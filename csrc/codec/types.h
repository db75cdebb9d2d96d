// How gradients and residuals are stored.
#pragma once

namespace zcomm {

enum GradType : int { kGradF32, kGradBf16, kGradF16 };
enum ResidualType : int { kResidualNone, kResidualF32, kResidualBf16, kResidualInt8 };

inline constexpr int kPlainResidualLog2Block = 7;  // int8 storage under a codec without blocks

}  // namespace zcomm
