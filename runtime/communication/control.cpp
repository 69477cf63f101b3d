#include "runtime/communication/control.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/error.h"
#include "runtime/text.h"

namespace {

constexpr uint32_t MAGIC = 0x54475054;  // "TPGT"; changes with the protocol
// An accepted connection that sends no Hello within this time is dropped.
constexpr auto HELLO_TIMEOUT = std::chrono::seconds(2);
// Rank 0 alone knows which rank is silent. The others wait this much longer, so that it can tell them.
constexpr auto REPORT_TIME = std::chrono::seconds(2);
constexpr size_t LONGEST_TEXT = 1000;

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Returns null and sets *error if the name has no address.
Addresses resolve(const HostPort& address, bool listen, int* error) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = listen ? AI_PASSIVE : 0;
    const bool any = listen && address.host.empty();
    *error = getaddrinfo(any ? nullptr : address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
    return {*error ? nullptr : found, freeaddrinfo};
}

// A host that loses power or network closes no connection. TCP keepalive detects that within half a minute.
void keep_alive(int fd) {
    const auto set = [fd](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); };
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(IPPROTO_TCP, TCP_KEEPCNT, 4);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
    set(IPPROTO_TCP, TCP_NODELAY, 1);
}

// Raises the limit on open files (usually 1,024) if one connection per rank needs more.
void allow_descriptors(int64_t count) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= rlim_t(count)) return;
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, rlim_t(count));
    setrlimit(RLIMIT_NOFILE, &limit);
}

template <size_t N>
void put_text(char (&to)[N], const std::string& text) {
    std::strncpy(to, text.c_str(), N - 1);
}

// Waits until the descriptor is ready. Returns false on time-out.
bool ready(int fd, short events, std::chrono::steady_clock::time_point until) {
    for (;;) {
        const auto left = until - std::chrono::steady_clock::now();
        const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
        pollfd p{fd, events, 0};
        const int n = poll(&p, 1, int(std::clamp<int64_t>(ms + 1, 0, 60000)));
        if (n > 0) return true;
        if (ms <= 0) return false;
    }
}

// Why a socket could not be had. No wait gives this process more descriptors, so a rank ends at once without them.
bool out_of_descriptors(int error) {
    return error == EMFILE;
}
std::string socket_error(int error) {
    return str(std::strerror(error), out_of_descriptors(error) ? "; raise the limit on open files (ulimit -n)" : "");
}

}  // namespace

struct ControlChannel::Hello {
    int64_t rank, size;
    char machine[128], device[128], device_id[64], library[64];
};

ControlChannel::ControlChannel(const World& world, const Member& self)
    : rank(world.rank), size(world.size), timeout_s(world.timeout_s) {
    if (world.rendezvous.empty())
        fail(str(world.launcher, " does not set the address of rank 0; give --rendezvous HOST:PORT"));
    if (rank == 0)
        accept_ranks(world, self);
    else
        connect_to_rank_0(world, self);
}

void ControlChannel::fail(const std::string& what) const {
    throw Error(str("rank ", rank, ": ", operation_name, operation_name.empty() ? "" : ": ", what));
}

ControlChannel::Clock::time_point ControlChannel::deadline() const {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
}

// The reason why a rank cannot join; empty if it can.
std::string ControlChannel::incompatibility(const std::vector<Hello>& hellos, const Hello& hello) const {
    const Hello& first = hellos[0];
    const auto differ = [&](const char* what, const char* ours, const char* theirs, const char* remedy) {
        return str("rank ", hello.rank, " on ", hello.machine, " has ", what, theirs, ", rank 0 on ", first.machine,
                   " has ", ours, "; ", remedy);
    };
    if (hello.size != size)
        return str("rank ", hello.rank, " on ", hello.machine, " has a world of ", hello.size, " ranks, rank 0 has ",
                   size, "; give each run its own port (--rendezvous)");
    if (hello.rank < 1 || hello.rank >= size || hellos[size_t(hello.rank)].size)
        return str("rank ", hello.rank, " joined twice, the second time from ", hello.machine,
                   "; give each run its own port (--rendezvous)");
    if (std::strcmp(hello.device, first.device) != 0)
        return differ("", first.device, hello.device, "use equal GPUs (CUDA_VISIBLE_DEVICES picks them)");
    if (std::strcmp(hello.library, first.library) != 0)
        return differ("", first.library, hello.library, "use the same build and libraries on every machine");
    for (const Hello& other : hellos) {
        if (other.size && *hello.device_id && !std::strcmp(hello.device_id, other.device_id))
            return str("ranks ", other.rank, " and ", hello.rank, " on ", hello.machine, " have the same GPU (",
                       hello.device_id, "); start as many ranks as there are GPUs");
    }
    return "";
}

