#include "data/verifier_command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "data/token_text.h"
#include "runtime/communication/descriptor.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"
#include "runtime/signals.h"

extern char** environ;

using nlohmann::json;

namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point after_seconds(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void check_system(bool ok, const char* what) {
    require(ok, "--verifier: ", what, ": ", std::strerror(errno));
}

// What a process inherits is its standard streams only.
struct Channel {
    Descriptor ours, theirs;

    // A socket and not a pipe: send() to a reader that has gone need not raise SIGPIPE.
    static Channel to_stdin() {
        int ends[2];
        check_system(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "cannot make a socket");
        return {Descriptor(ends[0]), Descriptor(ends[1])};
    }
    static Channel from_output() {
        int ends[2];
        check_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        return {Descriptor(ends[0]), Descriptor(ends[1])};
    }
};

// Appends what can be read now. Closes the descriptor at the end of the stream.
void read_all(Descriptor& from, std::string& text, size_t most) {
    char bytes[1 << 16];
    while (from >= 0 && text.size() <= most) {
        const ssize_t n = read(from, bytes, sizeof bytes);
        if (n > 0) text.append(bytes, size_t(n));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return;
        if (n == 0) from = Descriptor();
    }
}

}  // namespace

std::vector<std::string> command_words(const std::string& command) {
    std::vector<std::string> words;
    bool in_word = false;
    for (size_t i = 0; i < command.size(); i++) {
        const char c = command[i];
        if (c == ' ' || c == '\t' || c == '\n') {
            in_word = false;
            continue;
        }
        if (!in_word) words.emplace_back();
        in_word = true;
        if (c == '\\' && i + 1 < command.size()) {
            words.back() += command[++i];
        } else if (c == '\'' || c == '"') {
            for (i++; i < command.size() && command[i] != c; i++) {
                const bool escaped = c == '"' && command[i] == '\\' && i + 1 < command.size() &&
                                     (command[i + 1] == '"' || command[i + 1] == '\\');
                words.back() += command[escaped ? ++i : i];
            }
            if (i == command.size()) throw UsageError(str("--verifier: a quote ", c, " is not closed in ", command));
        } else {
            words.back() += c;
        }
    }
    if (words.empty()) throw UsageError("--verifier: the command is empty; name a program");
    return words;
}

class VerifierCommand::Process {
  public:
    explicit Process(const std::vector<std::string>& words) {
        Channel input = Channel::to_stdin(), output = Channel::from_output(), error = Channel::from_output();
        std::vector<char*> arguments;
        for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
        arguments.push_back(nullptr);
        posix_spawn_file_actions_t files;
        posix_spawnattr_t attributes;
        posix_spawn_file_actions_init(&files);
        posix_spawnattr_init(&attributes);
        posix_spawn_file_actions_adddup2(&files, input.theirs, STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&files, output.theirs, STDOUT_FILENO);
        posix_spawn_file_actions_adddup2(&files, error.theirs, STDERR_FILENO);
        // This program ignores SIGPIPE and blocks what stops it. A group of its own, so that all of it can be ended.
        sigset_t none, by_default;
        sigemptyset(&none);
        sigemptyset(&by_default);
        sigaddset(&by_default, SIGPIPE);
        sigaddset(&by_default, SIGXFSZ);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
        posix_spawnattr_setpgroup(&attributes, 0);
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setsigdefault(&attributes, &by_default);
        const int failure = posix_spawnp(&pid, arguments[0], &files, &attributes, arguments.data(), environ);
        posix_spawn_file_actions_destroy(&files);
        posix_spawnattr_destroy(&attributes);
        require(failure == 0, "--verifier: cannot start ", words[0], ": ", std::strerror(failure));
        in = std::move(input.ours);
        out = std::move(output.ours);
        err = std::move(error.ours);
    }

