// A block works on one piece of one sequence's context for one KV head and some of the query heads that read it. There
// are two kernels: heads of 16-bit numbers stream through shared memory to tensor cores (decode_stream.cuh); fp32, long
// heads and what is not aligned take decode_split.cuh's phases: scores, softmax, values. The block whose piece ends the
// context turns and appends the new key, and its value.
//
// The blocks of a sequence and KV head count themselves off in an integer; the last one combines what all have left, in
// order of pieces, so that the result does not depend on which one that was. It leaves the count at 0 for the next
// call.
#include "kernels/generation/decode_attention.h"

#include "kernels/cuda/pdl.cuh"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/decode_split.cuh"
#include "kernels/generation/decode_stream.cuh"
#include "kernels/generation/kv_rotate.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int64_t MAX_HS = 256;

// What a block is to do: a piece of sequence n for query heads head0, head0 + 1, … which read KV head kv.
struct Task {
    int n, kv, head0, heads;
    int piece, used;  // used: pieces of the sequence
    int keys;         // of the piece
    int64_t start;    // of its first key in the cache

    __device__ __forceinline__ bool ends_context() const { return piece == used - 1; }
};

template <typename T>
struct Decode {
    T *out, *k_cache, *v_cache;
    const T* qkv;
    const int32_t *slots, *positions;
    Angles angles;
    unsigned* counters;             // [N, NKV, passes]
    float *sums, *maxima, *totals;  // of pieces: Σ p·v [N, pieces, NH, HS]; maximum, Σ p [N, pieces, NH]
    int64_t out_stride, qkv_stride, num_slots, capacity;
    int NH, NKV, HS, pieces, passes;  // passes: blocks for each piece and KV head
    int group;                        // query heads of a KV head
    int lanes;                        // decode_kernel: of a warp that share a key, a power of two
    bool inputs_ready;                // slots, positions and cache may be read before pdl_wait()
    float scale;

    __device__ __forceinline__ int64_t row() const { return int64_t(NKV) * HS; }
    // Of the blocks that share a sequence and KV head, and a pass.
    __device__ __forceinline__ unsigned* counter() const { return counters + blockIdx.z * gridDim.x + blockIdx.x; }
    // The new token's of a task; its value lies a row() behind its key.
    __device__ __forceinline__ const T* queries(const Task& t) const {
        return qkv + t.n * qkv_stride + int64_t(t.head0) * HS;
    }
    __device__ __forceinline__ const T* new_key(const Task& t) const {
        return qkv + t.n * qkv_stride + int64_t(NH + t.kv) * HS;
    }
};

// False where there is nothing to do. HEADS: of a pass. piece_of(length): keys of a piece.
template <int HEADS, typename T, typename PieceOf>
__device__ __forceinline__ bool find_task(const Decode<T>& a, Task& t, PieceOf piece_of) {
    t.n = blockIdx.z, t.kv = a.passes == 1 ? blockIdx.x : blockIdx.x / a.passes, t.piece = blockIdx.y;
    const int pass = blockIdx.x - t.kv * a.passes;
    t.head0 = t.kv * a.group + pass * HEADS, t.heads = min(HEADS, a.group - pass * HEADS);
    const int position = a.positions[t.n], slot = a.slots[t.n];
    if (position < 0 || position >= a.capacity || slot < 0 || slot >= a.num_slots) {  // finished
        T* const out = a.out + t.n * a.out_stride + int64_t(t.head0) * a.HS;
        pdl_wait();
        if (t.piece == 0)
            for (int i = threadIdx.x; i < t.heads * a.HS; i += THREADS) out[i] = T{};
        return false;
    }
    const unsigned length = unsigned(position) + 1, keys = piece_of(length), begin = unsigned(t.piece) * keys;
    t.used = int((length + keys - 1) / keys);
    if (t.piece >= t.used || t.used > a.pieces) return false;
    t.keys = int(min(keys, length - begin));
    t.start = (slot * a.capacity + begin) * a.row() + int64_t(t.kv) * a.HS;
    return true;
}

