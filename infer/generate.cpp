#include "infer/generate.h"

#include <algorithm>
#include <chrono>
#include <deque>

Completion::Completion(const Tokenizer* tokenizer, const CompletionOptions& o, std::function<void(std::string_view)> s)
    : options(o), show(std::move(s)) {
    require(tokenizer || options.stop.empty(),
            "--stop: stop strings need a tokenizer.json; put the model's own beside config.json or leave the option "
            "out");
    if (tokenizer) stream.emplace(*tokenizer);
}

void Completion::show_up_to(size_t end) {
    if (end <= shown) return;
    if (show) show(std::string_view(shown_text).substr(shown, end - shown));
    shown = end;
}

void Completion::end(const char* why) {
    reason = why;
    if (stream) shown_text += stream->finish();
    show_up_to(shown_text.size());
}

bool Completion::add(int32_t token, float logprob, const std::vector<TokenLogprob>& top) {
    if (std::find(options.eos.begin(), options.eos.end(), token) != options.eos.end()) {
        end("eos");
        return true;
    }
    ids.push_back(token);
    probabilities.push_back(logprob);
    most_likely.push_back(top);
    if (stream) shown_text += stream->put(token);
    size_t stop = std::string::npos, safe = shown_text.size();
    for (const std::string& s : options.stop) {
        if (s.empty()) continue;
        stop = std::min(stop, shown_text.find(s, shown));
        // The text may end with the start of s.
        for (size_t n = std::min(s.size() - 1, shown_text.size()); n > 0; n--) {
            if (shown_text.compare(shown_text.size() - n, n, s, 0, n) != 0) continue;
            safe = std::min(safe, shown_text.size() - n);
            break;
        }
    }
    if (stop != std::string::npos) {
        shown_text.resize(stop);
        stream->finish();  // the text ends at the stop string
        end("stop");
    } else if (int64_t(ids.size()) >= options.max_tokens) {
        end("length");
    } else {
        show_up_to(safe);
    }
    return reason != nullptr;
}

void ContextPolicy::check(int64_t context, int64_t longest_prompt) const {
    require(!slide || (keep_tokens >= 0 && keep_tokens <= context - 2), "a context of ", context,
            " tokens has no room to keep ", keep_tokens, " and slide; lower --keep-tokens or raise --context");
    require(longest_prompt <= context || (slide && cut_prompts), "a prompt of ", longest_prompt,
            " tokens exceeds the context of ", context, "; shorten the prompt or raise --context",
            slide ? "; --context-full slide cuts it" : "");
}

std::string ContextPolicy::cut_note(int64_t context, int64_t prompt) const {
    if (prompt <= context) return "";
    return str("a prompt of ", prompt, " tokens exceeds the context of ", context, ": the model reads ",
               keep_tokens ? str("the first ", keep_tokens, " and ") : "", "the last ", tail(context), " of them");
}

void GenerateStatistics::add(const GenerateStatistics& s) {
    prompt_tokens += s.prompt_tokens;
    completion_tokens += s.completion_tokens;
    decode_tokens += s.decode_tokens;
    steps += s.steps;
    step_sequences += s.step_sequences;
    step_bytes += s.step_bytes;
    prefill_seconds += s.prefill_seconds;
    decode_seconds += s.decode_seconds;
}

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The tokens that stay when the context window slides.
std::vector<int32_t> slid(const std::vector<int32_t>& tokens, int64_t context, const ContextPolicy& policy) {
    std::vector<int32_t> kept(tokens.begin(), tokens.begin() + policy.keep_tokens);
    kept.insert(kept.end(), tokens.end() - policy.tail(context), tokens.end());
    return kept;
}

class Generator {
  public:
    Generator(Engine& e, std::vector<Request>& all, const ContextPolicy& p, const std::function<bool()>& stop,
              const std::function<void(const Request&)>& on_end)
        : engine(e), policy(p), interrupted(stop), done(on_end), running(size_t(e.options.slots), nullptr) {
        int64_t longest = 0;
        for (Request& r : all) {
            waiting.push_back(&r);
            longest = std::max(longest, int64_t(r.tokens.size()));
        }
        policy.check(engine.options.context, longest);
    }

    GenerateStatistics run() {
        while (!waiting.empty() || engine.active() > 0 || engine.pending()) {
            if (!engine.pending()) start_sequences();
            while (engine.ready()) queue_step();
            if (engine.pending()) read_step();
            if (interrupted && interrupted()) stop_all();
        }
        return stats;
    }

