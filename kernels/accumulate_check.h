// The checks of accumulate's arguments for both backends.
#pragma once

#include "kernels/accumulate.h"
#include "kernels/check.h"

// Returns the number of elements.
inline int64_t check_accumulate(const char* op, const Tensor& out, const Tensor& inp) {
    const auto check = [&](const char* name, const Tensor& t) {
        require(bool(t), op, ": ", name, " is missing");
        require((t.dtype == DType::F32 || t.dtype == DType::BF16) && t.rank == 1, op, ": ", name, " is ",
                dtype_name(t.dtype), " ", shape_string(t), ", expected fp32 or bf16 [n]");
    };
    check("out", out);
    check("inp", inp);
    check_tensor(op, "inp", inp, inp.dtype, {out.shape[0]});
    check_tensor(op, "out", out, out.dtype, {out.shape[0]});
    return out.shape[0];
}

inline int64_t check_accumulate_stochastic(const Tensor& out, const Tensor& inp, const RoundingNoise& noise) {
    const char* op = "accumulate_stochastic";
    const int64_t n = check_accumulate(op, out, inp);
    check_tensor(op, "out", out, DType::BF16, {n});
    check_tensor(op, "t", noise.t, DType::I64, {1});
    require(noise.first_element >= 0 && noise.first_element <= (int64_t(1) << 38) - n, op, ": first_element is ",
            noise.first_element, ", expected less than 2^38 elements");
    return n;
}
