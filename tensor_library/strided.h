// Loops over strided tensors: how tensor_ops transforms shapes and strides before it launches a kernel, the same for
// both backends. Everything here runs on the host and reads no data.
//
// Broadcasting is free: a dimension that repeats gets stride 0 (NumPy's rule), and a dimension that repeats a block of
// m elements n/m times becomes two, [n/m, m] with strides [0, s] (ggml's modulo rule without a modulo). Then dimensions
// that are adjacent in every operand are merged, so that most loops have one or two dimensions.
#pragma once

#include "kernels/check.h"
#include "runtime/device/tensor.h"

constexpr int MAX_OPERANDS = 3;

// The same index runs over all operands: element (i_0, i_1, …) of operand k is at data + Σ_d i_d·stride[d].
struct StridedLoop {
    struct Operand {
        void* data;
        DType dtype;
        int64_t stride[MAX_DIMS];  // in elements; 0 where the operand repeats, negative where it runs backwards
    };
    int rank = 0;  // at least 1, the innermost dimension last
    int64_t shape[MAX_DIMS] = {};
    int operands = 0;
    Operand operand[MAX_OPERANDS] = {};  // as given

    int64_t numel() const {
        int64_t n = 1;
        for (int d = 0; d < rank; d++) n *= shape[d];
        return n;
    }
    int64_t inner() const { return shape[rank - 1]; }
};

// The loop over tensors of one shape. Dimensions of size 1 are dropped; the others are ordered by the stride of the
// first operand, so that its memory is walked in one direction whatever its layout (column-major is as good as
// row-major), and merged.
StridedLoop strided_loop(std::initializer_list<Tensor> operands);

// t broadcast to the shape of `to` by NumPy's rules: aligned at the right, dimensions of size 1 (or missing) repeat.
Tensor broadcast_to(const char* op, const char* name, const Tensor& t, const Tensor& to);

// Throws Error if two elements of an output have one address, because the result would depend on the order of writing.
// The stride of each dimension must exceed the extent of all dimensions of smaller strides.
void check_distinct(const char* op, const char* name, const Tensor& out);

// Throws Error if an output shares an element with an input. Interleaved views (odd and even columns) are distinguished
// exactly, unless that would take more than 2^16 steps: then overlapping extents count as an overlap.
void check_disjoint(const char* op, const char* out_name, const Tensor& out, const char* name, const Tensor& t);
bool tensors_overlap(const Tensor& a, const Tensor& b);

// The bytes from the first to the end of the last element in memory: [begin, end) from t.data. Empty for an empty
// tensor.
struct ByteRange {
    int64_t begin, end;
};
ByteRange byte_range(const Tensor& t);
