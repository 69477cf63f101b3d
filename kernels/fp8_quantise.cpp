// Quantisation to fp8 on the host, for both backends.
#include <algorithm>
#include <cmath>

#include "kernels/fp8_check.h"
#include "runtime/device/convert_dtype.h"

float fp8_quantise_on_host(Tensor rows, Tensor scale, Tensor inp, DType dtype, int64_t first, int64_t end) {
    const char* op = "fp8_quantise_on_host";
    check_matrix(op, "inp", inp);
    check_matrix(op, "rows", rows, inp.shape[0], inp.shape[1], Given::Required, DType::U8);
    check_tensor(op, "scale", scale, DType::F32, {FP8_SCALE_FLOATS});
    require(dtype == DType::F32 || dtype == DType::BF16, op, ": dtype is ", dtype_name(dtype),
            ", expected fp32 or bf16");
    const int64_t N = inp.shape[0], C = inp.shape[1], stride = inp.stride[0], row_bytes = rows.stride[0];
    const float* const x = inp.as<float>();
    const auto stored = [&](int64_t n, int64_t c) {
        const float value = x[n * stride + c];
        return dtype == DType::F32 ? value : to_float(to_bf16(value));
    };
    float amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const float y = stored(n, c);
            amax = std::max(amax, std::isfinite(y) ? std::fabs(y) : INFINITY);
        }
    const int exponent = fp8_scale_exponent(amax, Fp8Format::E4M3, 0);
    fp8_store_scale(scale.as<float>(), exponent);
    const float factor = power_of_two(exponent);
    uint8_t* const codes = rows.as<uint8_t>();
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = std::max<int64_t>(first - n * C, 0); c < std::min(end - n * C, C); c++)
            codes[n * row_bytes + c] = fp8_encode(stored(n, c) * factor, Fp8Format::E4M3);
    return amax;
}
