#include "runtime/params.h"

#include <algorithm>

#include "runtime/convert.h"
#include "runtime/device.h"

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
    for (const Piece& piece : p.pieces) {
        require(piece.row == covered && piece.rows > 0, "parameter ", p.name, ": its piece ", piece.name,
                " starts at row ", piece.row, ", expected ", covered);
        covered += piece.rows;
    }
    require(covered == p.rows, "parameter ", p.name, ": its pieces cover ", covered, " of ", p.rows, " rows");
}

}  // namespace

int64_t ParamTable::num_weights() const {
    int64_t n = 0;
    for (const Param& p : params) n += p.numel();
    return n;
}

const Param* ParamTable::find(int slot, int layer) const {
    require(params.empty() || !index.empty(), "parameter table: find() needs layout() first");
    if (slot < 0 || layer < -1 || layer + 1 >= columns) return nullptr;
    const size_t at = size_t(slot) * size_t(columns) + size_t(layer + 1);
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
    int slots = 0;
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
        if (p.fp32) {
            p.fp32_offset = fp32_total;
            fp32_total = round_up(fp32_total + p.padded_numel(), ALIGNMENT);
        }
        require(p.slot >= 0 && p.layer >= -1, "parameter ", p.name, ": slot ", p.slot, ", layer ", p.layer,
                " is no role");
        slots = std::max(slots, p.slot + 1);
        columns = std::max(columns, p.layer + 2);
    }
    total = round_up(total, ALIGNMENT * world);
    group_begin.push_back(total);

    index.assign(size_t(slots) * size_t(columns), -1);
    for (size_t i = 0; i < params.size(); i++) {
        int& position = index[size_t(params[i].slot) * size_t(columns) + size_t(params[i].layer + 1)];
        require(position < 0, "parameter table: ", params[i].name, " has the role of ",
                position < 0 ? "" : params[size_t(position)].name);
        position = int(i);
    }
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

Tensor WeightArenas::tensor(const Param& p) const {
    return p.fp32 ? exact(p) : param_tensor(p, weights);
}

Tensor WeightArenas::exact(const Param& p) const {
    if (master) return param_tensor(p, master);
    return p.fp32 && fp32 ? part_of(p, fp32, p.fp32_offset) : param_tensor(p, weights);
}

bool WeightArenas::fits(const ParamTable& table) const {
    const auto holds = [](const Tensor& t, int64_t n) { return t && t.rank == 1 && t.shape[0] >= n; };
    if (!holds(weights, table.total)) return false;
    if (weights.dtype == DType::F32) return !master && !fp32;
    const bool sixteen = weights.dtype == DType::BF16 || weights.dtype == DType::F16;
    const Tensor& exact_arena = master ? master : fp32;
    return sixteen && holds(exact_arena, master ? table.total : table.fp32_total) && exact_arena.dtype == DType::F32;
}

void WeightArenas::store(const Param& p, const float* values, int64_t begin, int64_t n) const {
    const auto put = [&](const Tensor& part) {
        char* const to = static_cast<char*>(part.data) + begin * dtype_size(part.dtype);
        const bool host = part.device == Device::CPU;
        if (host) return convert_from_float(to, part.dtype, values, n);
        if (part.dtype == DType::F32) return copy_to_device(to, values, size_t(n) * sizeof(float), Stream{});
        std::vector<uint16_t> rounded(static_cast<size_t>(n));
        convert_from_float(rounded.data(), part.dtype, values, n);
        copy_to_device(to, rounded.data(), rounded.size() * sizeof(uint16_t), Stream{});
    };
    put(param_tensor(p, weights));
    if (exact(p).data != param_tensor(p, weights).data) put(exact(p));
}

const float* WeightArenas::fetch(const Param& p, std::vector<float>& buffer) const {
    const Tensor part = exact(p);
    const bool host = part.device == Device::CPU;
    if (host && part.dtype == DType::F32) return part.as<float>();
    buffer.resize(static_cast<size_t>(part.numel()));
    if (host) {
        convert_to_float(buffer.data(), part.data, part.dtype, part.numel());
    } else if (part.dtype == DType::F32) {
        copy_to_host(buffer.data(), part.data, buffer.size() * sizeof(float), Stream{});
    } else {
        std::vector<uint16_t> rounded(buffer.size());
        copy_to_host(rounded.data(), part.data, rounded.size() * sizeof(uint16_t), Stream{});
        convert_to_float(buffer.data(), rounded.data(), part.dtype, part.numel());
    }
    return buffer.data();
}
