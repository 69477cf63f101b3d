#include "driver/packed_weights.h"

#include <algorithm>
#include <cstring>

#include "runtime/files/non_finite.h"
#include "runtime/files/weight_files.h"
#include "runtime/model/initialise.h"
#include "runtime/model/packed_params.h"
#include "runtime/text.h"

namespace {

constexpr int64_t BLOCK_WEIGHTS = 1 << 24;  // that are quantised at a time: 64 MiB in fp32

// The tensor of the model's files that holds a row.
std::string tensor_of(const Param& p, int64_t row) {
    for (const SourceTensor& source : p.sources)
        if (row >= source.row && row < source.row + source.rows) return source.name;
    return p.name;
}

// Of packed rows [row, …) of a file.
void require_scales(const PackedWeight& rows, const Param& p, int64_t row, const std::string& where) {
    const int64_t bad = packed_bad_row(rows);
    require(bad < 0, where, ": tensor ", tensor_of(p, row + bad), ": row ", row + bad,
            " has a scale that is infinite or NaN; the file is damaged");
}

// The type of a GGUF file whose codes and scales are those of a packing; none: F32, whose values are quantised.
GgufType gguf_type(Packing packing) {
    return packing == Packing::Int8 ? GgufType::Q8_0 : packing == Packing::Int4 ? GgufType::Q4_0 : GgufType::F32;
}

const GgufTypeFacts& type_of(const StoredWeights::Tensor& tensor) {
    return *tensor.part.gguf->tensor(tensor.part.gguf_name).type;
}

bool all_of_type(const std::vector<StoredWeights::Tensor>& tensors, Packing packing) {
    const GgufType wanted = gguf_type(packing);
    return wanted != GgufType::F32 &&
           std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return type_of(t).type() == wanted; });
}

bool all_quantised(const std::vector<StoredWeights::Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const auto& t) { return type_of(t).quantised(); });
}

// A block of GGUF is its scale, then its codes; a packed row has all codes first.
void unpack_blocks(uint8_t* row, const uint8_t* blocks, Packing packing, int64_t cols) {
    const int64_t codes = packed_code_bytes(packing, PACKED_GROUP), groups = cols / PACKED_GROUP;
    uint8_t* const scales = row + packed_code_bytes(packing, cols);
    for (int64_t g = 0; g < groups; g++, blocks += 2 + codes) {
        std::memcpy(scales + 2 * g, blocks, 2);
        std::memcpy(row + g * codes, blocks + 2, size_t(codes));
    }
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

std::optional<Packings> gguf_packing(const ModelSource& source, const ParamTable& table) {
    if (!source.gguf || !source.adapter.empty()) return {};
    const StoredWeights stored = stored_weights(source, table);
    for (const Packing packing : {Packing::Int8, Packing::Int4}) {
        Packings packings = packing;
        bool possible = true;
        for (const Param& p : table.params) {
            if (!packs(p, packing) || all_of_type(stored.tensors(p), packing)) continue;
            possible &= is_embedding_or_head(p) && all_quantised(stored.tensors(p));
            (p.role == WTE ? packings.embedding : packings.head) = Packing::Int8;
        }
        if (possible) return packings;
    }
    return {};
}

PackedWeights::PackedWeights(const ParamTable& table, const Packings& how) : packings(how) {
    for (const Param& p : table.params) {
        if (!packs(p, packings)) continue;
        const Packing packing = packing_of(p, packings);
        matrices[p.index] = {packing, p.cols, {}};
        plan.add(p.name, DType::U8, {p.padded_rows, packed_row_bytes(packing, p.cols)}, 0, 0);
    }
    plan.assign_offsets();
}

std::vector<int64_t> PackedWeights::other_starts(const ParamTable& table) const {
    return packed_starts(table, 0, 1, [this](const Param& p) { return !packs(p, packings); });
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
    const auto& [packing, cols, matrix] = matrices.at(p.index);
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
        read(StoredWeights(source.directory, table, *source.packing), source.directory, table);
        return "";
    }
    const WeightSource weights = open_weight_source(source, table);
    std::optional<StoredWeights> gguf;
    if (source.gguf && source.adapter.empty()) gguf = stored_weights(source, table);
    NonFiniteTensors non_finite;
    bool reads_codes = false;
    std::string rounded;
    std::vector<float> buffer;
    for (const Param& p : table.params) {
        if (!packs(p, packings)) continue;
        const Packing packing = packing_of(p, packings);
        const auto tensors = gguf ? gguf->tensors(p) : std::vector<StoredWeights::Tensor>{};
        if (gguf && all_of_type(tensors, packing)) {
            read_gguf(tensors, source.directory, p);
            reads_codes = true;
            continue;
        }
        for (size_t i = 0; is_embedding_or_head(p) && i < tensors.size(); i++)
            rounded += str(source.directory, ": tensor ", tensors[i].part.gguf_name, " is ", type_of(tensors[i]).name,
                           "; it is rounded to ", packing_name(packing), "\n");
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
    return (reads_codes ? rounded : "") + non_finite.warning(source.directory);
}

void PackedWeights::read(const StoredWeights& stored, const std::string& where, const ParamTable& table) const {
    for (const Param& p : table.params) {
        if (!packs(p, packings)) continue;
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
            require_scales(rows, p, row, where);
        });
    }
}

