// The recurrent form: token by token, for heads of up to 512.
//
// A warp owns a column of the state, 16 rows in each lane. The block copies 8 tokens of a and b to shared memory for
// all its warps. With several query heads for a KV head (reversed results), a token is an entry for each of them; all
// are added to the state before the token's row is read.
//
//   kernel        threads   registers   shared memory   blocks per SM
//   scan_kernel     256        128         33,088 B           2
//   dots_kernel     256         30              0 B           8
//
// (sm_90a, CUDA 13.0.)
//
// One launch: B = 8, T = 4096, 12 heads of 64 with Form::Recurrent. A block has 8 columns, so 8 column blocks · 12
// heads · (8 + 1) sequences = 864 blocks, of which 768 loop over 4,096 tokens in 512 steps. An H100 holds 132·2 = 264
// at once.
#include "kernels/linear_attention/linear_attention.cuh"

namespace linear_attention {

constexpr int SCAN_WARPS = 8, SCAN_THREADS = SCAN_WARPS * WARP, SCAN_ENTRIES = 8;
constexpr int ROWS_PER_LANE = int(LINEAR_ATTENTION_MAX_SIZE) / WARP;
// Additions to the state that are summed apart from it, so that fp32 sums keep their digits.
constexpr int RECENT_ENTRIES = 32;

struct ScanTiles {
    float a[SCAN_ENTRIES][LINEAR_ATTENTION_MAX_SIZE], b[SCAN_ENTRIES][LINEAR_ATTENTION_MAX_SIZE];
    float c[SCAN_ENTRIES][SCAN_WARPS], delta[SCAN_ENTRIES], decay[SCAN_ENTRIES];
};

template <typename T>
struct ScanBlock {
    const ScanParams<T>& scan;
    const Params<T>& p;
    ScanTiles& tiles;
    const Task task;
    Result result;
    bool reversed, vector_of_c, has_vector;
    int warp, lane, first_column, column, columns;
    bool has_column;  // this warp has a column
    Sequence seq;
    int64_t group, kv, first_key_head, key_heads, at;
    int64_t first;  // entry in tiles[0]
    int count;      // entries in the tiles
    // Rows lane, lane + 32, …: the state and what the recent entries added to it. The vector likewise for Out; else
    // vector[0] is the column's element.
    float state[ROWS_PER_LANE] = {}, recent[ROWS_PER_LANE] = {};
    float vector[ROWS_PER_LANE] = {}, recent_vector[ROWS_PER_LANE] = {};

    __device__ __forceinline__ ScanBlock(const ScanParams<T>& params, const Task& task_, ScanTiles& shared)
        : scan(params), p(params.p), tiles(shared), task(task_), result(params.result) {
        reversed = is_reversed(result);
        vector_of_c = result == Result::DQ || result == Result::DK;
        has_vector = p.normalise && result != Result::DV;
        warp = threadIdx.x / WARP;
        lane = lane_id();
        first_column = task.column_block * SCAN_WARPS;
        column = first_column + warp;
        columns = min(SCAN_WARPS, p.M - first_column);
        has_column = column < p.M;
        seq = sequence_of(p.cum, task.sequence, p.N);
        group = p.NH / p.NKV;
        kv = reversed ? task.head : task.head / group;
        first_key_head = reversed ? kv * group : kv;
        key_heads = reversed ? group : 1;
        at = task.sequence * p.NKV + kv;
    }

    __device__ __forceinline__ int row_of(int r) const { return r * WARP + lane; }
    __device__ __forceinline__ int64_t matrix_at(int r) const {
        return at * p.E * p.M + row_of(r) * p.state_row + column * p.state_column;
    }
    __device__ __forceinline__ float gate(int t) const { return p.gate[(seq.first + t) * p.gate_stride + kv]; }
    // Of entry n of the tiles.
    __device__ __forceinline__ int time_of(int n) const {
        const int t = int((first + n) / key_heads);
        return reversed ? seq.length - 1 - t : t;
    }
    __device__ __forceinline__ int64_t key_head_of(int n) const { return first_key_head + (first + n) % key_heads; }

