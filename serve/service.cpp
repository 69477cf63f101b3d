#include "serve/service.h"

#include "runtime/timing.h"

namespace {

Answer::Sequence& sequence_of(const Request& r) {  // the scheduler hands out what it was given
    return static_cast<Answer::Sequence&>(const_cast<Request&>(r));
}

}  // namespace

Service::Service(Engine& e, const ServedModel& m, int64_t max_queue, int64_t chunk_tokens)
    : model(m),
      scheduler(
          e, {.slide = false}, [this](const Request& r) { end(r); }, chunk_tokens),
      engine(e),
      most_sequences(e.options.slots + max_queue) {
    scheduler.on_token = [this](const Request& r) { token(r); };
    count();  // for who asks for the metrics before run() has begun
}

void Service::submit(const std::shared_ptr<Answer>& answer, const std::string& path) {
    const int64_t count = int64_t(answer->sequences().size());
    {
        const std::lock_guard lock(mutex);
        if (stopping) throw ApiError(http::UNAVAILABLE, "the server is stopping");
        // A request that alone exceeds the queue is taken where nothing else waits.
        if (live > 0 && live + count > most_sequences)
            throw ApiError(http::UNAVAILABLE, str(live, " sequences are running or waiting; try again later"));
        live += count;
        metrics.request(path, http::OK);  // before its client can have the answer
        fresh.push_back(answer);
    }
    arrived.notify_one();
}

void Service::wake() {
    {
        const std::lock_guard lock(mutex);
        woken = true;
    }
    arrived.notify_one();
}

std::shared_ptr<void> Service::expect() {
    const std::lock_guard lock(mutex);
    return {nullptr, [this, at = expected.insert(Clock::now())](void*) {
                {
                    const std::lock_guard guard(mutex);
                    expected.erase(at);
                }
                arrived.notify_one();
            }};
}

// To read a prompt of 2,000 token ids takes 0.2 ms; to miss a step, as long as that takes. A client that sends its
// headers and no more delays one step. Where several come, there is enough to do before the last one is there.
void Service::take_new() {
    std::vector<std::shared_ptr<Answer>> taken;
    {
        std::unique_lock lock(mutex);
        const auto none_is_coming = [&] {
            return expected.size() != 1 || *expected.begin() + patience <= Clock::now();
        };
        arrived.wait_until(lock, Clock::now() + patience, none_is_coming);
        taken.swap(fresh);
    }
    for (const std::shared_ptr<Answer>& a : taken) {
        answers.insert(a);
        for (Answer::Sequence& s : a->sequences()) scheduler.add(s);
    }
}

void Service::drop_gone() {
    std::vector<std::shared_ptr<Answer>> left;
    for (const std::shared_ptr<Answer>& a : answers)
        if (a->gone) left.push_back(a);
    for (const std::shared_ptr<Answer>& a : left) {
        metrics.cancelled();
        for (Answer::Sequence& s : a->sequences())
            if (!s.text->finish()) scheduler.cancel(s);
    }
}

void Service::token(const Request& r) {
    Answer::Sequence& s = sequence_of(r);
    if (s.text->tokens().size() == 1)
        metrics.first_token(seconds_since(s.answer->arrival));
    else
        metrics.next_token(seconds_since(s.last_token));
    s.last_token = Clock::now();
    if (!step_read) step_read = s.last_token;
    s.answer->token(s);
}

void Service::end(const Request& r) {
    Answer::Sequence& s = sequence_of(r);
    // Before its client has the answer, who may ask for the metrics or for more.
    if (s.answer->one_left()) metrics.finished(s.answer->prompt_tokens(), s.answer->completion_tokens());
    count();
    {
        const std::lock_guard lock(mutex);
        live--;
    }
    s.answer->end(s);
    if (!s.answer->ended()) return;
    for (auto a = answers.begin(); a != answers.end(); ++a) {
        if (a->get() != s.answer) continue;
        finished.push_back(*a);  // the scheduler still reads the request
        answers.erase(a);
        return;
    }
}

void Service::count() {
    const Scheduler::Counts now = scheduler.counts();
    metrics.set({now.running, now.waiting, engine.pages_in_use(), engine.pages_in_use() + engine.pages_available(),
                 scheduler.statistics.prompt_tokens});
}

// Ends early with a request, or with a client that goes away.
void Service::wait_for_requests(Clock::time_point until) {
    std::unique_lock lock(mutex);
    arrived.wait_until(lock, until, [&] { return woken || !fresh.empty(); });
    woken = false;
}

// A request starts where a step ends, and after the step behind it where that is queued already. So that one is queued
// late: half of the time that the last step took is left for requests to arrive.
void Service::wait_beside_a_step() {
    constexpr Clock::duration LONG_STEP = std::chrono::milliseconds(1);  // less is too short to sleep in
    const StepRead before = last_step;
    last_step = step_read ? StepRead{*step_read, scheduler.generating_alone()} : StepRead{};
    step_read.reset();
    if (last_step.sequences == 0 || last_step.sequences != before.sequences) return;
    const Clock::duration took = last_step.time - before.time;
    if (took >= LONG_STEP) wait_for_requests(last_step.time + took / 2);
}

void Service::fail_all(const ApiError& error) {
    std::vector<std::shared_ptr<Answer>> all(answers.begin(), answers.end());
    {
        const std::lock_guard lock(mutex);
        stopping = true;
        all.insert(all.end(), fresh.begin(), fresh.end());
        fresh.clear();
    }
    for (const std::shared_ptr<Answer>& a : all) a->fail(error);
}

void Service::run(const std::function<bool()>& stop, double drain) {
    constexpr std::chrono::milliseconds LOOK(100);  // for a signal
    Clock::time_point stopped;
    try {
        for (;;) {
            take_new();
            drop_gone();
            const bool more = scheduler.step();
            finished.clear();
            count();
            if (stop()) {
                const std::lock_guard lock(mutex);
                if (!stopping) stopped = Clock::now();
                stopping = true;
                if (live == 0) return;
                if (seconds_since(stopped) > drain) break;
            }
            if (more)
                wait_beside_a_step();
            else
                wait_for_requests(Clock::now() + LOOK);
        }
    } catch (const std::exception& e) {
        fail_all({http::FAILED, e.what()});
        throw;
    }
    fail_all({http::UNAVAILABLE, "the server is stopping"});
}