void PackedWeights::read_gguf(const std::vector<StoredWeights::Tensor>& tensors, const std::string& where,
                              const Param& p) const {
    const Packing packing = packing_of(p, packings);
    const int64_t row_bytes = facts_of(gguf_type(packing)).bytes(p.cols);
    std::vector<uint8_t> blocks;
    fill_blocks(p, [&](const PackedWeight& rows, int64_t row) {
        for (const auto& [name, part] : tensors) {
            const int64_t first = part.begin / p.cols, begin = std::max(first, row),
                          end = std::min(first + part.rows, row + rows.rows.shape[0]);
            if (begin >= end) continue;
            blocks.resize(size_t((end - begin) * row_bytes));
            const int64_t at_once = part.interleaved_head_size ? 1 : end - begin;  // rows
            for (int64_t r = begin; r < end; r += at_once)
                part.gguf->read_blocks(part.gguf_name, part.file_row(r - first) * p.cols, at_once * p.cols,
                                       &blocks[size_t((r - begin) * row_bytes)]);
            uint8_t* const to = rows.rows.rows(begin - row, end - row).as<uint8_t>();
#pragma omp parallel for schedule(static)
            for (int64_t r = 0; r < end - begin; r++)
                unpack_blocks(to + r * rows.rows.shape[1], &blocks[size_t(r * row_bytes)], packing, p.cols);
        }
        require_scales(rows, p, row, where);
    });
}

void PackedWeights::randomise(const ParamTable& table, uint64_t seed) const {
    std::vector<float> values;
    for (const Param& p : table.params) {
        if (!packs(p, packings)) continue;
        fill_blocks(p, [&](const PackedWeight& rows, int64_t row) {
            values.resize(size_t(rows.rows.shape[0] * p.cols));
            initial_values(values.data(), p, seed, row * p.cols, int64_t(values.size()));
            quantise_rows(rows, p, row, values.data(), p.name);
        });
    }
}

std::string PackedWeights::note(const ParamTable& table) const {
    std::vector<std::string> names;  // the same in all layers
    for (const Param& p : table.params) {
        if (!may_pack(p) || packs(p, packings)) continue;
        const std::string number = str("layers.", p.layer, "."), name = str(p.name, " (", p.cols, ")");
        const bool in_layer = starts_with(name, number);
        names.push_back(in_layer ? "layers.*." + name.substr(number.size()) : name);
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    if (names.empty()) return "";
    return str("--weights ", packing_name(packings.blocks), ": ", PACKED_GROUP, " does not divide the rows of ",
               joined(names), ", which stay as they are\n");
}
