// A lane holds a vector pair of a head: two vectors of W channels, which RoPE rotates with each other, or which are
// both beyond the rotated channels. `lanes` lanes of a warp share a head and sum over it by shuffles, so that memory is
// read once. Forward, a thread works on its vector pair of two heads of a token: their loads are in flight together,
// and they share one read of the table. Heads of other sizes, and tensors that are not aligned, take W = 1, where a
// lane holds ITEMS vector pairs.
//
//                     forward        backward       backward with weights
//   threads a block   256            256            256
//   shared memory     -              -              16 KiB (8 KiB in fp32)
//   registers         64 (bf16)      72 (bf16)      118 (bf16)
//                     48 (fp32)      60 (fp32)      80 (fp32)
//   blocks per SM     4              3              2
//
// Gradients of weights are sums over all tokens. 2 blocks per SM, divided among q and k by their heads, loop over the
// tokens and keep their sums in registers. Each adds its groups of lanes in order and writes a row of partial sums,
// which a second kernel adds in order. The number of blocks depends only on sizes and GPU, so results are bitwise equal
// on equal GPUs.
//
// modern-124M, bf16, B=64, T=1024: N = 65536 tokens of 6 + 6 heads of 128. 128 = 8·2·8, so 8 lanes share a head and a
// block holds 32 groups: 65536·6/32 = 12,288 blocks forward, twice as many backward; with weights 264 on an H100. A
// token has 3 KiB of q and k: 403 MB are read and written forward, 604 MB backward.
#include "kernels/qk_norm.h"

#include "kernels/cuda/heads.cuh"
#include "kernels/cuda/row_norm.cuh"
#include "kernels/qk_norm_check.h"

namespace {

constexpr int THREADS = 256;
// Vector pairs of a lane where W = 1: 32 lanes then hold QK_NORM_MAX_HEAD channels.
constexpr int MAX_ITEMS = int(QK_NORM_MAX_HEAD) / (2 * WARP);

template <typename T>
struct Arguments {
    Heads<T> out;         // forward: out; backward: dinp
    Heads<const T> inp;   // forward: inp; backward: dout
    Heads<const T> kept;  // backward
    float* rstd;          // [N, H]; forward: null where it is not stored
    const float *weight_q, *weight_k;
    const int32_t* positions;
    const float* table;  // [table_length, pairs, 2] or null
    int64_t table_length, N;
    int H, NH, HS, pairs, lanes;
    float eps;
    float* partials;   // [blocks, HS]
    int64_t q_blocks;  // with weights, backward: the first blocks sum for q, the others for k
};

// The channels of a vector pair: [first, first + W) and [second, second + W).
struct VectorPair {
    int first, second;
    bool inside, has_second, rotated;
};

template <int W>
__device__ __forceinline__ VectorPair vector_pair(int index, int HS, int pairs) {
    const int num_rotated = pairs / W;
    VectorPair p;
    p.rotated = index < num_rotated;
    p.first = p.rotated ? index * W : 2 * pairs + (index - num_rotated) * 2 * W;
    p.second = p.first + (p.rotated ? pairs : W);
    p.inside = p.first < HS;
    p.has_second = p.second < HS;  // false only for the last channel of an odd head
    return p;
}

// The sum over the `lanes` lanes that share a head, a power of two. The whole warp calls it. Without the branch the
// loops around it would not unroll, and their arrays would not stay in registers.
__device__ __forceinline__ float head_sum(float x, int lanes) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, offset);
        if (offset < lanes) x += other;
    }
    return x;
}

// Both vectors, as stored and in fp32.
template <typename T, int W>
struct Packs {
    Pack<T, W> first, second;
};
template <int W>
struct Vectors {
    Floats<W> first, second;
};

template <int W, typename T>
__device__ __forceinline__ Packs<T, W> load_pair(const T* head, const VectorPair& p, bool present) {
    Packs<T, W> x{};
    if (present && p.inside) x.first = load_pack<W>(head + p.first);
    if (present && p.has_second) x.second = load_pack<W>(head + p.second);
    return x;
}

template <int W, typename T>
__device__ __forceinline__ Vectors<W> as_floats(const Packs<T, W>& x) {
    return {as_floats(x.first), as_floats(x.second)};
}

template <int W, typename T>
__device__ __forceinline__ void store_pair(T* head, const VectorPair& p, const Vectors<W>& x) {
    if (p.inside) store_floats<W>(head + p.first, x.first);
    if (p.has_second) store_floats<W>(head + p.second, x.second);
}

