// The checks of accumulate's arguments for both backends.
#pragma once

#include "kernels/check.h"

// Returns the number of elements.
inline int64_t check_accumulate(const Tensor& out, const Tensor& inp) {
    const char* op = "accumulate";
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
