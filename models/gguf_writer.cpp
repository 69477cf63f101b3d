#include "models/gguf_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "data/gguf_tokenizer.h"
#include "models/family.h"
#include "models/gguf_architecture.h"
#include "models/gguf_keys.h"
#include "models/gguf_rope.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/json_keys.h"
#include "runtime/files/non_finite.h"

using nlohmann::json;

namespace {

constexpr int64_t QUANTISATION_VERSION = 2;  // of the layouts of blocks

// general.file_type: the type of most tensors, as llama.cpp numbers them.
int64_t file_type_of(GgufType type) {
    switch (type) {
        case GgufType::F16:
            return 1;
        case GgufType::Q4_0:
            return 2;
        case GgufType::Q8_0:
            return 7;
        case GgufType::BF16:
            return 32;
        default:
            return 0;
    }
}

GgufType type_of(DType dtype) {
    return dtype == DType::F16 ? GgufType::F16 : dtype == DType::BF16 ? GgufType::BF16 : GgufType::F32;
}

// The option that no family but this project's own has.
std::string own_option(const ModelConfig& c) {
    if (c.has_linear_attention()) return "linear attention";
    if (c.activation == Activation::ReLU2) return "ReLU² in such an MLP";
    if (c.embedding_norm) return "norm after the embedding";
    if (c.qk_norm == QkNorm::Plain) return "QK-norm without weights";
    if (c.logit_softcap) return "softcap in such a model";
    return "model with this combination of options";
}

// What llama.cpp lacks of a family that it knows.
std::string lacks(const std::string& family, const std::string& architecture, const ModelConfig& c) {
    const bool llama = architecture == "llama", fused = architecture == "phi3" || architecture == "gpt2";
    if (c.rope_scaling.kind == RopeScaling::Kind::Dynamic) return "dynamic RoPE scaling";
    if (c.has_windows() && family != "phi3" && family != "mistral")
        return str("windows in models of type ", architecture);
    if (!llama && !fused && c.proj_bias) return str("biases of attention's output in models of type ", architecture);
    if (!llama && architecture != "gpt2" && c.mlp_bias)
        return str("biases in the MLP of models of type ", architecture);
    if (architecture == "olmo2" && c.tied) return "a tied head in models of type olmo2";
    if (architecture == "olmo2" && c.heads * c.head_size != c.channels)
        return "a head size other than channels / heads in models of type olmo2";
    for (int64_t l = 0; architecture == "smollm3" && l < c.layers; l++)
        if (c.uses_rope(l) != ((l + 1) % 4 != 0)) return "other layers without RoPE than each fourth";
    return "";
}

class GgufExport {
  public:
    GgufExport(const ModelSource& model, const ParamTable& params, const WeightSource& from, const GgufWeights& types,
               std::string target)
        : source(model), config(model.config), table(params), weights(from), wanted(types), path(std::move(target)) {
        architecture = find_gguf_architecture(gguf_fit(config).architecture);
        require(architecture, path, ": llama.cpp has no such model");
    }

    std::string write(const std::string& file, const ModelFiles& tokenizer) {
        set_keys(tokenizer);
        const bool rope_factors = config.rope_scaling.kind == RopeScaling::Kind::Llama3;
        if (rope_factors) writer.declare("rope_freqs.weight", GgufType::F32, {config.head_size / 2});
        for_tensors([&](const Param& p, size_t i, const std::string& name) {
            const int64_t rows = p.sources[i].rows;
            writer.declare(name, stored_type(p, i, name, true),
                           p.cols ? std::vector<int64_t>{rows, p.cols} : std::vector<int64_t>{rows});
        });
        writer.begin(file, path);
        if (rope_factors) {
            const auto exact = llama3_rope_factors(config.rope_scaling, config.rope_theta, config.head_size);
            const std::vector<float> factors(exact.begin(), exact.end());
            writer.write(factors.data(), int64_t(factors.size() * sizeof(float)));
        }
        const Param* fetched = nullptr;
        const float* values = nullptr;
        for_tensors([&](const Param& p, size_t i, const std::string& name) {
            if (fetched != &p) values = weights.fetch(p, buffer);
            fetched = &p;
            write_tensor(p, i, name, values + p.sources[i].row * p.row_size());
        });
        writer.finish();
        return notes;
    }

