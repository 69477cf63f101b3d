// One block on each SM, from the first layer to the head.
//
// A warp of its own streams the block's part of all weights, in the order of their use, through a ring of stages in
// shared memory (cp.async.bulk). It never looks at an activation, so that the ring is full again by the time one has
// come: where the arithmetic waits for other blocks, memory does not.
//
// Eight warps multiply, each an eighth of the columns of all rows that the block owns: a warp waits for its own part of
// an activation only, keeps it to itself, and has its first weights in registers by then. A few lanes share a row; what
// the warps have is added up in order after one barrier. A unit is two rows of the output, that is two rows of weight,
// with SwiGLU two of gate and the same two of up; block b owns the units [b·units/blocks, (b + 1)·units/blocks) of
// every product.
//
// Exchanges: what a block has computed goes to global memory in words of 64 bits, a pair of 16-bit numbers or an fp32
// one in the low half, the number of the exchange in the high half. Whoever needs it reads until the number is right;
// one load gives both halves, so that no fence is needed.
//
// A word is written again one layer later. Its writer has by then received every word of x or x2 that came after it;
// each of these was sent behind a barrier of its block at which all warps had done their reading of the first. That is
// why there may be no more blocks than channels / 2: each must have a part in the products that give x and x2.
#include "kernels/generation/decode_step.h"

#include <cfloat>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/tma.cuh"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/kv_rotate.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;  // that compute; one more warp streams
constexpr int64_t MAX_HS = 128;                   // a warp for each of 4 heads of queries, a lane for each 16 bytes
constexpr int MIN_STAGES = 3, MAX_STAGES = 24;
constexpr int64_t STAGE_BYTES = 12 << 10;       // at least
constexpr int64_t RESERVED_BYTES = 4 << 10;     // of shared memory, for the kernel's static arrays, and for each text
constexpr int STAGE_ROWS = 8;                   // at most: as many as four lanes each of a warp multiply
constexpr int GROUP = 3;                        // stages that a warp multiplies side by side
constexpr int CHUNK_ROWS = GROUP * STAGE_ROWS;  // between two barriers
constexpr int WIDE_HEADS = 4;
constexpr int64_t PIECE = 128;  // keys that a block takes of a context

enum { QKV, PROJ, FC, FCPROJ, LAYER_PRODUCTS, HEAD = LAYER_PRODUCTS, PRODUCTS };

// A layer as the kernel finds it in memory.
struct Layer {
    const void *weight[LAYER_PRODUCTS], *bias[LAYER_PRODUCTS];
    const float *norm_weight[2], *norm_bias[2];
    void *k, *v;  // [slots, capacity, NKV, HS]
};

// weight [2·units (SwiGLU 4·units), K]
struct Product {
    int K, units;
    int log_per_stage;  // units of a stage
    int stage_rows;     // a power of two up to STAGE_ROWS
    int chunk;          // stages
};

template <typename T>
struct Step {
    T* logits;
    const int32_t *ids, *slots, *positions;
    Angles angles;
    const T *wte, *wpe, *head;
    const float *normf_weight, *normf_bias;
    const Layer* layers;
    uint32_t* exchanges;                    // so many have been, of each kind
    uint64_t *words[LAYER_PRODUCTS], *att;  // of exchanges: what each product gives, and attention
    uint64_t* partials;                     // [N, NH, pieces, HS + 2] fp32: maximum, sum, Σ p·v
    int64_t vocab, places, logits_stride, num_slots, capacity;
    Product products[PRODUCTS];
    int num_layers, N, C, NH, NKV, HS, passes, pieces, log_lanes;
    float eps, scale;
    bool centred;
    Activation activation;
    int stages, stage_bytes;
    int group;  // stages that a warp takes at once: one less than there are, which may be a norm's
    int stage_memory, rows_memory, x_memory, attention_memory, layers_memory;  // where they begin, in bytes
};

// Elements of T in a word of an exchange, and in the two words that are read at once.
template <typename T>
constexpr int PER_WORD = 4 / int(sizeof(T));
template <typename T>
constexpr int QUAD = 2 * PER_WORD<T>;

// Of a chunk's rows, by each warp; of two chunks in turn.
template <int NB>
using Partial = float[2][WARPS][NB][CHUNK_ROWS];
constexpr int64_t TEXT_BYTES = int64_t(sizeof(Partial<1>)) + MAX_HS * int64_t(sizeof(float)) + 128;

// Shared memory of attention, in bytes: queries [HEADS, HS] and each warp's Σ p·v [WARPS, HEADS, HS] fp32, then T: rows
// of qkv as they come [HEADS + 2, HS], and the newest key [HS].
__host__ __device__ constexpr int64_t attention_bytes(int64_t heads, int64_t HS, int64_t item) {
    return (1 + WARPS) * heads * HS * int64_t(sizeof(float)) + (heads + 3) * HS * item;
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void sync_computing_warps() {
    named_barrier_sync(1, THREADS);
}

// --- exchanges

__device__ __forceinline__ uint64_t exchange_word(uint32_t payload, uint32_t number) {
    return uint64_t(number) << 32 | payload;
}

__device__ __forceinline__ ulonglong2 load_two(const uint64_t* from) {
    ulonglong2 w;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(w.x), "=l"(w.y) : "l"(from) : "memory");
    return w;
}
__device__ __forceinline__ void store_one(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void store_two(uint64_t* to, uint64_t a, uint64_t b) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

// A block that never answers would hold the GPU for ever: after seconds the kernel gives up.
constexpr unsigned MAX_TRIES = 1u << 23;

__device__ __forceinline__ bool has_come(const ulonglong2& w, uint32_t number) {
    return uint32_t(w.x >> 32) == number && uint32_t(w.y >> 32) == number;
}

// A warp's pairs of words, `count` of each text's row, `row` pairs from one text to the next, to the same places in
// shared memory once their numbers are right. BATCH loads of a lane are under way at a time, and again those that came
// too early.
template <int BATCH>
__device__ __forceinline__ void receive(uint2* to, const uint64_t* words, uint32_t number, int texts, int row,
                                        int count) {
    const int lane = int(threadIdx.x) % WARP;
    int n = 0, q = lane;
#pragma unroll 1
    while (n < texts) {
        int at[BATCH];  // -1: nothing, or there
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            at[b] = n < texts && q < count ? n * row + q : -1;
            q += WARP;
            if (q - lane >= count) q = lane, n++;
        }
        bool early = true;
        for (unsigned tries = 0; early; tries++) {
            if (tries > MAX_TRIES) __trap();
            ulonglong2 w[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (at[b] >= 0) w[b] = load_two(words + 2 * at[b]);
            early = false;
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (at[b] < 0) continue;
                if (has_come(w[b], number)) {
                    to[at[b]] = make_uint2(uint32_t(w[b].x), uint32_t(w[b].y));
                    at[b] = -1;
                } else {
                    early = true;
                }
            }
        }
    }
}

