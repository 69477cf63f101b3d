// What the kernels of linear.cu and linear_hopper.cu share: a layer as they see it.
#pragma once

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/generation/linear.h"

template <typename T>
struct Layer {
    const T *inp, *weight, *bias, *residual;
    T* out;
    const float *norm_weight, *norm_bias;
    int64_t inp_stride, weight_stride, residual_stride, out_stride;
    int64_t C, columns;  // columns of out
    int N;               // rows of inp
    float eps;
    bool centred;
    Activation activation;
};

// ---- the kernels for Hopper GPUs (linear_hopper.cu): 9 to 64 rows of 16-bit numbers. Builds that have them define
// HAVE_SM90A.

// Whether this is such a GPU and the matrix one that they read faster than the library. Rows of inp and weight, and the
// norm's vectors, are aligned to 16 bytes.
template <typename T>
bool hopper_linear_takes(const Layer<T>& a);

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream);
