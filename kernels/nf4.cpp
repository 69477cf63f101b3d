#include "kernels/nf4.h"

#include "kernels/nf4_check.h"
#include "kernels/nf4_values.h"

void nf4_dequantise(Tensor out, const Nf4Weights& weights, Stream) {
    const char* op = "nf4_dequantise";
    check_tensor(op, "out", out, DType::F32, {out.numel()});
    check_nf4(op, weights, out.numel());
    static const std::array<float, 256> values = nf4_absmax_values();
    const uint8_t *codes = weights.codes.as<uint8_t>(), *absmax_codes = weights.absmax_codes.as<uint8_t>();
    const float* group_absmax = weights.group_absmax.as<float>();
    const float mean = *weights.mean.as<float>();
    float* w = out.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < nf4_blocks(out.numel()); b++) {
        const float absmax = nf4_absmax(values[absmax_codes[b]], group_absmax[b / NF4_GROUP], mean);
        for (int64_t i = b * NF4_BLOCK; i < (b + 1) * NF4_BLOCK; i += 2) {
            const uint8_t pair = codes[i / 2];
            w[i] = NF4_VALUES[pair >> 4] * absmax;
            w[i + 1] = NF4_VALUES[pair & 15] * absmax;
        }
    }
}

Tensor nf4_to_fp8(Tensor out, const Nf4Matrix& matrix, bool transposed, Stream) {
    check_nf4_to_fp8("nf4_to_fp8", out, matrix);
    static const std::array<float, 256> values = nf4_absmax_values();
    const int64_t C = matrix.cols, row_blocks = C / NF4_BLOCK;
    const float scale = matrix.fp8_scale.as<float>()[FP8_SCALE];
    uint8_t* const to = out.as<uint8_t>();
    for (const Nf4Matrix::Part& part : matrix.parts) {
        const Nf4Weights& weights = part.weights;
        const uint8_t *codes = weights.codes.as<uint8_t>(), *absmax_codes = weights.absmax_codes.as<uint8_t>();
        const float *group_absmax = weights.group_absmax.as<float>(), mean = *weights.mean.as<float>();
#pragma omp parallel for schedule(static)
        for (int64_t b = 0; b < nf4_blocks(part.rows * C); b++) {
            const float absmax = nf4_absmax(values[absmax_codes[b]], group_absmax[b / NF4_GROUP], mean);
            uint8_t of_code[16];
            for (int code = 0; code < 16; code++)
                of_code[code] = fp8_encode(NF4_VALUES[code] * absmax * scale, Fp8Format::E4M3);
            const int64_t n = part.row + b / row_blocks, c0 = b % row_blocks * NF4_BLOCK;
            for (int64_t i = 0; i < NF4_BLOCK; i++) {
                const uint8_t pair = codes[(b * NF4_BLOCK + i) / 2];
                to[transposed ? (c0 + i) * matrix.rows + n : n * C + c0 + i] = of_code[i % 2 ? pair & 15 : pair >> 4];
            }
        }
    }
    const std::initializer_list<int64_t> shape = {transposed ? C : matrix.rows, transposed ? matrix.rows : C};
    return make_tensor(out.data, DType::U8, out.device, shape);
}
