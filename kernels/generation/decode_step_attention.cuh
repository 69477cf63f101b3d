// Attention of the fused decode step. A block receives q, k and v of its tasks through the grid-wide exchange and sends
// their output (decode_step_exchange.cuh). A task is a KV split of one sequence, for one KV head and a tile of the
// query heads that read it; block b has the tasks b, b + blocks, ….
#pragma once

#include <cfloat>

#include "kernels/generation/decode_step.cuh"
#include "kernels/generation/decode_step_exchange.cuh"

namespace fused_decode {

// The most KV splits of a sequence in a layer. options: of the layer, if the kernel is extended.
template <bool EXTENDED, typename T>
__device__ __forceinline__ int splits_of_layer(const Arguments<T>& a, const LayerOptions* options) {
    if constexpr (EXTENDED)
        if (options->window) return min(a.kv_splits, int(ceil_div(options->window - 1, SPLIT_KEYS)) + 1);
    return a.kv_splits;
}

template <bool EXTENDED, typename T>
__device__ __forceinline__ int num_tasks(const Arguments<T>& a, const LayerOptions* options) {
    return a.N * a.NKV * a.query_tiles * splits_of_layer<EXTENDED>(a, options);
}

// The keys that a sequence of `tokens` tokens sees.
template <bool EXTENDED>
__device__ __forceinline__ int64_t keys_seen(int64_t tokens, const LayerOptions* options) {
    return EXTENDED && options->window ? min(tokens, int64_t(options->window)) : tokens;
}

template <int HEADS, bool EXTENDED, typename T>
__device__ __forceinline__ Task task_of(const Arguments<T>& a, const Layer& layer, const int64_t* positions,
                                        const int64_t* slots, const LayerOptions* options, int i) {
    Task t{};
    // Not a variable: the compiler would order the plain kernel's loads in another way.
    const auto most_splits = [&] { return splits_of_layer<EXTENDED>(a, options); };
    t.split = i % most_splits();
    i /= most_splits();
    const int tile = i % a.query_tiles, group = a.NH / a.NKV;
    i /= a.query_tiles;
    t.kv = i % a.NKV;
    t.n = i / a.NKV;
    t.head0 = t.kv * group + tile * HEADS;
    t.heads = min(HEADS, group - tile * HEADS);
    const int64_t tokens = positions[t.n] + 1, slot = slots[t.n];
    if (tokens <= 0 || tokens > a.capacity || slot < 0 || slot >= a.num_slots) return t;
    constexpr int PAGE = int(SPLIT_KEYS);
    const int first = int(tokens - keys_seen<EXTENDED>(tokens, options)), first_page = first / PAGE;
    t.splits = int(tokens - 1) / PAGE - first_page + 1;
    if (t.splits > most_splits()) t.splits = 0;
    if (t.split >= t.splits) return t;
    const int begin = (first_page + t.split) * PAGE, end = min(int(tokens), begin + PAGE);
    t.keys = end - max(first, begin);
    t.last = SequencePages{layer.pages + slot * a.page_columns, a.page_columns, int(layer.num_pages)}.row(end - 1);
    return t;
}

// The keys and values that a lane holds. They are counted back from the last key of the split, so that the newest,
// which is not in the cache yet, is always the first key of the first lanes.
template <int ROUNDS, typename T>
struct KvRegisters {
    static constexpr int W = FULL_WIDTH<T>;
    using Vectors = Pack<T, W>[ROUNDS];
    Vectors key, value;

    // Loads keys b·step + first, b < ROUNDS, of the split, counted back from its last.
    __device__ __forceinline__ static void load(Vectors& x, const Arguments<T>& a, const void* cache, const Task& t,
                                                int first, int step) {
        const int channel = (int(threadIdx.x) & ((1 << a.log_lanes) - 1)) * W;
        const int64_t row = int64_t(a.NKV) * a.HS, at = t.last * row + int64_t(t.kv) * a.HS + channel;
#pragma unroll
        for (int b = 0; b < ROUNDS; b++) {
            const int j = b * step + first;
            uint4 v = {};
            // In assembly, because the compiler would move the loads to where they are used.
            if (j < t.keys && channel < a.HS)
                asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                             : "l"(__cvta_generic_to_global(static_cast<const T*>(cache) + at - j * row)));
            x[b] = reinterpret_cast<const Pack<T, W>&>(v);
        }
    }
};

