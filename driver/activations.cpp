// The activations of a pass over N = B·T tokens: the table of them, and the plan of the memory that they share.
#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>

#include "driver/sequence_loss.h"
#include "kernels/embedding.h"
#include "kernels/generation/linear.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/norm.h"
#include "kernels/qk_norm_all_heads.h"
#include "kernels/rope.h"
#include "kernels/scratch.h"
#include "model.h"

RunShape inference_shape(int64_t B, int64_t T, DType dtype) {
    RunShape shape(B, T);
    shape.dtype = dtype;
    shape.adds_in_matmul = dtype != DType::F32;
    return shape;
}

RunShape training_shape(int64_t B, int64_t T, DType dtype) {
    RunShape shape = inference_shape(B, T, dtype);
    shape.training = true;
    return shape;
}

namespace {

// The phases of a block in the forward pass. The backward pass goes through them in reverse.
enum Phase {
    UNREAD = -3,
    NONE,
    BLOCK_INPUT,
    NORM1,
    QKV,
    ATTENTION,
    PROJ,
    NORM2,
    FC,
    ACT,
    FCPROJ,
    PHASES,
    NEXT_NORM1 = PHASES
};
enum class StepPhase { Before, Start, LastBlock, Head, Update };

// The phases of a step in the order of time: each block's forward phases, the head, then for each block a phase of
// recomputation and its backward phases, then the embedding's gradient and the update.
struct Timeline {
    int64_t L;
    bool adds_in_matmul;
    // Layer 0's input is written by the embedding, that of the other layers by their first norm or by the fcproj before
    // it, whose phase has the same number as BLOCK_INPUT.
    int64_t forward(int64_t l, Phase p) const {
        return l > 0 && p == BLOCK_INPUT && !adds_in_matmul ? forward(l, NORM1) : l * PHASES + p + 1;
    }
    int64_t recompute(int64_t l) const { return L * PHASES + 2 + (L - 1 - l) * (PHASES + 1); }
    int64_t backward(int64_t l, Phase p) const { return recompute(l) + PHASES - p; }
    int64_t operator()(StepPhase p) const {
        switch (p) {
            case StepPhase::Before:
                return -1;
            case StepPhase::Start:
                return 0;
            case StepPhase::LastBlock:
                return L * PHASES;
            case StepPhase::Head:
                return L * PHASES + 1;
            case StepPhase::Update:
                return recompute(-1) + 1;
        }
        return 0;
    }
};

// Shapes, named by their sizes: N_C is [N, C], N_1 is [N]. sizes() has the numbers.
enum Dims {
    N_1,
    N_C,
    N_QKV,  // (NH + 2·NKV)·HS
    N_QK,   // (NH + NKV)·HS
    N_ATT,  // NH·HS
    N_NH,   // heads
    N_NQK,  // NH + NKV
    NH_N,
    C_N,
    ATT_N,
    FFN_N,
    N_NKV,   // KV heads
    N_NKV8,  // rounded up to a multiple of 8
    N_FC,
    N_FFN,
    SEQUENCE_ENDS,  // [N + 1]
    ANGLES,         // [T, R/2, 2], or [N, R/2, 2]: cosines and sines
    CHUNK_LOGITS,   // [chunk, Vp]
    PAIRS_3,        // [most_pairs(N), 3]
    PAIRS_2,
    PAIR_STATS,    // [most_pairs(N), NUM_PAIR_STATS]
    POLICY_TERMS,  // [5, N]
    ROLLOUT_BYTES,
    STEP_SUMS,  // [ranks, NUM_STEP_SUMS]
    DQ_SUMS,    // [AttentionSumRows::dq, NH·HS]
    DKV_SUMS,   // [AttentionSumRows::dkv, 2·NKV·HS]
    ONE,
    TWO,
    SAMPLING_ROW,
    SCALAR_BYTES,  // of StepScalars
    SCRATCH_BYTES,
    FORWARD_SCRATCH_BYTES,
    UPDATE_BYTES,
    FP8_ROWS,     // N x the widest operand of a linear layer
    FP8_COLUMNS,  // N x the widest output
    FP8_WEIGHT,   // the largest weight
    N_LORA,       // columns of the adapters' A·x: the most; of each of LINEAR_LAYERS
    N_LORA_QKV,
    N_LORA_PROJ,
    N_LORA_FC,
    N_LORA_FCPROJ,
    N_LORA_VOCABULARY,
    NF4_WEIGHT  // the largest weight in NF4
};

// Conditions for a tensor to exist, as bits; all that are set must hold.
enum When : unsigned {
    ALWAYS = 0,
    TRAIN = 1,
    LAYERNORM = 2,
    ROPE = 4,
    SOFTMAX = 8,
    LINEAR = 16,
    GATED = 32,
    HEAD_NORM = 64,        // QK-norm of each head
    ALL_HEADS_NORM = 128,  // QK-norm of all heads together
    QK_WEIGHTS = 256,
    EMBEDDING_NORM = 512,
    NORM_BEFORE = 1024,  // attention and the MLP
    NORM_AFTER = 2048,
    HIGH = 4096,              // the backward pass reads the inputs of the layer's matmuls in the model's dtype
    FP8 = 8192,               // it reads their codes in fp8
    NORM1_READ = 16384,       // the backward pass reads norm1 itself: all but layers of FP8 without a decay gate
    NORM1_CODES = 32768,      // it does not
    FP8_WEIGHTS = 65536,      // fp8, and quantised weights are not kept, or not in both orientations
    LORA = 131072,            // adapters are trained
    NF4 = 262144,             // of a base in NF4
    ACT_READ = 524288,        // the backward pass reads act, kept or recomputed
    ACT_AGAIN = 1048576,      // SwiGLU's backward pass computes it again, in the place of dact
    ADD_IN_MATMUL = 2097152,  // proj and fcproj add to the residual
    ADD_IN_NORM = 4194304,    // the norm after them does
    ACT_IN_FC = 8388608,      // the matmul that computes fc writes act too, while it reads norm2
    ACT_AFTER_FC = 16777216,  // a kernel of its own does
    PAIRS = 33554432,         // the loss is one of preference pairs
    POLICY = 67108864,        // it is that of a policy gradient
    FP8_MATMULS = 134217728   // any layer's matmuls are in fp8
};

constexpr std::nullopt_t MODEL = std::nullopt;
using ActDType = std::optional<DType>;

// A tensor of each layer.
struct BlockRow {
    Tensor LayerActs::*field;
    const char* name;  // in plans and dumps
    Dims dims;
    ActDType dtype;
    Phase first;           // the phase that writes it
    Phase last_forward;    // the last one of the forward pass that uses it; NONE: the backward pass writes it; UNREAD:
                           // the forward pass only writes it, and not if it is recomputed
    Phase last_backward;   // the last one of the backward pass that uses it; NONE: only the forward pass does
    Recompute recomputed;  // the level of --recompute from which on it is recomputed; KEPT: at no level
    unsigned when;         // the conditions for it to exist (enum When)
};

constexpr Recompute KEPT = Recompute::None, ACTIVATION = Recompute::Activation, NORMS = Recompute::Norms,
                    BLOCK = Recompute::Block;
constexpr DType FP32 = DType::F32, CODES = DType::U8;
using A = LayerActs;

// The only list of a layer's activations. Memory, lifetimes, views for fewer tokens and dumps follow from it. In dumps
// the decay gate's output is named "gate" and attention's output before the per-head norm "mix".
// clang-format off
constexpr BlockRow BLOCK_ACTIVATIONS[] = {
    // field           name           shape   dtype  first        last fwd    last bwd   recomp.     when
    {&A::res1,         "res1",        N_C,    MODEL, BLOCK_INPUT, NORM2,      NORM1,     KEPT,       ALWAYS},
    {&A::mean1,        "mean1",       N_1,    FP32,  NORM1,       NORM1,      NORM1,     BLOCK,      TRAIN | LAYERNORM},
    {&A::rstd1,        "rstd1",       N_1,    FP32,  NORM1,       NORM1,      NORM1,     BLOCK,      TRAIN | NORM_BEFORE},
    {&A::norm1,        "norm1",       N_C,    MODEL, NORM1,       QKV,        QKV,       NORMS,      NORM1_READ | NORM_BEFORE},
    {&A::norm1,        "norm1",       N_C,    MODEL, NORM1,       QKV,        NONE,      NORMS,      NORM1_CODES},
    {&A::norm1_t,      "norm1.fp8",   C_N,    CODES, QKV,         UNREAD,     QKV,       NORMS,      FP8},
    {&A::qkv,          "qkv",         N_QKV,  MODEL, QKV,         ATTENTION,  ATTENTION, BLOCK,      ALWAYS},
    // QK-norm with weights computes its backward pass from qkv, so it may not overwrite that; without, from its output.
    {&A::qk,           "qk",          N_QK,   MODEL, ATTENTION,   ATTENTION,  ATTENTION, NORMS,      TRAIN | QK_WEIGHTS},
    {&A::rstd_qk,      "rstd_qk",     N_NQK,  FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | HEAD_NORM},
    {&A::rstd_q,       "rstd_q",      N_1,    FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | ALL_HEADS_NORM},
    {&A::rstd_k,       "rstd_k",      N_1,    FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | ALL_HEADS_NORM},
    {&A::att,          "att",         N_ATT,  MODEL, ATTENTION,   PROJ,       ATTENTION, BLOCK,      ALWAYS},
    {&A::lse,          "lse",         NH_N,   FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | SOFTMAX},
    {&A::lse,          "denominator", NH_N,   FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | LINEAR},
    {&A::log_decay,    "gate",        N_NKV,  FP32,  QKV,         ATTENTION,  QKV,       BLOCK,      GATED},
    {&A::att_unnormed, "mix",         N_ATT,  MODEL, ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      GATED},
    {&A::rstd_att,     "rstd_mix",    N_NH,   FP32,  ATTENTION,   ATTENTION,  ATTENTION, BLOCK,      TRAIN | GATED},
    {&A::dlog_decay,   "dgate",       N_NKV,  FP32,  ATTENTION,   NONE,       QKV,       KEPT,       TRAIN | GATED},
    {&A::ddecay_gate,  "dgate_x",     N_NKV8, MODEL, QKV,         NONE,       QKV,       KEPT,       TRAIN | GATED},
    {&A::att_t,        "att.fp8",     ATT_N,  CODES, PROJ,        NONE,       PROJ,      KEPT,       FP8},
    {&A::proj,         "proj",        N_C,    MODEL, PROJ,        NORM2,      NONE,      BLOCK,      NORM_BEFORE | ADD_IN_NORM},
    // A norm after attention belongs to the phase that adds to the residual.
    {&A::proj,         "proj",        N_C,    MODEL, PROJ,        NORM2,      NORM2,     BLOCK,      NORM_AFTER},
    {&A::rstd1,        "rstd1",       N_1,    FP32,  NORM2,       NORM2,      NORM2,     BLOCK,      TRAIN | NORM_AFTER},
    {&A::res2,         "res2",        N_C,    MODEL, NORM2,       NEXT_NORM1, NORM2,     BLOCK,      ADD_IN_NORM},
    {&A::res2,         "res2",        N_C,    MODEL, PROJ,        FCPROJ,     NORM2,     BLOCK,      ADD_IN_MATMUL},
    {&A::mean2,        "mean2",       N_1,    FP32,  NORM2,       NORM2,      NORM2,     BLOCK,      TRAIN | LAYERNORM},
    {&A::rstd2,        "rstd2",       N_1,    FP32,  NORM2,       NORM2,      NORM2,     BLOCK,      TRAIN | NORM_BEFORE},
    {&A::norm2,        "norm2",       N_C,    MODEL, NORM2,       FC,         FC,        NORMS,      HIGH | NORM_BEFORE},
    {&A::norm2,        "norm2",       N_C,    MODEL, NORM2,       FC,         NONE,      NORMS,      FP8},
    {&A::norm2_t,      "norm2.fp8",   C_N,    CODES, FC,          UNREAD,     FC,        NORMS,      FP8},
    // SwiGLU's backward pass writes its gradient over fc, which then lives until FC's backward pass has read it.
    {&A::fc,           "fc",          N_FC,   MODEL, FC,          ACT,        FC,        BLOCK,      ALWAYS},
    {&A::act,          "act",         N_FFN,  MODEL, ACT,         FCPROJ,     FCPROJ,    ACTIVATION, HIGH | ACT_READ | ACT_AFTER_FC},
    {&A::act,          "act",         N_FFN,  MODEL, FC,          FCPROJ,     FCPROJ,    ACTIVATION, HIGH | ACT_READ | ACT_IN_FC},
    {&A::act,          "act",         N_FFN,  MODEL, ACT,         FCPROJ,     NONE,      KEPT,       HIGH | ACT_AGAIN | ACT_AFTER_FC},
    {&A::act,          "act",         N_FFN,  MODEL, FC,          FCPROJ,     NONE,      KEPT,       HIGH | ACT_AGAIN | ACT_IN_FC},
    {&A::act_t,        "act.fp8",     FFN_N,  CODES, ACT,         UNREAD,     FCPROJ,    ACTIVATION, FP8},
    // Kept, because they are small: N·R values of an adapter.
    {&A::lora_qkv,     "lora_qkv",    N_LORA_QKV,    MODEL, QKV,    QKV,    QKV,    KEPT, LORA},
    {&A::lora_proj,    "lora_proj",   N_LORA_PROJ,   MODEL, PROJ,   PROJ,   PROJ,   KEPT, LORA},
    {&A::lora_fc,      "lora_fc",     N_LORA_FC,     MODEL, FC,     FC,     FC,     KEPT, LORA},
    {&A::lora_fcproj,  "lora_fcproj", N_LORA_FCPROJ, MODEL, FCPROJ, FCPROJ, FCPROJ, KEPT, LORA},
    {&A::fcproj,       "fcproj",      N_C,    MODEL, FCPROJ,      NEXT_NORM1, NONE,      KEPT,       NORM_BEFORE | ADD_IN_NORM},
    {&A::fcproj,       "fcproj",      N_C,    MODEL, FCPROJ,      NEXT_NORM1, FCPROJ,    BLOCK,      NORM_AFTER},
    {&A::rstd2,        "rstd2",       N_1,    FP32,  NEXT_NORM1,  NEXT_NORM1, FCPROJ,    KEPT,       TRAIN | NORM_AFTER},
    {&A::dfcproj,      "dfcproj",     N_C,    MODEL, FCPROJ,      NONE,       ACT,       KEPT,       TRAIN | NORM_AFTER},
    {&A::dact,         "dact",        N_FFN,  MODEL, FCPROJ,      NONE,       FC,        KEPT,       TRAIN},
    {&A::dnorm2,       "dnorm2",      N_C,    MODEL, FC,          NONE,       NORM2,     KEPT,       TRAIN | NORM_BEFORE},
    {&A::dproj,        "dproj",       N_C,    MODEL, NORM2,       NONE,       PROJ,      KEPT,       TRAIN | NORM_AFTER},
    {&A::datt,         "datt",        N_ATT,  MODEL, PROJ,        NONE,       ATTENTION, KEPT,       TRAIN},
    {&A::dqkv,         "dqkv",        N_QKV,  MODEL, ATTENTION,   NONE,       QKV,       KEPT,       TRAIN},
    {&A::dnorm1,       "dnorm1",      N_C,    MODEL, QKV,         NONE,       NORM1,     KEPT,       TRAIN | NORM_BEFORE},
};
// clang-format on

// A tensor of the whole pass.
template <typename Acts>
struct PassRow {
    Tensor Acts::*field;
    const char* name;
    Dims dims;
    ActDType dtype;
    StepPhase first, last;
    unsigned when;
};

constexpr StepPhase BEFORE = StepPhase::Before, START = StepPhase::Start, LAST_BLOCK = StepPhase::LastBlock,
                    HEAD = StepPhase::Head, UPDATE = StepPhase::Update;

constexpr PassRow<InputActs> INPUT_ACTIVATIONS[] = {
    {&InputActs::tokens, "tokens", N_1, DType::I32, START, UPDATE, ALWAYS},
    {&InputActs::targets, "targets", N_1, DType::I32, START, UPDATE, ALWAYS},
    {&InputActs::positions, "positions", N_1, DType::I32, START, UPDATE, ALWAYS},
    {&InputActs::loss_rows, "loss_rows", N_1, DType::I32, START, UPDATE, TRAIN},
    {&InputActs::policy_terms, "policy_terms", POLICY_TERMS, FP32, START, UPDATE, POLICY},
    {&InputActs::pair_rows, "pair_rows", PAIRS_3, DType::I32, START, UPDATE, PAIRS},
    {&InputActs::pair_reference, "pair_reference", PAIRS_2, FP32, START, UPDATE, PAIRS},
    {&InputActs::cum_seqlens, "cum_seqlens", SEQUENCE_ENDS, DType::I32, START, UPDATE, ALWAYS},
    {&InputActs::num_sequences, "num_sequences", ONE, DType::I32, START, UPDATE, ALWAYS},
    {&InputActs::rope_table, "rope_table", ANGLES, FP32, BEFORE, UPDATE, ROPE},
};

constexpr PassRow<HeadActs> HEAD_ACTIVATIONS[] = {
    {&HeadActs::embedded, "embedded", N_C, MODEL, START, UPDATE, TRAIN | EMBEDDING_NORM},
    {&HeadActs::meane, "meane", N_1, FP32, START, UPDATE, TRAIN | EMBEDDING_NORM | LAYERNORM},
    {&HeadActs::rstde, "rstde", N_1, FP32, START, UPDATE, TRAIN | EMBEDDING_NORM},
    {&HeadActs::resf, "resf", N_C, MODEL, HEAD, HEAD, ADD_IN_NORM},
    {&HeadActs::resf, "resf", N_C, MODEL, LAST_BLOCK, HEAD, ADD_IN_MATMUL},
    {&HeadActs::normf, "normf", N_C, MODEL, HEAD, HEAD, ALWAYS},
    {&HeadActs::logits, "logits", CHUNK_LOGITS, MODEL, HEAD, HEAD, ALWAYS},
    {&HeadActs::losses, "losses", N_1, FP32, HEAD, HEAD, ALWAYS},
    {&HeadActs::pair_stats, "pair_stats", PAIR_STATS, FP32, HEAD, HEAD, PAIRS},
    {&HeadActs::dlosses, "dlosses", N_1, FP32, HEAD, HEAD, PAIRS},
    {&HeadActs::dlosses, "dlosses", N_1, FP32, HEAD, HEAD, POLICY},
    {&HeadActs::rollout, "rollout", ROLLOUT_BYTES, DType::U8, BEFORE, BEFORE, TRAIN},
    {&HeadActs::sums, "sums", STEP_SUMS, DType::F64, BEFORE, UPDATE, ALWAYS},
    {&HeadActs::forward_scratch, "forward_scratch", FORWARD_SCRATCH_BYTES, DType::U8, START, UPDATE, ALWAYS},
    {&HeadActs::sample_id, "sample_id", ONE, DType::I32, HEAD, HEAD, TRAIN},
    {&HeadActs::sample_key, "sample_key", TWO, DType::I64, HEAD, HEAD, TRAIN},
    {&HeadActs::sample_row, "sample_row", SAMPLING_ROW, DType::U8, HEAD, HEAD, TRAIN},
    {&HeadActs::meanf, "meanf", N_1, FP32, HEAD, HEAD, TRAIN | LAYERNORM},
    {&HeadActs::rstdf, "rstdf", N_1, FP32, HEAD, HEAD, TRAIN},
    {&HeadActs::dnormf, "dnormf", N_C, MODEL, HEAD, HEAD, TRAIN},
    {&HeadActs::dx, "dx", N_C, MODEL, HEAD, UPDATE, TRAIN},
    {&HeadActs::scalars, "scalars", SCALAR_BYTES, DType::U8, BEFORE, UPDATE, TRAIN},
    {&HeadActs::micro_step, "micro_step", ONE, DType::I64, START, UPDATE, TRAIN},
    {&HeadActs::dq_sums, "dq_sums", DQ_SUMS, FP32, HEAD, UPDATE, TRAIN},
    {&HeadActs::dkv_sums, "dkv_sums", DKV_SUMS, FP32, HEAD, UPDATE, TRAIN},
    {&HeadActs::scratch, "scratch", SCRATCH_BYTES, DType::U8, HEAD, UPDATE, TRAIN},
    {&HeadActs::fp8_rows, "fp8_rows", FP8_ROWS, CODES, START, UPDATE, FP8_MATMULS},
    {&HeadActs::fp8_columns, "fp8_columns", FP8_COLUMNS, CODES, HEAD, UPDATE, FP8},
    {&HeadActs::fp8_weight, "fp8_weight", FP8_WEIGHT, CODES, START, UPDATE, FP8_WEIGHTS},
    {&HeadActs::low_rank, "low_rank", N_LORA_VOCABULARY, MODEL, START, UPDATE, LORA},
    {&HeadActs::dlow_rank, "dlow_rank", N_LORA, MODEL, HEAD, UPDATE, TRAIN | LORA},
    {&HeadActs::base_weight, "base_weight", NF4_WEIGHT, MODEL, START, UPDATE, NF4},
    {&HeadActs::update_workspace, "update_workspace", UPDATE_BYTES, DType::U8, UPDATE, UPDATE, TRAIN},
};

// Whether every tensor of the struct has a row: the table names as many different fields as the struct has tensors.
template <typename Acts, typename Table>
constexpr bool complete(const Table& table) {
    size_t fields = 0;
    for (size_t i = 0; i < std::size(table); i++) {
        bool first = true;
        for (size_t j = 0; j < i; j++) first = first && table[j].field != table[i].field;
        fields += first;
    }
    return fields * sizeof(Tensor) == sizeof(Acts);
}
static_assert(complete<LayerActs>(BLOCK_ACTIVATIONS), "a field of LayerActs has no row in BLOCK_ACTIVATIONS");
static_assert(complete<InputActs>(INPUT_ACTIVATIONS), "a field of InputActs has no row in INPUT_ACTIVATIONS");
static_assert(complete<HeadActs>(HEAD_ACTIVATIONS), "a field of HeadActs has no row in HEAD_ACTIVATIONS");

// Tokens in a chunk of the head, which avoids an [N, Vp] buffer: the largest power of two whose logits fit into
// Target::chunk_bytes().
int64_t head_chunk(const ModelConfig& c, const RunShape& shape) {
    int64_t chunk = 64;
    while (2 * chunk * c.padded_vocab() * dtype_size(shape.dtype) <= shape.target.chunk_bytes()) chunk *= 2;
    return std::min(chunk, shape.B * shape.T);
}

LinearAttentionSizes linear_sizes(const ModelConfig& c, const RunShape& shape) {
    const int64_t N = shape.B * shape.T;
    return {N, N, c.heads, c.kv_heads, c.head_size, c.head_size, shape.T, false};
}

// The largest over the linear layers of a block.
template <typename Size>
int64_t largest_linear(const ModelConfig& c, Size size) {
    int64_t largest = 0;
    for (const Role role : LINEAR_LAYERS) largest = std::max(largest, size(linear_layer_sizes(c, role)));
    return largest;
}

// The scratch of packed linear layers and the head, on this program's device.
int64_t packed_scratch_bytes(const ModelConfig& c, const RunShape& shape) {
    const int64_t rows = std::min(shape.B * shape.T, PackedWeights::ROWS),
                  head_rows = std::min(rows, head_chunk(c, shape));
    const int64_t layers =
        largest_linear(c, [&](LinearSizes s) { return linear_scratch(rows, s.inputs, s.outputs, shape.dtype, true); });
    return std::max(layers, linear_scratch(head_rows, c.channels, c.padded_vocab(), shape.dtype, true));
}

// The scratch of matmuls with adapters.
int64_t low_rank_scratch_bytes(const ModelConfig& c, const RunShape& shape) {
    int64_t most = 0;
    for (const Role role : LINEAR_LAYERS)
        most = std::max(most, matmul_low_rank_scratch(linear_layer_sizes(c, role).outputs,
                                                      shape.lora_widths[size_t(linear_layer_index(role))], shape.dtype,
                                                      shape.target));
    return most;
}

// The scratch of the forward pass, and of fp8 matmuls in both passes.
int64_t forward_scratch_bytes(const ModelConfig& c, const RunShape& shape) {
    const int64_t N = shape.B * shape.T;
    const int64_t fp8 = largest_linear(c, [&](LinearSizes s) {
        const int64_t of_weight = shape.fp8.frozen ? 0 : matmul_fp8_scratch(s.outputs, s.inputs, N, shape.target);
        return std::max({matmul_fp8_scratch(N, s.outputs, s.inputs, shape.target),
                         matmul_fp8_scratch(N, s.inputs, s.outputs, shape.target), of_weight});
    });
    return std::max(
        {attention_forward_scratch(shape.target), shape.fp8.on ? fp8 : 0,
         shape.packing ? packed_scratch_bytes(c, shape) : 0, low_rank_scratch_bytes(c, shape),
         c.has_linear_attention() ? linear_attention_forward_scratch(linear_sizes(c, shape), shape.target) : 0});
}

int64_t scratch_bytes(const ModelConfig& c, const RunShape& shape) {
    const int64_t N = shape.B * shape.T, C = c.channels;
    const Target& on = shape.target;
    // Sampling needs less than the embedding's gradient on a GPU, and nothing on the CPU.
    return std::max(
        {layernorm_backward_scratch(N, C, on), rmsnorm_backward_scratch(N, C, on),
         embedding_backward_scratch(N, c.padded_vocab(), std::max(C, shape.lora_vocabulary), on),
         attention_backward_scratch(N, c.heads, c.head_size, shape.deterministic, shape.T, on),
         c.has_linear_attention() ? linear_attention_backward_scratch(linear_sizes(c, shape), on) : 0,
         c.layers_of(AttentionType::GatedLinear) ? rmsnorm_backward_scratch(N * c.heads, c.head_size, on) : 0,
         c.qk_norm == QkNorm::Weights ? qk_norm_backward_scratch(N, c.heads, c.kv_heads, c.head_size, on) : 0,
         c.qk_norm == QkNorm::AllHeads
             ? qk_norm_all_heads_backward_scratch(N, c.heads * c.head_size, c.kv_heads * c.head_size, on)
             : 0,
         sum_squares_scratch(std::max(parameter_table(c, shape.world).total, shape.adapter_elements), on),
         sampling_scratch(1, c.vocab_size, sampling_row(TRAINING_SAMPLES, c.vocab_size).classes)});
}

int64_t widest_adapter(const RunShape& shape) {
    return std::max(*std::max_element(shape.lora_widths.begin(), shape.lora_widths.end()), shape.lora_vocabulary);
}

// Attention sums the gradient of the QKV projection's bias where nothing lies between the two, and the bias is trained.
AttentionSumRows gradient_sum_rows(const ModelConfig& c, const RunShape& shape) {
    const bool adjacent = c.positions != Positions::RoPE && c.qk_norm == QkNorm::Off;
    if (!c.qkv_bias || !adjacent || widest_adapter(shape) || c.layers_of(AttentionType::Softmax) == 0) return {};
    return attention_gradient_sum_rows(shape.B, shape.T, shape.T, c.heads, c.head_size, shape.dtype,
                                       shape.deterministic, shape.target);
}

// Dynamic NTK scaling: beyond the original length a token's angles depend on the length of its sequence.
bool angles_by_token(const ModelConfig& c, const RunShape& shape) {
    return c.positions == Positions::RoPE && c.rope_scaling.kind == RopeScaling::Kind::Dynamic &&
           shape.T > c.rope_scaling.original_max_position;
}

std::vector<int64_t> sizes(Dims dims, const ModelConfig& c, const RunShape& shape) {
    const int64_t N = shape.B * shape.T;
    switch (dims) {
        case N_1:
            return {N};
        case N_C:
            return {N, c.channels};
        case N_QKV:
            return {N, c.qkv_channels()};
        case N_QK:
            return {N, (c.heads + c.kv_heads) * c.head_size};
        case N_ATT:
            return {N, c.heads * c.head_size};
        case N_NH:
            return {N, c.heads};
        case N_NQK:
            return {N, c.heads + c.kv_heads};
        case NH_N:
            return {c.heads, N};
        case C_N:
            return {c.channels, N};
        case ATT_N:
            return {c.heads * c.head_size, N};
        case FFN_N:
            return {c.ffn, N};
        case N_NKV:
            return {N, c.kv_heads};
        case N_NKV8:
            return {N, (c.kv_heads + 7) / 8 * 8};
        case N_FC:
            return {N, c.fc_channels()};
        case N_FFN:
            return {N, c.ffn};
        case SEQUENCE_ENDS:
            return {N + 1};
        case ANGLES:
            return {angles_by_token(c, shape) ? N : shape.T, c.rotary_channels() / 2, 2};
        case CHUNK_LOGITS:
            return {head_chunk(c, shape), c.padded_vocab()};
        case PAIRS_3:
            return {most_pairs(N), 3};
        case PAIRS_2:
            return {most_pairs(N), 2};
        case PAIR_STATS:
            return {most_pairs(N), NUM_PAIR_STATS};
        case POLICY_TERMS:
            return {NUM_POLICY_TERMS, N};
        case ROLLOUT_BYTES:
            return {shape.rollout_bytes};
        case STEP_SUMS:
            return {shape.world, NUM_STEP_SUMS};
        case DQ_SUMS:
            return {gradient_sum_rows(c, shape).dq, c.heads * c.head_size};
        case DKV_SUMS:
            return {gradient_sum_rows(c, shape).dkv, 2 * c.kv_heads * c.head_size};
        case SAMPLING_ROW:
            return {1, int64_t(sizeof(SamplingRow))};
        case SCALAR_BYTES:
            return {int64_t(sizeof(StepScalars))};
        case ONE:
            return {1};
        case TWO:
            return {2};
        case SCRATCH_BYTES:
            return {scratch_bytes(c, shape)};
        case FORWARD_SCRATCH_BYTES:
            return {forward_scratch_bytes(c, shape)};
        case UPDATE_BYTES:
            return {shape.update_bytes};
        case FP8_ROWS:
            return {N * largest_linear(c, [](LinearSizes s) { return std::max(s.outputs, s.inputs); })};
        case FP8_COLUMNS:
            return {N * largest_linear(c, [](LinearSizes s) { return s.outputs; })};
        case FP8_WEIGHT:
            return {largest_linear(c, [](LinearSizes s) { return s.outputs * s.inputs; })};
        case N_LORA:
            return {N, widest_adapter(shape)};
        case N_LORA_QKV:
        case N_LORA_PROJ:
        case N_LORA_FC:
        case N_LORA_FCPROJ:
            return {N, shape.lora_widths[size_t(dims - N_LORA_QKV)]};
        case N_LORA_VOCABULARY:
            return {N, shape.lora_vocabulary};
        case NF4_WEIGHT: {  // fp8 codes come straight out of NF4
            const bool all_fp8 = shape.fp8.on && !shape.fp8.skip_first && !shape.fp8.skip_last;
            return {all_fp8 ? 0 : shape.nf4_weight};
        }
    }
    return {};
}

// The conditions that hold for the whole pass.
unsigned conditions(const ModelConfig& c, const RunShape& shape) {
    return (shape.training ? TRAIN : 0u) | (c.norm == Norm::LayerNorm ? LAYERNORM : 0u) |
           (c.positions == Positions::RoPE ? ROPE : 0u) | (c.has_qk_weights() ? QK_WEIGHTS : 0u) |
           (c.qk_norm == QkNorm::Plain || c.qk_norm == QkNorm::Weights ? HEAD_NORM : 0u) |
           (c.qk_norm == QkNorm::AllHeads ? ALL_HEADS_NORM : 0u) | (c.embedding_norm ? EMBEDDING_NORM : 0u) |
           (c.norm_after ? NORM_AFTER : NORM_BEFORE) | (shape.fp8.on ? FP8_MATMULS : 0u) |
           (shape.fp8.on && !shape.fp8.frozen ? FP8 : 0u) |
           (shape.fp8.on && !shape.fp8.keep_weights ? FP8_WEIGHTS : 0u) | (widest_adapter(shape) ? LORA : 0u) |
           (shape.nf4_weight ? NF4 : 0u) | (shape.preference ? PAIRS : 0u) | (shape.rollout ? POLICY : 0u) |
           (shape.adds_in_matmul ? ADD_IN_MATMUL : ADD_IN_NORM) |
           (shape.activation_epilogue == ActivationEpilogue::Both ? ACT_IN_FC : ACT_AFTER_FC);
}

// Whether SwiGLU's backward pass computes its output again. Recomputed in a pass of its own, that output would cost
// reading fc once more, and memory. But adapters and fp8 read it before, and so does a norm after the MLP that is
// recomputed.
bool computes_act_again(const ModelConfig& c, const RunShape& shape, int64_t l) {
    const Recompute level = shape.recompute_in(l);
    const bool norm_reads_it = c.norm_after && level == Recompute::Block;
    return shape.training && level >= Recompute::Activation && is_gated(c.activation) &&
           !shape.fp8.in_layer(l, c.layers) && !widest_adapter(shape) && !norm_reads_it;
}

// Those that hold for a layer.
unsigned conditions(const ModelConfig& c, const RunShape& shape, int64_t l) {
    const AttentionType type = c.attention_type(l);
    // Frozen weights have no gradients, which read codes; those of adapters read the inputs themselves.
    const bool fp8 = shape.fp8.in_layer(l, c.layers) && !shape.fp8.frozen, gated = type == AttentionType::GatedLinear;
    return (conditions(c, shape) & ~unsigned(FP8)) | (fp8 ? FP8 : HIGH) | (fp8 && !gated ? NORM1_CODES : NORM1_READ) |
           (type == AttentionType::Softmax ? SOFTMAX : 0u) | (type == AttentionType::Linear ? LINEAR : 0u) |
           (gated ? GATED : 0u) | (computes_act_again(c, shape, l) ? ACT_AGAIN : ACT_READ);
}

// Resolves options that exclude each other. GELU inside a matmul may be rounded differently from the kernel that
// recomputes it, and fp8 quantises the activation function's output itself. Only 16-bit softmax attention has a faster
// backward pass that is not deterministic. A matmul adds to the residual if its output goes there as it is: not through
// a norm, adapters or fp8.
RunShape effective(const ModelConfig& c, RunShape shape) {
    const bool recomputes = shape.recompute == Recompute::Activation || shape.recompute == Recompute::Norms;
    if (recomputes && c.activation == Activation::GELU && shape.activation_epilogue == ActivationEpilogue::Both)
        shape.activation_epilogue = ActivationEpilogue::Backward;
    shape.deterministic |= shape.dtype == DType::F32 || c.layers_of(AttentionType::Softmax) == 0;
    shape.fp8.on &= shape.training;
    shape.adds_in_matmul &= !c.norm_after && !shape.fp8.on && !widest_adapter(shape);
    shape.offload_inputs &= shape.training && c.layers > 1;
    if (!shape.training || shape.fp8.on) shape.activation_epilogue = ActivationEpilogue::Off;
    return shape;
}

}  // namespace

