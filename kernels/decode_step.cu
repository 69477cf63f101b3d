// One block on each multiprocessor, from the first layer to the head.
//
// A warp of its own streams the block's part of all weights, in the order of their use, through a ring of stages in
// shared memory (cp.async.bulk). It never looks at an activation, so that the ring is full again by the time one has
// come: where the arithmetic waits for other blocks, memory does not.
//
// Eight warps multiply. A unit is two numbers of the output, that is two rows of weight, with SwiGLU two of gate and
// the same two of up; block b owns the units [b·units/blocks, (b + 1)·units/blocks) of every product. Eight rows make a
// strip: one side of tensor cores' 8 x 16 tiles, with eight texts on the other, so that one text costs what eight do
// and few instructions. All warps work on the same strip, in turns of 64 bytes of its rows, which are the same columns
// in every strip: a warp receives, normalises and multiplies its own columns of x and meets the others only for the
// norm's sums and for the sums of a product.
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
#include "kernels/decode_early.cuh"
#include "kernels/hopper.cuh"
#include "kernels/kv_rotate.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;  // that compute; one more warp streams
constexpr int STRIP = 8;                          // rows of weight, and texts at most
constexpr int GROUP = 4;                          // strips whose sums are put together at the same time
constexpr int TURN_BYTES = 64;                    // of a row: four lanes of 16 bytes
constexpr int MAX_STAGE_TURNS = 32;               // of each row of a strip; a multiple of WARPS
constexpr int64_t MAX_HS = 128;
constexpr int MIN_STAGES = 3, MAX_STAGES = 32;
constexpr int64_t RESERVED_BYTES = 4 << 10;  // of shared memory, for the kernel's static arrays
constexpr int WIDE_HEADS = 4;
#ifndef STEP_PIECE_KEYS
#define STEP_PIECE_KEYS 256
#endif
constexpr int64_t PIECE_KEYS = STEP_PIECE_KEYS;  // of a context, for a block's attention
static_assert(LINEAR_SMALL_N == STRIP && GROUP * STRIP / 2 * STRIP <= THREADS &&
              (WIDE_HEADS + 2) * MAX_HS / FULL_WIDTH<float> <= THREADS);

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
    bool swiglu;
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
    uint64_t* partials;                     // [N, NH, pieces, HS + 4] fp32: maximum, sum, two zeros, Σ p·v
    int64_t vocab, places, logits_stride, num_slots, capacity;
    Product products[PRODUCTS];
    int num_layers, N, C, NH, NKV, HS, passes, pieces, log_lanes;
    float eps, scale;
    bool centred;
    Activation activation;
    int stages, stage_bytes, stage_turns;
    int stage_memory, rows_memory, sums_memory, stream_memory, attention_memory, layers_memory;  // begin, in bytes
};

// Elements of T in a word of an exchange; words of 16 bytes of T.
template <typename T>
constexpr int PER_WORD = 4 / int(sizeof(T));
constexpr int VECTOR_WORDS = 4;

__host__ __device__ constexpr int partial_floats(int HS) {
    return VECTOR_WORDS + HS;
}

// Bytes from a row of a strip to the next in a stage of so many turns, an even number: an odd multiple of a turn, so
// that two rows of it lie in different banks.
__host__ __device__ constexpr int row_pitch(int turns) {
    return (turns + 1) * TURN_BYTES;
}

// Floats of shared memory for queries and sums of HEADS heads, then two numbers for each head and warp, then turns.
__host__ __device__ constexpr int attention_sums(int heads, int HS) {
    return heads * HS + WARPS * heads * HS;
}
__host__ __device__ constexpr int attention_floats(int heads, int HS) {
    return attention_sums(heads, HS) + 2 * WARPS * heads + HS;
}

#if __CUDA_ARCH__ >= 900

// In `rows` the second and the third word of 16 bytes have changed places (StripSums). Where number i of a vector's
// words stands, and the other way.
__device__ constexpr int swapped(int i) {
    return (i & ~3) | (i & 1) << 1 | (i >> 1 & 1);
}

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

