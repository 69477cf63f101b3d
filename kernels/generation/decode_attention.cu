// A block works on one KV split of one sequence, for one KV head and a tile of the query heads that read it. There are
// two kernels. mma_kernel (decode_attention_mma.cuh) streams 16-bit keys and values through shared memory to the tensor
// cores. simt_kernel (decode_attention_simt.cuh) takes fp32, heads wider than 128 and unaligned caches. The block with
// the last split of a context rotates the new key and appends it and its value to the cache.
//
// The blocks of a sequence and query tile count themselves in an integer. The last one to finish combines the splits in
// their order, so that the result does not depend on which block that is, and resets the count for the next call.
//
// Resources (sm_90a, CUDA 13.0, 128 threads; registers of bf16, for simt_kernel of fp32). A tile is 16 keys and values
// of one warp, 64·(D + 8) bytes with 16-bit numbers. D is HS rounded up. Nothing spills but 8 bytes of simt_kernel.
//
//   kernel                       tiles per warp  KiB of shared memory  registers  blocks per SM
//   mma_kernel, D = 32, many           3                 30                76          6
//   mma_kernel, D = 32, few            5                 50               135          3
//   mma_kernel, D = 64, many           2                 36                80          6 (5 from 3 query heads a block)
//   mma_kernel, D = 64, few            3                 54               144          3
//   mma_kernel, D = 96                 2                 52               158          3
//   mma_kernel, D = 128                2                 68               168          3
//   simt_kernel, 1 query head          -                  6               128          4
//   simt_kernel, 4 query heads         -                 24               145          3
//
// Launch: (NKV·query tiles, splits, N) blocks; "many" are more than 3 per SM. One sequence of 1,024 keys has 4 splits:
// GPT-2 124M (12 heads of 64) launches 12·4 = 48 blocks on the 132 SMs of an H100, a LLaMA of 1B (32 heads of 64 on 8
// KV heads) 8·4 = 32. 64 such sequences launch 3,072 and 2,048 blocks, which run 6 and 5 at a time on each SM.
#include "kernels/generation/decode_attention.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/decode_attention_mma.cuh"
#include "kernels/generation/decode_attention_simt.cuh"
#include "kernels/generation/kv_rotate.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int64_t MAX_HS = 256;

// The work of a block: a KV split of sequence n for query heads head0, head0 + 1, …, which read KV head kv.
struct Task {
    int n, kv, head0, heads;
    int split, splits;    // splits: of the sequence
    int keys, first;      // of the split; position of the first
    SequencePages pages;  // of the sequence

    __device__ __forceinline__ bool ends_context() const { return split == splits - 1; }
};

template <typename T>
struct Arguments {
    T *out, *k_cache, *v_cache;
    const T* qkv;
    const int32_t *slots, *positions;
    Angles angles;
    unsigned* counters;             // [N, NKV, query_tiles]
    float *sums, *maxima, *totals;  // Σ p·v [N, splits, NH, HS]; maximum, Σ p [N, splits, NH]
    const int32_t* pages;           // [num_slots, page_columns]
    int64_t out_stride, qkv_stride, num_slots;
    int page_columns, num_pages;
    int NH, NKV, HS;
    int splits;         // of the longest sequence
    int query_tiles;    // blocks for each split and KV head: group / heads of a block
    int group;          // query heads of a KV head
    int lanes;          // simt_kernel: lanes that share a key, a power of two
    bool inputs_ready;  // slots, positions and cache may be read before pdl_wait()
    float scale;
    int window;  // 0: none

