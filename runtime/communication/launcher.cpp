#include "runtime/communication/launcher.h"

#include <cstdlib>
#include <filesystem>

#include "runtime/communication/local_ranks.h"
#include "runtime/device/device.h"
#include "runtime/error.h"

namespace {

// The variables in which a launcher passes a process its rank.
struct Launcher {
    const char* name;
    const char *rank, *size, *local_rank, *local_size;
    const char* sign = nullptr;  // if set, the launcher is recognised by this variable, since others use the same names
};

constexpr const char* GPUS_LAUNCHER = "--gpus";

constexpr Launcher LAUNCHERS[] = {
    {GPUS_LAUNCHER, LOCAL_RANKS_RANK, LOCAL_RANKS_SIZE, LOCAL_RANKS_RANK, LOCAL_RANKS_SIZE},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
};

// Each job gets a port of its own, below the system's ephemeral range.
constexpr int FIRST_PORT = 20000, PORTS = 10000;

class Variables {
  public:
    Variables(const Environment& variables, const char* launcher_name)
        : environment(variables), launcher(launcher_name) {}

    bool has(const char* name) const { return environment(name) != nullptr; }
    std::string text(const char* name) const { return has(name) ? environment(name) : ""; }
    // companion: a variable of the same launcher that is set.
    int64_t number(const char* name, const char* companion, int64_t least) const {
        require(has(name), launcher, ": ", companion, " is set but ", name,
                " is not; set both, or unset both to run one process");
        const std::string value = text(name);
        char* end = nullptr;
        const long long n = std::strtoll(value.c_str(), &end, 10);
        require(!value.empty() && *end == '\0' && n >= least && n <= INT32_MAX, launcher, ": ", name, "=", value,
                " is not a whole number of at least ", least);
        return n;
    }

