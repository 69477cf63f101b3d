// Losses of preference optimisation on pairs of a chosen and a rejected response to one prompt, their gradients, and
// what a run reports of them.
//
// For a response y to a prompt x let ℓ(y) = Σ ln π(y_t | x, y_<t) over its loss tokens, n(y) their number, a = ℓ/n, and
// ℓ_ref(y), a_ref the same of the reference model. c: chosen, r: rejected. σ(h) = 1/(1 + e^−h), −ln σ(h) is
// softplus(−h).
//
//   DPO    h = β·[(ℓ_c − ℓ_ref,c) − (ℓ_r − ℓ_ref,r)]
//          L = −(1 − ε)·ln σ(h) − ε·ln σ(−h)                 (Rafailov et al. 2023, equation 7; ε: Mitchell 2023,
//                                                             "A note on DPO with noisy preferences", equation 3)
//   IPO    d = (a_c − a_ref,c) − (a_r − a_ref,r),   L = (d − 1/(2β))²          (Azar et al. 2023, equation 17; means
//                                                             over tokens as the authors' implementation in trl)
//   SimPO  h = β·(a_c − a_r) − γ,   L as for DPO                                 (Meng et al. 2024, equation 6)
//   ORPO   o(a) = a − ln(1 − e^a),   L = −a_c − β·ln σ(o(a_c) − o(a_r))      (Hong et al. 2024, equations 6 and 7)
//
// In o(a) an a above −2⁻²⁴ counts as −2⁻²⁴, the accuracy of a loss in fp32, so that o and its slope 1/(1 − e^a) stay
// finite.
//
// Rewards: β·(ℓ − ℓ_ref) for DPO, β·(a − a_ref) for IPO, β·a for SimPO and ORPO.
//
// P pairs of which some may be absent, n tokens. Sums are in fp64 in a fixed order: the same losses give the same bits.
// Throws Error on a wrong shape or dtype, and on options out of range: β ≤ 0, ε outside [0, 0.5), γ < 0, ε with IPO or
// ORPO, γ with a method other than SimPO. Rows that are out of order or out of range, or a side without tokens, are an
// Error on the CPU; on CUDA, where the launch does not wait for the kernel, the pair's stats are NaN, which skips the
// step.
#pragma once

#include <cstdint>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"
#include "runtime/names.h"

enum class PreferenceMethod : uint8_t { DPO, IPO, SimPO, ORPO };
constexpr Names<4> PREFERENCE_NAMES = {"dpo", "ipo", "simpo", "orpo"};
inline bool has_reference(PreferenceMethod method) {
    return method == PreferenceMethod::DPO || method == PreferenceMethod::IPO;
}

struct PreferenceOptions {
    PreferenceMethod method = PreferenceMethod::DPO;
    float beta = 0.1f;
    float label_smoothing = 0;  // ε
    float margin = 0;           // γ
};

// Where a pair's loss tokens are among the n: chosen [chosen, rejected), rejected [rejected, end). chosen = end: the
// pair is absent.
struct PairRows {
    int32_t chosen, rejected, end;
};

// What is summed over pairs; of an absent pair all are 0. ACCURATE: 1 if the chosen response has the greater reward.
// REFERENCE_LOGP: ℓ_ref of both responses, 0 for a method without a reference.
enum PairStat {
    PAIR_LOSS,
    PAIR_CHOSEN_REWARD,
    PAIR_REJECTED_REWARD,
    PAIR_ACCURATE,
    PAIR_CHOSEN_LOGP,
    PAIR_REJECTED_LOGP,
    PAIR_CHOSEN_TOKENS,
    PAIR_REJECTED_TOKENS,
    PAIR_REFERENCE_LOGP,
    NUM_PAIR_STATS
};

struct PreferenceLoss {
    Tensor stats;    // fp32 [P, NUM_PAIR_STATS]
    Tensor dlosses;  // fp32 [n]: scale times the gradient of L with respect to the loss of each token of the pairs; the
                     // other tokens' are not written. Null: not computed
    Tensor losses;   // fp32 [n]: −ln π of each loss token, nats
    Tensor rows;     // int32 [P, 3]: PairRows
    Tensor reference;  // fp32 [P, 2]: ℓ_ref of chosen and rejected; null for a method without a reference
    // Only pairs whose chosen begins in [begin, end) are computed, and the absent ones there. They end there, too.
    int64_t begin = 0, end = 0;
    float scale = 1;
    PreferenceOptions options;
};

void preference_loss(const PreferenceLoss& x, Stream stream);

// ℓ of each side: logps [P, 2] fp32 from losses [n] and rows [P, 3]; an absent pair has zeros.
void pair_logps(Tensor logps, Tensor losses, Tensor rows, Stream stream);

// Adds stats [P, NUM_PAIR_STATS] up over the pairs in a fixed order: sums [NUM_PAIR_STATS] fp64. accumulate: add to
// what is there, else overwrite.
void sum_pair_stats(Tensor sums, Tensor stats, bool accumulate, Stream stream);
