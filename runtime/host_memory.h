// The memory of the hosts that the ranks of a run are on. The ranks of one host share it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/context.h"
#include "runtime/device/memory_plan.h"

// A rank's host, and what is free there.
struct RankHost {
    uint64_t host;
    int64_t available;
};
RankHost this_host();
std::vector<RankHost> hosts_of_ranks(const Context& ctx);  // collective

// What is missing if rank r takes bytes[r] of its host, "" if nothing is.
std::string lacks_host_memory(const std::vector<RankHost>& ranks, const std::vector<int64_t>& bytes);
// The same, if each rank takes what a plan has beside the GPU.
std::string lacks_host_memory(const std::vector<RankHost>& ranks, const MemoryPlan& plan);
