// Matmul on a CPU, rung by rung: the same c[M, N] = a[M, K]·b[K, N] from three loops to the speed of a library. Every
// rung is checked against the float64 oracle and timed; the table also says what it gains and why.
//
//     make ladder OP=matmul
//     build/cpu/dev/ladder/matmul --csv matmul.csv && scripts/plot_ladder.py matmul.csv
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung. The last one before the library is
// kernels/cpu/gemm_blocked.cpp.
#include "kernels/matmul.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "dev/bench/machine_limits.h"
#include "dev/ladder/ladder.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm_blocked.h"

namespace {

constexpr int64_t M = 768, N = 768, K = 768;

void naive(float* c, const float* a, const float* b) {
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            float sum = 0;
            for (int64_t k = 0; k < K; k++) sum += a[i * K + k] * b[k * N + j];
            c[i * N + j] = sum;
        }
}

void reordered(float* c, const float* a, const float* b) {
    std::fill_n(c, M * N, 0.0f);
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t j = 0; j < N; j++) c[i * N + j] += a[i * K + k] * b[k * N + j];
}

void blocked(float* c, const float* a, const float* b) {
    constexpr int64_t BK = 192;  // a block of b: 192 rows, 590 kB
    std::fill_n(c, M * N, 0.0f);
    for (int64_t k0 = 0; k0 < K; k0 += BK)
        for (int64_t i = 0; i < M; i++)
            for (int64_t k = k0; k < std::min(K, k0 + BK); k++)
                for (int64_t j = 0; j < N; j++) c[i * N + j] += a[i * K + k] * b[k * N + j];
}

// Sizes are multiples of the tile here; gemm_blocked also handles the edges.
constexpr int64_t TILE_M = 6, TILE_N = 16;
static_assert(M % TILE_M == 0 && N % TILE_N == 0);

MULTIARCH void multiply_tile(float* c, const float* a, const float* b, int64_t terms) {
    vec16 sum[TILE_M] = {};
    for (int64_t k = 0; k < terms; k++) {
        const vec16 bk = vec_load(b + k * N);
#pragma GCC unroll 6
        for (int r = 0; r < TILE_M; r++) sum[r] += a[r * K + k] * bk;
    }
#pragma GCC unroll 6
    for (int r = 0; r < TILE_M; r++) vec_store(c + r * N, vec_load(c + r * N) + sum[r]);
}

void register_tiles(float* c, const float* a, const float* b) {
    constexpr int64_t BK = 256;
    std::fill_n(c, M * N, 0.0f);
    for (int64_t k = 0; k < K; k += BK)
        for (int64_t j = 0; j < N; j += TILE_N)
            for (int64_t i = 0; i < M; i += TILE_M)
                multiply_tile(c + i * N + j, a + i * K + k, b + k * N + j, std::min(BK, K - k));
}

void packed(float* c, const float* a, const float* b) {
    gemm_blocked(false, false, M, N, K, a, K, b, N, false, c, N);
}

void library(float* c, const float* a, const float* b) {
    matmul(host_tensor(c, {M, N}), host_tensor(a, {M, K}), host_tensor(b, {K, N}), false, false, false, Stream{});
}

struct Rung {
    const char* name;
    void (*multiply)(float* c, const float* a, const float* b);
    bool all_threads;
    const char* why;
};

const Rung RUNGS[] = {
    {"naive", naive, false,
     "Three loops. b is read down its columns, so each number is in another cache line; each sum waits for its "
     "last addition, so nothing overlaps and nothing is vectorised."},
    {"reordered", reordered, false,
     "The two inner loops swapped: b and c are read along rows, the additions of a row are independent, and the "
     "compiler turns them into vector instructions. But each multiply-add now loads and stores c."},
    {"blocked", blocked, false,
     "The same in blocks of k, so a block of b stays in the L2 cache for all rows of a; before, all of b was read "
     "for each row. Here b (2.4 MB) fits into L3, so the gain is small while that is near and idle. The gain "
     "grows with the matrices, and the next rungs need it."},
    {"register tiles", register_tiles, false,
     "6 x 16 sums stay in vector registers for 256 terms: in each step one load of b and six broadcasts of a feed "
     "six vector multiply-adds, and c is accessed once in 256 steps. The multiply-add units are now the limit, "
     "not the loads."},
    {"packed", packed, false,
     "a and b are copied into the order in which the inner loop reads them: contiguous whatever the sizes and "
     "transposes, no conflicts in cache sets, few pages at a time. With AVX-512 the tile grows to 12 x 32."},
    {"packed", packed, true,
     "The same on all cores, each with its own rectangle of c: no sums are shared, so the bits are those of one "
     "thread."},
    {"library", library, true,
     "What matmul() uses. Where that is oneDNN: the same structure, with inner loops generated at run time for this "
     "processor, which prefetch and are scheduled by hand."},
};

double seconds(const Rung& rung, float* c, const float* a, const float* b) {
    double best = 1e30, total = 0;
    for (int i = 0; i < 50 && (i < 2 || total < 0.3); i++) {
        const auto start = std::chrono::steady_clock::now();
        rung.multiply(c, a, b);
        const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::min(best, s);
        total += s;
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv);
        std::vector<float> a(M * K), b(K * N), c(M * N);
        for (size_t i = 0; i < a.size(); i++) a[i] = float(normal01(1, 0, i));
        for (size_t i = 0; i < b.size(); i++) b[i] = float(normal01(2, 0, i));
        const reference::Values ref =
            reference::matmul(std::vector<double>(a.begin(), a.end()).data(),
                              std::vector<double>(b.begin(), b.end()).data(), false, false, nullptr, nullptr, M, N, K);
        const int threads = omp_get_max_threads();
        const double peak = machine_limits().flops;
        std::printf("c[%d, %d] = a[%d, %d]·b[%d, %d] in fp32. Peak measured now: %.0f GFLOP/s on %d threads; %s\n\n",
                    int(M), int(N), int(M), int(K), int(K), int(N), peak * 1e-9, threads, matmul_library());
        LadderTable table;
        table.title = "matmul fp32";
        table.unit = "GFLOP/s";
        table.unit_size = 1e9;
        table.limit_name = "peak";
        for (const Rung& rung : RUNGS) {
            const int used = rung.all_threads ? threads : 1;
            omp_set_num_threads(used);
            std::fill(c.begin(), c.end(), NAN);
            const double s = seconds(rung, c.data(), a.data(), b.data());
            ErrorBound bound(DType::F32, K);
            for (size_t i = 0; i < c.size(); i++) bound.add(double(c[i]), {ref.value[i], ref.mag[i]});
            table.rows.push_back({str(rung.name, ", ", used, used == 1 ? " thread" : " threads"), s * 1e3,
                                  2.0 * M * N * K / s, peak * used / threads, bound.holds(), rung.why});
        }
        table.print();
        table.explain();
        write_ladder_csv(options.csv, {table});
        return table.correct();
    });
}
