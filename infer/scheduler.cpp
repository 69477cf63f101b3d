#include "infer/scheduler.h"

#include <algorithm>
#include <cstdint>

#include "runtime/timing.h"

namespace {

constexpr int64_t MOST_CHUNKS_AT_ONCE = 8;  // of the size that is usual beside sequences that generate

// The tokens that stay when the context window slides.
std::vector<int32_t> slid(const std::vector<int32_t>& tokens, int64_t context, const ContextPolicy& policy) {
    std::vector<int32_t> kept(tokens.begin(), tokens.begin() + policy.keep_tokens);
    kept.insert(kept.end(), tokens.end() - policy.tail(context), tokens.end());
    return kept;
}

}  // namespace

Scheduler::Scheduler(Engine& e, const ContextPolicy& p, std::function<void(const Request&)> on_end, int64_t chunk)
    : engine(e), policy(p), done(std::move(on_end)), chunk_tokens(chunk), running(size_t(e.options.slots)) {
    require(chunk_tokens >= 0 && chunk_tokens % KV_PAGE == 0, "a chunk of ", chunk_tokens,
            " tokens of prompts; it must be a positive multiple of ", KV_PAGE);
    policy.check(engine.options.context, 0);
}

void Scheduler::add(Request& r) {
    policy.check(engine.options.context, int64_t(r.tokens.size()));
    require(!r.tokens.empty(), "the prompt has no tokens; give it at least one");
    require(r.cached == 0 || running.size() == 1, "generate: cached tokens need an engine with one slot");
    waiting.push_back({&r, arrivals++});
}

void Scheduler::cancel(Request& r, const char* reason) {
    const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const Waiting& w) { return w.request == &r; });
    if (found != waiting.end()) {
        waiting.erase(found);
        r.completion->end(reason);
        if (done) done(r);
    }
    for (size_t slot = 0; slot < running.size(); slot++) {
        if (running[slot].request != &r) continue;
        r.completion->end(reason);
        finish(slot);
    }
}

void Scheduler::cancel_all(const char* reason) {
    while (engine.pending()) read_step();
    for (size_t slot = 0; slot < running.size(); slot++)
        if (running[slot].request) cancel(*running[slot].request, reason);
    while (!waiting.empty()) cancel(*waiting.front().request, reason);
}

Scheduler::Counts Scheduler::counts() const {
    const auto taken = std::count_if(running.begin(), running.end(), [](const Running& s) { return s.request; });
    return {int64_t(taken), int64_t(waiting.size())};
}

int64_t Scheduler::generating_alone() const {
    const bool others = std::any_of(running.begin(), running.end(),
                                    [](const Running& s) { return s.request && (s.computing || s.suspended); });
    return engine.pending() && waiting.empty() && !others ? counts().running : 0;
}

bool Scheduler::idle() const {
    return std::none_of(running.begin(), running.end(), [](const Running& s) { return s.request; });
}

// Whether a request can start, or a prompt be computed, as soon as every queued step was read. Chunks that end no
// prompt need not wait for that.
bool Scheduler::wants_pause() const {
    bool free_slot = false, computing = false;
    for (size_t slot = 0; slot < running.size(); slot++) {
        const Running& s = running[slot];
        if (s.request && s.suspended && engine.can_resume(int64_t(slot))) return true;
        free_slot |= !s.request;
        computing |= s.request && s.computing;
    }
    if (computing && (!engine.takes_prompts_while_pending() || !has_room() || next_chunk().ends_prompt)) return true;
    if (waiting.empty() || !free_slot) return false;
    const int64_t tokens = std::min(int64_t(waiting.front().request->tokens.size()), engine.options.context);
    return engine.pages_for(tokens) + engine.pages_missing() <= engine.pages_available();
}

bool Scheduler::step() {
    while (engine.pending() && wants_pause()) read_step();
    if (!engine.pending()) {
        slide_or_end();
        resume_suspended();
        admit();
        make_room();
        compute_chunk();
        make_room();
    } else {
        compute_chunk();
    }
    while (engine.ready() && queue_step()) {
    }
    if (engine.pending()) read_step();
    return !waiting.empty() || !idle() || engine.pending();
}

// Slots with a request, the oldest first.
std::vector<size_t> Scheduler::by_arrival() const {
    std::vector<size_t> slots;
    for (size_t slot = 0; slot < running.size(); slot++)
        if (running[slot].request) slots.push_back(slot);
    std::sort(slots.begin(), slots.end(), [&](size_t a, size_t b) { return running[a].arrival < running[b].arrival; });
    return slots;
}