// 1 without weights.
template <bool WEIGHTS, int W>
__device__ __forceinline__ Vectors<W> load_weight(const float* weight, const VectorPair& p) {
    Vectors<W> w;
#pragma unroll
    for (int k = 0; k < W; k++) w.first[k] = w.second[k] = 1;
    if (WEIGHTS && p.inside) w.first = load_floats<W>(weight + p.first);
    if (WEIGHTS && p.has_second) w.second = load_floats<W>(weight + p.second);
    return w;
}

// (cos, sin) of the rotated channel pairs; no rotation beyond the rotated channels, without a table and outside it.
template <int W, typename T>
__device__ __forceinline__ Floats<2 * W> load_angles(const Arguments<T>& a, int64_t token, const VectorPair& p) {
    Floats<2 * W> angles;
#pragma unroll
    for (int k = 0; k < W; k++) {
        angles[2 * k] = 1;
        angles[2 * k + 1] = 0;
    }
    if (!a.table || !p.rotated || token >= a.N) return angles;
    const int32_t position = a.positions[token];
    if (position < 0 || position >= a.table_length) return angles;
    return load_floats<2 * W>(a.table + (position * int64_t(a.pairs) + p.first) * 2);
}

// sign −1 rotates back.
template <int W>
__device__ __forceinline__ Vectors<W> rotate(const Vectors<W>& x, const Floats<2 * W>& angles, float sign) {
    Vectors<W> y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float c = angles[2 * k], s = sign * angles[2 * k + 1];
        y.first[k] = x.first[k] * c - x.second[k] * s;
        y.second[k] = x.second[k] * c + x.first[k] * s;
    }
    return y;
}

// Σ a·b over both vectors, added to sum.
template <int W>
__device__ __forceinline__ float add_products(float sum, const Vectors<W>& a, const Vectors<W>& b) {
#pragma unroll
    for (int k = 0; k < W; k++) sum = fmaf(a.first[k], b.first[k], sum);
#pragma unroll
    for (int k = 0; k < W; k++) sum = fmaf(a.second[k], b.second[k], sum);
    return sum;
}

template <int ITEMS>
constexpr int FORWARD_HEADS = ITEMS == 1 ? 2 : 1;

template <bool WEIGHTS, int W, int ITEMS, typename T>
__global__ void __launch_bounds__(THREADS, 4) forward_kernel(const Arguments<T> a) {
    constexpr int HEADS = FORWARD_HEADS<ITEMS>;
    const int sets = (a.H + HEADS - 1) / HEADS, lane = int(threadIdx.x) % a.lanes;
    const RowItem token = row_item(blockIdx.x * int64_t(THREADS / a.lanes) + int(threadIdx.x) / a.lanes, sets);
    // The heads of a set are `sets` apart, so that neighbouring groups of lanes read neighbouring memory.
    const auto head_of = [&](int h) { return int(token.item) + h * sets; };
    const auto present = [&](int h) { return token.row < a.N && head_of(h) < a.H; };
    Packs<T, W> x[HEADS][ITEMS];
    float square[HEADS] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            x[h][i] = load_pair<W>(a.inp.at(token.row, head_of(h)), vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs),
                                   present(h));
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const Vectors<W> v = as_floats(x[h][i]);
            square[h] = add_products(square[h], v, v);
        }
        square[h] = head_sum(square[h], a.lanes);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const VectorPair p = vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs);
        const Floats<2 * W> angles = load_angles<W>(a, token.row, p);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (!present(h)) continue;
            const int head = head_of(h);
            const float rstd = row_rstd(square[h], float(a.HS), a.eps);
            const Vectors<W> w = load_weight<WEIGHTS, W>(head < a.NH ? a.weight_q : a.weight_k, p);
            Vectors<W> v = as_floats(x[h][i]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                v.first[k] = v.first[k] * rstd * w.first[k];
                v.second[k] = v.second[k] * rstd * w.second[k];
            }
            store_pair<W>(a.out.at(token.row, head), p, rotate(v, angles, 1));
            if (i == 0 && lane == 0 && a.rstd) a.rstd[token.row * a.H + head] = rstd;
        }
    }
}

// x̂, from what the forward pass left.
template <bool WEIGHTS, int W, typename T>
__device__ __forceinline__ Vectors<W> normalised(const Packs<T, W>& kept, float rstd, const Floats<2 * W>& angles) {
    Vectors<W> x = as_floats(kept);
    if constexpr (!WEIGHTS) x = rotate(x, angles, -1);
    const float scale = WEIGHTS ? rstd : 1;
#pragma unroll
    for (int k = 0; k < W; k++) {
        x.first[k] *= scale;
        x.second[k] *= scale;
    }
    return x;
}

// The heads that a block works on, its index among the blocks that work on them, and their number.
struct Part {
    int first, heads;
    int64_t block, blocks;
};

