#include "kernels/softcap.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/softcap_vec.h"

namespace {

MULTIARCH void cap_row(float* x, int64_t n, Softcap softcap) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        vec_store_lanes(x + i, capped(vec_load_lanes(x + i, lanes), softcap.function, softcap.cap).value, lanes);
    });
}

}  // namespace

void softcap_forward(Tensor logits, Softcap softcap, Stream) {
    const char* op = "softcap_forward";
    check_matrix(op, "logits", logits);
    check_softcap(op, softcap);
    if (!softcap) return;
    elementwise([&](float* x, int64_t n) { cap_row(x, n, softcap); }, logits);
}
