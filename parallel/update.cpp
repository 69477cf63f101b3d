#include "parallel/update.h"

#include "runtime/rng.h"

namespace {

UpdateSlice make_slice(const ParamTable& table, const Sharding& sharding, const WeightArenas& weights,
                       const Gradients& grads, const ParamArena& m, const ParamArena& v, double weight_decay, int first,
                       int last) {
    const bool fp32_group = table.fp32_total && last == table.num_groups(), split = sharding.splits_optimizer();
    const auto updated = [&](const ParamArena& arena) {
        if (!arena) return Tensor{};
        const Tensor groups = arena.groups(table, first, last);
        return split && arena.parts == 1 ? sharding.own(groups) : groups;
    };
    const bool apart = fp32_group && weights.fp32;  // the slice has an arena of its own
    const bool is_16bit = weights.weights.data.dtype != DType::F32;
    UpdateSlice slice;
    slice.params = updated(apart ? weights.fp32 : is_16bit ? weights.master : weights.weights);
    if (is_16bit && !apart) slice.params_T = updated(weights.weights);
    slice.m = updated(m), slice.v = updated(v);
    slice.own_grads = grads.own(first, last);
    slice.grads = split ? slice.own_grads : grads.arena.groups(table, first, last);
    const ParamArena& read = apart ? weights.fp32 : weights.weights;
    if (split && read.parts == 1) slice.gathered = read.groups(table, first, last);

    for (const Param& p : table.params) {
        if (p.group < first || p.group >= last) continue;
        const ParamArena::Span span = m.span(p, 0, p.padded_numel());
        if (!span.count) continue;
        const int64_t begin = span.at - table.group_begin[size_t(first)] / m.parts;
        slice.segments.push_back({begin, begin + span.count, p.decay ? float(weight_decay) : 0.0f,
                                  slice.params ? begin : -1, name_hash(p.name), span.begin});
    }
    return slice;
}

}  // namespace

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, double weight_decay) {
    const int groups = table.num_groups();
    std::vector<UpdateSlice> slices;
    for (int first = 0, last; first < groups; first = last) {
        const bool apart = weights.fp32 && first < groups - 1;
        last = sharding.world > 1 ? first + 1 : apart ? groups - 1 : groups;
        if (table.group_begin[size_t(first)] == table.group_begin[size_t(last)]) continue;
        slices.push_back(make_slice(table, sharding, weights, grads, m, v, weight_decay, first, last));
    }
    return slices;
}
