// The fused decode step's kernels for weights in fp8 and int8, compiled beside those of decode_step.cu.
#include "kernels/generation/decode_step_kernel.cuh"

namespace fused_decode {

template void launch<bf16, 8>(const char*, const Arguments<bf16>&, const Plan&, bool, Stream);
template void launch<fp16, 8>(const char*, const Arguments<fp16>&, const Plan&, bool, Stream);

}  // namespace fused_decode