    __device__ __forceinline__ int64_t row() const { return int64_t(NKV) * HS; }
    // Shared by the blocks of a sequence, KV head and query tile.
    __device__ __forceinline__ unsigned* counter() const { return counters + blockIdx.z * gridDim.x + blockIdx.x; }
    // The new token's q and k of a task; v follows k after row() elements.
    __device__ __forceinline__ const T* queries(const Task& t) const {
        return qkv + t.n * qkv_stride + int64_t(t.head0) * HS;
    }
    __device__ __forceinline__ const T* new_key(const Task& t) const {
        return qkv + t.n * qkv_stride + int64_t(NH + t.kv) * HS;
    }
    // The split's keys or values in the cache of a layer.
    __device__ __forceinline__ PagedKeys<T> keys_of(const Task& t, const T* cache) const {
        return {cache + int64_t(t.kv) * HS, row(), t.pages, t.first};
    }
};

// Returns false where there is nothing to do. HEADS: of a query tile. split_keys(length): keys of a split.
template <int HEADS, typename T, typename SplitKeys>
__device__ __forceinline__ bool find_task(const Arguments<T>& a, Task& t, SplitKeys split_keys) {
    t.n = blockIdx.z;
    t.kv = a.query_tiles == 1 ? blockIdx.x : blockIdx.x / a.query_tiles;
    t.split = blockIdx.y;
    const int tile = blockIdx.x - t.kv * a.query_tiles;
    t.head0 = t.kv * a.group + tile * HEADS;
    t.heads = min(HEADS, a.group - tile * HEADS);
    const int position = load_kept(a.positions + t.n), slot = load_kept(a.slots + t.n);
    if (position < 0 || position >= a.page_columns * int64_t(KV_PAGE) || slot < 0 || slot >= a.num_slots) {  // finished
        T* const out = a.out + t.n * a.out_stride + int64_t(t.head0) * a.HS;
        pdl_wait();
        if (t.split == 0)
            for (int i = threadIdx.x; i < t.heads * a.HS; i += THREADS) out[i] = T{};
        return false;
    }
    const unsigned tokens = unsigned(position) + 1, length = a.window ? min(tokens, unsigned(a.window)) : tokens,
                   keys = split_keys(length), begin = unsigned(t.split) * keys;
    t.splits = int((length + keys - 1) / keys);
    if (t.split >= t.splits || t.splits > a.splits) return false;
    t.keys = int(min(keys, length - begin));
    t.first = int(tokens - length + begin);
    t.pages = {a.pages + int64_t(slot) * a.page_columns, a.page_columns, a.num_pages};
    return true;
}

// Each warp combines 8·W channels of a head over 32 splits at a time; a lane takes W channels of every fourth split.
// All loads are issued before the first is used. Earlier sums are rescaled where the maximum grows.
template <int W, typename T>
__device__ __forceinline__ void combine_splits(const Arguments<T>& a, const Task& t, T* out) {
    constexpr int SIDE = 8, ROWS = WARP / SIDE, ROUNDS = WARP / ROWS;
    const int lane = threadIdx.x % WARP, strips = (a.HS + SIDE * W - 1) / (SIDE * W);
#pragma unroll 1
    for (int i = int(threadIdx.x) / WARP; i < t.heads * strips; i += WARPS) {
        const int h = i / strips, c = (i - h * strips) * SIDE * W + lane % SIDE * W;
        const auto index = [&](int p) { return (int64_t(t.n) * a.splits + p) * a.NH + t.head0 + h; };
        float max = -INFINITY, total = 0;
        Floats<W> x{};
#pragma unroll 1
        for (int first = 0; first < t.splits; first += WARP) {
            const int mine = first + lane;
            const float split_max = mine < t.splits ? __ldcg(a.maxima + index(mine)) : -INFINITY,
                        split_total = mine < t.splits ? __ldcg(a.totals + index(mine)) : 0.0f;
            Floats<W> part[ROUNDS] = {};
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int p = first + r * ROWS + lane / SIDE;
                if (p >= t.splits || c >= a.HS) continue;
                const float* const from = a.sums + index(p) * a.HS + c;
                if constexpr (W == 4) {
                    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
                    part[r] = {{four.x, four.y, four.z, four.w}};
                } else {
                    part[r][0] = __ldcg(from);
                }
            }
            const float highest = nan_max(max, warp_max(split_max)), rescale = expf(max - highest),
                        weight = expf(split_max - highest);
            max = highest;
            total = total * rescale + warp_sum(weight * split_total);
#pragma unroll
            for (int k = 0; k < W; k++) x[k] *= rescale;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const float w = __shfl_sync(ALL_LANES, weight, r * ROWS + lane / SIDE);
#pragma unroll
                for (int k = 0; k < W; k++) x[k] += w * part[r][k];
            }
        }
