// transpose_band against a loop: sizes around whole tiles, ranges that begin and end within rows, aligned and unaligned
// memory. Elements outside the range stay as they are.
#include "runtime/files/transpose.h"

#include <vector>

#include "dev/tests/test_util.h"

namespace {

void check(int64_t R, int64_t C, int64_t band_rows, int64_t begin, int64_t end, int64_t shift) {
    SCOPED_TRACE(str("R ", R, " C ", C, " bands of ", band_rows, ", elements ", begin, " to ", end, ", shift ", shift));
    std::vector<float> file(size_t(R * C));
    for (size_t i = 0; i < file.size(); i++) file[i] = float(i);
    constexpr int64_t MARGIN = 16;
    std::vector<float> memory(size_t(end - begin + 2 * MARGIN + 8), -1);
    float* aligned = memory.data();
    while (reinterpret_cast<uintptr_t>(aligned) % 32) aligned++;
    float* const dst = aligned + MARGIN - 8 + shift;
    for (int64_t c0 = 0; c0 < C; c0 += band_rows)
        transpose_band(dst, file.data() + c0 * R, R, C, c0, std::min(c0 + band_rows, C), begin, end);
    for (float* p = memory.data(); p < memory.data() + memory.size(); p++) {
        const int64_t i = begin + (p - dst);
        const float expected = i >= begin && i < end ? float(i % C * R + i / C) : -1;
        ASSERT_EQ(*p, expected) << i;
    }
}

}  // namespace

TEST(Transpose, MatchesALoop) {
    const int64_t sizes[][3] = {{1, 1, 8}, {8, 8, 8}, {7, 9, 8}, {24, 40, 32}, {33, 64, 32}, {16, 70, 32}, {9, 8, 5}};
    for (const auto& [R, C, band] : sizes)
        for (const int64_t shift : {0, 3, 8}) check(R, C, band, 0, R * C, shift);
}

TEST(Transpose, RangesOfElements) {
    const int64_t R = 25, C = 48;
    const int64_t ranges[][2] = {{0, 1}, {C, 20 * C}, {C + 5, 20 * C}, {5, R * C - 7}, {8 * C - 8, R * C}, {47, 49}};
    for (const auto& [begin, end] : ranges)
        for (const int64_t shift : {0, 1}) check(R, C, 32, begin, end, shift + begin % 8);
}
