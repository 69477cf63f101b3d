// What the kernels of linear.cu and linear_hopper.cu share: a layer as they see it.
#pragma once

#include "kernels/cuda_common.cuh"
#include "kernels/linear.h"

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

// ---- the kernel for Hopper GPUs (linear_hopper.cu): 9 to 64 rows of 16-bit numbers. Builds that have it define
// HAVE_SM90A.

// Whether this is such a GPU and the matrix one that the kernel reads faster than the library. Rows of inp and weight,
// and the norm's vectors, are aligned to 16 bytes.
bool hopper_linear_takes(int64_t N, int64_t C, int64_t OC, bool has_norm);

template <typename T>
void hopper_linear(const char* op, const Layer<T>& a, Stream stream);
