// matmul of tensor_ops.h: batches of fp32 matrices of any strides.
#include <algorithm>

#include "kernels/cpu/gemm_blocked.h"
#include "kernels/matmul.h"
#include "tensor_library/tensor_ops_check.h"

namespace {

// A matrix for matmul(): row-major, or column-major and passed as its transpose. fits: its strides allow one of these.
struct LibraryMatrix {
    Tensor tensor;
    bool transposed, fits;
};

LibraryMatrix library_matrix(float* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    if (rows == 1) row_stride = std::max<int64_t>(columns, 1);
    if (columns == 1) column_stride = row_stride == 1 ? rows : 1;
    LibraryMatrix m{host_tensor(data, {rows, columns}), false, true};
    if (column_stride == 1 && row_stride >= columns) {
        m.tensor.stride[0] = row_stride;
    } else if (row_stride == 1 && column_stride >= rows) {
        m.tensor = host_tensor(data, {columns, rows});
        m.tensor.stride[0] = column_stride;
        m.transposed = true;
    } else {
        m.fits = false;
    }
    return m;
}

// out = a·b through matmul(), or outᵀ = bᵀ·aᵀ where out is column-major. Returns false if matmul() does not support the
// strides.
bool multiply_by_library(const BatchedMatmul& p, float* out, float* a, float* b, Stream stream) {
    const LibraryMatrix o = library_matrix(out, p.M, p.N, p.out_row, p.out_column);
    const LibraryMatrix x = library_matrix(a, p.M, p.K, p.a_row, p.a_column);
    const LibraryMatrix y = library_matrix(b, p.K, p.N, p.b_row, p.b_column);
    if (!o.fits || !x.fits || !y.fits) return false;
    if (o.transposed)
        matmul(o.tensor, y.tensor, x.tensor, !y.transposed, !x.transposed, false, stream);
    else
        matmul(o.tensor, x.tensor, y.tensor, x.transposed, y.transposed, false, stream);
    return true;
}

}  // namespace

void tensor_matmul(Tensor out, Tensor a, Tensor b, Stream stream) {
    const char* op = "tensor_matmul";
    const BatchedMatmul p = check_batched_matmul(op, out, a, b);
    if (out.numel() == 0) return;
    const int64_t matrices = p.batch.numel();
    const auto of_matrix = [&](int operand, int64_t matrix) {
        int64_t at = 0;
        for (int d = p.batch.rank - 1; d >= 0; d--) {
            at += matrix % p.batch.shape[d] * p.batch.operand[operand].stride[d];
            matrix /= p.batch.shape[d];
        }
        return static_cast<float*>(p.batch.operand[operand].data) + at;
    };
    const auto multiply = [&](int64_t i) {
        gemm_blocked(p.M, p.N, p.K, {of_matrix(1, i), p.a_row, p.a_column}, {of_matrix(2, i), p.b_row, p.b_column},
                     false, of_matrix(0, i), p.out_row, p.out_column);
    };
    // Batches of small matrices: each thread multiplies whole matrices. Otherwise all threads share each matmul.
    constexpr double SMALL = 1 << 18, LARGE = 1 << 24;
    if (double(p.M) * double(p.N) * double(p.K) >= (matrices < 4 ? SMALL : LARGE)) {
        for (int64_t i = 0; i < matrices; i++)
            if (!multiply_by_library(p, of_matrix(0, i), of_matrix(1, i), of_matrix(2, i), stream)) multiply(i);
        return;
    }
    bool failed = false;  // an exception must not leave the parallel region
#pragma omp parallel for schedule(static) if (matrices > 1)
    for (int64_t i = 0; i < matrices; i++) {
        try {
            multiply(i);
        } catch (const Error&) {
#pragma omp atomic write
            failed = true;
        }
    }
    require(!failed, op, ": no memory for packing buffers");
}
