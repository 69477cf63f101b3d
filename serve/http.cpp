#include "serve/http.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/error.h"

namespace http {

std::string Request::header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? "" : found->second;
}

namespace {

// A request on its connection. libmicrohttpd's thread and those that answer share it. A connection without anything to
// do is suspended: libmicrohttpd does not look at it until it is resumed.
class Exchange : public Reply, public std::enable_shared_from_this<Exchange> {
  public:
    // epoll: of the thread that looks for clients that have gone; it is told the id.
    Exchange(MHD_Connection* c, uint64_t i, int s, int e) : id(i), connection(c), socket(s), epoll(e) {}

    void send(int status, const std::string& type, std::string body) override {
        const std::lock_guard lock(mutex);
        if (state != State::Open || closed) return;
        state = State::Whole;
        code = status;
        headers["Content-Type"] = type;
        bytes = std::move(body);
        resume();
    }
    void begin(const std::string& type) override {
        const std::lock_guard lock(mutex);
        if (state != State::Open || closed) return;
        state = State::Growing;
        headers["Content-Type"] = type;
        resume();
    }
    void write(std::string_view more) override {
        const std::lock_guard lock(mutex);
        if (state != State::Growing || closed) return;
        bytes += more;
        resume();
    }
    void end(bool whole) override {
        const std::lock_guard lock(mutex);
        if (state != State::Growing) return;
        state = whole ? State::Ended : State::Broken;
        resume();
    }
    void set_header(const std::string& name, const std::string& value) override {
        const std::lock_guard lock(mutex);
        headers[name] = value;
    }
    void on_gone(std::function<void()> function) override {
        {
            const std::lock_guard lock(mutex);
            if (!closed) {
                gone = std::move(function);
                epoll_event event{EPOLLRDHUP | EPOLLONESHOT, {}};
                event.data.u64 = id;
                epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event);
                return;
            }
        }
        function();
    }
    bool begun() const override {
        const std::lock_guard lock(mutex);
        return state != State::Open;
    }

    // --- libmicrohttpd's thread

    // Queues the answer where there is one; else suspends the connection.
    MHD_Result respond() {
        const std::lock_guard lock(mutex);
        if (state == State::Open && !closed) {
            suspend();
            return MHD_YES;
        }
        if (state == State::Open) return MHD_NO;
        MHD_Response* const response =
            state == State::Whole
                ? MHD_create_response_from_buffer(bytes.size(), bytes.data(), MHD_RESPMEM_MUST_COPY)
                : MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_bytes, this, nullptr);
        if (!response) return MHD_NO;
        for (const auto& [name, value] : headers) MHD_add_response_header(response, name.c_str(), value.c_str());
        const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(code), response);
        MHD_destroy_response(response);
        return queued;
    }

    // The request has ended in one way or the other: the connection is no longer ours.
    void finish(bool whole) {
        std::function<void()> function;
        {
            const std::lock_guard lock(mutex);
            connection = nullptr;
            closed = true;
            epoll_ctl(epoll, EPOLL_CTL_DEL, socket, nullptr);  // the next request on it may be another's
            if (!whole) function.swap(gone);
            gone = nullptr;
        }
        if (function) function();
    }

    // --- the thread that looks for clients that have gone, and the one that ends the server

    // Ends a request that has no whole answer as it is; it is not suspended any more.
    void abandon() {
        std::function<void()> function;
        {
            const std::lock_guard lock(mutex);
            if (state == State::Whole || state == State::Ended) return;
            closed = true;
            if (state == State::Growing) state = State::Broken;
            function.swap(gone);
            resume();
        }
        if (function) function();
    }

    const uint64_t id;
    Request request;
    int64_t body_bytes = 0;  // that came
    bool handed_on = false;
    std::shared_ptr<void> expected;  // of Options::on_headers

  private:
    enum class State { Open, Whole, Growing, Ended, Broken };

    void suspend() {
        suspended = true;
        MHD_suspend_connection(connection);
    }
    void resume() {
        if (!suspended) return;
        suspended = false;
        MHD_resume_connection(connection);
    }

    static ssize_t read_bytes(void* self, uint64_t, char* to, size_t most) {
        Exchange& e = *static_cast<Exchange*>(self);
        const std::lock_guard lock(e.mutex);
        const size_t n = std::min(most, e.bytes.size() - e.written);
        if (n > 0) {
            std::memcpy(to, e.bytes.data() + e.written, n);
            e.written += n;
            if (e.written == e.bytes.size()) {
                e.bytes.clear();
                e.written = 0;
            }
            return ssize_t(n);
        }
        if (e.state == State::Ended) return MHD_CONTENT_READER_END_OF_STREAM;
        if (e.state == State::Broken) return MHD_CONTENT_READER_END_WITH_ERROR;
        e.suspend();
        return 0;
    }

    mutable std::mutex mutex;
    MHD_Connection* connection;
    const int socket, epoll;
    State state = State::Open;
    int code = MHD_HTTP_OK;
    Headers headers;
    std::string bytes;
    size_t written = 0;  // of bytes
    bool suspended = false, closed = false;
    std::function<void()> gone;
};

