#include "runtime/model/params.h"

#include <algorithm>
#include <numeric>

#include "runtime/device/convert_dtype.h"
#include "runtime/device/device.h"
#include "runtime/files/log.h"

namespace {

constexpr int64_t ALIGNMENT = 128;  // elements: 256 bytes of bf16, ArenaPlan's alignment

int64_t checked_add(int64_t a, int64_t b) {
    int64_t sum;
    require(!__builtin_add_overflow(a, b, &sum), "parameter table: its size overflows 64 bits; use a smaller model");
    return sum;
}

int64_t round_up(int64_t n, int64_t multiple) {
    return checked_add(n, multiple - 1) / multiple * multiple;
}

void check(const Param& p) {
    require(p.rows > 0 && p.cols >= 0 && p.padded_rows >= p.rows, "parameter ", p.name, ": its shape [", p.rows,
            " (padded to ", p.padded_rows, "), ", p.cols, "] is not valid");
    int64_t product;
    require(!__builtin_mul_overflow(p.padded_rows, p.row_size(), &product), "parameter ", p.name,
            ": its size overflows 64 bits; use a smaller model");
    int64_t covered = 0;
    for (const SourceTensor& source : p.sources) {
        require(source.row == covered && source.rows > 0, "parameter ", p.name, ": its source ", source.name,
                " starts at row ", source.row, ", expected ", covered);
        covered += source.rows;
    }
    require(covered == p.rows, "parameter ", p.name, ": its sources cover ", covered, " of ", p.rows, " rows");
    const int64_t in_parts = std::accumulate(p.part_rows.begin(), p.part_rows.end(), int64_t(0));
    require(in_parts == p.rows || (p.part_rows.empty() && !facts_of(p.optimizer).whole_matrices), "parameter ", p.name,
            ": its parts cover ", in_parts, " of ", p.rows, " rows");
}

}  // namespace

int64_t ParamTable::num_weights() const {
    int64_t n = 0;
    for (const Param& p : params) n += p.numel();
    return n;
}

bool ParamTable::updates_matrices() const {
    return std::any_of(params.begin(), params.end(),
                       [](const Param& p) { return facts_of(p.optimizer).whole_matrices; });
}

const Param* ParamTable::find(int role, int layer) const {
    require(params.empty() || !index.empty(), "parameter table: find() needs layout() first");
    if (role < 0 || layer < -1 || layer + 1 >= columns) return nullptr;
    const size_t at = size_t(role) * size_t(columns) + size_t(layer + 1);
    return at < index.size() && index[at] >= 0 ? &params[size_t(index[at])] : nullptr;
}

const Param& ParamTable::by_name(const std::string& name) const {
    const auto p = std::find_if(params.begin(), params.end(), [&](const Param& q) { return q.name == name; });
    require(p != params.end(), "parameter table: there is no parameter ", name);
    return *p;
}

void ParamTable::layout(int64_t world) {
    require(world > 0, "parameter table: ", world, " ranks; there must be at least one");
    group_begin = {0};
    total = fp32_total = 0;
    int roles = 0;
    columns = 0;
    for (Param& p : params) {
        check(p);
        const int last_group = int(group_begin.size()) - 1;
        require(p.group >= last_group, "parameter table: ", p.name, " of group ", p.group, " comes after group ",
                last_group);
        for (int g = last_group; g < p.group; g++) {
            total = round_up(total, ALIGNMENT * world);
            group_begin.push_back(total);
        }
        p.offset = total;
        total = round_up(checked_add(total, p.padded_numel()), ALIGNMENT);
        require(p.role >= 0 && p.layer >= -1, "parameter ", p.name, ": role ", p.role, ", layer ", p.layer,
                " is no role");
        roles = std::max(roles, p.role + 1);
        columns = std::max(columns, p.layer + 2);
    }
    total = round_up(total, ALIGNMENT * world);
    group_begin.push_back(total);
    const bool any_fp32 = std::any_of(params.begin(), params.end(), [](const Param& p) { return p.fp32; });
    if (any_fp32) fp32_total = group_size(num_groups() - 1);
    for (Param& p : params) {
        require(p.fp32 == (any_fp32 && p.group == num_groups() - 1), "parameter table: ", p.name, " of group ", p.group,
                ": the last group must hold exactly the parameters that stay fp32");
        p.group_begin = group_begin[size_t(p.group)];
        p.group_size = group_size(p.group);
    }

    index.assign(size_t(roles) * size_t(columns), -1);
    for (size_t i = 0; i < params.size(); i++) {
        int& position = index[size_t(params[i].role) * size_t(columns) + size_t(params[i].layer + 1)];
        require(position < 0, "parameter table: ", params[i].name, " has the role of ",
                position < 0 ? "" : params[size_t(position)].name);
        position = int(i);
        params[i].index = i;
    }
}

