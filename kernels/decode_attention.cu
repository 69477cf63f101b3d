// A block works on one piece of one sequence's context for one KV head and up to HEADS of the query heads that read it:
// scores of all keys, softmax, weighted sum of values. Groups of lanes own a key each; q and the sums over values stay
// in registers. The block whose piece ends the context first appends the new key and value, and reads them back like
// all others.
//
// The blocks of a sequence and KV head count themselves off in an integer; the last one combines what all have left, in
// order of pieces, so that the result does not depend on which one that was. It leaves the count at 0 for the next
// call.
#include "kernels/decode_attention.h"

#include "kernels/decode_attention_check.h"
#include "kernels/decode_piece.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/kv_rotate.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int64_t MAX_HS = 256;

template <typename T>
struct Decode {
    T *out, *k_cache, *v_cache;
    const T* qkv;
    const int32_t *slots, *positions;
    Angles angles;
    unsigned* counters;  // [N, NKV, passes]
    float* partials;     // [N, pieces, NH, HS + 2]: maximum, sum, Σ p·v
    int64_t out_stride, qkv_stride, num_slots, capacity;
    int NH, NKV, HS, pieces, passes;  // passes: blocks for each piece and KV head, of HEADS query heads each
    int lanes;                        // of a warp that share a key: a power of two
    float scale;
};

// W elements a vector, V vectors a lane for a key: channel (v·lanes + lane)·W + k of a head.
template <int W, int V, int HEADS, typename T>
__global__ void __launch_bounds__(THREADS) decode_kernel(const Decode<T> a) {
    __shared__ float scores[HEADS][DECODE_PIECE];
    __shared__ float queries[HEADS][MAX_HS];
    __shared__ float sums[WARPS][HEADS][MAX_HS];
    __shared__ float maxima[HEADS], totals[HEADS];
    __shared__ bool last_block;
    let_next_start();
    wait_for_previous();

    const int n = blockIdx.z, kv = blockIdx.y / a.passes, pass = blockIdx.y % a.passes, piece = blockIdx.x;
    const int HS = a.HS, group = a.NH / a.NKV, head0 = kv * group + pass * HEADS;
    const int heads = min(HEADS, group - pass * HEADS);
    const int64_t position = a.positions[n], slot = a.slots[n];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    T* const out = a.out + n * a.out_stride + int64_t(head0) * HS;
    if (position < 0 || position >= a.capacity || slot < 0 || slot >= a.num_slots) {  // finished
        if (piece == 0)
            for (int i = threadIdx.x; i < heads * HS; i += THREADS) out[i] = T{};
        return;
    }
    const int64_t length = position + 1, begin = piece * DECODE_PIECE;
    const int used = int(ceil_div(length, DECODE_PIECE));
    if (piece >= used || used > a.pieces) return;
    const int keys = int(min(DECODE_PIECE, length - begin));
    const int64_t row = int64_t(a.NKV) * HS, start = (slot * a.capacity + begin) * row + int64_t(kv) * HS;
    const T* const qkv = a.qkv + n * a.qkv_stride;
    const float* const turn = a.angles.of(n);

    if (piece == used - 1) {
        // Every pass of a KV head writes the same, each for itself to read.
        const T* const k = qkv + int64_t(a.NH + kv) * HS;
        const T* const v = qkv + int64_t(a.NH + a.NKV + kv) * HS;
        const int64_t to = start + (keys - 1) * row;
        for (int c = threadIdx.x; c < HS; c += THREADS) {
            a.k_cache[to + c] = from_float<T>(rotated(k, c, turn, a.angles.pairs));
            a.v_cache[to + c] = v[c];
        }
    }
    for (int i = threadIdx.x; i < HEADS * HS; i += THREADS) {
        const int h = i / HS, c = i - h * HS;
        queries[h][c] = h < heads ? a.scale * rotated(qkv + int64_t(head0 + h) * HS, c, turn, a.angles.pairs) : 0.0f;
    }
    __syncthreads();

    const Piece<WARPS, HEADS> work{&queries[0][0], &scores[0][0], &sums[0][0][0], maxima, totals, int(MAX_HS)};
    attend_piece<W, V,
                 V == 1   ? 4
                 : V == 2 ? 2
                          : 1>(work, a.k_cache + start, a.v_cache + start, row, keys, heads, HS, a.lanes,
                               [] { __syncthreads(); });
    const auto piece_sum = [&](int h, int c) { return work.sum(h, c); };
    if (used == 1) {
        for (int i = threadIdx.x; i < heads * HS; i += THREADS) {
            const int h = i / HS, c = i - h * HS;
            out[i] = from_float<T>(piece_sum(h, c) / totals[h]);
        }
        return;
    }

    const int64_t floats = HS + 2;
    const auto partial = [&](int p, int h) {
        return a.partials + ((int64_t(n) * a.pieces + p) * a.NH + head0 + h) * floats;
    };
    for (int i = threadIdx.x; i < heads * HS; i += THREADS) {
        const int h = i / HS, c = i - h * HS;
        float* const to = partial(piece, h);
        to[2 + c] = piece_sum(h, c);
        if (c == 0) to[0] = maxima[h], to[1] = totals[h];
    }
    __threadfence();
    __syncthreads();
    unsigned* const counter = a.counters + int64_t(n) * a.NKV * a.passes + blockIdx.y;
    if (threadIdx.x == 0) {
        last_block = atomicAdd(counter, 1u) == unsigned(used - 1);
        if (last_block) *counter = 0;
    }
    __syncthreads();
    if (!last_block) return;
    __threadfence();
    // The weights of the pieces first, then each thread adds up channels over them.
    for (int h = warp; h < heads; h += WARPS) {
        float max = -INFINITY, sum = 0;
        for (int p = lane; p < used; p += WARP) max = fmaxf(max, __ldcg(partial(p, h)));
        max = warp_max(max);
        for (int p = lane; p < used; p += WARP) sum += expf(__ldcg(partial(p, h)) - max) * __ldcg(partial(p, h) + 1);
        sum = warp_sum(sum);
        if (lane == 0) maxima[h] = max, totals[h] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * HS; i += THREADS) {
        const int h = i / HS, c = i - h * HS;
        float sum = 0;
#pragma unroll 4
        for (int p = 0; p < used; p++) sum += expf(__ldcg(partial(p, h)) - maxima[h]) * __ldcg(partial(p, h) + 2 + c);
        out[i] = from_float<T>(sum / totals[h]);
    }
}

