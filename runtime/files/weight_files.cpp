#include "runtime/files/weight_files.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/device/convert_dtype.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"
#include "runtime/files/non_finite.h"
#include "runtime/model/packed_params.h"
#include "runtime/text.h"

using nlohmann::json;

std::string shape_string(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); i++) text += str(i ? ", " : "", shape[i]);
    return text + "]";
}

std::string bare_name(const std::string& name) {
    for (const char* prefix : {"transformer.", "model."}) {
        if (starts_with(name, prefix)) return name.substr(std::strlen(prefix));
    }
    return name;
}

void check_arenas(const ParamTable& table, const WeightArenas& arenas, const std::string& where) {
    require(arenas.fits(table), where, ": the arena is ", dtype_name(arenas.weights.data.dtype), " ",
            shape_string(arenas.weights.data), ", expected fp32 [", table.total,
            "], or 16-bit weights beside fp32 ones");
}

namespace {

constexpr const char* WEIGHTS = "model.safetensors";
constexpr const char* WEIGHTS_INDEX = "model.safetensors.index.json";

// Tensors that old versions of transformers saved though they hold no weights: causal masks and RoPE frequencies.
bool is_buffer(const std::string& name) {
    for (const char* end : {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"}) {
        if (ends_with(name, end)) return true;
    }
    return false;
}

// The tensors of a model directory by bare name.
struct WeightFiles {
    struct Location {
        const SafetensorsFile* file;
        std::string name;
        const SafetensorsEntry& entry() const { return file->entry(name); }
        std::string where() const { return str(file->path(), ": tensor ", name); }
    };
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    std::map<std::string, Location> tensors;

    void add(const std::string& path) {
        files.push_back(std::make_unique<SafetensorsFile>(path));
        for (const auto& [name, entry] : files.back()->entries()) {
            const auto [location, added] = tensors.insert({bare_name(name), {files.back().get(), name}});
            require(added, path, ": tensor ", name, " occurs twice (also ", location->second.where(), "); remove one");
        }
    }
};

WeightFiles open_weights(const std::string& directory, const std::string& weights_file) {
    WeightFiles weights;
    const std::string single = join_path(directory, weights_file), index = join_path(directory, WEIGHTS_INDEX);
    if (path_exists(single)) {
        weights.add(single);
        return weights;
    }
    require(path_exists(index), directory, ": holds neither ", weights_file, " nor ", WEIGHTS_INDEX,
            "; save the model in safetensors format");
    const json content = read_json(index);
    const bool has_map = content.contains("weight_map") && content["weight_map"].is_object();
    require(has_map, index, ": key 'weight_map' is missing or not an object; the file is damaged");
    std::set<std::string> shards;
    for (const auto& [name, shard] : content["weight_map"].items()) {
        const std::string file = shard.is_string() ? shard.get<std::string>() : "";
        const bool valid = !file.empty() && file.find_first_of(std::string("/\0", 2)) == std::string::npos;
        require(valid, index, ": key 'weight_map' gives no file name for ", name);
        shards.insert(file);
    }
    for (const std::string& shard : shards) weights.add(join_path(directory, shard));
    for (const auto& [name, shard] : content["weight_map"].items()) {
        const auto location = weights.tensors.find(bare_name(name));
        require(location != weights.tensors.end() && location->second.file->path() == join_path(directory, shard),
                index, ": key 'weight_map' says that ", name, " is in ", shard.get<std::string>(), ", but it is not");
    }
    return weights;
}

std::vector<int64_t> source_shape(const Param& p, const SourceTensor& source) {
    if (p.cols == 0) return {source.rows};
    if (source.transposed) return {p.cols, source.rows};
    return {source.rows, p.cols};
}

// [rows, bytes]: never transposed, because groups are along the rows of the matrix in memory.
std::vector<int64_t> packed_shape(const Param& p, const SourceTensor& source, Packing packing) {
    return {source.rows, packed_row_bytes(packing, p.cols)};
}

// A tied model has no head of its own. If a file stores one anyway it must equal the embedding: transformers 4 uses the
// embedding and transformers 5 the stored head, so a difference means that the config is wrong.
void check_tied_head(const WeightFiles::Location& head, const WeightFiles::Location& embedding) {
    const SafetensorsEntry &a = head.entry(), &b = embedding.entry();
    bool same = a.dtype == b.dtype && a.shape == b.shape;
    constexpr int64_t CHUNK = 1 << 20;  // elements
    std::vector<char> x(size_t(CHUNK * dtype_size(a.dtype))), y(x.size());
    for (int64_t begin = 0; same && begin < a.numel(); begin += CHUNK) {
        const int64_t n = std::min(CHUNK, a.numel() - begin);
        head.file->read(a, begin, n, x.data());
        embedding.file->read(b, begin, n, y.data());
        same = std::memcmp(x.data(), y.data(), size_t(n * dtype_size(a.dtype))) == 0;
    }
    require(same, head.where(),
            ": differs from the token embedding, though the config ties the two; set "
            "tie_word_embeddings to false in config.json");
}

// The tensors of a parameter. own_names: the file holds it under the table's name.
std::vector<SourceTensor> sources_of(const Param& p, bool own_names) {
    return own_names ? std::vector<SourceTensor>{{p.name, 0, p.rows, false}} : p.sources;
}

}  // namespace

void check_range(const float* values, int64_t n, DType dtype, const std::string& path, const std::string& tensor) {
    if (dtype == DType::F32) return;
    // The smallest magnitude that is rounded to infinity: half a unit in the last place above the largest finite one.
    const float limit = dtype == DType::F16 ? 65520.0f : 0x1.FFp127f;
    const auto too_large = [limit](float x) { return std::fabs(x) >= limit && !std::isinf(x); };
    int64_t count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count) if (n > 1 << 16)
    for (int64_t i = 0; i < n; i++) count += too_large(values[i]);
    if (!count) return;
    throw Error(str(path, ": tensor ", tensor, ": ", *std::find_if(values, values + n, too_large), " is too large for ",
                    dtype_name(dtype), "; use ", dtype == DType::F16 ? "bf16 or fp32" : "fp32"));
}

