// GEMMs of small tiles: each element is one sum in the order of k, with the same bits for any blocking of rows, vectors
// and k. This makes attention independent of the number of threads. Into::Added adds that sum to c.
#include "kernels/cpu/cpu_tile.h"

#include <cstring>
#include <vector>

#include "dev/tests/test_util.h"
#include "runtime/rng.h"

namespace {

constexpr int64_t LD = 8 * LANES;  // row stride of all matrices, which are square

std::vector<float> random_matrix(uint64_t stream) {
    std::vector<float> x(LD * LD);
    for (size_t i = 0; i < x.size(); i++) x[i] = float(int32_t(philox(7, stream, i).v[0])) * 0x1p-31f;
    return x;
}

using TileGemm = decltype(&tile_AB);

// c += a·b, rows of c, vectors of a row and steps of k one at a time.
void one_by_one(TileGemm gemm, int64_t a_row, int64_t a_k, float* c, const float* a, const float* b, int64_t M,
                int64_t vecs, int64_t K) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t v = 0; v < vecs; v++)
            for (int64_t k = 0; k < K; k++)
                gemm(c + m * LD + v * LANES, LD, a + m * a_row + k * a_k, LD, b + k * LD + v * LANES, LD, 1, 1, 1,
                     Into::Continued);
}

void expect_any_blocking_gives_the_same(TileGemm gemm, int64_t a_row, int64_t a_k) {
    const std::vector<float> a = random_matrix(1), b = random_matrix(2), before = random_matrix(3);
    for (const int64_t vecs : {1, 2, 3, 4, 5, 8}) {
        for (const int64_t M : {1, 2, 3, 4, 7, 8, 13, 64}) {
            for (const int64_t K : {1, 2, 3, 16, 33}) {
                for (const Into into : {Into::Overwritten, Into::Continued, Into::Added}) {
                    std::vector<float> c = before, expected = before;
                    gemm(c.data(), LD, a.data(), LD, b.data(), LD, M, vecs, K, into);
                    for (int64_t m = 0; m < M && into != Into::Continued; m++)
                        std::fill_n(expected.begin() + m * LD, vecs * LANES, 0.0f);
                    one_by_one(gemm, a_row, a_k, expected.data(), a.data(), b.data(), M, vecs, K);
                    for (int64_t m = 0; m < M && into == Into::Added; m++)
                        for (int64_t i = m * LD; i < m * LD + vecs * LANES; i++) expected[i] += before[i];
                    ASSERT_EQ(std::memcmp(c.data(), expected.data(), c.size() * sizeof(float)), 0)
                        << M << " rows, " << vecs << " vectors, " << K << " terms";
                }
            }
        }
    }
}

TEST(CpuTile, TileABMatchesSimpleLoop) {
    expect_any_blocking_gives_the_same(tile_AB, LD, 1);
}
TEST(CpuTile, TileAtBMatchesSimpleLoop) {
    expect_any_blocking_gives_the_same(tile_AtB, 1, LD);
}

}  // namespace