// Numbers 2i and 2i + 1 of a row.
template <typename T>
__device__ __forceinline__ void send(uint64_t* row, int i, float a, float b, uint32_t number) {
    if constexpr (sizeof(T) == 2) {
        const Pack<T, 2> pair = as_pack<T>(Floats<2>{{a, b}});
        store_one(row + i, exchange_word(pair.word[0], number));
    } else {
        store_two(row + 2 * i, exchange_word(__float_as_uint(a), number), exchange_word(__float_as_uint(b), number));
    }
}

// --- the ring of weights

struct Ring {
    Mbarrier *full, *empty;
    char* memory;
    int stages, stage_bytes;
    int stage = 0, parity = 0;

    __device__ __forceinline__ char* here() const { return memory + stage * stage_bytes; }
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait() const { mbarrier_wait(full + stage, parity); }
    // One thread: makes room for `bytes`.
    __device__ __forceinline__ char* claim(int bytes) const {
        mbarrier_wait(empty + stage, parity ^ 1);
        mbarrier_arrive_expect_tx(full + stage, bytes);
        return here();
    }
};

// The units of a product that are a block's.
struct Units {
    int first, end;
};
__device__ __forceinline__ Units units_of_block(const Product& p) {
    const int64_t units = p.units;
    return {int(units * blockIdx.x / gridDim.x), int(units * (blockIdx.x + 1) / gridDim.x)};
}

// A stage of a product has the rows of up to 1 << log_per_stage units one after the other, with SwiGLU the gates'
// first.
template <typename T>
__device__ void stream_weights(const Step<T>& a, const Layer* layers, const Units* units, Ring ring) {
    const auto norm = [&](const float* weight, const float* bias) {
        const int bytes = a.C * int(sizeof(float));
        char* const to = ring.claim(bias ? 2 * bytes : bytes);
        bulk_load(to, weight, bytes, ring.full + ring.stage);
        if (bias) bulk_load(to + bytes, bias, bytes, ring.full + ring.stage);
        ring.advance();
    };
    const auto product = [&](int which, const void* matrix, bool swiglu) {
        const Product& p = a.products[which];
        const T* const weight = static_cast<const T*>(matrix);
        const int end = units[which].end, per_stage = 1 << p.log_per_stage;
#pragma unroll 1
        for (int unit = units[which].first; unit < end; unit += per_stage) {
            const int64_t K = p.K;
            const int bytes = min(per_stage, end - unit) * 2 * p.K * int(sizeof(T));
            char* const to = ring.claim(swiglu ? 2 * bytes : bytes);
            bulk_load(to, weight + unit * 2 * K, bytes, ring.full + ring.stage);
            if (swiglu)
                bulk_load(to + bytes, weight + (int64_t(p.units) + unit) * 2 * K, bytes, ring.full + ring.stage);
            ring.advance();
        }
    };
#pragma unroll 1
    for (int step = 0; step <= LAYER_PRODUCTS * a.num_layers; step++) {
        const int l = step / LAYER_PRODUCTS;
        const bool head = l == a.num_layers;
        const int which = head ? int(HEAD) : step % LAYER_PRODUCTS;
        const Layer& layer = layers[head ? 0 : l];
        if (head || which == QKV || which == FC) {
            norm(head ? a.normf_weight : layer.norm_weight[which == FC],
                 head ? a.normf_bias : layer.norm_bias[which == FC]);
        }
        product(which, head ? a.head : layer.weight[which], which == FC && a.activation == Activation::SwiGLU);
    }
}

// --- products

// A warp's part of a row of K elements, in vectors of 16 bytes.
struct Slice {
    int first, count;
};
template <typename T>
__device__ __forceinline__ Slice slice_of(int K, int warp) {
    const int vectors = K / FULL_WIDTH<T>, first = vectors * warp / WARPS;
    return {first, vectors * (warp + 1) / WARPS - first};
}

// The lanes of a warp over the rows of a stage: lanes / rows of them share a row and take one vector each of it in a
// step. Odd rows begin with the second step and end with the first, because the same vectors of two rows mostly lie in
// the same banks.
struct Walk {
    int lanes, row, in_row, count, steps;

    __device__ __forceinline__ Walk(int rows, int vectors) {
        const int lane = int(threadIdx.x) % WARP, log_lanes = __clz(rows) - 26;  // of 32 / rows
        lanes = 1 << log_lanes, row = lane >> log_lanes, in_row = lane & (lanes - 1);
        count = vectors, steps = (vectors + lanes - 1) >> log_lanes;
    }
    // The lane's vector in step i; -1: none.
    __device__ __forceinline__ int vector(int i) const {
        int turned = i + (row & 1);
        if (turned >= steps) turned -= steps;
        const int v = turned * lanes + in_row;
        return i < steps && v < count ? v : -1;
    }
};

// What a warp does for one product: next() waits for the next stages, up to a group of them, and has the first weights
// under way; multiply() multiplies them with the warp's part of x and lets the stages go.
template <int NB, typename T>
struct Multiplication {
    static constexpr int W = FULL_WIDTH<T>, STEPS = NB <= 2 ? 3 : 1;

    Walk walk;
    int K, stage_rows;
    int left;  // rows that have not been waited for
    int taken, first_stage;
    const T* from[GROUP];  // the lane's row in each stage
    Pack<T, W> w[GROUP][STEPS];

    __device__ __forceinline__ Multiplication(const Product& p, Slice slice, int rows)
        : walk(p.stage_rows, slice.count), K(p.K), stage_rows(p.stage_rows), left(rows) {}

    __device__ __forceinline__ void load(int first_step, int stages) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int v = walk.vector(first_step + s);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                w[g][s] = {};
                if (g < stages && v >= 0) w[g][s] = load_pack<W>(from[g] + v * W);
            }
        }
    }
    __device__ __forceinline__ void next(Ring& ring, Slice slice, int most) {
        taken = 0, first_stage = ring.stage;
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            if (g >= most || left <= 0) continue;
            ring.wait();
            from[g] = reinterpret_cast<const T*>(ring.here()) + min(walk.row, left - 1) * K + slice.first * W;
            left -= stage_rows, taken++;
            ring.advance();
        }
        load(0, taken);
    }
    // x: the warp's part, row n at n·K; to: of row 0 of the group.
    template <int STAGES>
    __device__ __forceinline__ void multiply(const Ring& ring, const T* x, int N, float (*to)[CHUNK_ROWS]) {
        const int lane = int(threadIdx.x) % WARP;
        float sum[STAGES][NB] = {};
#pragma unroll 1
        for (int i = 0; i < walk.steps; i += STEPS) {
            if (i > 0) load(i, taken);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int v = walk.vector(i + s);
                Floats<W> weight[STAGES];
#pragma unroll
                for (int g = 0; g < STAGES; g++) weight[g] = as_floats(w[g][s]);
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    Pack<T, W> in = {};
                    if (v >= 0) in = load_pack<W>(x + min(n, N - 1) * K + v * W);
                    const Floats<W> f = as_floats(in);
#pragma unroll
                    for (int k = 0; k < W; k++)
#pragma unroll
                        for (int g = 0; g < STAGES; g++) sum[g][n] = fmaf(f[k], weight[g][k], sum[g][n]);
                }
            }
        }
        __syncwarp();
        if (lane < taken) {
            const int stage = first_stage + lane;
            mbarrier_arrive(ring.empty + (stage < ring.stages ? stage : stage - ring.stages));
        }
