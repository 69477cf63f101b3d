// What both backends share: quantisation to NF4 on the host, and weights of several matrices.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/nf4_check.h"
#include "kernels/nf4_values.h"

std::array<float, 256> nf4_absmax_values() {
    std::array<float, 256> values{};
    size_t count = 0;
    values[count++] = 0;
    values[count++] = 1;
    float power = 1e-6f;
    for (int exponent = 0; exponent < 7; exponent++, power = float(std::pow(10, exponent - 6))) {
        const int fractions = 1 << exponent;
        // Bounds of equal intervals from 0.1 to 1, counted from the nearer end; a value is the middle of two.
        const float step = (1.0f - 0.1f) / float(fractions);
        const auto bound = [&](int i) {
            const bool low = i < (fractions + 1) / 2;
            return low ? std::fma(step, float(i), 0.1f) : std::fma(-step, float(fractions - i), 1.0f);
        };
        for (int i = 0; i < fractions; i++) {
            const float value = power * ((bound(i) + bound(i + 1)) / 2.0f);
            values[count++] = value;
            values[count++] = -value;
        }
    }
    std::sort(values.begin(), values.end());
    return values;
}

namespace {

// The index of the value nearest to x; of two as near the smaller. Compared with their middle, rounded, as bitsandbytes
// does: 16-bit weights hit it, and SmolLM2-135M's first loss differs by 3e-4 if they round to the other side.
template <typename Values>
uint8_t nearest(const Values& values, float x) {
    const auto above = std::lower_bound(std::begin(values), std::end(values), x);
    if (above == std::begin(values)) return 0;
    const auto below = above - 1;
    const auto found = above != std::end(values) && x > (*below + *above) / 2 ? above : below;
    return uint8_t(found - std::begin(values));
}

float absmax_of(const float* x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::isnan(x[i]) ? x[i] : std::max(largest, std::fabs(x[i]));
    return largest;
}

// codes[i] = the value nearest to x[i] / absmax, in [-1, 1].
template <typename Values, typename Store>
void encode(const Values& values, const float* x, int64_t n, float absmax, Store store) {
    const float inverse = 1.0f / std::max(absmax, 1e-38f);
    for (int64_t i = 0; i < n; i++) store(i, nearest(values, std::clamp(x[i] * inverse, -1.0f, 1.0f)));
}

}  // namespace

float nf4_quantise(const Nf4Weights& out, Tensor inp, int64_t first, int64_t end) {
    const char* op = "nf4_quantise";
    check_tensor(op, "inp", inp, DType::F32, {inp.numel()});
    const int64_t n = inp.numel(), blocks = nf4_blocks(n);
    check_nf4(op, out, n);
    if (n == 0) return 0;
    const float* x = inp.as<float>();
    uint8_t *codes = out.codes.as<uint8_t>(), *absmax_codes = out.absmax_codes.as<uint8_t>();
    std::vector<float> absmax(static_cast<size_t>(blocks)), top(absmax.size());  // top: the largest |NF4_VALUES[code]|
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        const float* const block = x + b * NF4_BLOCK;
        float& largest = absmax[size_t(b)];
        largest = absmax_of(block, NF4_BLOCK);
        // Values rise with codes, so the code of the largest magnitude is that of the least or the greatest weight.
        const auto [least, greatest] = std::minmax_element(block, block + NF4_BLOCK);
        const float ends[] = {*least, *greatest};
        encode(NF4_VALUES, ends, 2, largest,
               [&](int64_t, uint8_t code) { top[size_t(b)] = std::max(top[size_t(b)], std::fabs(NF4_VALUES[code])); });
        if (b * NF4_BLOCK < first || b * NF4_BLOCK >= end) continue;
        uint8_t* to = codes + b * NF4_BLOCK / 2;
        encode(NF4_VALUES, block, NF4_BLOCK, largest,
               [&](int64_t i, uint8_t code) { to[i / 2] = i % 2 ? uint8_t(to[i / 2] | code) : uint8_t(code << 4); });
    }
    double sum = 0;
    for (const float a : absmax) sum += a;
    require(std::isfinite(sum), op, ": a weight is not finite");
    const float mean = float(sum / double(blocks));
    for (float& a : absmax) a -= mean;
    const std::array<float, 256> values = nf4_absmax_values();
    float amax = 0;
    for (int64_t begin = 0; begin < blocks; begin += NF4_GROUP) {
        const int64_t count = std::min(NF4_GROUP, blocks - begin);
        float& largest = out.group_absmax.as<float>()[begin / NF4_GROUP];
        largest = absmax_of(&absmax[size_t(begin)], count);
        encode(values, &absmax[size_t(begin)], count, largest, [&](int64_t i, uint8_t code) {
            absmax_codes[begin + i] = code;
            amax = std::max(amax, std::fabs(top[size_t(begin + i)] * nf4_absmax(values[code], largest, mean)));
        });
    }
    *out.mean.as<float>() = mean;
    return amax;
}

Tensor nf4_dequantise(Tensor out, const Nf4Matrix& matrix, Stream stream) {
    for (const Nf4Matrix::Part& part : matrix.parts) {
        const int64_t begin = part.row * matrix.cols, n = part.rows * matrix.cols;
        nf4_dequantise(out.rows(begin, begin + n), part.weights, stream);
    }
    return make_tensor(out.data, out.dtype, out.device, {matrix.rows, matrix.cols});
}