std::string ParamTable::describe_groups(int first, int last, DType dtype) const {
    const auto name = [&](int g) -> std::string {
        for (const Param& p : params)
            if (p.group == g) return p.fp32 ? "fp32 parameters" : p.layer < 0 ? p.name : str("layer ", p.layer);
        return "nothing";
    };
    const int64_t elements = group_begin[size_t(last)] - group_begin[size_t(first)];
    return str(name(first), last - first > 1 ? " to " + name(last - 1) : "", ", ",
               human_bytes(elements * dtype_size(dtype)));
}

namespace {

Tensor part_of(const Param& p, const Tensor& arena, int64_t offset) {
    require(arena.rank == 1 && offset + p.padded_numel() <= arena.shape[0], "parameter ", p.name, ": the arena ",
            shape_string(arena), " is too small");
    char* const data = static_cast<char*>(arena.data) + offset * dtype_size(arena.dtype);
    if (p.cols) return make_tensor(data, arena.dtype, arena.device, {p.padded_rows, p.cols});
    return make_tensor(data, arena.dtype, arena.device, {p.padded_rows});
}

}  // namespace

Tensor param_tensor(const Param& p, Tensor arena) {
    return part_of(p, arena, p.offset);
}

Tensor ParamArena::groups(const ParamTable& table, int first, int last) const {
    require(starts.empty(), "parameter arena: a packed arena has no groups");
    return data.rows(table.group_begin[size_t(first)] / parts - origin,
                     table.group_begin[size_t(last)] / parts - origin);
}

Tensor ParamArena::tensor(const Param& p) const {
    require(holds(p) && (starts.empty() || parts == 1), "parameter ", p.name,
            ": a packed arena does not hold it whole");
    if (!starts.empty()) return part_of(p, data, starts[p.index]);
    if (parts == 1 && views.empty()) return part_of(p, data, p.offset - origin);
    require(size_t(p.group) < views.size(), "parameter ", p.name, ": only a part of it is here");
    return part_of(p, views[size_t(p.group)], p.offset - p.group_begin);
}

ParamArena::Span ParamArena::span(const Param& p, int64_t begin, int64_t n) const {
    const int64_t size = p.group_size / parts, own = p.group_begin + part * size;
    const int64_t low = std::max(p.offset + begin, own), high = std::min(p.offset + begin + n, own + size);
    if (low >= high || (!starts.empty() && starts[p.index] < 0)) return {};
    const int64_t at =
        starts.empty() ? p.group_begin / parts + low - own - origin : starts[p.index] + low - std::max(p.offset, own);
    return {low - p.offset, high - low, at};
}

bool ParamArena::holds(int64_t n) const {
    const bool known = data.dtype == DType::F32 || data.dtype == DType::BF16 || data.dtype == DType::F16;
    return data && known && data.rank == 1 && data.shape[0] >= (starts.empty() ? n / parts : starts.back());
}

namespace {

// For spans only: it holds no memory.
ParamArena arena_of(int64_t part, int64_t parts) {
    ParamArena arena;
    arena.part = part;
    arena.parts = parts;
    return arena;
}

}  // namespace

ParamArena::Span owned_span(const Param& p, int64_t part, int64_t parts) {
    return arena_of(part, parts).span(p, 0, p.numel());
}

std::vector<int64_t> packed_starts(const ParamTable& table, int64_t part, int64_t parts,
                                   const std::function<bool(const Param&)>& held) {
    const ParamArena arena = arena_of(part, parts);
    std::vector<int64_t> starts;
    int64_t end = 0;
    for (const Param& p : table.params) {
        starts.push_back(held(p) ? end : -1);
        if (held(p)) end = round_up(end + arena.span(p, 0, p.padded_numel()).count, ALIGNMENT);
    }
    starts.push_back(end);
    return starts;
}

std::vector<int64_t> second_moment_starts(const ParamTable& table, int64_t part, int64_t parts) {
    const auto has = [](const Param& p) { return facts_of(p.optimizer).second_moment; };
    if (std::all_of(table.params.begin(), table.params.end(), has)) return {};
    return packed_starts(table, part, parts, has);
}

int64_t second_moment_size(const ParamTable& table, int64_t parts) {
    int64_t largest = 0;
    for (int64_t part = 0; part < parts; part++) {
        const std::vector<int64_t> starts = second_moment_starts(table, part, parts);
        largest = std::max(largest, starts.empty() ? table.total / parts : starts.back());
    }
    return largest;
}

