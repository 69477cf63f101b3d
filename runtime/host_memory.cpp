#include "runtime/host_memory.h"

#include <unistd.h>

#include "runtime/files/log.h"
#include "runtime/limits.h"
#include "runtime/rng.h"

RankHost this_host() {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    return {name_hash(host), host_memory_available()};
}

std::vector<RankHost> hosts_of_ranks(const Context& ctx) {
    return ctx.comm->all_gather_host(this_host());
}

std::string lacks_host_memory(const std::vector<RankHost>& ranks, const std::vector<int64_t>& bytes) {
    for (const RankHost& rank : ranks) {
        int64_t needed = 0;
        for (size_t r = 0; r < ranks.size(); r++)
            if (ranks[r].host == rank.host) needed += bytes[r];
        if (needed > rank.available)
            return str(human_bytes(needed), " of host memory would be needed and ", human_bytes(rank.available),
                       " are free");
    }
    return "";
}

std::string lacks_host_memory(const std::vector<RankHost>& ranks, const MemoryPlan& plan) {
    if (plan.host_lines.empty()) return "";
    return lacks_host_memory(ranks, std::vector<int64_t>(ranks.size(), plan.host_total()));
}
