#include "kernels/embedding.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "dev/bench/bench_util.h"
#include "runtime/rng.h"

namespace {

constexpr int64_t V = 50304, P = 1024;

// N tokens in sequences of length P, and tables of C channels. Tokens are distributed as in text: the token of rank r
// has a frequency in proportion to 1/(r + 2.7) (Zipf, Mandelbrot), so that some rows get thousands of tokens and most
// get none.
struct Problem {
    int64_t N, C;
    std::vector<int32_t> ids, position_ids;
    BenchArray tokens, positions;

    explicit Problem(const benchmark::State& state)
        : N(state.range(0)),
          C(state.range(1)),
          ids(make_ids(N)),
          position_ids(make_position_ids(N)),
          tokens(BenchArray::ints(ids)),
          positions(BenchArray::ints(position_ids)) {}

    static std::vector<int32_t> make_ids(int64_t N) {
        std::vector<int32_t> ids(static_cast<size_t>(N));
        for (size_t n = 0; n < ids.size(); n++) {
            const double u = (philox(2, n, 0).v[0] + 0.5) * 0x1p-32, rank = 2.7 * std::pow(50257 / 2.7 + 1, u) - 2.7;
            ids[n] = int32_t(int64_t(rank) * 7919 % 50257);  // frequent tokens are spread over the table
        }
        return ids;
    }
    static std::vector<int32_t> make_position_ids(int64_t N) {
        std::vector<int32_t> position_ids(static_cast<size_t>(N));
        for (size_t n = 0; n < position_ids.size(); n++) position_ids[n] = int32_t(int64_t(n) % P);
        return position_ids;
    }
    // Rows of both tables that are touched; reading one twice is not counted.
    double rows() const {
        return double(std::set<int32_t>(ids.begin(), ids.end()).size() +
                      std::set<int32_t>(position_ids.begin(), position_ids.end()).size());
    }
};

// Reads a row of each table, writes a row.
void forward(benchmark::State& state, DType T) {
    const Problem p(state);
    const BenchArray out(T, {p.N, p.C}), wte(T, {V, p.C}), wpe(T, {P, p.C});
    run_bench(state, [&] { embedding_forward(out, p.tokens, p.positions, wte, wpe, Stream{}); });
    report_bytes(state, out.bytes() + p.rows() * double(p.C * dtype_size(T)));
}

// Accumulating into both tables, as with a tied head: reads dout and the rows, writes the rows, which are fp32.
void backward(benchmark::State& state, DType T) {
    const Problem p(state);
    const BenchArray dwte({V, p.C}), dwpe({P, p.C}), dout(T, {p.N, p.C});
    const BenchArray scratch = BenchArray::bytes(embedding_backward_scratch(p.N, V, p.C));
    run_bench(state,
              [&] { embedding_backward(dwte, dwpe, dout, p.tokens, p.positions, scratch, true, true, Stream{}); });
    report_bytes(state, dout.bytes() + 2 * p.rows() * double(p.C) * 4);
}

const Sizes CPU = {{256, 768}, {16384, 768}}, GPU = {{65536, 768}};
BENCH(forward, {"N", "C"}, CPU, GPU);
BENCH(backward, {"N", "C"}, CPU, GPU);

}  // namespace
