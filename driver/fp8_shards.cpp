#include "driver/fp8_shards.h"

#include "runtime/model/roles.h"

namespace {

// This rank's elements of a parameter in an arena.
ParamArena::Span held(const ParamArena& arena, const Param& p) {
    return arena.span(p, 0, p.numel());
}

}  // namespace

Fp8Shards::Fp8Shards(const ParamTable& table, const Sharding& sharding, DType dtype, int64_t first, int64_t end)
    : first_layer(first), end_layer(end), weight_groups(table.num_groups()) {
    starts = packed_starts(table, 0, 1, [this](const Param& p) { return covers(p) && linear_layer_index(p.role) < 0; });
    codes = sharding.arena({}, true);
    codes.origin = table.group_begin[size_t(1 + first)] / codes.parts;
    const int64_t own = table.group_begin[size_t(1 + end)] / codes.parts - codes.origin;
    plan.add("codes", DType::U8, {own}, 0, 0);
    plan.add("replicated", dtype, {starts.back()}, 0, 0);
    plan.assign_offsets();
}

Tensor Fp8Shards::at(Entry entry) const {
    const ArenaPlan::Entry& e = plan.entries()[entry];
    return memory.at(e.offset, e.dtype, e.shape);
}

void Fp8Shards::allocate(const Context& ctx, const ParamTable& table, WeightArenas& arenas,
                         std::vector<KeptGroup>& groups) {
    memory = Arena(bytes(), "fp8 weights");
    device_fill(memory.at(0, DType::U8, {bytes()}).data, 0, size_t(bytes()), ctx.stream);
    codes.data = at(CODES);
    if (starts.back()) {
        arenas.replicated = at(REPLICATED);
        arenas.replicated.starts = starts;
    }
    groups.resize(2 * size_t(weight_groups));
    codes.views.resize(size_t(weight_groups));
    for (int64_t l = first_layer; l < end_layer; l++) {
        const auto g = int(1 + l);
        const Tensor& weights = arenas.weights.views[size_t(g)];
        const Tensor whole = make_tensor(weights.data, DType::U8, weights.device, {weights.shape[0]});
        groups[size_t(group(l))] = {"codes of " + table.describe_groups(g, g + 1, DType::U8), groups[size_t(g)].buffer,
                                    codes.groups(table, g, g + 1), whole};
        codes.views[size_t(g)] = whole;
    }
}

void Fp8Shards::quantise(const Context& ctx, const ParamTable& table, const WeightArenas& arenas,
                         const Fp8State& fp8) const {
    const Tensor whole = arenas.replicated.data;
    if (whole) device_fill(whole.data, 0, size_t(whole.bytes()), ctx.stream);
    for (const Param& p : table.params) {
        const ParamArena::Span own = held(arenas.weights, p);
        if (!covers(p) || !own.count) continue;
        const Tensor from = arenas.weights.elements(own);
        if (starts[p.index] < 0) {
            fp8.quantise_weight(Role(p.role), p.layer, from, codes.elements(held(codes, p)), {}, ctx.stream);
        } else {
            const int64_t to = starts[p.index] + own.begin;
            device_copy(whole.rows(to, to + own.count).data, from.data, size_t(from.bytes()), ctx.stream);
        }
    }
    if (whole) ctx.comm->all_reduce(whole, ctx.stream);  // the sum of one rank's values and zeros is these values
}
