// A linear layer with LoRA adapters for tests of kernels/matmul_low_rank.h, and the same without adapters, in a larger
// inner dimension: [inp, h]·[weight, B]ᵀ forward, [dout, dh]·[weight; A] backward, with B block-diagonal.
#pragma once

#include <algorithm>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/matmul_low_rank.h"

// The rows of each part of a layer's output that has an adapter.
using LowRankParts = std::vector<LoraPart>;

// All of out, in `count` parts of almost the same size.
inline LowRankParts whole_parts(int64_t OC, int64_t count) {
    LowRankParts parts;
    for (int64_t i = 0; i < count; i++) parts.push_back({OC * i / count, OC * (i + 1) / count - OC * i / count});
    return parts;
}

struct LowRankLayer {
    const DType T;
    const int64_t N, C, OC, R, ranks, gap;  // gap: between the rows of h and dh
    const LowRankParts parts;
    const TestArray inp, dout, weight, bias, h, a, b, scratch;

    LowRankLayer(DType dtype, int64_t rows, int64_t inputs, int64_t outputs, int64_t rank, const LowRankParts& of,
                 int64_t gap_of_h = 8)
        : T(dtype),
          N(rows),
          C(inputs),
          OC(outputs),
          R(rank),
          ranks(int64_t(of.size()) * rank),
          gap(gap_of_h),
          parts(of),
          inp(TestArray::random(T, {N, C}, 1)),
          dout(TestArray::random(T, {N, OC}, 2)),
          weight(TestArray::random(T, {OC, C}, 3, 2 / std::sqrt(double(std::max(C, OC))))),
          bias(TestArray::random(T, {OC}, 4)),
          h(TestArray::random(T, {N, ranks + gap}, 5)),
          a(TestArray::random(T, {ranks, C}, 6, 0.5)),
          b(TestArray::random(T, {rows_of_b(), R}, 7, 0.5)),
          scratch(TestArray::scratch(std::max<int64_t>(1, matmul_low_rank_scratch(OC, ranks, T)))) {}

    LowRank low_rank() const { return {h.tensor().columns(0, ranks), {a, b, &parts, 1}, scratch}; }
    LowRankGradient gradient() const { return {h.tensor().columns(0, ranks), a}; }

    // [OC, ranks].
    std::vector<double> whole_b() const {
        std::vector<double> all(size_t(OC * ranks));
        int64_t row = 0;
        for (size_t i = 0; i < parts.size(); i++)
            for (int64_t o = parts[i].row; o < parts[i].row + parts[i].rows; o++, row++)
                for (int64_t r = 0; r < R; r++)
                    all[size_t(o * ranks + int64_t(i) * R + r)] = b.values()[size_t(row * R + r)];
        return all;
    }
    reference::Values forward(bool biased) const {
        const std::vector<double> x = beside(inp.values(), C, low_ranks(), ranks),
                                  w = beside(weight.values(), C, whole_b(), ranks);
        return reference::matmul_forward(x.data(), w.data(), biased ? bias.data() : nullptr, N, C + ranks, OC);
    }
    // before: what dinp held, or null.
    reference::Values backward_input(const double* before) const {
        const std::vector<double> d = beside(dout.values(), OC, low_ranks(), ranks);
        std::vector<double> w = weight.values();
        w.insert(w.end(), a.values().begin(), a.values().end());
        return reference::matmul_backward_input(d.data(), w.data(), before, N, C, OC + ranks);
    }

  private:
    int64_t rows_of_b() const {
        int64_t sum = 0;
        for (const LoraPart& part : parts) sum += part.rows;
        return sum;
    }
    std::vector<double> low_ranks() const { return take_columns(h.values(), ranks + gap, ranks); }
    static std::vector<double> beside(const std::vector<double>& x, int64_t columns, const std::vector<double>& y,
                                      int64_t more) {
        std::vector<double> all;
        for (size_t i = 0; i < x.size() / size_t(columns); i++) {
            const auto from = x.begin() + int64_t(i) * columns, then = y.begin() + int64_t(i) * more;
            all.insert(all.end(), from, from + columns);
            all.insert(all.end(), then, then + more);
        }
        return all;
    }
};
