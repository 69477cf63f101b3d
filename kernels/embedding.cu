// Token and position embedding.
//
//                    forward               sum_segments            join_segments
//   threads          256                   128                     128
//   work a thread    one vector of 2 rows  one vector of 32 rows   one vector of a run's segments
//   shared memory    -                     256 B                   -
//   registers        32                    72 (bf16), 68 (fp32)    48 (bf16), 40 (fp32)
//   blocks per SM    8                     7                       10 (bf16), 12 (fp32)
//
// GPT-2 124M, bf16, B=64, T=1024: N = 65536 tokens, C = 768, so 96 vectors a row. Forward: 32768·96 threads, 12288
// blocks. Backward: 131072 entries for 50304 + 1024 rows of the tables, so keys of 16 bits; 4096 segments of 32
// entries, a block each with 96 of its 128 threads busy.
#include "kernels/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/launch_shapes.h"
#include "kernels/cuda/packed_codes.cuh"
#include "kernels/cuda/pdl.cuh"
#include "kernels/packed_weight_check.h"

namespace {

constexpr int THREADS = 256;

// A vector of a row of the table; zeros if the index is outside the table.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_row(const T* table, int64_t stride, int64_t rows, int32_t index, int64_t c) {
    return index >= 0 && index < rows ? load_pack<W>(table + index * stride + c) : Pack<T, W>{};
}

// A thread takes the same columns of TOKENS tokens that are N/TOKENS apart, so that TOKENS loads of ids, and then of
// rows, are in flight.
constexpr int TOKENS = 2;

template <int W, typename T>
__global__ void __launch_bounds__(THREADS)
    forward_kernel(T* out, int64_t out_stride, const int32_t* tokens, const int32_t* positions, const T* wte,
                   int64_t wte_stride, int64_t V, const T* wpe, int64_t wpe_stride, int64_t P, int64_t N, int64_t C) {
    pdl_launch_dependents();
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x, step = ceil_div(N, TOKENS);
    if (i >= step * (C / W)) return;
    const RowItem at = row_item(i, C / W);
    const int64_t c = at.item * W;
    int32_t token[TOKENS], position[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const int64_t n = at.row + t * step;
        token[t] = n < N ? tokens[n] : -1;
        position[t] = wpe && n < N ? positions[n] : -1;
    }
    Pack<T, W> e[TOKENS], p[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        e[t] = load_row<W>(wte, wte_stride, V, token[t], c);
        p[t] = load_row<W>(wpe, wpe_stride, P, position[t], c);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const int64_t n = at.row + t * step;
        if (n >= N) continue;
        Floats<W> x = as_floats(e[t]);
        const Floats<W> added = as_floats(p[t]);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += added[k];
        store_floats<W>(out + n * out_stride + c, x);
    }
}

// The same with a packed table. A thread takes four columns of a token, in vectors of W.
template <Packing P, int W, typename T>
__global__ void __launch_bounds__(THREADS)
    packed_forward_kernel(T* out, int64_t out_stride, const int32_t* tokens, const int32_t* positions,
                          const uint8_t* wte, int64_t row_bytes, int64_t V, const T* wpe, int64_t wpe_stride,
                          int64_t num_positions, int64_t N, int64_t C) {
    pdl_launch_dependents();
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= N * (C / 4)) return;
    const RowItem at = row_item(i, C / 4);
    const int64_t c = at.item * 4;
    const int32_t token = tokens[at.row], position = wpe ? positions[at.row] : -1;
    Floats<4> x = {};
    if (token >= 0 && token < V) x = dequantise_four<P>(wte + token * row_bytes, C, c);
#pragma unroll
    for (int first = 0; first < 4; first += W) {
        const Floats<W> added = as_floats(load_row<W>(wpe, wpe_stride, num_positions, position, c + first));
        Floats<W> sum;
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] = wpe ? x[first + k] + added[k] : x[first + k];  // -0 + 0 is 0
        store_floats<W>(out + at.row * out_stride + c + first, sum);
    }
}

// --- backward
//
// The rows of both tables are numbered consecutively, those of the positions first. Each token n gives an entry for
// each of the one or two rows that it adds to. A stable radix sort orders the entries by row, so that the entries of a
// row form a run. The sorted list is cut into segments of SEGMENT entries; a block sums the runs in its segment, in
// order. A run that lies within the segment is added to the table at once. The sum of a run that starts before or ends
// after the segment goes to the scratch, and a second kernel adds these sums over the segments, in order. No two blocks
// write the same row, many blocks share the work of a frequent token, and every sum has a fixed order.