    __device__ __forceinline__ void load_state() {
        if (!scan.initial.s.data || !has_column) return;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++)
            if (row_of(r) < p.E) state[r] = static_cast<const float*>(scan.initial.s.data)[matrix_at(r)];
        if (!has_vector) return;
        const float* z = static_cast<const float*>(scan.initial.z.data);
        if (vector_of_c) {
            vector[0] = z[at * p.M + column];
        } else {
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++)
                if (row_of(r) < p.E) vector[r] = z[at * p.E + row_of(r)];
        }
    }

    __device__ __forceinline__ void apply_decay(float factor) {
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            state[r] *= factor;
            recent[r] *= factor;
            vector[r] *= factor;
            recent_vector[r] *= factor;
        }
    }
    __device__ __forceinline__ void merge_recent() {
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            state[r] += recent[r];
            vector[r] += recent_vector[r];
            recent[r] = recent_vector[r] = 0;
        }
    }

    // The next entries' operands, decays and δ to shared memory.
    __device__ __forceinline__ void load_tiles() const {
        for (int i = threadIdx.x; i < count * p.E; i += SCAN_THREADS) {
            const int n = i / p.E, e = i % p.E;
            const int64_t token = seq.first + time_of(n), h = key_head_of(n);
            float x = as_float(p.a.at(token, task.head)[e]), y = as_float(p.b.at(token, h)[e]);
            if (p.elu && (result == Result::Out || result == Result::DV)) {
                x = feature<T>(x);
                y = feature<T>(y);
            }
            if (p.normalise && result == Result::DQ) x /= p.norm[task.head * p.norm_stride + token];
            if (p.normalise && result == Result::DK) y /= p.norm[h * p.norm_stride + token];
            tiles.a[n][e] = x;
            tiles.b[n][e] = y;
        }
        for (int i = threadIdx.x; i < count * columns; i += SCAN_THREADS) {
            const int n = i / columns, m = i % columns;
            const int64_t token = seq.first + time_of(n), h = key_head_of(n);
            float x = as_float(p.c.at(token, h)[first_column + m]);
            if (p.elu && vector_of_c) x = feature<T>(x);
            if (p.normalise && result == Result::DV) x /= p.norm[h * p.norm_stride + token];
            tiles.c[n][m] = x;
        }
        if (threadIdx.x < count) {
            const int t = time_of(threadIdx.x);
            if (p.gate)
                tiles.decay[threadIdx.x] = !reversed ? expf(gate(t)) : t + 1 < seq.length ? expf(gate(t + 1)) : 1.0f;
            if (has_vector && result == Result::DK)
                tiles.delta[threadIdx.x] = p.delta[key_head_of(threadIdx.x) * p.N + seq.first + t];
        }
    }

    // DQ: δ = −ĝ·out, a warp for each entry.
    __device__ __forceinline__ void compute_delta() const {
        if (warp < count) {
            const int64_t token = seq.first + time_of(warp);
            const T* out = p.forward_out.at(token, task.head);
            float sum = 0;
            for (int e = lane; e < p.E; e += WARP) sum = fmaf(tiles.a[warp][e], -as_float(out[e]), sum);
            sum = warp_sum(sum);
            if (lane == 0) {
                tiles.delta[warp] = sum;
                if (task.column_block == 0) p.delta[task.head * p.N + token] = sum;
            }
        }
        __syncthreads();
    }

    // Adds entry n to the state; with the token's last entry, computes its element of the result.
    __device__ __forceinline__ void add_entry(int n) {
        if (p.gate && key_head_of(n) == first_key_head) apply_decay(tiles.decay[n]);
        const float c = tiles.c[n][warp];
        if (has_vector && vector_of_c) recent_vector[0] += result == Result::DK ? tiles.delta[n] * c : c;
        float sum = 0, d = 0;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int e = row_of(r);
            if (e >= p.E) break;
            const float a = tiles.a[n][e], b = tiles.b[n][e];
            recent[r] = fmaf(b, c, recent[r]);
            sum = fmaf(a, state[r] + recent[r], sum);
            if (has_vector && result == Result::Out) {
                recent_vector[r] += b;
                d = fmaf(a, vector[r] + recent_vector[r], d);
            }
        }
        if (key_head_of(n) != first_key_head + key_heads - 1) return;
        sum = warp_sum(sum);
        const int64_t token = seq.first + time_of(n);
        if (has_vector && result == Result::Out) {
            d = warp_sum(d) + LINEAR_ATTENTION_EPS;
            sum /= d;
            if (p.norm && column == 0 && lane == 0) p.norm[task.head * p.norm_stride + token] = d;
        }
        if (has_vector && vector_of_c)
            sum += (result == Result::DQ ? tiles.delta[n] : 1.0f) * (vector[0] + recent_vector[0]);
        if (p.elu && vector_of_c) sum *= fminf(feature<T>(as_float(p.inputs.at(token, task.head)[column])), 1.0f);
        if (lane == 0) p.out.at(token, task.head)[column] = from_float<T>(sum);
    }

    __device__ __forceinline__ void store_state() {
        if (reversed && p.gate && seq.length > 0) apply_decay(expf(gate(0)));
        if (!reversed && task.head % group != 0) return;  // the query heads of a KV head have the same state
        float *s = static_cast<float*>(scan.final.s.data), *z = static_cast<float*>(scan.final.z.data);
        if (const int32_t* rows = static_cast<const int32_t*>(scan.final.rows.data)) {  // only in the forward pass
            const int64_t row = state_row(rows, scan.final.s.shape[0], task.sequence),
                          shift = (row - task.sequence) * p.NKV;
            if (row < 0) return;
            if (s) s += shift * p.E * p.M;
            if (z) z += shift * p.E;
        }
        if (result == Result::DQ && scan.end_state) {
            float* end_states = scan.end_state + ((task.sequence * 2 + 1) * p.NKV + kv) * p.state_size;
            s = end_states - at * p.E * p.M;
            z = end_states + p.state_vector - at * p.M;
        }
        if (s && result != Result::DK)
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++)
                if (row_of(r) < p.E) s[matrix_at(r)] = state[r];
        if (!z || !has_vector) return;
        if (vector_of_c) {
            if (lane == 0) z[at * p.M + column] = vector[0];
        } else if (task.column_block == 0 && warp == 0) {
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++)
                if (row_of(r) < p.E) z[at * p.E + row_of(r)] = vector[r];
        }
    }

    __device__ __forceinline__ void run() {
        load_state();
        const int64_t entries = seq.length * key_heads;
        for (first = 0; first < entries; first += SCAN_ENTRIES) {
            count = int(min(int64_t(SCAN_ENTRIES), entries - first));
            if (first % RECENT_ENTRIES == 0) merge_recent();
            __syncthreads();
            load_tiles();
            __syncthreads();
            if (has_vector && result == Result::DQ) compute_delta();
            if (!has_column) continue;
            for (int n = 0; n < count; n++) add_entry(n);
        }
        if (!has_column) return;
        merge_recent();
        store_state();
    }
};

