// A model with its weights for the commands that don't train: its forward pass, or the engine that generates with it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "driver/adapter_bank.h"
#include "infer/engine.h"
#include "model.h"
#include "runtime/device/target.h"

constexpr const char* NO_WEIGHTS = " is a preset without weights; name a model directory or a run";

// A model with its weights, and activations for one pass over B sequences of T tokens.
struct LoadedModel {
    ModelSource source;
    Model model;
    Activations acts;

    LoadedModel(const Context& ctx, const ModelSource& from, const RunShape& shape);
};

// A model with its weights, or random ones, and what generates with it.
struct LoadedEngine {
    Model model;
    std::vector<LoraAdapter> adapters;  // until they are in the bank
    std::unique_ptr<AdapterBank> bank;  // null: none
    Engine engine;

    // adapter_names: of LoRA adapters that prompts may use, by their index (read_adapters()). With more
    // options.adapters, those after them are zeros.
    LoadedEngine(const Context& ctx, const ModelSource& source, const EngineOptions& options, bool random_weights,
                 const std::vector<std::string>& adapter_names = {});
};

// What --weights means for a model: how its matrices are packed, or nothing: they stay in the model's dtype. "model":
// as its directory holds them. Throws Error where the directory's weights are packed in another way.
std::optional<Packing> packing_of(const ModelSource& source, const std::string& weights);

// The same for an engine. The matrices of a GGUF file with blocks of one packed type keep its codes (gguf_packing()).
// On the CPU, which computes in fp32, those of a directory in bf16 stay in bf16: they are converted in registers, and
// the results have the same bits. An adapter would be rounded, so with one they do not.
std::optional<Packings> generation_packing(const ModelSource& source, const std::string& weights, DType dtype);

Precision inference_precision(DType dtype, std::optional<Packings> packing);
// Sets what --weights means for generation.
void take_weights(EngineOptions& options, const ModelSource& source, const std::string& weights);
// A model for inference; nf4: the blocks' linear layers in NF4.
Model inference_model(const ModelConfig& config, DType dtype, std::optional<Packings> packing, bool nf4 = false);

// The weights as infer/ takes them.
InferenceWeights inference_weights(const Model& model);

// The engine of a run's rollouts (rl/rollouts.h), and the bytes that it and its copy of the adapters take: memory that
// the run's activations use between rollouts.
EngineOptions rollout_engine(const RunOptions& options, int64_t world);
// With --rollout exact: the activations of the engine's passes of so many tokens (rl/exact_forward.h), also in that
// memory.
RunShape rollout_forward(const RunOptions& options, const Model& model, int64_t pass_tokens);
// Sets options.rollout.exact. Throws Error where --rollout asks for what the model or the target does not support.
void choose_sampler(RunOptions& options, const ModelConfig& config, const Target& target);
int64_t rollout_bytes(const RunOptions& options, const Model& model);
// rl --kl without adapters: beside the model that is trained the one that the run started from is kept, whole, in the
// same dtype. Nothing is allocated.
bool keeps_reference(const RunShape& shape, const Model& trained);
Model reference_model(const Model& trained);
MemoryPlan memory_plan(const Model& model, const Engine& engine, const AdapterBank* bank = nullptr);

// A tensor of any of the float dtypes, on the host.
std::vector<float> fetch_floats(const Context& ctx, const Tensor& t);