#pragma unroll
        for (int k = 0; k < W; k++) {
            for (int offset = SIDE; offset < WARP; offset *= 2) x[k] += __shfl_xor_sync(ALL_LANES, x[k], offset);
            if (lane < SIDE && c < a.HS) out[h * a.HS + c + k] = from_float<T>(x[k] / total);
        }
    }
}

// One head of a split: maximum of the scores, Σ exp(S − maximum).
struct HeadStats {
    float max, total;
};

// Stores the block's result: to out if it has the only split, else to scratch, where the last block to finish combines
// all. stats(h) and sum(stats, h, c) give the results of the block's heads to every thread.
template <bool VECTORS, typename T, typename Stats, typename Sum>
__device__ __forceinline__ void finish(const Arguments<T>& a, const Task& t, Stats stats, Sum sum) {
    __shared__ bool last_block;
    T* const out = a.out + t.n * a.out_stride + int64_t(t.head0) * a.HS;
    const int64_t first = (int64_t(t.n) * a.splits + t.split) * a.NH + t.head0;
    for (int i = threadIdx.x; i < t.heads * a.HS; i += THREADS) {
        const int h = i / a.HS, c = i - h * a.HS;
        const auto of_head = stats(h);
        const float x = sum(of_head, h, c);
        if (t.splits == 1) {
            out[i] = from_float<T>(x / of_head.total);
            continue;
        }
        a.sums[first * a.HS + i] = x;
        if (c == 0) {
            a.maxima[first + h] = of_head.max;
            a.totals[first + h] = of_head.total;
        }
    }
    if (t.splits == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // for the whole block: the barrier ordered its writes before this
        last_block = atomicAdd(a.counter(), 1u) == unsigned(t.splits - 1);
        if (last_block) *a.counter() = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last_block) return;
    combine_splits<VECTORS ? 4 : 1>(a, t, out);
}

// --- any dtype and head size

// W elements a vector, V vectors a lane for a key: channel (v·lanes + lane)·W + k of a head.
template <int W, int V, int HEADS, typename T>
__global__ void __launch_bounds__(THREADS) simt_kernel(const Arguments<T> a) {
    __shared__ float scores[HEADS][SIMT_SPLIT_KEYS];
    __shared__ float queries[HEADS][MAX_HS];
    __shared__ float sums[WARPS][HEADS][MAX_HS];
    __shared__ float maxima[HEADS], totals[HEADS];
    pdl_launch_dependents();
    pdl_wait();
    Task t;
    if (!find_task<HEADS>(a, t, [](unsigned) { return unsigned(SIMT_SPLIT_KEYS); })) return;

    const int HS = a.HS;
    const int64_t row = a.row();
    const float* const rotation = a.angles.of(t.n);
    if (t.ends_context()) {
        // Every query tile of a KV head writes the same values, which it reads itself.
        const int64_t to = t.pages.row(t.first + t.keys - 1) * row + int64_t(t.kv) * HS;
        const T *const k = a.new_key(t), *const v = k + row;
        for (int c = threadIdx.x; c < HS; c += THREADS) {
            a.k_cache[to + c] = from_float<T>(rotated(k, c, rotation, a.angles.pairs));
            a.v_cache[to + c] = v[c];
        }
    }
    const T* const q = a.queries(t);
    for (int i = threadIdx.x; i < HEADS * HS; i += THREADS) {
        const int h = i / HS, c = i - h * HS;
        queries[h][c] = h < t.heads ? a.scale * rotated(q + h * HS, c, rotation, a.angles.pairs) : 0.0f;
    }
    __syncthreads();

    const SplitWorkspace<WARPS, HEADS> work{&queries[0][0], &scores[0][0], &sums[0][0][0], maxima, totals, int(MAX_HS)};
    constexpr int BATCH = V == 1 ? 4 : V == 2 ? 2 : 1;
    attend_split<W, V, BATCH>(work, a.keys_of(t, a.k_cache), a.keys_of(t, a.v_cache), t.keys, t.heads, HS, a.lanes);
    finish<(W > 1)>(
        a, t,
        [&](int h) {
            return HeadStats{maxima[h], totals[h]};
        },
        [&](const HeadStats&, int h, int c) { return work.sum(h, c); });
}

