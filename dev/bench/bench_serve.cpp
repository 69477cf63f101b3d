// A running server under load (serve/), started with --name bench: SERVE_ADDRESS=127.0.0.1:8080 names it. Greedy
// completions of prompts of token ids, streamed; each stream has a connection and a thread. Times are those of the
// client.
//
//   first     one stream after the other, prompts of 128 tokens: the time to the first token of an idle server
//   streams   N streams from the start, prompts of 128 tokens and 256 generated ones
//   arrivals  requests at random times (a Poisson process), half of them with prompts of 128 tokens and half with
//             2,000; each generates 256: the load and the counters of bench_engine's poisson
//   prefix    two prompts that share their first tokens, and the time to the first token of each
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "dev/bench/bench_util.h"
#include "runtime/error.h"
#include "runtime/timing.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t GENERATED = 256;

class Connection {
  public:
    Connection() {
        const std::string address = std::getenv("SERVE_ADDRESS");
        const size_t colon = address.find(':');
        uint16_t port = 0;
        const char* const begin = address.data() + (colon == std::string::npos ? address.size() : colon + 1);
        const char* const end = address.data() + address.size();
        sockaddr_in to{};
        to.sin_family = AF_INET;
        const auto [stop, error] = std::from_chars(begin, end, port);
        require(error == std::errc{} && stop == end &&
                    inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) == 1,
                "SERVE_ADDRESS is ", address, ", expected IP:PORT");
        to.sin_port = htons(port);
        require(::connect(socket_.number, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0, "no server at ",
                address);
        const int on = 1;
        setsockopt(socket_.number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }

    // Posts the body and calls event(text) with what follows "data: " in each line that comes.
    template <typename Event>
    void post(const std::string& path, const std::string& body, Event event) {
        const std::string request =
            "POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" +
            "Connection: close\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
        for (size_t sent = 0; sent < request.size();) {
            const ssize_t n = ::send(socket_.number, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
            require(n > 0, "the server has closed the connection");
            sent += size_t(n);
        }
        std::string text, buffer(1 << 16, '\0');
        for (size_t at = 0;;) {
            const ssize_t n = ::recv(socket_.number, buffer.data(), buffer.size(), 0);
            require(n > 0, "the server has closed the connection: ", text.substr(0, 400));
            text.append(buffer, 0, size_t(n));
            for (size_t end; (end = text.find("\n\n", at)) != std::string::npos; at = end + 2) {
                const size_t data = text.find("data: ", at);
                if (data == std::string::npos || data > end) continue;
                const std::string line = text.substr(data + 6, end - data - 6);
                if (line == "[DONE]") return;
                event(line);
            }
        }
    }

  private:
    struct Socket {
        const int number = ::socket(AF_INET, SOCK_STREAM, 0);
        Socket() = default;
        ~Socket() { ::close(number); }
        Socket(const Socket&) = delete;
        Socket& operator=(const Socket&) = delete;
    } socket_;
};

// A request, and when its tokens came. A token that ends no character comes with a later one.
struct Request {
    std::vector<int32_t> prompt;
    int64_t max_tokens = GENERATED;
    Clock::time_point begin = {};  // it is sent then
    std::vector<double> times;     // milliseconds to each token, from the one before it or the beginning
    int64_t tokens = 0;

    // Returns the seconds that it took.
    double run() {
        const std::string body = nlohmann::json{{"model", "bench"},
                                                {"prompt", prompt},
                                                {"max_tokens", max_tokens},
                                                {"temperature", 0},
                                                {"ignore_eos", true},
                                                {"stream", true},
                                                {"stream_options", {{"include_usage", true}}}}
                                     .dump();
        std::this_thread::sleep_until(begin);
        Connection connection;
        begin = Clock::now();
        Clock::time_point last = begin;
        connection.post("/v1/completions", body, [&](const std::string& line) {
            const Clock::time_point now = Clock::now();
            const nlohmann::json event = nlohmann::json::parse(line);
            require(!event.contains("error"), "the server answers ", line);
            if (event.contains("usage") && event["usage"].is_object()) tokens = event["usage"]["completion_tokens"];
            if (event["choices"].empty()) return;
            times.push_back(1000 * std::chrono::duration<double>(now - last).count());
            last = now;
        });
        require(tokens == max_tokens && !times.empty(), "a completion of ", tokens, " tokens in ", times.size(),
                " events, expected ", max_tokens, " tokens");
        return seconds_since(begin);
    }
};

// Random ids below 250, which every vocabulary has; another prompt each time.
std::vector<int32_t> random_prompt(int64_t n) {
    static std::mt19937 numbers(std::random_device{}());
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; i++) ids.push_back(int32_t(numbers() % 250));
    return ids;
}

// Runs all streams side by side. Returns the seconds that they took together.
double run_all(std::vector<Request>& streams) {
    std::vector<std::thread> threads;
    std::vector<std::string> errors(streams.size());
    const Clock::time_point begin = Clock::now();
    for (size_t i = 0; i < streams.size(); i++)
        threads.emplace_back([&, i] {
            try {
                streams[i].run();
            } catch (const std::exception& e) {
                errors[i] = e.what();
            }
        });
    for (std::thread& t : threads) t.join();
    for (const std::string& error : errors) require(error.empty(), error);
    return seconds_since(begin);
}

bool has_server(benchmark::State& state) {
    if (std::getenv("SERVE_ADDRESS")) return true;
    skip_bench(state, "SERVE_ADDRESS names no server");
    return false;
}

void report(benchmark::State& state, const std::vector<Request>& streams, double seconds) {
    std::vector<double> gaps;
    int64_t tokens = 0;
    for (const Request& s : streams) {
        gaps.insert(gaps.end(), s.times.begin() + 1, s.times.end());
        tokens += s.tokens;
    }
    state.SetIterationTime(seconds);
    state.counters["tokens/s"] = double(tokens) / seconds;
    if (gaps.empty()) return;
    state.counters["gap p50 ms"] = percentile(gaps, 0.5);
    state.counters["gap p99 ms"] = percentile(gaps, 0.99);
}

void report_first_tokens(benchmark::State& state, const std::vector<Request>& streams, size_t prompt,
                         const std::string& name) {
    std::vector<double> values;
    for (const Request& s : streams)
        if (s.prompt.size() == prompt) values.push_back(s.times[0]);
    state.counters[name + " p50 ms"] = percentile(values, 0.5);
    state.counters[name + " p99 ms"] = percentile(values, 0.99);
}

void streams(benchmark::State& state) {
    if (!has_server(state)) return;
    for (auto _ : state) {
        std::vector<Request> all(size_t(state.range(0)));
        for (Request& s : all) s.prompt = random_prompt(128);
        report(state, all, run_all(all));
        report_first_tokens(state, all, 128, "first token");
    }
}

void first(benchmark::State& state) {
    if (!has_server(state)) return;
    for (auto _ : state) {
        std::vector<Request> all(size_t(state.range(0)));
        double seconds = 0;
        for (Request& s : all) {
            s.prompt = random_prompt(128);
            s.max_tokens = 2;
            seconds += s.run();
        }
        report(state, all, seconds);
        report_first_tokens(state, all, 128, "first token");
    }
}

void arrivals(benchmark::State& state) {
    if (!has_server(state)) return;
    for (auto _ : state) {
        std::vector<Request> all(size_t(state.range(1)));
        const std::vector<double> seconds = poisson_arrivals(double(state.range(0)), state.range(1));
        const Clock::time_point begin = Clock::now() + std::chrono::milliseconds(100);  // the threads have started then
        for (size_t i = 0; i < all.size(); i++) {
            all[i].prompt = random_prompt(i % 2 ? 2000 : 128);
            all[i].begin =
                begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds[i]));
        }
        report(state, all, run_all(all));
        report_first_tokens(state, all, 128, "first token of 128");
        report_first_tokens(state, all, 2000, "of 2000");
    }
}

