// The environment variables of the launchers, and the parent process of --gpus.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <thread>

#include "dev/tests/temp_dir.h"
#include "dev/tests/test_util.h"
#include "runtime/communication/launcher.h"
#include "runtime/communication/local_ranks.h"
#include "runtime/files/files.h"

namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(const Variables& variables) {
    return [variables](const char* name) -> const char* {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    };
}

World world_of(const Variables& variables, const LaunchOptions& options = {}) {
    return world_from_environment(options, environment_of(variables));
}

void expect_world(const World& w, int64_t rank, int64_t size, int64_t local_rank, int64_t local_size,
                  const std::string& launcher, const std::string& rendezvous) {
    EXPECT_EQ(w.rank, rank);
    EXPECT_EQ(w.size, size);
    EXPECT_EQ(w.local_rank, local_rank);
    EXPECT_EQ(w.local_size, local_size);
    EXPECT_EQ(w.launcher, launcher);
    EXPECT_EQ(w.rendezvous, rendezvous);
}

const Variables TORCHRUN = {{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "gpu001"},
                            {"MASTER_PORT", "29500"}};
const Variables MPIRUN = {{"OMPI_COMM_WORLD_RANK", "3"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                          {"PMIX_RANK", "3"},
                          {"PMIX_NAMESPACE", "768671745"}};
const Variables SRUN = {{"SLURM_STEP_ID", "0"},
                        {"SLURM_JOB_ID", "4711"},
                        {"SLURM_PROCID", "9"},
                        {"SLURM_STEP_NUM_TASKS", "11"},
                        {"SLURM_NTASKS", "99"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_NODEID", "2"},
                        {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                        {"SLURM_STEP_NODELIST", "gpu[007-008,020]"}};

Variables with(Variables variables, const Variables& more) {
    for (const auto& [name, value] : more) variables[name] = value;
    return variables;
}
Variables without(Variables variables, const std::string& name) {
    variables.erase(name);
    return variables;
}

TEST(Launch, SingleProcessWithoutLauncher) {
    LaunchOptions options;
    options.timeout_s = 7;
    const World w = world_of({{"MASTER_ADDR", "gpu001"}, {"OMP_NUM_THREADS", "2"}}, options);
    expect_world(w, 0, 1, 0, 1, "", "");
    EXPECT_EQ(w.timeout_s, 7);
}

TEST(Launch, ReadsTorchrunVariables) {
    // torchrun's store listens on MASTER_PORT, so rank 0 takes the next port.
    expect_world(world_of(TORCHRUN), 5, 8, 1, 4, "torchrun", "gpu001:29501");
    expect_world(world_of(with(TORCHRUN, {{"MASTER_ADDR", "fd00::2"}})), 5, 8, 1, 4, "torchrun", "[fd00::2]:29501");
    LaunchOptions options;
    options.rendezvous = "other:1234";
    expect_world(world_of(TORCHRUN, options), 5, 8, 1, 4, "torchrun", "other:1234");
    expect_world(world_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), 0, 1, 0, 1, "torchrun", "");
}

TEST(Launch, IncompleteVariablesNameTheMissingOne) {
    for (const auto& [name, value] : TORCHRUN) {
        const std::string given = name == "RANK" ? "WORLD_SIZE" : "RANK";
        const std::string expected =
            name == "MASTER_ADDR"
                ? "MASTER_PORT is set but MASTER_ADDR is not; set both, or give --rendezvous HOST:PORT"
                : str("torchrun: ", name == "MASTER_PORT" ? "MASTER_ADDR" : given, " is set but ", name,
                      " is not; set both, or unset both to run one process");
        expect_error([&, missing = name] { world_of(without(TORCHRUN, missing)); }, expected);
    }
    for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"})
        expect_error([&] { world_of(without(MPIRUN, name)); },
                     str("mpirun: OMPI_COMM_WORLD_RANK is set but ", name,
                         " is not; set both, or unset both to run one process"));
    for (const char* const name : {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"})
        expect_error(
            [&] { world_of(without(SRUN, name)); },
            str("srun: SLURM_STEP_ID is set but ", name, " is not; set both, or unset both to run one process"));
    expect_error(
        [&] {
            world_of({{"PMIX_RANK", "0"}});
        },
        "mpirun: PMIX_RANK is set but OMPI_COMM_WORLD_SIZE is not; start the ranks with Open MPI's mpirun, "
        "or unset it to run one process");
}

TEST(Launch, InvalidNumbersAreErrors) {
    for (const char* const bad : {"", "x", "1x", "-1", "99999999999", "1.5"})
        expect_error(
            [&] {
                world_of(with(TORCHRUN, {{"RANK", bad}}));
            },
            str("torchrun: RANK=", bad, " is not a whole number of at least 0"));
    expect_error(
        [&] {
            world_of(with(TORCHRUN, {{"WORLD_SIZE", "0"}}));
        },
        "torchrun: WORLD_SIZE=0 is not a whole number of at least 1");
    expect_error([&] { world_of(with(TORCHRUN, {{"RANK", "8"}})); }, "torchrun: rank 8 is outside a world of 8 ranks");
    expect_error(
        [&] {
            world_of(with(TORCHRUN, {{"LOCAL_RANK", "4"}}));
        },
        "torchrun: local rank 4 does not fit 4 ranks on this machine and 8 in all");
    expect_error(
        [&] {
            world_of(with(TORCHRUN, {{"LOCAL_WORLD_SIZE", "9"}}));
        },
        "torchrun: local rank 1 does not fit 9 ranks on this machine and 8 in all");
    LaunchOptions options;
    options.rendezvous = "nowhere";
    expect_error(
        [&] { world_of(TORCHRUN, options); },
        "--rendezvous nowhere is not HOST:PORT with a port from 1 to 65535 (an IPv6 address goes in brackets)");
}

TEST(Launch, ReadsMpirunVariables) {
    const World w = world_of(MPIRUN);
    expect_world(w, 3, 4, 3, 4, "mpirun", w.rendezvous);
    // One machine: a port derived from the job.
    const HostPort place = parse_host_port(w.rendezvous, "");
    EXPECT_EQ(place.host, "127.0.0.1");
    EXPECT_EQ(world_of(with(MPIRUN, {{"OMPI_COMM_WORLD_RANK", "0"}})).rendezvous, w.rendezvous);
    EXPECT_NE(world_of(with(MPIRUN, {{"PMIX_NAMESPACE", "other"}})).rendezvous, w.rendezvous);
    // Several machines: no variable names the machine of rank 0.
    expect_world(world_of(with(MPIRUN, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}})), 3,
                 4, 1, 2, "mpirun", "");
    expect_world(world_of(with(MPIRUN, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "1000"}})), 3, 4, 3, 4, "mpirun",
                 "head:1001");
    // The variables of MPICH and Intel MPI; SLURM's PMI2 sets some of the same names.
    const Variables hydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
    EXPECT_EQ(world_of(hydra).size, 2);
    EXPECT_EQ(world_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).size, 1);
    // The innermost launcher counts: mpirun inside a SLURM step, torchrun inside both.
    EXPECT_EQ(world_of(with(SRUN, MPIRUN)).launcher, "mpirun");
    EXPECT_EQ(world_of(with(with(SRUN, MPIRUN), TORCHRUN)).launcher, "torchrun");
}

