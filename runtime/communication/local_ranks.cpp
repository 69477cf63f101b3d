#include "runtime/communication/local_ranks.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "runtime/communication/descriptor.h"
#include "runtime/console.h"
#include "runtime/error.h"
#include "runtime/signals.h"

extern char** environ;

namespace {

void check_system(bool ok, const char* what) {
    require(ok, "--gpus: ", what, ": ", std::strerror(errno));
}

// Listens on a loopback port chosen by the system, so that two runs never collide.
Descriptor listen_here(int& port) {
    Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    check_system(listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     listen(listener, SOMAXCONN) == 0 &&
                     getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0,
                 "cannot listen on 127.0.0.1");
    port = ntohs(address.sin_port);
    return listener;
}

// The handler writes signal numbers to this pipe. A global, because a handler has no other context.
volatile int signal_pipe = -1;

void on_signal(int number) {
    const int error = errno;
    const char byte = char(number);
    (void)!write(signal_pipe, &byte, 1);  // a full pipe already holds enough to wake the reader
    errno = error;
}

// Delivers signals as data in a pipe during its lifetime. It uses handlers and not signalfd: signalfd needs the signals
// blocked in every thread, but CUDA's threads do not block them, so SIGINT would end the process there and SIGCHLD
// would be lost.
class SignalReader {
  public:
    SignalReader() {
        int ends[2];
        check_system(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "cannot make a pipe");
        read_end = Descriptor(ends[0]);
        write_end = Descriptor(ends[1]);
        signal_pipe = ends[1];
        struct sigaction action {};
        action.sa_handler = on_signal;
        action.sa_flags = SA_RESTART;
        for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
            if (number == SIGHUP && hangup_ignored()) continue;  // nohup: the ranks ignore it too
            before.push_back({number, {}});
            sigaction(number, &action, &before.back().action);
        }
    }
    ~SignalReader() {
        for (const Caught& caught : before) sigaction(caught.number, &caught.action, nullptr);
        signal_pipe = -1;
    }
    SignalReader(const SignalReader&) = delete;
    SignalReader& operator=(const SignalReader&) = delete;

    int descriptor() const { return read_end; }
    int next() const {  // 0: none pending
        char number;
        return read(read_end, &number, 1) == 1 ? number : 0;
    }
    sigset_t caught() const {
        sigset_t set;
        sigemptyset(&set);
        for (const Caught& signal : before) sigaddset(&set, signal.number);
        return set;
    }

  private:
    struct Caught {
        int number;
        struct sigaction action;  // before
    };
    Descriptor read_end, write_end;
    std::vector<Caught> before;
};

struct Rank {
    pid_t pid = -1;  // -1: has ended
    Descriptor errors;
    std::string line;  // an incomplete line
};

class LocalRanks {
  public:
    LocalRanks(const std::vector<std::string>& command, int n) : ranks(size_t(n)) {
        try {
            int port = 0;
            const Descriptor listener = listen_here(port);
            for (int r = 0; r < n; r++) start(command, r, listener, port);
        } catch (...) {
            kill_all();
            throw;
        }
    }

    int wait() {
        int status = 0;
        while (running() > 0) {
            std::vector<pollfd> waiting = {{signals.descriptor(), POLLIN, 0}};
            for (const Rank& rank : ranks)
                if (rank.errors >= 0) waiting.push_back({rank.errors, POLLIN, 0});
            poll(waiting.data(), waiting.size(), -1);
            for (size_t r = 0; r < ranks.size(); r++) show_errors(int(r));
            for (int number; (number = signals.next());) {
                if (number == SIGCHLD) continue;
                passed_on = number;
                for (const Rank& rank : ranks)
                    if (rank.pid > 0) kill(rank.pid, number);
            }
            for (size_t r = 0; r < ranks.size(); r++) {
                const int failure = ended(int(r));
                if (failure && !status) status = failure;
            }
            if (status) kill_all();
        }
        return status;
    }

    ~LocalRanks() { kill_all(); }
    LocalRanks(const LocalRanks&) = delete;
    LocalRanks& operator=(const LocalRanks&) = delete;

  private:
    int running() const {
        return int(std::count_if(ranks.begin(), ranks.end(), [](const Rank& rank) { return rank.pid > 0; }));
    }

