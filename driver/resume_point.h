// The checkpoint that a run continues from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/model/params.h"

// The data of a part of a run: `--data` or --new-data as given, and a fingerprint of its tokens and shares.
struct DataUse {
    int64_t first_step = 0;  // counted from 0: its first sample is in this step
    std::string data, fingerprint;
};

// The content of trainer.json, checked: it belongs to its directory and to the training state beside it.
struct ResumePoint {
    std::string checkpoint;            // empty: the run starts at step 0
    int64_t step = 0, adam_steps = 0;  // steps done; updates done (without skipped steps)
    int64_t seed = 0, seq_len = 0, total_batch_tokens = 0;
    std::vector<DataUse> data;       // that the run used, in order; older files name the last fingerprint only
    std::string gemm;                // the algorithms that the run's GEMMs used
    int64_t norm_count = 0;          // of the steps' gradient norms (kernels/global_norm.h); older files have none
    std::vector<float> grad_norms;   // the last of them
    std::vector<float> fp8_history;  // the amaxes of the last steps (driver/fp8_state.h); empty: the run was not in fp8
    int64_t fp8_steps = 0;           // that the history holds
    std::vector<float> fp8_base_scales;  // Trainer::base_scales
    std::string optimizer = "adamw";     // of hidden matrices; older files do not name it
    std::string lora = "none";           // LoraOptions::description(); older files do not have it
    std::string preference = "none";     // PreferenceFlags::description(); older files do not have it
    std::string rollout = "none";        // RolloutFlags::description()
    std::string reference;               // Trainer::reference_record
    int64_t idle_steps = 0;              // Trainer::idle_steps
    std::string pack = "none";           // "examples" or "none"; older files do not name it
    std::optional<std::array<double, NUM_RATE_GROUPS>> learning_rates;  // peaks; older files do not name them
    double lr = 0;  // of hidden matrices in the last step; older files do not name it: 0
};

// Reads trainer.json and the headers of the files of tensors. Throws Error with the file, the key and the remedy if one
// of them is damaged or of another checkpoint.
ResumePoint read_resume_point(const std::string& checkpoint);
