// Linear layers of a decode step with their norm, activation and residual: GEMV, small-batch GEMM and, with 512 rows,
// the library. Shapes of GPT-2 124M and of a LLaMA model of 1.2B parameters.
//
//   adapters_none    a linear layer without a norm, as in a step without adapters: q|k|v (three parts), gate|up with
//                    SwiGLU (two) or one with a residual
//   adapters_apart   the same with 8 adapters of rank 16 in turns: linear(), adapters_shrink(), adapters_expand() and
//                    the activation
//   adapters_joined  the same by linear_with_adapters()
#include "kernels/generation/linear.h"

#include "dev/bench/bench_util.h"
#include "kernels/activation.h"
#include "kernels/generation/lora_rows.h"
#include "kernels/matmul.h"
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

enum class Adapters { None, Apart, Joined };

void adapted_layer(benchmark::State& state, DType T, Adapters how) {
    const int64_t N = state.range(0), C = state.range(1), OC = state.range(2), parts = state.range(3);
    constexpr int64_t ADAPTERS = 8, R = 16;
    const Activation f = parts == 2 ? Activation::SwiGLU : Activation::None;
    const BenchArray out(T, {N, parts == 2 ? OC / 2 : OC}), sums(T, {N, OC}), inp(T, {N, C}), weight(T, {OC, C}, 0.02f),
        a(T, {ADAPTERS, parts * R, C}, 0.02f), b(T, {OC, ADAPTERS, R}, 0.02f),
        low_rank({adapter_splits(C), N, parts * R}), scratch = BenchArray::bytes(linear_scratch(N, C, OC, T));
    std::vector<int32_t> of_row;
    for (int64_t n = 0; n < N; n++) of_row.push_back(int32_t(n % ADAPTERS));
    const HostAdapterTiles host = tiles_of_adapters(of_row, ADAPTERS);
    const BenchArray rows = BenchArray::ints(host.rows), adapters = BenchArray::ints(host.adapters),
                     all = BenchArray::ints(of_row);
    const AdapterTiles tiles{rows, adapters, all};
    AdapterWeights w{a, b, {OC}};
    if (parts == 2) w.part_ends = {OC / 2, OC};
    if (parts == 3) w.part_ends = {OC * 2 / 3, OC * 5 / 6, OC};
    const Tensor residual = parts == 1 ? out.tensor() : Tensor{};
    const bool apart = how == Adapters::Apart && f != Activation::None;  // the activation, too
    const auto run = [&] {
        if (how == Adapters::Joined)
            return linear_with_adapters({out, f, residual}, inp, {weight}, w, tiles, scratch, stream());
        const Tensor y = apart ? sums.tensor() : out.tensor();
        linear({y, apart ? Activation::None : f, residual}, inp, {}, {weight}, scratch, false, stream());
        if (how == Adapters::None) return true;
        adapters_shrink(low_rank, inp, w, tiles, stream());
        adapters_expand(y, low_rank, w, tiles, stream());
        if (apart) activation_forward(f, out, y, stream());
        return true;
    };
    matmul_tuning(true, stream());
    const bool runs = run();
    matmul_tuning(false, stream());
    if (!runs) return skip_bench(state, "linear_with_adapters() does not take this");
    run_bench(
        state, [&] { run(); }, stream());
    report_bytes(state, weight.bytes() + (how == Adapters::None ? 0 : a.bytes() + b.bytes()));
}
void adapters_none(benchmark::State& state, DType T) {
    adapted_layer(state, T, Adapters::None);
}
void adapters_apart(benchmark::State& state, DType T) {
    adapted_layer(state, T, Adapters::Apart);
}
void adapters_joined(benchmark::State& state, DType T) {
    adapted_layer(state, T, Adapters::Joined);
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
const std::vector<std::string> ADAPTER_NAMES = {"N", "C", "OC", "parts"};
const Sizes ADAPTERS_CPU = {{8, 576, 960, 3}},
            ADAPTERS_GPU = {{64, 2048, 3072, 3}, {64, 2048, 2048, 1}, {64, 2048, 16384, 2}, {64, 8192, 2048, 1}};
BENCH(adapters_none, ADAPTER_NAMES, ADAPTERS_CPU, ADAPTERS_GPU);
BENCH(adapters_apart, ADAPTER_NAMES, ADAPTERS_CPU, ADAPTERS_GPU);
BENCH(adapters_joined, ADAPTER_NAMES, ADAPTERS_CPU, ADAPTERS_GPU);
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
