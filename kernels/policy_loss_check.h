// Argument checks of policy_loss, for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/policy_formula.h"

inline void check_policy_options(const char* op, const PolicyOptions& o, bool has_reference) {
    require(o.clip_low >= 0, op, ": clip_low is ", o.clip_low, ", expected at least 0");
    require(o.clip_high >= 0, op, ": clip_high is ", o.clip_high, ", expected at least 0");
    require(o.kl >= 0, op, ": kl is ", o.kl, ", expected at least 0");
    require(o.kl == 0 || has_reference, op, ": reference_logps is missing with kl ", o.kl);
    require(o.importance_cap >= 1, op, ": importance_cap is ", o.importance_cap, ", expected at least 1");
}

// Returns the number of tokens.
inline int64_t check_policy_loss(const PolicyLoss& x) {
    const char* op = "policy_loss";
    check_policy_options(op, x.options, bool(x.reference_logps));
    require(x.losses.rank == 1, op, ": losses is ", dtype_name(x.losses.dtype), " ", shape_string(x.losses),
            ", expected fp32 [n]");
    const int64_t n = x.losses.shape[0];
    check_tensor(op, "losses", x.losses, DType::F32, {n});
    check_tensor(op, "dlosses", x.dlosses, DType::F32, {n}, Given::Optional);
    check_tensor(op, "old_logps", x.old_logps, DType::F32, {n}, Given::Optional);
    check_tensor(op, "sampler_logps", x.sampler_logps, DType::F32, {n}, Given::Optional);
    check_tensor(op, "reference_logps", x.reference_logps, DType::F32, {n}, Given::Optional);
    check_tensor(op, "advantages", x.advantages, DType::F32, {n});
    check_tensor(op, "weights", x.weights, DType::F32, {n});
    check_tensor(op, "stats", x.stats, DType::F64, {NUM_POLICY_STATS});
    return n;
}

inline PolicyArrays arrays_of(const PolicyLoss& x) {
    return {x.dlosses.as<float>(),
            x.losses.as<float>(),
            x.old_logps.as<float>(),
            x.sampler_logps.as<float>(),
            x.reference_logps.as<float>(),
            x.advantages.as<float>(),
            x.weights.as<float>(),
            x.scale,
            x.options};
}
