// One thread: a token takes 50 ns, and the model thousands of times as long.
#include "kernels/policy_loss.h"

#include "kernels/policy_formula.h"
#include "kernels/policy_loss_check.h"

void policy_loss(const PolicyLoss& x, Stream) {
    const int64_t n = check_policy_loss(x);
    const PolicyArrays arrays = arrays_of(x);
    double sums[NUM_POLICY_STATS] = {};
    for (int64_t i = 0; i < n; i++) add_policy_token(sums, arrays, i);
    double* const stats = x.stats.as<double>();
    for (int stat = 0; stat < NUM_POLICY_STATS; stat++)
        stats[stat] = x.accumulate ? combined_policy_stat(stat, stats[stat], sums[stat]) : sums[stat];
}