// The addresses of a host and port, the first that works.
sockaddr_storage address_of(const Options& o) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_PASSIVE;
    hints.ai_socktype = SOCK_STREAM;
    const int failed = getaddrinfo(o.host.c_str(), std::to_string(o.port).c_str(), &hints, &found);
    require(failed == 0, "--host ", o.host, ": ", gai_strerror(failed), "; name an address of this machine");
    sockaddr_storage address{};
    std::memcpy(&address, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return address;
}

// A socket that listens. libmicrohttpd would not say why it cannot.
int listen_on(const Options& o) {
    const sockaddr_storage address = address_of(o);
    const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    const socklen_t size = address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    const auto fail = [&] {
        const std::string why = std::strerror(errno);
        if (fd >= 0) close(fd);
        throw Error(str("port ", o.port, " of ", o.host, ": ", why, "; choose another with --port"));
    };
    if (fd < 0) fail();
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(fd, SOMAXCONN) != 0) fail();
    return fd;
}

// As many connections as files may be open, less some for the program.
unsigned connection_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 900;
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 1 << 14);
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
    return static_cast<unsigned>(std::max<int64_t>(int64_t(limit.rlim_cur) - 64, 16));
}

}  // namespace

struct Server::Impl {
    const Options options;
    const Handler handle;
    const std::string too_large;
    MHD_Daemon* daemon = nullptr;
    std::mutex mutex;
    std::condition_variable work;
    std::deque<std::shared_ptr<Exchange>> queue;  // whole requests, for the threads that run the handler
    std::map<uint64_t, std::shared_ptr<Exchange>> open;
    uint64_t last_id = 0;  // of an exchange
    bool stopping = false;
    const int hangups = epoll_create1(EPOLL_CLOEXEC), stop = eventfd(0, EFD_CLOEXEC);
    std::vector<std::thread> threads;