#pragma unroll 1
        for (int offset = walk.lanes / 2; offset > 0; offset /= 2)
#pragma unroll
            for (int g = 0; g < STAGES; g++)
#pragma unroll
                for (int n = 0; n < NB; n++) sum[g][n] += __shfl_xor_sync(ALL_LANES, sum[g][n], offset);
        if (walk.in_row > 0) return;
#pragma unroll
        for (int g = 0; g < STAGES; g++)
#pragma unroll
            for (int n = 0; n < NB; n++)
                if (g < taken) to[n][g * stage_rows + walk.row] = sum[g][n];
    }
};

// --- attention

// Which part of a step's attention a block works on: texts, KV heads, passes over the query heads that read one, pieces
// of the context, the last fastest.
struct Item {
    int n, kv, head0, heads, piece;
    int used, keys;  // pieces of this text's context; keys of this piece, if any. 0 pieces: finished
    int64_t last;    // key of the piece: its row in the cache
    __device__ __forceinline__ bool has_newest() const { return piece == used - 1; }
};

template <int HEADS, typename T>
__device__ __forceinline__ Item item_of(const Step<T>& a, const int64_t* positions, const int64_t* slots, int i) {
    Item t{};
    t.piece = i % a.pieces, i /= a.pieces;
    const int pass = i % a.passes, group = a.NH / a.NKV;
    i /= a.passes;
    t.kv = i % a.NKV, t.n = i / a.NKV;
    t.head0 = t.kv * group + pass * HEADS, t.heads = min(HEADS, group - pass * HEADS);
    const int64_t length = positions[t.n] + 1, slot = slots[t.n], begin = int64_t(t.piece) * PIECE;
    if (length <= 0 || length > a.capacity || slot < 0 || slot >= a.num_slots) return t;
    t.used = int(ceil_div(length, PIECE));
    if (t.used > a.pieces) t.used = 0;
    if (t.piece < t.used) t.keys = int(min(PIECE, length - begin));
    t.last = slot * a.capacity + begin + t.keys - 1;
    return t;
}

// Keys and values of a lane. They are counted from the piece's last one, so that the newest, which is not in the cache
// yet, is always the first of the first lanes.
template <int ROUNDS, typename T>
struct Past {
    static constexpr int W = FULL_WIDTH<T>;
    using Vectors = Pack<T, W>[ROUNDS];
    Vectors key, value;

    // Those with the numbers b·step + first of the piece, b < ROUNDS.
    __device__ __forceinline__ static void load(Vectors& x, const Step<T>& a, const void* cache, const Item& t,
                                                int first, int step) {
        const int channel = (int(threadIdx.x) & ((1 << a.log_lanes) - 1)) * W;
        const int64_t row = int64_t(a.NKV) * a.HS, at = t.last * row + int64_t(t.kv) * a.HS + channel;
#pragma unroll
        for (int b = 0; b < ROUNDS; b++) {
            const int j = b * step + first;
            uint4 v = {};
            // In assembly, for this place: the compiler would move the loads to where they are used.
            if (j < t.keys && channel < a.HS)
                asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                             : "l"(__cvta_generic_to_global(static_cast<const T*>(cache) + at - j * row)));
            x[b] = reinterpret_cast<const Pack<T, W>&>(v);
        }
    }
};

// One layer's attention, from qkv to att. turns: of each text, [2·pairs].
template <int HEADS, typename T>
__device__ __forceinline__ void attend(const Step<T>& a, const Layer& layer, const int64_t* positions,
                                       const int64_t* slots, const Item& first_item, const float (*turns)[MAX_HS],
                                       const bool* turned, char* memory, int my_head, uint32_t number) {
    constexpr int W = FULL_WIDTH<T>;
    constexpr int ROUNDS = HEADS == 1 ? 4 : 2;  // of keys that a lane has at a time
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP, HS = a.HS;
    const int lanes = 1 << a.log_lanes, slot = thread >> a.log_lanes, slots_in_round = THREADS >> a.log_lanes;
    const int channel = (thread & (lanes - 1)) * W, my_channel = 2 * thread - my_head * HS;
    __shared__ float2 softmax[WARPS][HEADS];  // of a warp's keys: maximum, Σ exp(S − maximum)
    float *const queries = reinterpret_cast<float*>(memory), *const sums = queries + HEADS * HS;
    T *const rows = reinterpret_cast<T*>(sums + WARPS * HEADS * HS), *const newest = rows + (HEADS + 2) * HS;
    const int items = a.N * a.NKV * a.passes * a.pieces;
    const int64_t qkv_channels = int64_t(a.NH + 2 * a.NKV) * HS;

#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece >= max(t.used, 1)) continue;
        uint64_t* const att = a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>;
        if (t.used == 0) {
            if (my_head < t.heads) send<T>(att, (t.head0 * HS) / 2 + thread, 0, 0, number);
            continue;
        }
        Past<ROUNDS, T> past;
        past.load(past.key, a, layer.k, t, slot, slots_in_round);
        past.load(past.value, a, layer.v, t, slot, slots_in_round);
        __syncwarp();  // from the last item, of which not every lane had channels
        // A warp for each row of queries, for the key and for the value.
        if (warp < t.heads || (t.has_newest() && (warp == HEADS || warp == HEADS + 1))) {
            const bool is_key = warp == HEADS, is_value = warp == HEADS + 1;
            const int head = is_key ? a.NH + t.kv : is_value ? a.NH + a.NKV + t.kv : t.head0 + warp;
            T* const row = rows + warp * HS;
            receive<1>(reinterpret_cast<uint2*>(row),
                       a.words[QKV] + (t.n * qkv_channels + int64_t(head) * HS) / PER_WORD<T>, number, 1, 0,
                       HS / QUAD<T>);
            __syncwarp();
            const int64_t to = (t.last * a.NKV + t.kv) * HS;
            const float* const turn = turned[t.n] ? turns[t.n] : nullptr;
#pragma unroll 1
            for (int c = lane; c < HS; c += WARP) {
                // Every pass of a KV head writes the same.
                if (is_value) {
                    static_cast<T*>(layer.v)[to + c] = row[c];
                    continue;
                }
                const float x = rotated(row, c, turn, a.angles.pairs);
                if (is_key)
                    static_cast<T*>(layer.k)[to + c] = newest[c] = from_float<T>(x);
                else
                    queries[warp * HS + c] = a.scale * x;
            }
        }
        sync_computing_warps();

        float q[HEADS][W], max[HEADS], total[HEADS] = {}, o[HEADS][W] = {};
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            max[h] = -FLT_MAX;
            Floats<W> x = {};
            if (channel < HS) x = load_floats<W>(queries + h * HS + channel);
#pragma unroll
            for (int k = 0; k < W; k++) q[h][k] = x[k];
        }
        if (t.has_newest() && slot == 0 && channel < HS) {
            past.key[0] = load_pack<W>(newest + channel);
            past.value[0] = load_pack<W>(rows + (HEADS + 1) * HS + channel);
        }
