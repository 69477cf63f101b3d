// A tensor [tokens, heads, columns] in device memory with any token and head strides, as the attention kernels take it.
#pragma once

#include "runtime/device/tensor.h"

template <typename T>
struct Heads {  // [tokens, heads, columns]
    T* data;
    int64_t token_stride, head_stride;
    __device__ __forceinline__ T* at(int64_t token, int64_t head) const {
        return data + token * token_stride + head * head_stride;
    }
};

// data is null if t is null.
template <typename T>
Heads<T> heads_of(const Tensor& t) {
    return t ? Heads<T>{t.as<T>(), t.stride[0], t.stride[1]} : Heads<T>{};
}