Activations::Activations(const ModelConfig& model_config, const RunShape& run_shape)
    : config(model_config),
      shape(effective(model_config, run_shape)),
      forward(static_cast<size_t>(config.layers)),
      backward(forward.size()) {
    int64_t N;
    require(!__builtin_mul_overflow(shape.B, shape.T, &N), "--batch-size x --seq-len overflows; lower one of them");
    if (shape.fp8.on) fp8 = std::make_unique<Fp8State>(config, shape.fp8);
    require(shape.recompute_layers == ALL_LAYERS || shape.recompute_layers <= config.layers, "--recompute ",
            RECOMPUTE_NAMES[size_t(shape.recompute)], ":", shape.recompute_layers, ": the model has ", config.layers,
            " layers; give at most so many, or none for all");
    require(config.positions != Positions::Learned || shape.T <= config.max_positions, "a sequence of ", shape.T,
            " tokens is beyond the model's position table of ", config.max_positions,
            " rows; use a shorter sequence, or raise --max-positions of a preset");
    plan_whole_pass<InputActs>(*this, INPUT_ACTIVATIONS);
    for (int64_t l = 0; l < config.layers; l++) plan_layer(l);
    plan_whole_pass<HeadActs>(*this, HEAD_ACTIVATIONS);
    plan.assign_offsets(shape.overlap);
}