template <bool WEIGHTS, typename T>
__device__ __forceinline__ Part part_of(const Arguments<T>& a) {
    if (!WEIGHTS) return {0, a.H, blockIdx.x, gridDim.x};
    if (blockIdx.x < a.q_blocks) return {0, a.NH, blockIdx.x, a.q_blocks};
    return {a.NH, a.H - a.NH, blockIdx.x - a.q_blocks, gridDim.x - a.q_blocks};
}

template <bool WEIGHTS, int W, int ITEMS, typename T>
__global__ void __launch_bounds__(THREADS, WEIGHTS ? 2 : 3) backward_kernel(const Arguments<T> a) {
    const Part part = part_of<WEIGHTS>(a);
    const int lane = int(threadIdx.x) % a.lanes, groups = THREADS / a.lanes, group = int(threadIdx.x) / a.lanes;
    const float* const weight = part.first == 0 ? a.weight_q : a.weight_k;
    Vectors<W> dweight[ITEMS] = {};
    // All threads of a block run equally often: head_sum needs whole warps.
    for (int64_t first = part.block * groups; first < a.N * part.heads; first += part.blocks * groups) {
        const RowItem token = row_item(first + group, part.heads);
        const int head = part.first + int(token.item);
        const bool present = token.row < a.N;
        Packs<T, W> dout[ITEMS], kept[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const VectorPair p = vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs);
            dout[i] = load_pair<W>(a.inp.at(token.row, head), p, present);
            kept[i] = load_pair<W>(a.kept.at(token.row, head), p, present);
        }
        const float rstd = present ? a.rstd[token.row * a.H + head] : 0;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const VectorPair p = vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs);
            const Floats<2 * W> angles = load_angles<W>(a, token.row, p);
            Vectors<W> g = rotate(as_floats(dout[i]), angles, -1);
            const Vectors<W> x = normalised<WEIGHTS>(kept[i], rstd, angles);
#pragma unroll
            for (int k = 0; k < W; k++) {
                g.first[k] *= x.first[k];
                g.second[k] *= x.second[k];
                if (WEIGHTS) {
                    dweight[i].first[k] += g.first[k];
                    dweight[i].second[k] += g.second[k];
                }
            }
            sum = add_products(sum, g, load_weight<WEIGHTS, W>(weight, p));
        }
        const float mean = head_sum(sum, a.lanes) / float(a.HS);
        if (!present) continue;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const VectorPair p = vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs);
            const Floats<2 * W> angles = load_angles<W>(a, token.row, p);
            const Vectors<W> w = load_weight<WEIGHTS, W>(weight, p), x = normalised<WEIGHTS>(kept[i], rstd, angles);
            Vectors<W> d = rotate(as_floats(dout[i]), angles, -1);
#pragma unroll
            for (int k = 0; k < W; k++) {
                d.first[k] = (d.first[k] * w.first[k] - x.first[k] * mean) * rstd;
                d.second[k] = (d.second[k] * w.second[k] - x.second[k] * mean) * rstd;
            }
            store_pair<W>(a.out.at(token.row, head), p, d);
        }
    }
    if constexpr (WEIGHTS) {
        __shared__ float sums[THREADS * 2 * W * ITEMS];  // [groups, HS]
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const VectorPair p = vector_pair<W>(lane + i * a.lanes, a.HS, a.pairs);
#pragma unroll
            for (int k = 0; k < W; k++) {
                if (p.inside) sums[group * a.HS + p.first + k] = dweight[i].first[k];
                if (p.has_second) sums[group * a.HS + p.second + k] = dweight[i].second[k];
            }
        }
        __syncthreads();
        for (int c = threadIdx.x; c < a.HS; c += THREADS) {
            float total = 0;
            for (int g = 0; g < groups; g++) total += sums[g * a.HS + c];
            a.partials[blockIdx.x * int64_t(a.HS) + c] = total;
        }
    }
}

template <typename T>
Arguments<T> arguments(const QkNormSizes& z, const Tensor& out, const Tensor& inp, const Tensor& rstd,
                       const QkWeights& weight, const Tensor& positions, const Tensor& table, int64_t NH) {
    Arguments<T> a{};
    a.out = heads_of<T>(out);
    a.inp = heads_of<const T>(inp);
    a.rstd = rstd.as<float>();
    a.weight_q = weight.q.as<float>();
    a.weight_k = weight.k.as<float>();
    if (table) {
        a.positions = positions.as<int32_t>();
        a.table = table.as<float>();
    }
    a.table_length = z.table_length;
    a.N = z.N;
    a.H = int(z.H);
    a.NH = int(NH);
    a.HS = int(z.HS);
    a.pairs = int(z.pairs);
    return a;
}

