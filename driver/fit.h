// The search for options with which a run fits into memory: of `plan --fit`, and of the error of a run that does not
// fit. It computes plans only and allocates nothing.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "driver/options.h"
#include "runtime/device/target.h"

// The result of the search, and everything that it tried.
struct FitReport {
    struct Try {
        std::string options, reason;  // the options to add, "" for those given; its speed, as far as known
        int64_t bytes;
        std::string lacks;  // memory that hosts lack for options that fit on the device; "": none
    };
    std::vector<Try> tried;              // the one expected to be fastest first; if one fits, it is the last
    int64_t available = 0;               // bytes
    const char* to_lower = "--seq-len";  // what else takes less memory

    bool found() const { return !tried.empty() && tried.back().bytes <= available && tried.back().lacks.empty(); }
    // For the error if nothing was found: what hosts lack or the least that was tried, and what else helps.
    std::string remedy() const;
};

// Changes the options to the first ones that fit into `available` bytes, or leaves them. The search adds recomputation,
// smaller state and offload to the options that are given, and takes none of them away. layers: of the model. world:
// ranks; with several it tries --zero-stage, too. bytes: how many a run with such options needs. lacks_host: what the
// hosts lack for what it offloads, "" if nothing (lacks_host_memory()); without it any host has enough.
FitReport find_fit(RunOptions& options, int64_t layers, int64_t world, const Target& target, int64_t available,
                   const std::function<int64_t(const RunOptions&)>& bytes,
                   const std::function<std::string(const RunOptions&)>& lacks_host = {});

// --fp8-weights auto: codes are kept (driver/fp8_state.h, fp8_shards.h), of a frozen base (driver/fp8_base.h) in both
// orientations, if the run then fits into `available` bytes; else not, or in one. Other options stay as they are.
// find_fit() asks it for all options that it tries.
void choose_fp8_weights(RunOptions& options, int64_t available, const std::function<int64_t(const RunOptions&)>& bytes);
