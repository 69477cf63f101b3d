// The Newton-Schulz iteration of kernels/muon.h as batched matmuls, for both backends.
#include <algorithm>

#include "kernels/matmul.h"
#include "kernels/muon.h"
#include "kernels/muon_check.h"
#include "kernels/scratch.h"

namespace {

using Step = NewtonSchulz::Step;

struct Schedule {
    std::string name;
    int iterations;
    float norm_margin;
    std::vector<Step> steps;  // the last one repeats
};

// Polar Express: the minimax polynomials for singular values in [10⁻³, 1]. Each polynomial p(σ) but the last is
// replaced by p(σ/1.01), so that rounding errors cannot push singular values out of the interval for which the next one
// is made. dev/tests/test_muon.cpp computes them again.
const std::vector<Schedule>& schedules() {
    static const std::vector<Schedule> all = {
        {"quintic", 5, 1, {{3.4445f, -4.7750f, 2.0315f}}},
        {"polar-express",
         5,
         1.01f,
         {{8.20516041f, -22.90193499f, 16.46072491f},
          {4.06639516f, -2.86115409f, 0.51839952f},
          {3.90959490f, -2.82335174f, 0.52503698f},
          {3.28556402f, -2.41530196f, 0.48529407f},
          {2.27787329f, -1.61982177f, 0.39848079f},
          {1.87257565f, -1.23070426f, 0.35851616f},
          {1.85643711f, -1.21323928f, 0.35679979f},
          {1.875f, -1.25f, 0.375f}}},
        {"simple", 12, 1, {{2, -1.5f, 0.5f}}},
    };
    return all;
}

struct Scratch {
    int64_t gram, polynomial, x, norms, bytes;  // offsets, and the end
};

Scratch scratch_layout(int64_t batch, int64_t rows, int64_t columns, DType dtype, const Target& target) {
    constexpr int64_t ALIGNMENT = 256;
    const auto after = [](int64_t begin, int64_t bytes) {
        return (begin + bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    };
    const int64_t side = std::min(rows, columns), square = batch * side * side * dtype_size(dtype);
    Scratch s;
    s.gram = 0;
    s.polynomial = after(s.gram, square);
    s.x = after(s.polynomial, square);
    s.norms = after(s.x, batch * rows * columns * dtype_size(dtype));
    s.bytes = s.norms + normalize_matrices_scratch(batch, rows, columns, target);
    return s;
}

}  // namespace

const std::vector<std::string>& newton_schulz_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> list;
        for (const Schedule& s : schedules()) list.push_back(s.name);
        return list;
    }();
    return names;
}

NewtonSchulz newton_schulz_coefficients(const std::string& name, int iterations) {
    require(iterations >= 0, "newton_schulz_coefficients: iterations are ", iterations, ", expected 0 or more");
    for (const Schedule& s : schedules()) {
        if (s.name != name) continue;
        NewtonSchulz result;
        result.norm_margin = s.norm_margin;
        for (size_t i = 0; i < size_t(iterations > 0 ? iterations : s.iterations); i++)
            result.steps.push_back(s.steps[std::min(i, s.steps.size() - 1)]);
        return result;
    }
    std::string names;
    for (const std::string& known : newton_schulz_names()) names += (names.empty() ? "" : ", ") + known;
    throw Error(str("newton_schulz_coefficients: there are no coefficients \"", name, "\", only ", names));
}

int64_t newton_schulz_scratch(int64_t batch, int64_t rows, int64_t columns, DType dtype, const Target& target) {
    return scratch_layout(batch, rows, columns, dtype, target).bytes;
}

int64_t newton_schulz_scratch(int64_t batch, int64_t rows, int64_t columns, DType dtype) {
    return newton_schulz_scratch(batch, rows, columns, dtype, this_target());
}

void newton_schulz(Tensor x, Tensor scratch, const NewtonSchulz& coefficients, Stream stream) {
    const char* op = "newton_schulz";
    const DType dtype = check_muon_matrices(op, "x", x);
    const int64_t batch = x.shape[0], rows = x.shape[1], columns = x.shape[2], side = std::min(rows, columns);
    const Scratch s = scratch_layout(batch, rows, columns, dtype, this_target());
    check_scratch(op, scratch, s.bytes);
    if (x.numel() == 0) return;
    char* memory = static_cast<char*>(scratch.data);
    const Tensor gram = make_tensor(memory + s.gram, dtype, x.device, {batch, side, side});
    const Tensor polynomial = make_tensor(memory + s.polynomial, dtype, x.device, {batch, side, side});
    const Tensor other = make_tensor(memory + s.x, dtype, x.device, {batch, rows, columns});

    // X goes back and forth between x and the scratch. It starts where it will end in x.
    const bool tall = rows > columns;
    Tensor current = coefficients.steps.size() % 2 ? other : x, next = current.data == x.data ? other : x;
    normalize_matrices(current, x, 1 / double(coefficients.norm_margin), scratch.rows(s.norms, s.bytes), stream);
    for (const Step& step : coefficients.steps) {
        matmul_batched(gram, current, current, tall, !tall, 1, 0, Tensor{}, stream);
        matmul_batched(polynomial, gram, gram, false, false, step.c, step.b, gram, stream);
        if (tall)
            matmul_batched(next, current, polynomial, false, false, 1, step.a, current, stream);
        else
            matmul_batched(next, polynomial, current, false, false, 1, step.a, current, stream);
        std::swap(current, next);
    }
}
