#include "parallel/update.h"

#include "runtime/rng.h"

namespace {

UpdateSlice make_piece(const ParamTable& table, const Sharding& sharding, const WeightArenas& weights,
                       const Gradients& grads, const ParamArena& m, const ParamArena& v, double weight_decay, int first,
                       int last) {
    const bool fp32_group = table.fp32_total && last == table.num_groups(), split = sharding.splits_optimizer();
    const auto updated = [&](const ParamArena& arena) {
        if (!arena) return Tensor{};
        const Tensor groups = arena.groups(table, first, last);
        return split && arena.parts == 1 ? sharding.own(groups) : groups;
    };
    const bool apart = fp32_group && weights.fp32;  // in an arena of its own
    const bool sixteen = weights.weights.data.dtype != DType::F32;
    UpdateSlice piece;
    piece.params = updated(apart ? weights.fp32 : sixteen ? weights.master : weights.weights);
    if (sixteen && !apart) piece.params_T = updated(weights.weights);
    piece.m = updated(m), piece.v = updated(v);
    piece.own_grads = grads.own(first, last);
    piece.grads = split ? piece.own_grads : grads.arena.groups(table, first, last);
    const ParamArena& read = apart ? weights.fp32 : weights.weights;
    if (split && read.parts == 1) piece.gathered = read.groups(table, first, last);

    for (const Param& p : table.params) {
        if (p.group < first || p.group >= last) continue;
        const ParamArena::Span span = m.span(p, 0, p.padded_numel());
        if (!span.count) continue;
        const int64_t begin = span.at - table.group_begin[size_t(first)] / m.parts;
        piece.segments.push_back({begin, begin + span.count, p.decay ? float(weight_decay) : 0.0f,
                                  piece.params ? begin : -1, name_hash(p.name), span.begin});
    }
    return piece;
}

}  // namespace

std::vector<UpdateSlice> make_update_slices(const ParamTable& table, const Sharding& sharding,
                                            const WeightArenas& weights, const Gradients& grads, const ParamArena& m,
                                            const ParamArena& v, double weight_decay) {
    const int groups = table.num_groups();
    std::vector<UpdateSlice> pieces;
    for (int first = 0, last; first < groups; first = last) {
        const bool apart = weights.fp32 && first < groups - 1;
        last = sharding.world > 1 ? first + 1 : apart ? groups - 1 : groups;
        if (table.group_begin[size_t(first)] == table.group_begin[size_t(last)]) continue;
        pieces.push_back(make_piece(table, sharding, weights, grads, m, v, weight_decay, first, last));
    }
    return pieces;
}
