// Causal linear attention's forward pass on a GPU, rung by rung: out_t = φ(q_t)ᵀ Σ_s≤t φ(k_s) v_sᵀ, from the scans of
// the literature to the chunks that training uses. There are three variants: without a feature map, with elu + 1, and
// with elu + 1 and the normaliser.
//
//     make ladder OP=linear_attention BACKEND=cuda
//     build/cuda/dev/ladder/linear_attention --csv linear.csv && scripts/plot_ladder.py linear.csv
//
// 32,768 tokens in 8 sequences, 12 heads of 64, in fp32 and in bf16; states and sums fp32. GB/s count q, k, v and out
// once and are compared with a device copy of 512 MiB, timed in the same run. Every rung takes any number of tokens and
// heads, E ≤ 128 and any M, and is checked against the float64 oracle.
//
// The first two rungs are the kernels of fast-transformers (Katharopoulos et al. 2020; its low-occupancy kernel by
// NVIDIA) as they divide the work, rewritten here.
#include "kernels/linear_attention/linear_attention.h"

#include <cmath>

#include "dev/bench/machine_limits.h"
#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/cuda/cuda_common.cuh"

namespace {

constexpr int MAX_E = 128;
constexpr float EPS = 1e-6f;

template <typename T>
struct Attention {
    T* out;              // [B·T, H, M]
    const T *q, *k, *v;  // [B·T, H, E], [B·T, H, E], [B·T, H, M]
    int64_t B, length, H;
    int E, M;
    bool elu, normalise;
    float* states;  // what split_over_T passes between splits: [splits, B·H, (M + 1)·E]
    int splits;
};

template <typename T>
__device__ __forceinline__ float feature(const Attention<T>& a, T x) {
    const float y = as_float(x);
    return !a.elu ? y : y > 0 ? y + 1 : exp_for<T>(y);
}

// Row t of head (b, h): bh = b·H + h.
template <typename T>
__device__ __forceinline__ int64_t row_of(const Attention<T>& a, int64_t bh, int64_t t) {
    return (bh / a.H * a.length + t) * a.H + bh % a.H;
}

// --- a block for each output column

template <typename T>
__global__ void __launch_bounds__(MAX_E) scan_kernel(Attention<T> a) {
    const int64_t bh = blockIdx.x / a.M;
    const int m = blockIdx.x % a.M, e = threadIdx.x;
    float state = 0, sum = 0;
    for (int64_t t = 0; t < a.length; t++) {
        const int64_t row = row_of(a, bh, t);
        const float k = e < a.E ? feature(a, a.k[row * a.E + e]) : 0.0f;
        const float q = e < a.E ? feature(a, a.q[row * a.E + e]) : 0.0f;
        state = fmaf(k, as_float(a.v[row * a.M + m]), state);
        sum += k;
        float x = q * state, d = q * sum;
        block_sum<MAX_E>(x, d);
        if (e == 0) a.out[row * a.M + m] = from_float<T>(a.normalise ? x / (d + EPS) : x);
    }
}

template <typename T>
void scan(const Attention<T>& a, Stream stream) {
    scan_kernel<<<grid_of(a.B * a.H * a.M), MAX_E, 0, cuda_stream(stream)>>>(a);
}

// --- a block for each output column, split over T by its warps

constexpr int SPLIT_WARPS = 8, ROWS = MAX_E / WARP;

template <typename T>
__global__ void __launch_bounds__(SPLIT_WARPS* WARP) low_occupancy_kernel(Attention<T> a) {
    __shared__ float states[SPLIT_WARPS][2][MAX_E];
    const int64_t bh = blockIdx.x / a.M;
    const int m = blockIdx.x % a.M, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t split_length = ceil_div(a.length, SPLIT_WARPS), begin = warp * split_length,
                  end = min(begin + split_length, a.length);
    float state[ROWS] = {}, sum[ROWS] = {};
    const auto add = [&](int64_t row) {
        const float v = as_float(a.v[row * a.M + m]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int e = r * WARP + lane;
            const float k = e < a.E ? feature(a, a.k[row * a.E + e]) : 0.0f;
            state[r] = fmaf(k, v, state[r]);
            sum[r] += k;
        }
    };
    for (int64_t t = begin; t < end; t++) add(row_of(a, bh, t));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        states[warp][0][r * WARP + lane] = state[r];
        states[warp][1][r * WARP + lane] = sum[r];
        state[r] = sum[r] = 0;
    }
    __syncthreads();
    for (int w = 0; w < warp; w++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            state[r] += states[w][0][r * WARP + lane];
            sum[r] += states[w][1][r * WARP + lane];
        }
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = row_of(a, bh, t);
        add(row);
        float x = 0, d = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int e = r * WARP + lane;
            const float q = e < a.E ? feature(a, a.q[row * a.E + e]) : 0.0f;
            x = fmaf(q, state[r], x);
            d = fmaf(q, sum[r], d);
        }
        x = warp_sum(x);
        d = warp_sum(d);
        if (lane == 0) a.out[row * a.M + m] = from_float<T>(a.normalise ? x / (d + EPS) : x);
    }
}

