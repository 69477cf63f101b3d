#include "parallel/weights.h"

WeightGatherer::WeightGatherer(Comm& c, const ParamTable& t, const ParamArena& w, const GroupPlaces& p, Stream s)
    : comm(c), table(t), weights(w), places(p), side(s), state(size_t(p.num_places())) {}

void WeightGatherer::begin(Stream stream) {
    turn.record(stream);
    turn.hold(side);
    for (Place& p : state) p.holds = -1, p.read = false;
}

void WeightGatherer::end(Stream stream) {
    turn.record(side);
    turn.hold(stream);
}

void WeightGatherer::gather(int group) {
    Place& p = state[size_t(places.place(group))];
    if (p.holds == group || !table.group_size(group)) return;
    if (p.read) p.free.hold(side);
    comm.all_gather(weights.views[size_t(group)], weights.groups(table, group, group + 1), side);
    p.filled.record(side);
    p.holds = group;
}

void WeightGatherer::use(int group, Stream stream) {
    gather(group);
    state[size_t(places.place(group))].filled.hold(stream);
}

void WeightGatherer::prefetch(int group) {
    gather(group);
}

void WeightGatherer::done(int group, Stream stream) {
    Place& p = state[size_t(places.place(group))];
    p.free.record(stream);
    p.read = true;
}

GatheredGroup::GatheredGroup(WeightGatherer* w, int g, int next, Stream s) : gatherer(w), group(g), stream(s) {
    if (!gatherer) return;
    gatherer->use(group, stream);
    if (next >= 0) gatherer->prefetch(next);
}

GatheredGroup::~GatheredGroup() noexcept(false) {
    if (gatherer && !std::uncaught_exceptions()) gatherer->done(group, stream);
}
