#include "driver/packed_weights.h"

#include <algorithm>

#include "runtime/files/non_finite.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/initialise.h"
#include "runtime/model/packed_params.h"

namespace {

constexpr int64_t BLOCK_WEIGHTS = 1 << 24;  // that are quantised at a time: 64 MiB in fp32

// The tensor of the model's files that holds a row.
std::string tensor_of(const Param& p, int64_t row) {
    for (const SourceTensor& source : p.sources)
        if (row >= source.row && row < source.row + source.rows) return source.name;
    return p.name;
}

PackedWeight host_rows(std::vector<uint8_t>& bytes, Packing packing, int64_t rows, int64_t cols) {
    const int64_t row_bytes = packed_row_bytes(packing, cols);
    bytes.resize(size_t(rows * row_bytes));
    return {packing, cols, host_tensor(bytes.data(), {rows, row_bytes})};
}

}  // namespace

void quantise_rows(const PackedWeight& rows, const Param& p, int64_t row, const float* values,
                   const std::string& where) {
    packed_quantise(rows, host_tensor(values, {rows.rows.shape[0], p.cols}));
    const int64_t bad = packed_bad_row(rows);
    require(bad < 0, where, ": tensor ", tensor_of(p, row + bad), ": row ", row + bad,
            " has weights that are not finite, or too large for a scale of ", packing_name(rows.packing),
            "; check the weights, or use --weights model");
}

PackedWeights::PackedWeights(const ParamTable& table, Packing how) : packing(how) {
    for (const Param& p : table.params) {
        if (!packs(p, packing)) continue;
        matrices[p.index] = {packing, p.cols, {}};
        plan.add(p.name, DType::U8, {p.padded_rows, packed_row_bytes(packing, p.cols)}, 0, 0);
    }
    plan.assign_offsets();
}

std::vector<int64_t> PackedWeights::other_starts(const ParamTable& table) const {
    return packed_starts(table, 0, 1, [this](const Param& p) { return !packs(p, packing); });
}

void PackedWeights::allocate() {
    memory = Arena(plan.bytes(), "packed weights");
    auto entry = plan.entries().begin();  // in the order of the parameters, as `matrices`
    for (auto& [index, matrix] : matrices) {
        matrix.rows = memory.at(entry->offset, entry->dtype, entry->shape);
        ++entry;
    }
}

const PackedWeight* PackedWeights::find(const Param& p) const {
    const auto found = matrices.find(p.index);
    return found == matrices.end() ? nullptr : &found->second;
}

// Calls fill(rows, row) for blocks of the matrix's rows in host memory. Padding rows become zeros.
template <typename Fill>
void PackedWeights::fill_blocks(const Param& p, Fill fill) const {
    const Tensor& matrix = matrices.at(p.index).rows;
    const int64_t block = std::max<int64_t>(1, BLOCK_WEIGHTS / p.cols);
    std::vector<uint8_t> buffer;
    for (int64_t row = 0; row < p.padded_rows; row += block) {
        const Tensor to = matrix.rows(row, std::min(row + block, p.padded_rows));
        PackedWeight rows{packing, p.cols, to};
        if (to.device != Device::CPU) rows = host_rows(buffer, packing, to.shape[0], p.cols);
        std::memset(rows.rows.data, 0, size_t(rows.rows.bytes()));
        const int64_t in_file = std::clamp<int64_t>(p.rows - row, 0, to.shape[0]);
        rows.rows = rows.rows.rows(0, in_file);
        if (in_file) fill(rows, row);
        if (to.device != Device::CPU) copy_to_device(to.data, buffer.data(), size_t(to.bytes()), Stream{});
    }
}

std::string PackedWeights::load(const ModelSource& source, const ParamTable& table) const {
    if (source.packing) {
        read(StoredWeights(source.directory, table, packing), source.directory, table);
        return "";
    }
    const WeightSource weights = open_weight_source(source, table);
    NonFiniteTensors non_finite;
    std::vector<float> buffer;
    for (const Param& p : table.params) {
        if (!packs(p, packing)) continue;
        bool finite = true;
        const float* const whole = weights.fetch_rows ? nullptr : weights.fetch(p, buffer);
        fill_blocks(p, [&](const PackedWeight& rows, int64_t row) {
            const float* const values =
                whole ? whole + row * p.cols : weights.fetch_rows(p, row, rows.rows.shape[0], buffer);
            quantise_rows(rows, p, row, values, source.directory);
            finite &= packing != Packing::Bf16 || all_finite(values, rows.rows.shape[0] * p.cols);
        });
        if (!finite) non_finite.add(p.sources.empty() ? p.name : p.sources[0].name);
    }
    return non_finite.warning(source.directory);
}

void PackedWeights::read(const StoredWeights& stored, const std::string& where, const ParamTable& table) const {
    for (const Param& p : table.params) {
        if (!packs(p, packing)) continue;
        const std::vector<StoredWeights::Tensor> tensors = stored.tensors(p);
        fill_blocks(p, [&](const PackedWeight& rows, int64_t row) {
            const int64_t bytes = rows.rows.shape[1], begin = row * bytes, end_of_rows = begin + rows.rows.bytes();
            for (const auto& [name, part] : tensors) {
                const int64_t first = std::max(begin, part.begin),
                              last = std::min(end_of_rows, part.begin + part.numel());
                if (first >= last) continue;
                part.file->read(*part.entry, first - part.begin, last - first,
                                rows.rows.as<uint8_t>() + (first - begin));
            }
            const int64_t bad = packed_bad_row(rows);
            require(bad < 0, where, ": tensor ", tensor_of(p, row + bad), ": row ", row + bad,
                    " has a scale that is infinite or NaN; the file is damaged");
        });
    }
}

void PackedWeights::randomise(const ParamTable& table, uint64_t seed) const {
    std::vector<float> values;
    for (const Param& p : table.params) {
        if (!packs(p, packing)) continue;
        fill_blocks(p, [&](const PackedWeight& rows, int64_t row) {
            values.resize(size_t(rows.rows.shape[0] * p.cols));
            initial_values(values.data(), p, seed, row * p.cols, int64_t(values.size()));
            quantise_rows(rows, p, row, values.data(), p.name);
        });
    }
}

std::string PackedWeights::note(const ParamTable& table) const {
    std::string names;
    for (const Param& p : table.params)
        if (may_pack(p) && !packs(p, packing)) names += str(names.empty() ? "" : ", ", p.name, " (", p.cols, ")");
    if (names.empty()) return "";
    return str("--weights ", packing_name(packing), ": ", PACKED_GROUP, " does not divide the rows of ", names,
               ", which stay as they are\n");
}
