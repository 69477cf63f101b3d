// Random initial weights.
#pragma once

#include "runtime/device/device.h"
#include "runtime/model/params.h"

// Elements [begin, begin + n) of a parameter, on the host.
void initial_values(float* out, const Param& p, uint64_t seed, int64_t begin, int64_t n);

// Initialises the arenas from the table's init_std, init_value, init_step and init_bound. A weight depends only on
// (seed, parameter name, index), not on dtype, rank or host. Copies use the device's default stream.
void initialise_weights(const ParamTable& table, const WeightArenas& arenas, uint64_t seed, Stream stream);
