#include "kernels/nf4.h"

#include <cmath>

#include "kernels/nf4_check.h"
#include "kernels/nf4_values.h"

void nf4_dequantise(Tensor out, const Nf4Weights& weights, Stream) {
    const char* op = "nf4_dequantise";
    check_tensor(op, "out", out, DType::F32, {out.numel()});
    check_nf4(op, weights, out.numel());
    static const std::array<float, 256> values = nf4_absmax_values();
    const uint8_t *codes = weights.codes.as<uint8_t>(), *absmax_codes = weights.absmax_codes.as<uint8_t>();
    const float* group_absmax = weights.group_absmax.as<float>();
    const float mean = *weights.mean.as<float>();
    float* w = out.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < nf4_blocks(out.numel()); b++) {
        const float absmax = std::fma(values[absmax_codes[b]], group_absmax[b / NF4_GROUP], mean);
        for (int64_t i = b * NF4_BLOCK; i < (b + 1) * NF4_BLOCK; i += 2) {
            const uint8_t pair = codes[i / 2];
            w[i] = NF4_VALUES[pair >> 4] * absmax;
            w[i + 1] = NF4_VALUES[pair & 15] * absmax;
        }
    }
}
