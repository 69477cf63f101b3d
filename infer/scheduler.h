// Completes requests that arrive at any time on one engine.
//
//     Scheduler scheduler(engine, policy);
//     scheduler.add(request);          at any time; request.completion grows, and ends
//     while (scheduler.step()) ...     until every request has ended
//
// Requests start in the order of their arrival. One that the cache has no pages for waits, and so do those after it.
// Prompts are computed in chunks (continuous batching, Yu et al. 2022, "Orca"; chunked prefill, Agrawal et al. 2024,
// "Sarathi-Serve"): in the pass of a step where the engine's bits may depend on the batch (Engine::joins_at_all()),
// else between steps. A running sequence waits for at most one chunk, which all prompts share, so that a short one does
// not wait for a long one. A chunk, or a step with one, that ends no prompt is queued behind the steps in flight. Where
// a step lacks pages, the youngest sequence is suspended: its keys and values go to the host, and it continues with the
// same bits before any waiting request starts. A request whose prompt is being computed for an earlier one shares its
// pages.
//
// What a request samples does not depend on the others (infer/engine.h).
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "infer/generate.h"
#include "runtime/device/device.h"

class Scheduler {
  public:
    // chunk_tokens: most tokens of prompts in a decode step or between two, a multiple of KV_PAGE. 0: n times
    // Engine::PROMPT_TOKENS_BESIDE_DECODING, in a step n times JOINT_PASS_ROWS less the sequences' rows, where n ≤ 8
    // times as many prompts are computed as sequences generate; prompt_chunk_tokens() where none does. done is called
    // for each request that ends; it must not call the scheduler.
    Scheduler(Engine& engine, const ContextPolicy& policy, std::function<void(const Request&)> done = {},
              int64_t chunk_tokens = 0);

    // The request must live, and stay where it is, until it has ended. Throws the Error of ContextPolicy::check().
    void add(Request& request);
    // Ends a request that has not ended, with what it has generated; its step in flight is discarded.
    void cancel(Request& request, const char* reason = "cancelled");
    void cancel_all(const char* reason);
    // Starts what can start, queues decode steps, with or after a chunk of prompts each, and reads one. Returns whether
    // there is more to do.
    bool step();

    // Called, where it is set, for each token that joins a completion, before done. It must not call the scheduler.
    std::function<void(const Request&)> on_token;

    struct Counts {
        int64_t running, waiting;  // requests
    };
    Counts counts() const;
    // The sequences of a step in flight, where every request is in it; else 0.
    int64_t generating_alone() const;
    bool is_free(int64_t slot) const { return !running[size_t(slot)].request; }

    GenerateStatistics statistics;
    int64_t suspensions() const { return times_suspended; }  // of sequences, so far

  private:
    using Clock = std::chrono::steady_clock;
    struct Running {
        Request* request = nullptr;  // null: the slot is free
        int64_t arrival = 0;
        int64_t computed = 0;  // tokens of request->context in the cache, while the prompt is computed
        bool computing = false;
        bool suspended = false;
        int64_t like = -1;  // the slot that computes the same prompt
    };
    bool idle() const;
    bool wants_pause() const;
    void slide_or_end();
    void resume_suspended();
    void admit();
    void place(size_t slot, Request& request, int64_t arrival);
    int64_t pages_promised() const;
    bool has_room() const;
    int64_t chunk_size() const;
    struct Chunk {
        std::vector<std::pair<size_t, int64_t>> shares;  // slots and tokens of their prompts
        int64_t tokens = 0;                              // of all of them
        bool ends_prompt = false;
    };
    Chunk next_chunk() const;
    std::vector<Prompt> prompts_of(const Chunk& chunk, std::vector<size_t>& finished);
    void compute_chunk();
    template <typename Compute>
    void time_on_stream(Compute compute);
    void remember_prompts(const std::vector<size_t>& finished);
    void make_room();
    void give_up(size_t slot);
    // The name space of the engine's prefixes: keys and values depend on the adapter, too.
    int64_t prefix_space(const Request& r) const {
        return r.name_space * (engine.options.adapters + 1) + r.adapter + 1;
    }
    Prompt prompt_of(size_t slot, int64_t begin, int64_t end) const;
    bool queue_step();
    void read_step();
    void count_queued_chunks();
    void finish(size_t slot);
    std::vector<size_t> by_arrival() const;

    Engine& engine;
    const ContextPolicy policy;
    const std::function<void(const Request&)> done;
    const int64_t chunk_tokens;    // 0: the engine's
    std::vector<Running> running;  // by slot
    struct Waiting {
        Request* request;
        int64_t arrival;
    };
    std::deque<Waiting> waiting;
    int64_t arrivals = 0, times_suspended = 0;
    bool decoding = false;  // decode steps are queued since decode_begin
    Clock::time_point decode_begin;
    struct Timed {
        Event begin, end;
    };
    std::deque<Timed> queued_chunks;  // behind steps in flight: their time is not that of decoding
};