template <typename T>
void low_occupancy(const Attention<T>& a, Stream stream) {
    low_occupancy_kernel<<<grid_of(a.B * a.H * a.M), SPLIT_WARPS * WARP, 0, cuda_stream(stream)>>>(a);
}

// --- 64 columns per block, then split over T

// A thread has a quarter of a column's state. Tokens come to shared memory 32 at a time, in vectors, φ taken once.
constexpr int COLUMNS = 64, QUARTERS = 4, COLUMN_THREADS = COLUMNS * QUARTERS, TOKENS = 32;

// `rows` rows of `count` numbers, `stride` apart, as floats; zeros from there on to D.
template <typename T, int D, typename F>
__device__ __forceinline__ void load_rows(float (&dst)[TOKENS][D], const T* src, int64_t stride, int rows, int count,
                                          bool aligned, F f) {
    constexpr int W = FULL_WIDTH<T>;
    for (int i = threadIdx.x; i < TOKENS * D / W; i += COLUMN_THREADS) {
        const int row = i / (D / W), column = i % (D / W) * W;
        const bool whole = aligned && row < rows && column + W <= count;
        Pack<T, W> pack;
        if (whole) pack = load_pack<W>(src + row * stride + column);
        const Floats<W> x = as_floats(pack);
#pragma unroll
        for (int j = 0; j < W; j++)
            dst[row][column + j] = whole                              ? f(x[j])
                                   : row < rows && column + j < count ? f(as_float(src[row * stride + column + j]))
                                                                      : 0.0f;
    }
}

