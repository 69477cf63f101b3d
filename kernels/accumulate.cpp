#include "kernels/accumulate.h"

#include "kernels/accumulate_check.h"
#include "kernels/cpu/cpu_loops.h"
#include "runtime/device/convert.h"

namespace {

float value(float x) {
    return x;
}
float value(bf16 x) {
    return to_float(x);
}
void put(float& out, float x) {
    out = x;
}
void put(bf16& out, float x) {
    out = to_bf16(x);
}

template <typename Out, typename Inp>
void run(Out* out, const Inp* inp, bool add, int64_t n) {
    parallel_chunks(1, n, true, [=](int64_t, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) put(out[i], add ? value(out[i]) + value(inp[i]) : value(inp[i]));
    });
}

template <typename Out>
void run_to(Out* out, const Tensor& inp, bool add, int64_t n) {
    if (inp.dtype == DType::F32)
        run(out, inp.as<float>(), add, n);
    else
        run(out, inp.as<bf16>(), add, n);
}

}  // namespace

void accumulate(Tensor out, Tensor inp, bool add, Stream) {
    const int64_t n = check_accumulate(out, inp);
    if (out.dtype == DType::F32)
        run_to(out.as<float>(), inp, add, n);
    else
        run_to(out.as<bf16>(), inp, add, n);
}