bool holds_weights(const std::string& directory) {
    return path_exists(join_path(directory, WEIGHTS)) || path_exists(join_path(directory, WEIGHTS_INDEX));
}

StoredWeights::StoredWeights(std::string model, std::shared_ptr<const void> owner, Tensors all)
    : where(std::move(model)), files(std::move(owner)), by_param(std::move(all)) {}

StoredWeights::StoredWeights(const std::string& directory, const ParamTable& table, std::optional<Packing> packing)
    : where(directory), by_param(table.params.size()) {
    const auto opened = std::make_shared<const WeightFiles>(open_weights(directory, table.file));
    files = opened;
    const auto& stored = opened->tensors;
    // Earlier versions saved a LLaMA whose heads do not divide the channels as "train_gpt", under the table's own
    // names.
    const bool any = !table.params.empty() && !table.params[0].sources.empty();
    const bool own_names =
        any && stored.count(table.params[0].name) && !stored.count(bare_name(table.params[0].sources[0].name));
    std::set<std::string> wanted;
    for (const Param& p : table.params) {
        for (const SourceTensor& source : sources_of(p, own_names)) {
            const auto location = stored.find(bare_name(source.name));
            require(location != stored.end(), directory, ": tensor ", source.name,
                    " is missing from the weights; the files are incomplete or config.json describes another model");
            const SafetensorsEntry& entry = location->second.entry();
            const bool packed = packing && packs(p, *packing);
            const std::vector<int64_t> expected = packed ? packed_shape(p, source, *packing) : source_shape(p, source);
            require(entry.shape == expected, location->second.where(), ": shape ", shape_string(entry.shape),
                    ", expected ", shape_string(expected), "; the file does not belong to this config.json");
            const bool floats = entry.dtype == DType::F32 || entry.dtype == DType::F64 || entry.dtype == DType::BF16 ||
                                entry.dtype == DType::F16;
            require(packed ? entry.dtype == DType::U8 : floats, location->second.where(), ": is ",
                    dtype_name(entry.dtype), packed ? "; packed weights are U8" : "; weights must be F32, BF16 or F16");
            wanted.insert(bare_name(source.name));
            const int64_t row_size = packed ? packed_row_bytes(*packing, p.cols) : p.row_size();
            by_param[p.index].push_back({location->second.name,
                                         {location->second.file, &entry, source.row * row_size, source.rows, row_size,
                                          source.transposed && p.cols && !packed}});
        }
    }
    for (const auto& [name, location] : stored) {
        if (wanted.count(name) || is_buffer(name)) continue;
        const bool tied_head = name == "lm_head.weight" && any;
        require(tied_head, location.where(),
                ": this model has no such tensor; the file does not belong to this config.json");
        check_tied_head(location, stored.at(bare_name(sources_of(table.params[0], own_names)[0].name)));
    }
}