void Activations::add(std::initializer_list<Tensor*> fields, const std::string& name, DType dtype,
                      const std::vector<int64_t>& dims, int64_t first, int64_t last) {
    const int64_t entry = plan.add(name, dtype, dims, first, last);
    for (Tensor* t : fields) bindings.emplace_back(t, entry);
}

template <typename Acts, typename Table>
void Activations::plan_whole_pass(Acts& acts, const Table& table) {
    const Timeline time{config.layers, shape.adds_in_matmul};
    const unsigned holds = conditions(config, shape);
    for (const PassRow<Acts>& row : table) {
        const std::vector<int64_t> dims = sizes(row.dims, config, shape);
        if ((row.when & ~holds) || dims[0] == 0 || dims.back() == 0) continue;  // no kernel needs this scratch
        add({&(acts.*row.field)}, row.name, row.dtype.value_or(shape.dtype), dims, time(row.first), time(row.last));
    }
}

void Activations::plan_layer(int64_t l) {
    const Timeline time{config.layers, shape.adds_in_matmul};
    const unsigned holds = conditions(config, shape, l);
    for (const BlockRow& row : BLOCK_ACTIVATIONS) {
        const std::vector<int64_t> dims = sizes(row.dims, config, shape);
        if ((row.when & ~holds) || dims.back() == 0) continue;  // 0: a linear layer without adapters
        Tensor *f = &(forward[size_t(l)].*row.field), *b = &(backward[size_t(l)].*row.field);
        const std::string name = str("layers.", l, ".", row.name);
        const DType dtype = row.dtype.value_or(shape.dtype);
        const bool recomputed = shape.training && row.recomputed != KEPT && shape.recompute_in(l) >= row.recomputed;
        const bool in_backward = shape.training && row.last_backward != NONE;
        const int64_t first = time.forward(l, row.first);
        const int64_t last_backward = in_backward ? time.backward(l, row.last_backward) : time.recompute(l);
        if (row.field == &A::res1 && in_host_memory(l)) {  // until the copies have ended, and from when they begin
            add({f}, name, dtype, dims, first, time.forward(l, FCPROJ));
            add({b}, name + " (fetched)", dtype, dims, time.recompute(l + 1), last_backward);
        } else if (row.last_forward == NONE) {
            add({b}, name, dtype, dims, time.backward(l, row.first), last_backward);
        } else if (row.last_forward == UNREAD && recomputed) {
            add({b}, name + " (recomputed)", dtype, dims, time.recompute(l), last_backward);
        } else if (in_backward && !recomputed) {
            add({f, b}, name, dtype, dims, first, last_backward);
        } else {
            add({f}, name, dtype, dims, first, time.forward(l, row.last_forward));
            if (recomputed) add({b}, name + " (recomputed)", dtype, dims, time.recompute(l), last_backward);
        }
    }
}