// Calls f(W, ITEMS), as integral constants, and sets the lanes of a head: whole vectors if both the rotated channels
// and the others divide into pairs of them, else single channels.
template <typename T, typename F>
void dispatch_width_and_items(Arguments<T>& a, bool aligned, F f) {
    constexpr int FULL = FULL_WIDTH<T>;
    const bool full =
        aligned && a.pairs % FULL == 0 && (a.HS - 2 * a.pairs) % (2 * FULL) == 0 && a.HS / (2 * FULL) <= WARP;
    dispatch_width<T>(full, [&](auto width) {
        constexpr int W = decltype(width)::value;
        a.lanes = 1;
        while (a.lanes < WARP && a.lanes * 2 * W < a.HS) a.lanes *= 2;
        constexpr int ITEMS = W == 1 ? MAX_ITEMS : 1;
        f(width, std::integral_constant<int, ITEMS>{});
    });
}

template <typename F>
void dispatch_weights(bool weights, F f) {
    if (weights)
        f(std::true_type{});
    else
        f(std::false_type{});
}

}  // namespace

void qk_norm_forward(Tensor out, Tensor rstd, Tensor inp, QkWeights weight, Tensor positions, Tensor table, int64_t NH,
                     float eps, Stream stream) {
    const char* op = "qk_norm_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const QkNormSizes z = check_qk_norm(op, "inp", inp, dtype, rstd, Given::Optional, weight, positions, table, NH);
    check_tensor(op, "out", out, dtype, {z.N, z.H, z.HS});
    if (z.N * z.H == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Arguments<T> a = arguments<T>(z, out, inp, rstd, weight, positions, table, NH);
        a.eps = eps;
        const bool aligned = rows_aligned({out, inp, weight.q, weight.k}) && start_aligned(table);
        dispatch_width_and_items(a, aligned, [&](auto width, auto items) {
            dispatch_weights(bool(weight.q), [&](auto weights) {
                constexpr int W = decltype(width)::value, ITEMS = decltype(items)::value;
                const int64_t sets = z.N * ceil_div(z.H, FORWARD_HEADS<ITEMS>);
                forward_kernel<decltype(weights)::value, W, ITEMS>
                    <<<grid_of(ceil_div(sets * a.lanes, THREADS)), THREADS, 0, cuda_stream(stream)>>>(a);
            });
        });
    });
    check_launch(op, stream);
}

void qk_norm_backward(Tensor dinp, QkWeights dweight, Tensor dout, Tensor kept, Tensor rstd, QkWeights weight,
                      Tensor positions, Tensor table, int64_t NH, Tensor scratch, bool accumulate, Stream stream) {
    const char* op = "qk_norm_backward";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    const QkNormSizes z =
        check_qk_norm_backward(op, dtype, dinp, dweight, dout, kept, rstd, weight, positions, table, NH, scratch);
    if (z.N * z.H == 0 && !weight.q) return;
    const gpu_scratch::QkBlocks blocks = gpu_scratch::qk_blocks(NH, z.H - NH, num_sms());
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        Arguments<T> a = arguments<T>(z, dinp, dout, rstd, weight, positions, table, NH);
        a.kept = heads_of<const T>(kept);
        if (weight.q) {
            a.partials = reinterpret_cast<float*>(scratch.as<uint8_t>());
            a.q_blocks = blocks.q;
        }
        const bool aligned = rows_aligned({dinp, dout, kept, weight.q, weight.k}) && start_aligned(table);
        dispatch_width_and_items(a, aligned, [&](auto width, auto items) {
            dispatch_weights(bool(weight.q), [&](auto weights) {
                constexpr int W = decltype(width)::value, ITEMS = decltype(items)::value;
                const int64_t grid = weight.q ? blocks.q + blocks.k : ceil_div(z.N * z.H * a.lanes, THREADS);
                backward_kernel<decltype(weights)::value, W, ITEMS>
                    <<<grid_of(grid), THREADS, 0, cuda_stream(stream)>>>(a);
            });
        });
        if (!dweight.q) return;
        const auto sum = [&](const Tensor& to, int64_t first, int64_t count) {
            norm_detail::sum_partials_kernel<<<grid_of(ceil_div(z.HS, norm_detail::SUM_COLUMNS)),
                                               dim3(norm_detail::SUM_COLUMNS, norm_detail::SUM_SLICES), 0,
                                               cuda_stream(stream)>>>({{to.as<float>()}}, a.partials + first * z.HS,
                                                                      count, z.HS, accumulate);
        };
        check_launch(op, stream);
        sum(dweight.q, 0, blocks.q);
        sum(dweight.k, blocks.q, blocks.k);
    });
    check_launch(op, stream);
}