constexpr int SEGMENT = int(gpu_scratch::EMBEDDING_SEGMENT);
constexpr int SUM_THREADS = 128;  // columns of a block, in vectors

struct Scratch {
    int32_t *keys, *sorted_keys, *order, *sorted_order;  // [entries] each
    float* partials;                                     // [segments, 2, C]: first run, last run of a segment
    void* sort;
};

// The layout of the scratch. It always has space for the entries of both tables.
Scratch scratch_layout(uint8_t* base, int64_t N, int64_t C) {
    const int64_t entries = 2 * N;
    Scratch s{};
    const auto take = [&](int64_t bytes) {
        uint8_t* const at = base;
        base += gpu_scratch::embedding_aligned(bytes);
        return at;
    };
    for (int32_t** list : {&s.keys, &s.sorted_keys, &s.order, &s.sorted_order})
        *list = reinterpret_cast<int32_t*>(take(entries * int64_t(sizeof(int32_t))));
    s.partials = reinterpret_cast<float*>(take(gpu_scratch::embedding_partials(entries, C)));
    s.sort = take(gpu_scratch::embedding_sort(entries));
    return s;
}

struct Table {
    float* data;
    int64_t stride, rows;
    const int32_t* index;  // [N]: the row that each token adds to
    bool accumulate;
};

// One or two tables, whose rows are numbered consecutively; the second may be empty.
struct Tables {
    Table first, second;
};

// Entry e is token e mod N and its row in table e / N. An index outside its table gets a key after all rows.
__global__ void __launch_bounds__(THREADS)
    make_keys_kernel(int32_t* keys, int32_t* order, Tables tables, int64_t N, int64_t entries) {
    const int64_t e = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (e >= entries) return;
    const bool second = e >= N;
    const Table table = second ? tables.second : tables.first;
    const int64_t n = second ? e - N : e, row = table.index[n];
    const int64_t before = second ? tables.first.rows : 0, none = tables.first.rows + tables.second.rows;
    keys[e] = int32_t(row >= 0 && row < table.rows ? before + row : none);
    order[e] = int32_t(n);
}

template <int W>
__device__ __forceinline__ void add_to_row(const Tables& tables, int32_t key, int64_t c, const Floats<W>& sum) {
    const bool second = key >= tables.first.rows;
    const Table table = second ? tables.second : tables.first;
    const int64_t row = second ? key - tables.first.rows : key;
    if (row >= table.rows) return;
    float* to = table.data + row * table.stride + c;
    Floats<W> x = sum;
    if (table.accumulate) {
        const Floats<W> before = load_floats<W>(to);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += before[k];
    }
    store_floats<W>(to, x);
}

// Block (segment, columns) sums the runs of a segment.
template <int W, typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_segments_kernel(Tables tables, float* partials, const T* dout, int64_t stride, const int32_t* keys,
                        const int32_t* order, int64_t entries, int64_t C) {
    constexpr int BATCH = 8;  // rows in flight
    const int64_t begin = blockIdx.x * int64_t(SEGMENT), c = (blockIdx.y * int64_t(SUM_THREADS) + threadIdx.x) * W;
    const int size = int(min(int64_t(SEGMENT), entries - begin));
    __shared__ int32_t key[SEGMENT], token[SEGMENT];
    if (int(threadIdx.x) < size) {
        key[threadIdx.x] = keys[begin + threadIdx.x];
        token[threadIdx.x] = order[begin + threadIdx.x];
    }
    __syncthreads();
    if (c >= C) return;
    const bool continues_before = begin > 0 && keys[begin - 1] == key[0];
    const bool continues_after = begin + size < entries && keys[begin + size] == key[size - 1];
    float* partial = partials + blockIdx.x * 2 * C + c;
    Floats<W> sum{};
    bool first_run = true;
    for (int i = 0; i < size; i += BATCH) {
        Pack<T, W> d[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (i + b < size) d[b] = load_pack<W>(dout + token[i + b] * stride + c);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (i + b >= size) continue;
            const Floats<W> x = as_floats(d[b]);
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += x[k];
            const bool last = i + b + 1 == size;
            if (!last && key[i + b + 1] == key[i + b]) continue;
            if (first_run && continues_before)
                store_floats<W>(partial, sum);
            else if (last && continues_after)
                store_floats<W>(partial + C, sum);
            else
                add_to_row<W>(tables, key[i + b], c, sum);
            first_run = false;
            sum = Floats<W>{};
        }
    }
}

