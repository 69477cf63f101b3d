// Questions with several endings to choose from, a JSON object a line: {"ctx": text, "endings": [text, …], "label": i}.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "data/tokenizer.h"

struct Question {
    std::string context;
    std::vector<std::string> endings;
    size_t label = 0;  // the right one, from 0
};

// Empty lines are passed over. Throws Error naming the line for what is no such object, has fewer than two endings, an
// empty one, or a label that names none.
std::vector<Question> read_questions(const std::string& path);

// One ending as a model is asked for its probability: the tokens of "context ending", with a space between them unless
// there is one, of which those from `first` on are the ending's. As in EleutherAI's evaluation harness the text is
// tokenised whole, and the ending begins where the context's own tokens would end.
struct Choice {
    std::vector<int32_t> tokens;
    int64_t first = 0;
    int64_t bytes = 0;  // of the ending, with that space
};
Choice make_choice(const Tokenizer& tokenizer, const std::string& context, const std::string& ending);
// Every ending of every question, in order. Throws Error where a token is beyond the model's vocabulary.
std::vector<Choice> make_choices(const std::vector<Question>& questions, const Tokenizer& tokenizer,
                                 int64_t vocab_size);

// What choices are scored with.
struct ChoiceScorer {
    std::vector<int32_t> start;  // what the tokenizer puts in front of a text
    int32_t any_start = 0;  // where that is nothing, what a text that is scored from its first token on begins with
    int64_t B = 0, T = 0;   // a pass takes B·T tokens; of a text longer than T its end is scored
    // −log p of each target of a batch (0 for NO_TARGET), in nats.
    std::function<std::vector<float>(const Batch&)> losses;
};

// Nats of each choice's ending, packed into as few passes as they fit in.
std::vector<double> score_choices(const std::vector<Choice>& choices, const ChoiceScorer& scorer);

// The part of the questions whose right ending is the likeliest, as a whole and per byte of the ending.
struct ChoiceAccuracy {
    double accuracy = 0, by_byte = 0;
};
// choices and nats: of each ending of each question, in order.
ChoiceAccuracy choice_accuracy(const std::vector<Question>& questions, const std::vector<Choice>& choices,
                               const std::vector<double>& nats);
