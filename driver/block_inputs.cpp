#include "driver/block_inputs.h"

BlockInputs::BlockInputs(const Context& context, int64_t blocks, int64_t input_bytes)
    : ctx(context),
      slot_bytes(input_bytes),
      memory(blocks * input_bytes, "inputs of blocks", MemoryPlace::Host),
      copies(create_stream()) {}

BlockInputs::~BlockInputs() {
    destroy_stream(copies);
}

void* BlockInputs::begin(int64_t block, const Tensor& input) {
    require(input.contiguous() && input.bytes() <= slot_bytes, "a block's input of ", input.bytes(),
            " bytes for a slot of ", slot_bytes);
    computed.record(ctx.stream);
    computed.make_wait(copies);
    return memory.at(block * slot_bytes, DType::U8, {slot_bytes}).data;
}

void BlockInputs::store(int64_t block, Tensor input) {
    void* const slot = begin(block, input);
    const Range range(ctx.profiler, "block input to the host", copies);
    copy_to_host_async(slot, input.data, size_t(input.bytes()), copies);
    copied.record(copies);
}

void BlockInputs::fetch(int64_t block, Tensor input) {
    const void* const slot = begin(block, input);
    const Range range(ctx.profiler, "block input from the host", copies);
    copy_to_device(input.data, slot, size_t(input.bytes()), copies);
    copied.record(copies);
}

void BlockInputs::wait() {
    copied.make_wait(ctx.stream);
}
