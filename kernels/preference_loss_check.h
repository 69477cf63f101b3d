// Argument checks of the preference losses, for both backends.
#pragma once

#include "kernels/check.h"
#include "kernels/preference_loss.h"

inline void check_preference_options(const char* op, const PreferenceOptions& o) {
    const bool logistic = o.method == PreferenceMethod::DPO || o.method == PreferenceMethod::SimPO;
    require(o.beta > 0, op, ": beta is ", o.beta, ", expected a positive number");
    require(o.label_smoothing >= 0 && o.label_smoothing < 0.5f, op, ": label_smoothing is ", o.label_smoothing,
            ", expected at least 0 and less than 0.5");
    require(o.label_smoothing == 0 || logistic, op, ": label_smoothing is ", o.label_smoothing, ", expected 0 with ",
            PREFERENCE_NAMES[size_t(o.method)]);
    require(o.margin >= 0, op, ": margin is ", o.margin, ", expected at least 0");
    require(o.margin == 0 || o.method == PreferenceMethod::SimPO, op, ": margin is ", o.margin, ", expected 0 with ",
            PREFERENCE_NAMES[size_t(o.method)]);
}

struct PreferenceSizes {
    int64_t P, n;  // pairs, tokens
};

inline PreferenceSizes check_pairs(const char* op, const Tensor& losses, const Tensor& rows) {
    require(losses.rank == 1, op, ": losses is ", dtype_name(losses.dtype), " ", shape_string(losses),
            ", expected fp32 [n]");
    require(rows.rank == 2, op, ": rows is ", dtype_name(rows.dtype), " ", shape_string(rows),
            ", expected int32 [P, 3]");
    const PreferenceSizes z{rows.shape[0], losses.shape[0]};
    check_tensor(op, "losses", losses, DType::F32, {z.n});
    check_tensor(op, "rows", rows, DType::I32, {z.P, 3});
    check_contiguous(op, "rows", rows);
    return z;
}

inline PreferenceSizes check_preference_loss(const PreferenceLoss& x) {
    const char* op = "preference_loss";
    check_preference_options(op, x.options);
    const PreferenceSizes z = check_pairs(op, x.losses, x.rows);
    check_tensor(op, "stats", x.stats, DType::F32, {z.P, NUM_PAIR_STATS});
    check_contiguous(op, "stats", x.stats);
    check_tensor(op, "dlosses", x.dlosses, DType::F32, {z.n}, Given::Optional);
    const char* method = PREFERENCE_NAMES[size_t(x.options.method)];
    require(bool(x.reference) == has_reference(x.options.method), op, ": reference is ",
            x.reference ? "given with " : "missing with ", method);
    check_tensor(op, "reference", x.reference, DType::F32, {z.P, 2}, Given::Optional);
    check_contiguous(op, "reference", x.reference);
    require(0 <= x.begin && x.begin <= x.end && x.end <= z.n, op, ": [begin, end) is [", x.begin, ", ", x.end,
            "), expected a range of the ", z.n, " losses");
    return z;
}

inline PreferenceSizes check_pair_logps(const Tensor& logps, const Tensor& losses, const Tensor& rows) {
    const char* op = "pair_logps";
    const PreferenceSizes z = check_pairs(op, losses, rows);
    check_tensor(op, "logps", logps, DType::F32, {z.P, 2});
    check_contiguous(op, "logps", logps);
    return z;
}

// Returns the number of pairs.
inline int64_t check_sum_pair_stats(const Tensor& sums, const Tensor& stats) {
    const char* op = "sum_pair_stats";
    require(stats.rank == 2, op, ": stats is ", dtype_name(stats.dtype), " ", shape_string(stats),
            ", expected fp32 [P, ", int(NUM_PAIR_STATS), "]");
    check_tensor(op, "stats", stats, DType::F32, {stats.shape[0], NUM_PAIR_STATS});
    check_contiguous(op, "stats", stats);
    check_tensor(op, "sums", sums, DType::F64, {NUM_PAIR_STATS});
    return stats.shape[0];
}