#pragma unroll 1
        for (int first = slot; first - slot < t.keys; first += ROUNDS * slots_in_round) {
            if (first > slot) {
                past.load(past.key, a, layer.k, t, first, slots_in_round);
                past.load(past.value, a, layer.v, t, first, slots_in_round);
            }
            float s[ROUNDS][HEADS];
#pragma unroll
            for (int b = 0; b < ROUNDS; b++) {
                const Floats<W> x = as_floats(past.key[b]);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    s[b][h] = 0;
#pragma unroll
                    for (int k = 0; k < W; k++) s[b][h] = fmaf(q[h][k], x[k], s[b][h]);
                }
            }
#pragma unroll 1
            for (int offset = lanes / 2; offset > 0; offset /= 2)
#pragma unroll
                for (int b = 0; b < ROUNDS; b++)
#pragma unroll
                    for (int h = 0; h < HEADS; h++) s[b][h] += __shfl_xor_sync(ALL_LANES, s[b][h], offset);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float larger = max[h];
#pragma unroll
                for (int b = 0; b < ROUNDS; b++) {
                    if (b * slots_in_round + first >= t.keys) s[b][h] = -INFINITY;
                    larger = fmaxf(larger, s[b][h]);
                }
                const float old = exp_for<T>(max[h] - larger);
                max[h] = larger, total[h] *= old;
#pragma unroll
                for (int k = 0; k < W; k++) o[h][k] *= old;
#pragma unroll
                for (int b = 0; b < ROUNDS; b++) s[b][h] = exp_for<T>(s[b][h] - larger), total[h] += s[b][h];
            }
#pragma unroll
            for (int b = 0; b < ROUNDS; b++) {
                const Floats<W> x = as_floats(past.value[b]);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int k = 0; k < W; k++) o[h][k] = fmaf(s[b][h], x[k], o[h][k]);
            }
        }
        // The groups of a warp, then the warps.
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float larger = max[h];
            for (int offset = lanes; offset < WARP; offset *= 2)
                larger = fmaxf(larger, __shfl_xor_sync(ALL_LANES, larger, offset));
            const float old = exp_for<T>(max[h] - larger);
            max[h] = larger, total[h] *= old;
#pragma unroll
            for (int k = 0; k < W; k++) o[h][k] *= old;
        }
#pragma unroll 1
        for (int offset = lanes; offset < WARP; offset *= 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                total[h] += __shfl_xor_sync(ALL_LANES, total[h], offset);
#pragma unroll
                for (int k = 0; k < W; k++) o[h][k] += __shfl_xor_sync(ALL_LANES, o[h][k], offset);
            }
        if (lane < lanes && channel < HS) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (lane == 0) softmax[warp][h] = make_float2(max[h], total[h]);
                float4* const to = reinterpret_cast<float4*>(sums + (warp * HEADS + h) * HS + channel);
#pragma unroll
                for (int k = 0; k < W / 4; k++)
                    to[k] = make_float4(o[h][4 * k], o[h][4 * k + 1], o[h][4 * k + 2], o[h][4 * k + 3]);
            }
        }
        sync_computing_warps();
        if (my_head >= t.heads) continue;
        float largest = -FLT_MAX, sum = 0, s0 = 0, s1 = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, softmax[w][my_head].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 of_warp = softmax[w][my_head];
            const float2 x = *reinterpret_cast<const float2*>(sums + (w * HEADS + my_head) * HS + my_channel);
            const float weight = exp_for<T>(of_warp.x - largest);
            sum = fmaf(of_warp.y, weight, sum), s0 = fmaf(x.x, weight, s0), s1 = fmaf(x.y, weight, s1);
        }
        if (t.used == 1) {
            send<T>(att, t.head0 * HS / 2 + thread, s0 / sum, s1 / sum, number);
            continue;
        }
        uint64_t* const to = a.partials + ((int64_t(t.n) * a.NH + t.head0 + my_head) * a.pieces + t.piece) * (HS + 2);
        send<float>(to, 1 + my_channel / 2, s0, s1, number);
        if (my_channel == 0) send<float>(to, 0, largest, sum, number);
    }

    // The block with a context's first piece combines all of them, in order; a thread for two channels.
#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece > 0 || t.used <= 1 || my_head >= t.heads) continue;
        constexpr int BATCH = 4;
        const uint64_t* const from = a.partials + (int64_t(t.n) * a.NH + t.head0 + my_head) * a.pieces * (HS + 2);
        float max = -FLT_MAX, sum = 0, s0 = 0, s1 = 0;
#pragma unroll 1
        for (int first = 0; first < t.used; first += BATCH) {
            ulonglong2 scale[BATCH], o[BATCH];
            bool early = true;
            for (unsigned tries = 0; early; tries++) {
                if (tries > MAX_TRIES) __trap();
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    const uint64_t* const at = from + int64_t(min(first + b, t.used - 1)) * (HS + 2);
                    scale[b] = load_two(at), o[b] = load_two(at + 2 + my_channel);
                }
                early = false;
#pragma unroll
                for (int b = 0; b < BATCH; b++) early |= !has_come(scale[b], number) || !has_come(o[b], number);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (first + b >= t.used) break;
                const float max_here = __uint_as_float(uint32_t(scale[b].x)), larger = fmaxf(max, max_here);
                const float old = exp_for<T>(max - larger), weight = exp_for<T>(max_here - larger);
                sum = fmaf(__uint_as_float(uint32_t(scale[b].y)), weight, sum * old);
                s0 = fmaf(__uint_as_float(uint32_t(o[b].x)), weight, s0 * old);
                s1 = fmaf(__uint_as_float(uint32_t(o[b].y)), weight, s1 * old);
                max = larger;
            }
        }
        send<T>(a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>, t.head0 * HS / 2 + thread, s0 / sum, s1 / sum, number);
    }
    __syncwarp();
}

#endif