  private:
    const Environment& environment;
    const std::string launcher;
};

// The number of tasks of a node: "4(x2),3" means 4, 4 and 3.
int64_t tasks_of_node(const std::string& list, int64_t node) {
    const char* at = list.c_str();
    while (*at) {
        char* end = nullptr;
        const int64_t tasks = std::strtoll(at, &end, 10);
        int64_t times = 1;
        if (end == at || tasks < 1) break;
        if (end[0] == '(' && end[1] == 'x') {
            times = std::strtoll(end + 2, &end, 10);
            if (*end++ != ')' || times < 1) break;
        }
        if (node < times) return tasks;
        node -= times;
        if (*end != ',') break;
        at = end + 1;
    }
    throw Error(str("srun: SLURM_STEP_TASKS_PER_NODE=", list, " does not give the number of tasks on this machine"));
}

int port_of_job(const std::string& job) {
    uint32_t hash = 2166136261u;  // FNV-1a
    for (const char c : job) hash = (hash ^ uint8_t(c)) * 16777619u;
    return FIRST_PORT + int(hash % PORTS);
}

// The address of rank 0 from MASTER_ADDR and MASTER_PORT, which any launcher may set. The next port is used, because
// torchrun's store listens on the given one.
std::string master_address(const Variables& v) {
    if (!v.has("MASTER_ADDR") && !v.has("MASTER_PORT")) return "";
    require(v.has("MASTER_ADDR"),
            "MASTER_PORT is set but MASTER_ADDR is not; set both, or give --rendezvous HOST:PORT");
    const int64_t port = v.number("MASTER_PORT", "MASTER_ADDR", 1);
    const std::string host = v.text("MASTER_ADDR");
    return str(host.find(':') == std::string::npos ? host : "[" + host + "]", ":", port + 1);
}

World slurm_world(const Environment& environment) {
    const Variables v(environment, "srun");
    const char* const step = "SLURM_STEP_ID";
    World world;
    world.launcher = "srun";
    world.size = v.number(v.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", step, 1);
    world.rank = v.number("SLURM_PROCID", step, 0);
    if (world.size == 1) return world;
    world.local_rank = v.number("SLURM_LOCALID", step, 0);
    world.local_size =
        tasks_of_node(v.text(v.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE"),
                      v.number("SLURM_NODEID", step, 0));
    world.rendezvous = master_address(v);
    if (world.rendezvous.empty()) {
        const char* const nodes = v.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
        require(v.has(nodes), "srun: SLURM_STEP_ID is set but SLURM_STEP_NODELIST is not; give --rendezvous HOST:PORT");
        world.rendezvous =
            str(first_slurm_host(v.text(nodes)), ":", port_of_job(v.text("SLURM_JOB_ID") + "." + v.text(step)));
    }
    return world;
}

}  // namespace

Environment process_environment() {
    return [](const char* name) -> const char* {
        const char* const value = std::getenv(name);
        return value && *value ? value : nullptr;
    };
}

HostPort parse_host_port(const std::string& text, const std::string& what) {
    const size_t colon = text.rfind(':');
    HostPort address;
    char* end = nullptr;
    if (colon != std::string::npos) {
        address.host = text.substr(0, colon);
        const char* const digits = text.c_str() + colon + 1;
        const long port = std::strtol(digits, &end, 10);
        if (*digits && !*end && port > 0 && port < 65536) address.port = int(port);
        if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']')
            address.host = address.host.substr(1, address.host.size() - 2);
    }
    require(address.port && !address.host.empty(), what, " ", text,
            " is not HOST:PORT with a port from 1 to 65535 (an IPv6 address goes in brackets)");
    return address;
}

std::string first_slurm_host(const std::string& list) {
    std::string host;
    for (size_t i = 0; i < list.size() && list[i] != ','; i++) {
        if (list[i] != '[') {
            host += list[i];
            continue;
        }
        const size_t close = list.find(']', i), first = list.find_first_of(",-]", i);
        require(close != std::string::npos && first > i + 1, "srun: the node list ", list,
                " cannot be parsed; give --rendezvous HOST:PORT");
        host += list.substr(i + 1, first - i - 1);
        i = close;
    }
    require(!host.empty(), "srun: the node list '", list, "' names no machine; give --rendezvous HOST:PORT");
    return host;
}

World world_from_environment(const LaunchOptions& options, const Environment& environment) {
    World world;
    for (const Launcher& launcher : LAUNCHERS) {
        const Variables v(environment, launcher.name);
        if (!v.has(launcher.sign ? launcher.sign : launcher.rank) && (launcher.sign || !v.has(launcher.size))) continue;
        world.launcher = launcher.name;
        const char* const given = v.has(launcher.rank) ? launcher.rank : launcher.size;
        world.rank = v.number(launcher.rank, given, 0);
        world.size = v.number(launcher.size, given, 1);
        if (world.size > 1) {
            world.local_rank = v.number(launcher.local_rank, given, 0);
            world.local_size = v.number(launcher.local_size, given, 1);
            if (world.launcher == GPUS_LAUNCHER) {
                world.rendezvous = v.text(LOCAL_RANKS_ADDRESS);
                if (world.rank == 0) world.rendezvous_socket = int(v.number(LOCAL_RANKS_SOCKET, given, 0));
            } else {
                world.rendezvous = master_address(v);
                if (world.rendezvous.empty() && world.local_size == world.size) {
                    // One host. Each launcher names the job in another variable; some set none.
                    world.rendezvous =
                        str("127.0.0.1:", port_of_job(v.text("PMIX_NAMESPACE") + v.text("OMPI_MCA_ess_base_jobid") +
                                                      v.text("PMI_JOBID")));
                }
            }
        }
        break;
    }
    if (world.launcher.empty() && environment("SLURM_STEP_ID")) world = slurm_world(environment);
    require(
        !world.launcher.empty() || !environment("PMIX_RANK"),
        "mpirun: PMIX_RANK is set but OMPI_COMM_WORLD_SIZE is not; start the ranks with Open MPI's mpirun, or unset "
        "it to run one process");
    require(world.rank < world.size, world.launcher, ": rank ", world.rank, " is outside a world of ", world.size,
            " ranks");
    require(world.local_rank < world.local_size && world.local_size <= world.size, world.launcher, ": local rank ",
            world.local_rank, " does not fit ", world.local_size, " ranks on this machine and ", world.size, " in all");
    if (!options.rendezvous.empty() && world.size > 1 && world.launcher != GPUS_LAUNCHER) {
        parse_host_port(options.rendezvous, "--rendezvous");
        world.rendezvous = options.rendezvous;
    }
    world.timeout_s = options.timeout_s;
    return world;
}

void require_one_process(const Environment& environment) {
    const World world = world_from_environment({}, environment);
    require(world.size == 1, world.launcher, " started ", world.size,
            " processes, but only train divides its work among processes; start one process of this command");
}

World join_world(const LaunchOptions& options) {
    World world = world_from_environment(options);
    if (world.launcher == GPUS_LAUNCHER) follow_parent();
    if (world.size == 1 || backend_device() == Device::CPU) return world;
    const int64_t here = device_count();
    // With one visible GPU the launcher is assumed to give each rank its own; if all ranks have the same one, the check
    // at connection reports it.
    const int64_t index = here == 1 ? 0 : world.local_rank;
    require(index < here, "rank ", world.rank, ": ", world.local_size, " ranks on this machine, but ", here,
            " GPUs are visible; start one rank per GPU (or check CUDA_VISIBLE_DEVICES)");
    use_device(index);
    return world;
}

int64_t ranks_to_start(const LaunchOptions& options) {
    if (options.gpus == "1") return 0;
    int64_t n = 0;
    if (options.gpus != "all") {
        char* end = nullptr;
        n = std::strtoll(options.gpus.c_str(), &end, 10);
        if (options.gpus.empty() || *end || n < 1)
            throw UsageError("--gpus " + options.gpus + " is not a whole number of at least 1, nor 'all'");
    }
    const World world = world_from_environment(options);
    if (world.launcher == GPUS_LAUNCHER) return 0;
    require(world.size == 1, "--gpus ", options.gpus, ": ", world.launcher, " has already started ", world.size,
            " ranks; remove --gpus");
    if (n == 1) return 0;
    require(backend_device() != Device::CPU, "--gpus ", options.gpus,
            ": this is the CPU build; start several processes with mpirun: `mpirun -n 2 train_gpt train ...`");
    const int64_t here = device_count();
    require(n <= here, "--gpus ", n, ": ", here, here == 1 ? " GPU" : " GPUs",
            " visible here; give a smaller number (or check CUDA_VISIBLE_DEVICES)");
    const int64_t ranks = n ? n : here;
    return ranks > 1 ? ranks : 0;
}

void run_ranks(int64_t ranks, const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const int status = run_local_ranks(command, int(ranks));
    if (status) throw RanksFailed{status};
}
