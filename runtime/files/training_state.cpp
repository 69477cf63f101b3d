#include "runtime/files/training_state.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"

namespace {

struct StatePart {
    const char* prefix;
    WeightArenas arenas;
};

std::vector<StatePart> state_parts(const TrainingArenas& arenas) {
    return {{"params/", arenas.params}, {"m/", arenas.m}, {"v/", arenas.v}};
}

bool is_weights(const std::string& prefix) {
    return prefix == "params/";
}

// Throws Error if the arenas do not fit the table.
void check_part(const std::string& prefix, const ParamTable& table, const WeightArenas& arenas,
                const std::string& path) {
    if (is_weights(prefix)) return check_arenas(table, arenas, path);
    require(arenas.weights.holds(table.total), path, ": the arena of ", prefix, " is ",
            dtype_name(arenas.weights.data.dtype), " ", shape_string(arenas.weights.data), ", expected [", table.total,
            "]");
}

// The dtype in which the state stores a parameter.
DType stored_dtype(const std::string& prefix, const Param& p, const WeightArenas& arenas) {
    return is_weights(prefix) ? DType::F32 : arenas.exact(p).data.dtype;
}

// Whether a part of the state has a tensor of this parameter. Some optimizers have no second moment.
bool in_state(const std::string& prefix, const Param& p, const WeightArenas& arenas, DType export_dtype) {
    if (is_weights(prefix)) return dtype_size(export_dtype) < dtype_size(arenas.exact(p).data.dtype);
    return prefix != "v/" || facts_of(p.optimizer).second_moment;
}

std::vector<int64_t> param_shape(const Param& p) {
    return p.cols ? std::vector<int64_t>{p.rows, p.cols} : std::vector<int64_t>{p.rows};
}

std::string state_path(const std::string& checkpoint) {
    return join_path(checkpoint, "state.safetensors");
}

}  // namespace

StateWriter::StateWriter(const std::string& directory, const ParamTable& params, const TrainingArenas& from,
                         DType exported, const SafetensorsWriter::Metadata& metadata, const Ranks& all)
    : table(params),
      arenas(from),
      export_dtype(exported),
      ranks(all),
      weights(join_path(directory, params.file), SafetensorsWriter::Checksums::Yes, metadata),
      state(state_path(directory), SafetensorsWriter::Checksums::Yes, metadata) {}

void StateWriter::write() {
    write_weights(weights, FileWriter::Open::Shared, table, arenas.params, export_dtype, ranks);
    weights_part = weights.end_part();
    write_state();
    state_part = state.end_part();
}

void StateWriter::write_state() {
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        check_part(prefix, table, arena, state.path());
        for (const Param& p : table.params)
            if (in_state(prefix, p, arena, export_dtype))
                state.declare(prefix + p.name, stored_dtype(prefix, p, arena), param_shape(p));
    }
    state.begin(FileWriter::Open::Shared);
    std::vector<char> buffer;
    size_t tensor = 0;
    for (const auto& [prefix, arena] : state_parts(arenas)) {
        for (const Param& p : table.params) {
            if (!in_state(prefix, p, arena, export_dtype)) continue;
            const size_t number = tensor++;
            const ParamArena::Span own = owned_span(p, ranks.rank, ranks.count);
            if (!own.count) continue;
            const int64_t size = dtype_size(stored_dtype(prefix, p, arena));
            state.seek(number, own.begin * size);
            state.write(fetch_bytes(arena.exact(p), p, own.begin, own.count, buffer), own.count * size);
        }
    }
}

StateWriter::Part StateWriter::part() const {
    Part all;
    for (const SafetensorsWriter::Part* file : {&weights_part, &state_part}) {
        all.push_back(uint64_t(file->bytes));
        all.insert(all.end(), file->checksums.begin(), file->checksums.end());
    }
    return all;
}

void StateWriter::finish(const Part& parts) {
    const auto sum = [&](const SafetensorsWriter::Part& own, size_t at) {
        SafetensorsWriter::Part total{0, std::vector<uint32_t>(own.checksums.size(), 0)};
        for (; at < parts.size(); at += part().size()) {
            const auto* const first = parts.data() + at;
            total.add({int64_t(first[0]), {first + 1, first + 1 + own.checksums.size()}});
        }
        return total;
    };
    weights.finish(sum(weights_part, 0));
    state.finish(sum(state_part, 1 + weights_part.checksums.size()));
}

int64_t checkpoint_bytes(const ParamTable& table, const TrainingArenas& arenas, DType export_dtype) {
    int64_t bytes = table.num_weights() * dtype_size(export_dtype);
    for (const auto& [prefix, arena] : state_parts(arenas))
        for (const Param& p : table.params)
            if (in_state(prefix, p, arena, export_dtype))
                bytes += p.numel() * dtype_size(stored_dtype(prefix, p, arena));
    return bytes;
}

