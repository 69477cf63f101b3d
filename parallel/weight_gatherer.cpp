#include "parallel/weight_gatherer.h"

#include <algorithm>

std::vector<KeptGroup> kept_groups(const ParamTable& table, const ParamArena& weights, const GroupBuffers& buffers) {
    std::vector<KeptGroup> all(size_t(table.num_groups()));
    for (int g = 0; g < table.num_groups(); g++)
        if (buffers.buffer(g) >= 0 && table.group_size(g))
            all[size_t(g)] = {table.describe_groups(g, g + 1, weights.data.dtype), buffers.buffer(g),
                              weights.groups(table, g, g + 1), weights.views[size_t(g)]};
    return all;
}

WeightGatherer::WeightGatherer(const Context& context, std::vector<KeptGroup> kept, MemoryPlace where)
    : ctx(context),
      groups(std::move(kept)),
      place(where),
      side(where == MemoryPlace::Host ? create_stream() : context.side) {
    int buffers = 0;
    for (KeptGroup& g : groups) {
        g.name = (place == MemoryPlace::Host ? "copy of " : "all_gather of ") + g.name;
        buffers = std::max(buffers, g.buffer + 1);
    }
    state = std::vector<Buffer>(size_t(buffers));
}

WeightGatherer::~WeightGatherer() {
    if (place == MemoryPlace::Host) destroy_stream(side);
}

void WeightGatherer::begin(Stream stream) {
    pass.record(stream);
    pass.make_wait(side);
    for (Buffer& buffer : state) {
        buffer.holds = -1;
        buffer.read = false;
    }
}

WeightGatherer::Buffer* WeightGatherer::buffer_of(int group) {
    const KeptGroup& g = groups[size_t(group)];
    return g.kept ? &state[size_t(g.buffer)] : nullptr;
}

void WeightGatherer::prefetch(int group) {
    Buffer* const buffer = buffer_of(group);
    if (!buffer || buffer->holds == group) return;
    const KeptGroup& g = groups[size_t(group)];
    if (buffer->read) buffer->free.make_wait(side);
    const Range range(ctx.profiler, g.name.c_str(), side);
    if (place == MemoryPlace::Host)
        copy_to_device(g.whole.data, g.kept.data, size_t(g.kept.bytes()), side);
    else
        ctx.comm->all_gather(g.whole, g.kept, side);
    buffer->filled.record(side);
    buffer->holds = group;
}

void WeightGatherer::use(int group, Stream stream) {
    prefetch(group);
    const Range range(ctx.profiler, "wait for weights");
    if (const Buffer* const buffer = buffer_of(group)) buffer->filled.make_wait(stream);
}

void WeightGatherer::done(int group, Stream stream) {
    Buffer* const buffer = buffer_of(group);
    if (!buffer) return;
    buffer->free.record(stream);
    buffer->read = true;
}

GatheredGroup::GatheredGroup(WeightGatherer* w, int g, int next, Stream s) : gatherer(w), group(g), stream(s) {
    if (!gatherer) return;
    gatherer->use(group, stream);
    if (next >= 0) gatherer->prefetch(next);
}

GatheredGroup::~GatheredGroup() noexcept(false) {
    if (gatherer && !std::uncaught_exceptions()) gatherer->done(group, stream);
}
