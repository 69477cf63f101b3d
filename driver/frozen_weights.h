// What the two kinds of quantised frozen weights (driver/nf4_base.h, driver/fp8_base.h) share: each parameter that
// base.quantises() accepts comes to base.store(p, values) as fp32 values on the host, in memory order.
#pragma once

#include <vector>

#include "runtime/files/weight_files.h"
#include "runtime/model/initialise.h"
#include "runtime/model/params.h"

// From a model's files; load_weights() leaves these parameters out.
template <typename Base>
void load_frozen(const Base& base, const WeightSource& source, const ParamTable& table) {
    std::vector<float> buffer;
    for (const Param& p : table.params)
        if (base.quantises(p)) base.store(p, source.fetch(p, buffer));
}

// The initial weights of a seed, one parameter after the other (runtime/model/initialise.h).
template <typename Base>
void initialise_frozen(const Base& base, const ParamTable& table, uint64_t seed) {
    std::vector<float> values;
    for (const Param& p : table.params) {
        if (!base.quantises(p)) continue;
        values.resize(size_t(p.numel()));
        initial_values(values.data(), p, seed, 0, p.numel());
        base.store(p, values.data());
    }
}
