// The weights of a block, as views that training and generation share. Shapes: C channels, OC outputs; T is the model's
// dtype.
#pragma once

#include "runtime/device/tensor.h"

struct NormWeights {
    Tensor weight, bias;  // [C] fp32; bias may be null
};
struct LinearWeights {
    Tensor weight, bias;  // [OC, C], [OC] or null
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
