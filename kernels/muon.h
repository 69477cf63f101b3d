// Muon: each step moves a matrix of parameters by the orthogonalised momentum of its gradient.
//
//   g = grad·grad_scale
//   m = μ·m + (1−μ)·g                                      muon_momentum
//   u = (1−μ)·g + μ·m                                      (Nesterov)
//   O = U·Vᵀ approximately, where u = U·Σ·Vᵀ               newton_schulz
//   p = p − lr·(shape_scale·O + weight_decay·p)            muon_update
//
// Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon);
// decoupled weight decay and the scale 0.2·√max(rows, columns) from Liu et al. 2025, "Muon is scalable for LLM
// training". O does not depend on the size of u, so the gradient's scale matters only within the momentum.
//
// lr is the step's learning rate times the segment's lr_scale. The step's learning rate, μ (momentum), grad_scale, skip
// and t are read from the step's scalars on the device (global_norm.h). A skipped step changes none of p, m and u.
// kernels/param_update.h states where parameters are and how they are stored.
//
// Deterministic. The result of an element depends neither on the division into segments nor, in newton_schulz, on the
// other matrices of the batch. Throws Error on a wrong shape or dtype, and on what param_update.h names.
#pragma once

#include <string>
#include <vector>

#include "kernels/global_norm.h"
#include "kernels/param_update.h"
#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// A run of elements of one matrix. Matrices are packed in the tensor of updates one after the other.
struct MuonSegment : ParamSegment {
    int64_t update_begin = 0;  // index of `begin` in the updates
    float shape_scale = 1;     // √max(1, rows/columns), or 0.2·√max(rows, columns)
};

// updates [any size] fp32 or bf16 (on the CPU fp32): u of each segment; other elements stay unchanged. grads [n] fp32
// or bf16, m [n] fp32 or bf16: whole arenas. segments: on the host, ascending in the arenas. Their weight_decay,
// fp32_begin, lr_scale and shape_scale are not used. seed: of the rounding of a bf16 m.
void muon_momentum(Tensor updates, Tensor m, Tensor grads, const MuonSegment* segments, int64_t num_segments,
                   uint64_t seed, Tensor scalars, Stream stream);

// p is updated by O. updates as above, holding O. params, params_T: as adamw_update (adamw.h); params_T [n]. segments:
// ascending in the arenas and in params. seed: of stochastic rounding.
void muon_update(Tensor params, Tensor params_T, Tensor updates, const MuonSegment* segments, int64_t num_segments,
                 uint64_t seed, Tensor scalars, Stream stream);

// The Newton-Schulz iteration
//
//   X₀ = X / (norm_margin·‖X‖_F),   A = X·Xᵀ,   X ← a·X + (b·A + c·A²)·X
//
// maps each singular value σ of X₀ to a·σ + b·σ³ + c·σ⁵ and keeps the singular vectors. With rows > columns, A = Xᵀ·X
// and X ← a·X + X·(b·A + c·A²): the same result with smaller matrices. A matrix with ‖X‖_F ≤ 2⁻¹²⁰ becomes zero.
struct NewtonSchulz {
    struct Step {
        float a, b, c;
    };
    std::vector<Step> steps;  // one per iteration
    float norm_margin = 1;    // keeps σ ≤ 1 where rounding or the polynomials need room
};

// Coefficients by name; iterations 0: as many as the name's default, in parentheses below. With more iterations than a
// name has coefficients the last ones repeat. Throws Error on an unknown name and on a negative number of iterations.
//
// - "quintic" (5): a large slope at 0 and no convergence. σ₀ ≥ 0.002 ends in [0.68, 1.21]. Jordan et al. 2024.
// - "polar-express" (5): for each iteration the polynomial that brings [10⁻³, 1] closest to 1, given the previous ones.
//   σ₀ ≥ 0.001 ends in [0.84, 1.13]. Amsel et al. 2025, "The Polar Express", algorithm 1.
// - "simple" (12): (2, −1.5, 0.5) converges. σ₀ ≥ 0.001 ends within 10⁻⁵ of 1. Track 3 of modded-nanogpt.
//
// σ₀: a singular value of X/‖X‖_F; exact arithmetic.
NewtonSchulz newton_schulz_coefficients(const std::string& name, int iterations = 0);
const std::vector<std::string>& newton_schulz_names();

// x [batch, rows, columns], contiguous, fp32 or bf16 (on the CPU fp32): replaced by the result. A, b·A + c·A² and X are
// stored in x's dtype, sums are in fp32. scratch: newton_schulz_scratch bytes (U8). The matmuls are matmul_batched
// (matmul.h), so the stream must come from create_blas_stream(), and tuning applies.
void newton_schulz(Tensor x, Tensor scratch, const NewtonSchulz& coefficients, Stream stream);
int64_t newton_schulz_scratch(int64_t batch, int64_t rows, int64_t columns, DType dtype);

// The iteration's first step: out[i] = x[i]·(scale/‖x[i]‖_F), or 0 if the norm is at most 2⁻¹²⁰. out, x [batch, rows,
// columns], contiguous, of one dtype; out may be x. The norm is summed in fp64. scratch: normalize_matrices_scratch
// bytes (U8).
void normalize_matrices(Tensor out, Tensor x, double scale, Tensor scratch, Stream stream);
int64_t normalize_matrices_scratch(int64_t batch, int64_t rows, int64_t columns);
