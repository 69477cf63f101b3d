// The roles that a model's parameters have: Param::role (params.h). The parameter table in train_gpt.cu says what they
// hold, models/ how the files of a family name them.
#pragma once

// All layers use the same roles. The bias of a weight is the role after it (bias_of()).
enum Role {
    // Token and position embedding, and the norm after them.
    WTE,
    WPE,
    EMBEDNORM_W,
    EMBEDNORM_B,
    // The attention half of a block. Gated linear attention: the decay gate and the norm of each head's output.
    NORM1_W,
    NORM1_B,
    QKV_W,
    QKV_B,
    QNORM_W,  // QK-norm with weights
    KNORM_W,
    DECAY_GATE_W,
    DECAY_GATE_B,
    HEADNORM_W,
    PROJ_W,
    PROJ_B,
    // The MLP half of a block. SwiGLU: FC is gate and up, fused.
    NORM2_W,
    NORM2_B,
    FC_W,
    FC_B,
    FCPROJ_W,
    FCPROJ_B,
    // The final norm, and the output head, which is absent when tied to WTE.
    NORMF_W,
    NORMF_B,
    HEAD_W,
    HEAD_B  // also of a tied head
};

// The weights [outputs, inputs] of a block's linear layers.
constexpr Role LINEAR_LAYERS[] = {QKV_W, PROJ_W, FC_W, FCPROJ_W};
constexpr int NUM_LINEAR_LAYERS = 4;

// The position of a role in LINEAR_LAYERS; -1: it is no such weight.
constexpr int linear_layer_index(int role) {
    for (int i = 0; i < NUM_LINEAR_LAYERS; i++)
        if (LINEAR_LAYERS[i] == role) return i;
    return -1;
}

constexpr Role bias_of(Role weight) {
    return static_cast<Role>(weight + 1);
}
static_assert(bias_of(EMBEDNORM_W) == EMBEDNORM_B && bias_of(NORM1_W) == NORM1_B && bias_of(QKV_W) == QKV_B &&
              bias_of(DECAY_GATE_W) == DECAY_GATE_B && bias_of(PROJ_W) == PROJ_B && bias_of(NORM2_W) == NORM2_B &&
              bias_of(FC_W) == FC_B && bias_of(FCPROJ_W) == FCPROJ_B && bias_of(NORMF_W) == NORMF_B &&
              bias_of(HEAD_W) == HEAD_B);