  private:
    std::string key(const char* of) const { return str(architecture->name, ".", of); }

    void set_keys(const ModelFiles& tokenizer) {
        const ModelConfig& c = config;
        writer.set("general.architecture", architecture->name);
        writer.set("general.type", "model");
        writer.set("general.file_type",
                   file_type_of(wanted.as_stored ? type_of(stored_dtype(table.params[0], 0)) : wanted.type));
        writer.set("general.quantization_version", QUANTISATION_VERSION);
        writer.set(key("vocab_size"), c.vocab_size);
        writer.set(key("context_length"), c.max_positions);
        writer.set(key("embedding_length"), c.channels);
        writer.set(key("block_count"), c.layers);
        writer.set(key("feed_forward_length"), c.ffn);
        writer.set(key("attention.head_count"), c.heads);
        writer.set(key(c.norm == Norm::LayerNorm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"),
                   c.norm_eps);
        if (c.positions == Positions::RoPE) set_llama_keys();
        set_sampling();
        std::vector<int32_t> ends = declared_end_tokens(source);
        if (ends.empty() && c.eos >= 0) ends = {c.eos};
        set_gguf_tokenizer(writer, tokenizer, {c.vocab_size, c.bos, ends});
    }

    void set_llama_keys() {
        const ModelConfig& c = config;
        writer.set(key("attention.head_count_kv"), c.kv_heads);
        writer.set(key("attention.key_length"), c.head_size);
        writer.set(key("attention.value_length"), c.head_size);
        writer.set(key("rope.dimension_count"), c.rotary_channels());
        writer.set(key("rope.freq_base"), c.rope_theta);
        if (c.rope_scaling.kind == RopeScaling::Kind::Linear) {
            writer.set(key("rope.scaling.type"), "linear");
            writer.set(key("rope.scaling.factor"), c.rope_scaling.factor);
        }
        if (c.has_windows()) {
            writer.set(key("attention.sliding_window"), c.smallest_window());
            notes += str(path, ": llama.cpp applies no window in models of type ", architecture->name,
                         "; it computes what this model does up to ", c.smallest_window(), " tokens\n");
        }
        if (architecture->name == std::string("phi3"))
            writer.set(key("rope.scaling.original_context_length"), c.max_positions);
    }

    void set_sampling() {
        const JsonKeys generation = generation_config(source);
        for (const auto& [theirs, ours] : GGUF_SAMPLING) {
            const json found = generation.object.value(ours, json());
            const std::string name = str("general.sampling.", theirs);
            if (found.is_number_integer() && std::string(ours) == "top_k")
                writer.set(name, found.get<int64_t>());
            else if (found.is_number())
                writer.set(name, found.get<double>());
        }
    }

    template <typename Use>
    void for_tensors(const Use& use) const {
        for (const Param& p : table.params) {
            const std::vector<std::string> names = gguf_names(*architecture, p);
            for (size_t i = 0; i < names.size(); i++) use(p, i, names[i]);
        }
    }

    DType stored_dtype(const Param& p, size_t i) const { return weights.dtype(p, p.sources[i]); }

    GgufType stored_type(const Param& p, size_t i, const std::string& name, bool tell) {
        if (!p.cols || p.role == WPE) return GgufType::F32;
        if (wanted.as_stored) return type_of(stored_dtype(p, i));
        if (!wanted.quantised || p.cols % facts_of(wanted.type).block_size == 0) return wanted.type;
        const GgufType type = stored_dtype(p, i) == DType::BF16 ? GgufType::BF16 : GgufType::F16;
        if (tell)
            notes += str(path, ": tensor ", name, " stays ", facts_of(type).name, ": its rows of ", p.cols,
                         " are no whole number of blocks of ", facts_of(wanted.type).block_size, "\n");
        return type;
    }

    // values: the rows of the tensor, [rows, cols], in the order of the parameter.
    void write_tensor(const Param& p, size_t i, const std::string& name, const float* values) {
        const GgufTypeFacts& type = facts_of(stored_type(p, i, name, false));
        const int64_t rows = p.sources[i].rows, C = p.row_size(), HS = config.head_size;
        const bool interleaves = gguf_interleaves(*architecture, p, i);
        if (type.quantised())
            require(all_finite(values, rows * C), path, ": tensor ", name,
                    " holds NaN or infinities, which no blocks can hold; repair the model");
        else if (type.type() != GgufType::F32)
            check_range(values, rows * C, type.type() == GgufType::F16 ? DType::F16 : DType::BF16, path, name);
        const int64_t row_bytes = type.bytes(C), chunk = std::max<int64_t>(1, (int64_t(1) << 22) / C);
        for (int64_t begin = 0; begin < rows; begin += chunk) {
            const int64_t n = std::min(chunk, rows - begin);
            bytes.resize(size_t(n * row_bytes));
#pragma omp parallel for schedule(static) if (n * C > 1 << 16)
            for (int64_t r = begin; r < begin + n; r++) {
                // Row 2i + s of a head in the file is row i + s·HS/2.
                const int64_t in_head = r % HS,
                              from = interleaves ? r - in_head + in_head / 2 + in_head % 2 * (HS / 2) : r;
                convert_row(bytes.data() + (r - begin) * row_bytes, type, values + from * C, C);
            }
            if (type.quantised()) check_scales(type, n * C / type.block_size, name);
            writer.write(bytes.data(), int64_t(bytes.size()));
        }
    }

    static void convert_row(uint8_t* dst, const GgufTypeFacts& type, const float* src, int64_t C) {
        switch (type.type()) {
            case GgufType::Q8_0:
                return quantise_q8_0(dst, src, C / type.block_size);
            case GgufType::Q4_0:
                return quantise_q4_0(dst, src, C / type.block_size);
            case GgufType::F16:
                return convert_from_float(dst, DType::F16, src, C);
            case GgufType::BF16:
                return convert_from_float(dst, DType::BF16, src, C);
            default:
                return convert_from_float(dst, DType::F32, src, C);
        }
    }

    // The scales of n blocks in `bytes`, each of which starts with its own.
    void check_scales(const GgufTypeFacts& type, int64_t n, const std::string& name) const {
        for (int64_t b = 0; b < n; b++) {
            const uint8_t high = bytes[size_t(b * type.block_bytes + 1)];
            require((high & 0x7C) != 0x7C, path, ": tensor ", name, " has values that are too large for ", type.name,
                    ", whose scales are fp16; use --weights bf16");
        }
    }

    const ModelSource& source;
    const ModelConfig& config;
    const ParamTable& table;
    const WeightSource& weights;
    const GgufWeights wanted;
    const std::string path;
    const GgufArchitecture* architecture = nullptr;
    GgufWriter writer;
    std::string notes;
    std::vector<float> buffer;
    std::vector<uint8_t> bytes;
};

}  // namespace

GgufFit gguf_fit(const ModelConfig& c) {
    const std::string family = family_of(c).name, architecture = family == "mistral" ? "llama" : family;
    if (!find_gguf_architecture(architecture)) return {"", own_option(c)};
    return {architecture, lacks(family, architecture, c)};
}

std::string write_gguf(const std::string& path, const ModelSource& source, const ModelFiles& tokenizer,
                       const ParamTable& table, const WeightSource& weights, const GgufWeights& types) {
    require(!path_exists(path), path, ": exists already; choose another name or remove it");
    GgufExport out(source, table, weights, types, path);
    const std::string temporary = temporary_path(path);
    try {
        const std::string notes = out.write(temporary, tokenizer);
        const bool renamed = std::rename(temporary.c_str(), path.c_str()) == 0;
        if (!renamed) throw_system_error(path, "create", errno);
        return notes;
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
}
