#include "kernels/accumulate.h"

#include "kernels/accumulate_check.h"
#include "kernels/cpu/bf16_elements.h"
#include "kernels/cpu/cpu_loops.h"
#include "runtime/device/convert_dtype.h"

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
float sum_of(Out out, Inp inp, bool add) {
    return add ? value(out) + value(inp) : value(inp);
}

template <typename Out, typename Inp>
void run(Out* out, const Inp* inp, bool add, int64_t n) {
    parallel_chunks(1, n, true, [=](int64_t, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) put(out[i], sum_of(out[i], inp[i], add));
    });
}

template <typename Inp>
void run_stochastic(bf16* out, const Inp* inp, bool add, int64_t n, const RoundingNoise& noise) {
    const uint64_t t = uint64_t(*noise.t.as<int64_t>());
    ParamSegment segment{0, n};
    segment.key = noise.key;
    segment.first_element = noise.first_element;
    parallel_chunks(1, n, true, [=](int64_t, int64_t begin, int64_t end) {
        float sums[ROUNDING_CHUNK];
        for (int64_t at = begin; at < end; at += ROUNDING_CHUNK) {
            const int64_t last = std::min(at + ROUNDING_CHUNK, end);
            for (int64_t i = at; i < last; i++) sums[i - at] = sum_of(out[i], inp[i], add);
            round_stochastically(out + at, sums, last - at, noise.seed, t, segment, at, Rounded::Param);
        }
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
    const int64_t n = check_accumulate("accumulate", out, inp);
    if (out.dtype == DType::F32)
        run_to(out.as<float>(), inp, add, n);
    else
        run_to(out.as<bf16>(), inp, add, n);
}

void accumulate_stochastic(Tensor out, Tensor inp, bool add, const RoundingNoise& noise, Stream) {
    const int64_t n = check_accumulate_stochastic(out, inp, noise);
    if (inp.dtype == DType::F32)
        run_stochastic(out.as<bf16>(), inp.as<float>(), add, n, noise);
    else
        run_stochastic(out.as<bf16>(), inp.as<bf16>(), add, n, noise);
}
