// Models and shapes of the tests of fp8 training.
#pragma once

#include "dev/tests/model_fixture.h"

// fp8 quantises fp32 on the CPU, bf16 on a GPU.
inline RunShape fp8_training_shape(int64_t B, int64_t T) {
    RunShape shape = training_shape(B, T, backend_device() == Device::CPU ? DType::F32 : DType::BF16);
    shape.fp8.on = true;
    return shape;
}

// A variant with sizes that are multiples of 16.
inline ModelConfig fp8_config(const ModelVariant& variant) {
    ModelConfig c = base_config();
    variant.apply(c);
    c.channels = 32;
    c.ffn = 48;
    c.head_size = 16;
    c.rope_scaling.fraction = std::max(c.rope_scaling.fraction, 0.5);
    for (LayerConfig& l : c.layer) l.window = std::min<int64_t>(l.window, 5);
    validate(c, variant.name);
    return c;
}
