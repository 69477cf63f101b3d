// Generation with a cache of keys and values: a pass over the new tokens of any number of texts, then steps that add a
// token to each.
//
//     Engine engine(config, options, stream);     plans; nothing is allocated
//     engine.allocate(weights);
//     engine.prefill(prompts);                     all of them in packed passes; draws the token after each
//     for (;;) {
//         const Engine::Step& drawn = engine.next();      waits for the oldest step that isn't read yet
//         ... engine.retire(slot) for what is finished ...
//         engine.decode();                         the drawn tokens are fed back on the device; draws the next ones
//     }
//
// The mathematics of a block is that of forward() in train_gpt.cu with other seams: norm, bias, activation and residual
// are computed inside the products (kernels/generation/linear.h), because a few tokens' pass waits for weights and for
// launches, not for arithmetic, and nothing has to be kept for a backward pass. Tests hold the two together.
//
// Prompts of unequal length are packed without padding. A prompt may continue a text: its slot keeps what is in the
// cache. On a GPU a decode step is one CUDA graph for each number of texts and each doubling of the longest context;
// the host may queue a step before it has read the one before, so that it never keeps the device waiting. For a few
// texts, where the GPU allows it, all from the tokens to the logits is a single launch
// (kernels/generation/decode_step.h).
//
// What a text draws depends on (seed, its sequence number, its step) and its logits. On the CPU these are bit for bit
// those of the text alone, whoever shares the batch; on a GPU with options.batch_invariant too.
#pragma once

#include <map>
#include <memory>

#include "infer/kv_cache.h"
#include "infer/state_cache.h"
#include "kernels/generation/decode_step.h"
#include "kernels/generation/sampling.h"
#include "runtime/device/staging.h"
#include "runtime/model/heads.h"

struct EngineOptions {
    int64_t slots = 1;          // texts at a time
    int64_t context = 0;        // tokens of a text, prompt and answer
    int64_t prompt_tokens = 0;  // most that prompts passed to one prefill() have together; 0: slots·context
    DType dtype = DType::F32;   // of weights, activations and cache
    SamplingOptions sampling;
    bool batch_invariant = false;
    bool logprobs = false;  // Step::logprobs is wanted
};

// New tokens of a text. sequence and step key the draw that follows them (kernels/generation/sampling.h).
struct Prompt {
    int64_t slot = 0;
    std::vector<int32_t> tokens;
    int64_t sequence = 0, step = 0;
};

class Engine {
  public:
    // Throws Error where a context is longer than the model's position table.
    Engine(const ModelConfig& config, const EngineOptions& options, Stream stream);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    // Whoever owns the weights keeps them for as long as the engine lives.
    void allocate(const InferenceWeights& weights);

    // Bytes, for the memory plan.
    int64_t cache_bytes() const { return cache.bytes(); }
    int64_t state_bytes() const { return states.bytes(); }
    int64_t activation_bytes() const { return plan.bytes(); }

    // Tokens that a prompt is cut into at most on its way through the model; a pass takes as many of all prompts.
    static int64_t pass_tokens();
    // Steps that the host may queue before it reads the first of them: 2 where the device works by itself, else 1.
    static int64_t steps_ahead();

    // What was drawn in one step for each text that took part.
    struct Step {
        std::vector<int64_t> slots;
        std::vector<int32_t> tokens;
        std::vector<float> logprobs;  // natural logarithm of the token's probability before penalty, filters and
                                      // temperature; empty if not asked for
    };

    // Appends the prompts' tokens to their slots and queues a step that draws the token after each; decode() goes on
    // with these texts and with those that were not retired before. Every queued step must have been read. Errors: a
    // slot twice or at work, no tokens, a token outside the vocabulary, no room left.
    void prefill(const std::vector<Prompt>& prompts);
    // Queues a step: each text's drawn token joins its context, and the next one is drawn. Only when ready().
    void decode();
    // Whether a step can be queued now: there are texts, all have room, and the host has read what it must know before.
    bool ready() const;
    // The oldest step not read yet. Valid until the next call. Throws Error if the model's logits were not finite.
    const Step& next();
    bool pending() const { return queued > taken; }