// --- 16-bit dtypes on tensor cores

constexpr int64_t MAX_MMA_HS = 128;

// Tiles that a warp has in flight, and blocks that then fit in an SM's shared memory. With many blocks, as many as
// possible should run at once: six with two tiles for heads of 64. With few blocks, each should load more ahead.
template <int D, bool MANY_BLOCKS>
constexpr int MMA_STAGES = D <= 32                   ? (MANY_BLOCKS ? 3 : 5)
                           : D <= 64 && !MANY_BLOCKS ? 3
                                                     : 2;
template <int D, bool MANY_BLOCKS>
constexpr int MMA_BLOCKS = D <= 64 && MANY_BLOCKS ? 6 : 3;

template <int D, bool MANY_BLOCKS, typename T>
__global__ void __launch_bounds__(THREADS, MMA_BLOCKS<D, MANY_BLOCKS>) mma_kernel(const Arguments<T> a) {
    using Split = MmaSplit<T, D, MMA_STAGES<D, MANY_BLOCKS>, WARPS>;
    extern __shared__ __align__(16) char memory[];
    T* const queries = reinterpret_cast<T*>(memory + Split::BYTES);  // [2, heads] rows, PITCH apart
    __shared__ T new_key[D], new_value[D];
    pdl_launch_dependents();
    // The keys read since the last call have evicted the counter from L2.
    if (threadIdx.x == 0) prefetch_line(a.counter());
    if (!a.inputs_ready) pdl_wait();
    Task t;
    if (!find_task<MMA_HEADS>(a, t, mma_split_keys)) return;

    const int cached = t.keys - t.ends_context();
    Split split(memory, KvSplit<T>{a.keys_of(t, a.k_cache), a.v_cache + int64_t(t.kv) * a.HS, a.HS, t.keys, cached,
                                   new_key, new_value});
    const float* const rotation = a.angles.of(t.n);
    pdl_wait();
    // While the first keys arrive: the new key, one channel a thread, which every query tile of a KV head appends; then
    // the query heads. The channels of the key start at the last thread, so that other warps take the first query head.
    static_assert(D <= THREADS);
    const int channel = THREADS - 1 - int(threadIdx.x);
    const bool appends = t.ends_context() && channel < a.HS;
    T key{}, value{};
    if (appends) {
        const T* const k = a.new_key(t);
        value = k[a.row() + channel];
        key = from_float<T>(rotated(k, channel, rotation, a.angles.pairs));
    }
    const T* const q = a.queries(t);
    const float scale = a.scale * LOG2E;
#pragma unroll 2
    for (int i = threadIdx.x; i < t.heads * D; i += THREADS) {
        const int h = i / D, c = i % D;
        const float x = c < a.HS ? scale * rotated(q + h * a.HS, c, rotation, a.angles.pairs) : 0.0f;
        queries[h * PITCH<T, D> + c] = from_float<T>(x);
        queries[(t.heads + h) * PITCH<T, D> + c] = from_float<T>(x - rounded_to<T>(x));
    }
    if (appends) {
        const int64_t to = t.pages.row(t.first + cached) * a.row() + int64_t(t.kv) * a.HS + channel;
        a.k_cache[to] = new_key[channel] = key;
        a.v_cache[to] = new_value[channel] = value;
    }
    __syncthreads();
    split.run(queries, t.heads);
    finish<true>(
        a, t, [&](int h) { return split.weights(h); },
        [&](const typename Split::WarpWeights& w, int h, int c) { return split.sum(w, h, c); });
}

