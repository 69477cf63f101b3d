// Checks the arguments of tensor_ops.h and turns them into loops, for both backends.
#pragma once

#include <cmath>

#include "tensor_library/strided.h"
#include "tensor_library/tensor_ops.h"

inline void check_operand(const char* op, const char* name, const Tensor& t) {
    check_activation_dtype(op, name, t);
    require(t.rank >= 0 && t.rank <= MAX_DIMS, op, ": ", name, " has ", t.rank, " dimensions; at most ", MAX_DIMS,
            " are supported");
}

inline void check_arguments(const char* op, TensorFunction f, int arguments) {
    require(int(f) < NUM_TENSOR_FUNCTIONS, op, ": ", int(f), " is not a function");
    require(info_of(f).arguments == arguments, op, ": ", info_of(f).name, " is a function of ", info_of(f).arguments,
            info_of(f).arguments == 1 ? " argument" : " arguments", ", expected one of ", arguments);
}

inline void check_output(const char* op, const Tensor& out,
                         std::initializer_list<std::pair<const char*, Tensor>> inputs) {
    check_distinct(op, "out", out);
    for (const auto& input : inputs) check_disjoint(op, "out", out, input.first, input.second);
}

inline StridedLoop map_loop(const char* op, const Tensor& out, TensorFunction f, const Tensor& inp) {
    check_arguments(op, f, 1);
    check_operand(op, "out", out);
    check_operand(op, "inp", inp);
    const Tensor x = broadcast_to(op, "inp", inp, out);
    check_output(op, out, {{"inp", inp}});
    return strided_loop({out, x});
}

inline StridedLoop zip_loop(const char* op, const Tensor& out, TensorFunction f, const Tensor& x, const Tensor& y) {
    check_arguments(op, f, 2);
    check_operand(op, "out", out);
    check_operand(op, "x", x);
    check_operand(op, "y", y);
    const Tensor wide_x = broadcast_to(op, "x", x, out), wide_y = broadcast_to(op, "y", y, out);
    check_output(op, out, {{"x", x}, {"y", y}});
    return strided_loop({out, wide_x, wide_y});
}

// The function to compute, of the operands of the loop. Without x it is a function of y alone.
struct BinBcast {
    TensorFunction f;
    StridedLoop loop;
};

inline BinBcast bin_bcast_loop(const char* op, const Tensor& out, TensorFunction f, const Tensor& x, const Tensor& y) {
    require(
        f == TensorFunction::Add || f == TensorFunction::Sub || f == TensorFunction::Mul || f == TensorFunction::Div,
        op, ": the function is ", int(f) < NUM_TENSOR_FUNCTIONS ? info_of(f).name : "unknown",
        ", expected add, sub, mul or div");
    check_operand(op, "out", out);
    check_operand(op, "y", y);
    require(out.rank <= 4, op, ": out ", shape_string(out), " has ", out.rank, " dimensions, expected 4 at most");
    if (x) {
        check_operand(op, "x", x);
        bool same = x.rank == out.rank;
        for (int d = 0; same && d < out.rank; d++) same = x.shape[d] == out.shape[d];
        require(same, op, ": x is ", shape_string(x), ", expected ", shape_string(out));
    }
    // A dimension in which y repeats a block of m elements becomes two: the repeats, and the block.
    Tensor outs = out, xs = x, ys = y;
    int rank = 0;
    const auto add = [&](int64_t size, int64_t out_stride, int64_t x_stride, int64_t y_stride) {
        outs.shape[rank] = xs.shape[rank] = ys.shape[rank] = size;
        outs.stride[rank] = out_stride;
        xs.stride[rank] = x_stride;
        ys.stride[rank] = y_stride;
        rank++;
    };
    bool fits = y.rank <= out.rank;
    for (int d = 0; fits && d < out.rank; d++) {
        const int from = d - (out.rank - y.rank);
        const int64_t n = out.shape[d], m = from < 0 ? 1 : y.shape[from], y_stride = from < 0 ? 0 : y.stride[from];
        const int64_t out_stride = out.stride[d], x_stride = x ? x.stride[d] : 0;
        fits = m == 0 ? n == 0 : n % m == 0;
        if (!fits) break;
        if (n == m)
            add(n, out_stride, x_stride, y_stride);
        else if (m == 1 || n == 0)
            add(n, out_stride, x_stride, 0);
        else {
            add(n / m, out_stride * m, x_stride * m, 0);
            add(m, out_stride, x_stride, y_stride);
        }
    }
    require(fits, op, ": y ", shape_string(y), " does not repeat over ", shape_string(out),
            "; each of its dimensions must divide out's");
    outs.rank = xs.rank = ys.rank = rank;
    check_output(op, out, {{"x", x}, {"y", y}});
    if (x) return {f, strided_loop({outs, xs, ys})};
    const TensorFunction of_y = f == TensorFunction::Sub   ? TensorFunction::Neg
                                : f == TensorFunction::Div ? TensorFunction::Inv
                                                           : TensorFunction::Id;
    return {of_y, strided_loop({outs, ys})};
}

