#include "models/lora.h"

#include <algorithm>
#include <cmath>

#include "runtime/files/weight_files.h"
#include "runtime/text.h"

namespace {

constexpr const char* ALL_LINEAR = "all-linear";

std::string joined(const std::vector<std::string>& names) {
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "" : ",") + name;
    return all;
}

// "model.layers.0.self_attn.q_proj.weight" without ".weight".
std::string module_of(const SourceTensor& source) {
    const std::string& name = source.name;
    return name.substr(0, name.rfind('.'));
}

std::string last_part(const std::string& module) {
    return module.substr(module.rfind('.') + 1);
}

// peft's rule: the name, or the end of it behind a point.
bool is_target(const std::string& module, const std::string& target) {
    return module == target || ends_with(module, "." + target);
}

bool is_linear_layer(const Param& p) {
    return linear_layer_index(p.role) >= 0;
}

bool is_vocabulary(const Param& p) {
    return p.role == WTE || p.role == HEAD_W;
}

bool names(const Param& p, const std::string& target) {
    return std::any_of(p.sources.begin(), p.sources.end(),
                       [&](const SourceTensor& s) { return is_target(module_of(s), target); });
}

// peft would change the embedding of a tied model, and not the head, or the reverse.
void check_vocabulary_target(const ParamTable& base, const std::string& target) {
    const bool tied = !base.find(HEAD_W), head = target == "lm_head" || ends_with(target, ".lm_head");
    require(!tied || (!head && !names(*base.find(WTE), target)), "--lora-targets ", target,
            ": the model's head is tied to its embedding; leave it out, or use a model with an untied head");
}

// The matrices of the blocks' linear layers by the last part of their names, in the order of the table.
std::vector<std::string> linear_names(const ParamTable& base) {
    std::vector<std::string> names;
    for (const Param& p : base.params)
        for (const SourceTensor& source : p.sources) {
            const std::string name = last_part(module_of(source));
            if (is_linear_layer(p) && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        }
    return names;
}

std::vector<std::string> resolved_targets(const ParamTable& base, const std::vector<std::string>& targets) {
    const std::vector<std::string> all = linear_names(base);
    if (targets == std::vector<std::string>{ALL_LINEAR}) return all;
    for (const std::string& target : targets) {
        check_vocabulary_target(base, target);
        const bool found = std::any_of(base.params.begin(), base.params.end(), [&](const Param& p) {
            return (is_linear_layer(p) || is_vocabulary(p)) && names(p, target);
        });
        const std::string others =
            base.find(HEAD_W) ? str(", and embedding and head ", last_part(module_of(base.find(WTE)->sources[0])), ",",
                                    last_part(module_of(base.find(HEAD_W)->sources[0])))
                              : "";
        require(found, "--lora-targets ", target, ": the model's blocks have no such linear layer; they have ",
                joined(all), others, ", or give ", ALL_LINEAR);
    }
    return targets;
}

// A or B of a parameter's adapters.
Param matrices(const Param& base, int role, const char* half, const std::vector<SourceTensor>& sources, int64_t cols,
               OptimizerType optimizer) {
    Param p{};
    p.sources = sources;
    p.optimizer = optimizer;
    for (const SourceTensor& source : sources) p.part_rows.push_back(source.rows);
    const int64_t rows = sources.back().row + sources.back().rows;
    p.role = role;
    p.layer = base.layer;
    p.group = base.group;
    p.name = str(base.name.substr(0, base.name.rfind('.')), ".", half);
    p.rows = p.padded_rows = rows;
    p.cols = cols;
    p.decay = true;
    p.rate_group = RateGroup::HiddenMatrices;
    return p;
}

}  // namespace

double LoraOptions::scale() const {
    return alpha / (rank_stabilized ? std::sqrt(double(rank)) : double(rank));
}

std::string LoraOptions::description() const {
    return on() ? str("rank ", rank, ", alpha ", alpha, rank_stabilized ? " (rsLoRA)" : "", ", targets ",
                      joined(targets), nf4 ? ", base in NF4" : "")
                : "none";
}

LoraTable::LoraTable(const ParamTable& base, LoraOptions lora, int64_t world, OptimizerType optimizer)
    : options(std::move(lora)) {
    options.targets = resolved_targets(base, options.targets);
    const int64_t R = options.rank;
    for (const Param& p : base.params) {
        if (!is_linear_layer(p) && !is_vocabulary(p)) continue;
        std::vector<LoraPart> own;
        std::vector<SourceTensor> a_sources, b_sources;
        int64_t b_rows = 0;
        for (const SourceTensor& source : p.sources) {
            const std::string module = module_of(source), name = "base_model.model." + module;
            const auto& targets = options.targets;
            if (std::none_of(targets.begin(), targets.end(), [&](const auto& t) { return is_target(module, t); }))
                continue;
            if (p.role == WTE) {
                a_sources.push_back({name + ".lora_embedding_A", 0, source.rows, true});
                b_sources.push_back({name + ".lora_embedding_B", 0, p.cols, false});
            } else {
                a_sources.push_back({name + ".lora_A.weight", int64_t(own.size()) * R, R, false});
                b_sources.push_back({name + ".lora_B.weight", b_rows, source.rows, false});
            }
            own.push_back({source.row, source.rows});
            b_rows += source.rows;
        }
        if (own.empty()) continue;
        Param a = matrices(p, lora_a(Role(p.role)), "lora_A", a_sources, p.role == WTE ? R : p.cols, optimizer),
              b = matrices(p, lora_b(Role(p.role)), "lora_B", b_sources, R, optimizer);
        if (p.role == WTE)
            b.init_std = 1;
        else
            a.init_bound = float(1 / std::sqrt(double(p.cols)));
        if (is_vocabulary(p)) {
            require(optimizer == OptimizerType::AdamW, "--lora-targets ", last_part(module_of(p.sources[0])),
                    ": Muon is for hidden matrices; leave it out, or use --optimizer adamw");
            if (p.role == WTE) a.rate_group = b.rate_group = RateGroup::Embeddings;  // summed in fp32 (GradientOptions)
            vocabulary = R;
        } else {
            int64_t& width = widths[size_t(linear_layer_index(p.role))];
            width = std::max(width, a.rows);
        }
        params.params.push_back(std::move(a));
        params.params.push_back(std::move(b));
        parts[{p.role, p.layer}] = std::move(own);
    }
    params.file = ADAPTER_WEIGHTS;
    params.layout(world);
}