// One block, so that all threads have read the index before it changes.
__global__ void advance_kernel(int32_t* positions, int64_t* steps, const int32_t* ids, int32_t* host_tokens,
                               int64_t host_tokens_stride, int32_t* buffer_index, int64_t N) {
    pdl_wait();
    pdl_launch_dependents();
    const int row = *buffer_index;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
        host_tokens[row * host_tokens_stride + n] = ids[n];
        if (positions[n] >= 0) positions[n]++;
        steps[n]++;
    }
    if (threadIdx.x == 0) *buffer_index = row ^ 1;
}

int64_t counter_bytes(int64_t N, int64_t NH) {
    return (N * NH * int64_t(sizeof(unsigned)) + 255) / 256 * 256;
}

int64_t partial_bytes(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return N * simt_splits(max_length) * NH * (HS + 2) * int64_t(sizeof(float));
}

template <typename T>
void launch(const char* op, void (*kernel)(Arguments<T>), Arguments<T> a, int64_t N, int heads, int64_t shared_bytes,
            Stream stream) {
    a.query_tiles = int(ceil_div(a.group, heads));
    const dim3 grid(unsigned(a.NKV * a.query_tiles), unsigned(a.splits), unsigned(N));
    launch_pdl(op, kernel, grid, THREADS, size_t(shared_bytes), stream, a);
}

template <int W, int V, typename T>
void launch_simt(const char* op, const Arguments<T>& a, int64_t N, Stream stream) {
    constexpr int QUERY_TILE = 4;
    if (a.NH == a.NKV)
        launch(op, simt_kernel<W, V, 1, T>, a, N, 1, 0, stream);
    else
        launch(op, simt_kernel<W, V, QUERY_TILE, T>, a, N, QUERY_TILE, 0, stream);
}

template <int D, bool MANY_BLOCKS, typename T>
void launch_mma(const char* op, const Arguments<T>& a, int64_t N, Stream stream) {
    const int64_t queries = 2 * std::min(a.group, MMA_HEADS) * PITCH<T, D> * int64_t(sizeof(T)),
                  bytes = MmaSplit<T, D, MMA_STAGES<D, MANY_BLOCKS>, WARPS>::BYTES + queries;
    const auto kernel = mma_kernel<D, MANY_BLOCKS, T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
    launch(op, kernel, a, N, MMA_HEADS, bytes, stream);
}

template <typename T>
void launch_mma(const char* op, Arguments<T> a, int64_t N, int64_t max_length, Stream stream) {
    a.splits = int(mma_splits(unsigned(max_length)));
    const int64_t blocks = N * a.splits * a.NKV * ceil_div(a.group, MMA_HEADS);
    const bool many = blocks > 3 * num_sms();
    if (a.HS <= 32) return many ? launch_mma<32, true>(op, a, N, stream) : launch_mma<32, false>(op, a, N, stream);
    if (a.HS <= 64) return many ? launch_mma<64, true>(op, a, N, stream) : launch_mma<64, false>(op, a, N, stream);
    if (a.HS <= 96) return launch_mma<96, true>(op, a, N, stream);
    launch_mma<int(MAX_MMA_HS), true>(op, a, N, stream);
}

}  // namespace

int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return counter_bytes(N, NH) + partial_bytes(N, NH, HS, max_length);
}