// SUMS: the sum of each split, to `states`; else the split's outputs, from the state that it begins with.
template <typename T, int E, bool SUMS>
__global__ void __launch_bounds__(COLUMN_THREADS) columns_kernel(Attention<T> a, bool aligned) {
    constexpr int MINE = E / QUARTERS;
    __shared__ __align__(16) float q[SUMS ? 1 : TOKENS][E], k[TOKENS][E], v[TOKENS][COLUMNS];
    const int parts = int(ceil_div(a.M, COLUMNS)), part = blockIdx.x % parts, split = blockIdx.x / parts % a.splits;
    const int64_t bh = blockIdx.x / parts / a.splits;
    const int m0 = part * COLUMNS, m = m0 + int(threadIdx.x) / QUARTERS, quarter = threadIdx.x % QUARTERS;
    const int64_t split_length = ceil_div(a.length, a.splits), begin = split * split_length,
                  end = min(begin + split_length, a.length);
    const auto phi = [&](float x) { return !a.elu ? x : x > 0 ? x + 1 : exp_for<T>(x); };
    // Rows are distributed four at a time, so that the quarters read neighbouring 16 bytes.
    const auto row_at = [&](int i) { return (i / 4 * QUARTERS + quarter) * 4 + i % 4; };
    float* states = a.states + (split * a.B * a.H + bh) * (a.M + 1) * a.E;
    float state[MINE] = {}, sum[MINE] = {};
    if (!SUMS && a.splits > 1)
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int e = row_at(i);
            if (e < a.E && m < a.M) state[i] = states[m * a.E + e];
            if (e < a.E) sum[i] = states[a.M * a.E + e];
        }
    for (int64_t t0 = begin; t0 < end; t0 += TOKENS) {
        const int count = int(min(int64_t(TOKENS), end - t0));
        const int64_t row = row_of(a, bh, t0);
        __syncthreads();
        if constexpr (!SUMS) load_rows<T, E>(q, a.q + row * a.E, a.H * a.E, count, a.E, aligned, phi);
        load_rows<T, E>(k, a.k + row * a.E, a.H * a.E, count, a.E, aligned, phi);
        load_rows<T, COLUMNS>(v, a.v + row * a.M + m0, a.H * a.M, count, a.M - m0, aligned, [](float x) { return x; });
        __syncthreads();
        for (int t = 0; t < count; t++) {
            const float value = v[t][threadIdx.x / QUARTERS];
            float x = 0, d = 0;
#pragma unroll
            for (int i = 0; i < MINE; i += 4) {
                const Floats<4> key = load_floats<4>(&k[t][row_at(i)]);
                Floats<4> query = {};
                if constexpr (!SUMS) query = load_floats<4>(&q[t][row_at(i)]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    state[i + j] = fmaf(key[j], value, state[i + j]);
                    sum[i + j] += key[j];
                    x = fmaf(query[j], state[i + j], x);
                    d = fmaf(query[j], sum[i + j], d);
                }
            }
            if (SUMS) continue;
            x += __shfl_xor_sync(ALL_LANES, x, 1);
            d += __shfl_xor_sync(ALL_LANES, d, 1);
            x += __shfl_xor_sync(ALL_LANES, x, 2);
            d += __shfl_xor_sync(ALL_LANES, d, 2);
            if (quarter == 0 && m < a.M)
                a.out[(row + t * a.H) * a.M + m] = from_float<T>(a.normalise ? x / (d + EPS) : x);
        }
    }
    if (SUMS)
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int e = row_at(i);
            if (e < a.E && m < a.M) states[m * a.E + e] = state[i];
            if (e < a.E && m == 0) states[a.M * a.E + e] = sum[i];
        }
}

// The sum of each split becomes the sum of all earlier splits.
__global__ void __launch_bounds__(COLUMN_THREADS) prefix_kernel(float* states, int64_t size, int splits) {
    const int64_t i = int64_t(blockIdx.x) * COLUMN_THREADS + threadIdx.x;
    if (i >= size) return;
    float sum = 0;
    for (int s = 0; s < splits; s++) {
        const float x = states[s * size + i];
        states[s * size + i] = sum;
        sum += x;
    }
}

template <typename T, int E>
void launch_columns(const Attention<T>& a, Stream stream) {
    const int64_t blocks = a.B * a.H * a.splits * ceil_div(a.M, COLUMNS);
    const bool aligned = a.E % FULL_WIDTH<T> == 0 && a.M % FULL_WIDTH<T> == 0;
    if (a.splits > 1) {
        const int64_t size = a.B * a.H * (a.M + 1) * a.E;
        columns_kernel<T, E, true><<<grid_of(blocks), COLUMN_THREADS, 0, cuda_stream(stream)>>>(a, aligned);
        prefix_kernel<<<grid_of(ceil_div(size, COLUMN_THREADS)), COLUMN_THREADS, 0, cuda_stream(stream)>>>(
            a.states, size, a.splits);
    }
    columns_kernel<T, E, false><<<grid_of(blocks), COLUMN_THREADS, 0, cuda_stream(stream)>>>(a, aligned);
}

template <typename T>
void columns(Attention<T> a, int splits, Stream stream) {
    a.splits = splits;
    if (a.E <= 64)
        launch_columns<T, 64>(a, stream);
    else
        launch_columns<T, 128>(a, stream);
}

template <typename T>
void several_columns(const Attention<T>& a, Stream stream) {
    columns(a, 1, stream);
}

// As many splits as fill the GPU; `states` holds MAX_SPLITS of them.
constexpr int64_t MAX_SPLITS = 16;