// A warp takes 8·W channels of a head from 32 pieces at a time: W of every fourth piece a lane. All that it reads is
// asked for before anything waits, and earlier sums shrink where the maximum grows.
template <int W, typename T>
__device__ __forceinline__ void combine_pieces(const Decode<T>& a, const Task& t, T* out) {
    constexpr int SIDE = 8, ROWS = WARP / SIDE, ROUNDS = WARP / ROWS;
    const int lane = threadIdx.x % WARP, strips = (a.HS + SIDE * W - 1) / (SIDE * W);
#pragma unroll 1
    for (int i = int(threadIdx.x) / WARP; i < t.heads * strips; i += WARPS) {
        const int h = i / strips, c = (i - h * strips) * SIDE * W + lane % SIDE * W;
        const auto index = [&](int p) { return (int64_t(t.n) * a.pieces + p) * a.NH + t.head0 + h; };
        float max = -INFINITY, total = 0;
        Floats<W> x{};
#pragma unroll 1
        for (int first = 0; first < t.used; first += WARP) {
            const int mine = first + lane;
            const float piece_max = mine < t.used ? __ldcg(a.maxima + index(mine)) : -INFINITY,
                        piece_total = mine < t.used ? __ldcg(a.totals + index(mine)) : 0.0f;
            Floats<W> part[ROUNDS] = {};
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int p = first + r * ROWS + lane / SIDE;
                if (p >= t.used || c >= a.HS) continue;
                const float* const from = a.sums + index(p) * a.HS + c;
                if constexpr (W == 4) {
                    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
                    part[r] = {{four.x, four.y, four.z, four.w}};
                } else {
                    part[r][0] = __ldcg(from);
                }
            }
            const float highest = nan_max(max, warp_max(piece_max)), shrink = expf(max - highest),
                        weight = expf(piece_max - highest);
            max = highest;
            total = total * shrink + warp_sum(weight * piece_total);
#pragma unroll
            for (int k = 0; k < W; k++) x[k] *= shrink;
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

// Of a piece's head: maximum of the scores, Σ exp(S − maximum).
struct HeadStats {
    float max, total;
};

// The end of a block: the result, or a part of it that the last block combines with the others. stats(h), sum(h, c):
// of this block's heads, there for all threads.
template <bool WIDE, typename T, typename Stats, typename Sum>
__device__ __forceinline__ void finish(const Decode<T>& a, const Task& t, Stats stats, Sum sum) {
    __shared__ bool last_block;
    T* const out = a.out + t.n * a.out_stride + int64_t(t.head0) * a.HS;
    const int64_t first = (int64_t(t.n) * a.pieces + t.piece) * a.NH + t.head0;
    for (int i = threadIdx.x; i < t.heads * a.HS; i += THREADS) {
        const int h = i / a.HS, c = i - h * a.HS;
        const auto of_head = stats(h);
        const float x = sum(of_head, h, c);
        if (t.used == 1) {
            out[i] = from_float<T>(x / of_head.total);
            continue;
        }
        a.sums[first * a.HS + i] = x;
        if (c == 0) a.maxima[first + h] = of_head.max, a.totals[first + h] = of_head.total;
    }
    if (t.used == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // for all threads of the block: the barrier has ordered their writes before it
        last_block = atomicAdd(a.counter(), 1u) == unsigned(t.used - 1);
        if (last_block) *a.counter() = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last_block) return;
    combine_pieces<WIDE ? 4 : 1>(a, t, out);
}

// --- any dtype and head size

// W elements a vector, V vectors a lane for a key: channel (v·lanes + lane)·W + k of a head.
template <int W, int V, int HEADS, typename T>
__global__ void __launch_bounds__(THREADS) decode_kernel(const Decode<T> a) {
    __shared__ float scores[HEADS][DECODE_PIECE];
    __shared__ float queries[HEADS][MAX_HS];
    __shared__ float sums[WARPS][HEADS][MAX_HS];
    __shared__ float maxima[HEADS], totals[HEADS];
    pdl_launch_dependents();
    pdl_wait();
    Task t;
    if (!find_task<HEADS>(a, t, [](unsigned) { return unsigned(DECODE_PIECE); })) return;

    const int HS = a.HS;
    const int64_t row = a.row();
    const float* const turn = a.angles.of(t.n);
    if (t.ends_context()) {
        // Every pass of a KV head writes the same, each for itself to read.
        const int64_t to = t.start + (t.keys - 1) * row;
        const T *const k = a.new_key(t), *const v = k + row;
        for (int c = threadIdx.x; c < HS; c += THREADS) {
            a.k_cache[to + c] = from_float<T>(rotated(k, c, turn, a.angles.pairs));
            a.v_cache[to + c] = v[c];
        }
    }
    const T* const q = a.queries(t);
    for (int i = threadIdx.x; i < HEADS * HS; i += THREADS) {
        const int h = i / HS, c = i - h * HS;
        queries[h][c] = h < t.heads ? a.scale * rotated(q + h * HS, c, turn, a.angles.pairs) : 0.0f;
    }
    __syncthreads();

    const Piece<WARPS, HEADS> work{&queries[0][0], &scores[0][0], &sums[0][0][0], maxima, totals, int(MAX_HS)};
    attend_piece<W, V,
                 V == 1   ? 4
                 : V == 2 ? 2
                          : 1>(work, a.k_cache + t.start, a.v_cache + t.start, row, t.keys, t.heads, HS, a.lanes,
                               [] { __syncthreads(); });
    finish<(W > 1)>(
        a, t,
        [&](int h) {
            return HeadStats{maxima[h], totals[h]};
        },
        [&](const HeadStats&, int h, int c) { return work.sum(h, c); });
}

// --- heads of 16-bit numbers

constexpr int64_t MAX_STREAM_HS = 128;

// Tiles of a warp under way, and blocks that share an SM's memory so. Where there are many blocks, all of
// them should run at once: heads of 64 have room for six of two tiles. Where there are few, they should ask for more.
template <int D, bool MANY>
constexpr int STREAM_STAGES = D <= 32            ? (MANY ? 3 : 5)
                              : D <= 64 && !MANY ? 3
                                                 : 2;
template <int D, bool MANY>
constexpr int STREAM_BLOCKS = D <= 64 && MANY ? 6 : 3;

template <int D, bool MANY, typename T>
__global__ void __launch_bounds__(THREADS, STREAM_BLOCKS<D, MANY>) stream_kernel(const Decode<T> a) {
    using Stream = KeyStream<T, D, STREAM_STAGES<D, MANY>, WARPS>;
    extern __shared__ __align__(16) char memory[];
    T* const queries = reinterpret_cast<T*>(memory + Stream::BYTES);  // [2, heads] rows, PITCH apart
    __shared__ T new_key[D], new_value[D];
    pdl_launch_dependents();
    // The keys that went by since the last call have pushed the counter out of L2.
    if (threadIdx.x == 0) prefetch_line(a.counter());
    if (!a.inputs_ready) pdl_wait();
    Task t;
    if (!find_task<STREAM_HEADS>(a, t, stream_piece)) return;

    const int cached = t.keys - t.ends_context();
    Stream stream(memory, Stretch<T>{a.k_cache + t.start, a.v_cache + t.start, a.row(), a.HS, t.keys, cached, new_key,
                                     new_value});
    const float* const turn = a.angles.of(t.n);
    pdl_wait();
    // While the first keys are on their way: the new key, which every pass of a KV head appends, a channel a thread,
    // from the last thread on, so that one query head is the work of other warps; then the query heads.
    static_assert(D <= THREADS);
    const int channel = THREADS - 1 - int(threadIdx.x);
    const bool appends = t.ends_context() && channel < a.HS;
    T key{}, value{};
    if (appends) {
        const T* const k = a.new_key(t);
        value = k[a.row() + channel];
        key = from_float<T>(rotated(k, channel, turn, a.angles.pairs));
    }
    const T* const q = a.queries(t);
    const float scale = a.scale * LOG2E;
#pragma unroll 2
    for (int i = threadIdx.x; i < t.heads * D; i += THREADS) {
        const int h = i / D, c = i % D;
        const float x = c < a.HS ? scale * rotated(q + h * a.HS, c, turn, a.angles.pairs) : 0.0f;
        queries[h * PITCH<T, D> + c] = from_float<T>(x);
        queries[(t.heads + h) * PITCH<T, D> + c] = from_float<T>(x - rounded_to<T>(x));
    }
    if (appends) {
        const int64_t to = t.start + cached * a.row() + channel;
        a.k_cache[to] = new_key[channel] = key;
        a.v_cache[to] = new_value[channel] = value;
    }
    __syncthreads();
    stream.run(queries, t.heads);
    finish<true>(
        a, t, [&](int h) { return stream.weights(h); },
        [&](const typename Stream::Weights& w, int h, int c) { return stream.sum(w, h, c); });
}

// One block, so that all threads have read `turn` before it changes.
__global__ void advance_kernel(int32_t* positions, int64_t* steps, const int32_t* ids, int32_t* told,
                               int64_t told_stride, int32_t* turn, int64_t N) {
    pdl_wait();
    pdl_launch_dependents();
    const int row = *turn;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
        told[row * told_stride + n] = ids[n];
        if (positions[n] >= 0) positions[n]++;
        steps[n]++;
    }
    if (threadIdx.x == 0) *turn = row ^ 1;
}

int64_t counter_bytes(int64_t N, int64_t NH) {
    return (N * NH * int64_t(sizeof(unsigned)) + 255) / 256 * 256;
}

int64_t partial_bytes(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return N * decode_pieces(max_length) * NH * (HS + 2) * int64_t(sizeof(float));
}

template <typename T>
void launch(const char* op, void (*kernel)(Decode<T>), Decode<T> a, int64_t N, int heads, int64_t shared_bytes,
            Stream stream) {
    a.passes = int(ceil_div(a.group, heads));
    const dim3 grid(unsigned(a.NKV * a.passes), unsigned(a.pieces), unsigned(N));
    launch_pdl(op, kernel, grid, THREADS, size_t(shared_bytes), stream, a);
}

template <int W, int V, typename T>
void launch_any(const char* op, const Decode<T>& a, int64_t N, Stream stream) {
    constexpr int WIDE_HEADS = 4;
    if (a.NH == a.NKV)
        launch(op, decode_kernel<W, V, 1, T>, a, N, 1, 0, stream);
    else
        launch(op, decode_kernel<W, V, WIDE_HEADS, T>, a, N, WIDE_HEADS, 0, stream);
}

template <int D, bool MANY, typename T>
void launch_stream(const char* op, const Decode<T>& a, int64_t N, Stream stream) {
    const int64_t queries = 2 * std::min(a.group, STREAM_HEADS) * PITCH<T, D> * int64_t(sizeof(T)),
                  bytes = KeyStream<T, D, STREAM_STAGES<D, MANY>, WARPS>::BYTES + queries;
    const auto kernel = stream_kernel<D, MANY, T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
    launch(op, kernel, a, N, STREAM_HEADS, bytes, stream);
}

template <typename T>
void launch_stream(const char* op, Decode<T> a, int64_t N, int64_t max_length, Stream stream) {
    a.pieces = int(stream_pieces(unsigned(max_length)));
    const int64_t blocks = N * a.pieces * a.NKV * ceil_div(a.group, STREAM_HEADS);
    const bool many = blocks > 3 * num_sms();
    if (a.HS <= 32)
        return many ? launch_stream<32, true>(op, a, N, stream) : launch_stream<32, false>(op, a, N, stream);
    if (a.HS <= 64)
        return many ? launch_stream<64, true>(op, a, N, stream) : launch_stream<64, false>(op, a, N, stream);
    if (a.HS <= 96) return launch_stream<96, true>(op, a, N, stream);
    launch_stream<int(MAX_STREAM_HS), true>(op, a, N, stream);
}

}  // namespace

