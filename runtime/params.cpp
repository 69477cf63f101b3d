#include "runtime/params.h"

#include <algorithm>

namespace {

constexpr int64_t ALIGNMENT = 16;  // elements: 64 bytes of fp32

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
    total = 0;
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

Tensor param_tensor(const Param& p, Tensor arena) {
    require(arena.rank == 1 && arena.dtype == DType::F32 && p.offset + p.padded_numel() <= arena.shape[0], "parameter ",
            p.name, ": the arena ", shape_string(arena), " is not fp32 or too small");
    float* data = static_cast<float*>(arena.data) + p.offset;
    if (p.cols) return make_tensor(data, DType::F32, arena.device, {p.padded_rows, p.cols});
    return make_tensor(data, DType::F32, arena.device, {p.padded_rows});
}
