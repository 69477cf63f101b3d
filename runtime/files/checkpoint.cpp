#include "runtime/files/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <system_error>

#include "runtime/device/convert.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"
#include "runtime/files/non_finite.h"
#include "runtime/files/safetensors.h"

using nlohmann::json;

namespace {

constexpr const char* WEIGHTS = "model.safetensors";
constexpr const char* WEIGHTS_INDEX = "model.safetensors.index.json";

bool starts_with(const std::string& text, const std::string& start) {
    return text.compare(0, start.size(), start) == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string parent_of(const std::string& path) {
    const std::string parent = std::filesystem::path(path).parent_path().string();
    return parent.empty() ? "." : parent;
}

// A tensor name without its optional prefix.
std::string bare_name(const std::string& name) {
    for (const char* prefix : {"transformer.", "model."}) {
        if (starts_with(name, prefix)) return name.substr(std::strlen(prefix));
    }
    return name;
}

// Tensors that old versions of transformers saved though they hold no weights: causal masks and RoPE frequencies.
bool is_buffer(const std::string& name) {
    for (const char* end : {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"}) {
        if (ends_with(name, end)) return true;
    }
    return false;
}

std::string shape_string(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); i++) text += str(i ? ", " : "", shape[i]);
    return text + "]";
}

// The tensors of a model directory by bare name.
struct WeightFiles {
    struct Location {
        const SafetensorsFile* file;
        std::string name;
        Tensor tensor() const { return file->tensor(name); }
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

WeightFiles open_weights(const std::string& directory) {
    WeightFiles weights;
    const std::string single = join_path(directory, WEIGHTS), index = join_path(directory, WEIGHTS_INDEX);
    if (path_exists(single)) {
        weights.add(single);
        return weights;
    }
    require(path_exists(index), directory, ": holds neither ", WEIGHTS, " nor ", WEIGHTS_INDEX,
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

void check_arenas(const ParamTable& table, const WeightArenas& arenas, const std::string& where) {
    require(arenas.fits(table), where, ": the arena is ", dtype_name(arenas.weights.data.dtype), " ",
            shape_string(arenas.weights.data), ", expected fp32 [", table.total,
            "], or 16-bit weights beside fp32 ones");
}

// dst [cols, rows] = src [rows, cols] transposed, in blocks that stay in the first-level cache.
void transpose(float* dst, const float* src, int64_t rows, int64_t cols) {
    constexpr int64_t BLOCK = 32, PARALLEL_FROM = 1 << 16;  // elements; starting threads costs more below
#pragma omp parallel for collapse(2) schedule(static) if (rows * cols >= PARALLEL_FROM)
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK) {
        for (int64_t c0 = 0; c0 < cols; c0 += BLOCK) {
            const int64_t r1 = std::min(r0 + BLOCK, rows), c1 = std::min(c0 + BLOCK, cols);
            for (int64_t c = c0; c < c1; c++) {
                for (int64_t r = r0; r < r1; r++) dst[c * rows + r] = src[r * cols + c];
            }
        }
    }
}

// A tied model has no head of its own. If a file stores one anyway it must equal the embedding: transformers 4 uses the
// embedding and transformers 5 the stored head, so a difference means that the config is wrong.
void check_tied_head(const WeightFiles::Location& head, const WeightFiles::Location& embedding) {
    const Tensor a = head.tensor(), b = embedding.tensor();
    const bool same =
        a.dtype == b.dtype && shape_string(a) == shape_string(b) && std::memcmp(a.data, b.data, size_t(a.bytes())) == 0;
    require(same, head.where(),
            ": differs from the token embedding, though the config ties the two; set "
            "tie_word_embeddings to false in config.json");
}

// Throws for a finite value that dtype would make infinite.
void check_range(const float* values, int64_t n, DType dtype, const std::string& path, const std::string& tensor) {
    if (dtype == DType::F32) return;
    // The smallest magnitude that is rounded to infinity: half a unit in the last place above the largest finite one.
    const float limit = dtype == DType::F16 ? 65520.0f : 0x1.FFp127f;
    for (int64_t i = 0; i < n; i++) {
        if (!(std::fabs(values[i]) >= limit) || std::isinf(values[i])) continue;
        throw Error(str(path, ": tensor ", tensor, ": ", values[i], " is too large for ", dtype_name(dtype), "; use ",
                        dtype == DType::F16 ? "bf16 or fp32" : "fp32"));
    }
}

constexpr const char* STEP_PREFIX = "step_";

// ".tmp-step_00001000-4711": an unfinished directory and the process that writes it.
std::string temporary_prefix(const std::string& name) {
    return ".tmp-" + name + "-";
}
constexpr const char* REMOVED_PREFIX = ".old-";

// Has ended, but its parent has not asked for its status: in a container without an init process it stays so.
bool is_zombie(pid_t id) {
    std::ifstream file(str("/proc/", id, "/stat"));  // 4711 (name) Z ...
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(") ");
    return name_end != std::string::npos && stat.compare(name_end + 2, 1, "Z") == 0;
}

bool process_lives(const std::string& pid) {
    if (pid.empty() || pid.size() > 9 || pid.find_first_not_of("0123456789") != std::string::npos)
        return true;  // not ours
    const pid_t id = pid_t(std::stol(pid));
    return id != ::getpid() && (::kill(id, 0) == 0 || errno == EPERM) && !is_zombie(id);
}

void remove_tree(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    require(!error, path, ": cannot remove: ", error.message());
}

void rename_directory(const std::string& from, const std::string& to) {
    const bool renamed = ::rename(from.c_str(), to.c_str()) == 0;  // before errno is read
    require(renamed, from, ": cannot rename to ", to, ": ", std::strerror(errno));
}

bool is_complete(const std::string& directory) {
    for (const char* name : {"config.json", "state.safetensors", "trainer.json"}) {
        if (!path_exists(join_path(directory, name))) return false;
    }
    return path_exists(join_path(directory, WEIGHTS)) || path_exists(join_path(directory, WEIGHTS_INDEX));
}

}  // namespace

// Finding models and checkpoints.

int64_t checkpoint_step(const std::string& name) {
    if (!starts_with(name, STEP_PREFIX)) return -1;
    const std::string digits = name.substr(std::strlen(STEP_PREFIX));
    const bool number = digits.find_first_not_of("0123456789") == std::string::npos;
    // Eight digits with leading zeros; more for larger steps.
    if (!number || digits.size() < 8 || digits.size() > 18 || (digits.size() > 8 && digits[0] == '0')) return -1;
    return std::stoll(digits);
}

std::vector<std::string> list_checkpoints(const std::string& run_dir) {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(run_dir)) {
        if (checkpoint_step(name) >= 0 && is_complete(join_path(run_dir, name))) names.push_back(name);
    }
    std::sort(names.begin(), names.end(),
              [](const std::string& a, const std::string& b) { return checkpoint_step(a) < checkpoint_step(b); });
    return names;
}

std::string resume_remedy(const std::string& checkpoint) {
    std::string previous;
    const int64_t step = checkpoint_step(std::filesystem::path(checkpoint).filename().string());
    for (const std::string& name : list_checkpoints(parent_of(checkpoint)))
        if (checkpoint_step(name) < step) previous = name;
    return str("; remove ", checkpoint, previous.empty() ? " and start again" : " to continue from ", previous);
}

// Weights.

WeightSource open_weight_source(const std::string& directory, const ParamTable& table) {
    const auto weights = std::make_shared<const WeightFiles>(open_weights(directory));

    // Earlier versions saved a LLaMA whose heads do not divide the channels as "train_gpt", under the table's own
    // names.
    const bool any = !table.params.empty() && !table.params[0].sources.empty();
    const bool own_names = any && weights->tensors.count(table.params[0].name) &&
                           !weights->tensors.count(bare_name(table.params[0].sources[0].name));
    const auto sources_of = [own_names](const Param& p) {
        return own_names ? std::vector<SourceTensor>{{p.name, 0, p.rows, false}} : p.sources;
    };
    std::set<std::string> wanted;
    for (const Param& p : table.params) {
        for (const SourceTensor& source : sources_of(p)) {
            const auto location = weights->tensors.find(bare_name(source.name));
            require(location != weights->tensors.end(), directory, ": tensor ", source.name,
                    " is missing from the weights; the files are incomplete or config.json describes another model");
            const SafetensorsEntry& entry = location->second.file->entries().at(location->second.name);
            const std::vector<int64_t> expected = source_shape(p, source);
            require(entry.shape == expected, location->second.where(), ": shape ", shape_string(entry.shape),
                    ", expected ", shape_string(expected), "; the file does not belong to this config.json");
            const bool floats = entry.dtype == DType::F32 || entry.dtype == DType::F64 || entry.dtype == DType::BF16 ||
                                entry.dtype == DType::F16;
            require(floats, location->second.where(), ": is ", dtype_name(entry.dtype),
                    "; weights must be F32, BF16 or F16");
            wanted.insert(bare_name(source.name));
        }
    }
    for (const auto& [name, location] : weights->tensors) {
        if (wanted.count(name) || is_buffer(name)) continue;
        const bool tied_head = name == "lm_head.weight" && any;
        require(tied_head, location.where(),
                ": this model has no such tensor; the file does not belong to this config.json");
        check_tied_head(location, weights->tensors.at(bare_name(sources_of(table.params[0])[0].name)));
    }

    const auto fetch = [weights, sources_of](const Param& p, std::vector<float>& buffer) {
        buffer.assign(size_t(p.padded_numel()), 0.0f);
        std::vector<float> staging;
        for (const SourceTensor& source : sources_of(p)) {
            const WeightFiles::Location& location = weights->tensors.at(bare_name(source.name));
            const Tensor stored = location.tensor();
            float* dst = buffer.data() + source.row * p.row_size();
            if (source.transposed && p.cols) {
                staging.resize(size_t(stored.numel()));
                convert_to_float(staging.data(), stored.data, stored.dtype, stored.numel());
                transpose(dst, staging.data(), p.cols, source.rows);
            } else {
                convert_to_float(dst, stored.data, stored.dtype, stored.numel());
            }
            location.file->release(location.name);
        }
        return static_cast<const float*>(buffer.data());
    };
    const auto dtype = [weights, own_names](const Param& p, const SourceTensor& source) {
        return weights->tensors.at(bare_name(own_names ? p.name : source.name)).tensor().dtype;
    };
    return {fetch, dtype};
}

std::string load_weights(const std::string& directory, const ParamTable& table, const WeightArenas& arenas) {
    check_arenas(table, arenas, directory);
    const WeightSource weights = open_weight_source(directory, table);  // checks everything before the first copy
    NonFiniteTensors non_finite;
    const FetchParam fetch = non_finite.watch(weights.fetch);
    std::vector<float> buffer;
    for (const Param& p : table.params) {
        const float* const values = fetch(p, buffer);
        const DType dtype = p.fp32 ? DType::F32 : arenas.weights.data.dtype;
        check_range(values, p.padded_numel(), dtype, directory, p.name);
        arenas.store(p, values, 0, p.padded_numel());
    }
    return non_finite.warning(directory);
}

void save_weights(const std::string& path, const ParamTable& table, const WeightArenas& arenas, DType dtype) {
    check_arenas(table, arenas, path);
    const auto fetch = [&](const Param& p, std::vector<float>& buffer) { return arenas.fetch(p, buffer); };
    save_weights(path, table, FetchParam(fetch), dtype);
}

void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch, DType dtype,
                  const Ranks& ranks) {
    save_weights(
        path, table, fetch, [dtype](const Param&, const SourceTensor&) { return dtype; }, ranks);
}

void save_weights(const std::string& path, const ParamTable& table, const FetchParam& fetch,
                  const StoredDType& stored_dtype, const Ranks& ranks) {
    SafetensorsWriter writer(path);
    for (const Param& p : table.params) {
        for (const SourceTensor& source : p.sources) {
            const DType dtype = stored_dtype(p, source);
            require(dtype == DType::F32 || dtype == DType::BF16 || dtype == DType::F16, path,
                    ": cannot save weights as ", dtype_name(dtype), "; use fp32, bf16 or fp16");
            writer.declare(source.name, dtype, source_shape(p, source));
        }
    }
    writer.begin(ranks);
    std::vector<float> buffer, transposed;
    std::vector<char> converted;
    size_t tensor = 0;
    for (const Param& p : table.params) {
        const bool mine = p.group % ranks.count == ranks.rank;
        const float* const values = mine ? fetch(p, buffer) : nullptr;
        for (const SourceTensor& source : p.sources) {
            const size_t number = tensor++;
            if (!mine) continue;
            writer.seek(number, 0);
            const float* src = values + source.row * p.row_size();
            const int64_t n = source.rows * p.row_size();
            const DType dtype = stored_dtype(p, source);
            check_range(src, n, dtype, path, source.name);
            if (source.transposed && p.cols) {
                transposed.resize(size_t(n));
                transpose(transposed.data(), src, source.rows, p.cols);
                src = transposed.data();
            }
            if (dtype == DType::F32) {
                writer.write(src, n * dtype_size(dtype));
            } else {
                converted.resize(size_t(n * dtype_size(dtype)));
                convert_from_float(converted.data(), dtype, src, n);
                writer.write(converted.data(), int64_t(converted.size()));
            }
        }
    }
    writer.finish();
}

// Training state.

namespace {

struct StatePart {
    const char* prefix;
    WeightArenas arenas;
};

std::vector<StatePart> state_parts(const TrainingArenas& arenas) {
    return {{"params/", arenas.params}, {"m/", arenas.m}, {"v/", arenas.v}};
}

// What Muon updates has no second moment.
bool in_state(const std::string& prefix, const Param& p) {
    return prefix != "v/" || p.optimizer == OptimizerType::AdamW;
}

// What a rank writes and checks; used for spans only, holds no memory.
ParamArena part_of(const Ranks& ranks) {
    ParamArena mine;
    mine.part = ranks.rank, mine.parts = ranks.count;
    return mine;
}

std::vector<int64_t> param_shape(const Param& p) {
    return p.cols ? std::vector<int64_t>{p.rows, p.cols} : std::vector<int64_t>{p.rows};
}

}  // namespace

void save_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas, const Ranks& ranks,
                const SafetensorsWriter::Metadata& metadata) {
    SafetensorsWriter writer(path, SafetensorsWriter::Checksums::Yes, metadata);
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        check_arenas(table, arena, path);
        for (const Param& p : table.params)
            if (in_state(prefix, p)) writer.declare(prefix + p.name, DType::F32, param_shape(p));
    }
    writer.begin(ranks);
    std::vector<float> buffer;
    const ParamArena mine = part_of(ranks);
    size_t tensor = 0;
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        for (const Param& p : table.params) {
            if (!in_state(prefix, p)) continue;
            const size_t number = tensor++;
            const ParamArena::Span own = mine.span(p, 0, p.numel());
            if (!own.count) continue;
            const ParamArena& exact = arena.exact(p);
            const ParamArena::Span held = exact.span(p, own.begin, own.count);
            require(held.count == own.count, path, ": this rank lacks a part of ", prefix, p.name);
            writer.seek(number, own.begin * dtype_size(DType::F32));
            writer.write(fetch_values(exact.elements(held), buffer), own.count * dtype_size(DType::F32));
        }
    }
    writer.finish();
}

