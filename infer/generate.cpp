#include "infer/generate.h"

#include <algorithm>

#include "infer/scheduler.h"

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

GenerateStatistics generate(Engine& engine, std::vector<Request>& requests, const ContextPolicy& policy,
                            const std::function<bool()>& interrupted, const std::function<void(const Request&)>& done) {
    Scheduler scheduler(engine, policy, done);
    for (Request& r : requests) scheduler.add(r);
    while (scheduler.step())
        if (interrupted && interrupted()) scheduler.cancel_all("interrupted");
    return scheduler.statistics;
}
