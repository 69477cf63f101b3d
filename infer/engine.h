// Generation with a KV cache: prefill passes over the prompts of any number of sequences, then decode steps that add
// one token to each sequence.
//
//     Engine engine(config, options, stream);     plans the memory; allocates nothing
//     engine.allocate(weights);
//     engine.prefill(prompts);                     runs all prompts in packed passes; samples the token after each
//     for (;;) {
//         const Engine::Step& sampled = engine.next();    waits for the oldest step that was not read yet
//         ... engine.retire(slot) for each finished sequence ...
//         engine.decode();                         feeds the sampled tokens back on the device; samples the next ones;
//                                                  decode(prompts) computes more prompts in the same pass
//     }
//
// A block computes what block_forward() in train_gpt.cu computes, but norm, bias, activation and residual are fused
// into the matmuls (kernels/generation/linear.h): a pass over a few tokens is limited by reading weights and by
// launches, and nothing has to be kept for a backward pass. Tests compare the two.
//
// Prompts of unequal length are packed without padding. A prompt may continue a sequence: its KV slot keeps the tokens
// that are in the cache. On a GPU a decode step is one CUDA graph for each batch size (above 8, multiples of 8: the
// other rows are unused) and each power of two that the longest sequence reaches. The host may queue a step before it
// has read the previous one, so the device never waits for the host. For small batches, where the GPU supports it, one
// persistent kernel computes everything from the tokens to the logits: the fused decode step
// (kernels/generation/decode_step.h).
//
// Each prompt has sampling options of its own. They are in device memory, so that one graph serves any options; there
// is a graph for each set of kernels that the sequences of a batch need together.
//
// The tokens that a sequence samples depend on (seed, sequence id, step) and its logits. On the CPU these logits have
// the same bits whatever the rest of the batch is. On a GPU they do with options.batch_invariant.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "infer/kv_cache.h"
#include "infer/state_cache.h"
#include "kernels/attention/attention.h"
#include "kernels/generation/decode_step.h"
#include "kernels/generation/linear.h"
#include "kernels/generation/sampling.h"
#include "runtime/device/staging.h"
#include "runtime/model/head_views.h"

struct EngineOptions {
    int64_t slots = 1;          // largest batch size: sequences that generate at the same time
    int64_t context = 0;        // largest length of a sequence in tokens, prompt and completion
    int64_t prompt_tokens = 0;  // largest sum of the prompt lengths of one prefill(); 0: slots·context
    int64_t cache_pages = 0;    // pages of the KV cache (infer/kv_cache.h); 0: enough for all slots at full length
    DType dtype = DType::F32;   // of weights, activations and cache
    std::optional<Packings> packing = {};  // of the matrices that packs() (runtime/model/packed_params.h)
    bool nf4 = false;                      // the blocks' linear layers are in NF4
    SamplingOptions sampling;              // of prompts without options of their own
    // What prompts may ask for; memory is planned for no more.
    uint32_t sampling_classes = 0;  // bits of sampling_class, beside those that `sampling` needs
    int64_t top_logprobs = 0;       // at most MAX_TOP_LOGPROBS
    bool prompt_logprobs = false;
    int64_t sampled_vocab = 0;  // only ids below this are sampled (infer/prompts.h); 0: the model's whole vocabulary
    bool batch_invariant = false;
    bool tune_matmuls = true;  // time the GEMM library's algorithms for a full batch (matmul.h)
    bool logprobs = false;     // fill Step::logprobs for all prompts
    // On a GPU: requests come and go at any time, so the graphs of all batch sizes and of short passes over prompts are
    // recorded ahead, which takes a second or less, and more where the passes' matmuls are not chosen yet. Otherwise
    // those of steps are recorded when they are needed, which delays a token by milliseconds.
    bool all_batch_sizes = false;
    int64_t adapters = 0;      // LoRA adapters that prompts choose from (InferenceWeights::adapters)
    int64_t adapter_rank = 0;  // R of kernels/generation/lora_rows.h
    // Blocks and head are computed by the EngineForward that allocate() gets, and a decode step is a pass like those
    // over prompts. Logits are in fp32. On the CPU, on a GPU in bf16; for softmax attention whose RoPE angles do not
    // depend on a sequence's length; without adapters, top and prompt logprobs.
    bool outside_forward = false;
    // Whether a step may compute prompts in its own pass (decode()); none: where no bits are promised. Not with linear
    // attention, nor with outside_forward, nor, on a GPU, with batch_invariant: true is an error there.
    std::optional<bool> joint_passes = {};
};