    ~Process() {
        kill(-pid, SIGKILL);  // the group, whose number nothing else takes before waitpid()
        waitpid(pid, nullptr, 0);
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    void give(size_t which, int64_t number, const std::string& line, double timeout) {
        item = which;
        id = number;
        unsent = line;
        deadline = after_seconds(timeout);
        busy = true;
    }

    // Sends and reads what it can. Returns the reward once it is there. Throws Error, without the command's name.
    std::optional<double> pump() {
        bool input_closed = false;
        while (!unsent.empty()) {
            const ssize_t n = send(in, unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) continue;
            input_closed = n < 0 && errno != EAGAIN;
            if (n < 0) break;
            unsent.erase(0, size_t(n));
        }
        read_errors();
        read_all(out, reply, LONGEST);
        const size_t end = reply.find('\n');
        if (end != std::string::npos) {
            const std::string line = reply.substr(0, end);
            reply.erase(0, end + 1);
            busy = false;
            return reward_in(line);
        }
        require(reply.size() <= LONGEST, "it wrote more than ", LONGEST, " bytes without a line's end");
        if (out < 0 || input_closed) throw Error(end_of_process(out < 0 ? "output" : "input"));
        return std::nullopt;
    }

    void add_events(std::vector<pollfd>& events) const {
        events.push_back({out, POLLIN, 0});
        if (err >= 0) events.push_back({err, POLLIN, 0});
        if (!unsent.empty()) events.push_back({in, POLLOUT, 0});
    }

    // The last line on stderr, as errors show it after what happened.
    std::string last_words() const {
        const size_t last = errors.find_last_not_of(" \t\r\n");
        if (last == std::string::npos) return "";
        const size_t before = errors.rfind('\n', last);
        const size_t first = before == std::string::npos ? 0 : before + 1;
        return ", after \"" + printable(std::string_view(errors).substr(first, last + 1 - first)) + "\" on stderr";
    }

    void close_streams() {
        for (Descriptor* stream : {&in, &out, &err}) *stream = Descriptor();
    }

    // Whether it has ended before the time. It stays a zombie.
    bool ends_by(Clock::time_point time) const {
        for (;;) {
            siginfo_t info{};
            if (waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != 0) return true;
            if (Clock::now() > time) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    bool busy = false;
    size_t item = 0;
    Clock::time_point deadline;

  private:
    static constexpr size_t LONGEST = 1 << 20;

    void read_errors() {
        constexpr size_t KEPT = 4096;
        read_all(err, errors, KEPT);
        if (errors.size() > KEPT) errors.erase(0, errors.size() - KEPT);
    }

    double reward_in(const std::string& line) const {
        std::string fault;
        const json found = parse_json(line, fault);
        const json reward = found.is_object() ? found.value("reward", json()) : json();
        const bool valid = found.is_object() && found.value("id", json()) == id && reward.is_number() &&
                           reward.get<double>() >= 0 && reward.get<double>() <= 1;
        require(valid, "it wrote '", printable(line), "', expected {\"id\": ", id,
                ", \"reward\": a number from 0 to 1}");
        return reward;
    }

    // Of one that closed a stream.
    std::string end_of_process(const char* stream) {
        if (!ends_by(after_seconds(0.5))) return str("it closed its ", stream);
        read_errors();
        siginfo_t info{};
        if (waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return "it ended";
        if (info.si_code == CLD_EXITED) return str("it ended with status ", info.si_status);
        return str("it was ended by signal ", info.si_status, " (", strsignal(info.si_status), ")");
    }

    pid_t pid = -1;
    int64_t id = 0;
    Descriptor in, out, err;
    std::string unsent, reply, errors;
};

VerifierCommand::VerifierCommand(const Options& o) : options(o), words(command_words(o.command)) {
    processes.push_back(std::make_unique<Process>(words));
}

VerifierCommand::~VerifierCommand() {
    for (const auto& process : processes) process->close_streams();
    const Clock::time_point soon = after_seconds(1);
    for (const auto& process : processes) process->ends_by(soon);
}

std::vector<double> VerifierCommand::rewards(const std::vector<Item>& items,
                                             const std::function<void(const std::string&)>& on_failure) {
    std::vector<double> out(items.size(), 0);
    size_t next = 0, left = items.size();
    try {
        while (int64_t(processes.size()) < std::min(options.processes, int64_t(items.size())))
            processes.push_back(std::make_unique<Process>(words));
        while (left > 0) {
            require(!stop_requested(), "--verifier: interrupted while completions were scored");
            std::vector<pollfd> events;
            Clock::time_point wake = after_seconds(0.1);
            for (std::unique_ptr<Process>& p : processes) {
                if (!p->busy && next < items.size()) {
                    const Item& i = items[next];
                    const json object = {
                        {"id", next_id}, {"prompt", i.prompt}, {"completion", i.completion}, {"answer", i.answer}};
                    p->give(next++, next_id++, object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n",
                            options.timeout);
                }
                if (!p->busy) continue;
                try {
                    const std::optional<double> reward = p->pump();
                    if (reward) out[p->item] = *reward;
                    left -= reward.has_value();
                    require(reward || Clock::now() < p->deadline, "it took longer than --verifier-timeout ",
                            options.timeout, " s; it must flush each line");
                } catch (const Error& e) {
                    on_failure(str("--verifier ", printable(options.command), ": ", e.what(), p->last_words()));
                    left--;
                    p = std::make_unique<Process>(words);
                }
                if (p->busy) p->add_events(events);
                wake = p->busy ? std::min(wake, p->deadline) : Clock::now();
            }
            const auto wait = std::chrono::ceil<std::chrono::milliseconds>(wake - Clock::now()).count();
            poll(events.data(), events.size(), std::max<int>(0, int(wait)));
        }
    } catch (...) {
        processes.clear();  // they are busy with what nobody waits for
        throw;
    }
    return out;
}
