// The checks of the Muon kernels' arguments for both backends.
#pragma once

#include "kernels/muon.h"
#include "kernels/param_update_check.h"

// Updates and matrices may be in bf16 where there are tensor cores.
inline bool is_muon_dtype(const Tensor& t) {
    return t.dtype == DType::F32 || (t.dtype == DType::BF16 && backend_device() == Device::CUDA);
}
inline const char* muon_dtypes() {
    return backend_device() == Device::CUDA ? "fp32 or bf16" : "fp32";
}

// Every segment's updates lie within [0, size).
inline void check_muon_updates(const char* op, const Tensor& updates, const MuonSegment* segments,
                               int64_t num_segments) {
    require(updates && updates.rank == 1 && is_muon_dtype(updates), op, ": updates is ", dtype_name(updates.dtype), " ",
            shape_string(updates), ", expected ", muon_dtypes(), " [any size]");
    check_tensor(op, "updates", updates, updates.dtype, {updates.shape[0]});
    for (int64_t i = 0; i < num_segments; i++) {
        const int64_t begin = segments[i].update_begin, size = segments[i].end - segments[i].begin;
        require(begin >= 0 && begin <= updates.shape[0] - size, op, ": segment ", i, " lies at [", begin, ", ",
                begin + size, ") of updates, expected within [0, ", updates.shape[0], ")");
    }
}

// Returns n, the number of elements of the arenas.
inline int64_t check_muon_momentum(const char* op, const Tensor& updates, const Tensor& m, const Tensor& grads,
                                   const MuonSegment* segments, int64_t num_segments, const Tensor& scalars) {
    const int64_t n = check_update_grads(op, grads);
    check_moment(op, "m", m, n);
    check_step_scalars(op, scalars);
    check_segments(op, segments, num_segments, n);
    check_muon_updates(op, updates, segments, num_segments);
    for (int64_t i = 0; m.dtype == DType::BF16 && i < num_segments; i++) check_noise(op, i, segments[i]);
    return n;
}

// Returns an upper bound of the segments' ends: the size of params_T, or where the last segment ends.
inline int64_t check_muon_update(const char* op, const Tensor& params, const Tensor& params_T, const Tensor& updates,
                                 const MuonSegment* segments, int64_t num_segments, const Tensor& scalars) {
    const int64_t n = params_T ? params_T.shape[0] : num_segments ? segments[num_segments - 1].end : 0;
    check_step_scalars(op, scalars);
    check_segments(op, segments, num_segments, n);
    check_params(op, params, params_T, segments, num_segments, n);
    check_muon_updates(op, updates, segments, num_segments);
    return n;
}

// Matrices with a norm up to this become 0: above it, 1/norm is an fp32 number.
constexpr double MUON_SMALLEST_NORM = 0x1p-120;

// A batch of matrices. Returns its dtype.
inline DType check_muon_matrices(const char* op, const char* name, const Tensor& x) {
    require(x && x.rank == 3 && is_muon_dtype(x), op, ": ", name, " is ", dtype_name(x.dtype), " ", shape_string(x),
            ", expected ", muon_dtypes(), " [batch, rows, columns]");
    check_contiguous(op, name, x);
    return x.dtype;
}

inline void check_normalize_matrices(const char* op, const Tensor& out, const Tensor& x, const Tensor& scratch) {
    const DType dtype = check_muon_matrices(op, "x", x);
    check_tensor(op, "out", out, dtype, {x.shape[0], x.shape[1], x.shape[2]});
    check_contiguous(op, "out", out);
    check_scratch(op, scratch, normalize_matrices_scratch(x.shape[0], x.shape[1], x.shape[2]));
}
