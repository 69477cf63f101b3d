#include "driver/block_inputs.h"

BlockInputs::BlockInputs(const Context& context, int64_t blocks, int64_t input_bytes)
    : ctx(context),
      buffer_bytes(input_bytes),
      memory(blocks * input_bytes, "inputs of blocks", MemoryPlace::Host),
      copies(create_stream()) {}

BlockInputs::~BlockInputs() {
    destroy_stream(copies);
}

void* BlockInputs::begin(int64_t block, const Tensor& input) {
    require(input.contiguous() && input.bytes() <= buffer_bytes, "a block's input of ", input.bytes(),
            " bytes for a buffer of ", buffer_bytes);
    computed.record(ctx.stream);
    computed.make_wait(copies);
    return memory.at(block * buffer_bytes, DType::U8, {buffer_bytes}).data;
}

void BlockInputs::store(int64_t block, Tensor input) {
    void* const buffer = begin(block, input);
    const Range range(ctx.profiler, "block input to the host", copies);
    copy_to_host_async(buffer, input.data, size_t(input.bytes()), copies);
    copied.record(copies);
}

void BlockInputs::fetch(int64_t block, Tensor input) {
    const void* const buffer = begin(block, input);
    const Range range(ctx.profiler, "block input from the host", copies);
    copy_to_device(input.data, buffer, size_t(input.bytes()), copies);
    copied.record(copies);
}

void BlockInputs::wait() {
    copied.make_wait(ctx.stream);
}