template <typename T, int NB, int HEADS>
__global__ void __launch_bounds__(THREADS + WARP, 1) decode_step_kernel(const __grid_constant__ Step<T> a) {
#if __CUDA_ARCH__ >= 900
    constexpr int W = FULL_WIDTH<T>, Q = QUAD<T>;
    extern __shared__ __align__(128) char memory[];
    __shared__ Mbarrier full[MAX_STAGES], empty[MAX_STAGES];
    __shared__ Partial<NB> partial;
    __shared__ int64_t positions[NB], slots[NB];
    __shared__ float2 norm_sums[NB][WARPS];  // mean and Σ (x − mean)² of each warp's part
    __shared__ float turns[NB][MAX_HS];      // angles of each text, if there are any
    __shared__ bool turned[NB];
    __shared__ T biases[2][THREADS];  // of two products in turn
    __shared__ Units units[PRODUCTS];
    __shared__ Item first_item;  // of the block; nothing where there are fewer items than blocks
    __shared__ uint32_t shared_number;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    Layer* const layers = reinterpret_cast<Layer*>(memory + a.layers_memory);
    T* const rows = reinterpret_cast<T*>(memory + a.rows_memory);  // [N, K] what a product multiplies
    T* const stream = reinterpret_cast<T*>(memory + a.x_memory);   // [N, C] the residual stream
#pragma unroll 1
    for (int s = thread; s < a.stages; s += THREADS + WARP) mbarrier_init(full + s, 1), mbarrier_init(empty + s, WARPS);
    if (thread == 0) mbarrier_init_fence();
#pragma unroll 1
    for (int i = thread; i < a.num_layers * int(sizeof(Layer) / sizeof(uint64_t)); i += THREADS + WARP)
        reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    if (thread < a.N) positions[thread] = a.positions[thread], slots[thread] = a.slots[thread];
    if (thread == 0) shared_number = *a.exchanges;
    if (thread < PRODUCTS) units[thread] = units_of_block(a.products[thread]);
    __syncthreads();
    Ring ring{full, empty, memory + a.stage_memory, a.stages, a.stage_bytes};
    if (warp == WARPS) {
        if (lane == 0) stream_weights(a, layers, units, ring);
        return;
    }
    const uint32_t number = shared_number;
    if (thread == 0) {
        first_item = {};
        if (int(blockIdx.x) < a.N * a.NKV * a.passes * a.pieces)
            first_item = item_of<HEADS>(a, positions, slots, int(blockIdx.x));
    }
#pragma unroll 1
    for (int n = warp; n < a.N; n += WARPS) {
        const float* const turn = a.angles.of(n);
        if (lane == 0) turned[n] = turn;
        if (turn)
#pragma unroll 1
            for (int c = lane; c < 2 * a.angles.pairs; c += WARP) turns[n][c] = turn[c];
    }
    sync_computing_warps();
    const int my_head = 2 * thread / a.HS;  // of an item, with two channels of it
    const Slice normed = slice_of<T>(a.C, warp);

    // The warp's part of the residual stream, of each text, through a norm to `rows`. What the warps have is combined
    // from their means and squares (Chan et al. 1983).
    const auto norm = [&](const float* weight, bool has_bias) {
        const int first = normed.first * W, quads = normed.count * (W / Q);
        float mean[NB] = {}, squares[NB] = {};
        const auto each = [&](auto f) {
#pragma unroll 1
            for (int q = lane; q < quads; q += WARP)
#pragma unroll
                for (int n = 0; n < NB; n++)
                    if (n < a.N) f(n, n * a.C + first + q * Q, first + q * Q);
        };
        if (a.centred) {
            each([&](int n, int at, int) {
                const Floats<Q> v = load_floats<Q>(stream + at);
#pragma unroll
                for (int k = 0; k < Q; k++) mean[n] += v[k];
            });
            const float per_number = 1 / float(max(quads * Q, 1));
#pragma unroll
            for (int n = 0; n < NB; n++) mean[n] = warp_sum(mean[n]) * per_number;
        }
        each([&](int n, int at, int) {
            const Floats<Q> v = load_floats<Q>(stream + at);
#pragma unroll
            for (int k = 0; k < Q; k++) squares[n] = fmaf(v[k] - mean[n], v[k] - mean[n], squares[n]);
        });
#pragma unroll
        for (int n = 0; n < NB; n++) {
            squares[n] = warp_sum(squares[n]);
            if (lane == 0) norm_sums[n][warp] = make_float2(mean[n], squares[n]);
        }
        sync_computing_warps();
        // Lane n does it for text n.
        float2 part[WARPS];
        float all_mean = 0, all_squares = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            part[w] = norm_sums[lane % NB][w];
            all_mean = fmaf(part[w].x, float(slice_of<T>(a.C, w).count * W), all_mean);
        }
        all_mean /= float(a.C);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float off = part[w].x - all_mean;
            all_squares += fmaf(off * off, float(slice_of<T>(a.C, w).count * W), part[w].y);
        }
        const float rstd = rsqrtf(all_squares / float(a.C) + a.eps);
        float means[NB], rstds[NB];
#pragma unroll
        for (int n = 0; n < NB; n++)
            means[n] = __shfl_sync(ALL_LANES, all_mean, n), rstds[n] = __shfl_sync(ALL_LANES, rstd, n);
        each([&](int n, int at, int c) {
            Floats<Q> v = load_floats<Q>(stream + at), shift = {};
            const Floats<Q> scale = load_floats<Q>(weight + c);
            if (has_bias) shift = load_floats<Q>(weight + a.C + c);
#pragma unroll
            for (int k = 0; k < Q; k++) v[k] = fmaf((v[k] - means[n]) * rstds[n], scale[k], shift[k]);
            *reinterpret_cast<Pack<T, Q>*>(rows + at) = as_pack<T>(v);
        });
    };
    // The keys and values of the block's first item: on their way to the cache of the GPU.
    const auto prefetch = [&](const Layer& layer) {
        const Item& t = first_item;
#pragma unroll 1
        for (int j = thread; j < t.keys; j += THREADS) {
            const int64_t at = ((t.last - j) * a.NKV + t.kv) * a.HS;
#pragma unroll 1
            for (int c = 0; c < a.HS; c += 128 / int(sizeof(T)))
                for (const void* cache : {layer.k, layer.v}) prefetch_line(static_cast<const T*>(cache) + at + c);
        }
    };
    const auto embed = [&] {
        const int first = normed.first * W, quads = normed.count * (W / Q);
#pragma unroll 1
        for (int n = 0; n < a.N; n++) {
            const int64_t id = a.ids[n], place = positions[n];
#pragma unroll 1
            for (int q = lane; q < quads; q += WARP) {
                const int c = first + q * Q;
                Floats<Q> v = {};
                if (id >= 0 && id < a.vocab) v = load_floats<Q>(a.wte + id * a.C + c);
                if (a.wpe && place >= 0 && place < a.places) {
                    const Floats<Q> p = load_floats<Q>(a.wpe + place * a.C + c);
#pragma unroll
                    for (int k = 0; k < Q; k++) v[k] += p[k];
                }
                *reinterpret_cast<Pack<T, Q>*>(stream + n * a.C + c) = as_pack<T>(v);
            }
        }
    };

    // Products in order. All of them are the same lines of code, which so stay in the cache of instructions.
    const int swiglu_halves = a.activation == Activation::SwiGLU ? 2 : 1;
    int turn = 0;  // of partial