// The forward pass of another program over the model, for EngineOptions::outside_forward. The engine keeps the cache.
class EngineForward {
  public:
    virtual ~EngineForward() = default;
    // Computes layer l's att [N, NH·HS] from its qkv, after QK-norm and RoPE, and from the cache, to which it appends.
    using Attend = std::function<void(int64_t l, Tensor qkv, Tensor att)>;
    // tokens, positions [N] int32, through all blocks. out [n, C]: the input of head() for the rows [n] of them.
    virtual void blocks(Tensor out, Tensor rows, Tensor tokens, Tensor positions, const Attend& attend) = 0;
    // out [n, Vp] fp32: the logits before the softcap.
    virtual void head(Tensor out, Tensor inp) = 0;
    // out [n] fp32: the losses of targets [n], by the arithmetic of the other program. inp: that of head(); logits:
    // what head() wrote, with the softcap, undefined afterwards.
    virtual void losses(Tensor out, Tensor targets, Tensor inp, Tensor logits) = 0;
};

constexpr int64_t MAX_TOP_LOGPROBS = 20;

// New tokens of a sequence. (sequence, step) keys the random number that samples the token after them
// (kernels/generation/sampling.h).
struct Prompt {
    int64_t slot = 0;
    std::vector<int32_t> tokens;
    int64_t sequence = 0, step = 0;
    int32_t adapter = -1;  // of all tokens of a sequence; -1: none
    int64_t later = 0;     // tokens of the prompt that come with another prefill(); with some, no token is sampled yet
    // The slot of another prompt of the same call, which ends with it. This sequence has the same tokens from the
    // beginning: its own slot is empty and `tokens` too, and it shares the other's pages.
    int64_t like = -1;
    std::optional<SamplingOptions> sampling = {};  // none: those of EngineOptions
    std::vector<int32_t> mask = {};                // bit v%32 of word v/32: token v may be sampled; empty: all may
    std::vector<int32_t> completion = {};  // tokens of the completion so far, for presence and frequency penalty
    bool logprobs = false;                 // fill Step::logprobs
    int64_t top_logprobs = 0;              // and Step::top_logprobs with so many tokens
    bool prompt_logprobs = false;          // fill Step::prompt_logprobs, and prompt_top_logprobs

    bool ends() const { return later == 0; }
};

struct TokenLogprob {
    int32_t token;
    float logprob;
};

class Engine {
  public:
    // Throws Error where the context is longer than the model's position table.
    Engine(const ModelConfig& config, const EngineOptions& options, Stream stream);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    // The caller owns the weights and keeps them for as long as the engine lives. Throws Error for weights in NF4 or
    // with LoRA adapters. shared: U8 [bytes()], memory that the engine uses and does not own; null: it gets its own.
    // forward_pass: with options.outside_forward, the caller's.
    void allocate(const InferenceWeights& weights, const Tensor& shared = {}, EngineForward* forward_pass = nullptr);
    // For shared memory that something else has used, and for weights that have changed: what the memory holds is lost,
    // no page is found by its content. No sequence may be active, and all slots must be empty.
    void restart();

    // Bytes, for the memory plan.
    int64_t cache_bytes() const { return cache.bytes(); }
    int64_t state_bytes() const { return states.bytes(); }
    int64_t activation_bytes() const { return plan.bytes(); }
    int64_t bytes() const;        // of all of them, in one piece
    int64_t pass_tokens() const;  // the most of a pass

    // Prefill cuts a prompt into chunks of this many tokens. A pass takes chunks of several prompts, up to the same
    // number of tokens together.
    static int64_t prompt_chunk_tokens();
    // The same where running sequences wait for the pass: few, but a page each of two prompts.
    static constexpr int64_t PROMPT_TOKENS_BESIDE_DECODING = 2 * KV_PAGE;
    // Rows of a step that computes prompts, too, while others generate.
    static constexpr int64_t JOINT_PASS_ROWS = 3 * KV_PAGE;
    // Steps that the host may queue before it reads the first of them: 2 where the device runs asynchronously, else 1.
    static int64_t steps_ahead();