void Activations::allocate(const Context& ctx, const Tensor& shared) {
    memory = shared ? Arena(shared) : Arena(plan.bytes(), "activations");
    staging = std::make_unique<Staging>(staging_bytes(), STAGING_BUFFERS);
    for (const auto& [tensor, entry] : bindings) *tensor = at(plan.entries()[static_cast<size_t>(entry)]);
    loss_sum = sum(ctx.rank, SUM_LOSS);
    device_fill(sums.data, 0, size_t(sums.bytes()), ctx.stream);  // a run without pairs writes none of their sums
    if (fp8) fp8->allocate(ctx);
    if (shape.offload_inputs) host_inputs = std::make_unique<BlockInputs>(ctx, config.layers - 1, input_bytes());
    if (angles_by_token(config, shape)) angles = std::make_unique<AngleRows>();
    if (rope_table && !angles) {
        std::vector<float> host(static_cast<size_t>(rope_table.numel()));
        ::rope_table(host_tensor(host.data(), {shape.T, config.rotary_channels() / 2, 2}), config.rope_theta,
                     config.rope_scaling);
        copy_to_device(rope_table.data, host.data(), host.size() * sizeof(float), ctx.stream);
    }
}

int64_t Activations::staging_bytes() const {
    const int64_t N = shape.B * shape.T;
    const int64_t of_pairs = shape.preference ? most_pairs(N) * (int64_t(sizeof(PairRows)) + 2 * 4) : 0;
    const int64_t of_policy = shape.rollout ? NUM_POLICY_TERMS * N * 4 : 0;
    return (5 * N + 2) * 4 + 8 + of_pairs + of_policy +
           (angles_by_token(config, shape) ? N * config.rotary_channels() * 4 : 0);
}

