// One block on each multiprocessor, from the first layer to the head.
//
// A warp of its own streams the block's part of all weights, in the order of their use, through a ring of stages in
// shared memory (cp.async.bulk). It never looks at an activation, so that the ring is full again by the time one has
// come: where the arithmetic waits for other blocks, memory does not.
//
// Eight warps multiply. A unit is two rows of the output, that is two rows of weight, with SwiGLU two of gate and the
// same two of up; block b owns the units [b·units/blocks, (b + 1)·units/blocks) of every product. Where a block has few
// units, `parts` warps share one by parts of K.
//
// Exchanges: what a block has computed goes to global memory in words of 64 bits, a pair of 16-bit numbers or an fp32
// one in the low half, the number of the exchange in the high half. Whoever needs it reads until the number is right;
// one load gives both halves, so that no fence is needed. Every block reads all of x (after both halves of a layer),
// att and act; a word is written again one layer later by a block that has read the results of a whole exchange in
// between, to which every block came after its reading. That is why there may be no more blocks than channels / 2: each
// must have a part in the products that give x and x2.
#include "kernels/decode_step.h"

#include "kernels/activation.cuh"
#include "kernels/decode_attention_check.h"
#include "kernels/decode_piece.cuh"
#include "kernels/hopper.cuh"
#include "kernels/kv_rotate.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;  // that compute; one more warp streams
constexpr int64_t MAX_HS = 128;                   // a thread for each channel
constexpr int MIN_STAGES = 3, MAX_STAGES = 24;
constexpr int64_t STAGE_BYTES = 12 << 10;    // at least
constexpr int64_t RESERVED_BYTES = 4 << 10;  // of shared memory, for the kernel's static arrays
constexpr int WIDE_HEADS = 4;

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
    int parts, log_parts;  // a power of two
    int per_stage;         // units
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
    int num_layers, N, C, NH, NKV, HS, passes, pieces, lanes;
    float eps, scale;
    bool centred;
    Activation activation;
    int stages, stage_bytes;
    int stage_memory, rows_memory, x_memory, heads_memory, layers_memory;  // where they begin, in bytes
};

// Elements of T in a word of an exchange.
template <typename T>
constexpr int PER_WORD = 4 / int(sizeof(T));

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