FetchParam state_weights(const std::string& path) {
    const auto file = std::make_shared<const SafetensorsFile>(path);
    return [file](const Param& p, std::vector<float>& buffer) {
        const std::string name = "params/" + p.name;
        const Tensor stored = file->tensor(name);
        buffer.assign(size_t(p.padded_numel()), 0.0f);
        convert_to_float(buffer.data(), stored.data, stored.dtype, stored.numel());
        file->release(name);
        return static_cast<const float*>(buffer.data());
    };
}

namespace {

// The contribution of a rank's own part to the checksum of a stored tensor.
uint32_t checksum_part(const Param& p, const Tensor& stored, const ParamArena& mine) {
    const ParamArena::Span own = mine.span(p, 0, p.numel());
    const int64_t size = dtype_size(stored.dtype), end = own.begin + own.count;
    const uint32_t crc = crc32c(static_cast<const char*>(stored.data) + own.begin * size, own.count * size);
    return crc32c_shift(crc, (p.numel() - end) * size);
}

void check_state_tensors(const SafetensorsFile& file, const ParamTable& table, const TrainingArenas& arenas) {
    const std::string& path = file.path();
    size_t expected = 0;
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        check_arenas(table, arena, path);
        for (const Param& p : table.params) {
            if (!in_state(prefix, p)) continue;
            expected++;
            const auto entry = file.entries().find(prefix + p.name);
            require(entry != file.entries().end(), path, ": tensor ", prefix, p.name,
                    " is missing; the state is of another model");
            require(entry->second.dtype == DType::F32 && entry->second.shape == param_shape(p), path, ": tensor ",
                    prefix, p.name, " is ", dtype_name(entry->second.dtype), " ", shape_string(entry->second.shape),
                    ", expected fp32 ", shape_string(param_shape(p)), "; the state is of another model");
        }
    }
    require(file.entries().size() == expected, path, ": holds ", file.entries().size(), " tensors, expected ", expected,
            "; the state is of another model");
}

}  // namespace

