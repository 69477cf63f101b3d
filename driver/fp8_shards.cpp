#include "driver/fp8_shards.h"

#include "kernels/fp8.h"
#include "runtime/model/roles.h"

namespace {

// Elements as a matrix that fp8_quantise() takes: the groups' parts and tensors begin at multiples of 128 elements, and
// the sides of a matrix in fp8 are multiples of 16 (check_fp8), so its held elements are, too.
Tensor as_matrix(const Tensor& elements) {
    constexpr int64_t COLUMNS = 128;
    require(elements.shape[0] % COLUMNS == 0, "Fp8Shards: ", elements.shape[0], " elements are no rows of ", COLUMNS);
    return make_tensor(elements.data, elements.dtype, elements.device, {elements.shape[0] / COLUMNS, COLUMNS});
}

// This rank's elements of a parameter in an arena.
ParamArena::Span held(const ParamArena& arena, const Param& p) {
    return arena.span(p, 0, p.numel());
}

}  // namespace

Fp8Shards::Fp8Shards(const ParamTable& table, const Sharding& sharding, DType dtype, int64_t first, int64_t end)
    : first_layer(first), end_layer(end), weight_groups(table.num_groups()) {
    for (const Param& p : table.params)
        if (covers(p) && linear_layer_index(p.role) >= 0) matrices[p.index];
    starts = packed_starts(table, 0, 1, [this](const Param& p) { return covers(p) && !matrices.count(p.index); });
    codes = sharding.arena({}, true);
    codes.origin = table.group_begin[size_t(1 + first)] / codes.parts;
    const int64_t own = table.group_begin[size_t(1 + end)] / codes.parts - codes.origin;
    const auto count = int64_t(matrices.size());
    plan.add("codes", DType::U8, {own}, 0, 0);
    plan.add("scales", DType::F32, {count, FP8_SCALE_FLOATS}, 0, 0);
    plan.add("amaxes", DType::F32, {sharding.world, count}, 0, 0);
    plan.add("newest", DType::F32, {1, count}, 0, 0);
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
    groups.resize(size_t(2 * weight_groups));
    codes.views.resize(size_t(weight_groups));
    for (int64_t l = first_layer; l < end_layer; l++) {
        const auto g = int(1 + l);
        const Tensor& weights = arenas.weights.views[size_t(g)];
        const Tensor whole = make_tensor(weights.data, DType::U8, weights.device, {weights.shape[0]});
        groups[size_t(group(l))] = {"codes of " + table.describe_groups(g, g + 1, DType::U8), groups[size_t(g)].buffer,
                                    codes.groups(table, g, g + 1), whole};
        codes.views[size_t(g)] = whole;
    }
    float* scale = at(SCALES).as<float>();
    for (auto& [index, weight] : matrices) {
        weight.rows = codes.tensor(table.params[index]);
        weight.scale = make_tensor(scale, DType::F32, weight.rows.device, {FP8_SCALE_FLOATS});
        scale += FP8_SCALE_FLOATS;
    }
}

const Fp8Weight* Fp8Shards::find(const Param& p) const {
    const auto found = matrices.find(p.index);
    return found == matrices.end() ? nullptr : &found->second;
}

void Fp8Shards::quantise(const Context& ctx, const ParamTable& table, const WeightArenas& arenas) const {
    const Tensor amaxes = at(AMAXES), own_amaxes = amaxes.rows(ctx.rank, ctx.rank + 1);
    const auto quantise_all = [&](bool measure) {
        float* amax = own_amaxes.as<float>();
        for (const auto& [index, weight] : matrices) {
            const Tensor measured = make_tensor(amax++, DType::F32, amaxes.device, {1});
            const ParamArena::Span own = held(arenas.weights, table.params[index]);
            if (!own.count) continue;
            Fp8Output out{Fp8Format::E4M3, {weight.scale, {}, {}}, {}, {}};
            if (measure)
                out.record.amax = measured;
            else
                out.rows = as_matrix(codes.elements(held(codes, table.params[index])));
            fp8_quantise(out, as_matrix(arenas.weights.elements(own)), ctx.stream);
        }
    };
    device_fill(own_amaxes.data, 0, size_t(own_amaxes.bytes()), ctx.stream);
    quantise_all(true);
    ctx.comm->all_gather(amaxes, own_amaxes, ctx.stream);
    fp8_update_scales(at(SCALES), at(NEWEST), amaxes, Fp8Format::E4M3, 0, ctx.stream);
    quantise_all(false);
    if (!arenas.replicated) return;

    // The sum of one rank's value and zeros is that value.
    const Tensor whole = arenas.replicated.data;
    device_fill(whole.data, 0, size_t(whole.bytes()), ctx.stream);
    for (const Param& p : table.params) {
        const ParamArena::Span own = held(arenas.weights, p);
        if (!arenas.replicated.holds(p) || !own.count) continue;
        const int64_t at = arenas.replicated.span(p, own.begin, own.count).at;
        const Tensor from = arenas.weights.elements(own), to = whole.rows(at, at + own.count);
        device_copy(to.data, from.data, size_t(from.bytes()), ctx.stream);
    }
    ctx.comm->all_reduce(whole, ctx.stream);
}