int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return counter_bytes(N, NH) + partial_bytes(N, NH, HS, max_length);
}

void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodeLocation& place, float scale,
                      Tensor scratch, Stream stream) {
    const char* op = "decode_attention";
    const DType dtype = check_activation_dtype(op, "qkv", qkv);
    const DecodeSizes z = check_decode_attention(op, dtype, out, qkv, k_cache, v_cache, place, scale, scratch);
    require(z.HS <= MAX_HS, op, ": head size ", z.HS, " lies outside [1, ", MAX_HS, "]");
    require(z.N <= 65535 && z.NH <= 65535, op, ": ", z.N, " sequences of ", z.NH, " heads; at most 65535 of each");
    const int64_t pieces = decode_pieces(place.max_length);
    require(pieces <= 65535, op, ": sequences of ", place.max_length, " tokens; at most ", 65535 * DECODE_PIECE);
    if (z.N == 0 || place.max_length == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Decode<T> a{};
        a.out = out.as<T>(), a.k_cache = k_cache.as<T>(), a.v_cache = v_cache.as<T>(), a.qkv = qkv.as<T>();
        a.slots = place.slots.as<int32_t>(), a.positions = place.positions.as<int32_t>();
        if (place.table)
            a.angles = {place.angles.as<int32_t>(), place.table.as<float>(), place.table.shape[0], int(z.half)};
        a.counters = static_cast<unsigned*>(scratch.data);
        // At the end of scratch, so that a call with fewer sequences writes no other call's counters.
        const int64_t bytes = partial_bytes(z.N, z.NH, z.HS, place.max_length), heads = z.N * pieces * z.NH;
        a.sums = reinterpret_cast<float*>(static_cast<char*>(scratch.data) + (scratch.bytes() - bytes) / 16 * 16);
        a.maxima = a.sums + heads * z.HS, a.totals = a.maxima + heads;
        a.out_stride = row_stride(out), a.qkv_stride = row_stride(qkv);
        a.num_slots = z.slots, a.capacity = z.capacity;
        a.NH = int(z.NH), a.NKV = int(z.NKV), a.HS = int(z.HS), a.group = a.NH / a.NKV;
        a.pieces = int(pieces);
        a.inputs_ready = place.inputs_ready;
        a.scale = scale;
        const bool full = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({k_cache, v_cache, scratch});
        if constexpr (!std::is_same_v<T, float>) {
            if (full && z.HS <= MAX_STREAM_HS) return launch_stream(op, a, z.N, place.max_length, stream);
        }
        const auto lanes_for = [](int64_t vectors) {
            int lanes = 1;
            while (lanes < vectors && lanes < WARP) lanes *= 2;
            return lanes;
        };
        if (!full) {
            a.lanes = lanes_for(z.HS);
            return launch_any<1, int(MAX_HS) / WARP>(op, a, z.N, stream);
        }
        constexpr int W = FULL_WIDTH<T>;
        a.lanes = lanes_for(z.HS / W);
        if constexpr (W * WARP < MAX_HS) {
            if (z.HS > W * WARP) return launch_any<W, 2>(op, a, z.N, stream);
        }
        launch_any<W, 1>(op, a, z.N, stream);
    });
}

void advance(Tensor positions, Tensor steps, Tensor ids, Tensor told, Tensor turn, Stream stream) {
    const char* op = "advance";
    check_advance(op, positions, steps, ids, told, turn);
    const int64_t N = positions.shape[0];
    if (N == 0) return;
    launch_pdl(op, advance_kernel, 1, 256, 0, stream, positions.as<int32_t>(), steps.as<int64_t>(), ids.as<int32_t>(),
               told.as<int32_t>(), told.stride[0], turn.as<int32_t>(), N);
}