#pragma unroll 1
    for (int step = 0; step <= LAYER_PRODUCTS * a.num_layers; step++) {
        const int l = step / LAYER_PRODUCTS, which = l < a.num_layers ? step % LAYER_PRODUCTS : int(HEAD);
        const Product& p = a.products[which];
        const Layer& layer = layers[which == HEAD ? 0 : l];
        const uint32_t now = number + uint32_t(l) + 1;
        const int halves = which == FC ? swiglu_halves : 1;
        const bool has_norm = which != PROJ && which != FCPROJ;
        const Units mine = units[which];
        const int owned = mine.end - mine.first;

        if (which == PROJ)
            attend<HEADS>(a, layer, positions, slots, first_item, turns, turned, memory + a.attention_memory, my_head,
                          now);

        // The biases of the block's part: asked for early, put down before the product's first barrier.
        const T* const bias = which == HEAD ? nullptr : static_cast<const T*>(layer.bias[which]);
        const bool my_bias = bias && thread < 2 * halves * owned;
        T bias_here{};
        if (my_bias) {
            const int r = thread / owned;
            bias_here = bias[2 * (r / 2 * p.units + mine.first + thread - r * owned) + r % 2];
        }

        const int norm_stage = ring.stage;
        const float* const norm_weight = reinterpret_cast<const float*>(ring.here());
        if (has_norm) ring.wait(), ring.advance();
        const Slice slice = slice_of<T>(p.K, warp);
        Multiplication<NB, T> product(p, slice, 2 * halves * owned);
        product.next(ring, slice, min(a.group, p.chunk));
        if (step == 0) {
            embed();
        } else {
            const int from = which == QKV || which == HEAD ? FCPROJ : which - 1;
            const uint64_t* const words = which == PROJ ? a.att : a.words[from];
            const int at = slice.first * (W / Q);
            uint2* const to = reinterpret_cast<uint2*>(has_norm ? stream : rows) + at;
            const uint32_t exchange = which == QKV || which == HEAD ? now - 1 : now;
            const int row = p.K / Q, count = slice.count * (W / Q);
            constexpr int BATCH = NB == 1 ? 3 : NB == 2 ? 4 : 8;
            if (NB == 1 && count <= WARP)
                receive<1>(to, words + 2 * at, exchange, 1, row, count);
            else
                receive<BATCH>(to, words + 2 * at, exchange, a.N, row, count);
        }
        if (has_norm) {
            if (owned > 0) norm(norm_weight, which == HEAD ? a.normf_bias : layer.norm_bias[which == FC]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + norm_stage);
        }
        // Long before they are needed, and when nothing else is waited for.
        if (which == FC && l + 1 < a.num_layers) prefetch(layers[l + 1]);
        if (my_bias) biases[which & 1][thread] = bias_here;
        __syncwarp();

        // Sums of the stages [first, end) of the block's part: a thread for a unit and a text.
        const auto finish = [&](int first, int end) {
            const int n = thread % NB, unit = (first << p.log_per_stage) + thread / NB;
            if (n >= a.N || unit >= min(end << p.log_per_stage, owned)) return;
            const int stage = unit >> p.log_per_stage, begin = stage << p.log_per_stage;
            const int row = (stage - first) * p.stage_rows + 2 * (unit - begin);
            const int to_up = 2 * min(1 << p.log_per_stage, owned - begin);
            float y[4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (half >= halves) break;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float2 x = *reinterpret_cast<const float2*>(&partial[turn][w][n][row + half * to_up]);
                    y[2 * half] += x.x, y[2 * half + 1] += x.y;
                }
                if (bias) {
                    y[2 * half] += as_float(biases[which & 1][2 * half * owned + unit]);
                    y[2 * half + 1] += as_float(biases[which & 1][(2 * half + 1) * owned + unit]);
                }
            }
            const int at = mine.first + unit;  // in the output
            if (which == HEAD) {
                store_floats<2>(a.logits + n * a.logits_stride + 2 * at, Floats<2>{{y[0], y[1]}});
                return;
            }
            if (which == FC) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (a.activation == Activation::SwiGLU)
                        y[r] = swiglu(y[r], y[2 + r]);
                    else
                        y[r] = activate(a.activation, y[r]);
                }
            }
            if (which == PROJ || which == FCPROJ) {
                const T* const x = stream + n * a.C + 2 * at;
                y[0] += as_float(x[0]), y[1] += as_float(x[1]);
            }
            uint64_t* const to = a.words[which] + int64_t(n) * (2 * p.units / PER_WORD<T>);
            send<T>(to, at, y[0], y[1], now);
        };
        if (owned == 0) sync_computing_warps();  // nobody is more than a product ahead
        int first = 0, done = 0;
        while (product.taken > 0) {
            float(*const to)[CHUNK_ROWS] =
                reinterpret_cast<float(*)[CHUNK_ROWS]>(&partial[turn][warp][0][(done - first) * p.stage_rows]);
            const T* const x = rows + slice.first * W;
            if (product.taken == 1)
                product.template multiply<1>(ring, x, a.N, to);
            else
                product.template multiply<GROUP>(ring, x, a.N, to);
            done += product.taken;
            if (done - first == p.chunk || product.left <= 0) {
                sync_computing_warps();
                finish(first, done);
                turn ^= 1, first = done;
            }
            product.next(ring, slice, min(a.group, p.chunk - (done - first)));
        }
    }
    // Every block has read the number by now: it has taken part in an exchange since.
    if (blockIdx.x == 0 && thread == 0) *a.exchanges = number + uint32_t(a.num_layers);
#endif
}

// --- at launch

int64_t aligned(int64_t bytes) {
    return (bytes + 127) / 128 * 128;
}

// Where everything lies, in shared memory and in scratch.
struct Layout {
    bool possible = false;
    int64_t blocks = 0;
    Product products[PRODUCTS];
    int64_t stages = 0, stage_bytes = 0, rows_bytes = 0, x_bytes = 0, attention_bytes = 0, layers_bytes = 0;
    int64_t shared_bytes() const {
        return stages * stage_bytes + rows_bytes + x_bytes + attention_bytes + layers_bytes;
    }
};

int heads_at_once(const DecodeModel& m) {
    return m.NH == m.NKV ? 1 : WIDE_HEADS;
}