const std::vector<int32_t>& Activations::angle_rows(const Batch& batch, Stream stream) const {
    if (!angles) return batch.positions;
    const auto n = int64_t(batch.tokens.size());
    angles->lengths.clear();
    for (size_t s = 1; s < batch.cum_seqlens.size(); s++)
        angles->lengths.resize(size_t(batch.cum_seqlens[s]), batch.cum_seqlens[s] - batch.cum_seqlens[s - 1]);
    angles->values.resize(size_t(n * config.rotary_channels()));
    rope_rows(host_tensor(angles->values.data(), {n, config.rotary_channels() / 2, 2}), batch.positions.data(),
              angles->lengths.data(), config.rope_theta, config.rope_scaling);
    staging->put(rope_table.data, angles->values.data(), int64_t(angles->values.size() * sizeof(float)), stream);
    angles->rows.resize(batch.tokens.size());
    std::iota(angles->rows.begin(), angles->rows.end(), 0);
    return angles->rows;
}

LayerActs first_tokens(LayerActs a, int64_t n) {
    for (const BlockRow& row : BLOCK_ACTIVATIONS) {
        Tensor& t = a.*row.field;
        if (!t) continue;
        const bool by_tokens = row.dims == NH_N || row.dims == C_N || row.dims == ATT_N || row.dims == FFN_N;
        t = by_tokens ? make_tensor(t.data, t.dtype, t.device, {t.shape[0], n}) : t.rows(0, n);
    }
    return a;
}