    // The tokens sampled in one step, for each sequence that took part.
    struct Step {
        std::vector<int64_t> slots;
        std::vector<int32_t> tokens;
        std::vector<float> logprobs;  // natural logarithm of the token's probability before penalty, temperature and
                                      // filters; empty where no sequence asks for it
        // By sequence, where it asks for them: the most likely tokens, the first one first, and in the step of a
        // prefill the logprobs of the prompt's tokens from its second one on, each given the tokens before it. May be
        // longer than slots.
        std::vector<std::vector<TokenLogprob>> top_logprobs;
        std::vector<std::vector<float>> prompt_logprobs;
        std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;  // Prompt::top_logprobs for each of these tokens
        bool with_prompts = false;                                   // it comes from a pass that computed prompts
    };

    // Appends the prompts' tokens to their slots and queues a step that samples the token after each, in the order of
    // the prompts. decode() then continues these sequences and all earlier ones that were not retired. Every queued
    // step must have been read, unless takes_prompts_while_pending() and more tokens of all prompts are to come. In the
    // step, prompts `like` another follow it. If more tokens of all prompts are to come, no step is queued. Throws
    // Error for a slot that is given twice or is still generating, a prompt without tokens, a token outside the
    // vocabulary, a sequence that exceeds the context, more tokens in all than options.prompt_tokens, a mask that
    // allows no token, what the engine was not planned for, or prompts that the cache has too few free pages for
    // (has_room()).
    void prefill(const std::vector<Prompt>& prompts);
    bool takes_prompts_while_pending() const { return options.adapters == 0; }  // a pass overwrites the steps' tiles
    // Queues a step: each sequence's sampled token joins its context, and the next token is sampled. Call it only when
    // ready(). With prompts, only when joins(): they are computed in the same pass, whose matmuls read the weights once
    // for both, and those that end sample the token after them in this step, in the rows after those of the sequences
    // that were there. Throws the errors of prefill(), and Error where the step does not join the prompts.
    void decode(const std::vector<Prompt>& prompts = {});
    // Whether the next step may compute so many tokens of prompts, of which some end.
    bool joins(int64_t prompt_tokens, bool ends) const;
    // Whether it ever does; the most tokens of prompts beside the sequences that generate now.
    bool joins_at_all() const { return options.joint_passes.value_or(!promises_bits()) && can_join(); }
    int64_t most_joining() const;
    // Rows of a joint pass that the sequences in the batch take: few numbers, so that few graphs serve all.
    int64_t joint_rows() const;
    // Whether a step can be queued now: at least one sequence is active, none has reached the context limit, the cache
    // has a free page for each sequence that needs one, and the host has read the steps that the next one depends on.
    bool ready() const;
    // Whether the cache has free pages for these prompts.
    bool has_room(const std::vector<Prompt>& prompts, int64_t beside = 0) const;  // and for `beside` more
    // Pages of the cache that a sequence of so many tokens takes, and how many are free.
    int64_t pages_for(int64_t length_of_sequence) const { return cache.pages_for(length_of_sequence); }
    int64_t pages_available() const { return cache.pages_available(); }
    // Pages that the next step of the active sequences takes. Where there are fewer, no step is ready: retire() and
    // truncate() a sequence to get more, or suspend() it.
    int64_t pages_missing() const;
    // How many pages are in use.
    int64_t pages_in_use() const { return cache.pages_in_use(); }
    const KvCache& kv_cache() const { return cache; }  // a test looks at which sequences hold them

    // Gives an empty slot what the cache still has of the beginning of a sequence with these tokens. Returns how many
    // tokens that is, a multiple of KV_PAGE and fewer than all; prefill() continues with the next one. 0 for models
    // with windows, linear attention or dynamic RoPE scaling, whose pages are not found by content.
    int64_t adopt(int64_t slot, const std::vector<int32_t>& sequence_tokens, int64_t name_space);
    // The slot's sequence begins with these tokens: adopt() finds them until their pages are needed, least recently
    // used first. Sequences of one name space only find each other's; those of another adapter need another one.
    void remember(int64_t slot, const std::vector<int32_t>& sequence_tokens, int64_t name_space);

    // Whether a sequence's logits have the same bits whatever the batch is. Then what decode steps have written is not
    // remember()ed, because a prefill would round it otherwise.
    bool promises_bits() const { return backend_device() == Device::CPU || options.batch_invariant; }
    // Whether prompts are computed a page at a time, in passes of KV_PAGE rows of which the last may belong to no
    // sequence: a GPU's matmuls and linear attention choose the order of their sums by the number of rows.
    bool prompts_by_page() const { return backend_device() != Device::CPU && options.batch_invariant; }

