// Multiple-choice questions, one JSON object per line: {"ctx": text, "endings": [text, …], "label": i}.
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
    size_t label = 0;  // index of the correct ending
};

// Skips empty lines. Throws Error with the line number for a line that is not such an object, has fewer than two
// endings or an empty one, or has a label that is not the index of an ending.
std::vector<Question> read_questions(const std::string& path);

// One ending to score: the tokens of "context ending", with a space between them unless there is one. The tokens from
// `first` on belong to the ending. As in EleutherAI's lm-evaluation-harness the whole text is tokenized at once, and
// the ending starts where the tokens of the context without white space at its end would end.
struct Choice {
    std::vector<int32_t> tokens;
    int64_t first = 0;
    int64_t characters = 0;  // of the ending, without that space
};
Choice make_choice(const Tokenizer& tokenizer, const std::string& context, const std::string& ending);
// Every ending of every question, in order. Throws Error where a token is beyond the model's vocabulary.
std::vector<Choice> make_choices(const std::vector<Question>& questions, const Tokenizer& tokenizer,
                                 int64_t vocab_size);

// The model that scores choices.
struct ChoiceScorer {
    std::vector<int32_t> start;  // tokens that the tokenizer prepends to a text
    int32_t any_start = 0;       // if there are none: the input before a choice whose first token is scored
    int64_t B = 0, T = 0;        // a pass takes B·T tokens; a choice longer than T is cut at its start
    // −log p of each target of a batch (0 for NO_TARGET), in nats.
    std::function<std::vector<float>(const Batch&)> losses;
};

// Nats of each choice's ending. Packs the choices into as few passes as possible.
std::vector<double> score_choices(const std::vector<Choice>& choices, const ChoiceScorer& scorer);

// The fraction of questions whose correct ending is the most likely one, in total and per character of the ending: acc
// and acc_norm of lm-evaluation-harness. NaN if a loss is not finite.
struct ChoiceAccuracy {
    double accuracy = 0, by_character = 0;
};
// choices and nats: of each ending of each question, in order.
ChoiceAccuracy choice_accuracy(const std::vector<Question>& questions, const std::vector<Choice>& choices,
                               const std::vector<double>& nats);
