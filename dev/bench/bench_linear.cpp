// Linear layers of a decode step with their norm, activation and residual: GEMV, small-batch GEMM and, with 512 rows,
// the library. Shapes of GPT-2 124M and of a LLaMA model of 1.2B parameters.
#include "kernels/generation/linear.h"

#include "dev/bench/bench_util.h"
#include "kernels/packed_weight.h"
#include "runtime/device/blas_stream.h"

namespace {

Stream stream() {
    static const Stream created = create_blas_stream();
    return created;
}

void layer(benchmark::State& state, DType T, bool with_norm, Activation f) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2);
    const int64_t columns = f == Activation::SwiGLU ? OC / 2 : OC;
    const BenchArray out(T, {N, columns}), inp(T, {N, C}), weight(T, {OC, C}, 0.02f), bias(T, {OC}), norm({C});
    const BenchArray scratch = BenchArray::bytes(linear_scratch(N, C, OC, T));
    InputNorm before;
    if (with_norm) before.weight = before.bias = norm;
    const Tensor residual = f == Activation::None ? out.tensor() : Tensor{};
    run_bench(
        state,
        [&] {
            linear({out, f, residual}, inp, before, {weight, bias}, scratch, false, stream());
        },
        stream());
    report_bytes(state, weight.bytes());
}

// Packed weights; any codes do.
template <Packing PACKING>
void packed_layer(benchmark::State& state, DType T, Activation f, bool with_residual) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2);
    const BenchArray out(T, {N, OC}), inp(T, {N, C}), scratch = BenchArray::bytes(linear_scratch(N, C, OC, T, true)),
                                                      rows = BenchArray::bytes(OC * packed_row_bytes(PACKING, C));
    const PackedWeight weight{
        PACKING, C,
        make_tensor(rows.tensor().data, DType::U8, rows.tensor().device, {OC, packed_row_bytes(PACKING, C)})};
    LinearWeights weights;
    weights.packed = &weight;
    const Tensor to = out.tensor().columns(0, f == Activation::SwiGLU ? OC / 2 : OC),
                 residual = with_residual ? to : Tensor{};
    run_bench(
        state,
        [&] {
            linear({to, f, residual}, inp, {}, weights, scratch, false, stream());
        },
        stream());
    report_bytes(state, weight.rows.bytes());
    state.counters["TMAC/s"] =
        benchmark::Counter(double(N * C * OC) * 1e-12, benchmark::Counter::kIsIterationInvariantRate);
}
template <Packing PACKING>
void packed_linear(benchmark::State& state, DType T) {
    packed_layer<PACKING>(state, T, Activation::None, false);
}
const auto linear_fp8 = packed_linear<Packing::Fp8>, linear_int8 = packed_linear<Packing::Int8>,
           linear_int4 = packed_linear<Packing::Int4>;

// The layers of a model with 64 sequences: gate and up with SwiGLU, the others with a residual.
Activation activation_of(const benchmark::State& state) {
    return state.range(2) == 16384 ? Activation::SwiGLU : Activation::None;
}
void batch_dense(benchmark::State& state, DType T) {
    layer(state, T, false, activation_of(state));
}
template <Packing PACKING>
void packed_batch(benchmark::State& state, DType T) {
    const Activation f = activation_of(state);
    packed_layer<PACKING>(state, T, f, f == Activation::None);
}
const auto batch_fp8 = packed_batch<Packing::Fp8>, batch_int8 = packed_batch<Packing::Int8>,
           batch_int4 = packed_batch<Packing::Int4>;

void norm_linear(benchmark::State& state, DType T) {
    layer(state, T, true, Activation::None);
}
void norm_linear_gelu(benchmark::State& state, DType T) {
    layer(state, T, true, Activation::GELU);
}
void norm_linear_swiglu(benchmark::State& state, DType T) {
    layer(state, T, true, Activation::SwiGLU);
}
void linear_residual(benchmark::State& state, DType T) {
    layer(state, T, false, Activation::None);
}

const std::vector<std::string> NAMES = {"N", "C", "OC"};
BENCH(norm_linear, NAMES, (Sizes{{1, 768, 2304}, {8, 768, 2304}, {1, 768, 50304}, {512, 768, 2304}}),
      (Sizes{{1, 768, 2304},
             {8, 768, 2304},
             {1, 768, 50304},
             {8, 768, 50304},
             {64, 768, 2304},
             {64, 768, 50304},
             {1, 2048, 3072},
             {1, 2048, 128256}}));
BENCH(norm_linear_gelu, NAMES, (Sizes{{1, 768, 3072}}),
      (Sizes{{1, 768, 3072}, {8, 768, 3072}, {64, 768, 3072}, {64, 1024, 4096}}));
BENCH(norm_linear_swiglu, NAMES, (Sizes{{1, 576, 3072}}), (Sizes{{1, 2048, 16384}, {8, 2048, 16384}}));
BENCH(linear_residual, NAMES, (Sizes{{1, 768, 768}, {1, 3072, 768}, {512, 3072, 768}}),
      (Sizes{{1, 768, 768}, {1, 3072, 768}, {64, 768, 768}, {64, 3072, 768}, {1, 8192, 2048}}));
const Sizes PACKED_CPU = {{1, 576, 576},  {1, 576, 3072}, {1, 1536, 576},   {1, 576, 49152},
                          {4, 576, 3072}, {8, 576, 3072}, {512, 576, 3072}, {512, 1536, 576}},
            PACKED_GPU = {{1, 2048, 16384}, {8, 2048, 16384}, {64, 2048, 16384}, {512, 2048, 16384}};
// A LLaMA model of 1.2B parameters with 64 sequences: q, k and v; proj; gate and up; down; the head. In bf16 and
// packed.
const Sizes BATCH_CPU = {{64, 576, 960}},
            BATCH_GPU = {{64, 2048, 3072}, {64, 2048, 2048}, {64, 2048, 16384}, {64, 8192, 2048}, {64, 2048, 128256}};
BENCH(linear_fp8, NAMES, PACKED_CPU, PACKED_GPU);
BENCH(linear_int8, NAMES, PACKED_CPU, PACKED_GPU);
BENCH(linear_int4, NAMES, PACKED_CPU, PACKED_GPU);
BENCH(batch_dense, NAMES, BATCH_CPU, BATCH_GPU);
BENCH(batch_fp8, NAMES, BATCH_CPU, BATCH_GPU);
BENCH(batch_int8, NAMES, BATCH_CPU, BATCH_GPU);
BENCH(batch_int4, NAMES, BATCH_CPU, BATCH_GPU);

}  // namespace