// Slides or ends the sequences that reached the context limit.
void Scheduler::slide_or_end() {
    for (size_t slot = 0; slot < running.size(); slot++) {
        Running& s = running[slot];
        if (!s.request || s.computing || s.suspended || engine.length(int64_t(slot)) < engine.options.context) continue;
        if (!policy.slide) {
            s.request->completion->end("context");
            finish(slot);
            continue;
        }
        engine.retire(int64_t(slot));
        engine.truncate(int64_t(slot));
        s.request->context = slid(s.request->context, engine.options.context, policy);
        s.computing = true;
        s.computed = 0;
    }
}

void Scheduler::resume_suspended() {
    for (const size_t slot : by_arrival()) {
        Running& s = running[slot];
        if (!s.suspended) continue;
        if (!engine.can_resume(int64_t(slot))) return;
        engine.resume(int64_t(slot));
        s.suspended = false;
        if (has_room()) continue;
        engine.suspend(int64_t(slot));  // there is no page for its next token yet
        s.suspended = true;
        return;
    }
}

// Pages that prompts which are being computed still need.
int64_t Scheduler::pages_promised() const {
    int64_t pages = 0;
    for (const Running& s : running) {
        if (!s.request || !s.computing) continue;
        const int64_t tokens = int64_t(s.request->context.size());
        pages += s.like >= 0 ? 1 : engine.pages_for(tokens) - engine.pages_for(s.computed);
    }
    return pages;
}

// Whether there are pages for the next step and for the prompts that are being computed.
bool Scheduler::has_room() const {
    return engine.pages_missing() + pages_promised() <= engine.pages_available();
}

void Scheduler::admit() {
    if (std::any_of(running.begin(), running.end(), [](const Running& s) { return s.suspended; })) return;
    for (size_t slot = 0; slot < running.size() && !waiting.empty(); slot++) {
        if (running[slot].request) continue;
        const Waiting next = waiting.front();
        place(slot, *next.request, next.arrival);
        if (!has_room()) {  // it starts when others have ended
            running[slot] = {};
            engine.truncate(int64_t(slot));
            return;
        }
        waiting.pop_front();
    }
}

void Scheduler::place(size_t slot, Request& r, int64_t arrival) {
    const int64_t capacity = engine.options.context, n = int64_t(r.tokens.size());
    const bool started = !r.completion->tokens().empty();
    if (!started) r.context = n > capacity ? slid(r.tokens, capacity, policy) : r.tokens;
    const int64_t cached = n > capacity ? 0 : std::min({r.cached, n - 1, engine.length(int64_t(slot))});
    const int64_t kept = engine.truncate(int64_t(slot), std::max<int64_t>(cached, 0));
    Running s{&r, arrival, kept, true, false, -1};
    for (size_t other = 0; other < running.size() && kept == 0 && !r.prompt_logprobs; other++) {
        const Running& o = running[other];
        if (o.request && o.computing && o.like < 0 && prefix_space(*o.request) == prefix_space(r) &&
            o.request->context == r.context)
            s.like = int64_t(other);
    }
    // Logprobs of the prompt's tokens are computed with it.
    if (kept == 0 && s.like < 0 && !r.prompt_logprobs)
        s.computed = engine.adopt(int64_t(slot), r.context, prefix_space(r));
    running[slot] = s;
}

// The tokens [begin, end) of the context of a slot's request.
Prompt Scheduler::prompt_of(size_t slot, int64_t begin, int64_t end) const {
    const Request& r = *running[slot].request;
    Prompt p;
    p.slot = int64_t(slot);
    p.tokens.assign(r.context.begin() + begin, r.context.begin() + end);
    p.later = int64_t(r.context.size()) - end;
    p.sequence = r.sequence;
    p.adapter = r.adapter;
    p.completion = r.completion->tokens();
    p.step = int64_t(p.completion.size());
    p.sampling = r.sampling;
    p.mask = r.mask;
    p.logprobs = r.logprobs;
    p.top_logprobs = r.top_logprobs;
    p.prompt_logprobs = r.prompt_logprobs;
    return p;
}