    // Takes an active sequence out of the batch and keeps its keys and values on the host; resume() continues it with
    // the same bits as soon as can_resume(). Its slot stays taken. Every queued step must have been read.
    void suspend(int64_t slot);
    void resume(int64_t slot);
    bool can_resume(int64_t slot) const;
    bool is_suspended(int64_t slot) const { return suspended.count(slot) > 0; }
    // The oldest step that was not read yet. Valid until the next call. Throws Error if the logits were not finite.
    const Step& next();
    bool pending() const { return steps_queued > steps_read; }

    // The sequence takes no part in further steps. Its tokens keep their pages of the cache until truncate().
    void retire(int64_t slot);
    // Cuts the slot's sequence to its first `tokens` tokens. Returns how many are kept: a model with linear attention
    // keeps all tokens or none. If none are kept, the repetition penalty starts from an empty sequence too.
    int64_t truncate(int64_t slot, int64_t tokens = 0);
    // Tokens in the cache. A sampled token joins them in the next step.
    int64_t length(int64_t slot) const { return lengths[size_t(slot)]; }
    int64_t active() const;  // sequences that decode() continues
    // The logits that the last step sampled from, of its i-th sequence: [V], as floats.
    std::vector<float> logits(int64_t i) const;

    // The model option (its name on the command line) for which decode steps run kernel by kernel although this GPU has
    // the fused decode step; null: there is none.
    const char* unfused_option() const;

    // Bytes that a decode step reads: the weights and the cache of the active sequences.
    int64_t step_bytes() const;

    const ModelConfig config;
    const EngineOptions options;
    const Stream stream;

  private:
    struct Sequence {
        int64_t slot, id, step;  // (id, step) keys the next sampled token
        int32_t token;           // the last one read
        int32_t adapter;
        bool retired;
        SamplingRow sampling;
        bool logprobs;
        int64_t top_logprobs;
        bool skipped = false;  // retired, and the device knows it
    };
    // Tokens [begin, end) of a prompt.
    struct PromptChunk {
        const Prompt* prompt;
        int64_t begin, end;
        int64_t sampled;  // sequences that sample the token after the chunk
        int64_t losses;   // where prompt_results has those of the prompt's tokens from the second one on; -1: not asked
        bool retired;     // computed for nothing, at the position of another chunk's token
    };
    // What a pass over chunks with N tokens reads, on the device.
    struct PassInputs {
        int64_t decoding = 0;          // the first rows are those of the batch; chunks follow
        Tensor tokens, positions;      // [N] int32
        std::vector<Tensor> rows;      // by group of layers: [N] int32, the cache's row of each token; -1: not stored
        Tensor finished;               // [n] int32: the rows after which a token is sampled
        AttentionSequences sequences;  // less pages and window
        std::optional<AdapterTiles> tiles;
        bool has_past = false;       // some chunk continues a sequence
        bool recorded = false;       // the pass has a graph
        int64_t layers = INT64_MAX;  // the first so many
    };
    // A step that is queued, with the host memory that receives its results.
    struct QueuedStep {
        std::vector<int64_t> slots;  // of each row; -1 where the sequence is retired
        Event done;
        int32_t* tokens = nullptr;
        float* losses = nullptr;
        int32_t* top_ids = nullptr;
        float* top_logprobs = nullptr;
        bool has_losses = false, with_prompts = false;
        std::vector<int64_t> num_top;                            // of each row: most likely tokens that it asks for
        std::vector<bool> masked;                                // of each row
        std::vector<std::pair<int64_t, int64_t>> prompt_losses;  // of each row, with prompts: the first one, how many
    };

    // What prompt_results holds of a pass's tokens, from a token on: losses, and top tokens of each.
    struct PromptResults {
        float* losses;
        int32_t* top_ids;
        float* top_logprobs;
    };
    PromptResults prompt_results_at(int64_t token) const {
        const int64_t tokens_in_all = options.prompt_tokens, top = options.top_logprobs;
        float* const first = static_cast<float*>(prompt_results.get());
        float* const top_losses = first + tokens_in_all * (1 + top);
        return {first + token, reinterpret_cast<int32_t*>(first + tokens_in_all) + token * top,
                top_losses + token * top};
    }

