#include <algorithm>
#include <cmath>

#include "kernels/generation/sampling.h"

namespace {

void check_options(const SamplingOptions& o) {
    const char* op = "sample_tokens";
    require(o.temperature >= 0 && std::isfinite(o.temperature), op, ": temperature is ", o.temperature,
            ", expected 0 or more");
    require(o.top_k >= 0, op, ": top_k is ", o.top_k, ", expected 0 or more");
    require(o.top_p > 0 && o.top_p <= 1, op, ": top_p is ", o.top_p, ", expected above 0 and up to 1");
    require(o.min_p >= 0 && o.min_p <= 1, op, ": min_p is ", o.min_p, ", expected 0 to 1");
    require(o.repeat_penalty > 0 && std::isfinite(o.repeat_penalty), op, ": repeat_penalty is ", o.repeat_penalty,
            ", expected more than 0");
    require(std::isfinite(o.presence_penalty), op, ": presence_penalty is ", o.presence_penalty,
            ", expected a finite number");
    require(std::isfinite(o.frequency_penalty), op, ": frequency_penalty is ", o.frequency_penalty,
            ", expected a finite number");
}

uint32_t classes_of(const SamplingOptions& o, int64_t V, bool masked) {
    using namespace sampling_class;
    const bool has_top_k = o.top_k > 0 && o.top_k < V;
    uint32_t classes = UNFILTERED;
    if (o.temperature > 0 && (has_top_k || o.top_p < 1 || o.min_p > 0)) {
        classes = o.top_k > 0 && std::min(o.top_k, V) <= SAMPLING_FAST_TOP_K ? CANDIDATES : THRESHOLD;
        if (classes == THRESHOLD && o.top_p < 1 && !has_top_k) classes |= HISTOGRAM;
        if (o.top_p < 1) classes |= TOP_P;
    }
    if (o.repeat_penalty != 1) classes |= REPEAT;
    if (o.presence_penalty != 0 || o.frequency_penalty != 0) classes |= COUNTS;
    return classes | (masked ? MASK : 0u);
}

}  // namespace

SamplingRow sampling_row(const SamplingOptions& o, int64_t V, int64_t slot, bool masked) {
    check_options(o);
    constexpr double LOG2_OF_E = 1.4426950408889634074;
    SamplingRow r;
    r.seed = o.seed;
    r.rate = o.temperature > 0 ? LOG2_OF_E / double(o.temperature) : 0;
    r.inverse_repeat = 1 / double(o.repeat_penalty);
    r.temperature = o.temperature;
    r.top_p = o.top_p;
    r.min_p = o.min_p;
    r.repeat_penalty = o.repeat_penalty;
    r.presence_penalty = o.presence_penalty;
    r.frequency_penalty = o.frequency_penalty;
    r.top_k = static_cast<int32_t>(std::min(o.top_k, V));
    r.slot = static_cast<int32_t>(slot);
    r.classes = classes_of(o, V, masked);
    return r;
}
