// The output of `plan`.
#pragma once

#include "commands/fit.h"
#include "runtime/device/arena.h"
#include "runtime/device/gpu_table.h"
#include "runtime/device/memory_plan.h"

// The GPU that a plan with --gpu or --gpu-memory is for; null: this program's device. --gpu-memory does not
// give the number of SMs, so with that option alone the CPU build plans for an H100.
const Gpu* planned_gpu(const PlanOptions& options);

// The parameters of a rate group.
struct PlannedGroup {
    std::string name;
    int64_t weights = 0;
    OptimizerType optimizer = OptimizerType::AdamW;
};

struct PlanReport {
    std::string name, description;  // of the model
    int64_t weights;
    double flop_per_token;
    bool training;
    int64_t world;
    MemoryPlan memory;
    int64_t in_use_before;             // bytes of the GPU: the CUDA context and other programs
    std::string remark;                // a line after the memory plan, or ""
    std::vector<PlannedGroup> groups;  // of training
    std::vector<int64_t> stages;       // with several ranks: bytes that each rank needs, by --zero-stage; else empty
    std::vector<ArenaPlan::Entry> activations;  // text output lists the largest, or with --verbose all
    FitReport fit;                              // nothing was tried without --fit

    bool fits() const;  // into MemoryPlan::limit
};

// Prints the report to stdout, as text or with options.json as a JSON object.
void show_plan(const PlanReport& report, const PlanOptions& options);