template <typename T>
void split_over_T(const Attention<T>& a, Stream stream) {
    const int64_t blocks = a.B * a.H * ceil_div(a.M, COLUMNS), wanted = 4 * num_sms();
    columns(a, int(std::clamp<int64_t>(ceil_div(wanted, blocks), 1, std::min(MAX_SPLITS, ceil_div(a.length, TOKENS)))),
            stream);
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Rung {
    const char* name;
    void (*forward)(const Attention<T>& a, Stream stream);  // null: linear_attention_forward()
    const char* why;
};

template <typename T>
const std::vector<Rung<T>> RUNGS = {
    {"scan", scan<T>,
     "A block for each column of the output, a thread for each row of the state, token by token. Each of a head's "
     "blocks reads all of q and k, two bytes of v at a time, and waits for a sum over the block at every token."},
    {"low occupancy", low_occupancy<T>,
     "A block for each column still, but T is split over its eight warps: each sums its range, adds the sums of "
     "the earlier ranges, and goes through its range again. Waiting is eight times shorter, and a warp's sum needs no "
     "barrier; q and k are read once for each column, k twice."},
    {"64 columns a block", several_columns<T>,
     "A thread has a quarter of a column's state in registers, so that a token's result is two shuffles away. q, k and "
     "v come to shared memory once for 64 columns, 16 bytes a load, and the feature map is taken once for all of them. "
     "But there are only as many blocks as heads."},
    {"split over T", split_over_T<T>,
     "T is split over as many blocks as fill this GPU's SMs (not a constant number): the sums of the splits "
     "first, then their prefixes, then all splits in parallel. What is left is arithmetic: two multiply-adds for "
     "each number of the state and token, on the FMA units."},
    {"kernels/linear_attention", nullptr,
     "linear_attention_forward(): 64 tokens at a time as matmuls, in bf16 on tensor cores: scores of the "
     "chunk's tokens with each other, and the state once for all 64 of them. There are as few splits as fill the "
     "GPU, so that hardly any states are written, and k and v are read twice at most."},
};

template <typename T>
struct Problem {
    int64_t B, length, H;
    int E, M;
    Stream stream;
    DeviceArray<T> q, k, v, out;
    DeviceArray<float> states, norm;
    DeviceArray<int32_t> cum;
    DeviceArray<unsigned char> scratch;

    Problem(int64_t B_, int64_t length_, int64_t H_, int E_, int M_, Stream stream_)
        : B(B_),
          length(length_),
          H(H_),
          E(E_),
          M(M_),
          stream(stream_),
          q(DeviceArray<T>::random(B * length * H * E, 1, 1, 0, stream)),
          k(DeviceArray<T>::random(B * length * H * E, 2, 1, 0, stream)),
          v(DeviceArray<T>::random(B * length * H * M, 3, 1, 0, stream)),
          out(B * length * H * M, stream),
          states(MAX_SPLITS * B * H * (M + 1) * E, stream),
          norm(H * B * length, stream),
          cum(B + 1, stream),
          scratch(std::max<int64_t>(1, linear_attention_forward_scratch(sizes())), stream) {
        std::vector<int32_t> starts;
        for (int64_t b = 0; b <= B; b++) starts.push_back(int32_t(b * length));
        copy_to_device(cum.data(), starts.data(), starts.size() * sizeof(int32_t), stream);
        synchronize(stream);
    }
    LinearAttentionSizes sizes() const { return {B * length, B, H, H, E, M, length}; }

    void run(const Rung<T>& rung, bool elu, bool normalise) {
        if (rung.forward) {
            rung.forward(
                {out.data(), q.data(), k.data(), v.data(), B, length, H, E, M, elu, normalise, states.data(), 1},
                stream);
            return check_launch(rung.name, stream);
        }
        const int64_t N = B * length;
        linear_attention_forward(out.tensor({N, H, M}), normalise ? norm.tensor({H, N}) : Tensor{}, {},
                                 q.tensor({N, H, E}), k.tensor({N, H, E}), v.tensor({N, H, M}), Tensor{}, {},
                                 {cum.tensor({B + 1}), length},
                                 {elu ? FeatureMap::EluPlusOne : FeatureMap::Identity, normalise},
                                 scratch.tensor({scratch.bytes()}), stream);
    }

    // On a poisoned output; the first and the last head of the first and the last sequence are compared, of long ones a
    // prefix of 512 tokens.
    bool correct(const Rung<T>& rung, bool elu, bool normalise) {
        out.poison(stream);
        run(rung, elu, normalise);
        const std::vector<T> got = out.fetch(stream);
        // The last rung rounds q's and k's features, scores or states, and the result.
        ErrorBound bound(dtype_of<T>(), std::max<int64_t>(length, E), rung.forward ? 1 : 4);
        const int64_t checked = std::min<int64_t>(length, 512);
        for (const int64_t b : {int64_t(0), B - 1})
            for (const int64_t h : {int64_t(0), H - 1}) {
                const auto head = [&](const DeviceArray<T>& x, int64_t size) {
                    std::vector<double> rows;
                    for (int64_t t = 0; t < checked; t++) {
                        const double* row = &x.values()[size_t(((b * length + t) * H + h) * size)];
                        rows.insert(rows.end(), row, row + size);
                    }
                    return rows;
                };
                const std::vector<double> hq = head(q, E), hk = head(k, E), hv = head(v, M);
                const reference::LinearAttentionResult ref = reference::linear_attention_forward({hq.data(),
                                                                                                  hk.data(),
                                                                                                  hv.data(),
                                                                                                  nullptr,
                                                                                                  nullptr,
                                                                                                  nullptr,
                                                                                                  {0, int32_t(checked)},
                                                                                                  1,
                                                                                                  1,
                                                                                                  E,
                                                                                                  M,
                                                                                                  elu,
                                                                                                  normalise});
                for (int64_t t = 0; t < checked; t++)
                    for (int64_t m = 0; m < M; m++)
                        bound.add(DeviceArray<T>::widen(got[size_t(((b * length + t) * H + h) * M + m)]),
                                  {ref.out.value[size_t(t * M + m)], ref.out.mag[size_t(t * M + m)]});
            }
        return bound.holds() && out.guard_intact(stream);
    }
};

template <typename T>
LadderTable climb(const char* name, bool elu, bool normalise, int64_t N, Stream stream) {
    std::vector<Problem<T>> small;
    const int64_t sizes[][5] = {
        {1, 1, 1, 1, 1}, {2, 70, 3, 25, 64}, {1, 133, 2, 64, 32}, {3, 40, 1, 80, 112}, {1, 257, 2, 10, 255}};
    for (const auto& s : sizes) small.emplace_back(s[0], s[1], s[2], int(s[3]), int(s[4]), stream);
    const int64_t B = N % 8 == 0 ? 8 : 1;
    Problem<T> large(B, N / B, 12, 64, 64, stream);
    ColdTimer timer(stream);
    LadderTable table;
    table.title = str(name, " ", dtype_name(dtype_of<T>()));
    table.unit = "GB/s";
    table.unit_size = 1e9;
    table.limit_name = "copy";
    for (const Rung<T>& rung : RUNGS<T>) {
        bool correct = large.correct(rung, elu, normalise);
        for (Problem<T>& problem : small) correct = problem.correct(rung, elu, normalise) && correct;
        const double ms = timer.median_ms([&] { large.run(rung, elu, normalise); });
        const double bytes = double(large.q.bytes() + large.k.bytes() + large.v.bytes() + large.out.bytes());
        table.rows.push_back({rung.name, ms, bytes / (ms * 1e-3), machine_limits().copy, correct, rung.why});
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv, "tokens", 32768, 1 << 20);
        const Stream stream{};
        std::printf("%lld tokens, 12 heads of 64 on %s. A copy reaches %.0f GB/s.\n\n", (long long)options.size,
                    device_description().c_str(), machine_limits().copy * 1e-9);
        std::vector<LadderTable> tables;
        const auto climb_all = [&](const char* name, bool elu, bool normalise) {
            tables.push_back(climb<float>(name, elu, normalise, options.size, stream));
            tables.push_back(climb<bf16>(name, elu, normalise, options.size, stream));
        };
        climb_all("no features", false, false);
        climb_all("with features", true, false);
        climb_all("normalised", true, true);
        for (const LadderTable& table : tables) table.print();
        tables.front().explain();  // the same rungs in all
        write_ladder_csv(options.csv, tables);
        return std::all_of(tables.begin(), tables.end(), [](const LadderTable& table) { return table.correct(); });
    });
}
