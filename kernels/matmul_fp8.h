// Matmuls of fp8 codes (kernels/fp8.h, runtime/device/fp8_codes.h), for the linear layers of training.
//
//   out[m, n] (+)= Σ_k decode(a[m, k])·decode(b[n, k]) · a_scale⁻¹·b_scale⁻¹ (+ bias[n])
//
// With the names of matmul.h: forward a = inp [N, C], b = weight [OC, C]; dinp a = dout [N, OC], b = weightᵀ [C, OC];
// dweight a = doutᵀ [OC, N], b = inpᵀ [C, N].
//
// GPU: cuBLASLt, on compute capability 8.9 (Ada) and newer. Products are exact. Their sum is in fp32 registers of which
// the tensor cores of Hopper keep about 14 bits while they add (DeepSeek-V3 2024, section 3.3.2). Unless
// fast_accumulation, partial sums are added to full fp32 sums after every few terms. CPU: codes are decoded and
// multiplied in fp32 by matmul().
//
// Throws Error on a wrong shape or dtype, on sizes that are not multiples of 16 (N = out's columns, K), on two E5M2
// operands, and on a GPU without fp8 matmuls.
#pragma once

#include <string>

#include "runtime/device/device.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/device/target.h"
#include "runtime/device/tensor.h"

struct Fp8Matrix {
    Tensor codes;  // [rows, K] U8, contiguous rows
    Fp8Format format = Fp8Format::E4M3;
    Tensor scale;  // [FP8_SCALE_FLOATS] fp32, on a GPU aligned to 16 bytes
};

// out [M, N]: fp32 or bf16; a [M, K], b [N, K]; bias [N] of out's dtype or null, on a GPU with bf16 only, on the CPU
// with fp32. accumulate: added to out (without bias). scratch: matmul_fp8_scratch bytes (U8).
void matmul_fp8(Tensor out, const Fp8Matrix& a, const Fp8Matrix& b, Tensor bias, bool accumulate,
                bool fast_accumulation, Tensor scratch, Stream stream);
int64_t matmul_fp8_scratch(int64_t M, int64_t N, int64_t K);

// Why a device cannot multiply fp8 matrices; empty if it can.
inline std::string matmul_fp8_unavailable(const Target& target = this_target()) {
    if (target.device == Device::CPU || target.sm >= 89) return "";
    return str("fp8 matmuls need a GPU of compute capability 8.9 or newer (Ada, Hopper), not ", target.sm / 10, ".",
               target.sm % 10);
}