// COUNT vectors of 16 bytes from words[i·distance], once their numbers are right, as many as there are below `end` of i
// = first, first + step, …; the others are copies of the first. All are under way together, and again where one came
// too early. A block that never answers would hold the GPU for ever: after seconds the kernel gives up.
template <int COUNT>
__device__ __forceinline__ void receive_few(uint4 (&to)[COUNT], const uint64_t* words, int distance, uint32_t number,
                                            int first, int step, int end) {
    ulonglong2 w[COUNT][2];
    bool early = true;
    for (unsigned tries = 0; early; tries++) {
        if (tries > 1u << 23) __trap();
#pragma unroll
        for (int b = 0; b < COUNT; b++) {
            const int i = first + b * step < end ? first + b * step : first;
#pragma unroll
            for (int h = 0; h < 2; h++) w[b][h] = load_two(words + i * distance + 2 * h);
        }
        early = false;
#pragma unroll
        for (int b = 0; b < COUNT; b++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                early |= uint32_t(w[b][h].x >> 32) != number || uint32_t(w[b][h].y >> 32) != number;
    }
#pragma unroll
    for (int b = 0; b < COUNT; b++)
        to[b] = make_uint4(uint32_t(w[b][0].x), uint32_t(w[b][0].y), uint32_t(w[b][1].x), uint32_t(w[b][1].y));
}

// All of them, to to[i·pitch] in shared memory, words swapped. A function of its own: what is executed once and left
// again costs more cycles to be fetched than to be computed.
__device__ __noinline__ void receive(uint4* to, int pitch, const uint64_t* words, int distance, uint32_t number,
                                     int first, int step, int end) {
    constexpr int COUNT = 4;
#pragma unroll 1
    for (int base = first; base < end; base += COUNT * step) {
        uint4 v[COUNT];
        receive_few(v, words, distance, number, base, step, end);
#pragma unroll
        for (int b = 0; b < COUNT; b++)
            if (base + b * step < end) to[(base + b * step) * pitch] = make_uint4(v[b].x, v[b].z, v[b].y, v[b].w);
    }
}

// Numbers 2i and 2i + 1 of a row.
template <typename T>
__device__ __forceinline__ void send(uint64_t* row, int i, float a, float b, uint32_t number) {
    if constexpr (sizeof(T) == 2) {
        store_one(row + i, exchange_word(pack_two<T>(a, b), number));
    } else {
        store_two(row + 2 * i, exchange_word(__float_as_uint(a), number), exchange_word(__float_as_uint(b), number));
    }
}

// --- the ring of weights

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// A place in the ring. The barriers are [2, MAX_STAGES]: full, then empty.
struct Ring {
    uint32_t barriers, memory;  // in shared memory
    int stages, stage_bytes;
    uint32_t full, here;  // of this stage
    int parity = 0;

    __device__ __forceinline__ Ring(uint32_t barriers_, uint32_t memory_, int stages_, int stage_bytes_)
        : barriers(barriers_),
          memory(memory_),
          stages(stages_),
          stage_bytes(stage_bytes_),
          full(barriers_),
          here(memory_) {}
    __device__ __forceinline__ uint32_t empty() const { return full + MAX_STAGES * int(sizeof(Barrier)); }
    __device__ __forceinline__ void advance() {
        full += sizeof(Barrier), here += stage_bytes;
        if (full == barriers + stages * int(sizeof(Barrier))) full = barriers, here = memory, parity ^= 1;
    }
    __device__ __forceinline__ void wait() const { barrier_wait(full, parity); }
    // A warp is done with the stage.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(empty());
        advance();
    }
    // A warp: makes room for `bytes`.
    __device__ __forceinline__ void claim(int bytes) const {
        if (threadIdx.x % WARP == 0) {
            barrier_wait(empty(), parity ^ 1);
            barrier_arrive_expecting(full, bytes);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void copy(int to, const void* from, int bytes) const {
        copy_bytes(here + to, from, bytes, full);
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

// A strip has the rows of so many units: their gates in its first half, with SwiGLU, and what those open in the other.
__device__ __forceinline__ int log_units_of_strip(const Product& p) {
    return p.swiglu ? 1 : 2;
}

// By one warp: a lane for each row of a strip.
template <typename T>
__device__ void stream_weights(const Step<T>& a, const Layer* layers, const Units* units, Ring ring) {
    const int lane = int(threadIdx.x) % WARP;
    const auto norm = [&](const float* weight, const float* bias) {
        const int bytes = a.C * int(sizeof(float));
        ring.claim(bias ? 2 * bytes : bytes);
        if (lane == 0) ring.copy(0, weight, bytes);
        if (lane == 1 && bias) ring.copy(bytes, bias, bytes);
        ring.advance();
    };
    const int stage_row = a.stage_turns * TURN_BYTES, pitch = row_pitch(a.stage_turns);
    const auto product = [&](int which, const void* matrix) {
        const Product& p = a.products[which];
        const int log_units = log_units_of_strip(p), half = lane >> (log_units + 1),
                  row = lane & ((2 << log_units) - 1), row_bytes = p.K * int(sizeof(T)), end = units[which].end;
#pragma unroll 1
        for (int unit = units[which].first; unit < end; unit += 1 << log_units) {
            const int rows = 2 * min(end - unit, 1 << log_units);
            const bool mine = lane < STRIP && row < rows;
            const char* from =
                static_cast<const char*>(matrix) + (2 * (int64_t(half) * p.units + unit) + row) * row_bytes;
#pragma unroll 1
            for (int left = row_bytes; left > 0; left -= stage_row, from += stage_row) {
                const int bytes = min(left, stage_row);
                ring.claim((p.swiglu ? 2 * rows : rows) * bytes);
                if (mine) ring.copy(lane * pitch, from, bytes);
                ring.advance();
            }
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
        product(which, head ? a.head : layer.weight[which]);
    }
}

// --- products

// Sums of a strip's rows with all texts, of the columns that a warp multiplies. Lane 4g + t has part t of a turn of row
// g of the strip, and of row g of x.
template <typename T>
struct StripSums {
    float even[4] = {}, odd[4] = {};

    // w, x: where this lane's 16 bytes are, x those of the first text.
    __device__ __forceinline__ void add(uint32_t weight, uint32_t x, int) {
        // x is the left operand, with its first two words where mma.sync has rows 0 … 7 and the others where it has
        // rows 8 … 15: of the products with the first half of w the upper rows are wanted, of the others the lower.
        // Which columns these are does not matter as long as both sides agree.
        const uint4 w = load_shared(weight), v = load_shared(x);
        const uint32_t left[4] = {v.x, v.y, v.z, v.w};
        mma<T>(even, left, w.x, w.y);
        mma<T>(odd, left, w.z, w.w);
    }
    // To [N, WARPS, STRIP].
    __device__ __forceinline__ void store(float* to, int N) const {
        const int lane = int(threadIdx.x) % WARP;
        if (lane / 4 < N)
            *reinterpret_cast<float2*>(to + lane / 4 * WARPS * STRIP + lane % 4 * 2) =
                make_float2(even[0] + odd[2], even[1] + odd[3]);
    }
    // Lane 4g + t reads text g.
    static __device__ __forceinline__ int text_of_lane(int N) { return min(int(threadIdx.x) % WARP / 4, N - 1); }
};

template <>
struct StripSums<float> {
    float sum[STRIP] = {};

    __device__ __forceinline__ void add(uint32_t weight, uint32_t x, int N) {
        const uint4 w = load_shared(weight);
#pragma unroll
        for (int n = 0; n < STRIP; n++) {
            if (n >= N) break;
            const uint4 v = load_shared(x + n * TURN_BYTES);
            sum[n] = fmaf(__uint_as_float(v.x), __uint_as_float(w.x), sum[n]);
            sum[n] = fmaf(__uint_as_float(v.z), __uint_as_float(w.y), sum[n]);
            sum[n] = fmaf(__uint_as_float(v.y), __uint_as_float(w.z), sum[n]);
            sum[n] = fmaf(__uint_as_float(v.w), __uint_as_float(w.w), sum[n]);
        }
    }
    __device__ __forceinline__ void store(float* to, int N) const {
        const int lane = int(threadIdx.x) % WARP;
#pragma unroll
        for (int n = 0; n < STRIP; n++) {
            if (n >= N) break;
            float y = sum[n];
            y += __shfl_xor_sync(ALL_LANES, y, 1);
            y += __shfl_xor_sync(ALL_LANES, y, 2);
            if (lane % 4 == 0) to[n * WARPS * STRIP + lane / 4] = y;
        }
    }
    static __device__ __forceinline__ int text_of_lane(int) {
        return 0;
    }
};

// A warp's part of a strip's sums. Of each row it has `turns`, every eighth, in stages of `stage_turns` of them; x:
// where the lane's first is, the next x_step further.
//
// Little is done here and in what else is on the way from one exchange to the next: a warp that is alone takes five
// cycles and more for each instruction.
template <typename T>
__device__ __forceinline__ void multiply_strip(Ring& ring, uint32_t in_stage, uint32_t x, int x_step, int turns,
                                               int stage_turns, int stages, int N, float* to) {
    constexpr int TURN_STEP = WARPS * TURN_BYTES, AT_ONCE = 3;
    StripSums<T> sums;
#pragma unroll 1
    for (; stages > 0; stages--, turns -= stage_turns) {
        ring.wait();
        uint32_t weight = ring.here + in_stage;
        int left = min(turns, stage_turns);
#pragma unroll 1
        for (; left >= AT_ONCE; left -= AT_ONCE, weight += AT_ONCE * TURN_STEP, x += AT_ONCE * x_step)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) sums.add(weight + i * TURN_STEP, x + i * x_step, N);
#pragma unroll 1
        for (; left > 0; left--, weight += TURN_STEP, x += x_step) sums.add(weight, x, N);
        ring.release();
    }
    sums.store(to, N);
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
    t.begin = int64_t(t.piece) * PIECE_KEYS;
    if (length <= 0 || length > a.capacity || t.slot < 0 || t.slot >= a.num_slots) return t;
    t.used = int(ceil_div(length, PIECE_KEYS));
    if (t.used > a.pieces) t.used = 0;
    t.keys = int(min(int64_t(PIECE_KEYS), length - t.begin));
    return t;
}

// One layer's attention, from qkv to att. memory: attention_floats, then T [HEADS + 4, HS]: queries, key and value as
// they come, key and value as they go to the cache.
template <int HEADS, typename T>
__device__ __forceinline__ void attend(const Step<T>& a, const Layer& layer, const int64_t* positions,
                                       const int64_t* slots, const Item& first_item, float* memory, uint32_t number) {
    constexpr int W = FULL_WIDTH<T>, BATCH = HEADS == 1 ? 4 : 2;
    const int thread = int(threadIdx.x), HS = a.HS, log_row = a.log_lanes + (W == 8 ? 3 : 2);
    float* const two = memory + attention_sums(HEADS, HS);
    float* const turns = two + 2 * WARPS * HEADS;
    T* const heads = reinterpret_cast<T*>(memory + attention_floats(HEADS, HS));
    const EarlyPiece<WARPS, HEADS, T> work{
        memory, memory + HEADS * HS, two, two + WARPS * HEADS, HS, heads + (HEADS + 2) * HS, heads + (HEADS + 3) * HS};
    const int items = a.N * a.NKV * a.passes * a.pieces;
    const int64_t row = int64_t(a.NKV) * HS, qkv_channels = int64_t(a.NH + 2 * a.NKV) * HS;

#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece >= max(t.used, 1)) continue;
        uint64_t* const att = a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>;
        if (t.used == 0) {
#pragma unroll 1
            for (int c = thread; c < t.heads * HS / 2; c += THREADS) send<T>(att, t.head0 * HS / 2 + c, 0, 0, number);
            continue;
        }
        const float* const turn = a.angles.of(t.n);
        const uint64_t* const words = a.words[QKV] + t.n * qkv_channels / PER_WORD<T>;
        const int64_t start = (t.slot * a.capacity + t.begin) * row + int64_t(t.kv) * HS;
        T *const k_cache = static_cast<T*>(layer.k), *const v_cache = static_cast<T*>(layer.v);
        const bool newest = t.piece == t.used - 1;
        if (i != int(blockIdx.x)) sync_computing_warps();  // memory is free
        const auto ready = [&] {
            if (turn)
#pragma unroll 1
                for (int c = thread; c < 2 * a.angles.pairs; c += THREADS) turns[c] = turn[c];
            // A vector for each thread: HS ≤ MAX_HS.
            const int r = thread >> a.log_lanes, first = (thread & ((1 << a.log_lanes) - 1)) * W;
            if (r < HEADS + 2 && (r < t.heads || r >= HEADS) && first < HS) {
                const int head = r < HEADS ? t.head0 + r : a.NH + (r - HEADS) * a.NKV + t.kv;
                uint4 v[1];
                receive_few(v, words + (head * HS + first) / PER_WORD<T>, 0, number, 0, 0, 1);
                *reinterpret_cast<uint4*>(heads + r * HS + first) = v[0];
            }
            sync_computing_warps();
            if (newest) {
                // Every pass of a KV head writes the same.
                const int64_t to = start + (t.keys - 1) * row;
#pragma unroll 1
                for (int c = thread; c < HS; c += THREADS) {
                    k_cache[to + c] = work.key[c] =
                        from_float<T>(rotated(heads + HEADS * HS, c, turn ? turns : nullptr, a.angles.pairs));
                    v_cache[to + c] = work.value[c] = heads[(HEADS + 1) * HS + c];
                }
            }
#pragma unroll 1
            for (int i = thread; i < HEADS << log_row; i += THREADS) {
                const int h = i >> log_row, c = i - (h << log_row);
                if (c >= HS) continue;
                work.queries[h * HS + c] =
                    h < t.heads ? a.scale * rotated(heads + h * HS, c, turn ? turns : nullptr, a.angles.pairs) : 0.0f;
            }
            sync_computing_warps();
        };
        attend_early<W, BATCH>(work, k_cache + start, v_cache + start, row, t.keys, newest, HS, a.log_lanes, ready);
        sync_computing_warps();
#pragma unroll 1
        for (int i = 2 * thread; i < t.heads << log_row; i += 2 * THREADS) {
            const int h = i >> log_row, channel = i - (h << log_row);
            if (channel >= HS) continue;
            float sum[2];
            const float max = work.maximum(h), total = work.total(h, channel, max, sum);
            if (t.used == 1) {
                send<T>(att, ((t.head0 + h) * HS + channel) / 2, quotient_for<T>(sum[0], total),
                        quotient_for<T>(sum[1], total), number);
                continue;
            }
            uint64_t* const to =
                a.partials + ((int64_t(t.n) * a.NH + t.head0 + h) * a.pieces + t.piece) * partial_floats(HS);
            send<float>(to, 2 + channel / 2, sum[0], sum[1], number);
            if (channel == 0) send<float>(to, 0, max, total, number), send<float>(to, 1, 0, 0, number);
        }
    }

    // The block with a context's first piece combines all of them, in order, as many at a time as there is room for.
#pragma unroll 1
    for (int i = int(blockIdx.x); i < items; i += int(gridDim.x)) {
        const Item t = i < int(gridDim.x) ? first_item : item_of<HEADS>(a, positions, slots, i);
        if (t.piece > 0 || t.used <= 1) continue;
        const int floats = partial_floats(HS), room = WARPS * HS / floats;
#pragma unroll 1
        for (int h = 0; h < t.heads; h++) {
            const uint64_t* const from = a.partials + (int64_t(t.n) * a.NH + t.head0 + h) * a.pieces * floats;
            float max = -INFINITY, total = 0, sum = 0;
#pragma unroll 1
            for (int first = 0; first < t.used; first += room) {
                const int count = min(room, t.used - first);
                sync_computing_warps();
                receive(reinterpret_cast<uint4*>(work.sums), 1, from + int64_t(first) * floats, VECTOR_WORDS, number,
                        thread, THREADS, count * floats / VECTOR_WORDS);
                sync_computing_warps();
                if (thread >= HS) continue;
                float larger = max;
#pragma unroll 4
                for (int p = 0; p < count; p++) larger = nan_max(larger, work.sums[p * floats]);
                const float old = weight_of<T>(max, larger);
                total *= old, sum *= old, max = larger;
#pragma unroll 4
                for (int p = 0; p < count; p++) {
                    const float* const x = work.sums + p * floats;
                    const float f = weight_of<T>(x[0], max);
                    total = fmaf(x[swapped(1)], f, total);
                    sum = fmaf(x[VECTOR_WORDS + swapped(thread)], f, sum);
                }
            }
            const float y = quotient_for<T>(sum, total), next = __shfl_down_sync(ALL_LANES, y, 1);
            if (thread < HS && thread % 2 == 0)
                send<T>(a.att + int64_t(t.n) * a.NH * HS / PER_WORD<T>, ((t.head0 + h) * HS + thread) / 2, y, next,
                        number);
        }
    }
}

// Channels c … c + 3 of the first layer's input.
template <int W, typename T>
__device__ __forceinline__ Floats<W> embedded(const Step<T>& a, int64_t id, int64_t place, int c) {
    Floats<W> v = {};
    if (id >= 0 && id < a.vocab) v = load_floats<W>(a.wte + id * a.C + c);
    if (a.wpe && place >= 0 && place < a.places) {
        const Floats<W> p = load_floats<W>(a.wpe + place * a.C + c);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] += p[k];
    }
    return v;
}

// What the norm's sums are put together from: those of the columns of one warp.
struct alignas(16) NormPart {
    float sum, squares, mean, count;  // Σ x, Σ (x − mean)², of how many; RMSNorm: mean 0
};

// The compiler may not compute x later.
__device__ __forceinline__ void compute_now(int& x) {
    asm volatile("" : "+r"(x));
}
template <typename P>
__device__ __forceinline__ void compute_now(P*& x) {
    asm volatile("" : "+l"(x));
}

#endif

template <typename T, int HEADS>
__global__ void __launch_bounds__(THREADS + WARP, 1) decode_step_kernel(const __grid_constant__ Step<T> a) {
#if __CUDA_ARCH__ >= 900
    constexpr int W = FULL_WIDTH<T>, LANES = 4, PAIR = PER_WORD<T>;
    extern __shared__ __align__(128) char memory[];
    __shared__ Barrier barriers[2][MAX_STAGES];
    __shared__ int64_t positions[STRIP], slots[STRIP];
    __shared__ NormPart norm_parts[STRIP][WARPS];
    __shared__ Units units[PRODUCTS];
    __shared__ uint32_t shared_number;
    const int thread = int(threadIdx.x), warp = thread / WARP, lane = thread % WARP, N = a.N;
    Layer* const layers = reinterpret_cast<Layer*>(memory + a.layers_memory);
    char* const rows = memory + a.rows_memory;  // [turns, N, TURN_BYTES] what a product multiplies
    float* const sums = reinterpret_cast<float*>(memory + a.sums_memory);  // [2, GROUP, N, WARPS, STRIP]
    T* const stream = reinterpret_cast<T*>(memory + a.stream_memory);      // [units of C, N, 2] the residual stream
#pragma unroll 1
    for (int s = thread; s < a.stages; s += THREADS + WARP)
        barrier_init(barriers[0] + s, 1), barrier_init(barriers[1] + s, WARPS);
    if (thread == 0) barrier_init_fence();
#pragma unroll 1
    for (int i = thread; i < a.num_layers * int(sizeof(Layer) / sizeof(uint64_t)); i += THREADS + WARP)
        reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    if (thread < N) positions[thread] = a.positions[thread], slots[thread] = a.slots[thread];
    if (thread == 0) shared_number = *a.exchanges;
    if (thread < PRODUCTS) units[thread] = units_of_block(a.products[thread]);
    __syncthreads();
    Ring ring(shared_address(barriers), shared_address(memory + a.stage_memory), a.stages, a.stage_bytes);
    if (warp == WARPS) return stream_weights(a, layers, units, ring);
    const uint32_t number = shared_number;
    __shared__ Item first_item;  // of the block; nothing where there are fewer items than blocks
    if (thread == 0) {
        first_item = {};
        if (int(blockIdx.x) < N * a.NKV * a.passes * a.pieces)
            first_item = item_of<HEADS>(a, positions, slots, int(blockIdx.x));
    }
    // What a thread finishes: of each group of strips unit `my_unit` for text `my_text`.
    const int my_text = thread % STRIP, my_unit = thread / STRIP;
    if (my_text < N) {
        const Units mine = units[PROJ];
#pragma unroll 1
        for (int i = my_unit; i < mine.end - mine.first; i += THREADS / STRIP)
            store_pack(stream + (i * N + my_text) * 2,
                       as_pack<T>(embedded<2>(a, a.ids[my_text], positions[my_text], 2 * (mine.first + i))));
    }
    sync_computing_warps();

    // Of x in `rows` a warp has the turns warp, warp + WARPS, …. They are received by all lanes: lane 4g + t takes
    // vector t of a turn of text g mod N, each (8 / N)th turn of the warp. For the norm it has vectors t of text g
    // whatever N is, so that the bits don't depend on it.
    const int g = lane / LANES, t = lane % LANES, every = STRIP / N, from_turn = g / N, from_text = g - from_turn * N;
    const int x_step = WARPS * N * TURN_BYTES;
    const auto x_of = [&](int text) { return rows + (warp * N + text) * TURN_BYTES + t * 16; };
    uint4* const received = reinterpret_cast<uint4*>(x_of(from_text));
    uint4* const normed = reinterpret_cast<uint4*>(x_of(min(g, N - 1)));
    const uint32_t multiplied = shared_address(x_of(StripSums<T>::text_of_lane(N)));
    const uint32_t in_stage = uint32_t(g * row_pitch(a.stage_turns) + warp * TURN_BYTES + t * 16);
    float* const my_sums = sums + warp * STRIP;
    // Turns of a row of K that are this warp's.
    const auto turns_of = [&](int K) { return (K / (LANES * W) - warp + WARPS - 1) / WARPS; };
    const auto stage = [&](const uint64_t* from, uint32_t exchange, int K) {
        if (from_turn < every)
            receive(received, x_step / 16, from + int64_t(from_text) * (K / PAIR) + VECTOR_WORDS * (LANES * warp + t),
                    VECTOR_WORDS * LANES * WARPS, exchange, from_turn, every, turns_of(K));
    };
    // Of the residual stream a warp's part of the norm.
    const int norm_turns = turns_of(a.C);
    const float count = float(norm_turns * LANES * W), share = count > 0 ? 1 / count : 0.0f, all = 1 / float(a.C);
    // The residual stream, received or (from: null) embedded, to its norm in `rows`.
    const auto normalise = [&](const uint64_t* from, uint32_t exchange, bool has_bias) {
        if (from) {
            stage(from, exchange, a.C);
        } else if (g < N) {
#pragma unroll 1
            for (int j = 0; j < norm_turns; j++) {
                const Pack<T, W> x =
                    as_pack<T>(embedded<W>(a, a.ids[g], positions[g], (LANES * (warp + WARPS * j) + t) * W));
                const uint4& v = reinterpret_cast<const uint4&>(x);
                *reinterpret_cast<uint4*>(x_of(g) + j * x_step) = make_uint4(v.x, v.z, v.y, v.w);
            }
        }
        __syncwarp();
        // Sums of a warp's columns around one of them, so that a mean far from 0 costs no digits.
        const float middle =
            a.centred && norm_turns > 0
                ? __shfl_sync(ALL_LANES, as_float(*reinterpret_cast<const T*>(normed)), lane & ~(LANES - 1))
                : 0.0f;
        float parts[W] = {}, squares[W] = {};
#pragma unroll 1
        for (int j = 0; j < norm_turns; j++) {
            const Floats<W> x = load_floats<W>(reinterpret_cast<const T*>(normed + j * (x_step / 16)));
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float d = x[k] - middle;
                parts[k] += d;
                squares[k] = fmaf(d, d, squares[k]);
            }
        }
        const auto total = [&](float(&v)[W]) {
#pragma unroll
            for (int width = W / 2; width > 0; width /= 2)
#pragma unroll
                for (int k = 0; k < width; k++) v[k] += v[k + width];
            v[0] += __shfl_xor_sync(ALL_LANES, v[0], 1);
            return v[0] + __shfl_xor_sync(ALL_LANES, v[0], 2);
        };
        const float sum = a.centred ? total(parts) : 0.0f, square = total(squares), off = sum * share;
        if (t == 0) norm_parts[g][warp] = {fmaf(count, middle, sum), fmaf(-sum, off, square), middle + off, count};
        sync_computing_warps();
        float mean = 0, squared = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) mean += norm_parts[g][w].sum;
        mean *= all;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const NormPart other = norm_parts[g][w];
            const float apart = other.mean - mean;
            squared += fmaf(other.count * apart, apart, other.squares);
        }
        const float rstd = rsqrtf(fmaf(squared, all, a.eps));
        ring.wait();
        uint32_t weight = ring.here + uint32_t((LANES * warp + t) * W * int(sizeof(float)));
#pragma unroll 1
        for (int j = 0; j < norm_turns; j++, weight += LANES * WARPS * W * int(sizeof(float))) {
            T* const at = reinterpret_cast<T*>(normed + j * (x_step / 16));
            Floats<W> x = load_floats<W>(at);
            uint4 scale[W / 4], shift[W / 4] = {};
#pragma unroll
            for (int i = 0; i < W / 4; i++) {
                scale[i] = load_shared(weight + 16 * i);
                if (has_bias) shift[i] = load_shared(weight + a.C * int(sizeof(float)) + 16 * i);
            }
#pragma unroll
            for (int k = 0; k < W; k++) {
                const int c = PAIR * swapped(k / PAIR) + k % PAIR;
                const auto element = [&](const uint4& v) {
                    return __uint_as_float(c % 4 == 0 ? v.x : c % 4 == 1 ? v.y : c % 4 == 2 ? v.z : v.w);
                };
                x[k] = fmaf((x[k] - mean) * rstd, element(scale[c / 4]), element(shift[c / 4]));
            }
            if (g < N) *reinterpret_cast<Pack<T, W>*>(at) = as_pack<T>(x);
        }
        ring.release();
    };
    // The keys and values of the block's first item: on their way to the cache of the GPU while qkv is computed.
    const auto prefetch_item = [&](const Layer& layer) {
        const Item& item = first_item;
        if (item.piece >= item.used || thread >= item.keys) return;
        const int64_t at = ((item.slot * a.capacity + item.begin + thread) * a.NKV + item.kv) * a.HS;
#pragma unroll 1
        for (int c = 0; c < a.HS; c += 128 / int(sizeof(T))) {
            for (const void* cache : {layer.k, layer.v})
                asm volatile(
                    "prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(static_cast<const T*>(cache) + at + c)));
        }
    };

    // Products in order. All of them are the same lines of code, which so stay in the cache of instructions.
    int buffer = 0;  // of sums: one is filled while the other may still be read
#pragma unroll 1
    for (int step = 0; step <= LAYER_PRODUCTS * a.num_layers; step++) {
        const int l = step / LAYER_PRODUCTS, which = l < a.num_layers ? step % LAYER_PRODUCTS : int(HEAD);
        const Product& p = a.products[which];
        const Layer& layer = layers[which == HEAD ? 0 : l];
        const uint32_t now = number + uint32_t(l) + 1;
        const Units mine = units[which];
        const int log_units = log_units_of_strip(p), units_at_once = GROUP << log_units, K = p.K;
        const int turns = turns_of(K), stage_turns = a.stage_turns / WARPS,
                  stages = (K / (LANES * W) + a.stage_turns - 1) / a.stage_turns;
        const bool finishes = my_text < N && my_unit < units_at_once, adds = which == PROJ || which == FCPROJ;
        // Where what this thread finishes stands and goes, and its biases, all asked for before there is anything to
        // wait for.
        const int strip = my_unit >> log_units;
        int from = (strip * N + my_text) * WARPS * STRIP + 2 * (my_unit - (strip << log_units)),
            x = (my_unit * N + my_text) * 2;
        uint64_t* to = which == HEAD ? nullptr : a.words[which] + int64_t(my_text) * (2 * p.units / PAIR);
        T* logits = a.logits + my_text * a.logits_stride;
        T bias[4] = {};
        const auto ask_for_bias = [&](int unit) {
            const T* const b = which == HEAD ? nullptr : static_cast<const T*>(layer.bias[which]);
            if (!b || !finishes || unit >= mine.end) return;
            bias[0] = b[2 * unit], bias[1] = b[2 * unit + 1];
            if (p.swiglu) bias[2] = b[2 * (p.units + unit)], bias[3] = b[2 * (p.units + unit) + 1];
        };
        ask_for_bias(mine.first + my_unit);
        if (which == QKV) prefetch_item(layer);
        if (which == PROJ)
            attend<HEADS>(a, layer, positions, slots, first_item, reinterpret_cast<float*>(memory + a.attention_memory),
                          now);
        compute_now(from), compute_now(x), compute_now(to), compute_now(logits);
        if (adds)
            stage(which == PROJ ? a.att : a.words[FC], now, K);
        else
            normalise(which == FC ? a.words[PROJ]
                      : l > 0     ? a.words[FCPROJ]
                                  : nullptr,
                      which == FC ? now : now - 1, which == HEAD ? a.normf_bias : layer.norm_bias[which == FC]);

#pragma unroll 1
        for (int base = mine.first; base < mine.end; base += units_at_once, x += units_at_once * N * 2) {
            __syncwarp();
            if (base > mine.first) ask_for_bias(base + my_unit);
            const int offset = buffer * GROUP * N * WARPS * STRIP, strips = (mine.end - base - 1 >> log_units) + 1;
            buffer ^= 1;
#pragma unroll 1
            for (int s = 0; s < min(strips, GROUP); s++)
                multiply_strip<T>(ring, in_stage, multiplied, x_step, turns, stage_turns, stages, N,
                                  my_sums + offset + s * N * WARPS * STRIP);
            sync_computing_warps();
            const int unit = base + my_unit;
            if (!finishes || unit >= mine.end) continue;
            float y[4] = {};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 part = *reinterpret_cast<const float2*>(sums + from + offset + w * STRIP);
                y[0] += part.x, y[1] += part.y;
            }
            y[0] += as_float(bias[0]), y[1] += as_float(bias[1]);
            if (which == HEAD) {
                store_floats<2>(logits + 2 * unit, Floats<2>{{y[0], y[1]}});
                continue;
            }
            if (p.swiglu) {
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float2 part = *reinterpret_cast<const float2*>(sums + from + offset + w * STRIP + STRIP / 2);
                    y[2] += part.x, y[3] += part.y;
                }
                y[0] = swiglu<T>(y[0], y[2] + as_float(bias[2])), y[1] = swiglu<T>(y[1], y[3] + as_float(bias[3]));
            } else if (which == FC) {
                if (a.activation == Activation::GELU)
                    y[0] = gelu<T>(y[0]), y[1] = gelu<T>(y[1]);
                else
                    y[0] = relu2(y[0]), y[1] = relu2(y[1]);
            }
            if (adds) {
                const Floats<2> before = load_floats<2>(stream + x);
                y[0] += before[0], y[1] += before[1];
                store_pack(stream + x, as_pack<T>(Floats<2>{{y[0], y[1]}}));
            }
            send<T>(to, unit, y[0], y[1], now);
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
    int64_t stages = 0, stage_bytes = 0, stage_turns = 0;
    int64_t rows_bytes = 0, sums_bytes = 0, stream_bytes = 0, attention_bytes = 0, layers_bytes = 0;
    int64_t shared_bytes() const {
        return stages * stage_bytes + rows_bytes + sums_bytes + stream_bytes + attention_bytes + layers_bytes;
    }
};