    void plan_memory();
    void fill_memory();
    void fill_rope_table();
    void count_weight_bytes();
    void prepare_graphs();
    void prepare_pass_graphs();
    void prepare_longest_pass();
    void clear_pass_inputs();
    PassInputs pass_inputs(int64_t N, int64_t chunks) const;
    void record_passes(int64_t N, int64_t decoding);
    PassInputs upload_pass(const std::vector<PromptChunk>& chunks, int64_t decoding, Tensor token_ids = {});
    void run_pass(const PassInputs& in, const Tensor& last_of_pass);
    void run_recorded_pass(const PassInputs& in);
    // Of a pass over N tokens of prompts, beside so many rows of the batch, which it pads; 0: it has no graph.
    int64_t recorded_rows(int64_t N, int64_t chunks, int64_t decoding) const;
    int64_t padded_batch(int64_t n) const;
    int64_t recorded_chunks() const { return std::min<int64_t>(options.slots, 4); }
    void prefill_pass(const std::vector<PromptChunk>& chunks, int64_t first_finished, int64_t decoding);
    using PromptGroups = std::vector<std::vector<const Prompt*>>;
    std::vector<std::pair<int64_t, int64_t>> compute_prompts(const PromptGroups& groups, int64_t decoding = 0);
    void check_prompts(const std::vector<Prompt>& prompts, int64_t beside = 0) const;
    void note_tokens(const PromptGroups& groups);
    void add_to_batch(const PromptGroups& groups);
    void upload_ended(const PromptGroups& groups);
    void sample_batch(std::vector<std::pair<int64_t, int64_t>> prompt_losses);
    bool can_join() const { return !options.outside_forward && !prompts_by_page() && !config.has_linear_attention(); }
    void grow_batch();
    void joint_step(const std::vector<Prompt>& prompts);
    void outside_decode_step();
    bool finds_prefixes() const { return cache.finds_prefixes() && !config.has_linear_attention() && !dynamic_rope; }
    PromptGroups groups_of(const std::vector<Prompt>& prompts) const;
    void fork(int64_t from, const std::vector<const Prompt*>& to);
    void grow(int64_t slot, int64_t by);
    void embed(Tensor hidden, Tensor token_ids, Tensor token_positions);
    void norm(Tensor out, Tensor inp, const NormWeights& w);
    template <typename Attend>
    void run_blocks(Tensor hidden, const Tensor& angles, bool batch_invariant, const std::optional<AdapterTiles>& tiles,
                    int64_t layers, Attend attend);
    void adapted_layer(const LinearOutput& output, Tensor inp, const NormWeights& n, const LinearWeights& w,
                       const AdapterWeights& adapters, const AdapterTiles& tiles, bool batch_invariant);
    void add_adapter(Tensor y, Tensor inp, const AdapterWeights& w);
    std::optional<AdapterTiles> upload_adapters(const std::vector<int32_t>& adapter_of_row, size_t used_rows);
    AdapterTiles adapter_tiles(int64_t N, bool everywhere) const;
    bool may_adapt_everywhere(int64_t N) const;  // whether tiles of N rows may be AdapterTiles::everywhere
    LinearAttentionState copy_states(const LinearAttentionState& from);
    template <typename Attend>
    void linear_attention_layer(int64_t l, int64_t N, Attend attend);
    void prepare_qk(int64_t l, Tensor packed, const Tensor& angles);
    // The RoPE table for kv_append and decode_attention, which rotate q and k as they append k to the cache; null where
    // the layer has no RoPE or q and k are rotated before.
    Tensor rotating_table(int64_t l) const {
        return config.uses_rope(l) && config.qk_norm == QkNorm::Off ? table : Tensor{};
    }
    Tensor angle_rows(int64_t N) const { return (dynamic_rope ? iota : positions).rows(0, N); }
    void upload_angles(const std::vector<int32_t>& token_positions, const std::vector<int64_t>& sequence_lengths);
    SamplingRow row_of(const Prompt& p) const {
        return sampling_row(p.sampling.value_or(options.sampling), options.sampled_vocab, p.slot, !p.mask.empty());
    }
    void check_prompt(const Prompt& prompt) const;
    void upload_retired();
    void upload_batch(bool with_tokens);
    void upload_slots(const std::vector<const Prompt*>& prompts);
    void score_prompts(const std::vector<PromptChunk>& chunks, const Tensor& hidden);
    void compact_batch();
    DecodeModel decode_model() const;
    DecodeBatch decode_batch(int64_t B, int64_t max_length) const;
    void attend_to_batch(int64_t l, DecodeBatch of_layer);
    void compute_logits(Tensor hidden);
    void sample(int64_t B);
    void find_top_tokens(const Tensor& logits, const Tensor& targets);
    void queue_results(int64_t B);
    void read_logprobs(const QueuedStep& q, size_t row);
    void decode_step(int64_t B, int64_t max_length);
    int64_t step_rows(int64_t sequences) const;