namespace {

template <typename T>
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(const __grid_constant__ ScanParams<T> scan) {
    __shared__ ScanTiles tiles;
    const Params<T>& p = scan.p;
    const Task task = task_of(p.column_blocks, is_reversed(scan.result) ? p.NKV : p.NH, 1);
    if (task.sequence == p.S) {  // zeros for the tokens after the last sequence
        const int first_column = task.column_block * SCAN_WARPS, columns = min(SCAN_WARPS, p.M - first_column);
        for (int64_t token = max(0, p.cum[p.S]); token < p.N; token++) {
            if (threadIdx.x < columns) p.out.at(token, task.head)[first_column + threadIdx.x] = T{};
            if (scan.result == Result::Out && p.norm && task.column_block == 0 && threadIdx.x == 0)
                p.norm[task.head * p.norm_stride + token] = 0;
        }
        return;
    }
    ScanBlock<T>(scan, task, tiles).run();
}

// From d = dφ·φ'(x): φ(x)·dφ = d·max(φ(x), 1), because φ' = min(φ, 1). A warp for each row. The scan needs this kernel
// because its blocks have single columns of a row.
template <typename T>
__global__ void __launch_bounds__(SCAN_THREADS) dots_kernel(const __grid_constant__ DotParams<T> p) {
    const int64_t row = (int64_t(blockIdx.x) * SCAN_THREADS + threadIdx.x) / WARP;
    if (row >= p.N * p.heads) return;
    const int64_t head = row / p.N, token = row % p.N;
    const T *d = p.gradient.at(token, head), *x = p.inputs.at(token, head);
    float sum = 0;
    for (int i = lane_id(); i < p.size; i += WARP) {
        const float input = as_float(x[i]);
        sum = fmaf(as_float(d[i]), p.elu ? fmaxf(feature<float>(input), 1.0f) : input, sum);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) p.dots[row] = sum;
}

}  // namespace

template <typename T>
void launch_scan(const char* op, ScanParams<T> scan, Stream stream) {
    Params<T>& p = scan.p;
    p.column_blocks = int(ceil_div(p.M, SCAN_WARPS));
    const int64_t heads = is_reversed(scan.result) ? p.NKV : p.NH;
    launch(op, scan_kernel<T>, scan, (p.S + 1) * heads * p.column_blocks, SCAN_THREADS, 0, stream);
}

template <typename T>
void launch_dots(const char* op, const DotParams<T>& p, Stream stream) {
    launch(op, dots_kernel<T>, p, ceil_div(p.N * p.heads * WARP, SCAN_THREADS), SCAN_THREADS, 0, stream);
}

template void launch_scan<float>(const char*, ScanParams<float>, Stream);
template void launch_scan<bf16>(const char*, ScanParams<bf16>, Stream);
template void launch_dots<float>(const char*, const DotParams<float>&, Stream);
template void launch_dots<bf16>(const char*, const DotParams<bf16>&, Stream);

}  // namespace linear_attention