// Texts that the kernel for N of them has room for.
int64_t texts_at_once(int64_t N) {
    int64_t texts = 1;
    while (texts < N) texts *= 2;
    return texts;
}

int64_t step_pieces(int64_t length) {
    return ceil_div(length, PIECE);
}

Layout layout_of(const DecodeModel& m, int64_t N) {
    Layout z;
    const int64_t item = dtype_size(m.dtype), W = 16 / item, Q = m.NH * m.HS, qkv = (m.NH + 2 * m.NKV) * m.HS;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9 || !device_attribute(cudaDevAttrCooperativeLaunch))
        return z;
    if (m.C % W || m.HS % W || m.FFN % W || m.Vp % 2 || m.C < 2 * W || m.HS > MAX_HS || m.FFN == 0 || N < 1) return z;
    z.blocks = std::min(num_sms(), m.C / 2);
    const bool swiglu = m.activation == Activation::SwiGLU;
    struct Size {
        int64_t outputs, K;
    };
    const Size sizes[PRODUCTS] = {{qkv, m.C}, {m.C, Q}, {m.FFN, m.C}, {m.C, m.FFN}, {m.Vp, m.C}};
    const auto unit_rows = [&](int which) { return which == FC && swiglu ? 4 : 2; };
    z.stage_bytes = std::max(STAGE_BYTES, 2 * m.C * int64_t(sizeof(float)));
    for (int i = 0; i < PRODUCTS; i++) z.stage_bytes = std::max(z.stage_bytes, unit_rows(i) * sizes[i].K * item);
    z.stage_bytes = aligned(z.stage_bytes);
    for (int i = 0; i < PRODUCTS; i++) {
        Product& p = z.products[i];
        p.K = int(sizes[i].K), p.units = int(sizes[i].outputs / 2);
        const int64_t most = ceil_div(p.units, std::max<int64_t>(z.blocks, 1));  // of a block
        if (i != HEAD && most * unit_rows(i) > THREADS) return z;                // biases: a thread each
        const auto fits = [&](int64_t units) {
            return units * unit_rows(i) <= STAGE_ROWS && units * unit_rows(i) * p.K * item <= z.stage_bytes;
        };
        p.log_per_stage = 0;
        while (fits(int64_t(2) << p.log_per_stage) && int64_t(1) << p.log_per_stage < most) p.log_per_stage++;
        p.stage_rows = unit_rows(i) << p.log_per_stage;
        p.chunk = CHUNK_ROWS / p.stage_rows;
    }
    z.rows_bytes = aligned(N * std::max({m.C, Q, m.FFN}) * item);
    z.x_bytes = aligned(N * m.C * item);
    z.attention_bytes = aligned(attention_bytes(heads_at_once(m), m.HS, item));
    z.layers_bytes = aligned(m.layers * int64_t(sizeof(Layer)));
    const int64_t room = max_shared_bytes() - RESERVED_BYTES - texts_at_once(N) * TEXT_BYTES - z.shared_bytes();
    z.stages = std::min<int64_t>(room / z.stage_bytes, MAX_STAGES);
    z.possible = z.blocks > 0 && z.stages >= MIN_STAGES;
    return z;
}

// Scratch, in bytes from its start: the number of exchanges, the layers, then the words.
struct Words {
    static constexpr int64_t EXCHANGES = 0, LAYERS = 128;
    int64_t products[LAYER_PRODUCTS], att, partials, end;
    explicit Words(const DecodeModel& m) {
        const int64_t per_word = 4 / dtype_size(m.dtype), N = std::min(m.slots, LINEAR_SMALL_N);
        int64_t at = LAYERS + aligned(m.layers * int64_t(sizeof(Layer)));
        const auto take = [&](int64_t words) {
            const int64_t begin = at;
            at += aligned(words * int64_t(sizeof(uint64_t)));
            return begin;
        };
        const int64_t Q = m.NH * m.HS, channels[LAYER_PRODUCTS] = {Q + 2 * m.NKV * m.HS, m.C, m.FFN, m.C};
        for (int i = 0; i < LAYER_PRODUCTS; i++) products[i] = take(N * channels[i] / per_word);
        att = take(N * Q / per_word);
        partials = take(N * m.NH * step_pieces(m.capacity) * (m.HS + 2));
        end = at;
    }
};

template <typename T>
void launch(const char* op, const Step<T>& a, const Layout& z, Stream stream) {
    const auto run = [&](auto kernel) {
        const int64_t bytes = z.shared_bytes();
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
        cudaLaunchAttribute together = {};
        together.id = cudaLaunchAttributeCooperative;  // all blocks run at once, or none
        together.val.cooperative = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid_of(z.blocks);
        config.blockDim = dim3(THREADS + WARP);
        config.dynamicSmemBytes = size_t(bytes);
        config.stream = cuda_stream(stream);
        config.attrs = &together;
        config.numAttrs = 1;
        cuda_check(cudaLaunchKernelEx(&config, kernel, a), op);
        check_launch(op, stream);
    };
    const auto with_heads = [&](auto rows) {
        constexpr int NB = decltype(rows)::value;
        if (a.NH == a.NKV)
            run(decode_step_kernel<T, NB, 1>);
        else
            run(decode_step_kernel<T, NB, WIDE_HEADS>);
    };
    if (a.N == 1) return with_heads(std::integral_constant<int, 1>{});
    if (a.N == 2) return with_heads(std::integral_constant<int, 2>{});
    if (a.N <= 4) return with_heads(std::integral_constant<int, 4>{});
    with_heads(std::integral_constant<int, int(LINEAR_SMALL_N)>{});
}

void check_weight(const char* op, const char* name, const Tensor& t, DType dtype, int64_t rows, int64_t columns) {
    check_tensor(op, name, t, dtype, {rows, columns});
    check_contiguous(op, name, t);
    require(rows_aligned({t}), op, ": ", name, " is not aligned to 16 bytes");
}

}  // namespace

int64_t decode_step_max_batch(const DecodeModel& model) {
    int64_t N = std::min(model.slots, LINEAR_SMALL_N);
    while (N > 0 && !layout_of(model, N).possible) N--;
    return N;
}

int64_t decode_step_scratch(const DecodeModel& model) {
    return decode_step_max_batch(model) > 0 ? Words(model).end : 0;
}

