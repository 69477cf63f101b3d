// A thread copies one vector. LLaMA 1B, bf16: a row of C = 2048 is 256 vectors of 8, one block. 4,096 rows take 4,096
// blocks.
#include "kernels/gather_rows.h"

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/gather_rows_check.h"

namespace {

constexpr int THREADS = 256;

// scale times W elements.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_scaled(const T* p, float scale) {
    const Pack<T, W> pack = load_pack<W>(p);
    if (scale == 1) return pack;
    Floats<W> x = as_floats(pack);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] *= scale;
    return as_pack<T>(x);
}

// Row i of gathered is row rows[i] of all.
template <typename T>
struct MoveArguments {
    T* gathered;
    int64_t gathered_stride;
    T* all;
    int64_t all_stride;
    const int32_t* rows;
    int64_t n, N, C;
    float scale;
};

template <int W, bool GATHER, typename T>
__global__ void __launch_bounds__(THREADS) move_kernel(MoveArguments<T> a) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= a.n * (a.C / W)) return;
    const RowItem at = row_item(i, a.C / W);
    const int64_t c = at.item * W, row = a.rows[at.row];
    const bool inside = row >= 0 && row < a.N;
    T *const one = a.gathered + at.row * a.gathered_stride + c, *const other = a.all + row * a.all_stride + c;
    if constexpr (GATHER)
        store_pack<W>(one, inside ? load_scaled<W>(other, a.scale) : Pack<T, W>{});
    else if (inside)
        store_pack<W>(other, load_scaled<W>(one, a.scale));
}

template <int W, typename T>
__global__ void __launch_bounds__(THREADS) zero_kernel(T* all, int64_t stride, int64_t N, int64_t C) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i >= N * (C / W)) return;
    const RowItem at = row_item(i, C / W);
    store_pack<W>(all + at.row * stride + at.item * W, Pack<T, W>{});
}

template <bool GATHER>
void move(const char* op, const Tensor& gathered, const Tensor& all, const Tensor& rows, float scale, Stream stream) {
    const int64_t n = gathered.shape[0], N = all.shape[0], C = gathered.shape[1];
    if (C == 0) return;
    dispatch_dtype(op, gathered.dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(C % FULL_WIDTH<T> == 0 && rows_aligned({gathered, all}), [&](auto width) {
            constexpr int W = decltype(width)::value;
            const auto blocks = [&](int64_t count) { return grid_of(ceil_div(count * (C / W), THREADS)); };
            if (!GATHER && N > 0)
                zero_kernel<W><<<blocks(N), THREADS, 0, cuda_stream(stream)>>>(all.as<T>(), row_stride(all), N, C);
            if (n > 0)
                move_kernel<W, GATHER><<<blocks(n), THREADS, 0, cuda_stream(stream)>>>(
                    MoveArguments<T>{gathered.as<T>(), row_stride(gathered), all.as<T>(), row_stride(all),
                                     rows.as<int32_t>(), n, N, C, scale});
        });
    });
    check_launch(op, stream);
}

}  // namespace

void gather_rows(Tensor out, Tensor inp, Tensor rows, Stream stream, float scale) {
    const char* op = "gather_rows";
    check_rows(op, "out", out, "inp", inp, rows, check_activation_dtype(op, "out", out));
    move<true>(op, out, inp, rows, scale, stream);
}

void scatter_rows(Tensor out, Tensor inp, Tensor rows, Stream stream, float scale) {
    const char* op = "scatter_rows";
    check_rows(op, "inp", inp, "out", out, rows, check_activation_dtype(op, "inp", inp));
    move<false>(op, inp, out, rows, scale, stream);
}
