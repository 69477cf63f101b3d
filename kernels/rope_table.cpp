// The host computes the table for both backends; rope.cpp and rope.cu read it.
#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/rope.h"

namespace {

constexpr double PI = 3.14159265358979323846;

// The frequency of pair i, in radians per position, for a table of T positions.
double rope_frequency(int64_t i, int64_t R, int64_t T, double theta, const RopeScaling& scaling) {
    const double length = static_cast<double>(T), original = static_cast<double>(scaling.original_max_position);
    const double rotary = static_cast<double>(R), exponent = -2.0 * static_cast<double>(i) / rotary;
    switch (scaling.kind) {
        case RopeScaling::Kind::None:
            return std::pow(theta, exponent);
        case RopeScaling::Kind::Linear:
            return std::pow(theta, exponent) / scaling.factor;
        case RopeScaling::Kind::Llama3: {
            const double frequency = std::pow(theta, exponent), rotations = original * frequency / (2 * PI);
            // rotations: full rotations of the pair within the original length = length / wavelength.
            if (rotations < scaling.low_freq_factor) return frequency / scaling.factor;
            if (rotations > scaling.high_freq_factor) return frequency;
            const double blend =
                (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
            return frequency * ((1 - blend) / scaling.factor + blend);
        }
        case RopeScaling::Kind::Dynamic: {
            if (length <= original) return std::pow(theta, exponent);
            const double theta_scale = scaling.factor * length / original - (scaling.factor - 1);
            return std::pow(theta * std::pow(theta_scale, rotary / (rotary - 2)), exponent);
        }
        case RopeScaling::Kind::Truncated: {
            const int64_t n = static_cast<int64_t>(scaling.fraction * rotary / 2);
            return i < n ? std::pow(theta, -static_cast<double>(i) / static_cast<double>(std::max<int64_t>(n - 1, 1)))
                         : 0;
        }
    }
    throw Error("rope_table: unknown kind of RoPE scaling");
}

void check_scaling(const char* op, double theta, const RopeScaling& scaling, int64_t half) {
    require(std::isfinite(theta) && theta > 0, op, ": theta is ", theta, ", expected a positive number");
    if (scaling.kind != RopeScaling::Kind::None) {
        require(std::isfinite(scaling.factor) && scaling.factor >= 1, op, ": factor is ", scaling.factor,
                ", expected 1 or more");
    }
    require(scaling.fraction > 0 && scaling.fraction <= 1, op, ": fraction is ", scaling.fraction,
            ", expected more than 0 and at most 1");
    if (scaling.kind == RopeScaling::Kind::Llama3 || scaling.kind == RopeScaling::Kind::Dynamic) {
        require(scaling.original_max_position > 0, op, ": original_max_position is ", scaling.original_max_position,
                ", expected the length trained for");
    }
    if (scaling.kind == RopeScaling::Kind::Llama3) {
        require(scaling.low_freq_factor > 0 && scaling.low_freq_factor < scaling.high_freq_factor, op,
                ": low_freq_factor ", scaling.low_freq_factor, " and high_freq_factor ", scaling.high_freq_factor,
                ", expected 0 < low < high");
    }
    require(scaling.kind != RopeScaling::Kind::Dynamic || half > 1, op,
            ": dynamic scaling needs more than 2 rotary channels");
}

// The table as [rows, R/2, 2], contiguous fp32.
void check_table(const char* op, const Tensor& table) {
    require(table && table.rank == 3, op, ": table is ", shape_string(table), ", expected [T, R/2, 2]");
    check_tensor(op, "table", table, DType::F32, {table.shape[0], table.shape[1], 2});
    check_contiguous(op, "table", table);
}

void store_angle(float* pair, double angle) {
    pair[0] = static_cast<float>(std::cos(angle));
    pair[1] = static_cast<float>(std::sin(angle));
}

}  // namespace

void rope_table(Tensor table, double theta, const RopeScaling& scaling) {
    const char* op = "rope_table";
    check_table(op, table);
    const int64_t T = table.shape[0], half = table.shape[1];
    check_scaling(op, theta, scaling, half);
    float* pairs = table.as<float>();
    for (int64_t i = 0; i < half; i++) {
        const double frequency = rope_frequency(i, 2 * half, T, theta, scaling);
        for (int64_t t = 0; t < T; t++) store_angle(pairs + (t * half + i) * 2, static_cast<double>(t) * frequency);
    }
}

void rope_rows(Tensor table, const int32_t* positions, const int64_t* lengths, double theta,
               const RopeScaling& scaling) {
    const char* op = "rope_rows";
    check_table(op, table);
    const int64_t N = table.shape[0], half = table.shape[1];
    check_scaling(op, theta, scaling, half);
    float* pairs = table.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t i = 0; i < half; i++) {
            const double frequency = rope_frequency(i, 2 * half, lengths[n], theta, scaling);
            store_angle(pairs + (n * half + i) * 2, static_cast<double>(positions[n]) * frequency);
        }
    }
}
