// Muon's kernels, and its whole step over the matrices of GPT-2. On a GPU with tuned GEMMs; parameters in bf16 with
// fp32 master weights, or in fp32.
//
// The FLOPs are those of the matmuls, without use of symmetry: per iteration 4·s²·l + 2·s³ for a matrix with sides s ≤
// l. With "quintic" GPT-2 124M needs 1.63 TFLOP, 2.7 ms at 600 TFLOP/s, and 1558M 59 TFLOP, 98 ms. A step of 524,288
// tokens takes an H100 0.86 s and 10.6 s.
#include "kernels/muon.h"

#include <algorithm>

#include "dev/bench/bench_util.h"

namespace {

double flops(const NewtonSchulz& coefficients, int64_t batch, int64_t rows, int64_t columns) {
    const double s = double(std::min(rows, columns)), l = double(std::max(rows, columns));
    return double(coefficients.steps.size()) * double(batch) * (4 * s * s * l + 2 * s * s * s);
}

void newton_schulz(benchmark::State& state, DType T) {
    const int64_t batch = state.range(0), rows = state.range(1), columns = state.range(2);
    const BenchArray x(T, {batch, rows, columns}),
        scratch = BenchArray::bytes(newton_schulz_scratch(batch, rows, columns, T));
    const NewtonSchulz quintic = newton_schulz_coefficients("quintic");
    const auto run = [&] { newton_schulz(x, scratch, quintic, tuned_stream()); };
    run();  // tunes
    run_bench(state, run, tuned_stream());
    report_flops(state, flops(quintic, batch, rows, columns), T);
}

// The arrays of a Muon step of n elements, without those of the iteration.
struct Elements {
    BenchArray params, params_T, m, grads, updates, scalars = BenchArray::bytes(sizeof(StepScalars));
    bool is_16bit;
    Elements(DType T, int64_t n)
        : params({n}, 0.02f),
          params_T(T, {T == DType::F32 ? 1 : n}),
          m({n}),
          grads({n}),
          updates(T, {n}),
          is_16bit(T != DType::F32) {
        StepScalars s{};
        s.lr = 1e-4f;
        s.momentum = 0.95f;
        s.grad_scale = 1;
        copy_to_device(scalars.tensor().data, &s, sizeof(s), Stream{});
    }
    void momentum(const MuonSegment& segment) const {
        muon_momentum(updates, m, grads, &segment, 1, 1, scalars, tuned_stream());
    }
    void update(const MuonSegment& segment) const {
        muon_update(params, is_16bit ? params_T.tensor() : Tensor{}, updates, &segment, 1, 1, scalars, tuned_stream());
    }
};

MuonSegment segment_of(int64_t n) {
    MuonSegment s{};
    s.end = n;
    s.weight_decay = 0.1f;
    s.fp32_begin = 0;
    return s;
}

// Reads gradient and m, writes m and the update.
void momentum(benchmark::State& state, DType T) {
    const int64_t n = state.range(0);
    const Elements e(T, n);
    run_bench(
        state, [&] { e.momentum(segment_of(n)); }, tuned_stream());
    report_bytes(state, (12.0 + double(dtype_size(T))) * double(n));
}

// Reads parameter and update, writes the parameter; with 16 bits the update has 2 bytes and the copy of the
// parameter 2.
void update(benchmark::State& state, DType T) {
    const int64_t n = state.range(0);
    const Elements e(T, n);
    run_bench(
        state, [&] { e.update(segment_of(n)); }, tuned_stream());
    report_bytes(state, 12.0 * double(n));
}

// The whole step for the matrices of a GPT-2: per layer q, k, v and proj [C, C], fc [4C, C], fcproj [C, 4C], in batches
// of at most so many matrices.
void step(benchmark::State& state, DType T) {
    const int64_t layers = state.range(0), C = state.range(1), most = state.range(2), n = 12 * layers * C * C;
    struct Group {
        int64_t matrices, rows, columns;
    };
    const Group groups[] = {{4 * layers, C, C}, {layers, 4 * C, C}, {layers, C, 4 * C}};
    const Elements e(T, n);
    const NewtonSchulz quintic = newton_schulz_coefficients("quintic");
    int64_t bytes = 0;
    double total = 0;
    for (const Group& g : groups) {
        bytes = std::max(bytes, newton_schulz_scratch(std::min(most, g.matrices), g.rows, g.columns, T));
        total += flops(quintic, g.matrices, g.rows, g.columns);
    }
    const BenchArray scratch = BenchArray::bytes(bytes);
    const auto run = [&] {
        e.momentum(segment_of(n));
        char* at = static_cast<char*>(e.updates.tensor().data);
        for (const Group& g : groups)
            for (int64_t first = 0; first < g.matrices; first += most) {
                const int64_t batch = std::min(most, g.matrices - first);
                const Tensor x = make_tensor(at, T, backend_device(), {batch, g.rows, g.columns});
                newton_schulz(x, scratch, quintic, tuned_stream());
                at += x.bytes();
            }
        e.update(segment_of(n));
    };
    run();
    run_bench(state, run, tuned_stream());
    report_flops(state, total, T);
}

const Sizes GPU = {{4, 768, 768},   {12, 768, 768},  {48, 768, 768},   {3, 768, 3072},
                   {12, 768, 3072}, {12, 3072, 768}, {4, 1600, 1600},  {16, 1600, 1600},
                   {1, 1600, 6400}, {4, 1600, 6400}, {12, 1600, 6400}, {12, 6400, 1600}};
BENCH(newton_schulz, {"batch", "rows", "columns"}, (Sizes{{4, 128, 128}, {4, 512, 128}, {4, 768, 768}, {1, 768, 3072}}),
      GPU);
BENCH(momentum, {"n"}, (Sizes{{1000000}, {64000000}}), (Sizes{{85000000}}));
BENCH(update, {"n"}, (Sizes{{1000000}, {64000000}}), (Sizes{{85000000}}));
BENCH(step, {"layers", "C", "batch"}, (Sizes{{4, 128, 8}, {6, 384, 8}}),
      (Sizes{{12, 768, 4}, {12, 768, 12}, {12, 768, 48}, {48, 1600, 4}, {48, 1600, 12}}));

}  // namespace
