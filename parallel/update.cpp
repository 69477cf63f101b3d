#include "parallel/update.h"

#include "runtime/rng.h"

namespace {

// What slices are views of: the arguments of make_update_slices().
struct Sources {
    const ParamTable& table;
    const Sharding& sharding;
    const WeightArenas& weights;
    const Gradients& grads;
    const ParamArena &m, &v;
    const HyperparametersByGroup& rates;
};

UpdateSlice make_slice(const Sources& from, int first, int last) {
    const auto& [table, sharding, weights, grads, m, v, rates] = from;
    const bool fp32_group = table.fp32_total && last == table.num_groups(), split = sharding.splits_optimizer();
    const auto updated = [&](const ParamArena& arena) {
        if (!arena) return Tensor{};
        const Tensor groups = arena.groups(table, first, last);
        return split && arena.parts == 1 ? sharding.own(groups) : groups;
    };
    const bool apart = fp32_group && weights.fp32;  // the slice has an arena of its own
    const bool is_16bit = weights.weights.data.dtype != DType::F32;
    UpdateSlice slice;
    slice.first_group = first;
    slice.last_group = last;
    slice.params = updated(apart ? weights.fp32 : is_16bit ? weights.master : weights.weights);
    if (is_16bit && !apart) slice.params_T = updated(weights.weights);
    slice.m = updated(m);
    slice.v = v.data;
    slice.own_grads = grads.own(first, last);
    slice.grads = split ? slice.own_grads : grads.arena.groups(table, first, last);
    const ParamArena& read = apart ? weights.fp32 : weights.weights;
    if (split && read.parts == 1) slice.gathered = read.groups(table, first, last);

    for (const Param& p : table.params) {
        if (p.group < first || p.group >= last || facts_of(p.optimizer).whole_matrices) continue;
        const ParamArena::Span span = m.span(p, 0, p.padded_numel());
        if (!span.count) continue;
        ParamSegment segment = param_segment(table, slice, m, p, span, rates);
        if (facts_of(p.optimizer).second_moment) segment.v_begin = v.span(p, 0, p.padded_numel()).at;
        slice.segments[size_t(p.optimizer)].push_back(segment);
    }
    return slice;
}

}  // namespace

ParamSegment param_segment(const ParamTable& table, const UpdateSlice& slice, const ParamArena& m, const Param& p,
                           const ParamArena::Span& span, const HyperparametersByGroup& rates) {
    const GroupHyperparameters& rate = rates[size_t(p.rate_group)];
    const int64_t begin = span.at - table.group_begin[size_t(slice.first_group)] / m.parts;
    ParamSegment segment;
    segment.begin = begin;
    segment.end = begin + span.count;
    segment.weight_decay = p.decay ? rate.weight_decay : 0.0f;
    segment.fp32_begin = slice.params ? begin : -1;
    segment.key = name_hash(p.name);
    segment.first_element = span.begin;
    segment.lr_scale = rate.lr_scale;
    return segment;
}

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, const HyperparametersByGroup& rates) {
    const int groups = table.num_groups();
    std::vector<UpdateSlice> slices;
    for (int first = 0, last; first < groups; first = last) {
        const bool apart = weights.fp32 && first < groups - 1;
        last = sharding.world > 1 ? first + 1 : apart ? groups - 1 : groups;
        if (table.group_begin[size_t(first)] == table.group_begin[size_t(last)]) continue;
        slices.push_back(make_slice({table, sharding, weights, grads, m, v, rates}, first, last));
    }
    return slices;
}

void update_elements(const UpdateSlice& s, const ElementwiseOptions& options, Tensor scalars, Stream stream) {
    for (size_t type = 0; type < NUM_OPTIMIZERS; type++) {
        const ParamSegment* const segments = s.segments[type].data();
        const int64_t n = int64_t(s.segments[type].size());
        if (!n) continue;
        switch (OptimizerType(type)) {
            case OptimizerType::AdamW:
                adamw_update(s.params, s.params_T, s.m, s.v, s.grads, segments, n, options.adamw, scalars, stream);
                break;
            case OptimizerType::Muon:  // has no segments here
                break;
        }
    }
}