TEST(Launch, ReadsSrunVariables) {
    const World w = world_of(SRUN);
    expect_world(w, 9, 11, 1, 3, "srun", w.rendezvous);
    EXPECT_EQ(parse_host_port(w.rendezvous, "").host, "gpu007");
    EXPECT_EQ(world_of(with(SRUN, {{"SLURM_NODEID", "1"}})).local_size, 4);
    expect_error(
        [&] {
            world_of(with(SRUN, {{"SLURM_NODEID", "3"}}));
        },
        "srun: SLURM_STEP_TASKS_PER_NODE=4(x2),3 does not give the number of tasks on this machine");
    // A batch script without srun has one process, whatever the size of its job.
    EXPECT_EQ(world_of(without(SRUN, "SLURM_STEP_ID")).size, 1);
    expect_error([&] { world_of(without(SRUN, "SLURM_STEP_NODELIST")); },
                 "srun: SLURM_STEP_ID is set but SLURM_STEP_NODELIST is not; give --rendezvous HOST:PORT");
}

TEST(Launch, CommandsOfOneProcessRejectMore) {
    require_one_process(environment_of({}));
    require_one_process(environment_of(with(MPIRUN, {{"OMPI_COMM_WORLD_RANK", "0"},
                                                     {"OMPI_COMM_WORLD_SIZE", "1"},
                                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}})));
    expect_error([] { require_one_process(environment_of(SRUN)); },
                 "srun started 11 processes, but only train divides its work among processes; start one process of "
                 "this command");
}