namespace {

// A tensor of a file that fills a part of a parameter in one of the arenas.
struct StoredTensor {
    const Param* p;
    const WeightArenas* arenas;
    std::string name;
    StoredPart part;
};

// The two files of a checkpoint, checked against the table.
class StoredState {
  public:
    StoredState(const std::string& checkpoint, const ParamTable& table, const TrainingArenas& arenas)
        : state(state_path(checkpoint)), parts(state_parts(arenas)) {
        size_t used = 0;
        bool exported = false;
        for (const auto& [prefix, arena] : parts) {
            check_part(prefix, table, arena, state.path());
            for (const Param& p : table.params) {
                const bool weight = is_weights(prefix), there = state.entries().count(prefix + p.name);
                exported |= weight && !there;
                if (weight ? there : in_state(prefix, p, arena, DType::F32)) {
                    used++;
                    add(prefix, p, arena);
                }
            }
        }
        require(state.entries().size() == used, state.path(), ": holds ", state.entries().size(), " tensors, expected ",
                used, "; the state is of another model");
        if (exported) add_exported(checkpoint, table);
    }

    std::vector<StoredTensor> tensors;

  private:
    void add(const std::string& prefix, const Param& p, const WeightArenas& arenas) {
        const std::string& path = state.path();
        const auto found = state.entries().find(prefix + p.name);
        require(found != state.entries().end(), path, ": tensor ", prefix, p.name,
                " is missing; the state is of another model");
        const SafetensorsEntry& entry = found->second;
        const bool known = entry.dtype == DType::F32 || (!is_weights(prefix) && entry.dtype == DType::BF16);
        require(known && entry.shape == param_shape(p), path, ": tensor ", prefix, p.name, " is ",
                dtype_name(entry.dtype), " ", shape_string(entry.shape), ", expected ",
                is_weights(prefix) ? "fp32 " : "fp32 or bf16 ", shape_string(param_shape(p)),
                "; the state is of another model");
        tensors.push_back({&p, &arenas, found->first, {&state, &entry, 0, p.rows, p.row_size(), false}});
    }

    // The weights that the state does not hold are those of the exported model.
    void add_exported(const std::string& checkpoint, const ParamTable& table) {
        const auto same = [&](const SafetensorsFile& file, const char* key) {
            const auto theirs = file.metadata().find(key), ours = state.metadata().find(key);
            return theirs != file.metadata().end() && ours != state.metadata().end() && *theirs == *ours;
        };
        weights = std::make_unique<StoredWeights>(checkpoint, table);
        for (const Param& p : table.params) {
            if (state.entries().count("params/" + p.name)) continue;
            for (const auto& [name, part] : weights->tensors(p)) {
                require(same(*part.file, "step") && same(*part.file, "adam_steps"), part.file->path(),
                        ": was not written together with ", state.path(), ", which needs its weights");
                tensors.push_back({&p, &parts[0].arenas, name, part});
            }
        }
    }

    SafetensorsFile state;
    std::unique_ptr<StoredWeights> weights;
    const std::vector<StatePart> parts;
};

// The range of a tensor that this rank checks: what it would write, or of a transposed one an equal share.
RangeChecksum checked_range(const StoredTensor& t, const Ranks& ranks) {
    const int64_t n = t.part.numel();
    if (t.part.transposed) return {n * ranks.rank / ranks.count, n * (ranks.rank + 1) / ranks.count};
    const ParamArena::Span own = owned_span(*t.p, ranks.rank, ranks.count);
    const int64_t begin = std::clamp<int64_t>(own.begin - t.part.begin, 0, n),
                  end = std::clamp<int64_t>(own.begin + own.count - t.part.begin, begin, n);
    return {begin, end};
}

}  // namespace

void load_state(const std::string& checkpoint, const ParamTable& table, const TrainingArenas& arenas,
                const Ranks& ranks) {
    const StoredState stored(checkpoint, table, arenas);
    const std::string remedy = resume_remedy(checkpoint);
    std::vector<std::optional<uint32_t>> expected;
    size_t without = 0;
    for (const StoredTensor& t : stored.tensors) {
        expected.push_back(t.part.file->checksum(t.name));
        without += !expected.back();
    }
    for (size_t i = 0; i < expected.size() && without < expected.size(); i++)
        require(bool(expected[i]), stored.tensors[i].part.file->path(), ": tensor ", stored.tensors[i].name,
                " has no checksum: the file is damaged", remedy);
    ParamReader reader(ParamReader::takers_of(arenas.params));
    std::vector<uint32_t> checksums;
    for (const StoredTensor& t : stored.tensors) {
        const auto take = [&](int64_t begin, int64_t count, const float* values) {
            t.arenas->store(*t.p, values, begin, count);
        };
        RangeChecksum checked = checked_range(t, ranks);
        const auto [begin, count] = t.arenas->needed(*t.p, 0, t.p->padded_numel());
        reader.read(t.part, begin, count, take, &checked,
                    [&](int64_t b, int64_t n) { return t.arenas->find(*t.p, b, n); });
        checksums.push_back(checked.value);
        const int64_t padding = std::max(begin, t.p->numel()), end = begin + count;
        if (padding < end) take(padding, end - padding, std::vector<float>(size_t(end - padding), 0.0f).data());
    }
    checksums = ranks.combine(checksums);
    for (size_t i = 0; i < checksums.size() && !without; i++) {
        const StoredTensor& t = stored.tensors[i];
        require(checksums[i] == *expected[i], t.part.file->path(), ": tensor ", t.name,
                ": its bytes do not match their checksum: the file is damaged", remedy);
    }
}