// Block (segment, columns) joins the run that starts in this segment and continues in later ones, if there is one.
template <int W>
__global__ void __launch_bounds__(SUM_THREADS)
    join_segments_kernel(Tables tables, const float* partials, const int32_t* keys, int64_t entries, int64_t C) {
    const int64_t begin = blockIdx.x * int64_t(SEGMENT), end = begin + SEGMENT;
    if (end >= entries) return;
    const int32_t row = keys[end];
    const bool began_before = keys[begin] == row && begin > 0 && keys[begin - 1] == row;
    if (keys[end - 1] != row || began_before) return;
    int64_t segments = 0;  // that the run continues in: their first key is the run's
    for (int more = SUM_THREADS; more == SUM_THREADS; segments += more) {
        const int64_t at = end + (segments + threadIdx.x) * SEGMENT;
        more = __syncthreads_count(at < entries && keys[at] == row);
    }
    const int64_t c = (blockIdx.y * int64_t(SUM_THREADS) + threadIdx.x) * W;
    if (c >= C) return;
    const float* partial = partials + blockIdx.x * 2 * C + c;
    Floats<W> sum = load_floats<W>(partial + C);
#pragma unroll 8
    for (int64_t i = 1; i <= segments; i++) {
        const Floats<W> next = load_floats<W>(partial + i * 2 * C);
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] += next[k];
    }
    add_to_row<W>(tables, row, c, sum);
}

// dtable[index[n]] (+)= dout[n] for both tables
void scatter_add(const char* op, const Tables& tables, const Tensor& dout, const Tensor& scratch, bool aligned,
                 Stream stream) {
    const int64_t N = dout.shape[0], C = dout.shape[1], rows = tables.first.rows + tables.second.rows;
    for (const Table& table : {tables.first, tables.second})
        if (!table.accumulate && table.rows * C > 0)
            cuda_check(cudaMemset2DAsync(table.data, size_t(table.stride) * sizeof(float), 0, size_t(C) * sizeof(float),
                                         size_t(table.rows), cuda_stream(stream)),
                       op);
    if (N * C == 0) return;
    const int64_t entries = tables.second.data ? 2 * N : N;
    const Scratch s = scratch_layout(scratch.as<uint8_t>(), N, C);
    make_keys_kernel<<<grid_of(ceil_div(entries, THREADS)), THREADS, 0, cuda_stream(stream)>>>(s.keys, s.order, tables,
                                                                                               N, entries);
    check_launch(op, stream);
    int bits = 1;
    while (rows >> bits) bits++;  // of the largest key
    const auto sort = [&](void* memory, size_t& bytes) {
        cuda_check(cub::DeviceRadixSort::SortPairs(memory, bytes, s.keys, s.sorted_keys, s.order, s.sorted_order,
                                                   int(entries), 0, bits, cuda_stream(stream)),
                   op);
    };
    size_t sort_bytes = 0;
    sort(nullptr, sort_bytes);
    require(int64_t(sort_bytes) <= gpu_scratch::embedding_sort(2 * N), op, ": the sort of ", entries,
            " entries asks for ", sort_bytes,
            " bytes, more than embedding_sort() plans (kernels/cuda/launch_shapes.h)");
    sort(s.sort, sort_bytes);
    dispatch_dtype(op, dout.dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(C % FULL_WIDTH<T> == 0 && aligned, [&](auto width) {
            constexpr int W = decltype(width)::value;
            const dim3 grid(unsigned(ceil_div(entries, SEGMENT)), unsigned(ceil_div(C, SUM_THREADS * W)));
            sum_segments_kernel<W><<<grid, SUM_THREADS, 0, cuda_stream(stream)>>>(
                tables, s.partials, dout.as<const T>(), row_stride(dout), s.sorted_keys, s.sorted_order, entries, C);
            check_launch(op, stream);
            join_segments_kernel<W>
                <<<grid, SUM_THREADS, 0, cuda_stream(stream)>>>(tables, s.partials, s.sorted_keys, entries, C);
            check_launch(op, stream);
        });
    });
}

Table table_of(const Tensor& dtable, const Tensor& index, bool accumulate) {
    if (!dtable) return {};
    return {dtable.as<float>(), row_stride(dtable), dtable.shape[0], index.as<int32_t>(), accumulate};
}

