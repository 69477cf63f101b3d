// This process's rank, the world size and the rendezvous address, read from the environment variables that torchrun,
// mpirun, srun and `train --gpus N` set. docs/use/multi_gpu.md shows each launcher.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Options of the command line; the launcher sets the rest.
struct LaunchOptions {
    std::string gpus = "1";  // processes to start on this host, one per GPU: a number or "all"
    std::string rendezvous;  // HOST:PORT where rank 0 listens; empty: from the launcher
    double timeout_s = 600;  // seconds that ranks wait for each other
};

struct World {
    int64_t rank = 0, size = 1;
    int64_t local_rank = 0, local_size = 1;  // among the ranks of this host
    std::string launcher;                    // "torchrun", "mpirun", "srun", "--gpus"; empty: no launcher
    std::string rendezvous;                  // HOST:PORT of rank 0; empty if the launcher sets no host
    int rendezvous_socket = -1;              // rank 0 of --gpus: a socket that already listens there
    double timeout_s = 600;
};

// Returns a variable's value or null. Tests pass their own function.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// Reads, in this order: our own variables (--gpus), torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT; its own store listens on that port, so the ranks meet on the next one), Open MPI's
// (OMPI_COMM_WORLD_*), those of MPICH and Intel MPI (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS), SLURM's
// (only inside a step started by srun: a batch script has some of these variables too but is one process). With none of
// them set the world is one rank. --rendezvous overrides the launcher's address.
// Throws Error for a variable that is missing while its companions are set, is not a number or is out of range.
World world_from_environment(const LaunchOptions& options, const Environment& environment = process_environment());

// For commands that would do the same in every process. Throws Error if a launcher started more than one, or as above.
void require_one_process(const Environment& environment = process_environment());

// The first host of SLURM's node list: "gpu[007-010,020],login1" -> "gpu007".
std::string first_slurm_host(const std::string& node_list);

// Parses HOST:PORT; [::1]:29500 is IPv6. Throws Error; `what` names the option or variable that the text came from.
struct HostPort {
    std::string host;
    int port = 0;
};
HostPort parse_host_port(const std::string& text, const std::string& what);

// Reads the world and makes this rank's GPU current: visible GPU number local_rank, or the only visible one if the
// launcher gives each rank its own. Call it before anything else touches a GPU. Throws Error as above, and if there are
// too few GPUs.
World join_world(const LaunchOptions& options);

// The number of ranks that --gpus asks this process to start on this host; 0 if this process is a rank itself (one
// GPU, or a launcher started the ranks). Throws Error for more GPUs than exist, for the CPU build (the message names
// mpirun) and for --gpus under another launcher; UsageError if the value is neither a number nor "all".
int64_t ranks_to_start(const LaunchOptions& options);

// Thrown in the parent process when a rank failed. The rank has printed the error itself.
struct RanksFailed {
    int status;  // its exit status
};
// Runs this program once per rank with these arguments (runtime/communication/local_ranks.h). Throws RanksFailed,
// Error.
void run_ranks(int64_t ranks, const std::vector<std::string>& arguments);
