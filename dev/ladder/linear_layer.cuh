// Shared by the ladders of the matmul of a linear layer, out[M, N] = inp[M, K]·weight[N, K]ᵀ (+ bias[N]): what a rung
// gets, its check against the float64 oracle, its time, and the library.
#pragma once

#include <array>

#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/matmul.h"
#include "runtime/device/blas.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/cuda_check.h"

template <typename T>
struct LinearArguments {
    T* out;
    const T *inp, *weight;
    const T* bias;  // may be null
    int64_t M, N, K;
};

template <typename T>
void multiply_by(GemmKernel kernel, const LinearArguments<T>& p, Stream stream) {
    blas_of("ladder", stream).only_kernel = kernel;
    const auto tensor = [](const T* data, std::initializer_list<int64_t> shape) {
        return make_tensor(const_cast<T*>(data), dtype_of<T>(), Device::CUDA, shape);
    };
    matmul_forward(tensor(p.out, {p.M, p.N}), tensor(p.inp, {p.M, p.K}), tensor(p.weight, {p.N, p.K}),
                   tensor(p.bias, {p.N}), stream);
}

template <typename T>
void library(const LinearArguments<T>& p, Stream stream) {
    multiply_by(GemmKernel::Library, p, stream);
}

template <typename T>
struct Rung {
    const char* name;
    void (*multiply)(const LinearArguments<T>& p, Stream stream);
    const char* why;
};

template <typename T>
void run(const Rung<T>& rung, const LinearArguments<T>& p, Stream stream) {
    rung.multiply(p, stream);
    check_launch(rung.name, stream);
}

template <typename T>
struct Problem {
    int64_t M, N, K;
    DeviceArray<T> inp, weight, bias, out;
    Problem(int64_t M_, int64_t N_, int64_t K_, Stream stream)
        : M(M_),
          N(N_),
          K(K_),
          inp(DeviceArray<T>::random(M * K, 1, 1, 0, stream)),
          weight(DeviceArray<T>::random(N * K, 2, 1, 0, stream)),
          bias(DeviceArray<T>::random(N, 3, 10, 0, stream)),
          out(M * N, stream) {}

    LinearArguments<T> arguments(bool with_bias) const {
        return {out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr, M, N, K};
    }
    reference::Value expected(int64_t m, int64_t n, bool with_bias) const {
        reference::Value v = reference::dot(&inp.values()[size_t(m * K)], 1, &weight.values()[size_t(n * K)], 1, K);
        if (with_bias) v.add(bias.values()[size_t(n)]);
        return v;
    }

    // Runs the rung on a poisoned output. Compares all outputs if there are few, else samples: the first and last rows
    // and columns, both sides of tile edges, and random ones.
    bool correct(const Rung<T>& rung, bool with_bias, Stream stream) {
        out.poison(stream);
        run(rung, arguments(with_bias), stream);
        const std::vector<T> got = out.fetch(stream);
        ErrorBound bound(dtype_of<T>(), K);
        const auto compare = [&](int64_t m, int64_t n) {
            bound.add(DeviceArray<T>::widen(got[size_t(m * N + n)]), expected(m, n, with_bias));
        };
        if (M * N <= (1 << 16)) {
            for (int64_t m = 0; m < M; m++)
                for (int64_t n = 0; n < N; n++) compare(m, n);
        } else {
            const auto edge = [](uint32_t random, int64_t size) {  // 0, 31, 32, 63, 64, …, size - 1
                const int64_t i = (random % (size / 32 + 1)) * 32 - (random >> 31);
                return std::clamp<int64_t>(i, 0, size - 1);
            };
            for (uint64_t s = 0; s < 8192; s++) {
                const Philox4 r = philox(4, s, 0);
                int64_t m = r.v[0] % M, n = r.v[1] % N;
                if (s % 8 == 0) m = r.v[2] % 2 ? M - 1 : 0;
                if (s % 8 == 1) n = r.v[2] % 2 ? N - 1 : 0;
                if (s % 8 == 2 || s % 8 == 4) m = edge(r.v[2], M);
                if (s % 8 == 3 || s % 8 == 4) n = edge(r.v[3], N);
                compare(m, n);
            }
        }
        return bound.holds() && out.guard_intact(stream);
    }
};

// Checks the rungs at the small sizes (M, N, K), also with a bias if they take one, and times them at M = N = K = size.
template <typename T>
LadderTable climb(const std::vector<Rung<T>>& rungs, const std::vector<std::array<int64_t, 3>>& small_sizes,
                  bool with_bias, int64_t size, Stream stream) {
    std::vector<Problem<T>> small;
    for (const auto& s : small_sizes) small.emplace_back(s[0], s[1], s[2], stream);
    Problem<T> large(size, size, size, stream);
    ColdTimer timer(stream);

    LadderTable table;
    table.title = str("matmul ", dtype_name(dtype_of<T>()));
    table.unit = "TFLOP/s";
    table.unit_size = 1e12;
    table.limit_name = "cuBLASLt";
    for (const Rung<T>& rung : rungs) {
        matmul_tuning(true, stream);  // the limit is the fastest algorithm of the library
        bool correct = large.correct(rung, false, stream);
        matmul_tuning(false, stream);
        for (Problem<T>& problem : small)
            for (int bias = 0; bias <= with_bias; bias++) correct = problem.correct(rung, bias, stream) && correct;
        const double ms = timer.median_ms([&] { run(rung, large.arguments(false), stream); });
        const double flops = 2.0 * double(size) * double(size) * double(size);
        table.rows.push_back({rung.name, ms, flops / (ms * 1e-3), 0, correct, rung.why});
    }
    for (LadderTable::Row& row : table.rows) row.limit = table.rows.back().rate;
    return table;
}
