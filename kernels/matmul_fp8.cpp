#include "kernels/matmul_fp8.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/matmul.h"
#include "kernels/matmul_fp8_check.h"

namespace {

// The numbers behind the codes, divided by the scale, which is exact.
void decode(const Tensor& out, const Fp8Matrix& x, int64_t begin, int64_t end) {
    std::array<float, 256> values;
    for (int code = 0; code < 256; code++)
        values[size_t(code)] = fp8_decode(uint8_t(code), x.format) * x.scale.as<float>()[FP8_INVERSE_SCALE];
    const int64_t K = x.codes.shape[1], stride = row_stride(x.codes);
    const uint8_t* codes = x.codes.as<uint8_t>() + begin * stride;
    float* to = out.as<float>();
#pragma omp parallel for schedule(static) if ((end - begin) * K > PARALLEL_MIN)
    for (int64_t n = 0; n < end - begin; n++)
        for (int64_t k = 0; k < K; k++) to[n * K + k] = values[codes[n * stride + k]];
}

}  // namespace

void matmul_fp8(Tensor out, const Fp8Matrix& a, const Fp8Matrix& b, Tensor bias, bool accumulate, bool, Tensor scratch,
                Stream stream) {
    const char* op = "matmul_fp8";
    check_matmul_fp8(op, out, a, b, bias, accumulate);
    const int64_t M = out.shape[0], N = out.shape[1], K = a.codes.shape[1], rows = std::min(M, MATMUL_FP8_CPU_ROWS);
    check_scratch(op, scratch, matmul_fp8_scratch(M, N, K));
    if (M == 0) return;
    float* memory = reinterpret_cast<float*>(scratch.as<uint8_t>());
    const Tensor decoded_a = host_tensor(memory, {rows, K}), decoded_b = host_tensor(memory + rows * K, {N, K});
    decode(decoded_b, b, 0, N);
    for (int64_t begin = 0; begin < M; begin += MATMUL_FP8_CPU_ROWS) {
        const int64_t end = std::min(begin + MATMUL_FP8_CPU_ROWS, M);
        decode(decoded_a, a, begin, end);
        const Tensor to = out.rows(begin, end), from = decoded_a.rows(0, end - begin);
        if (bias)
            matmul_forward(to, from, decoded_b, bias, stream);
        else
            matmul(to, from, decoded_b, false, true, accumulate, stream);
    }
}