void load_state(const std::string& path, const ParamTable& table, const TrainingArenas& arenas, const Ranks& ranks) {
    const SafetensorsFile file(path);
    check_state_tensors(file, table, arenas);
    const ParamArena mine = part_of(ranks);
    std::vector<std::string> checked;  // tensors with a checksum
    std::vector<uint32_t> checksums;
    std::vector<float> values;
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        for (const Param& p : table.params) {
            if (!in_state(prefix, p)) continue;
            const std::string name = prefix + p.name;
            const Tensor stored = file.tensor(name);
            if (file.checksum(name)) {
                checked.push_back(name);
                checksums.push_back(checksum_part(p, stored, mine));
            }
            const auto [begin, count] = arena.needed(p, 0, p.padded_numel());
            values.assign(size_t(count), 0.0f);
            const int64_t there = std::clamp<int64_t>(stored.numel() - begin, 0, count);  // the rest is padding
            convert_to_float(values.data(), static_cast<const char*>(stored.data) + begin * dtype_size(DType::F32),
                             DType::F32, there);
            arena.store(p, values.data(), begin, count);
            file.release(name);
        }
    }
    require(checked.empty() || checked.size() == file.entries().size(), path, ": ",
            file.entries().size() - checked.size(), " tensors have no checksum: the file is damaged",
            resume_remedy(parent_of(path)));
    checksums = ranks.combine(checksums);
    for (size_t i = 0; i < checked.size(); i++) {
        require(checksums[i] == *file.checksum(checked[i]), path, ": tensor ", checked[i],
                ": its bytes do not match their checksum: the file is damaged", resume_remedy(parent_of(path)));
    }
}