void check_tokens(const char* op, const Tensor& tokens, const Tensor& positions, const Tensor& wpe, int64_t N,
                  int64_t C, DType dtype) {
    check_tensor(op, "tokens", tokens, DType::I32, {N});
    if (!wpe) return;
    check_matrix(op, "wpe", wpe, dtype);
    check_matrix(op, "wpe", wpe, wpe.shape[0], C, Given::Required, dtype);
    check_tensor(op, "positions", positions, DType::I32, {N});
}

}  // namespace

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream stream) {
    const char* op = "embedding_forward";
    const DType dtype = check_activation_dtype(op, "out", out);
    check_matrix(op, "out", out, dtype);
    check_matrix(op, "wte", wte, dtype);
    const int64_t N = out.shape[0], C = out.shape[1], V = wte.shape[0];
    check_matrix(op, "wte", wte, V, C, Given::Required, dtype);
    check_tokens(op, tokens, positions, wpe, N, C, dtype);
    if (N * C == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(C % FULL_WIDTH<T> == 0 && rows_aligned({out, wte, wpe}), [&](auto width) {
            constexpr int W = decltype(width)::value;
            forward_kernel<W>
                <<<grid_of(ceil_div(ceil_div(N, TOKENS) * (C / W), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
                    out.as<T>(), row_stride(out), tokens.as<int32_t>(), wpe ? positions.as<int32_t>() : nullptr,
                    wte.as<const T>(), row_stride(wte), V, wpe ? wpe.as<const T>() : nullptr, wpe ? row_stride(wpe) : 0,
                    wpe ? wpe.shape[0] : 0, N, C);
        });
    });
    check_launch(op, stream);
}

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, const PackedWeight& wte, Tensor wpe,
                       Stream stream) {
    const char* op = "embedding_forward";
    const DType dtype = check_activation_dtype(op, "out", out);
    check_matrix(op, "out", out, dtype);
    const int64_t N = out.shape[0], C = out.shape[1], V = wte.rows.shape[0];
    check_packed(op, wte, V, C);
    check_tokens(op, tokens, positions, wpe, N, C, dtype);
    require(rows_aligned({wte.rows}), op, ": the packed table is not aligned to 16 bytes");
    if (N == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        const auto launch = [&](auto kernel) {
            kernel<<<grid_of(ceil_div(N * (C / 4), THREADS)), THREADS, 0, cuda_stream(stream)>>>(
                out.as<T>(), row_stride(out), tokens.as<int32_t>(), wpe ? positions.as<int32_t>() : nullptr,
                wte.rows.as<const uint8_t>(), packed_row_bytes(wte.packing, C), V, wpe ? wpe.as<const T>() : nullptr,
                wpe ? row_stride(wpe) : 0, wpe ? wpe.shape[0] : 0, N, C);
        };
        dispatch_packing(wte.packing, [&](auto packing) {
            constexpr Packing P = decltype(packing)::value;
            rows_aligned({out, wpe}) ? launch(packed_forward_kernel<P, 4, T>) : launch(packed_forward_kernel<P, 1, T>);
        });
    });
    check_launch(op, stream);
}

void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Tensor scratch,
                        bool accumulate_wte, bool accumulate_wpe, Stream stream) {
    const char* op = "embedding_backward";
    check_matrix(op, "dout", dout, check_activation_dtype(op, "dout", dout));
    const int64_t N = dout.shape[0], C = dout.shape[1];
    require(N <= INT32_MAX / 2, op, ": dout has ", N, " rows, expected at most ", INT32_MAX / 2);
    // Checks both tables before either is written.
    if (dwte) {
        check_matrix(op, "dwte", dwte);
        check_matrix(op, "dwte", dwte, dwte.shape[0], C);
        check_tensor(op, "tokens", tokens, DType::I32, {N});
    }
    if (dwpe) {
        check_matrix(op, "dwpe", dwpe);
        check_matrix(op, "dwpe", dwpe, dwpe.shape[0], C);
        check_tensor(op, "positions", positions, DType::I32, {N});
    }
    if (!dwte && !dwpe) return;
    check_scratch(op, scratch, embedding_backward_scratch(N, 0, C));
    const Table of_tokens = table_of(dwte, tokens, accumulate_wte),
                of_positions = table_of(dwpe, positions, accumulate_wpe);
    const Tables tables = dwpe ? Tables{of_positions, of_tokens} : Tables{of_tokens, {}};
    require(tables.first.rows + tables.second.rows <= INT32_MAX, op, ": ", tables.first.rows + tables.second.rows,
            " rows of tables, expected at most ", INT32_MAX);
    scatter_add(op, tables, dout, scratch, rows_aligned({dwte, dwpe, dout, scratch}), stream);
}