TEST(Launch, ParsesFirstHostOfSlurmNodeLists) {
    EXPECT_EQ(first_slurm_host("login1"), "login1");
    EXPECT_EQ(first_slurm_host("a1,b2"), "a1");
    EXPECT_EQ(first_slurm_host("gpu[007-010,020],login1"), "gpu007");
    EXPECT_EQ(first_slurm_host("gpu[3,5-9]"), "gpu3");
    EXPECT_EQ(first_slurm_host("gpu[12]-ib0,x"), "gpu12-ib0");
    EXPECT_EQ(first_slurm_host("rack[1-2]n[01-16]"), "rack1n01");
    for (const char* const bad : {"gpu[", "gpu[]", "gpu[-3]"})
        expect_error([&] { first_slurm_host(bad); },
                     str("srun: the node list ", bad, " cannot be parsed; give --rendezvous HOST:PORT"));
    expect_error([&] { first_slurm_host(""); }, "srun: the node list '' names no machine; give --rendezvous HOST:PORT");
}

TEST(Launch, ParsesHostAndPort) {
    const HostPort named = parse_host_port("gpu001:29500", "x"), six = parse_host_port("[::1]:1", "x");
    EXPECT_EQ(named.host, "gpu001");
    EXPECT_EQ(named.port, 29500);
    EXPECT_EQ(six.host, "::1");
    EXPECT_EQ(six.port, 1);
    for (const char* const bad : {"", ":", "host", "host:", ":80", "host:0", "host:65536", "host:8x", "host:-1"})
        expect_error(
            [&] { parse_host_port(bad, "x"); },
            str("x ", bad, " is not HOST:PORT with a port from 1 to 65535 (an IPv6 address goes in brackets)"));
}

TEST(Launch, ParsesGpusOption) {
    LaunchOptions options;
    EXPECT_EQ(ranks_to_start(options), 0);
    for (const char* const bad : {"", "0", "-2", "2x", "many"}) {
        options.gpus = bad;
        expect_error([&] { ranks_to_start(options); },
                     str("--gpus ", bad, " is not a whole number of at least 1, nor 'all'"));
    }
    options.gpus = "100000";
    if (backend_device() == Device::CPU)
        expect_error([&] { ranks_to_start(options); },
                     "--gpus 100000: this is the CPU build; start several processes with mpirun: `mpirun -n 2 "
                     "train_gpt train ...`");
    else
        expect_error([&] { ranks_to_start(options); }, std::vector<std::string>{"--gpus 100000: ", "visible here"});
}

// A finished parent process, which ran the shell as its program.
struct Ended {
    int status;
    std::string output, errors;
    double seconds;
};

