#include "parallel/weight_gatherer.h"

WeightGatherer::WeightGatherer(const Context& context, const ParamTable& t, const ParamArena& w, const GroupBuffers& s)
    : ctx(context), table(t), weights(w), buffers(s), state(size_t(s.num_buffers())) {
    for (int g = 0; g < t.num_groups(); g++)
        names.push_back("all_gather of " + t.describe_groups(g, g + 1, w.data.dtype));
}

void WeightGatherer::begin(Stream stream) {
    pass.record(stream);
    pass.make_wait(ctx.side);
    for (Buffer& buffer : state) {
        buffer.holds = -1;
        buffer.read = false;
    }
}

void WeightGatherer::gather(int group) {
    Buffer& buffer = state[size_t(buffers.buffer(group))];
    if (buffer.holds == group || !table.group_size(group)) return;
    if (buffer.read) buffer.free.make_wait(ctx.side);
    const Range range(ctx.profiler, names[size_t(group)].c_str(), ctx.side);
    ctx.comm->all_gather(weights.views[size_t(group)], weights.groups(table, group, group + 1), ctx.side);
    buffer.filled.record(ctx.side);
    buffer.holds = group;
}

void WeightGatherer::use(int group, Stream stream) {
    gather(group);
    const Range range(ctx.profiler, "wait for weights");
    state[size_t(buffers.buffer(group))].filled.make_wait(stream);
}

void WeightGatherer::prefetch(int group) {
    gather(group);
}

void WeightGatherer::done(int group, Stream stream) {
    Buffer& buffer = state[size_t(buffers.buffer(group))];
    buffer.free.record(stream);
    buffer.read = true;
}

GatheredGroup::GatheredGroup(WeightGatherer* w, int g, int next, Stream s) : gatherer(w), group(g), stream(s) {
    if (!gatherer) return;
    gatherer->use(group, stream);
    if (next >= 0) gatherer->prefetch(next);
}

GatheredGroup::~GatheredGroup() noexcept(false) {
    if (gatherer && !std::uncaught_exceptions()) gatherer->done(group, stream);
}