// QK-norm and RoPE of a head of q or k by one warp (kernels/qk_norm.h). A lane has the channels lane + 32·i and reads
// those that they rotate with.
template <typename T>
struct HeadNorm {
    static constexpr int CHANNELS = int(MAX_HS) / WARP;
    float weight[CHANNELS], partner_weight[CHANNELS];

    // The channel that c rotates with; c itself if there is none.
    __device__ __forceinline__ static int partner(int c, int pairs) {
        return c < pairs ? c + pairs : c < 2 * pairs ? c - pairs : c;
    }
    // Loads the weights [HS], or ones if they are null. Called before the head arrives, to hide the latency.
    __device__ __forceinline__ void load(const Arguments<T>& a, const float* weights) {
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            const int c = int(threadIdx.x) % WARP + i * WARP;
            const bool has_weight = weights && c < a.HS;
            weight[i] = has_weight ? weights[c] : 1;
            partner_weight[i] = has_weight ? weights[partner(c, a.angles.pairs)] : 1;
        }
    }
    // Calls store(channel, value). rotation: null for none.
    template <typename Store>
    __device__ __forceinline__ void apply(const Arguments<T>& a, const T* head, const float* rotation,
                                          Store store) const {
        const int lane = int(threadIdx.x) % WARP, pairs = a.angles.pairs;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            const int c = lane + i * WARP;
            const float x = c < a.HS ? as_float(head[c]) : 0.0f;
            sum = fmaf(x, x, sum);
        }
        const float rstd = rsqrtf(warp_sum(sum) / float(a.HS) + a.eps);
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            const int c = lane + i * WARP;
            if (c >= a.HS) continue;
            float x = as_float(head[c]) * rstd * weight[i];
            if (rotation && c < 2 * pairs) {
                const float y = as_float(head[partner(c, pairs)]) * rstd * partner_weight[i];
                const int pair = c < pairs ? c : c - pairs;
                const float cosine = rotation[2 * pair], sine = rotation[2 * pair + 1];
                x = c < pairs ? x * cosine - y * sine : x * cosine + y * sine;
            }
            store(c, x);
        }
    }
};

// One layer's attention by the computing warps of a block.
template <int HEADS, int NB, bool EXTENDED, typename T>
struct Attention {
    static constexpr int W = FULL_WIDTH<T>;
    static constexpr int ROUNDS = 4;  // keys that a lane holds at a time
    using Kv = KvRegisters<ROUNDS, T>;

    // The online softmax of a lane's keys and channels: maximum, Σ exp(S − maximum), Σ exp(S − maximum)·v.
    struct Softmax {
        float max[HEADS], total[HEADS] = {}, o[HEADS][W] = {};
    };

    const Arguments<T>& a;
    const Layer& layer;
    const LayerOptions* const options;  // if the kernel is extended
    const Shared<NB, EXTENDED, T>& shared;
    const Task& first_task;  // of the block
    const uint32_t epoch;
    const int my_head;  // of a task: the thread combines two channels of it
    const int thread, warp, lane, HS;
    const int lanes, own_key, keys_in_round;  // lanes that share a key; the thread's key of a round; keys of a round
    const int channel, my_channel;
    float *const queries, *const sums;
    T *const rows, *const new_key;
    float2 (*const statistics)[HEADS];  // [WARPS, HEADS] of a warp's keys: maximum, Σ exp(S − maximum)

