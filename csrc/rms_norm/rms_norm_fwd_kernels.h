// The kernels of RMSNorm's forward, by name.
#pragma once

#include "host/kernel.h"

namespace cuops {

// Those whose rows stay in registers are in rms_norm.cu, rms_norm_filled.cu and, with options, in the sources after these; the pair
// of rms_norm_parts.cu comes after them, and the last three are in rms_norm_any.cu.
enum Variant {
  kShort,
  kThree,
  kFive,
  kResidual,
  kResidualFew,
  kResidualThree,
  kResidualFour,
  kMiddle,
  kWide,
  kLate,
  kStay,
  kPhasedShort,
  kPhased,
  kFull,  // and the next three, for each of the first Calls
  kFullFour,
  kBlock,
  kBlockFour,
  kFullResidual,
  kFullFourResidual,
  kBlockResidual,
  kBlockFourResidual,
  kFullNoWeight,
  kFullFourNoWeight,
  kBlockNoWeight,
  kBlockFourNoWeight,
  kFullWideWeight,
  kFullFourWideWeight,
  kBlockWideWeight,
  kFullPassing,
  kShortOptions,
  kMiddleOptions,
  kWideOptions,
  kPhasedShortOptions,
  kPhasedOptions,
  kShortNoWeight,
  kThreeNoWeight,
  kMiddleNoWeight,
  kWideNoWeight,
  kShortWideWeight,
  kThreeWideWeight,
  kFiveWideWeight,
  kMiddleWideWeight,
  kWideWideWeight,
  kPhasedWideWeight,
  kShortMixedF16,
  kThreeMixedF16,
  kFiveMixedF16,
  kMiddleMixedF16,
  kWideMixedF16,
  kShortMixedBF16,
  kThreeMixedBF16,
  kFiveMixedBF16,
  kMiddleMixedBF16,
  kWideMixedBF16,
  kSums,
  kParts,
  kLong,
  kVectors,
  kAny
};

inline Kernel& kernel_of(DType dtype, Variant variant) {
  static const KernelTable table(
      "rms_norm_fwd_",
      {{"rms_norm",
        {"_short", "_three", "_five", "_residual", "_residual_few", "_residual_three", "_residual_four", "_middle", "_wide",
         "_late", "_stay", "_phased_short", "_phased"}},
       {"rms_norm_filled",
        {"_full", "_full_four", "_block", "_block_four", "_full_residual", "_full_four_residual", "_block_residual",
         "_block_four_residual", "_full_no_weight", "_full_four_no_weight", "_block_no_weight", "_block_four_no_weight",
         "_full_wide_weight", "_full_four_wide_weight", "_block_wide_weight", "_full_passing"}},
       {"rms_norm_options", {"_short_options", "_middle_options", "_wide_options", "_phased_short_options", "_phased_options"}},
       {"rms_norm_no_weight", {"_short_no_weight", "_three_no_weight", "_middle_no_weight", "_wide_no_weight"}},
       {"rms_norm_wide_weight",
        {"_short_wide_weight", "_three_wide_weight", "_five_wide_weight", "_middle_wide_weight", "_wide_wide_weight",
         "_phased_wide_weight"}},
       {"rms_norm_mixed",
        {"_short_mixed_f16", "_three_mixed_f16", "_five_mixed_f16", "_middle_mixed_f16", "_wide_mixed_f16", "_short_mixed_bf16",
         "_three_mixed_bf16", "_five_mixed_bf16", "_middle_mixed_bf16", "_wide_mixed_bf16"}},
       {"rms_norm_parts", {"_sums", "_parts"}},
       {"rms_norm_any", {"_long", "_vectors", "_any"}}});
  return table.at(dtype, variant);
}

}  // namespace cuops
