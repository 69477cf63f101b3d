// Random weights.
#pragma once

#include "runtime/device/device.h"
#include "runtime/model/params.h"

// Fills the arenas by the table's init_std, init_value and init_step. A weight depends on (seed, its name, its index)
// alone: not on dtype, rank or machine. Copies go through the device's default queue.
void initialise_weights(const ParamTable& table, const WeightArenas& arenas, uint64_t seed, Stream stream);
