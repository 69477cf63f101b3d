// The answer to a request for completions, while they grow: in OpenAI's form, whole at the end or as server-sent
// events.
//
// Its functions are called by the thread that runs the engine, but for the constructor.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>

#include "infer/generate.h"
#include "serve/api.h"
#include "serve/http.h"

class Answer {
  public:
    using Clock = std::chrono::steady_clock;

    // One completion, as the scheduler takes it.
    struct Sequence : Request {
        Answer* answer = nullptr;
        size_t prompt_index = 0;
        CompletionOptions options;
        std::unique_ptr<Completion> text;
        std::string new_text;    // not sent yet
        int64_t characters = 0;  // of the text that was sent (text_offset)
        bool begun = false, ended = false;
        Clock::time_point last_token;
    };

    // name_space: of prefixes that the sequences may share.
    Answer(CompletionCall call, const ServedModel& model, std::shared_ptr<http::Reply> reply, int64_t name_space);

    std::deque<Sequence>& sequences() { return all; }
    const Clock::time_point arrival = Clock::now();
    std::atomic<bool> gone{false};  // the client; any thread may set it

    void token(Sequence& s);  // a token joined s
    void end(Sequence& s);    // s has ended; the answer with the last one
    bool ended() const { return left == 0; }
    bool one_left() const { return left == 1; }  // sequence that has not ended
    int64_t prompt_tokens() const;
    int64_t completion_tokens() const;
    // Instead of what is missing of the answer.
    void fail(const ApiError& error);

  private:
    std::string head(const char* object) const;
    std::string choice(const Sequence& s, const std::string& content, const std::string& logprobs) const;
    std::string chunk(const Sequence& s, const std::string& content, const std::string& logprobs) const;
    std::string finish_of(const Sequence& s) const;
    std::string usage() const;
    std::string logprobs_of(Sequence& s, size_t first, size_t last, bool with_prompt);
    std::string prompt_text(const Sequence& s) const;
    void send_chunk(Sequence& s, size_t first_token);
    void send_whole();

    const CompletionCall call;
    const ServedModel& model;
    const std::shared_ptr<http::Reply> reply;
    const std::string id;
    const std::string created_and_model;  // of head(), which every event has
    std::deque<Sequence> all;
    size_t left;
    bool streaming = false;  // the stream has begun
};
