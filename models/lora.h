// LoRA training: low-rank adapters of a frozen model (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language
// Models").
//
//   y = W·x + s·B·A·x      A [R, in], B [out, R];  s = alpha/R, or alpha/√R (rsLoRA: Kalajdzievski 2023, "A Rank
//                          Stabilization Scaling Factor for Fine-Tuning with LoRA")
//
// An adapter belongs to a matrix of the base's files, as in peft: q, k and v of a fused parameter have one each. A is
// uniform in ±1/√in (peft: Kaiming with a = √5), B zero, so training starts from the base.
//
// The embedding E [V, C] and an untied head may have one, too. The embedding's is s·A·Bᵀ with A [V, R], which is looked
// up as E is, and B [C, R]; as in peft A is zero and B standard normal.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "runtime/model/linear_weight.h"
#include "runtime/model/params.h"
#include "runtime/model/roles.h"

struct LoraOptions {
    int64_t rank = 0;  // R; 0: no adapters
    double alpha = 16;
    bool rank_stabilized = false;                       // rsLoRA
    bool nf4 = false;                                   // QLoRA: the base's linear layers in NF4
    std::vector<std::string> targets = {"all-linear"};  // names of matrices, or of modules that end in them

    bool on() const { return rank > 0; }
    double scale() const;             // s
    std::string description() const;  // "rank 16, alpha 32, targets q_proj,v_proj"
};

// The roles in an adapter's table, in place of Role: A and B of the parameter in a role.
constexpr int lora_a(Role weight) {
    return 2 * weight;
}
constexpr int lora_b(Role weight) {
    return 2 * weight + 1;
}

// Adapters of a base model.
struct LoraTable {
    // Per layer and linear layer with a target, for embedding and head: A [parts·R, in] and B [sum of the parts' rows,
    // R], the parts one after the other (the embedding's as above). Sources are peft's names. The groups are the
    // base's.
    ParamTable params;
    std::map<std::pair<int, int64_t>, std::vector<LoraPart>> parts;  // by role and layer of the base's parameter
    LoraOptions options;                                             // with the targets that "all-linear" stands for
    std::array<int64_t, NUM_LINEAR_LAYERS> widths{};                 // the most rows of an A of each linear layer
    int64_t vocabulary = 0;                                          // R, if the embedding or the head has an adapter

    // optimizer: of all adapters. To Muon each adapter's A and B are matrices of their own. Throws Error for a target
    // that the model does not have, for the embedding of a tied head, and for embedding and head with another optimizer
    // than AdamW.
    LoraTable(const ParamTable& base, LoraOptions lora, int64_t world, OptimizerType optimizer = OptimizerType::AdamW);
};
