#include "kernels/packed_weight.h"

#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/packed_rows.h"
#include "kernels/packed_weight_check.h"

void packed_dequantise(Tensor out, const PackedWeight& weight, Stream) {
    check_matrix("packed_dequantise", "out", out);
    const int64_t OC = out.shape[0], C = out.shape[1];
    check_packed("packed_dequantise", weight, OC, C);
#pragma omp parallel for schedule(static) if (OC * C > PARALLEL_MIN)
    for (int64_t o = 0; o < OC; o++) dequantise_row(out.as<float>() + o * row_stride(out), weight, o);
}