namespace {

// Listens at the rendezvous address. A loopback name listens on loopback only; any other name listens on all
// interfaces, because the other ranks may use another network than the name suggests.
Descriptor listen_at(const std::string& rendezvous, std::string& problem) {
    HostPort address = parse_host_port(rendezvous, "--rendezvous");
    const bool local = address.host == "localhost" || starts_with(address.host, "127.") || address.host == "::1";
    if (!local) address.host.clear();
    int error = 0;
    const Addresses addresses = resolve(address, true, &error);
    problem = str("cannot listen at ", rendezvous, ": ", error ? gai_strerror(error) : "no address");
    for (const int family : {AF_INET6, AF_INET}) {
        for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
            if (a->ai_family != family) continue;
            Descriptor listener(socket(family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
            if (listener < 0) {
                problem = str("cannot listen at ", rendezvous, ": ", socket_error(errno));
                continue;
            }
            const int on = 1, off = 0;
            setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (family == AF_INET6) setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
            if (bind(listener, a->ai_addr, a->ai_addrlen) == 0 && listen(listener, SOMAXCONN) == 0) {
                problem.clear();
                return listener;
            }
            problem = errno == EADDRINUSE
                          ? str("port ", address.port, " is in use; give another one: --rendezvous HOST:PORT")
                          : str("cannot listen at ", rendezvous, ": ", std::strerror(errno));
            if (errno == EADDRINUSE) return Descriptor();
        }
    }
    return Descriptor();
}

}  // namespace

void ControlChannel::accept_ranks(const World& world, const Member& self) {
    const auto until = deadline();
    allow_descriptors(size + 256);
    std::string problem;
    const Descriptor listener =
        world.rendezvous_socket >= 0 ? Descriptor(world.rendezvous_socket) : listen_at(world.rendezvous, problem);
    if (listener < 0) fail(problem);

    std::vector<Hello> hellos(static_cast<size_t>(size));  // size 0: not connected yet
    Hello& own = hellos[0];
    own.size = size;
    gethostname(own.machine, sizeof own.machine - 1);
    put_text(own.device, self.device);
    put_text(own.device_id, self.device_id);
    put_text(own.library, self.library);
    peers.resize(size_t(size));
    std::string refused;  // why the last connection was not accepted
    for (int64_t connected = 1; connected < size && problem.empty();) {
        // The listener stays ready while connections cannot be accepted, or while others than ranks connect.
        if (Clock::now() >= until || !wait(listener, POLLIN, until)) {
            std::string missing;
            for (const Hello& h : hellos)
                if (!h.size && missing.size() < 40) missing += str(missing.empty() ? "" : ", ", &h - hellos.data());
            problem = str(connected, " of ", size, " ranks connected to ", world.rendezvous, " within ", timeout_s,
                          " s (--comm-timeout); missing: ", missing, refused);
            break;
        }
        Descriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        if (peer < 0) {
            const int error = errno;
            refused = str("; cannot accept a connection: ", socket_error(error));
            if (out_of_descriptors(error)) problem = refused.substr(2);
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            continue;
        }
        keep_alive(peer);
        Hello hello{};
        try {
            receive(peer, -1, Kind::Hello, &hello, sizeof hello, std::min(until, Clock::now() + HELLO_TIMEOUT));
        } catch (const Error&) {
            continue;  // not a rank of this program
        }
        hello.machine[sizeof hello.machine - 1] = hello.device[sizeof hello.device - 1] = '\0';
        hello.device_id[sizeof hello.device_id - 1] = hello.library[sizeof hello.library - 1] = '\0';
        problem = incompatibility(hellos, hello);
        if (problem.empty()) {
            hellos[size_t(hello.rank)] = hello;
            peers[size_t(hello.rank)] = std::move(peer);
            connected++;
        } else {
            send(peer, hello.rank, Kind::Verdict, problem.data(), problem.size(), until);
        }
    }
    for (const Descriptor& peer : peers) {
        try {
            if (peer >= 0) send(peer, &peer - peers.data(), Kind::Verdict, problem.data(), problem.size(), until);
        } catch (const Error&) {
            if (problem.empty()) throw;  // otherwise the peer has already gone
        }
    }
    if (!problem.empty()) fail(problem);
}

void ControlChannel::connect_to_rank_0(const World& world, const Member& self) {
    const auto until = deadline();
    const HostPort address = parse_host_port(world.rendezvous, "--rendezvous");
    Descriptor peer;
    // Retry: rank 0 may not listen yet, and its host name may not resolve yet.
    for (auto pause = std::chrono::milliseconds(20); peer < 0; pause = std::min(2 * pause, decltype(pause)(500))) {
        int error = 0;
        const Addresses addresses = resolve(address, false, &error);
        if (error && error != EAI_AGAIN) fail(str("--rendezvous ", world.rendezvous, ": ", gai_strerror(error)));
        std::string why = error ? gai_strerror(error) : "";
        for (const addrinfo* a = addresses.get(); a && peer < 0; a = a->ai_next) {
            Descriptor attempt(socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
            if (attempt < 0 && out_of_descriptors(errno))
                fail(str("cannot connect to ", world.rendezvous, ": ", socket_error(errno)));
            int status = attempt >= 0 && connect(attempt, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
            socklen_t length = sizeof status;
            if (status == EINPROGRESS) {
                status = ETIMEDOUT;
                if (ready(attempt, POLLOUT, std::min(until, Clock::now() + std::chrono::seconds(5))))
                    getsockopt(attempt, SOL_SOCKET, SO_ERROR, &status, &length);
            }
            if (status == 0)
                peer = std::move(attempt);
            else
                why = std::strerror(status);
        }
        if (peer >= 0) break;
        if (Clock::now() + pause > until)
            fail(str("rank 0 could not be reached at ", world.rendezvous, " within ", timeout_s,
                     " s (--comm-timeout): ", why));
        std::this_thread::sleep_for(pause);
    }
    keep_alive(peer);
    Hello hello{};
    hello.rank = rank;
    hello.size = size;
    gethostname(hello.machine, sizeof hello.machine - 1);
    put_text(hello.device, self.device);
    put_text(hello.device_id, self.device_id);
    put_text(hello.library, self.library);
    send(peer, 0, Kind::Hello, &hello, sizeof hello, until);
    Header header;
    receive_bytes(peer, 0, &header, sizeof header, until);
    if (header.magic != MAGIC || header.kind != Kind::Verdict || header.length > LONGEST_TEXT)
        fail(str("what answers at ", world.rendezvous,
                 " is not rank 0 of this program; give another port: --rendezvous HOST:PORT"));
    std::string problem(size_t(header.length), '\0');
    receive_bytes(peer, 0, problem.data(), problem.size(), until);
    if (!problem.empty()) fail(problem);
    peers.push_back(std::move(peer));
}

// Waits for one peer and checks all peers for failures meanwhile.
bool ControlChannel::wait(int fd, short events, Clock::time_point until) {
    while (!ready(fd, events, std::min(until, Clock::now() + std::chrono::milliseconds(200)))) {
        const std::string what = trouble();
        if (!what.empty()) fail(what);
        if (Clock::now() >= until) return false;
    }
    return true;
}

void ControlChannel::send(int to, int64_t peer, Kind kind, const void* bytes, size_t n, Clock::time_point until) {
    const std::lock_guard<std::mutex> lock(sending);
    const Header header{MAGIC, kind, operation, n};
    std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
    if (n) frame.append(static_cast<const char*>(bytes), n);
    for (size_t done = 0; done < frame.size();) {
        if (!wait(to, POLLOUT, until))
            fail(str("rank ", peer, " received nothing for ", timeout_s, " s (--comm-timeout)"));
        const ssize_t sent = ::send(to, frame.data() + done, frame.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (sent < 0) fail(str("rank ", peer, " has ended"));
        done += size_t(sent);
    }
}

void ControlChannel::receive_bytes(int from, int64_t peer, void* bytes, size_t n, Clock::time_point until) {
    for (size_t done = 0; done < n;) {
        if (!wait(from, POLLIN, until)) {
            silence = str("no message from rank ", peer, " within ", timeout_s,
                          " s (--comm-timeout); it hangs or waits for another operation");
            fail(silence);
        }
        const ssize_t got = recv(from, static_cast<char*>(bytes) + done, n - done, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (got <= 0) fail(str("rank ", peer, " has ended"));
        done += size_t(got);
    }
}

void ControlChannel::fail_as_reported(int from, int64_t peer, uint64_t length, Clock::time_point until) {
    std::string text(size_t(std::min<uint64_t>(length, LONGEST_TEXT)), '\0');
    receive_bytes(from, peer, text.data(), text.size(), until);
    fail(text);
}

void ControlChannel::receive(int from, int64_t peer, Kind kind, void* bytes, size_t n, Clock::time_point until) {
    Header header;
    receive_bytes(from, peer, &header, sizeof header, until);
    if (header.magic == MAGIC && header.kind == Kind::Trouble) fail_as_reported(from, peer, header.length, until);
    if (header.magic != MAGIC || header.kind != kind || header.number != operation || header.length != n)
        fail(str("rank ", peer,
                 " is at another operation than this rank; start all ranks with the same program and "
                 "options"));
    receive_bytes(from, peer, bytes, n, until);
}

// Runs a collective operation. If it fails because a rank has ended or is silent, rank 0 reports that rank to the
// others.
template <typename Body>
void ControlChannel::operate(const char* name, Body body) {
    operation++;
    operation_name = name;
    silence.clear();
    try {
        body(rank == 0 ? deadline() : deadline() + REPORT_TIME);
    } catch (const Error&) {
        std::string what = trouble();
        if (what.empty()) what = silence;
        if (!what.empty()) report(what);
        throw;
    }
}

void ControlChannel::all_gather(void* all, const void* own, size_t n) {
    operate("all_gather_host", [&](Clock::time_point until) { gather(all, own, n, until); });
}

void ControlChannel::barrier() {
    operate("barrier", [&](Clock::time_point until) { gather(nullptr, nullptr, 0, until); });
}

void ControlChannel::gather(void* all, const void* own, size_t n, Clock::time_point until) {
    const size_t whole = size_t(size) * n;
    if (rank != 0) {
        send(peers[0], 0, Kind::Data, own, n, until);
        return receive(peers[0], 0, Kind::Data, all, whole, until);
    }
    char* const parts = static_cast<char*>(all);
    if (n) std::memcpy(parts, own, n);
    for (int64_t r = 1; r < size; r++) receive(peers[size_t(r)], r, Kind::Data, parts + size_t(r) * n, n, until);
    for (int64_t r = 1; r < size; r++) send(peers[size_t(r)], r, Kind::Data, all, whole, until);
}

void ControlChannel::broadcast(void* bytes, size_t n, int64_t root) {
    operate("broadcast_host", [&](Clock::time_point until) {
        if (rank != 0) {
            if (rank == root) return send(peers[0], 0, Kind::Data, bytes, n, until);
            return receive(peers[0], 0, Kind::Data, bytes, n, until);
        }
        if (root != 0) receive(peers[size_t(root)], root, Kind::Data, bytes, n, until);
        for (int64_t r = 1; r < size; r++)
            if (r != root) send(peers[size_t(r)], r, Kind::Data, bytes, n, until);
    });
}

// Peeks at received data without consuming it, so that pending operations are not disturbed.
std::string ControlChannel::trouble() {
    for (const Descriptor& peer : peers) {
        if (peer < 0) continue;
        char bytes[sizeof(Header) + LONGEST_TEXT];
        const ssize_t got = recv(peer, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return str("rank ", rank == 0 ? &peer - peers.data() : 0, " has ended");
        Header header;
        if (got < ssize_t(sizeof header)) continue;
        std::memcpy(&header, bytes, sizeof header);
        if (header.magic == MAGIC && header.kind == Kind::Trouble &&
            size_t(got) >= sizeof header + std::min<uint64_t>(header.length, LONGEST_TEXT))
            return std::string(bytes + sizeof header, std::min<uint64_t>(header.length, LONGEST_TEXT));
    }
    return "";
}

void ControlChannel::report(const std::string& what) {
    const std::unique_lock<std::mutex> lock(sending, std::try_to_lock);
    if (rank != 0 || !lock) return;  // another thread is stuck in the middle of a frame
    const std::string text = what.substr(0, LONGEST_TEXT);
    for (int64_t r = 1; r < size; r++) {
        const Header header{MAGIC, Kind::Trouble, operation, text.size()};
        const std::string frame = std::string(reinterpret_cast<const char*>(&header), sizeof header) + text;
        ::send(peers[size_t(r)], frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);  // best effort
    }
}