Tensor WeightArenas::tensor(const Param& p) const {
    if (p.fp32) return exact(p).tensor(p);
    return replicated && replicated.holds(p) ? replicated.tensor(p) : weights.tensor(p);
}

const ParamArena& WeightArenas::exact(const Param& p) const {
    return p.fp32 && fp32 ? fp32 : master ? master : weights;
}

bool WeightArenas::fits(const ParamTable& table) const {
    const bool sixteen = weights.data.dtype != DType::F32;
    if (!weights.holds(table.total) || (!sixteen && master)) return false;
    if (master && !(master.holds(table.total) && master.data.dtype == DType::F32)) return false;
    if (fp32) return fp32.holds(table.fp32_total) && fp32.data.dtype == DType::F32 && fp32.parts == 1;
    return table.fp32_total == 0 || !sixteen;
}

std::pair<int64_t, int64_t> WeightArenas::needed(const Param& p, int64_t begin, int64_t n) const {
    const ParamArena::Span a = weights.span(p, begin, n), b = exact(p).span(p, begin, n);
    if (!a.count || !b.count) return a.count ? std::make_pair(a.begin, a.count) : std::make_pair(b.begin, b.count);
    const int64_t first = std::min(a.begin, b.begin), last = std::max(a.begin + a.count, b.begin + b.count);
    return {first, last - first};
}

void WeightArenas::store(const Param& p, const float* values, int64_t begin, int64_t n, uint16_t* rounded) const {
    const auto put = [&](const ParamArena& arena) {
        const ParamArena::Span span = arena.span(p, begin, n);
        if (!span.count) return;
        const Tensor to = arena.elements(span);
        const float* from = values + (span.begin - begin);
        if (from == to.data) return;
        const bool host = to.device == Device::CPU;
        if (host) return convert_from_float(to.data, to.dtype, from, span.count);
        if (to.dtype == DType::F32) return copy_to_device(to.data, from, size_t(span.count) * sizeof(float), Stream{});
        std::vector<uint16_t> own(rounded ? 0 : size_t(span.count));
        uint16_t* const to_copy = rounded ? rounded : own.data();
        convert_from_float(to_copy, to.dtype, from, span.count);
        copy_to_device(to.data, to_copy, size_t(span.count) * sizeof(uint16_t), Stream{});
    };
    put(weights);
    if (&exact(p) != &weights) put(exact(p));
}

float* WeightArenas::find(const Param& p, int64_t begin, int64_t n) const {
    if (&exact(p) != &weights) return nullptr;
    const ParamArena::Span span = weights.span(p, begin, n);
    if (span.count < n || weights.data.device != Device::CPU || weights.data.dtype != DType::F32) return nullptr;
    return static_cast<float*>(weights.elements(span).data);
}

const float* WeightArenas::fetch(const Param& p, std::vector<float>& buffer) const {
    return fetch_span(exact(p), p, 0, p.padded_numel(), buffer);
}

const float* fetch_span(const ParamArena& arena, const Param& p, int64_t begin, int64_t n, std::vector<float>& buffer) {
    const ParamArena::Span held = arena.span(p, begin, n);
    require(held.count == n, "parameter ", p.name, ": only a part of it is here");
    return fetch_values(arena.elements(held), buffer);
}

const void* fetch_bytes(const ParamArena& arena, const Param& p, int64_t begin, int64_t n, std::vector<char>& buffer) {
    const ParamArena::Span held = arena.span(p, begin, n);
    require(held.count == n, "parameter ", p.name, ": only a part of it is here");
    const Tensor values = arena.elements(held);
    if (values.device == Device::CPU) return values.data;
    buffer.resize(size_t(values.bytes()));
    copy_to_host(buffer.data(), values.data, buffer.size(), Stream{});
    return buffer.data();
}

const float* fetch_values(const Tensor& values, std::vector<float>& buffer) {
    const bool host = values.device == Device::CPU;
    if (host && values.dtype == DType::F32) return values.as<float>();
    buffer.resize(static_cast<size_t>(values.numel()));
    if (host) {
        convert_to_float(buffer.data(), values.data, values.dtype, values.numel());
    } else if (values.dtype == DType::F32) {
        copy_to_host(buffer.data(), values.data, buffer.size() * sizeof(float), Stream{});
    } else {
        std::vector<uint16_t> rounded(buffer.size());
        copy_to_host(rounded.data(), values.data, rounded.size() * sizeof(uint16_t), Stream{});
        convert_to_float(buffer.data(), rounded.data(), values.dtype, values.numel());
    }
    return buffer.data();
}
