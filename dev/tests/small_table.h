// A small parameter table for the tests of parallel/.
#pragma once

#include <string>

#include "runtime/model/params.h"

constexpr int LAYERS = 3;

// Embedding, layers of two tensors, a head unless it is tied, and norms. No number of ranks divides the sizes.
inline ParamTable table_of(int64_t world, bool tied) {
    ParamTable table;
    const auto add = [&](int role, int layer, int group, const std::string& name, int64_t rows, int64_t cols) {
        Param p;
        p.role = role;
        p.layer = layer;
        p.group = group;
        p.name = name;
        p.rows = p.padded_rows = rows;
        p.cols = cols;
        p.init_std = p.init_value = 0;
        p.decay = cols > 0;
        p.fp32 = role == 4;
        p.rate_group = role == 0   ? RateGroup::Embeddings
                       : role == 1 ? RateGroup::HiddenMatrices
                       : role == 3 ? RateGroup::Head
                                   : RateGroup::Vectors;
        p.sources = {{name, 0, rows, false}};
        table.params.push_back(p);
    };
    add(0, -1, 0, "embedding", 101, 7);
    for (int l = 0; l < LAYERS; l++) {
        add(1, l, 1 + l, "weight" + std::to_string(l), 37, 11);
        add(2, l, 1 + l, "bias" + std::to_string(l), 37, 0);
    }
    if (!tied) add(3, -1, LAYERS + 1, "head", 101, 7);
    for (int l = 0; l < LAYERS; l++) add(4, l, LAYERS + 2, "norm" + std::to_string(l), 11, 0);
    table.layout(world);
    return table;
}