int heads_at_once(const DecodeModel& m) {
    return m.NH == m.NKV ? 1 : WIDE_HEADS;
}

Layout layout_of(const DecodeModel& m, int64_t N) {
    Layout z;
    const int64_t item = dtype_size(m.dtype), W = 16 / item, Q = m.NH * m.HS, qkv = (m.NH + 2 * m.NKV) * m.HS;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9 || !device_attribute(cudaDevAttrCooperativeLaunch))
        return z;
    for (const int64_t columns : {m.C, Q, m.FFN})
        if (columns == 0 || columns * item % TURN_BYTES) return z;
    if (m.HS % W || m.Vp % 2 || m.HS > MAX_HS || N < 1) return z;
    z.blocks = std::min(num_multiprocessors(), m.C / 2);
    const auto product = [&](int which, int64_t outputs, int64_t K) {
        z.products[which] = {int(K), int(outputs / 2), which == FC && m.activation == Activation::SwiGLU};
    };
    product(QKV, qkv, m.C), product(PROJ, m.C, Q), product(FC, m.FFN, m.C), product(FCPROJ, m.C, m.FFN);
    product(HEAD, m.Vp, m.C);
    const auto turns = [&](int64_t K) { return K * item / TURN_BYTES; };
    z.stage_turns = std::min<int64_t>(ceil_div(turns(m.C), WARPS) * WARPS, MAX_STAGE_TURNS);
    z.stage_bytes = aligned(std::max<int64_t>(STRIP * row_pitch(int(z.stage_turns)), 2 * m.C * int64_t(sizeof(float))));
    z.rows_bytes = aligned(N * turns(std::max({m.C, Q, m.FFN})) * TURN_BYTES);
    z.sums_bytes = aligned(2 * GROUP * WARPS * N * STRIP * int64_t(sizeof(float)));
    z.stream_bytes = aligned(ceil_div(m.C / 2, z.blocks) * N * 2 * item);
    const int heads = heads_at_once(m), HS = int(m.HS);
    z.attention_bytes = aligned(attention_floats(heads, HS) * int64_t(sizeof(float)) + (heads + 4) * HS * item);
    z.layers_bytes = aligned(m.layers * int64_t(sizeof(Layer)));
    const int64_t room = max_shared_bytes() - RESERVED_BYTES - z.shared_bytes();
    z.stages = std::min<int64_t>(room / z.stage_bytes, MAX_STAGES);
    z.possible = z.stages >= MIN_STAGES;
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
        partials = take(N * m.NH * ceil_div(m.capacity, PIECE_KEYS) * partial_floats(int(m.HS)));
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
    if (a.NH == a.NKV)
        run(decode_step_kernel<T, 1>);
    else
        run(decode_step_kernel<T, WIDE_HEADS>);
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
        a.pieces = int(ceil_div(std::min(place.max_length, m.capacity), PIECE_KEYS));
        while ((1 << a.log_lanes) < m.HS / FULL_WIDTH<T>) a.log_lanes++;
        a.eps = m.eps, a.scale = m.scale, a.centred = m.centred, a.activation = m.activation;
        a.stages = int(z.stages), a.stage_bytes = int(z.stage_bytes), a.stage_turns = int(z.stage_turns);
        int64_t at = 0;
        const auto take = [&](int64_t bytes) {
            const int64_t begin = at;
            at += bytes;
            return int(begin);
        };
        a.stage_memory = take(z.stages * z.stage_bytes), a.rows_memory = take(z.rows_bytes);
        a.sums_memory = take(z.sums_bytes), a.stream_memory = take(z.stream_bytes);
        a.attention_memory = take(z.attention_bytes), a.layers_memory = take(z.layers_bytes);
        launch(op, a, z, stream);
    });
}