// Directories.

AtomicDirectory::AtomicDirectory(const std::string& path) : final_path(path) {
    while (final_path.size() > 1 && final_path.back() == '/') final_path.pop_back();
    require(!path_exists(final_path), final_path, ": exists already; choose another name or remove it");
    const std::string parent = parent_of(final_path), name = std::filesystem::path(final_path).filename().string();
    const std::string prefix = temporary_prefix(name);
    for (const std::string& entry : list_directory(parent)) {
        const bool leftover = starts_with(entry, prefix) && !process_lives(entry.substr(prefix.size()));
        if (leftover) remove_tree(join_path(parent, entry));
    }
    temporary = join_path(parent, prefix + std::to_string(::getpid()));
    const bool made = ::mkdir(temporary.c_str(), 0777) == 0;
    if (!made) throw_system_error(temporary, "create the directory", errno);
}

AtomicDirectory::~AtomicDirectory() {
    std::error_code ignored;  // a destructor cannot report an error
    if (!committed) std::filesystem::remove_all(temporary, ignored);
}

void AtomicDirectory::commit() {
    // Not every caller flushes the files that it writes here.
    for (const std::string& name : list_directory(temporary)) {
        const std::string path = join_path(temporary, name);
        const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        require(fd >= 0, path, ": cannot open: ", std::strerror(errno));
        const int error = ::fsync(fd) == 0 ? 0 : errno;
        ::close(fd);
        require(error == 0, path, ": cannot flush: ", std::strerror(error));
    }
    flush_directory(temporary);
    require(!path_exists(final_path), final_path, ": exists already; choose another name or remove it");
    rename_directory(temporary, final_path);
    committed = true;
    flush_directory(parent_of(final_path));
}