    __device__ __forceinline__ Attention(const Arguments<T>& arguments, const Layer& of_layer,
                                         const LayerOptions* layer_options, const Shared<NB, EXTENDED, T>& of_block,
                                         const Task& block_task, char* memory, float2 (*const warp_statistics)[HEADS],
                                         int head, uint32_t now)
        : a(arguments),
          layer(of_layer),
          options(layer_options),
          shared(of_block),
          first_task(block_task),
          epoch(now),
          my_head(head),
          thread(int(threadIdx.x)),
          warp(thread / WARP),
          lane(thread % WARP),
          HS(a.HS),
          lanes(1 << a.log_lanes),
          own_key(thread >> a.log_lanes),
          keys_in_round(THREADS >> a.log_lanes),
          channel((thread & (lanes - 1)) * W),
          my_channel(2 * thread - my_head * HS),
          queries(reinterpret_cast<float*>(memory)),
          sums(queries + HEADS * HS),
          rows(reinterpret_cast<T*>(sums + WARPS * HEADS * HS)),
          new_key(rows + (HEADS + 2) * HS),
          statistics(warp_statistics) {}

    __device__ __forceinline__ void run() const {
        const int tasks = num_tasks<EXTENDED>(a, options);
#pragma unroll 1
        for (int i = int(blockIdx.x); i < tasks; i += int(gridDim.x)) {
            const Task t = task(i);
            if (t.split >= max(t.splits, 1)) continue;
            if (t.splits == 0) {
                if (my_head < t.heads) send<T>(att_words(t), (t.head0 * HS) / 2 + thread, 0, 0, epoch);
                continue;
            }
            Kv kv;
            kv.load(kv.key, a, layer.k, t, own_key, keys_in_round);
            kv.load(kv.value, a, layer.v, t, own_key, keys_in_round);
            __syncwarp();  // after the previous task, which lanes without channels left early
            receive_rows(t);
            sync_computing_warps();
            const Softmax softmax = attend_keys(t, kv);
            store_warp_result(softmax);
            sync_computing_warps();
            if (my_head < t.heads) send_split(t);
        }
        // The block with the first split of a context combines all of them.
#pragma unroll 1
        for (int i = int(blockIdx.x); i < tasks; i += int(gridDim.x)) {
            const Task t = task(i);
            if (t.split == 0 && t.splits > 1 && my_head < t.heads) combine_splits(t);
        }
        __syncwarp();
    }

    __device__ __forceinline__ Task task(int i) const {
        return i < int(gridDim.x) ? first_task
                                  : task_of<HEADS, EXTENDED>(a, layer, shared.positions, shared.slots, options, i);
    }
    __device__ __forceinline__ uint64_t* att_words(const Task& t) const {
        return a.att_words + int64_t(t.n) * a.NH * HS / PER_WORD<T>;
    }

    // One warp for each row of queries, one for the new key and one for the new value: receives it, rotates q and k,
    // and appends k and v to the cache.
    __device__ __forceinline__ void receive_rows(const Task& t) const {
        if (warp < t.heads || (t.has_new_key() && (warp == HEADS || warp == HEADS + 1))) {
            const int64_t qkv_channels = int64_t(a.NH + 2 * a.NKV) * HS;
            const bool is_key = warp == HEADS, is_value = warp == HEADS + 1;
            const int head = is_key ? a.NH + t.kv : is_value ? a.NH + a.NKV + t.kv : t.head0 + warp;
            T* const row = rows + warp * HS;
            HeadNorm<T> head_norm;
            if constexpr (EXTENDED)
                if (a.qk_norm && !is_value) head_norm.load(a, is_key ? options->knorm : options->qnorm);
            receive<1>(reinterpret_cast<uint2*>(row),
                       a.matmul_words[QKV] + (t.n * qkv_channels + int64_t(head) * HS) / PER_WORD<T>, epoch, 1, 0,
                       HS / QUAD<T>);
            __syncwarp();
            const int64_t to = (t.last * a.NKV + t.kv) * HS;
            const bool rotates = EXTENDED ? shared.has_rotation[t.n] && options->rope : shared.has_rotation[t.n];
            const float* const rotation = rotates ? shared.rotations[t.n] : nullptr;
            if constexpr (EXTENDED) {
                if (a.qk_norm && !is_value) {
                    head_norm.apply(a, row, rotation, [&](int c, float x) {
                        if (is_key)
                            static_cast<T*>(layer.k)[to + c] = new_key[c] = from_float<T>(x);
                        else
                            queries[warp * HS + c] = a.scale * x;
                    });
                    return;
                }
            }
#pragma unroll 1
            for (int c = lane; c < HS; c += WARP) {
                // Every query tile of a KV head writes the same values.
                if (is_value) {
                    static_cast<T*>(layer.v)[to + c] = row[c];
                    continue;
                }
                const float x = rotated(row, c, rotation, a.angles.pairs);
                if (is_key)
                    static_cast<T*>(layer.k)[to + c] = new_key[c] = from_float<T>(x);
                else
                    queries[warp * HS + c] = a.scale * x;
            }
        }
    }