__global__ void advance_kernel(int32_t* positions, int64_t* steps, int64_t N) {
    wait_for_previous();
    let_next_start();
    const int64_t n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (n >= N) return;
    if (positions[n] >= 0) positions[n]++;
    steps[n]++;
}

constexpr int WIDE_HEADS = 4;

int64_t counter_bytes(int64_t N, int64_t NH) {
    return (N * NH * int64_t(sizeof(unsigned)) + 255) / 256 * 256;
}

int64_t partial_bytes(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return N * decode_pieces(max_length) * NH * (HS + 2) * int64_t(sizeof(float));
}

template <int W, int V, typename T>
void launch(const char* op, Decode<T> a, int64_t N, Stream stream) {
    const int group = a.NH / a.NKV;
    const auto run = [&](auto heads) {
        constexpr int HEADS = decltype(heads)::value;
        a.passes = int(ceil_div(group, HEADS));
        const dim3 grid(unsigned(a.pieces), unsigned(a.NKV * a.passes), unsigned(N));
        launch_dependent(op, decode_kernel<W, V, HEADS, T>, grid, THREADS, 0, stream, a);
    };
    if (group == 1)
        run(std::integral_constant<int, 1>{});
    else
        run(std::integral_constant<int, WIDE_HEADS>{});
}

}  // namespace

int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return counter_bytes(N, NH) + partial_bytes(N, NH, HS, max_length);
}

void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodePlace& place, float scale,
                      Tensor scratch, Stream stream) {
    const char* op = "decode_attention";
    const DType dtype = check_activation_dtype(op, "qkv", qkv);
    const DecodeSizes z = check_decode_attention(op, dtype, out, qkv, k_cache, v_cache, place, scale, scratch);
    require(z.HS <= MAX_HS, op, ": head size ", z.HS, " lies outside [1, ", MAX_HS, "]");
    require(z.N <= 65535 && z.NH <= 65535, op, ": ", z.N, " sequences of ", z.NH, " heads; at most 65535 of each");
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
        const int64_t bytes = partial_bytes(z.N, z.NH, z.HS, place.max_length);
        a.partials = reinterpret_cast<float*>(static_cast<char*>(scratch.data) + (scratch.bytes() - bytes) / 4 * 4);
        a.out_stride = row_stride(out), a.qkv_stride = row_stride(qkv);
        a.num_slots = z.slots, a.capacity = z.capacity;
        a.NH = int(z.NH), a.NKV = int(z.NKV), a.HS = int(z.HS);
        a.pieces = int(decode_pieces(place.max_length));
        a.scale = scale;
        const bool full = z.HS % FULL_WIDTH<T> == 0 && rows_aligned({k_cache, v_cache});
        const auto lanes_for = [](int64_t vectors) {
            int lanes = 1;
            while (lanes < vectors && lanes < WARP) lanes *= 2;
            return lanes;
        };
        if (!full) {
            a.lanes = lanes_for(z.HS);
            return launch<1, int(MAX_HS) / WARP>(op, a, z.N, stream);
        }
        constexpr int W = FULL_WIDTH<T>;
        a.lanes = lanes_for(z.HS / W);
        if constexpr (W * WARP < MAX_HS) {
            if (z.HS > W * WARP) return launch<W, 2>(op, a, z.N, stream);
        }
        launch<W, 1>(op, a, z.N, stream);
    });
}

void advance(Tensor positions, Tensor steps, Stream stream) {
    const char* op = "advance";
    check_advance(op, positions, steps);
    const int64_t N = positions.shape[0];
    if (N == 0) return;
    launch_dependent(op, advance_kernel, grid_of(ceil_div(N, 256)), 256, 0, stream, positions.as<int32_t>(),
                     steps.as<int64_t>(), N);
}