// The results of a reduction as a loop over (inp, out), ordered by the strides of inp, the larger of the two; and the
// axis, along which inp advances by `stride`.
struct Reduction {
    StridedLoop loop;
    int64_t length, stride;
};

inline Reduction check_reduction(const char* op, const Tensor& out, TensorFunction f, const Tensor& inp, int axis) {
    require(f == TensorFunction::Add || f == TensorFunction::Mul || f == TensorFunction::Max, op, ": the function is ",
            int(f) < NUM_TENSOR_FUNCTIONS ? info_of(f).name : "unknown", ", expected add, mul or max");
    check_operand(op, "out", out);
    check_operand(op, "inp", inp);
    require(axis >= 0 && axis < inp.rank, op, ": axis ", axis, " lies outside inp ", shape_string(inp));
    Tensor expected = inp;
    expected.shape[axis] = 1;
    bool same = out.rank == inp.rank;
    for (int d = 0; same && d < out.rank; d++) same = out.shape[d] == expected.shape[d];
    require(same, op, ": out is ", shape_string(out), ", expected ", shape_string(expected));
    check_output(op, out, {{"inp", inp}});
    return {strided_loop({expected, out}), inp.shape[axis], inp.stride[axis]};
}

// A batch of matmuls; strides in elements.
struct BatchedMatmul {
    int64_t M, N, K;                               // out [M, N] = a [M, K]·b [K, N]
    int64_t out_row, out_column, a_row, a_column;  // from one row, one column to the next
    int64_t b_row, b_column;
    StridedLoop batch;  // of (out, a, b): the first element of each matrix
};

inline BatchedMatmul check_batched_matmul(const char* op, const Tensor& out, const Tensor& a, const Tensor& b) {
    for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"out", out}, {"a", a}, {"b", b}}) {
        check_operand(op, name, t);
        require(t.dtype == DType::F32 && t.rank >= 2, op, ": ", name, " is ", dtype_name(t.dtype), " ", shape_string(t),
                ", expected fp32 matrices");
    }
    const int ro = out.rank - 2, ra = a.rank - 2, rb = b.rank - 2;
    const int64_t M = out.shape[ro], N = out.shape[ro + 1], K = a.shape[ra + 1];
    require(a.shape[ra] == M && b.shape[rb] == K && b.shape[rb + 1] == N, op, ": a ", shape_string(a), " times b ",
            shape_string(b), " does not give out ", shape_string(out));
    const auto batch_of = [](Tensor t) {
        t.rank -= 2;
        return t;
    };
    const Tensor batch = batch_of(out);
    const Tensor batch_a = broadcast_to(op, "the batch of a", batch_of(a), batch),
                 batch_b = broadcast_to(op, "the batch of b", batch_of(b), batch);
    check_output(op, out, {{"a", a}, {"b", b}});
    return {M,
            N,
            K,
            out.stride[ro],
            out.stride[ro + 1],
            a.stride[ra],
            a.stride[ra + 1],
            b.stride[rb],
            b.stride[rb + 1],
            strided_loop({batch, batch_a, batch_b})};
}