    // kv: the lane's first keys and values.
    __device__ __forceinline__ Softmax attend_keys(const Task& t, Kv& kv) const {
        float q[HEADS][W];
        Softmax softmax;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            softmax.max[h] = -FLT_MAX;
            Floats<W> x = {};
            if (channel < HS) x = load_floats<W>(queries + h * HS + channel);
#pragma unroll
            for (int k = 0; k < W; k++) q[h][k] = x[k];
        }
        if (t.has_new_key() && own_key == 0 && channel < HS) {
            kv.key[0] = load_pack<W>(new_key + channel);
            kv.value[0] = load_pack<W>(rows + (HEADS + 1) * HS + channel);
        }
#pragma unroll 1
        for (int first = own_key; first - own_key < t.keys; first += ROUNDS * keys_in_round) {
            if (first > own_key) {
                kv.load(kv.key, a, layer.k, t, first, keys_in_round);
                kv.load(kv.value, a, layer.v, t, first, keys_in_round);
            }
            float s[ROUNDS][HEADS];
            score(s, q, kv);
            update(softmax, s, kv, first, t.keys);
        }
        combine_lanes(softmax);
        return softmax;
    }

    // s = q·k of the lane's keys; the lanes that share a key all have it.
    __device__ __forceinline__ void score(float (&s)[ROUNDS][HEADS], const float (&q)[HEADS][W], const Kv& kv) const {
#pragma unroll
        for (int b = 0; b < ROUNDS; b++) {
            const Floats<W> x = as_floats(kv.key[b]);
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
    }

    // Adds the lane's keys, with scores s: keys b·keys_in_round + first of the split. Only the first `keys` exist.
    __device__ __forceinline__ void update(Softmax& softmax, float (&s)[ROUNDS][HEADS], const Kv& kv, int first,
                                           int keys) const {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float larger = softmax.max[h];
#pragma unroll
            for (int b = 0; b < ROUNDS; b++) {
                if (b * keys_in_round + first >= keys) s[b][h] = -INFINITY;
                larger = fmaxf(larger, s[b][h]);
            }
            rescale(softmax, h, larger);
#pragma unroll
            for (int b = 0; b < ROUNDS; b++) {
                s[b][h] = exp_for<T>(s[b][h] - larger);
                softmax.total[h] += s[b][h];
            }
        }
#pragma unroll
        for (int b = 0; b < ROUNDS; b++) {
            const Floats<W> x = as_floats(kv.value[b]);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int k = 0; k < W; k++) softmax.o[h][k] = fmaf(s[b][h], x[k], softmax.o[h][k]);
        }
    }
    __device__ __forceinline__ static void rescale(Softmax& softmax, int h, float max) {
        const float old = exp_for<T>(softmax.max[h] - max);
        softmax.max[h] = max;
        softmax.total[h] *= old;
#pragma unroll
        for (int k = 0; k < W; k++) softmax.o[h][k] *= old;
    }

    // Combines the keys of a warp.
    __device__ __forceinline__ void combine_lanes(Softmax& softmax) const {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float larger = softmax.max[h];
            for (int offset = lanes; offset < WARP; offset *= 2)
                larger = fmaxf(larger, __shfl_xor_sync(ALL_LANES, larger, offset));
            rescale(softmax, h, larger);
        }
