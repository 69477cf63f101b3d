// What `plan` prints.
#pragma once

#include "runtime/device/arena.h"
#include "runtime/device/memory_plan.h"

struct PlanReport {
    std::string name, description;  // of the model
    int64_t weights;
    double flop_per_token;
    bool training;
    int64_t world;
    MemoryPlan memory;
    std::vector<int64_t> stages;                // bytes that each of several ranks needs, by --zero-stage; else empty
    std::vector<ArenaPlan::Entry> activations;  // of which the largest are listed
};

// On stdout, as text or as a JSON object.
void show_plan(const PlanReport& report, bool as_json);