// The most tokens of the next chunk: few where sequences wait for it, but more where more prompts wait for their first
// token than sequences for their next one. (A prompt of 2,000 tokens takes LLaMA 1B 7.5 ms on an H100.) A joint pass
// has rows for the sequences, too.
int64_t Scheduler::chunk_size() const {
    int64_t generating = 0, computing = 0;
    for (const Running& s : running) {
        generating += s.request && !s.computing && !s.suspended;
        computing += s.request && s.computing && s.like < 0;
    }
    const int64_t joining = engine.most_joining();
    const bool joint = engine.joins_at_all() && joining > 0 && generating > 0;
    const int64_t most = std::min(engine.options.prompt_tokens, joint ? joining : INT64_MAX);
    if (chunk_tokens) return std::min(chunk_tokens, most);
    int64_t tokens = Engine::prompt_chunk_tokens();
    if (generating > 0) {
        const int64_t chunks = std::clamp<int64_t>(computing / generating, 1, MOST_CHUNKS_AT_ONCE);
        tokens = std::min(tokens, joint ? std::max(KV_PAGE, chunks * Engine::JOINT_PASS_ROWS - engine.joint_rows())
                                        : chunks * Engine::PROMPT_TOKENS_BESIDE_DECODING);
    }
    return std::min(tokens, most);
}

// The tokens that the next chunk computes of each prompt. They share it page by page, the oldest first, so that it
// never stands still, then those that end soonest, so that a short prompt does not wait for long ones. Where bits are
// promised, chunks end where pages do, so that those of a prompt do not depend on what else is computed. A prompt with
// logprobs is not cut, because they belong to one prefill.
Scheduler::Chunk Scheduler::next_chunk() const {
    Chunk chunk;
    if (std::none_of(running.begin(), running.end(), [](const Running& s) { return s.request && s.computing; }))
        return chunk;
    for (const size_t slot : by_arrival())
        if (running[slot].computing && running[slot].like < 0) chunk.shares.push_back({slot, 0});
    const auto left_of = [&](const std::pair<size_t, int64_t>& share) {
        const Running& s = running[share.first];
        return int64_t(s.request->context.size()) - s.computed;
    };
    if (!chunk.shares.empty())
        std::stable_sort(chunk.shares.begin() + 1, chunk.shares.end(),
                         [&](const auto& a, const auto& b) { return left_of(a) < left_of(b); });
    const int64_t size = chunk_size();
    int64_t left = size;
    for (bool more = true; more;) {
        more = false;
        for (auto& [slot, share] : chunk.shares) {
            const Running& s = running[slot];
            const int64_t begin = s.computed + share, rest = int64_t(s.request->context.size()) - begin;
            const bool whole = s.request->prompt_logprobs;
            int64_t part = whole ? rest : std::min(rest, KV_PAGE - begin % KV_PAGE);
            if (!whole && engine.joins_at_all()) part = std::min(part, left);
            if (part <= 0 || (part > left && !(whole && left == size))) continue;
            share += part;
            left -= part;
            chunk.tokens += part;
            more = true;
            chunk.ends_prompt |= part == rest;
        }
    }
    return chunk;
}

// What the engine computes of a chunk; `finished`: slots whose prompts end.
std::vector<Prompt> Scheduler::prompts_of(const Chunk& chunk, std::vector<size_t>& finished) {
    std::vector<Prompt> prompts;
    for (const auto& [slot, share] : chunk.shares) {
        if (share == 0) continue;
        Running& s = running[slot];
        const int64_t size = int64_t(s.request->context.size()), end = s.computed + share;
        prompts.push_back(prompt_of(slot, s.computed, end));
        statistics.prompt_tokens += share;
        s.computed = end;
        if (end < size) continue;
        s.computing = false;
        finished.push_back(slot);
        for (size_t other = 0; other < running.size(); other++) {
            Running& o = running[other];
            if (!o.request || !o.computing || o.like != int64_t(slot)) continue;
            prompts.push_back(prompt_of(other, size, size));
            prompts.back().like = int64_t(slot);
            o.computing = false;
            o.like = -1;
        }
    }
    return prompts;
}

// Computes a chunk in a pass of its own, if no step can (queue_step()).
void Scheduler::compute_chunk() {
    const Chunk chunk = next_chunk();
    if (chunk.tokens == 0) return;
    if (engine.joins_at_all() && (engine.pending() || engine.joins(chunk.tokens, chunk.ends_prompt))) return;
    std::vector<size_t> finished;
    const auto begin = Clock::now();
    if (engine.pending()) return time_on_stream([&] { engine.prefill(prompts_of(chunk, finished)); });
    engine.prefill(prompts_of(chunk, finished));
    remember_prompts(finished);
    if (!finished.empty()) read_step();
    statistics.prefill_seconds += seconds_since(begin);
}

// Computes prompts where steps may be in flight. The time counts as that of prompts, not of decoding.
template <typename Compute>
void Scheduler::time_on_stream(Compute compute) {
    Timed chunk;
    chunk.begin.record(engine.stream);
    compute();
    chunk.end.record(engine.stream);
    queued_chunks.push_back(std::move(chunk));
}