// Pairs of words i = first, first + step, … below n, once their numbers are right; the payloads go to to[i] in shared
// memory. A few loads are under way at a time, and again all of them where one came too early. A block that never
// answers would hold the GPU for ever: after seconds the kernel gives up.
//
// A function of its own, like all that several places need: what is executed once and left again costs more cycles to
// be fetched than to be computed.
__device__ __noinline__ void receive(uint2* to, const uint64_t* words, uint32_t number, int first, int step, int n) {
    constexpr int BATCH = 2;
#pragma unroll 1
    for (int base = first; base < n; base += BATCH * step) {
        ulonglong2 w[BATCH];
        bool early = true;
        for (unsigned tries = 0; early; tries++) {
            if (tries > 1u << 23) __trap();
#pragma unroll
            for (int b = 0; b < BATCH; b++) w[b] = load_two(words + 2 * min(base + b * step, n - 1));
            early = false;
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                early |= uint32_t(w[b].x >> 32) != number || uint32_t(w[b].y >> 32) != number;
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (base + b * step < n) to[base + b * step] = make_uint2(uint32_t(w[b].x), uint32_t(w[b].y));
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
    Barrier *full, *empty;
    char* memory;
    int stages, stage_bytes;
    int stage = 0, parity = 0;

    __device__ __forceinline__ char* here() const { return memory + stage * stage_bytes; }
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait() const { barrier_wait(full + stage, parity); }
    // A warp is done with the stage.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(empty + stage);
        advance();
    }
    // One thread: makes room for `bytes`.
    __device__ __forceinline__ char* claim(int bytes) const {
        barrier_wait(empty + stage, parity ^ 1);
        barrier_arrive_expecting(full + stage, bytes);
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

template <typename T>
__device__ void stream_weights(const Step<T>& a, const Layer* layers, const Units* units, Ring ring) {
    const auto norm = [&](const float* weight, const float* bias) {
        const int bytes = a.C * int(sizeof(float));
        char* const to = ring.claim(bias ? 2 * bytes : bytes);
        copy_bytes(to, weight, bytes, ring.full + ring.stage);
        if (bias) copy_bytes(to + bytes, bias, bytes, ring.full + ring.stage);
        ring.advance();
    };
    const auto product = [&](int which, const void* matrix, bool swiglu) {
        const Product& p = a.products[which];
        const T* const weight = static_cast<const T*>(matrix);
        const int end = units[which].end;
#pragma unroll 1
        for (int unit = units[which].first; unit < end; unit += p.per_stage) {
            const int64_t K = p.K;
            const int bytes = min(p.per_stage, end - unit) * 2 * p.K * int(sizeof(T));
            char* const to = ring.claim(swiglu ? 2 * bytes : bytes);
            copy_bytes(to, weight + unit * 2 * K, bytes, ring.full + ring.stage);
            if (swiglu)
                copy_bytes(to + p.per_stage * 2 * p.K * int(sizeof(T)), weight + (int64_t(p.units) + unit) * 2 * K,
                           bytes, ring.full + ring.stage);
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

// The block's units of a product of x [N, K] in shared memory, and bias [2·halves, units of the block] likewise.
// finish(unit, n, y): a lane for each text n; y: the unit's sums with their biases, with SwiGLU those of gate, then
// those of up.
template <int NB, typename T, typename Finish>
__device__ __forceinline__ void multiply(const Step<T>& a, const Product& p, int halves, Ring& ring, const T* x,
                                         Units mine, bool biased, const T* bias, float (&partial)[WARPS][4][NB],
                                         Finish finish) {
    constexpr int W = FULL_WIDTH<T>;
    const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
    const int groups = WARPS >> p.log_parts, group = warp >> p.log_parts, part = warp & (p.parts - 1);
    const int first = mine.first, end = mine.end;
    const auto close = [&](int unit) {
        if (part != 0 || lane >= a.N) return;
        float y[4] = {};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (r >= 2 * halves) break;
#pragma unroll 1
            for (int q = 0; q < p.parts; q++) y[r] += partial[warp + q][r][lane];
            if (biased) y[r] += as_float(bias[r * (end - first) + unit - first]);
        }
        finish(unit, lane, y);
    };
#pragma unroll 1
    for (int base = first; base < end; base += p.per_stage) {
        ring.wait();
        const T* const weight = reinterpret_cast<const T*>(ring.here());
        const int last = min(base + p.per_stage, end);
#pragma unroll 1
        for (int unit = base + ((group - (base - first)) & (groups - 1)); unit < last; unit += groups) {
#pragma unroll 1
            for (int half = 0; half < halves; half++) {
                const T* const row0 = weight + (unit - base + half * p.per_stage) * 2 * p.K;
                const T* const row1 = row0 + p.K;
                float sum0[NB] = {}, sum1[NB] = {};
#pragma unroll 1
                for (int c = (part * WARP + lane) * W; c < p.K; c += p.parts * WARP * W) {
                    const Floats<W> v0 = load_floats<W>(row0 + c), v1 = load_floats<W>(row1 + c);
#pragma unroll
                    for (int n = 0; n < NB; n++) {
                        const Floats<W> in = load_floats<W>(x + min(n, a.N - 1) * p.K + c);
#pragma unroll
                        for (int k = 0; k < W; k++) {
                            sum0[n] = fmaf(in[k], v0[k], sum0[n]);
                            sum1[n] = fmaf(in[k], v1[k], sum1[n]);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const float y0 = warp_sum(sum0[n]), y1 = warp_sum(sum1[n]);
                    if (lane == 0) partial[warp][2 * half][n] = y0, partial[warp][2 * half + 1][n] = y1;
                }
            }
            if (p.parts > 1) continue;
            __syncwarp();
            close(unit);
            __syncwarp();
        }
        ring.release();
    }
    if (p.parts > 1) {  // then each warp has one unit at most
        sync_computing_warps();
        if (first + group < end) close(first + group);
    }
}

// --- attention

// Which part of a step's attention a block works on: texts, KV heads, passes over the query heads that read one, pieces
// of the context, the last fastest.
struct Item {
    int n, kv, head0, heads, piece;
    int used, keys;  // pieces of this text's context; keys of this piece. 0 pieces: finished
    int64_t begin, slot;
};

template <int HEADS, typename T>
__device__ __forceinline__ Item item_of(const Step<T>& a, const int64_t* positions, const int64_t* slots, int i) {
    Item t{};
    t.piece = i % a.pieces, i /= a.pieces;
    const int pass = i % a.passes, group = a.NH / a.NKV;
    i /= a.passes;
    t.kv = i % a.NKV, t.n = i / a.NKV;
    t.head0 = t.kv * group + pass * HEADS, t.heads = min(HEADS, group - pass * HEADS);
    const int64_t length = positions[t.n] + 1;
    t.slot = slots[t.n];
    t.begin = int64_t(t.piece) * DECODE_PIECE;
    if (length <= 0 || length > a.capacity || t.slot < 0 || t.slot >= a.num_slots) return t;
    t.used = int(ceil_div(length, DECODE_PIECE));
    if (t.used > a.pieces) t.used = 0;
    t.keys = int(min(int64_t(DECODE_PIECE), length - t.begin));
    return t;
}

// One layer's attention, from qkv to att. memory: for queries, scores, sums and turns; heads: [HEADS + 2, HS].
template <int HEADS, typename T>
__device__ __forceinline__ void attend(const Step<T>& a, const Layer& layer, const int64_t* positions,
                                       const int64_t* slots, const Item& first_item, float* memory, T* heads,
                                       uint32_t number) {
    constexpr int QUAD = 2 * PER_WORD<T>;
    const int thread = int(threadIdx.x), HS = a.HS;
    __shared__ float maxima[HEADS], totals[HEADS];
    const Piece<WARPS, HEADS> work{memory, memory + HEADS * HS, memory + HEADS * (HS + DECODE_PIECE), maxima, totals,
                                   HS};
    float* const turns = memory + HEADS * (HS + DECODE_PIECE) + WARPS * HEADS * HS;
    const int items = a.N * a.NKV * a.passes * a.pieces;
    const int64_t row = int64_t(a.NKV) * HS, qkv_channels = int64_t(a.NH + 2 * a.NKV) * HS;

#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece >= max(t.used, 1)) continue;
        const float* const turn = a.angles.of(t.n);
        sync_computing_warps();  // memory is free
        if (turn)
#pragma unroll 1
            for (int c = thread; c < 2 * a.angles.pairs; c += THREADS) turns[c] = turn[c];
        const uint64_t* const words = a.words[QKV] + t.n * qkv_channels / PER_WORD<T>;
        // By other warps each, so that they wait at the same time.
        const auto fetch = [&](int first_warp, int to, int64_t channel, int count) {
            receive(reinterpret_cast<uint2*>(heads + to), words + channel / PER_WORD<T>, number,
                    (thread + THREADS - first_warp * WARP) % THREADS, THREADS, count / QUAD);
        };
        fetch(0, 0, int64_t(t.head0) * HS, t.heads * HS);
        fetch(WARPS / 2, HEADS * HS, int64_t(a.NH + t.kv) * HS, HS);
        fetch(3 * WARPS / 4, (HEADS + 1) * HS, int64_t(a.NH + a.NKV + t.kv) * HS, HS);
        sync_computing_warps();
        uint64_t* const att = a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>;
        if (t.used == 0) {
#pragma unroll 1
            for (int c = thread; c < t.heads * HS / 2; c += THREADS) send<T>(att, t.head0 * HS / 2 + c, 0, 0, number);
            continue;
        }
        const int64_t start = (t.slot * a.capacity + t.begin) * row + int64_t(t.kv) * HS;
        T *const k_cache = static_cast<T*>(layer.k), *const v_cache = static_cast<T*>(layer.v);
        if (t.piece == t.used - 1) {
            // Every pass of a KV head writes the same, each for itself to read.
            const int64_t to = start + (t.keys - 1) * row;
#pragma unroll 1
            for (int c = thread; c < HS; c += THREADS) {
                k_cache[to + c] = from_float<T>(rotated(heads + HEADS * HS, c, turn ? turns : nullptr, a.angles.pairs));
                v_cache[to + c] = heads[(HEADS + 1) * HS + c];
            }
        }
#pragma unroll 1
        for (int c = thread; c < HEADS * HS; c += THREADS) {
            const int h = c / HS;
            work.queries[c] =
                h < t.heads ? a.scale * rotated(heads + h * HS, c - h * HS, turn ? turns : nullptr, a.angles.pairs)
                            : 0.0f;
        }
        sync_computing_warps();
        attend_piece<FULL_WIDTH<T>, 1, 2>(work, k_cache + start, v_cache + start, row, t.keys, t.heads, HS, a.lanes,
                                          sync_computing_warps);
#pragma unroll 1
        for (int c = 2 * thread; c < t.heads * HS; c += 2 * THREADS) {
            const int h = c / HS, channel = c - h * HS;
            const float s0 = work.sum(h, channel), s1 = work.sum(h, channel + 1);
            if (t.used == 1) {
                send<T>(att, (t.head0 * HS + c) / 2, s0 / totals[h], s1 / totals[h], number);
                continue;
            }
            uint64_t* const to = a.partials + ((int64_t(t.n) * a.NH + t.head0 + h) * a.pieces + t.piece) * (HS + 2);
            send<float>(to, 1 + channel / 2, s0, s1, number);
            if (channel == 0) send<float>(to, 0, maxima[h], totals[h], number);
        }
    }

    // The block with a context's first piece combines all of them, in order, as many at a time as there is room for.
#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece > 0 || t.used <= 1) continue;
        const int floats = HS + 2, room = WARPS * HS / floats;
#pragma unroll 1
        for (int h = 0; h < t.heads; h++) {
            const uint64_t* const from = a.partials + (int64_t(t.n) * a.NH + t.head0 + h) * a.pieces * floats;
            float max = -INFINITY, total = 0, sum = 0;
#pragma unroll 1
            for (int first = 0; first < t.used; first += room) {
                const int count = min(room, t.used - first);
                sync_computing_warps();
                receive(reinterpret_cast<uint2*>(work.sums), from + int64_t(first) * floats, number, thread, THREADS,
                        count * floats / 2);
                sync_computing_warps();
                if (thread >= HS) continue;
#pragma unroll 1
                for (int p = 0; p < count; p++) {
                    const float* const x = work.sums + p * floats;
                    const float larger = fmaxf(max, x[0]), old = expf(max - larger), weight = expf(x[0] - larger);
                    total = total * old + x[1] * weight;
                    sum = sum * old + x[2 + thread] * weight;
                    max = larger;
                }
            }
            const float y = sum / total, next = __shfl_down_sync(ALL_LANES, y, 1);
            if (thread < HS && thread % 2 == 0)
                send<T>(a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>, ((t.head0 + h) * HS + thread) / 2, y, next,
                        number);
        }
    }
}

#endif

template <typename T, int NB, int HEADS>
__global__ void __launch_bounds__(THREADS + WARP, 1) decode_step_kernel(const __grid_constant__ Step<T> a) {
#if __CUDA_ARCH__ >= 900
    constexpr int QUAD = 2 * PER_WORD<T>;
    extern __shared__ __align__(128) char memory[];
    __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES];
    __shared__ float partial[WARPS][4][NB];
    __shared__ int64_t positions[NB], slots[NB];
    __shared__ float norm_sums[NB][WARPS];
    __shared__ T biases[THREADS];
    __shared__ Units units[PRODUCTS];
    __shared__ uint32_t shared_number;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    Layer* const layers = reinterpret_cast<Layer*>(memory + a.layers_memory);
    T* const rows = reinterpret_cast<T*>(memory + a.rows_memory);    // [N, K] what a product multiplies
    T* const stream = reinterpret_cast<T*>(memory + a.x_memory);     // [N, C] the residual stream
    T* const heads = reinterpret_cast<T*>(memory + a.heads_memory);  // [HEADS + 2, HS]
#pragma unroll 1
    for (int s = thread; s < a.stages; s += THREADS + WARP) barrier_init(full + s, 1), barrier_init(empty + s, WARPS);
    if (thread == 0) barrier_init_fence();
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
    __shared__ Item first_item;  // of the block; nothing where there are fewer items than blocks
    if (thread == 0) {
        first_item = {};
        if (int(blockIdx.x) < a.N * a.NKV * a.passes * a.pieces)
            first_item = item_of<HEADS>(a, positions, slots, int(blockIdx.x));
    }
    sync_computing_warps();

    // The biases of the block's part of a product: asked for early, put down before the last barrier of a stage.
    T bias_here{};
    const auto put_bias = [&](int count) {
        if (thread < count) biases[thread] = bias_here;
    };

    // The residual stream comes and goes through a norm to `rows`: NB teams of warps, a row each. from: the exchange's
    // words; null: the embedding. A row's sums are those of all eight warps, added up in order: a team of fewer does
    // the work of all, so that the bits don't depend on how many rows there are.
    const auto stage_normed = [&](const uint64_t* from, uint32_t exchange, bool has_bias, int count) {
        constexpr int TEAM = WARPS / NB;
        const int quads = a.C / QUAD, n = warp / TEAM, in_team = thread % (TEAM * WARP);
        T *const x = stream + n * a.C, *const out = rows + n * a.C;
        const int end = n < a.N ? quads : 0;
        if (from) {
            if (n < a.N)
                receive(reinterpret_cast<uint2*>(x), from + int64_t(n) * a.C / PER_WORD<T>, exchange, in_team,
                        TEAM * WARP, quads);
        } else if (n < a.N) {
            const int64_t id = a.ids[n], place = positions[n];
#pragma unroll 1
            for (int q = in_team; q < quads; q += TEAM * WARP) {
                Floats<QUAD> v = {};
                if (id >= 0 && id < a.vocab) v = load_floats<QUAD>(a.wte + id * a.C + q * QUAD);
                if (a.wpe && place >= 0 && place < a.places) {
                    const Floats<QUAD> p = load_floats<QUAD>(a.wpe + place * a.C + q * QUAD);
#pragma unroll
                    for (int k = 0; k < QUAD; k++) v[k] += p[k];
                }
                *reinterpret_cast<Pack<T, QUAD>*>(x + q * QUAD) = as_pack<T>(v);
            }
        }
        // The quads that this thread has received, for each of the NB warps that it stands for.
        const auto each = [&](auto f) {
#pragma unroll 1
            for (int base = 0; base < end; base += THREADS) {
#pragma unroll
                for (int i = 0; i < NB; i++) {
                    const int q = base + i * TEAM * WARP + in_team;
                    if (q < end) f(q, i);
                }
            }
        };
        const auto total = [&](const float(&sums)[NB]) {
#pragma unroll
            for (int i = 0; i < NB; i++) {
                const float sum = warp_sum(sums[i]);
                if (lane == 0) norm_sums[n][i * TEAM + warp % TEAM] = sum;
            }
            sync_computing_warps();
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += norm_sums[n][w];
            sync_computing_warps();
            return sum;
        };
        float mean = 0;
        if (a.centred) {
            float sums[NB] = {};
            each([&](int q, int i) {
                const Floats<QUAD> v = load_floats<QUAD>(x + q * QUAD);
#pragma unroll
                for (int k = 0; k < QUAD; k++) sums[i] += v[k];
            });
            mean = total(sums) / float(a.C);
        }
        float squares[NB] = {};
        each([&](int q, int i) {
            const Floats<QUAD> v = load_floats<QUAD>(x + q * QUAD);
#pragma unroll
            for (int k = 0; k < QUAD; k++) squares[i] = fmaf(v[k] - mean, v[k] - mean, squares[i]);
        });
        const float rstd = 1 / sqrtf(total(squares) / float(a.C) + a.eps);
        ring.wait();
        const float* const weight = reinterpret_cast<const float*>(ring.here());
        each([&](int q, int) {
            Floats<QUAD> v = load_floats<QUAD>(x + q * QUAD), shift = {};
            const Floats<QUAD> w = load_floats<QUAD>(weight + q * QUAD);
            if (has_bias) shift = load_floats<QUAD>(weight + a.C + q * QUAD);
#pragma unroll
            for (int k = 0; k < QUAD; k++) v[k] = fmaf((v[k] - mean) * rstd, w[k], shift[k]);
            *reinterpret_cast<Pack<T, QUAD>*>(out + q * QUAD) = as_pack<T>(v);
        });
        ring.release();
        put_bias(count);
        sync_computing_warps();
    };
    const auto stage_plain = [&](const uint64_t* from, uint32_t exchange, int K, int count) {
        sync_computing_warps();  // nobody reads what lay in `rows`
        receive(reinterpret_cast<uint2*>(rows), from, exchange, thread, THREADS, a.N * K / QUAD);
        put_bias(count);
        sync_computing_warps();
    };
    // The keys and values of the block's first item: on their way to the cache of the GPU while qkv is computed.
    const auto prefetch_item = [&](const Layer& layer) {
        const Item& t = first_item;
        if (t.piece >= t.used || thread >= t.keys) return;
        const int64_t at = ((t.slot * a.capacity + t.begin + thread) * a.NKV + t.kv) * a.HS;
#pragma unroll 1
        for (int c = 0; c < a.HS; c += 128 / int(sizeof(T))) {
            for (const void* cache : {layer.k, layer.v})
                asm volatile(
                    "prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(static_cast<const T*>(cache) + at + c)));
        }
    };

    // Products in order. All of them are the same lines of code, which so stay in the cache of instructions.
    const int swiglu_halves = a.activation == Activation::SwiGLU ? 2 : 1;
#pragma unroll 1
    for (int step = 0; step <= LAYER_PRODUCTS * a.num_layers; step++) {
        const int l = step / LAYER_PRODUCTS, which = l < a.num_layers ? step % LAYER_PRODUCTS : int(HEAD);
        const Product& p = a.products[which];
        const Layer& layer = layers[which == HEAD ? 0 : l];
        const uint32_t now = number + uint32_t(l) + 1;
        const int halves = which == FC ? swiglu_halves : 1;
        if (which == QKV) prefetch_item(layer);

        const Units mine = units[which];
        const int owned = mine.end - mine.first, count = which == HEAD ? 0 : 2 * halves * owned;
        const T* const bias = which == HEAD ? nullptr : static_cast<const T*>(layer.bias[which]);
        bias_here = {};
        if (bias && thread < count) {
            const int r = thread / owned;
            bias_here = bias[2 * (r / 2 * p.units + mine.first + thread - r * owned) + r % 2];
        }
        if (which == PROJ)
            attend<HEADS>(a, layer, positions, slots, first_item, reinterpret_cast<float*>(rows), heads, now);
        if (which == PROJ || which == FCPROJ)
            stage_plain(which == PROJ ? a.att : a.words[FC], now, p.K, count);
        else
            stage_normed(which == FC ? a.words[PROJ]
                         : l > 0     ? a.words[FCPROJ]
                                     : nullptr,
                         which == FC ? now : now - 1, which == HEAD ? a.normf_bias : layer.norm_bias[which == FC],
                         count);

        multiply<NB>(a, p, halves, ring, rows, mine, which != HEAD, biases, partial,
                     [&](int unit, int n, float(&y)[4]) {
                         if (which == HEAD) {
                             store_floats<2>(a.logits + n * a.logits_stride + 2 * unit, Floats<2>{{y[0], y[1]}});
                             return;
                         }
                         if (which == FC) {
#pragma unroll
                             for (int r = 0; r < 2; r++) {
                                 if (a.activation == Activation::SwiGLU)
                                     y[r] = swiglu(y[r], y[2 + r]);
                                 else
                                     y[r] = a.activation == Activation::GELU ? gelu(y[r]) : relu2(y[r]);
                             }
                         }
                         if (which == PROJ || which == FCPROJ) {
                             const T* const x = stream + n * a.C + 2 * unit;
                             y[0] += as_float(x[0]), y[1] += as_float(x[1]);
                         }
                         send<T>(a.words[which] + int64_t(n) * (2 * p.units / PER_WORD<T>), unit, y[0], y[1], now);
                     });
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
    int64_t stages = 0, stage_bytes = 0, rows_bytes = 0, x_bytes = 0, heads_bytes = 0, layers_bytes = 0;
    int64_t shared_bytes() const { return stages * stage_bytes + rows_bytes + x_bytes + heads_bytes + layers_bytes; }
};

int heads_at_once(const DecodeModel& m) {
    return m.NH == m.NKV ? 1 : WIDE_HEADS;
}

Layout layout_of(const DecodeModel& m, int64_t N) {
    Layout z;
    const int64_t item = dtype_size(m.dtype), W = 16 / item, Q = m.NH * m.HS, qkv = (m.NH + 2 * m.NKV) * m.HS;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9 || !device_attribute(cudaDevAttrCooperativeLaunch))
        return z;
    if (m.C % W || m.HS % W || m.FFN % W || m.Vp % 2 || m.C < 2 * W || m.HS > MAX_HS || m.FFN == 0 || N < 1) return z;
    z.blocks = std::min(num_multiprocessors(), m.C / 2);
    const bool swiglu = m.activation == Activation::SwiGLU;
    const auto product = [&](int which, int64_t outputs, int64_t K) {
        Product& p = z.products[which];
        p.K = int(K), p.units = int(outputs / 2);
        const int64_t most = ceil_div(p.units, std::max<int64_t>(z.blocks, 1));
        p.parts = 1, p.log_parts = 0;
        while (most * p.parts * 2 <= WARPS && p.parts * WARP * W < K) p.parts *= 2, p.log_parts++;
        const int64_t rows = which == FC && swiglu ? 4 : 2, bytes = rows * K * item;
        z.stage_bytes = std::max(z.stage_bytes, bytes);
        if (which != HEAD && most * rows > THREADS) z.blocks = 0;  // biases: a thread each
        return bytes;
    };
    z.stage_bytes = std::max(STAGE_BYTES, 2 * m.C * int64_t(sizeof(float)));
    const int64_t bytes[PRODUCTS] = {product(QKV, qkv, m.C), product(PROJ, m.C, Q), product(FC, m.FFN, m.C),
                                     product(FCPROJ, m.C, m.FFN), product(HEAD, m.Vp, m.C)};
    z.stage_bytes = aligned(z.stage_bytes);
    for (int i = 0; i < PRODUCTS; i++) z.products[i].per_stage = int(z.stage_bytes / bytes[i]);
    const int64_t heads = heads_at_once(m);
    const int64_t attention = (heads * (m.HS + DECODE_PIECE) + WARPS * heads * m.HS + m.HS) * int64_t(sizeof(float));
    z.rows_bytes = aligned(std::max(N * std::max({m.C, Q, m.FFN}) * item, attention));
    z.x_bytes = aligned(N * m.C * item);
    z.heads_bytes = aligned((heads + 2) * m.HS * item);
    z.layers_bytes = aligned(m.layers * int64_t(sizeof(Layer)));
    const int64_t room = max_shared_bytes() - RESERVED_BYTES - z.shared_bytes();
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
        products[QKV] = take(N * (m.NH + 2 * m.NKV) * m.HS / per_word);
        att = take(N * m.NH * m.HS / per_word);
        products[PROJ] = take(N * m.C / per_word);
        products[FC] = take(N * m.FFN / per_word);
        products[FCPROJ] = take(N * m.C / per_word);
        partials = take(N * m.NH * decode_pieces(m.capacity) * (m.HS + 2));
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

int64_t decode_step_rows(const DecodeModel& model) {
    int64_t N = std::min(model.slots, LINEAR_SMALL_N);
    while (N > 0 && !layout_of(model, N).possible) N--;
    return N;
}

int64_t decode_step_scratch(const DecodeModel& model) {
    return decode_step_rows(model) > 0 ? Words(model).end : 0;
}

void decode_step_prepare(Tensor scratch, const DecodeModel& m, const InferenceWeights& weights,
                         const std::vector<Tensor>& k, const std::vector<Tensor>& v, Stream stream) {
    const char* op = "decode_step_prepare";
    const int64_t Q = m.NH * m.HS;
    const bool swiglu = m.activation == Activation::SwiGLU;
    require(int64_t(weights.blocks.size()) == m.layers && int64_t(k.size()) == m.layers && v.size() == k.size(), op,
            ": ", weights.blocks.size(), " blocks and a cache for ", k.size(), " layers, expected ", m.layers);
    require(decode_step_rows(m) > 0, op,
            ": such a model can't be run in one launch; decode_step_rows() tells which can");
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

void decode_step(Tensor logits, Tensor ids, const DecodePlace& place, const DecodeModel& m,
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
            " texts of this model don't fit in a launch; decode_step_rows() tells how many do");
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
        a.att = words(w.att);
        a.partials = words(w.partials);
        std::copy_n(z.products, PRODUCTS, a.products);
        a.num_slots = m.slots, a.capacity = m.capacity;
        a.num_layers = int(m.layers), a.N = int(N), a.C = int(m.C);
        a.NH = int(m.NH), a.NKV = int(m.NKV), a.HS = int(m.HS);
        a.passes = int(ceil_div(m.NH / m.NKV, heads_at_once(m))),
        a.pieces = int(decode_pieces(std::min(place.max_length, m.capacity)));
        for (a.lanes = 1; a.lanes < m.HS / FULL_WIDTH<T>;) a.lanes *= 2;
        a.eps = m.eps, a.scale = m.scale, a.centred = m.centred, a.activation = m.activation;
        a.stages = int(z.stages), a.stage_bytes = int(z.stage_bytes);
        int64_t at = 0;
        const auto take = [&](int64_t bytes) {
            const int64_t begin = at;
            at += bytes;
            return int(begin);
        };
        a.stage_memory = take(z.stages * z.stage_bytes), a.rows_memory = take(z.rows_bytes);
        a.x_memory = take(z.x_bytes), a.heads_memory = take(z.heads_bytes), a.layers_memory = take(z.layers_bytes);
        launch(op, a, z, stream);
    });
}