#pragma unroll 1
        for (int offset = lanes; offset < WARP; offset *= 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                softmax.total[h] += __shfl_xor_sync(ALL_LANES, softmax.total[h], offset);
#pragma unroll
                for (int k = 0; k < W; k++) softmax.o[h][k] += __shfl_xor_sync(ALL_LANES, softmax.o[h][k], offset);
            }
    }

    __device__ __forceinline__ void store_warp_result(const Softmax& softmax) const {
        if (lane < lanes && channel < HS) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (lane == 0) statistics[warp][h] = make_float2(softmax.max[h], softmax.total[h]);
                const float(&o)[W] = softmax.o[h];
                float4* const to = reinterpret_cast<float4*>(sums + (warp * HEADS + h) * HS + channel);
#pragma unroll
                for (int k = 0; k < W / 4; k++) to[k] = make_float4(o[4 * k], o[4 * k + 1], o[4 * k + 2], o[4 * k + 3]);
            }
        }
    }

    // Combines the warps, two channels a thread. Sends the output if this is the only split, else the split's result.
    __device__ __forceinline__ void send_split(const Task& t) const {
        float largest = -FLT_MAX, sum = 0, s0 = 0, s1 = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, statistics[w][my_head].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 of_warp = statistics[w][my_head];
            const float2 x = *reinterpret_cast<const float2*>(sums + (w * HEADS + my_head) * HS + my_channel);
            const float weight = exp_for<T>(of_warp.x - largest);
            sum = fmaf(of_warp.y, weight, sum);
            s0 = fmaf(x.x, weight, s0);
            s1 = fmaf(x.y, weight, s1);
        }
        if (t.splits == 1) {
            send<T>(att_words(t), t.head0 * HS / 2 + thread, s0 / sum, s1 / sum, epoch);
            return;
        }
        uint64_t* const to =
            a.split_words + ((int64_t(t.n) * a.NH + t.head0 + my_head) * a.kv_splits + t.split) * (HS + 2);
        send<float>(to, 1 + my_channel / 2, s0, s1, epoch);
        if (my_channel == 0) send<float>(to, 0, largest, sum, epoch);
    }

    // Combines the splits in order, two channels a thread, and sends the output.
    __device__ __forceinline__ void combine_splits(const Task& t) const {
        constexpr int BATCH = 4;
        const uint64_t* const from = a.split_words + (int64_t(t.n) * a.NH + t.head0 + my_head) * a.kv_splits * (HS + 2);
        float max = -FLT_MAX, sum = 0, s0 = 0, s1 = 0;
#pragma unroll 1
        for (int first = 0; first < t.splits; first += BATCH) {
            ulonglong2 scale[BATCH], o[BATCH];
            bool pending = true;
            for (unsigned polls = 0; pending; polls++) {
                if (polls > MAX_POLLS) __trap();
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    const uint64_t* const at = from + int64_t(min(first + b, t.splits - 1)) * (HS + 2);
                    scale[b] = load_two(at);
                    o[b] = load_two(at + 2 + my_channel);
                }
                pending = false;
#pragma unroll
                for (int b = 0; b < BATCH; b++) pending |= !has_arrived(scale[b], epoch) || !has_arrived(o[b], epoch);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (first + b >= t.splits) break;
                const float split_max = __uint_as_float(uint32_t(scale[b].x)), larger = fmaxf(max, split_max);
                const float old = exp_for<T>(max - larger), weight = exp_for<T>(split_max - larger);
                sum = fmaf(__uint_as_float(uint32_t(scale[b].y)), weight, sum * old);
                s0 = fmaf(__uint_as_float(uint32_t(o[b].x)), weight, s0 * old);
                s1 = fmaf(__uint_as_float(uint32_t(o[b].y)), weight, s1 * old);
                max = larger;
            }
        }
        send<T>(att_words(t), t.head0 * HS / 2 + thread, s0 / sum, s1 / sum, epoch);
    }
};

}  // namespace fused_decode