class LocalRanksTest : public testing::Test {
  public:
    // Runs the parent in a child process and calls meanwhile(its process id).
    template <typename Meanwhile>
    Ended run(const std::string& script, int ranks, Meanwhile meanwhile) {
        const std::string out = temp.file("out"), err = temp.file("err");
        const auto start = std::chrono::steady_clock::now();
        const pid_t parent = fork();
        if (parent == 0) {
            dup2(open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
            dup2(open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
            // As with CUDA, other threads are running, which block no signal.
            for (int i = 0; i < 3; i++) std::thread([] { pause(); }).detach();
            try {
                _exit(run_local_ranks({"/bin/sh", "-c", script, "sh", temp.path()}, ranks));
            } catch (const Error& error) {
                dprintf(STDERR_FILENO, "%s\n", error.what());
                _exit(99);
            }
        }
        meanwhile(parent);
        int how = 0;
        waitpid(parent, &how, 0);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        return {WIFEXITED(how) ? WEXITSTATUS(how) : -WTERMSIG(how), read_file(out), read_file(err), elapsed.count()};
    }
    Ended run(const std::string& script, int ranks) {
        return run(script, ranks, [](pid_t) {});
    }
    void wait_for(const std::string& name) {
        for (int i = 0; i < 1000 && !path_exists(temp.file(name)); i++) usleep(10000);
        ASSERT_TRUE(path_exists(temp.file(name))) << name;
    }
    TempDir temp;
};

TEST_F(LocalRanksTest, RanksReceiveRankSizeAndRendezvous) {
    const Ended e =
        run("echo out $TRAIN_GPT_RANK; echo $TRAIN_GPT_RANK $TRAIN_GPT_WORLD_SIZE $TRAIN_GPT_RENDEZVOUS "
            ">$1/$TRAIN_GPT_RANK",
            3);
    EXPECT_EQ(e.status, 0);
    EXPECT_EQ(e.output, "out 0\n");
    EXPECT_EQ(e.errors, "");
    const std::string first = read_file(temp.file("0")), rendezvous = first.substr(4);
    EXPECT_EQ(first.substr(0, 14), "0 3 127.0.0.1:");
    for (const char* const r : {"1", "2"}) EXPECT_EQ(read_file(temp.file(r)), str(r, " 3 ", rendezvous));
}

TEST_F(LocalRanksTest, EnvironmentDescribesTheWorld) {
    Variables variables = {{LOCAL_RANKS_RANK, "0"},
                           {LOCAL_RANKS_SIZE, "2"},
                           {LOCAL_RANKS_ADDRESS, "127.0.0.1:5555"},
                           {LOCAL_RANKS_SOCKET, "9"}};
    LaunchOptions options;
    options.rendezvous = "other:1";  // ignored: it is for other launchers
    World w = world_of(with(MPIRUN, variables), options);
    expect_world(w, 0, 2, 0, 2, "--gpus", "127.0.0.1:5555");
    EXPECT_EQ(w.rendezvous_socket, 9);
    variables = with(variables, {{LOCAL_RANKS_RANK, "1"}});
    w = world_of(without(variables, LOCAL_RANKS_SOCKET));
    expect_world(w, 1, 2, 1, 2, "--gpus", "127.0.0.1:5555");
    EXPECT_EQ(w.rendezvous_socket, -1);
}

// Rank 0 inherits a listening socket, so connections of the other ranks are never refused.
TEST_F(LocalRanksTest, SocketListensBeforeRanksConnect) {
    const Ended e =
        run("if [ $TRAIN_GPT_RANK = 0 ]; then [ -S /proc/self/fd/$TRAIN_GPT_LISTEN_SOCKET ] || exit 5; sleep 0.3; exit "
            "0; fi; "
            "exec bash -c 'exec 3<>/dev/tcp/${TRAIN_GPT_RENDEZVOUS/:/\\/}'",
            2);
    EXPECT_EQ(e.status, 0) << e.errors;
}

TEST_F(LocalRanksTest, RepeatedErrorsArePrintedOnceWithTheRank) {
    const Ended e =
        run("if [ $TRAIN_GPT_RANK = 0 ]; then echo progress >&2; touch $1/0; exit 0; fi; "
            "if [ $TRAIN_GPT_RANK = 1 ]; then echo $$ >$1/pid; while [ ! -e $1/0 ]; do sleep 0.01; done; "
            // What a rank left without a newline is printed when its status has been read: until then rank 2 waits.
            "else while [ ! -s $1/pid ] || kill -0 $(cat $1/pid) 2>/dev/null; do sleep 0.01; done; fi; "
            "echo the same >&2; [ $TRAIN_GPT_RANK != 2 ] || echo other >&2; "
            "printf 'no newline %s' $TRAIN_GPT_RANK >&2",
            3);
    EXPECT_EQ(e.status, 0);
    EXPECT_EQ(e.errors,
              "progress\n[rank 1] the same\n[rank 1] no newline 1\n[rank 2] the same\n[rank 2] other\n"
              "[rank 2] no newline 2\n");
    const Ended alike = run("[ $TRAIN_GPT_RANK = 0 ] || echo the same >&2", 4);
    EXPECT_EQ(alike.errors.size(), std::string("[rank 1] the same\n").size()) << alike.errors;
}

TEST_F(LocalRanksTest, FailedRankEndsAllRanks) {
    const Ended e = run("if [ $TRAIN_GPT_RANK = 2 ]; then echo why >&2; exit 7; fi; exec sleep 60", 3);
    EXPECT_EQ(e.status, 7);
    EXPECT_EQ(e.errors, "[rank 2] why\n");
    EXPECT_LT(e.seconds, 20);
}

TEST_F(LocalRanksTest, KilledRankIsNamed) {
    const Ended e = run("if [ $TRAIN_GPT_RANK = 1 ]; then kill -9 $$; fi; exec sleep 60", 2);
    EXPECT_EQ(e.status, 128 + SIGKILL);
    EXPECT_EQ(e.errors, "train_gpt: rank 1 was ended by signal 9 (Killed)\n");
    EXPECT_LT(e.seconds, 20);
}

// One SIGCHLD may stand for several ended ranks.
TEST_F(LocalRanksTest, RanksThatEndTogetherAreAllReaped) {
    for (int i = 0; i < 20; i++) {
        const Ended e = run("exit 0", 4);
        ASSERT_EQ(e.status, 0) << e.errors;
        ASSERT_LT(e.seconds, 20);
    }
}

// Each rank receives the interrupt once and may save before it ends.
TEST_F(LocalRanksTest, InterruptIsForwardedOnce) {
    const Ended e =
        run("n=0; trap 'n=$((n + 1))' INT; touch $1/ready$TRAIN_GPT_RANK; "
            "while [ $n = 0 ]; do sleep 0.01; done; sleep 0.2; echo $n >$1/count$TRAIN_GPT_RANK",
            2, [&](pid_t parent) {
                wait_for("ready0");
                wait_for("ready1");
                kill(parent, SIGINT);
            });
    EXPECT_EQ(e.status, 0) << e.errors;
    EXPECT_EQ(e.errors, "");
    for (const char* const name : {"count0", "count1"}) EXPECT_EQ(read_file(temp.file(name)), "1\n");
}

TEST_F(LocalRanksTest, ForwardedTerminationIsNotReportedAsFailure) {
    const Ended e = run("touch $1/ready$TRAIN_GPT_RANK; exec sleep 60", 2, [&](pid_t parent) {
        wait_for("ready0");
        wait_for("ready1");
        kill(parent, SIGTERM);
    });
    EXPECT_EQ(e.status, 128 + SIGTERM);
    EXPECT_EQ(e.errors, "");
}

TEST_F(LocalRanksTest, MissingProgramIsAnError) {
    expect_error([] { run_local_ranks({"/nowhere/train_gpt"}, 2); },
                 "--gpus: cannot start /nowhere/train_gpt: No such file or directory");
}

}  // namespace
