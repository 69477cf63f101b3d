// Softcap of the logits: a smooth bound c.
//
//   tanh:   f(x) = c·tanh(x/c),            f'(x) = 1/cosh²(x/c)                (Gemma 2, 2024, section 2)
//   rsqrt:  f(x) = x/√(1 + (x/c)²),        f'(x) = (1 + (x/c)²)^(−3/2)         (c·x·rsqrt(x² + c²): modded-nanogpt)
//
// In training it is a part of cross_entropy, which needs f in the forward and f' in the backward pass. This op is for
// logits that are sampled from or read.
// T is fp32, on CUDA also bf16 and fp16. Kernels compute in fp32: errors are a few u·c, not u·|f(x)|, with u = 2⁻²⁴.
// Throws Error on a wrong shape, dtype or inner stride, or a cap that is not positive and finite.
#pragma once

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/model/softcap_config.h"

// logits [N, V] T, overwritten by f(logits); Function::None: unchanged.
void softcap_forward(Tensor logits, Softcap softcap, Stream stream);

// The check of cross_entropy and of this op.
inline void check_softcap(const char* op, const Softcap& softcap) {
    require(!softcap || (softcap.cap > 0 && softcap.cap < 3e38f), op, ": the cap is ", softcap.cap,
            ", expected a positive number");
}
