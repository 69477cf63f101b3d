#include "kernels/generation/decode_step.h"

#include "runtime/error.h"

// The CPU has no launches to save: a decode step runs linear() and decode_attention() one after the other.
int64_t decode_step_max_batch(const DecodeModel&) {
    return 0;
}

int64_t decode_step_scratch(const DecodeModel&) {
    return 0;
}

void decode_step_prepare(Tensor, const DecodeModel&, const InferenceWeights&, const std::vector<LayerCache>&, Stream) {
    throw Error("decode_step_prepare: the fused decode step needs a GPU");
}

void decode_step(Tensor, Tensor, const DecodeBatch&, const DecodeModel&, const InferenceWeights&, Tensor, Stream) {
    throw Error("decode_step: the fused decode step needs a GPU");
}
