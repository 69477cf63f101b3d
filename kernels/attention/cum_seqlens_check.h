// The check of cum_seqlens, which only the CPU backend can read before it starts.
#pragma once

#include "kernels/check.h"

// cum [S + 1] int32: sequence s holds tokens cum[s] … cum[s + 1] − 1, at most `max`.
inline void check_cumulative(const char* op, const char* name, const Tensor& cum, int64_t tokens, int64_t max) {
    const int32_t* c = cum.as<int32_t>();
    const int64_t S = cum.shape[0] - 1;
    require(c[0] == 0, op, ": ", name, "[0] is ", c[0], ", expected 0");
    for (int64_t s = 0; s < S; s++) {
        require(c[s] <= c[s + 1], op, ": ", name, " decreases after sequence ", s);
        require(c[s + 1] - c[s] <= max, op, ": sequence ", s, " of ", name, " has ", c[s + 1] - c[s],
                " tokens, more than the given maximum, ", max);
    }
    require(c[S] <= tokens, op, ": ", name, " ends at ", c[S], ", past the ", tokens, " tokens of the tensor");
}