  private:
    // Slides or ends the sequences that reached the context limit, and starts waiting requests in free slots.
    void start_sequences() {
        std::vector<Prompt> prompts;
        for (size_t slot = 0; slot < running.size(); slot++) {
            Request* r = running[slot];
            if (r && engine.length(int64_t(slot)) == engine.options.context) {
                engine.retire(int64_t(slot));
                if (!policy.slide) {
                    r->completion->end("context");
                    finish(slot);
                    r = nullptr;
                } else {
                    engine.truncate(int64_t(slot));
                    r->context = slid(r->context, engine.options.context, policy);
                    prompts.push_back(prompt_of(*r, int64_t(slot), r->context));
                }
            }
        }
        for (size_t slot = 0; slot < running.size() && !waiting.empty(); slot++) {
            if (running[slot]) continue;
            Request* r = waiting.front();
            waiting.pop_front();
            running[slot] = r;
            prompts.push_back(first_prompt(int64_t(slot), *r));
        }
        if (prompts.empty()) return;
        for (const Prompt& p : prompts) stats.prompt_tokens += int64_t(p.tokens.size());
        const auto begin = Clock::now();
        engine.prefill(prompts);
        read_step();
        stats.prefill_seconds += seconds_since(begin);
    }

    Prompt first_prompt(int64_t slot, Request& r) {
        const int64_t capacity = engine.options.context, n = int64_t(r.tokens.size());
        require(r.cached == 0 || engine.options.slots == 1, "generate: cached tokens need an engine with one slot");
        r.context = r.tokens;
        int64_t cached = std::min({r.cached, n - 1, engine.length(slot)});
        if (n > capacity) {
            r.context = slid(r.tokens, capacity, policy);
            cached = 0;
        }
        const int64_t kept = engine.truncate(slot, std::max<int64_t>(cached, 0));
        return prompt_of(r, slot, {r.context.begin() + kept, r.context.end()});
    }

    // The next tokens of a request that has generated its completion so far.
    static Prompt prompt_of(const Request& r, int64_t slot, std::vector<int32_t> tokens) {
        Prompt p;
        p.slot = slot;
        p.tokens = std::move(tokens);
        p.sequence = r.sequence;
        p.completion = r.completion->tokens();
        p.step = int64_t(p.completion.size());
        p.top_logprobs = r.top_logprobs;
        return p;
    }

    void queue_step() {
        stats.step_bytes += engine.step_bytes();
        stats.step_sequences += engine.active();
        stats.steps++;
        if (!decoding) decode_begin = Clock::now();
        decoding = true;
        engine.decode();
    }

    void read_step() {
        const Engine::Step& s = engine.next();
        for (size_t i = 0; i < s.tokens.size(); i++) {
            Request* r = running[size_t(s.slots[i])];
            if (!r) continue;  // it ended while this step was queued
            stats.decode_tokens += decoding;
            const size_t before = r->completion->tokens().size();
            const bool ended =
                r->completion->add(s.tokens[i], s.logprobs.empty() ? 0 : s.logprobs[i], s.top_logprobs[i]);
            const bool appended = r->completion->tokens().size() > before;
            stats.completion_tokens += appended;
            if (appended) r->context.push_back(s.tokens[i]);
            if (!ended) continue;
            if (!appended) r->end = s.tokens[i];
            engine.retire(s.slots[i]);
            finish(size_t(s.slots[i]));
        }
        if (decoding && !engine.pending()) {
            stats.decode_seconds += seconds_since(decode_begin);
            decoding = false;
        }
    }

    void finish(size_t slot) {
        const Request& r = *running[slot];
        running[slot] = nullptr;
        if (done) done(r);
    }

    void stop_all() {
        while (engine.pending()) read_step();
        for (size_t slot = 0; slot < running.size(); slot++) {
            if (!running[slot]) continue;
            running[slot]->completion->end("interrupted");
            engine.retire(int64_t(slot));
            finish(slot);
        }
        for (Request* r : waiting) {
            r->completion->end("interrupted");
            if (done) done(*r);
        }
        waiting.clear();
    }

    Engine& engine;
    const ContextPolicy policy;
    const std::function<bool()>& interrupted;
    const std::function<void(const Request&)>& done;
    std::vector<Request*> running;  // by slot
    std::deque<Request*> waiting;
    GenerateStatistics stats;
    bool decoding = false;  // decode steps are queued since decode_begin
    Clock::time_point decode_begin;
};

}  // namespace

GenerateStatistics generate(Engine& engine, std::vector<Request>& requests, const ContextPolicy& policy,
                            const std::function<bool()>& interrupted, const std::function<void(const Request&)>& done) {
    return Generator(engine, requests, policy, interrupted, done).run();
}