void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodeBatch& batch, int64_t window,
                      float scale, Tensor scratch, Stream stream) {
    const char* op = "decode_attention";
    const DType dtype = check_activation_dtype(op, "qkv", qkv);
    const DecodeSizes z = check_decode_attention(op, dtype, out, qkv, k_cache, v_cache, batch, window, scale);
    check_scratch(op, scratch, decode_attention_scratch(z.N, z.NH, z.HS, batch.max_length));
    require(z.HS <= MAX_HS, op, ": head size ", z.HS, " lies outside [1, ", MAX_HS, "]");
    require(z.N <= 65535 && z.NH <= 65535, op, ": ", z.N, " sequences of ", z.NH, " heads; at most 65535 of each");
    const int64_t longest = window ? std::min(window, batch.max_length) : batch.max_length;  // keys of a sequence
    const int64_t splits = simt_splits(longest);
    require(splits <= 65535, op, ": sequences of ", longest, " tokens; at most ", 65535 * SIMT_SPLIT_KEYS);
    if (z.N == 0 || longest == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Arguments<T> a{};
        a.out = out.as<T>();
        a.k_cache = k_cache.as<T>();
        a.v_cache = v_cache.as<T>();
        a.qkv = qkv.as<T>();
        a.slots = batch.slots.as<int32_t>();
        a.positions = batch.positions.as<int32_t>();
        if (batch.table)
            a.angles = {batch.angles.as<int32_t>(), batch.table.as<float>(), batch.table.shape[0], int(z.rope_pairs)};
        a.counters = static_cast<unsigned*>(scratch.data);
        // At the end of scratch, so that a call with fewer sequences does not write over the counters of others.
        const int64_t bytes = partial_bytes(z.N, z.NH, z.HS, longest), heads = z.N * splits * z.NH;
        a.sums = reinterpret_cast<float*>(static_cast<char*>(scratch.data) + (scratch.bytes() - bytes) / 16 * 16);
        a.maxima = a.sums + heads * z.HS;
        a.totals = a.maxima + heads;
        a.out_stride = row_stride(out);
        a.qkv_stride = row_stride(qkv);
        a.pages = z.pages.table;
        a.num_slots = z.slots;
        a.page_columns = int(z.pages.columns);
        a.num_pages = int(z.pages.pages);
        a.NH = int(z.NH);
        a.NKV = int(z.NKV);
        a.HS = int(z.HS);
        a.group = a.NH / a.NKV;
        a.splits = int(splits);
        a.inputs_ready = batch.inputs_ready;
        a.scale = scale;
        a.window = int(window);
        const bool full = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({k_cache, v_cache, scratch});
        if constexpr (!std::is_same_v<T, float>) {
            if (full && z.HS <= MAX_MMA_HS) return launch_mma(op, a, z.N, longest, stream);
        }
        const auto lanes_for = [](int64_t vectors) {
            int lanes = 1;
            while (lanes < vectors && lanes < WARP) lanes *= 2;
            return lanes;
        };
        if (!full) {
            a.lanes = lanes_for(z.HS);
            return launch_simt<1, int(MAX_HS) / WARP>(op, a, z.N, stream);
        }
        constexpr int W = FULL_WIDTH<T>;
        a.lanes = lanes_for(z.HS / W);
        if constexpr (W * WARP < MAX_HS) {
            if (z.HS > W * WARP) return launch_simt<W, 2>(op, a, z.N, stream);
        }
        launch_simt<W, 1>(op, a, z.N, stream);
    });
}

void advance(Tensor positions, Tensor steps, Tensor ids, Tensor host_tokens, Tensor buffer_index, Stream stream) {
    const char* op = "advance";
    check_advance(op, positions, steps, ids, host_tokens, buffer_index);
    const int64_t N = positions.shape[0];
    if (N == 0) return;
    launch_pdl(op, advance_kernel, 1, 256, 0, stream, positions.as<int32_t>(), steps.as<int64_t>(), ids.as<int32_t>(),
               host_tokens.as<int32_t>(), host_tokens.stride[0], buffer_index.as<int32_t>(), N);
}