    // The text takes no part in further steps; its slot's tokens stay in the cache until forget().
    void retire(int64_t slot);
    // The slot keeps its first `tokens` tokens; returns how many it really keeps: of a model with linear attention all
    // or none. With none left the repetition penalty forgets its text too.
    int64_t forget(int64_t slot, int64_t tokens = 0);
    // Tokens in the cache. A token that was drawn joins them in the step after.
    int64_t length(int64_t slot) const { return lengths[size_t(slot)]; }
    int64_t active() const;  // texts that decode() goes on with
    // The logits that the last step drew from, of its i-th text: [V], as floats.
    std::vector<float> logits(int64_t i) const;

    // Bytes that a decode step reads: weights and the cache of the active texts.
    int64_t step_bytes() const;

    const ModelConfig config;
    const EngineOptions options;

  private:
    struct Text {
        int64_t slot, sequence, step;  // step: of its next draw
        int32_t token;                 // the last one read
        bool retired;
    };
    // Tokens [begin, end) of a prompt.
    struct Piece {
        const Prompt* prompt;
        int64_t begin, end;
    };
    // A step on its way, with the host memory that its results come to.
    struct QueuedStep {
        std::vector<int64_t> slots;  // of each row, -1 where the text is retired
        Event done;
        int32_t* tokens = nullptr;
        float* losses = nullptr;
    };

    void plan_memory();
    void prepare_steps();
    void pass(const std::vector<Piece>& pieces, int64_t first_finished);
    template <typename Attend>
    void blocks(Tensor hidden, bool batch_invariant, Attend attend);
    LinearAttentionState past_states(const LinearAttentionState& from);
    template <typename Attend>
    void mix_linear(int64_t l, int64_t N, const Tensor& angles, Attend attend);
    Tensor angle_rows(int64_t N) const { return (dynamic ? iota : positions).rows(0, N); }
    void put_angles(const std::vector<int32_t>& places, const std::vector<int64_t>& text_lengths);
    void put_batch(bool drawn);
    void pack();
    DecodeModel decode_model() const;
    void head(Tensor hidden);
    void draw(int64_t B);
    void queue_results(int64_t B);
    void decode_step(int64_t B, int64_t max_length);

    const Stream stream;
    const bool dynamic;                // angles depend on how long a text has become
    const int64_t single_launch_rows;  // texts that a step in one launch takes
    KvCache cache;
    StateCache states;
    ArenaPlan plan;
    Arena memory;
    std::vector<std::pair<Tensor*, int64_t>> bindings;  // which plan entry each tensor is
    InferenceWeights weights;
    int64_t weight_bytes = 0;
    std::unique_ptr<Staging> staging;

    // A pass over N tokens.
    Tensor tokens, positions, rows, iota;  // [N] int32; iota: 0 … N − 1
    Tensor cum_q, cum_k;                   // [2·slots + 1] int32
    Tensor x, qkv, att, act;               // [N, C], [N, (NH + 2·NKV)·HS], [N, NH·HS], [N, ffn]
    Tensor normed, gate, mix;              // kind G: [N, C], [N, NKV] fp32, att before the heads' norm
    Tensor linear_cum, linear_slots;       // [slots + 1], [slots] int32: sequences without gaps
    Tensor past_s, past_z;                 // [slots, NKV, HS, HS], [slots, NKV, HS]: a layer's states
    Tensor scratch, attention_scratch, decode_scratch, step_scratch;  // bytes
    Tensor table;  // [context, R/2, 2], or dynamic: the angles of each token of the pass
    // A step over B texts.
    Tensor last, last_rows;                // [B, C] what the head reads; [B] int32 where a pass left it
    Tensor logits_out, losses;             // [B, Vp], [B] fp32
    Tensor ids, slot_ids, step_positions;  // [B] int32
    Tensor sequences, steps, seen;         // [B] int64, [B] int64, [B, ⌈V/32⌉] int32
    Tensor told, turn;                     // [2, B] on the host, what is drawn in turns; [1] int32
    Tensor draw_scratch;                   // bytes

    std::vector<Text> batch;                              // the rows of a step
    bool repack = false;                                  // the rows on the device are not those of batch
    std::vector<int64_t> lengths;                         // by slot
    std::vector<std::vector<int32_t>> marks;              // by slot: bits of the tokens read; empty without a penalty
    std::map<std::pair<int64_t, int64_t>, Graph> graphs;  // by texts and longest context

    HostMemory results{nullptr, host_free};
    QueuedStep queue[2];
    int64_t queued = 0, taken = 0;
    Step step;
};
