#include "parallel/snapshot.h"

namespace {

// An arena of one rank's part. Its tensor has no memory yet.
ParamArena part_arena(DType dtype, int64_t elements, int64_t part, int64_t parts) {
    ParamArena arena = make_tensor(nullptr, dtype, Device::CPU, {elements});
    arena.part = part;
    arena.parts = parts;
    return arena;
}

}  // namespace

Snapshot::Snapshot(const ParamTable& params, DType weights, DType moments, int64_t part, int64_t parts)
    : table(params) {
    const int64_t own = table.total / parts;
    copies.params.weights = part_arena(weights, own, part, parts);
    if (weights != DType::F32) {  // some parameters stay fp32
        copies.params.fp32 = part_arena(DType::F32, table.fp32_total, 0, 1);
        copies.params.fp32.origin = table.total - table.fp32_total;
    }
    copies.m = part_arena(moments, own, part, parts);
    ParamArena v = copies.m.weights;
    v.starts = second_moment_starts(table, part, parts);
    if (!v.starts.empty()) v.data = make_tensor(nullptr, moments, Device::CPU, {v.starts.back()});
    copies.v = v;
    for (const ParamArena* arena : parts_in_use()) total += arena->data.bytes();
}

std::vector<ParamArena*> Snapshot::parts_in_use() {
    std::vector<ParamArena*> parts = {&copies.params.weights, &copies.m.weights, &copies.v.weights};
    if (copies.params.weights.data.dtype != DType::F32) parts.push_back(&copies.params.fp32);
    return parts;
}

void Snapshot::allocate() {
    memory = HostMemory(host_alloc(size_t(total)), host_free);
    char* at = static_cast<char*>(memory.get());
    constexpr int64_t PAGE = 4096;
#pragma omp parallel for schedule(static)
    for (int64_t byte = 0; byte < total; byte += PAGE) at[byte] = 0;
    for (ParamArena* arena : parts_in_use()) {
        arena->data.data = at;
        at += arena->data.bytes();
    }
}

void Snapshot::copy(const TrainingArenas& arenas, Stream stream) {
    const auto copy_part = [&](const WeightArenas& to, const WeightArenas& from) {
        const ParamArena& own = to.weights;
        for (const Param& p : table.params) {
            const ParamArena::Span span = owned_span(p, own.part, own.parts);
            const ParamArena &target = to.exact(p), &source = from.exact(p);
            const ParamArena::Span there = target.span(p, span.begin, span.count);
            if (!there.count) continue;
            const ParamArena::Span here = source.span(p, span.begin, span.count);
            require(here.count == there.count, "snapshot: this rank lacks a part of ", p.name);
            const Tensor bytes = target.elements(there);
            copy_to_host_async(bytes.data, source.elements(here).data, size_t(bytes.bytes()), stream);
        }
    };
    copy_part(copies.params, arenas.params);
    copy_part(copies.m, arenas.m);
    copy_part(copies.v, arenas.v);
    synchronize(stream);
}