void decode_step_prepare(Tensor scratch, const DecodeModel& m, const InferenceWeights& weights,
                         const std::vector<Tensor>& k, const std::vector<Tensor>& v, Stream stream) {
    const char* op = "decode_step_prepare";
    const int64_t Q = m.NH * m.HS;
    const bool swiglu = m.activation == Activation::SwiGLU;
    require(int64_t(weights.blocks.size()) == m.layers && int64_t(k.size()) == m.layers && v.size() == k.size(), op,
            ": ", weights.blocks.size(), " blocks and a cache for ", k.size(), " layers, expected ", m.layers);
    require(decode_step_max_batch(m) > 0, op,
            ": such a model can't be run in one launch; decode_step_max_batch() tells which can");
    check_scratch(op, scratch, decode_step_scratch(m));
    const auto norm = [&](const NormWeights& n) {
        check_tensor(op, "norm.weight", n.weight, DType::F32, {m.C});
        check_tensor(op, "norm.bias", n.bias, DType::F32, {m.C}, Given::Optional);
        require(rows_aligned({n.weight, n.bias}), op, ": a norm's weights are not aligned to 16 bytes");
    };
    const auto linear = [&](const LinearWeights& w, const char* name, int64_t rows, int64_t columns) {
        check_weight(op, name, w.weight, m.dtype, rows, columns);
        check_tensor(op, name, w.bias, m.dtype, {rows}, Given::Optional);
    };
    check_weight(op, "wte", weights.wte, m.dtype, weights.wte.shape[0], m.C);
    if (weights.wpe) check_weight(op, "wpe", weights.wpe, m.dtype, weights.wpe.shape[0], m.C);
    check_weight(op, "head", weights.head, m.dtype, m.Vp, m.C);
    norm(weights.normf);
    std::vector<Layer> layers;
    for (size_t l = 0; l < weights.blocks.size(); l++) {
        const BlockWeights& b = weights.blocks[l];
        norm(b.norm1), norm(b.norm2);
        linear(b.qkv, "qkv", Q + 2 * m.NKV * m.HS, m.C);
        linear(b.proj, "proj", m.C, Q);
        linear(b.fc, "fc", swiglu ? 2 * m.FFN : m.FFN, m.C);
        linear(b.fcproj, "fcproj", m.C, m.FFN);
        for (const Tensor& cache : {k[l], v[l]}) {
            check_tensor(op, "cache", cache, m.dtype, {m.slots, m.capacity, m.NKV, m.HS});
            check_contiguous(op, "cache", cache);
            require(rows_aligned({cache}), op, ": a cache is not aligned to 16 bytes");
        }
        Layer layer{};
        const LinearWeights* const matrices[LAYER_PRODUCTS] = {&b.qkv, &b.proj, &b.fc, &b.fcproj};
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            layer.weight[i] = matrices[i]->weight.data, layer.bias[i] = matrices[i]->bias.data;
        const NormWeights* const norms[2] = {&b.norm1, &b.norm2};
        for (int i = 0; i < 2; i++)
            layer.norm_weight[i] = norms[i]->weight.as<float>(), layer.norm_bias[i] = norms[i]->bias.as<float>();
        layer.k = k[l].data, layer.v = v[l].data;
        layers.push_back(layer);
    }
    device_fill(scratch.data, 0, size_t(scratch.bytes()), stream);
    copy_to_device(static_cast<char*>(scratch.data) + Words::LAYERS, layers.data(), layers.size() * sizeof(Layer),
                   stream);
    synchronize(stream);
}

void decode_step(Tensor logits, Tensor ids, const DecodeBatch& place, const DecodeModel& m,
                 const InferenceWeights& weights, Tensor scratch, Stream stream) {
    const char* op = "decode_step";
    const int64_t N = logits.shape[0];
    check_matrix(op, "logits", logits, N, m.Vp, Given::Required, m.dtype);
    check_tensor(op, "ids", ids, DType::I32, {N});
    check_tensor(op, "slots", place.slots, DType::I32, {N});
    check_tensor(op, "positions", place.positions, DType::I32, {N});
    const int64_t pairs = check_angles(op, place.angles, place.table, N, m.HS);
    check_scratch(op, scratch, decode_step_scratch(m));
    require(m.scale > 0, op, ": scale is ", m.scale, "; it must be positive");
    require(rows_aligned({logits}), op, ": rows of logits are not aligned to 16 bytes");
    if (N == 0 || place.max_length == 0) return;
    const Layout z = layout_of(m, N);
    require(N <= m.slots && z.possible, op, ": ", N,
            " texts of this model don't fit in a launch; decode_step_max_batch() tells how many do");
    dispatch_dtype(op, m.dtype, [&](auto zero) {
        using T = decltype(zero);
        Step<T> a{};
        a.logits = logits.as<T>(), a.logits_stride = row_stride(logits);
        a.ids = ids.as<int32_t>(), a.slots = place.slots.as<int32_t>(), a.positions = place.positions.as<int32_t>();
        if (place.table)
            a.angles = {place.angles.as<int32_t>(), place.table.as<float>(), place.table.shape[0], int(pairs)};
        a.wte = weights.wte.as<T>(), a.wpe = weights.wpe ? weights.wpe.as<T>() : nullptr, a.head = weights.head.as<T>();
        a.vocab = weights.wte.shape[0], a.places = weights.wpe ? weights.wpe.shape[0] : 0;
        a.normf_weight = weights.normf.weight.as<float>(), a.normf_bias = weights.normf.bias.as<float>();
        char* const base = static_cast<char*>(scratch.data);
        const Words w(m);
        const auto words = [&](int64_t at) { return reinterpret_cast<uint64_t*>(base + at); };
        a.exchanges = reinterpret_cast<uint32_t*>(base + Words::EXCHANGES);
        a.layers = reinterpret_cast<const Layer*>(base + Words::LAYERS);
        for (int i = 0; i < LAYER_PRODUCTS; i++) a.words[i] = words(w.products[i]);
        a.att = words(w.att), a.partials = words(w.partials);
        std::copy_n(z.products, PRODUCTS, a.products);
        a.num_slots = m.slots, a.capacity = m.capacity;
        a.num_layers = int(m.layers), a.N = int(N), a.C = int(m.C);
        a.NH = int(m.NH), a.NKV = int(m.NKV), a.HS = int(m.HS);
        a.passes = int(ceil_div(m.NH / m.NKV, heads_at_once(m))),
        a.pieces = int(step_pieces(std::min(place.max_length, m.capacity)));
        while (int64_t(FULL_WIDTH<T>) << a.log_lanes < m.HS) a.log_lanes++;
        a.eps = m.eps, a.scale = m.scale, a.centred = m.centred, a.activation = m.activation;
        a.stages = int(z.stages), a.stage_bytes = int(z.stage_bytes),
        a.group = int(std::min<int64_t>(GROUP, z.stages - 1));
        int64_t at = 0;
        const auto take = [&](int64_t bytes) {
            const int64_t begin = at;
            at += bytes;
            return int(begin);
        };
        a.stage_memory = take(z.stages * z.stage_bytes), a.rows_memory = take(z.rows_bytes);
        a.x_memory = take(z.x_bytes), a.attention_memory = take(z.attention_bytes),
        a.layers_memory = take(z.layers_bytes);
        launch(op, a, z, stream);
    });
}