    const bool dynamic_rope;  // RoPE angles depend on the sequence's current length
    KvCache cache;
    const int64_t fused_step_max_batch;  // 0: the fused decode step is not used
    StateCache states;
    ArenaPlan plan;
    Arena memory;
    std::vector<std::pair<Tensor*, int64_t>> bindings;  // each tensor's entry in the plan
    InferenceWeights weights;
    EngineForward* forward = nullptr;
    int64_t weight_bytes = 0;
    std::unique_ptr<Staging> staging;

    // A pass over N tokens.
    Tensor tokens, positions, iota;                 // [N] int32; iota: 0 … N − 1
    std::vector<Tensor> rows;                       // [N] int32: of the new keys, by group of layers (infer/kv_cache.h)
    Tensor cum_q, cum_k, pass_slots;                // [slots + 1], [slots + 1], [slots] int32: of the chunks
    Tensor copied_from, copied_to;                  // [slots] int32: pages
    Tensor x, qkv, att, act;                        // [N, C], [N, (NH + 2·NKV)·HS], [N, NH·HS], [N, ffn]
    Tensor normed;                                  // gated_linear and adapters: [N, C]
    Tensor gate, linear_att;                        // gated_linear: [N, NKV] fp32, att before the head norm
    Tensor low_rank, pre_activation;                // adapters: fp32, [N, outputs of fc]
    Tensor tile_rows, tile_adapters, row_adapters;  // AdapterTiles of N rows
    Tensor unscaled, norm_parts;                    // norms of small batches in bf16 on a GPU: UnscaledRows
    Tensor unnormed;                                // norms after attention and the MLP: [N, C], what they read
    Tensor past_s, past_z;                          // [slots, NKV, HS, HS], [slots, NKV, HS]: a layer's states
    Tensor scratch, attention_scratch, decode_scratch, step_scratch;  // bytes
    Tensor table;  // [context, R/2, 2]; with dynamic_rope [N, R/2, 2]: the angles of each token of the pass
    // A step over B sequences.
    Tensor last, last_rows;                // [B, C] the head's input; [B] int32 the rows of x that it comes from
    Tensor logits_out, losses;             // [B, Vp], [B] fp32
    Tensor ids, slot_ids, step_positions;  // [B] int32
    Tensor sequences, steps, seen;         // [B] int64, [B] int64, by slot [⌈sampled_vocab/32⌉] int32
    Tensor host_tokens, buffer_index;      // [2, B] int32 on the host: the sampled tokens, in alternate rows; [1] int32
    Tensor sample_scratch;                 // bytes
    // What sampling reads beside them (kernels/generation/sampling.h), and what logprobs need.
    Tensor sampling_rows, counts, masks;               // [B] SamplingRow; by slot
    Tensor top_values, top_ids, top_out, top_scratch;  // [B, top_logprobs] T, int32, fp32; bytes
    Tensor prompt_targets;                             // [N] int32: the token after each; IGNORE_TARGET at an end

    struct Suspended {
        Sequence sequence;
        KvCache::Saved saved;
    };
    std::map<int64_t, Suspended> suspended;       // by slot
    std::vector<Sequence> batch;                  // the rows of a step
    bool batch_changed = false;                   // the rows on the device are not those of batch
    std::vector<int64_t> lengths;                 // by slot
    std::vector<std::vector<int32_t>> seen_bits;  // by slot: a bit for each token; empty without a penalty
    // What the sampling of the batch needs; graphs by batch size, longest context and the kernels of step_classes.
    uint32_t step_classes = 0;
    std::map<std::array<int64_t, 3>, Graph> graphs;
    std::map<std::array<int64_t, 4>, Graph> pass_graphs;  // by rows, those of the batch, longest context and adapters

    HostMemory results{nullptr, host_free}, prompt_results{nullptr, host_free};
    QueuedStep queue[2];
    int64_t steps_queued = 0, steps_read = 0;
    Step step;
};
