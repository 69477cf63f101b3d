// The weights of a block, as views that training and generation share. Shapes: C channels, OC outputs; T is the model's
// dtype.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device/tensor.h"

struct NormWeights {
    Tensor weight, bias;  // [C] fp32; bias may be null
};

// The rows of a weight that one LoRA adapter changes.
struct LoraPart {
    int64_t row, rows;
};
// The LoRA adapters of a weight, one for each part, with matrices one below the other: W + scale·B·A.
struct LoraWeights {
    Tensor a, b;  // [parts·R, C], [the parts' rows, R]; null: no adapters
    const std::vector<LoraPart>* parts = nullptr;
    float scale = 0;
};
// Calls f(part, the first of its rows of b, the first of its rows of a) for each part.
template <typename F>
void for_each_part(const LoraWeights& lora, F f) {
    int64_t b = 0, a = 0;
    for (const LoraPart& part : *lora.parts) {
        f(part, b, a);
        b += part.rows;
        a += lora.b.shape[1];
    }
}

// A weight as a linear layer sees it: in T or packed, with what is added to it.
struct LinearWeights {
    Tensor weight, bias = {};                     // [OC, C], null if it is packed; [OC] or null
    const struct Nf4Matrix* nf4 = nullptr;        // in NF4 (kernels/nf4.h), or null
    const struct Fp8Weight* fp8 = nullptr;        // frozen, in fp8 (driver/fp8_base.h), or null
    const struct PackedWeight* packed = nullptr;  // in 8 or 4 bits (kernels/packed_weight.h), or null
    LoraWeights lora = {};
};
struct BlockWeights {
    NormWeights norm1, norm2;
    LinearWeights qkv, proj, fc, fcproj;
    LinearWeights gate;  // gated_linear attention: [NKV, C], [NKV] fp32
    Tensor headnorm;     // gated_linear attention: [HS] fp32
    // QK-norm with weights, fp32: of each head [HS]; of all heads together (which the fused decode step does not
    // support) [NH·HS] and [NKV·HS]; else null.
    Tensor qnorm, knorm;
};
