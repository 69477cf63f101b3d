// Which parameters of a model with packed weights are packed, and how large they are.
#pragma once

#include "runtime/model/packed_weight.h"
#include "runtime/model/params.h"
#include "runtime/model/roles.h"

inline bool is_embedding_or_head(const Param& p) {
    return p.role == WTE || p.role == HEAD_W;
}
// The weights of the blocks' linear layers, the token embedding and the head. The others stay in the model's dtype:
// norms, biases, the position table, decay gates.
inline bool may_pack(const Param& p) {
    return linear_layer_index(p.role) >= 0 || is_embedding_or_head(p);
}
inline Packing packing_of(const Param& p, const Packings& packings) {
    return p.role == WTE ? packings.embedding : p.role == HEAD_W ? packings.head : packings.blocks;
}
inline bool packs(const Param& p, const Packings& packings) {
    return may_pack(p) && can_pack(packing_of(p, packings), p.cols);
}
