// Which rank of how many this process is, and where the ranks find each other: what torchrun, mpirun, srun and
// `train --gpus N` tell their processes through the environment. docs/multi_gpu.md shows each way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// What the user says on the command line; the rest is the launcher's.
struct LaunchOptions {
    std::string gpus = "1";  // processes to start on this machine, one per GPU: a number or "all"
    std::string rendezvous;  // HOST:PORT where rank 0 waits for the others; empty: what the launcher tells
    double timeout_s = 600;  // seconds that ranks wait for each other before they give up
};

struct World {
    int64_t rank = 0, size = 1;
    int64_t local_rank = 0, local_size = 1;  // among the ranks of this machine
    std::string launcher;                    // "torchrun", "mpirun", "srun", "--gpus"; empty: started by itself
    std::string rendezvous;                  // HOST:PORT of rank 0; empty where the launcher tells no host
    int rendezvous_socket = -1;              // rank 0 of --gpus: a socket that listens there already
    double timeout_s = 600;
};

// A variable's value, or null. Tests pass their own.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// In this order: our own variables (--gpus), torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT; its own store listens on that port, so the ranks meet on the next one), Open MPI's
// (OMPI_COMM_WORLD_*), those of MPICH and Intel MPI (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS), SLURM's
// (only inside a step, which srun makes: a batch script has some of the variables too and is one process). None of
// them: a world of one. --rendezvous overrides the launcher's place.
// Throws Error, one line: a variable that is missing beside others, no number, or out of range.
World world_from_environment(const LaunchOptions& options, const Environment& environment = process_environment());

// The first machine of SLURM's node list: "gpu[007-010,020],login1" -> "gpu007".
std::string first_slurm_host(const std::string& node_list);

// HOST:PORT, taken apart; [::1]:29500 is IPv6. Throws Error that names what it is from (an option, a variable).
struct HostPort {
    std::string host;
    int port = 0;
};
HostPort parse_host_port(const std::string& text, const std::string& what);

// The world that this process joins, and its own GPU made the current one: the local_rank-th that is visible, or the
// only one where the launcher shows each rank its own. Before anything else touches a GPU. Throws Error: as above, too
// few GPUs.
World join_world(const LaunchOptions& options);

// How many ranks --gpus asks this process to start on this machine: 0 if it is to be a rank itself, because one GPU is
// enough or a launcher has made the ranks already. Throws Error: more GPUs than there are, the CPU build (it names
// mpirun), --gpus beside another launcher; UsageError: neither a number nor "all".
int64_t ranks_to_start(const LaunchOptions& options);

// What a parent of ranks ends with when one of them has failed, which said why itself.
struct RanksFailed {
    int status;  // its exit status
};
// Runs this program once per rank with these arguments (runtime/communication/local_ranks.h). Throws RanksFailed,
// Error.
void run_ranks(int64_t ranks, const std::vector<std::string>& arguments);
