// The control channel between ranks, which are threads of this process here and connect over the loopback interface.
#include "runtime/communication/control.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "dev/tests/test_util.h"

namespace {

// A port that is free at the moment.
int free_port(Descriptor* keep = nullptr) {
    Descriptor listener(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
    if (keep) {
        EXPECT_EQ(listen(listener, 8), 0);
        *keep = std::move(listener);
    }
    return ntohs(address.sin_port);
}

World world_of(int64_t rank, int64_t size, int port, double timeout_s = 20) {
    World world;
    world.rank = rank;
    world.size = size;
    world.launcher = "mpirun";
    world.rendezvous = str("127.0.0.1:", port);
    world.timeout_s = timeout_s;
    return world;
}

Member member_of(int64_t rank) {
    return {"some GPU", str("GPU-", rank), "library 1"};
}

// Runs body(rank) on a thread for each rank. Returns the error message of each rank.
std::vector<std::string> run_ranks_as_threads(int64_t size, const std::function<void(int64_t)>& body) {
    std::vector<std::string> errors(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int64_t r = 0; r < size; r++) {
        threads.emplace_back([&, r] {
            try {
                body(r);
            } catch (const Error& error) {
                errors[size_t(r)] = error.what();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
}

TEST(Control, HostCollectives) {
    for (const int64_t size : {2, 3, 8}) {
        const int port = free_port();
        const auto errors = run_ranks_as_threads(size, [&](int64_t rank) {
            ControlChannel channel(world_of(rank, size, port), member_of(rank));
            for (int64_t round = 0; round < 20; round++) {
                std::vector<int64_t> all(static_cast<size_t>(size), -1);
                const int64_t own = 100 * round + rank;
                channel.all_gather(all.data(), &own, sizeof own);
                for (int64_t r = 0; r < size; r++) EXPECT_EQ(all[size_t(r)], 100 * round + r);
                for (int64_t root = 0; root < size; root++) {
                    std::string text(300000, rank == root ? char('a' + root) : '?');
                    channel.broadcast(text.data(), text.size(), root);
                    EXPECT_EQ(text, std::string(300000, char('a' + root)));
                }
                channel.barrier();
                EXPECT_EQ(channel.trouble(), "");
            }
            channel.barrier();
        });
        for (const std::string& error : errors) EXPECT_EQ(error, "");
    }
}

TEST(Control, RankZeroMayConnectLast) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(3, [&](int64_t rank) {
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        ControlChannel channel(world_of(rank, 3, port), member_of(rank));
        channel.barrier();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// If the name is not this machine's own, rank 0 listens on all networks.
TEST(Control, ListensOnAllInterfacesForUnknownHostName) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(2, [&](int64_t rank) {
        World world = world_of(rank, 2, port);
        if (rank == 0) world.rendezvous = str("this.machine.to.others:", port);
        ControlChannel channel(world, member_of(rank));
        channel.barrier();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Control, UsesAnInheritedListeningSocket) {
    Descriptor listener;
    const int port = free_port(&listener);
    const auto errors = run_ranks_as_threads(2, [&](int64_t rank) {
        World world = world_of(rank, 2, port);
        if (rank == 0) world.rendezvous_socket = dup(listener);
        ControlChannel channel(world, member_of(rank));
        channel.barrier();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Control, RejectsConnectionsOfOtherPrograms) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(2, [&](int64_t rank) {
        if (rank == 1) {
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            address.sin_port = htons(uint16_t(port));
            Descriptor other(socket(AF_INET, SOCK_STREAM, 0));
            while (connect(other, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
                other = Descriptor(socket(AF_INET, SOCK_STREAM, 0));
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
            }
            const std::string text =
                "GET / HTTP/1.1\r\nHost: somebody with a long enough name to fill a header\r\n\r\n";
            EXPECT_EQ(write(other, text.data(), text.size()), ssize_t(text.size()));
        }
        ControlChannel channel(world_of(rank, 2, port), member_of(rank));
        channel.barrier();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// All ranks report the same error.
TEST(Control, MismatchedRanksAreErrorsOnAllRanks) {
    const auto connect_with = [](const std::function<void(int64_t, World&, Member&)>& change) {
        const int port = free_port();
        return run_ranks_as_threads(2, [&](int64_t rank) {
            World world = world_of(rank, 2, port);
            Member self = member_of(rank);
            change(rank, world, self);
            ControlChannel channel(world, self);
        });
    };
    char name[128] = "";
    gethostname(name, sizeof name - 1);
    const std::string machine = name;
    const auto expect_errors = [](const std::vector<std::string>& errors, const std::string& what) {
        EXPECT_EQ(errors[0], "rank 0: " + what);
        EXPECT_EQ(errors[1], "rank 1: " + what);
    };
    expect_errors(connect_with([](int64_t rank, World&, Member& self) { self.device = rank ? "H100" : "A100"; }),
                  "rank 1 on " + machine + " has H100, rank 0 on " + machine +
                      " has A100; use equal GPUs (CUDA_VISIBLE_DEVICES picks them)");
    expect_errors(connect_with([](int64_t, World&, Member& self) { self.device_id = "GPU-7"; }),
                  "ranks 0 and 1 on " + machine + " have the same GPU (GPU-7); start as many ranks as there are GPUs");
    expect_errors(
        connect_with([](int64_t rank, World&, Member& self) { self.library = rank ? "NCCL 2.1" : "NCCL 2.2"; }),
        "rank 1 on " + machine + " has NCCL 2.1, rank 0 on " + machine +
            " has NCCL 2.2; use the same build and libraries on every machine");
    expect_errors(
        connect_with([](int64_t rank, World& world, Member&) { world.size = rank ? 3 : 2; }),
        "rank 1 on " + machine + " has a world of 3 ranks, rank 0 has 2; give each run its own port (--rendezvous)");
    // CPU ranks have no GPU that could be the same.
    for (const std::string& error : connect_with([](int64_t, World&, Member& self) { self.device_id = ""; }))
        EXPECT_EQ(error, "");
}

TEST(Control, DuplicateRankIsAnError) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(3, [&](int64_t thread) {
        const int64_t rank = std::min<int64_t>(thread, 1);
        ControlChannel channel(world_of(rank, 3, port, 20), member_of(thread));
    });
    EXPECT_EQ(errors[0].substr(0, 28), "rank 0: rank 1 joined twice,");
    EXPECT_EQ(errors[1], "rank 1" + errors[0].substr(6));
    EXPECT_EQ(errors[2], errors[1]);
}

TEST(Control, PortInUseIsAnError) {
    Descriptor listener;
    const int port = free_port(&listener);
    expect_error([&] { ControlChannel(world_of(0, 2, port), member_of(0)); },
                 str("rank 0: port ", port, " is in use; give another one: --rendezvous HOST:PORT"));
}

TEST(Control, MissingRanksTimeOut) {
    const int port = free_port();
    expect_error(
        [&] { ControlChannel(world_of(0, 3, port, 0.3), member_of(0)); },
        str("rank 0: 1 of 3 ranks connected to 127.0.0.1:", port, " within 0.3 s (--comm-timeout); missing: 1, 2"));
    expect_error([&] { ControlChannel(world_of(2, 3, port, 0.3), member_of(2)); },
                 str("rank 2: rank 0 could not be reached at 127.0.0.1:", port,
                     " within 0.3 s (--comm-timeout): Connection refused"));
}

// Opens descriptors until there are none left, within a limit that rank 0 does not raise for two ranks.
class NoDescriptors {
  public:
    NoDescriptors() {
        getrlimit(RLIMIT_NOFILE, &before);
        const rlimit low = {std::min<rlim_t>(400, before.rlim_max), before.rlim_max};
        setrlimit(RLIMIT_NOFILE, &low);
        for (int fd; (fd = dup(STDERR_FILENO)) >= 0;) taken.push_back(Descriptor(fd));
    }
    ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before); }
    NoDescriptors(const NoDescriptors&) = delete;
    NoDescriptors& operator=(const NoDescriptors&) = delete;

  private:
    rlimit before{};
    std::vector<Descriptor> taken;
};

Descriptor connected_to(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(uint16_t(port));
    Descriptor connection(socket(AF_INET, SOCK_STREAM, 0));
    const bool made = connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    return made ? std::move(connection) : Descriptor();
}

TEST(Control, WithoutDescriptorsRanksEndAtOnce) {
    Descriptor listener;
    const int port = free_port(&listener), other_port = free_port();
    World first = world_of(0, 2, port);
    first.rendezvous_socket = dup(listener);
    const Descriptor waiting = connected_to(port);
    ASSERT_GE(waiting, 0);
    const std::string reason = ": Too many open files; raise the limit on open files (ulimit -n)";
    const auto fails = [&](const World& world, const std::string& what) {
        const NoDescriptors none;
        expect_error([&] { ControlChannel(world, member_of(world.rank)); },
                     str("rank ", world.rank, ": ", what, reason));
    };
    const auto begin = std::chrono::steady_clock::now();
    fails(first, "cannot accept a connection");
    fails(world_of(1, 2, port), str("cannot connect to 127.0.0.1:", port));
    fails(world_of(0, 2, other_port), str("cannot listen at 127.0.0.1:", other_port));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));  // --comm-timeout is 20
}

// Others than ranks connect all the time, so there is always a connection to accept.
TEST(Control, StrangersDoNotPutOffTheDeadline) {
    Descriptor listener;
    const int port = free_port(&listener);
    World first = world_of(0, 2, port, 0.5);
    first.rendezvous_socket = dup(listener);
    std::atomic<bool> ended = false;
    std::thread strangers([&] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!ended && std::chrono::steady_clock::now() < end) connected_to(port);
    });
    const auto begin = std::chrono::steady_clock::now();
    expect_error([&] { ControlChannel(first, member_of(0)); }, str("rank 0: 1 of 2 ranks connected to 127.0.0.1:", port,
                                                                   " within 0.5 s (--comm-timeout); missing: 1"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    ended = true;
    strangers.join();
}

// A listener that is ready at every look, as one where strangers connect faster than they are refused.
TEST(Control, AListenerThatStaysReadyDoesNotPutOffTheDeadline) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const Descriptor out(ends[0]), in(ends[1]);
    ASSERT_EQ(write(in, "x", 1), 1);
    World first = world_of(0, 2, 1, 0.5);
    first.rendezvous_socket = dup(out);
    std::atomic<bool> ended = false;
    std::thread rescue([&] {  // else a program without the deadline would never end
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!ended && std::chrono::steady_clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        char c;
        EXPECT_EQ(read(out, &c, 1), 1);
    });
    const auto begin = std::chrono::steady_clock::now();
    expect_error(
        [&] { ControlChannel(first, member_of(0)); },
        "rank 0: 1 of 2 ranks connected to 127.0.0.1:1 within 0.5 s (--comm-timeout); missing: 1; cannot accept "
        "a connection: Socket operation on non-socket");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
    ended = true;
    rescue.join();
}

TEST(Control, MissingRendezvousAddressIsAnError) {
    World world = world_of(1, 2, 1);
    world.rendezvous.clear();
    expect_error([&] { ControlChannel(world, member_of(1)); },
                 "rank 1: mpirun does not set the address of rank 0; give --rendezvous HOST:PORT");
}

TEST(Control, AnotherProgramAtTheAddressIsAnError) {
    Descriptor listener;
    const int port = free_port(&listener);
    std::thread other([&] {
        const Descriptor peer(accept(listener, nullptr, nullptr));
        const std::string text(100, 'x');
        EXPECT_EQ(write(peer, text.data(), text.size()), ssize_t(text.size()));
        char c;
        while (read(peer, &c, 1) > 0) {
        }
    });
    expect_error([&] { ControlChannel(world_of(1, 2, port), member_of(1)); },
                 str("rank 1: what answers at 127.0.0.1:", port,
                     " is not rank 0 of this program; give another port: --rendezvous HOST:PORT"));
    other.join();
}

// Rank 2 ends. Rank 0 notices and tells rank 1.
TEST(Control, DetectsARankThatHasEnded) {
    std::atomic<bool> rank_1_knows{false};
    const int port = free_port();
    const auto errors = run_ranks_as_threads(3, [&](int64_t rank) {
        ControlChannel channel(world_of(rank, 3, port), member_of(rank));
        channel.barrier();
        if (rank == 2) return;
        std::string trouble;
        while ((trouble = channel.trouble()).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(trouble, "rank 2 has ended");
        channel.report(trouble);
        while (rank == 0 && !rank_1_knows) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (rank == 1) rank_1_knows = true;
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Control, DetectsARankThatEndsDuringAnOperation) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(3, [&](int64_t rank) {
        ControlChannel channel(world_of(rank, 3, port), member_of(rank));
        channel.barrier();
        if (rank == 2) return;
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));  // rank 0 waits for rank 1
        channel.barrier();
    });
    EXPECT_EQ(errors[0], "rank 0: barrier: rank 2 has ended");
    EXPECT_EQ(errors[1], "rank 1: barrier: rank 2 has ended");
    EXPECT_EQ(errors[2], "");
}

// Rank 2 hangs. Rank 1 waits for rank 0, which waits for rank 2: both name rank 2.
TEST(Control, DetectsARankThatHangs) {
    const int port = free_port();
    std::atomic<int> over{0};
    const auto errors = run_ranks_as_threads(3, [&](int64_t rank) {
        ControlChannel channel(world_of(rank, 3, port, 5), member_of(rank));
        channel.barrier();
        while (rank == 2 && over < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        if (rank == 2) return;
        try {
            channel.barrier();
        } catch (const Error&) {
            // Until both have failed no connection is closed, so that neither error is that of a rank that has ended.
            for (over++; over < 2;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            throw;
        }
    });
    for (const int64_t rank : {0, 1}) {
        EXPECT_EQ(errors[size_t(rank)],
                  str("rank ", rank,
                      ": barrier: no message from rank 2 within 5 s (--comm-timeout); it hangs or waits for another "
                      "operation"));
    }
}

// While the ranks connect, another program connects and sends nothing. A later failure does not blame it.
TEST(Control, ASilentConnectionAtTheStartIsNoSilentRank) {
    Descriptor listener;
    const int port = free_port(&listener);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(uint16_t(port));
    const Descriptor silent(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(silent, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);  // the first to be accepted
    const auto errors = run_ranks_as_threads(3, [&](int64_t rank) {
        World world = world_of(rank, 3, port);
        if (rank == 0) world.rendezvous_socket = dup(listener);
        ControlChannel channel(world, member_of(rank));
        int64_t all[3], own = 1;
        channel.all_gather(all, &own, rank == 1 ? 4 : 8);
    });
    EXPECT_EQ(errors[2], "rank 2: all_gather_host: rank 0 has ended");
}

TEST(Control, MismatchedOperationsAreErrors) {
    const int port = free_port();
    const auto errors = run_ranks_as_threads(2, [&](int64_t rank) {
        ControlChannel channel(world_of(rank, 2, port), member_of(rank));
        int64_t all[2], own = 1;
        if (rank == 0)
            channel.all_gather(all, &own, 8);
        else
            channel.all_gather(all, &own, 4);
    });
    EXPECT_EQ(
        errors[0],
        "rank 0: all_gather_host: rank 1 is at another operation than this rank; start all ranks with the same program "
        "and options");
}

}  // namespace
