// Runs the engine for requests that come from other threads.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <condition_variable>

#include "infer/scheduler.h"
#include "serve/answer.h"
#include "serve/metrics.h"

class Service {
  public:
    // max_queue: sequences that may wait beside those that have slots. chunk_tokens: as the scheduler takes it.
    Service(Engine& engine, const ServedModel& model, int64_t max_queue, int64_t chunk_tokens);

    // --- any thread

    // Counts the request of that path. Throws ApiError 503 where too many sequences wait, or while the server stops.
    void submit(const std::shared_ptr<Answer>& answer, const std::string& path);
    void wake();
    // A request is coming: its headers are there. A step that would begin waits until what this returns is gone, at
    // most for `patience`, unless more are coming. Keep it until the request is submitted, and no longer than the
    // service.
    std::shared_ptr<void> expect();
    std::chrono::microseconds patience{500};
    const ServedModel& model;
    Metrics metrics;

    // --- the thread that runs the engine

    // Until stop() is true and every answer has ended, or `drain` seconds after stop() became true. Throws the Error of
    // an engine that fails, after it has told every client.
    void run(const std::function<bool()>& stop, double drain);

  private:
    using Clock = Answer::Clock;
    void take_new();
    void drop_gone();
    void wait_for_requests(Clock::time_point until);
    void wait_beside_a_step();
    void count();
    void token(const Request& r);
    void end(const Request& r);
    void fail_all(const ApiError& error);

    Scheduler scheduler;
    const Engine& engine;
    const int64_t most_sequences;
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<std::shared_ptr<Answer>> fresh;  // submitted, not taken yet
    std::multiset<Clock::time_point> expected;   // when the headers of each came
    int64_t live = 0;                            // sequences that were submitted and have not ended
    bool stopping = false, woken = false;
    struct StepRead {
        Clock::time_point time;  // its first token
        int64_t sequences = 0;   // that generate; 0: it is not to be compared with others
    };
    std::optional<Clock::time_point> step_read;     // in this turn, where a token joined an answer
    StepRead last_step;                             // of the turn before
    std::set<std::shared_ptr<Answer>> answers;      // that the engine works on
    std::vector<std::shared_ptr<Answer>> finished;  // in this step
};