void prefix(benchmark::State& state) {
    if (!has_server(state)) return;
    for (auto _ : state) {
        const std::vector<int32_t> shared = random_prompt(state.range(0));
        std::vector<double> times;
        double seconds = 0;
        for (int i = 0; i < 2; i++) {
            Request one;
            one.prompt = shared;
            const std::vector<int32_t> own = random_prompt(20);
            one.prompt.insert(one.prompt.end(), own.begin(), own.end());
            one.max_tokens = 2;
            seconds += one.run();
            times.push_back(one.times[0]);
        }
        state.SetIterationTime(seconds);
        state.counters["first ms"] = times[0];
        state.counters["second ms"] = times[1];
        state.counters["ratio"] = times[1] / times[0];
    }
}

BENCH(first, (std::vector<std::string>{"requests"}), (Sizes{{5}}), (Sizes{{5}, {50}}));
BENCH(streams, (std::vector<std::string>{"N"}), (Sizes{{1}, {4}}), (Sizes{{1}, {64}, {1}, {64}}));
BENCH(arrivals, (std::vector<std::string>{"per_second", "requests"}), (Sizes{{1, 4}}), (Sizes{{10, 100}}));
BENCH(prefix, (std::vector<std::string>{"shared"}), (Sizes{{512}, {8000}, {8000}}), (Sizes{{8000}, {8000}}));

}  // namespace
