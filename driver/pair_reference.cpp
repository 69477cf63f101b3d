#include "driver/pair_reference.h"

#include <algorithm>
#include <cmath>

#include "driver/sequence_loss.h"
#include "models/lora_adapter.h"
#include "parallel/distributed_evaluation.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/files/weight_files.h"

using nlohmann::json;

namespace {

// What the log-probabilities depend on.
json identity(const TrainSetup& s, const Model& model, const TrainingData& data) {
    json all = {{"dtype", dtype_name(model.precision.dtype)}, {"base in NF4", model.nf4 != nullptr}};
    for (const auto& [key, value] : LoraAdapter::base_record({s.source.directory}, s.source.config, model.table))
        all[key] = value;
    if (!s.source.adapter.empty()) all["adapter"] = LoraAdapter::checksum(s.source.adapter);
    all["training tokens"] = fingerprint(data.train_files);
    if (data.val_files) all["validation tokens"] = fingerprint(*data.val_files);
    return all;
}

// null stands for NaN.
std::vector<float> read_values(const json& file, const char* key, const ExamplePacking* packing,
                               const std::string& path) {
    if (!packing) return {};
    const size_t expected = 2 * size_t(packing->num_pairs_in_files());
    const bool is_list = file.contains(key) && file[key].is_array() && file[key].size() == expected;
    require(is_list, path, ": key '", key, "' is no list of ", expected, " numbers; remove the file");
    std::vector<float> values;
    for (const json& value : file[key]) {
        require(value.is_null() || value.is_number(), path, ": key '", key, "' holds ", shown(value),
                ", expected numbers; remove the file");
        values.push_back(value.is_null() ? NAN : value.get<float>());
    }
    return values;
}

json as_json(const std::vector<float>& values) {
    json list = json::array();
    for (const float value : values) list.push_back(std::isnan(value) ? json() : json(value));
    return list;
}

// Whether the reference has all pairs that the run uses.
bool covers(const std::vector<float>& values, const ExamplePacking* packing) {
    for (int64_t i = 0; packing && i < packing->num_sequences(); i++)
        for (const PackedExample& example : packing->of_sequence(i))
            if (std::isnan(values[2 * size_t(example.pair)])) return false;
    return true;
}

std::vector<float> compute(const Context& ctx, const Model& model, const Activations& acts, const TokenFiles& files,
                           const ExamplePacking& packing, const std::function<void()>& before_batch) {
    std::vector<float> own(2 * size_t(packing.num_pairs_in_files()), NAN);
    const EvalBatches batches{files, acts.shape.B, acts.shape.T, model.config.vocab_size, -1, 0, &packing};
    std::vector<float> logps;
    for_each_own_batch(ctx, batches, [&](const Batch& batch) {
        before_batch();
        const Input in = upload(ctx, acts, batch, true);
        reference_pass(ctx, model, acts, in);
        ctx.wait_for_stream("the reference");
        logps.resize(2 * batch.pairs.size());
        copy_to_host(logps.data(), acts.pair_reference.data, logps.size() * sizeof(float), ctx.stream);
        for (size_t i = 0; i < batch.pairs.size(); i++)
            std::copy_n(&logps[2 * i], 2, &own[2 * size_t(batch.pairs[i].index)]);
    });
    std::vector<float> all(own.size() * size_t(ctx.world));
    ctx.comm->all_gather_host(all.data(), own.data(), own.size() * sizeof(float));
    for (size_t i = 0; i < all.size(); i++)
        if (!std::isnan(all[i])) own[i % own.size()] = all[i];
    return own;
}

void append(std::vector<float>& values, const std::vector<float>& from, const Batch::Pair& pair) {
    values.push_back(from[2 * size_t(pair.index)]);
    values.push_back(from[2 * size_t(pair.index) + 1]);
}

}  // namespace

std::vector<float> PairReference::of_training(const Batch& batch) const {
    std::vector<float> values;
    for (const Batch::Pair& pair : batch.pairs) append(values, train[size_t(pair.source)], pair);
    return values;
}

std::vector<float> PairReference::of_validation(const Batch& batch, size_t source) const {
    std::vector<float> values;
    for (const Batch::Pair& pair : batch.pairs) append(values, val[source], pair);
    return values;
}

PairReference pair_reference(const Context& ctx, const Model& model, const Activations& acts, const TrainSetup& setup,
                             bool resumed, const std::function<void()>& before_batch,
                             const std::function<void(const std::string&)>& note) {
    PairReference reference;
    for (const TrainingData& data : setup.data) {
        const json wanted = identity(setup, model, data);
        const std::string path = join_path(data.directory.path, str("reference-", hash_of(wanted.dump()), ".json"));
        std::string text;
        if (ctx.rank == 0 && path_exists(path)) text = read_file(path);
        ctx.comm->broadcast_host(text, 0);
        std::vector<float> train, val;
        bool found = !text.empty();
        if (found) {
            const json file = parse_json_object(text, path);
            require(file.contains("of") && file["of"] == wanted, path,
                    ": is the reference of another model or of other data; remove the file");
            train = read_values(file, "train", data.train_packing.get(), path);
            val = read_values(file, "val", data.val_packing.get(), path);
            found = covers(train, data.train_packing.get()) && covers(val, data.val_packing.get());
        }
        if (!found) {
            require(!resumed || model.adapters, path, " is missing: the reference of the model that ", setup.o.out,
                    " started from; restore the file, or start a new run");
            train = compute(ctx, model, acts, data.train_files, *data.train_packing, before_batch);
            if (data.val_packing) val = compute(ctx, model, acts, *data.val_files, *data.val_packing, before_batch);
            if (ctx.rank == 0)
                write_file(path, json{{"of", wanted}, {"train", as_json(train)}, {"val", as_json(val)}}.dump() + "\n");
        }
        note(str("reference log-probabilities: ", found ? "from " : "computed once and kept in ", path));
        reference.train.push_back(std::move(train));
        reference.val.push_back(std::move(val));
    }
    return reference;
}
