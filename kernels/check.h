// Argument checks that every launcher makes first. A failure names the op, the argument, expected and got:
//     layernorm_forward: weight is fp32 [64], expected fp32 [128]
#pragma once

#include "runtime/tensor.h"

enum class Given : uint8_t { Required, Optional };

// Checks dtype, shape and unit inner stride. Outer strides are the launcher's business (kernels take row strides).
inline void check_tensor(const char* op, const char* name, const Tensor& t, DType dtype,
                         std::initializer_list<int64_t> shape, Given given = Given::Required) {
    if (!t) {
        require(given == Given::Optional, op, ": ", name, " is missing");
        return;
    }
    bool same = t.dtype == dtype && t.rank == static_cast<int>(shape.size());
    for (int i = 0; same && i < t.rank; i++) same = t.shape[i] == shape.begin()[i];
    if (!same) {
        Tensor expected;
        expected.rank = static_cast<int>(shape.size());
        for (int i = 0; i < expected.rank; i++) expected.shape[i] = shape.begin()[i];
        throw Error(str(op, ": ", name, " is ", dtype_name(t.dtype), " ", shape_string(t), ", expected ",
                        dtype_name(dtype), " ", shape_string(expected)));
    }
    require(t.rank == 0 || t.shape[t.rank - 1] <= 1 || t.stride[t.rank - 1] == 1, op, ": ", name,
            " has an inner stride of ", t.rank ? t.stride[t.rank - 1] : 0, ", expected 1");
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
    require(!t || t.contiguous(), op, ": ", name, " ", shape_string(t), " must be contiguous");
}