    Impl(const Options& o, Handler h, const std::string& t) : options(o), handle(std::move(h)), too_large(t) {
        epoll_event stopped{EPOLLIN, {}};
        require(hangups >= 0 && epoll_ctl(hangups, EPOLL_CTL_ADD, stop, &stopped) == 0,
                "the HTTP server: ", std::strerror(errno));
        const int fd = listen_on(options);
        daemon = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, nullptr, nullptr, access,
                                  this, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED, completed, this,
                                  MHD_OPTION_CONNECTION_TIMEOUT, options.idle_seconds, MHD_OPTION_CONNECTION_LIMIT,
                                  connection_limit(), MHD_OPTION_END);
        if (!daemon) close(fd);
        require(daemon, "the HTTP server could not be started");
        for (int i = 0; i < options.handlers; i++) threads.emplace_back([this] { run_handlers(); });
        threads.emplace_back([this] { look_for_gone_clients(); });
    }

    ~Impl() {
        const MHD_socket fd = MHD_quiesce_daemon(daemon);
        std::vector<std::shared_ptr<Exchange>> left;
        {
            const std::lock_guard lock(mutex);
            stopping = true;
            for (const auto& [id, e] : open) left.push_back(e);
        }
        work.notify_all();
        eventfd_write(stop, 1);
        for (std::thread& t : threads) t.join();
        for (const auto& e : left) e->abandon();  // libmicrohttpd stops only where nothing is suspended
        MHD_stop_daemon(daemon);
        if (fd != MHD_INVALID_SOCKET) close(fd);
        close(stop);
        close(hangups);
    }

    static MHD_Result access(void* self, MHD_Connection* connection, const char* url, const char* method, const char*,
                             const char* data, size_t* size, void** state) {
        return static_cast<Impl*>(self)->take(connection, url, method, data, size, state);
    }

    // Called when the headers are there, for each part of the body, at its end, and again after each resume().
    MHD_Result take(MHD_Connection* connection, const char* url, const char* method, const char* data, size_t* size,
                    void** state) {
        auto* const held = static_cast<std::shared_ptr<Exchange>*>(*state);
        if (!held) {
            const MHD_ConnectionInfo* const info =
                MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
            std::shared_ptr<Exchange> exchange;
            {
                const std::lock_guard lock(mutex);
                if (stopping) return MHD_NO;
                exchange =
                    std::make_shared<Exchange>(connection, ++last_id, info ? int(info->connect_fd) : -1, hangups);
                open[last_id] = exchange;
            }
            *state = new std::shared_ptr<Exchange>(exchange);
            exchange->request.method = method;
            exchange->request.path = url;
            MHD_get_connection_values(connection, MHD_HEADER_KIND, add_header, &exchange->request.headers);
            const std::string length = exchange->request.header("content-length");
            if (length.size() > 15 || (!length.empty() && std::atoll(length.c_str()) > options.max_body))
                return refuse(*exchange);
            if (options.on_headers) exchange->expected = options.on_headers(exchange->request);
            return MHD_YES;
        }
        Exchange& e = **held;
        if (*size > 0) {
            // Of a length that was not said. There can be no answer before its end: the rest is read and dropped.
            constexpr int64_t PATIENCE = 4;  // times the longest body; then the connection is closed
            e.body_bytes += int64_t(*size);
            if (e.body_bytes <= options.max_body)
                e.request.body.append(data, *size);
            else
                e.request.body = {};
            *size = 0;
            return e.body_bytes <= PATIENCE * options.max_body ? MHD_YES : MHD_NO;
        }
        if (e.body_bytes > options.max_body && !e.handed_on) return refuse(e);
        if (!e.handed_on) {
            e.handed_on = true;
            {
                const std::lock_guard lock(mutex);
                queue.push_back(*held);
            }
            work.notify_one();
        }
        return e.respond();
    }

    // A body that is too large, whether it was read or not.
    MHD_Result refuse(Exchange& e) {
        e.handed_on = true;
        e.set_header("Connection", "close");
        e.send(TOO_LARGE, "application/json", too_large);
        return e.respond();
    }

    static MHD_Result add_header(void* headers, MHD_ValueKind, const char* name, const char* value) {
        std::string key = name;
        for (char& c : key) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        (*static_cast<Headers*>(headers))[key] = value ? value : "";
        return MHD_YES;
    }

    static void completed(void* self, MHD_Connection*, void** state, MHD_RequestTerminationCode code) {
        auto* const held = static_cast<std::shared_ptr<Exchange>*>(*state);
        if (!held) return;
        Impl& impl = *static_cast<Impl*>(self);
        {
            const std::lock_guard lock(impl.mutex);
            impl.open.erase((*held)->id);
        }
        (*held)->finish(code == MHD_REQUEST_TERMINATED_COMPLETED_OK);
        delete held;
        *state = nullptr;
    }

    void run_handlers() {
        for (;;) {
            std::shared_ptr<Exchange> next;
            {
                std::unique_lock lock(mutex);
                work.wait(lock, [&] { return stopping || !queue.empty(); });
                if (stopping) return;
                next = std::move(queue.front());
                queue.pop_front();
            }
            handle(next->request, next);
            next->expected.reset();
        }
    }

    // libmicrohttpd does not hear of a client that closes a suspended connection.
    void look_for_gone_clients() {
        for (;;) {
            epoll_event event{};
            epoll_wait(hangups, &event, 1, -1);
            std::shared_ptr<Exchange> left;
            {
                const std::lock_guard lock(mutex);
                if (stopping) return;
                const auto found = open.find(event.data.u64);  // not where the exchange has ended meanwhile
                if (found != open.end()) left = found->second;
            }
            if (left) left->abandon();
        }
    }
};

Server::Server(const Options& options, Handler handle, const std::string& too_large)
    : impl(std::make_unique<Impl>(options, std::move(handle), too_large)) {}

Server::~Server() {
    constexpr int TURNS = 200;
    for (int i = 0; i < TURNS; i++) {
        {
            const std::lock_guard lock(impl->mutex);
            if (impl->open.empty()) return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

int Server::port() const {
    const MHD_DaemonInfo* const info = MHD_get_daemon_info(impl->daemon, MHD_DAEMON_INFO_BIND_PORT);
    return info ? info->port : impl->options.port;
}

}  // namespace http