    void start(const std::vector<std::string>& command, int r, const Descriptor& listener, int port) {
        std::vector<std::string> variables = {str(LOCAL_RANKS_RANK, "=", r), str(LOCAL_RANKS_SIZE, "=", ranks.size()),
                                              str(LOCAL_RANKS_ADDRESS, "=127.0.0.1:", port),
                                              str(LOCAL_RANKS_PARENT, "=", getpid())};
        if (r == 0) variables.push_back(str(LOCAL_RANKS_SOCKET, "=", int(listener)));
        // The ranks divide the processors, unless OMP_NUM_THREADS is set.
        if (!std::getenv("OMP_NUM_THREADS")) {
            const unsigned processors = std::thread::hardware_concurrency();
            variables.push_back(str("OMP_NUM_THREADS=", std::max<size_t>(1, processors / ranks.size())));
        }
        std::vector<char*> arguments, environment;
        for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
        arguments.push_back(nullptr);
        for (char** variable = environ; *variable; variable++) environment.push_back(*variable);
        for (const std::string& variable : variables) environment.push_back(const_cast<char*>(variable.c_str()));
        environment.push_back(nullptr);

        posix_spawn_file_actions_t files;
        posix_spawnattr_t attributes;
        posix_spawn_file_actions_init(&files);
        posix_spawnattr_init(&attributes);
        posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
        Descriptor write_end;
        if (r == 0) {
            posix_spawn_file_actions_adddup2(&files, listener, listener);  // inherited by the rank
        } else {
            int ends[2];
            check_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
            ranks[size_t(r)].errors = Descriptor(ends[0]);
            write_end = Descriptor(ends[1]);
            fcntl(ends[0], F_SETFL, O_NONBLOCK);
            posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
            posix_spawn_file_actions_adddup2(&files, write_end, STDERR_FILENO);
        }
        // A process group of its own, so that a terminal's Ctrl-C reaches the rank only through this process.
        sigset_t none;
        const sigset_t caught = signals.caught();
        sigemptyset(&none);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
        posix_spawnattr_setpgroup(&attributes, 0);
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setsigdefault(&attributes, &caught);
        pid_t pid = -1;
        const int error = posix_spawn(&pid, arguments[0], &files, &attributes, arguments.data(), environment.data());
        posix_spawn_file_actions_destroy(&files);
        posix_spawnattr_destroy(&attributes);
        require(error == 0, "--gpus: cannot start ", command[0], ": ", std::strerror(error));
        ranks[size_t(r)].pid = pid;
    }

    // The exit status of a rank that has ended with a failure; 0 if it runs or succeeded.
    int ended(int r) {
        Rank& rank = ranks[size_t(r)];
        int how = 0;
        if (rank.pid < 0 || waitpid(rank.pid, &how, WNOHANG) != rank.pid) return 0;
        rank.pid = -1;
        show_errors(r);
        if (!rank.line.empty()) show_line(r, std::exchange(rank.line, ""));
        // A killed process prints no message of its own.
        if (WIFSIGNALED(how) && !killed && WTERMSIG(how) != passed_on)
            write_line(str("train_gpt: rank ", r, " was ended by signal ", WTERMSIG(how), " (",
                           strsignal(WTERMSIG(how)), ")"));
        return WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
    }

    void show_errors(int r) {
        Rank& rank = ranks[size_t(r)];
        if (rank.errors < 0) return;
        char bytes[4096];
        ssize_t n;
        while ((n = read(rank.errors, bytes, sizeof bytes)) > 0) {
            for (const char c : std::string(bytes, size_t(n))) {
                if (c == '\n')
                    show_line(r, std::exchange(rank.line, ""));
                else
                    rank.line += c;
            }
        }
        if (n == 0) rank.errors = Descriptor();
    }

    void show_line(int r, const std::string& line) {
        if (line == last_line && r != last_rank) return;
        last_line = line;
        last_rank = r;
        write_line(str("[rank ", r, "] ", line));
    }

    // On a terminal this clears rank 0's progress line first.
    static void write_line(const std::string& line) {
        const std::string text = str(isatty(STDERR_FILENO) ? "\r\033[K" : "", for_stderr(line), "\n");
        for (size_t done = 0; done < text.size();) {
            const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
            if (n < 0 && errno != EINTR) return;
            done += n > 0 ? size_t(n) : 0;
        }
    }

    void kill_all() {
        killed = true;
        for (const Rank& rank : ranks)
            if (rank.pid > 0) kill(rank.pid, SIGKILL);
    }

    SignalReader signals;
    std::vector<Rank> ranks;
    bool killed = false;  // by us
    int passed_on = 0;    // the last signal forwarded to the ranks
    std::string last_line;
    int last_rank = 0;
};

}  // namespace

int run_local_ranks(const std::vector<std::string>& command, int ranks) {
    return LocalRanks(command, ranks).wait();
}

void follow_parent() {
    const char* const parent = std::getenv(LOCAL_RANKS_PARENT);
    if (!parent) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have died before prctl().
    require(std::to_string(getppid()) == parent, "--gpus: the process that started this rank has ended");
}