void write_json(const std::string& path, const json& value) {
    write_file(path, value.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

namespace {

// Python's json module writes NaN and Infinity, which JSON lacks. As strings they are values that no known key accepts.
std::string quote_non_numbers(std::string_view text) {
    std::string out;
    bool in_string = false;
    while (!text.empty()) {
        size_t n = in_string && text[0] == '\\' && text.size() > 1 ? 2 : 1;
        if (text[0] == '"') in_string = !in_string;
        bool quote = false;
        for (const std::string_view name : {"-Infinity", "Infinity", "NaN"}) {
            quote = !in_string && text.substr(0, name.size()) == name;
            if (!quote) continue;
            n = name.size();
            break;
        }
        if (quote) out += '"';
        out += text.substr(0, n);
        if (quote) out += '"';
        text.remove_prefix(n);
    }
    return out;
}

}  // namespace

json read_json(const std::string& path) {
    const std::string text = read_file(path, int64_t(1) << 28);
    const auto limit_depth = [&](int depth, json::parse_event_t, json&) {  // later code recurses over the values
        require(depth <= 100, path, ": JSON nested more than 100 deep; the file is damaged");
        return true;
    };
    json object;
    try {
        object = json::parse(text, limit_depth);
    } catch (const json::parse_error& e) {
        object = json::parse(quote_non_numbers(text), limit_depth, false);
        require(!object.is_discarded(), path, ": broken JSON at byte ", e.byte, "; the file is damaged");
    } catch (const json::exception&) {
        throw Error(str(path, ": holds a number out of range; the file is damaged"));
    }
    require(object.is_object(), path, ": JSON, but not an object; the file is damaged");
    return object;
}

int64_t trained_seq_len(const std::string& directory) {
    const std::string path = join_path(directory, "trainer.json");
    if (!path_exists(path)) return 0;
    const json length = read_json(path).value("seq_len", json());
    require(length.is_number_integer(), path, ": key 'seq_len' is missing or not an integer; the file is damaged");
    return length;
}

std::string best_checkpoint(const std::string& run_dir) {
    std::string best;
    double lowest = INFINITY;
    for (const std::string& name : list_checkpoints(run_dir)) {
        json loss;
        try {
            loss = read_json(join_path(join_path(run_dir, name), "trainer.json")).value("val_loss", json());
        } catch (const Error&) {  // a damaged checkpoint must not end a run that has a newer one
        }
        if (loss.is_number() && loss.get<double>() < lowest) {
            lowest = loss.get<double>();
            best = name;
        }
    }
    return best;
}

void remove_leftovers(const std::string& run_dir) {
    for (const std::string& name : list_directory(run_dir)) {
        const size_t dash = name.find_last_of('-');
        const bool unfinished = starts_with(name, ".tmp-") && dash > 5 && dash != std::string::npos &&
                                checkpoint_step(name.substr(5, dash - 5)) >= 0 && !process_lives(name.substr(dash + 1));
        const bool removed =
            starts_with(name, REMOVED_PREFIX) && checkpoint_step(name.substr(std::strlen(REMOVED_PREFIX))) >= 0;
        const bool unfinished_file = name == ".tmp-log.jsonl" || name == ".tmp-run.toml";
        if (unfinished || removed || unfinished_file) remove_tree(join_path(run_dir, name));
    }
}

void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& spare) {
    require(keep >= 1, run_dir, ": cannot keep ", keep, " checkpoints; keep at least 1");
    remove_leftovers(run_dir);
    std::vector<std::string> names = list_checkpoints(run_dir);
    names.resize(size_t(std::max<int64_t>(0, int64_t(names.size()) - keep)));
    for (const std::string& name : names) {
        if (name == spare) continue;
        const std::string removed = join_path(run_dir, REMOVED_PREFIX + name);
        rename_directory(join_path(run_dir, name), removed);
        flush_directory(run_dir);
        remove_tree(removed);
    }
}
