// A view of memory: pointer, dtype, device, shape and strides. Trivially copyable, owns nothing, never allocates.
// Kernels take Tensors by value; arenas (runtime/device/arena.h) own the memory behind them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "runtime/error.h"

enum class DType : uint8_t { F32, F64, BF16, F16, I32, I64, U16, U8 };
enum class Device : uint8_t { CPU, CUDA };

// Storage types for the two 16-bit floats; kernels convert to float before computing.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

constexpr int MAX_DIMS = 8;

inline int64_t dtype_size(DType dtype) {
    switch (dtype) {
        case DType::F64:
        case DType::I64:
            return 8;
        case DType::F32:
        case DType::I32:
            return 4;
        case DType::BF16:
        case DType::F16:
        case DType::U16:
            return 2;
        case DType::U8:
            return 1;
    }
    throw Error("dtype_size: not a dtype");
}

inline const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::F32:
            return "fp32";
        case DType::F64:
            return "fp64";
        case DType::BF16:
            return "bf16";
        case DType::F16:
            return "fp16";
        case DType::I32:
            return "int32";
        case DType::I64:
            return "int64";
        case DType::U16:
            return "uint16";
        case DType::U8:
            return "uint8";
    }
    return "?";
}

// The dtype of weights that an option names. Throws Error for another name.
inline DType float_type(const std::string& name) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::F16})
        if (name == dtype_name(dtype)) return dtype;
    throw Error(name + " is none of fp32, bf16, fp16");
}

template <typename T>
constexpr DType dtype_of() {
    using U = std::remove_const_t<T>;
    if constexpr (std::is_same_v<U, float>)
        return DType::F32;
    else if constexpr (std::is_same_v<U, double>)
        return DType::F64;
    else if constexpr (std::is_same_v<U, bf16>)
        return DType::BF16;
    else if constexpr (std::is_same_v<U, fp16>)
        return DType::F16;
    else if constexpr (std::is_same_v<U, int32_t>)
        return DType::I32;
    else if constexpr (std::is_same_v<U, int64_t>)
        return DType::I64;
    else if constexpr (std::is_same_v<U, uint16_t>)
        return DType::U16;
    else if constexpr (std::is_same_v<U, uint8_t>)
        return DType::U8;
    else
        static_assert(!sizeof(T), "no DType for this type");
}

struct Tensor {
    void* data = nullptr;  // null means "not given" for optional arguments
    DType dtype = DType::F32;
    Device device = Device::CPU;
    int rank = 0;
    int64_t shape[MAX_DIMS] = {};
    int64_t stride[MAX_DIMS] = {};  // in elements; row-major unless a view says otherwise

    explicit operator bool() const { return data != nullptr; }

    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < rank; i++) n *= shape[i];
        return n;
    }
    int64_t bytes() const { return numel() * dtype_size(dtype); }

    bool contiguous() const {
        int64_t expected = 1;
        for (int i = rank - 1; i >= 0; i--) {
            if (shape[i] != 1 && stride[i] != expected) return false;
            expected *= shape[i];
        }
        return true;
    }

    // Checked cast to a typed pointer: asking for the wrong type is an Error, not a reinterpretation.
    template <typename T>
    T* as() const {
        require(dtype == dtype_of<T>(), "tensor holds ", dtype_name(dtype), ", asked for as ",
                dtype_name(dtype_of<T>()));
        return static_cast<T*>(data);
    }

    // Rows [begin, end) of the first dimension, as a view.
    Tensor rows(int64_t begin, int64_t end) const {
        require(rank >= 1 && 0 <= begin && begin <= end && end <= shape[0], "tensor rows [", begin, ", ", end,
                ") lie outside [0, ", rank ? shape[0] : 0, ")");
        Tensor t = *this;
        t.data = static_cast<char*>(data) + begin * stride[0] * dtype_size(dtype);
        t.shape[0] = end - begin;
        return t;
    }

    // Columns [begin, end) of the last dimension, as a view (row strides stay).
    Tensor columns(int64_t begin, int64_t end) const {
        require(rank >= 1 && 0 <= begin && begin <= end && end <= shape[rank - 1], "tensor columns [", begin, ", ", end,
                ") lie outside [0, ", rank ? shape[rank - 1] : 0, ")");
        Tensor t = *this;
        t.data = static_cast<char*>(data) + begin * stride[rank - 1] * dtype_size(dtype);
        t.shape[rank - 1] = end - begin;
        return t;
    }
};
static_assert(std::is_trivially_copyable_v<Tensor>);

// A row-major tensor over memory that somebody else owns.
inline Tensor make_tensor(void* data, DType dtype, Device device, const int64_t* shape, int rank) {
    require(rank >= 0 && rank <= MAX_DIMS, "tensor of rank ", rank, ": at most ", MAX_DIMS,
            " dimensions are supported");
    Tensor t;
    t.data = data;
    t.dtype = dtype;
    t.device = device;
    t.rank = rank;
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        require(shape[i] >= 0, "tensor dimension ", i, " is ", shape[i], "; it must not be negative");
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        require(!__builtin_mul_overflow(stride, shape[i] > 0 ? shape[i] : 1, &stride), "tensor size overflows 64 bits");
    }
    return t;
}

inline Tensor make_tensor(void* data, DType dtype, Device device, std::initializer_list<int64_t> shape) {
    return make_tensor(data, dtype, device, shape.begin(), static_cast<int>(shape.size()));
}

// Host tensor over typed memory, shape given: tensor(x.data(), {N, C}).
template <typename T>
Tensor host_tensor(T* data, std::initializer_list<int64_t> shape) {
    return make_tensor(const_cast<std::remove_const_t<T>*>(data), dtype_of<T>(), Device::CPU, shape);
}

// A packed [N, heads·HS] matrix (row stride may be larger) seen as [N, heads, HS]: how attention and RoPE read q, k and
// v in place from the output of the QKV GEMM.
inline Tensor split_heads(const Tensor& packed, int64_t heads) {
    require(packed.rank == 2 && heads > 0 && packed.shape[1] % heads == 0, "split_heads: ", heads,
            " heads do not divide a row of ", packed.rank == 2 ? packed.shape[1] : -1);
    Tensor t = packed;
    t.rank = 3;
    t.shape[1] = heads;
    t.shape[2] = packed.shape[1] / heads;
    t.stride[1] = t.shape[2] * packed.stride[1];
    t.stride[2] = packed.stride[1];
    return t;
}

inline std::string shape_string(const Tensor& t) {
    std::string s = "[";
    for (int i = 0; i < t.rank; i++) s += (i ? ", " : "") + std::to_string(t.shape[i]);
    return s + "]";
}
