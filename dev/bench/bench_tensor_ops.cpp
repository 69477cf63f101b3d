#include "tensor_library/tensor_ops.h"

#include "dev/bench/bench_util.h"

namespace {

using F = TensorFunction;

void map_exp(benchmark::State& state, DType T) {
    const int64_t n = state.range(0) * state.range(1);
    const BenchArray out(T, {n}), inp(T, {n});
    run_bench(state, [&] { tensor_map(out, F::Exp, inp, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

void map_log(benchmark::State& state, DType T) {
    const int64_t n = state.range(0) * state.range(1);
    const BenchArray out(T, {n}), inp(T, {n}, 0.1f, 2);
    run_bench(state, [&] { tensor_map(out, F::Log, inp, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

void map_copy(benchmark::State& state, DType T) {
    const int64_t n = state.range(0) * state.range(1);
    const BenchArray out(T, {n}), inp(T, {n});
    run_bench(state, [&] { tensor_map(out, F::Id, inp, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

void zip_add(benchmark::State& state, DType T) {
    const int64_t n = state.range(0) * state.range(1);
    const BenchArray out(T, {n}), x(T, {n}), y(T, {n});
    run_bench(state, [&] { tensor_zip(out, F::Add, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

// y is a row, or a column, that all others share.
void zip_add_row(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out(T, {N, C}), x(T, {N, C}), y(T, {C});
    run_bench(state, [&] { tensor_zip(out, F::Add, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

void zip_add_column(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out(T, {N, C}), x(T, {N, C}), y(T, {N, 1});
    run_bench(state, [&] { tensor_zip(out, F::Add, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

// Rows that are not a whole number of vectors.
void zip_add_odd_row(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1) - 1;
    const BenchArray out(T, {N, C}), x(T, {N, C}), y(T, {C});
    run_bench(state, [&] { tensor_zip(out, F::Add, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

// Operands of one shape: collapses to one dimension.
void bin_bcast_mul(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out(T, {4, 16, N / 64, C}), x(T, {4, 16, N / 64, C}), y(T, {4, 16, N / 64, C});
    run_bench(state, [&] { tensor_bin_bcast(out, F::Mul, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

// A block of 16 rows repeated over each of the planes, fp32 times T.
void bin_bcast_mixed_repeat(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), C = state.range(1);
    const BenchArray out({4, 16, N / 64, C}), x({4, 16, N / 64, C}), y(T, {1, 1, 16, C});
    run_bench(state, [&] { tensor_bin_bcast(out, F::Mul, x, y, Stream{}); });
    report_bytes(state, out.bytes() + x.bytes() + y.bytes());
}

void reduce(benchmark::State& state, DType T, int64_t N, int64_t C, int axis) {
    const BenchArray out(T, {axis == 0 ? 1 : N, axis == 1 ? 1 : C}), inp(T, {N, C});
    const int64_t bytes = tensor_reduce_scratch(out, inp, axis);
    const BenchArray scratch = BenchArray::bytes(bytes);
    run_bench(state, [&] { tensor_reduce(out, F::Add, inp, axis, 0, scratch, Stream{}); });
    report_bytes(state, out.bytes() + inp.bytes());
}

void reduce_rows(benchmark::State& state, DType T) {
    reduce(state, T, state.range(0), state.range(1), 1);
}
void reduce_columns(benchmark::State& state, DType T) {
    reduce(state, T, state.range(0), state.range(1), 0);
}
void reduce_all(benchmark::State& state, DType T) {
    reduce(state, T, state.range(0) * state.range(1), 1, 0);
}

void matmul_strided(benchmark::State& state) {
    const int64_t B = state.range(0), n = state.range(1);
    const BenchArray out({B, n, n}), a({B, n, n}), b({B, n, n});
    run_bench(state, [&] { tensor_matmul(out, a, b, Stream{}); });
    report_flops(state, 2.0 * double(B * n) * double(n * n));
}

// a is the transpose of a row-major matrix.
void matmul_strided_transposed(benchmark::State& state) {
    const int64_t B = state.range(0), n = state.range(1);
    const BenchArray out({B, n, n}), a({B, n, n}), b({B, n, n});
    Tensor transposed = a;
    std::swap(transposed.stride[1], transposed.stride[2]);
    run_bench(state, [&] { tensor_matmul(out, transposed, b, Stream{}); });
    report_flops(state, 2.0 * double(B * n) * double(n * n));
}

const std::vector<std::string> NAMES = {"N", "C"}, BATCH = {"B", "n"};
const Sizes CPU = {{8192, 2048}}, GPU = {{131072, 1024}};
BENCH(map_copy, NAMES, CPU, GPU);
BENCH(map_exp, NAMES, CPU, GPU);
BENCH(map_log, NAMES, CPU, GPU);
BENCH(zip_add, NAMES, CPU, GPU);
BENCH(zip_add_row, NAMES, CPU, GPU);
BENCH(zip_add_column, NAMES, CPU, GPU);
BENCH(zip_add_odd_row, NAMES, CPU, GPU);
BENCH(bin_bcast_mul, NAMES, CPU, GPU);
BENCH(bin_bcast_mixed_repeat, NAMES, CPU, GPU);

const Sizes REDUCE_CPU = {{8192, 2048}, {262144, 64}}, REDUCE_GPU = {{131072, 1024}, {16384, 8192}, {1048576, 128}};
BENCH(reduce_rows, NAMES, REDUCE_CPU, REDUCE_GPU);
BENCH(reduce_columns, NAMES, REDUCE_CPU, REDUCE_GPU);
BENCH(reduce_all, NAMES, CPU, GPU);

BENCH(matmul_strided, BATCH, (Sizes{{1, 1024}, {256, 64}}), (Sizes{{1, 4096}, {64, 1024}, {4096, 64}}));
BENCH(matmul_strided_transposed, BATCH, (Sizes{{1, 1024}}), (Sizes{{1, 4096}}));

}  // namespace
