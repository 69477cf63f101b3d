// What both backends share: quantisation to NF4 on the host, and weights of several matrices.
#include <algorithm>
#include <array>
#include <bit>
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

// The middles of neighbouring values, rounded. As many of them as lie below x is the index of the value nearest to x;
// of two as near the smaller, as bitsandbytes does: 16-bit weights hit a middle, and SmolLM2-135M's first loss differs
// by 3e-4 if they round to the other side.
template <size_t N>
std::array<float, N - 1> middles_of(const std::array<float, N>& values) {
    std::array<float, N - 1> middles;
    for (size_t i = 0; i + 1 < N; i++) middles[i] = (values[i] + values[i + 1]) / 2;
    return middles;
}

// The bits of numbers without their signs rise with their magnitudes, to infinity and then NaN.
float absmax_of(const float* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
    return std::bit_cast<float>(largest);
}

float scaled(float x, float inverse) {
    return std::clamp(x * inverse, -1.0f, 1.0f);
}

float inverse_of(float absmax) {
    return 1.0f / std::max(absmax, 1e-38f);
}

constexpr std::array<float, 16> NF4 = std::to_array(NF4_VALUES);

// The codes of a block of weights, one a byte. Each weight is compared with all middles, so that the compiler encodes
// many weights at once.
void encode_block(const std::array<float, 15>& middles, const float* x, float absmax, uint8_t* codes) {
    const float inverse = inverse_of(absmax);
    float quotients[NF4_BLOCK];
    for (int64_t i = 0; i < NF4_BLOCK; i++) quotients[i] = scaled(x[i], inverse);
    int32_t below[NF4_BLOCK] = {};
    for (const float middle : middles)
        for (int64_t i = 0; i < NF4_BLOCK; i++) below[i] += quotients[i] > middle;
    for (int64_t i = 0; i < NF4_BLOCK; i++) codes[i] = uint8_t(below[i]);
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
    const std::array<float, 15> middles = middles_of(NF4);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        const float* const block = x + b * NF4_BLOCK;
        uint8_t of_block[NF4_BLOCK];
        absmax[size_t(b)] = absmax_of(block, NF4_BLOCK);
        encode_block(middles, block, absmax[size_t(b)], of_block);
        uint8_t least = 15, greatest = 0;
        for (const uint8_t code : of_block) {
            least = std::min(least, code);
            greatest = std::max(greatest, code);
        }
        top[size_t(b)] = std::max(std::fabs(NF4[least]), std::fabs(NF4[greatest]));
        if (b * NF4_BLOCK < first || b * NF4_BLOCK >= end) continue;
        for (int64_t i = 0; i < NF4_BLOCK; i += 2)
            codes[(b * NF4_BLOCK + i) / 2] = uint8_t(of_block[i] << 4 | of_block[i + 1]);
    }
    double sum = 0;
    for (const float a : absmax) sum += a;
    require(std::isfinite(sum), op, ": a weight is not finite");
    const float mean = float(sum / double(blocks));
    for (float& a : absmax) a -= mean;
    const std::array<float, 256> values = nf4_absmax_values();
    const std::array<float, 255> middles_of_absmax = middles_of(values);
    float amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
    for (int64_t begin = 0; begin < blocks; begin += NF4_GROUP) {
        const int64_t count = std::min(NF4_GROUP, blocks - begin);
        const float largest = absmax_of(&absmax[size_t(begin)], count), inverse = inverse_of(largest);
        out.group_absmax.as<float>()[begin / NF4_GROUP] = largest;
        for (int64_t b = begin; b < begin + count; b++) {
            const auto above = std::lower_bound(middles_of_absmax.begin(), middles_of_absmax.end(),
                                                scaled(absmax[size_t(b)], inverse));
            absmax_codes[b] = uint8_t(above - middles_of_absmax.begin());
            amax = std::max(amax, std::fabs(top[size_t(b)] * nf4_absmax(values[absmax_codes[b]], largest, mean)));
        }
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