WeightSource open_weight_source(const StoredWeights& weights, const AdjustValues& adjust) {
    const auto reader = std::make_shared<ParamReader>(ParamReader::Takers::AllThreads);
    const auto fetch = [weights, reader, adjust](const Param& p, std::vector<float>& buffer) {
        buffer.assign(size_t(p.padded_numel()), 0.0f);
        const auto take = [&](int64_t begin, int64_t count, const float* values) {
            std::copy_n(values, count, buffer.begin() + begin);
        };
        for (const auto& [name, part] : weights.tensors(p)) reader->read(part, 0, p.numel(), take);
        if (adjust) adjust(p, 0, p.numel(), buffer.data());
        return static_cast<const float*>(buffer.data());
    };
    const auto fetch_rows = [weights, reader, adjust](const Param& p, int64_t row, int64_t rows,
                                                      std::vector<float>& buffer) {
        const int64_t first = row * p.row_size(), n = rows * p.row_size();
        buffer.resize(size_t(n));
        const auto take = [&](int64_t begin, int64_t count, const float* values) {
            std::copy_n(values, count, buffer.begin() + (begin - first));
        };
        for (const auto& [name, part] : weights.tensors(p)) reader->read(part, first, n, take);
        if (adjust) adjust(p, first, n, buffer.data());
        return static_cast<const float*>(buffer.data());
    };
    const auto dtype = [weights](const Param& p, const SourceTensor& tensor) {
        const std::vector<StoredWeights::Tensor>& stored = weights.tensors(p);
        for (size_t i = 0; i < stored.size(); i++)
            if (p.sources[i].row == tensor.row) return stored[i].part.dtype();
        return stored[0].part.dtype();  // under the table's own name: one tensor for all sources
    };
    return {fetch, dtype, fetch_rows};
}

WeightSource open_weight_source(const std::string& directory, const ParamTable& table, const AdjustValues& adjust) {
    return open_weight_source(StoredWeights(directory, table), adjust);
}

std::string load_weights(const std::string& directory, const ParamTable& table, const WeightArenas& arenas) {
    check_arenas(table, arenas, directory);
    return load_weights(StoredWeights(directory, table), table, arenas);  // which checks all before the first copy
}

std::string load_weights(const StoredWeights& weights, const ParamTable& table, const WeightArenas& arenas,
                         const AdjustValues& adjust) {
    check_arenas(table, arenas, weights.path());
    ParamReader reader(ParamReader::takers_of(arenas));
    NonFiniteTensors non_finite;
    for (const Param& p : table.params) {
        if (!arenas.weights.holds(p)) continue;
        const DType dtype = p.fp32 ? DType::F32 : arenas.weights.data.dtype;
        for (const auto& [name, part] : weights.tensors(p)) {
            std::atomic<bool> finite = true;
            const auto take = [&, &tensor = name](int64_t begin, int64_t count, float* values) {
                if (adjust) adjust(p, begin, count, values);
                if (!all_finite(values, count)) finite = false;
                check_range(values, count, dtype, weights.path(), tensor);
                arenas.store(p, values, begin, count, reader.rounded(values));
            };
            reader.read(part, 0, p.numel(), take, nullptr,
                        [&](int64_t begin, int64_t count) { return arenas.find(p, begin, count); });
            if (!finite) non_finite.add(name);
        }
        const std::vector<float> padding(size_t(p.padded_numel() - p.numel()), 0.0f);
        arenas.store(p, padding.data(), p.numel(), int64_t(padding.size()));
    }
    return non_finite.warning(weights.path());
}

namespace {

// Writes the values of elements [begin, begin + count) of a parameter that belong to one of its tensors, from the
// calling thread.
class SourceWriter {
  public:
    SourceWriter(SafetensorsWriter& to, std::string file) : writer(to), path(std::move(file)) {}

    void write(size_t number, const Param& p, const SourceTensor& source, DType dtype, const float* values,
               int64_t begin, int64_t count) {
        const int64_t row_size = p.row_size(), start = source.row * row_size;
        const int64_t first = std::max(begin, start), last = std::min(begin + count, start + source.rows * row_size);
        if (first >= last) return;
        const float* const from = values + (first - begin);
        check_range(from, last - first, dtype, path, source.name);
        if (source.transposed && p.cols)
            return transpose(number, source.rows, p.cols, dtype, from, first - start, last - start);
        writer.seek(number, (first - start) * dtype_size(dtype));
        convert(dtype, from, last - first);
    }

  private:
    void convert(DType dtype, const float* values, int64_t n) {
        if (dtype == DType::F32) return writer.write(values, n * dtype_size(dtype));
        constexpr int64_t CHUNK = 1 << 18;  // elements
        for (; n > 0; values += CHUNK, n -= CHUNK) {
            const int64_t count = std::min(n, CHUNK);
            converted.resize(size_t(count * dtype_size(dtype)));
            convert_from_float(converted.data(), dtype, values, count);
            writer.write(converted.data(), int64_t(converted.size()));
        }
    }

