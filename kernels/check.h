// Argument checks for launchers. The Error names the op, the argument, the value found and the value expected:
//     layernorm_forward: weight is fp32 [64], expected fp32 [128]
#pragma once

#include "runtime/device/tensor.h"

enum class Given : uint8_t { Required, Optional };

// Checks dtype, shape and unit inner stride. Outer strides are not checked: kernels take row strides.
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

// Checks a matrix of any sizes.
inline void check_matrix(const char* op, const char* name, const Tensor& t, DType dtype = DType::F32) {
    require(bool(t), op, ": ", name, " is missing");
    require(t.dtype == dtype && t.rank == 2, op, ": ", name, " is ", dtype_name(t.dtype), " ", shape_string(t),
            ", expected a ", dtype_name(dtype), " matrix");
    check_tensor(op, name, t, dtype, {t.shape[0], t.shape[1]});
    require(t.shape[0] <= 1 || t.stride[0] >= t.shape[1], op, ": ", name, " has a row stride of ", t.stride[0],
            ", expected at least ", t.shape[1]);
}

// Checks a matrix [rows, columns]; its row stride may exceed the number of columns.
inline void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
                         Given given = Given::Required, DType dtype = DType::F32) {
    check_tensor(op, name, t, dtype, {rows, columns}, given);
    if (t) check_matrix(op, name, t, dtype);
}

// CUDA: checks the dtype of the activations and returns it, the T of the launch.
inline DType check_activation_dtype(const char* op, const char* name, const Tensor& t) {
    require(bool(t), op, ": ", name, " is missing");
    require(t.dtype == DType::F32 || t.dtype == DType::BF16 || t.dtype == DType::F16, op, ": ", name, " is ",
            dtype_name(t.dtype), " ", shape_string(t), ", expected fp32, bf16 or fp16");
    return t.dtype;
}

// Checks that the scratch has at least so many bytes. If 0 bytes are needed it may be missing.
inline void check_scratch(const char* op, const Tensor& t, int64_t bytes) {
    if (bytes == 0) return;
    require(bool(t), op, ": scratch is missing, expected uint8 [", bytes, "]");
    require(t.dtype == DType::U8 && t.rank == 1 && t.shape[0] >= bytes && t.contiguous(), op, ": scratch is ",
            dtype_name(t.dtype), " ", shape_string(t), ", expected uint8 [", bytes, "] or more");
}