void Scheduler::remember_prompts(const std::vector<size_t>& finished) {
    for (const size_t slot : finished)
        engine.remember(int64_t(slot), running[slot].request->context, prefix_space(*running[slot].request));
}

// Suspends the youngest sequences until there is a page for each of the others' next token.
void Scheduler::make_room() {
    while (!has_room()) {
        const std::vector<size_t> slots = by_arrival();
        const auto youngest =
            std::find_if(slots.rbegin(), slots.rend(), [&](size_t slot) { return !running[slot].suspended; });
        if (youngest == slots.rend()) return;
        give_up(*youngest);
    }
}

// A sequence that generates is suspended; one whose prompt is being computed waits again.
void Scheduler::give_up(size_t slot) {
    Running& s = running[slot];
    if (!s.computing) {
        engine.suspend(int64_t(slot));
        s.suspended = true;
        times_suspended++;
        return;
    }
    for (Running& o : running)
        if (o.request && o.like == int64_t(slot)) o.like = -1;
    engine.truncate(int64_t(slot));
    waiting.push_front({s.request, s.arrival});
    s = {};
}

// Queues a step, with a chunk of the prompts if there is one and the engine computes both in one pass. Returns false
// where the steps in flight must be read before that.
bool Scheduler::queue_step() {
    const Chunk chunk = engine.joins_at_all() ? next_chunk() : Chunk{};
    const bool joint = chunk.tokens > 0 && has_room() && engine.joins(chunk.tokens, chunk.ends_prompt);
    if (chunk.tokens > 0 && !joint && engine.pending()) return false;
    if (!decoding) decode_begin = Clock::now();
    decoding = true;
    if (joint) {
        std::vector<size_t> finished;
        time_on_stream([&] { engine.decode(prompts_of(chunk, finished)); });
        remember_prompts(finished);
        return true;
    }
    statistics.step_bytes += engine.step_bytes();
    statistics.step_sequences += engine.active();
    statistics.steps++;
    engine.decode();
    return true;
}

void Scheduler::count_queued_chunks() {
    for (; !queued_chunks.empty() && queued_chunks.front().end.reached(); queued_chunks.pop_front()) {
        const double seconds = elapsed_ms(queued_chunks.front().begin, queued_chunks.front().end) / 1000;
        statistics.prefill_seconds += seconds;
        statistics.decode_seconds -= seconds;
    }
}

void Scheduler::read_step() {
    const Engine::Step& s = engine.next();
    count_queued_chunks();
    for (size_t i = 0; i < s.tokens.size(); i++) {
        const size_t slot = size_t(s.slots[i]);
        Request* const r = running[slot].request;
        if (!r) continue;  // it ended while this step was queued
        statistics.decode_tokens += !s.with_prompts;
        const size_t before = r->completion->tokens().size();
        if (before == 0 && r->prompt_logprobs) {
            r->prompt_token_logprobs = s.prompt_logprobs[i];
            r->prompt_token_top_logprobs = s.prompt_top_logprobs[i];
        }
        const float logprob = s.logprobs.empty() ? 0 : s.logprobs[i];
        const bool ended = r->completion->add(s.tokens[i], logprob, s.top_logprobs[i]);
        const bool appended = r->completion->tokens().size() > before;
        statistics.completion_tokens += appended;
        if (appended) r->context.push_back(s.tokens[i]);
        if (appended && on_token) on_token(*r);
        if (!ended) continue;
        if (!appended) {
            r->end = s.tokens[i];
            r->end_logprob = logprob;
            r->end_top_logprobs = s.top_logprobs[i];
        }
        finish(slot);
    }
    if (decoding && !engine.pending()) {
        if (!queued_chunks.empty()) queued_chunks.back().end.wait();
        count_queued_chunks();
        statistics.decode_seconds += seconds_since(decode_begin);
        decoding = false;
    }
}

// Frees the slot. With one slot its tokens stay in the cache: the next request may begin with them.
void Scheduler::finish(size_t slot) {
    const Request& r = *running[slot].request;
    for (Running& o : running)
        if (o.request && o.like == int64_t(slot)) o.like = -1;
    if (!engine.promises_bits() && !running[slot].computing && !running[slot].suspended) {
        const int64_t held = std::min(engine.length(int64_t(slot)), int64_t(r.context.size()));
        engine.remember(int64_t(slot), {r.context.begin(), r.context.begin() + held}, prefix_space(r));
    }
    running[slot] = {};
    engine.retire(int64_t(slot));
    if (running.size() > 1) engine.truncate(int64_t(slot));
    if (done) done(r);
}