    // Elements [begin, end) of a matrix [R, C] that the file holds as [C, R]. A column's are neighbours in the file.
    void transpose(size_t number, int64_t R, int64_t C, DType dtype, const float* values, int64_t begin, int64_t end) {
        constexpr int64_t COLUMNS = 64;
        const int64_t r0 = begin / C, rows = (end + C - 1) / C - r0;
        const bool whole = begin == 0 && end == R * C;
        block.resize(size_t(COLUMNS * rows));
        for (int64_t c0 = 0; c0 < C; c0 += COLUMNS) {
            const int64_t c1 = std::min(c0 + COLUMNS, C);
            for (int64_t r = r0; r < r0 + rows; r++) {
                const int64_t row = r * C, low = std::max(c0, begin - row), high = std::min(c1, end - row);
                for (int64_t c = low; c < high; c++) block[size_t((c - c0) * rows + r - r0)] = values[row + c - begin];
            }
            if (whole) {
                writer.seek(number, c0 * R * dtype_size(dtype));
                convert(dtype, block.data(), (c1 - c0) * R);
                continue;
            }
            for (int64_t c = c0; c < c1; c++) {
                const int64_t low = r0 + (r0 * C + c < begin), high = r0 + rows - ((r0 + rows - 1) * C + c >= end);
                if (low >= high) continue;
                writer.seek(number, (c * R + low) * dtype_size(dtype));
                convert(dtype, block.data() + (c - c0) * rows + low - r0, high - low);
            }
        }
    }

    SafetensorsWriter& writer;
    const std::string path;
    std::vector<float> block;
    std::vector<char> converted;
};

void write_packed(SafetensorsWriter& writer, size_t number, const Param& p, const SourceTensor& source,
                  const float* values, const PackedRows& packed) {
    const int64_t bytes = packed_row_bytes(packed.packing, p.cols);
    std::vector<uint8_t> rows(size_t(source.rows * bytes));
    packed.quantise({packed.packing, p.cols, host_tensor(rows.data(), {source.rows, bytes})}, p, source.row,
                    values + source.row * p.cols);
    writer.seek(number, 0);
    writer.write(rows.data(), int64_t(rows.size()));
}

void declare_weights(SafetensorsWriter& writer, const ParamTable& table, const StoredDType& stored_dtype,
                     const std::string& path, const PackedRows* packed = nullptr) {
    for (const Param& p : table.params) {
        for (const SourceTensor& source : p.sources) {
            if (packed && packs(p, packed->packing)) {
                writer.declare(source.name, DType::U8, packed_shape(p, source, packed->packing));
                continue;
            }
            const DType dtype = stored_dtype(p, source);
            require(dtype == DType::F32 || dtype == DType::BF16 || dtype == DType::F16, path,
                    ": cannot save weights as ", dtype_name(dtype), "; use fp32, bf16 or fp16");
            writer.declare(source.name, dtype, source_shape(p, source));
        }
    }
}

}  // namespace

void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch,
                  const StoredDType& stored_dtype, const PackedRows* packed) {
    SafetensorsWriter writer(path);
    declare_weights(writer, table, stored_dtype, path, packed);
    writer.begin();
    SourceWriter sources(writer, path);
    std::vector<float> buffer;
    size_t number = 0;
    for (const Param& p : table.params) {
        const float* const values = fetch(p, buffer);
        for (const SourceTensor& source : p.sources) {
            if (packed && packs(p, packed->packing))
                write_packed(writer, number++, p, source, values, *packed);
            else
                sources.write(number++, p, source, stored_dtype(p, source), values, 0, p.numel());
        }
    }
    writer.finish();
}

void write_weights(SafetensorsWriter& writer, FileWriter::Open how, const ParamTable& table, const WeightArenas& arenas,
                   DType dtype, const Ranks& ranks) {
    check_arenas(table, arenas, writer.path());
    declare_weights(
        writer, table, [dtype](const Param&, const SourceTensor&) { return dtype; }, writer.path());
    writer.begin(how);
    SourceWriter sources(writer, writer.path());
    std::vector<float> buffer;
    size_t number = 0;
    for (const Param& p : table.params) {
        const ParamArena::Span own = owned_span(p, ranks.rank, ranks.count);
        const float* const values = fetch_span(arenas.exact(p), p, own.begin, own.count, buffer);
        for (const SourceTensor& source : p.sources)
            sources.write(number++, p, source, dtype, values, own.begin, own.count);
    }
}
