#include "runtime/device/profile.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

#ifdef USE_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

void Profiler::start(Stream in_stream, int64_t max_ranges) {
    require(!timing, "Profiler::start: already started");
    stream = in_stream;
    max_records = 1 + max_ranges;
    dropped = 0;
    records.clear();
    records.reserve(static_cast<size_t>(max_records));
    events = std::vector<Event>(static_cast<size_t>(2 * max_records));
    current = -1;
    synchronize(stream);  // earlier work must not count for the first range
    profiler_start();
    timing = true;
    open("");
}

void Profiler::stop() {
    require(timing, "Profiler::stop: not started");
    require(current == 0, "Profiler::stop: range ", records[static_cast<size_t>(current)].name, " is still open");
    close(0);
    timing = false;
    synchronize(stream);
    for (const Record& r : records)
        if (r.other_stream) synchronize(r.stream);
    profiler_stop();
}

int64_t Profiler::open(const char* name, const Stream* other) {
    if (!timing) return -1;
    const int64_t record = static_cast<int64_t>(records.size());
    if (record == max_records) {
        dropped++;
        return -1;
    }
    records.push_back({name, current, other != nullptr, other ? *other : stream});
    events[static_cast<size_t>(2 * record)].record(records.back().stream);
    if (!other) current = record;
    return record;
}

void Profiler::close(int64_t record) {
    const Record& r = records[static_cast<size_t>(record)];
    events[static_cast<size_t>(2 * record + 1)].record(r.stream);
    if (!r.other_stream) current = r.parent;
}

std::string Profiler::timeline() const {
    struct Span {
        const Record* record;
        double from, to;  // ms
    };
    std::vector<Span> spans;
    bool any = false;
    for (size_t i = 1; i < records.size(); i++) {
        const Record& r = records[i];
        any |= r.other_stream;
        const int64_t at = static_cast<int64_t>(i);
        if (r.other_stream || r.parent == 0)
            spans.push_back({&r, elapsed_ms(begin(0), begin(at)), elapsed_ms(begin(0), end(at))});
    }
    if (!any) return "";
    std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.from < b.from; });
    char line[256];
    std::snprintf(line, sizeof line, "%-56s %11s %11s %11s\n", "timeline (| on another stream)", "from ms", "to ms",
                  "ms");
    std::string table = line;
    for (const Span& s : spans) {
        std::snprintf(line, sizeof line, "%-56s %11.3f %11.3f %11.3f\n",
                      (std::string(s.record->other_stream ? "  | " : "") + s.record->name).c_str(), s.from, s.to,
                      s.to - s.from);
        table += line;
    }
    return table;
}

std::string Profiler::report() const {
    require(!timing && !records.empty(), "Profiler::report: nothing was profiled");
    // Records of the same name under the same path are one node.
    struct Node {
        const char* name;
        int64_t calls = 0;
        double ms = 0;
        std::vector<size_t> inside = {};
    };
    std::vector<Node> nodes;
    std::vector<size_t> node_of;  // by record; a parent precedes its children
    for (size_t i = 0; i < records.size(); i++) {
        if (records[i].other_stream) {
            node_of.push_back(0);  // has no children
            continue;
        }
        size_t node = nodes.size();
        if (i > 0) {
            const size_t parent = node_of[static_cast<size_t>(records[i].parent)];
            for (const size_t sibling : nodes[parent].inside)
                if (std::strcmp(nodes[sibling].name, records[i].name) == 0) node = sibling;
            if (node == nodes.size()) nodes[parent].inside.push_back(node);
        }
        if (node == nodes.size()) nodes.push_back({records[i].name});
        node_of.push_back(node);
        nodes[node].calls++;
        nodes[node].ms += elapsed_ms(begin(static_cast<int64_t>(i)), end(static_cast<int64_t>(i)));
    }

    const double whole = nodes[0].ms;
    std::string table;
    const auto print = [&](int depth, const char* name, const std::string& calls, double ms) {
        char line[256];
        std::snprintf(line, sizeof line, "%-44s %7s %11.3f %6.1f%%\n",
                      (std::string(static_cast<size_t>(2 * depth), ' ') + name).c_str(), calls.c_str(), ms,
                      whole > 0 ? 100 * ms / whole : 0);
        table += line;
    };
    const std::function<void(size_t, int)> print_inside = [&](size_t at, int depth) {
        std::vector<size_t> inside = nodes[at].inside;
        if (inside.empty()) return;
        std::stable_sort(inside.begin(), inside.end(), [&](size_t a, size_t b) { return nodes[a].ms > nodes[b].ms; });
        double rest = nodes[at].ms;
        for (const size_t node : inside) {
            print(depth, nodes[node].name, std::to_string(nodes[node].calls), nodes[node].ms);
            print_inside(node, depth + 1);
            rest -= nodes[node].ms;
        }
        print(depth, "(rest)", "", rest);
    };
    char header[256];
    std::snprintf(header, sizeof header, "%-44s %7s %11s %7s\n", "range", "calls", "ms", "share");
    table += header;
    print_inside(0, 0);
    print(0, "total", "1", whole);
    if (dropped > 0) table += str(dropped, " more ranges were not timed (the limit is ", max_records - 1, ")\n");
    return table + timeline();
}

Range::Range(Profiler& p, const char* name) : Range(p, name, nullptr) {}

Range::Range(Profiler& p, const char* name, Stream other) : Range(p, name, &other) {}

Range::Range(Profiler& p, const char* name, const Stream* other) : profiler(p) {
#ifdef USE_CUDA
    nvtxRangePushA(name);
#endif
    record = profiler.open(name, other);
}

Range::~Range() {
#ifdef USE_CUDA
    nvtxRangePop();
#endif
    if (record < 0) return;
    try {
        profiler.close(record);
    } catch (const Error&) {
        // Only a failed device cannot record an event; the next wait reports the error.
    }
}
