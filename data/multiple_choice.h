// Multiple-choice questions, one JSON object per line: {"ctx": text, "endings": [text, …], "label": i}. Passages
// whose last word is asked for (LAMBADA: Paperno et al. 2016) have one ending and need no label.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "data/tokenizer.h"

struct Question {
    std::string context;
    std::vector<std::string> endings;
    size_t label = 0;  // index of the correct ending
};

// Skips empty lines. Throws Error with the line number for a line that is not such an object, has no ending or an empty
// one, has a label that is not the index of an ending, or has one ending where the first line has several, or the
// reverse.
std::vector<Question> read_questions(const std::string& path);
bool ask_for_last_words(const std::vector<Question>& questions);

// One ending to score: the tokens of "context ending". The tokens from `first` on belong to the ending. As in
// EleutherAI's lm-evaluation-harness the space between them is there even if either has one, the whole text is
// tokenized at once, and the ending starts where the tokens of the context without white space at its end would end.
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
    // Of each target of a batch: −log p in nats (0 for NO_TARGET), and whether another token is more likely (empty: not
    // asked for).
    struct TokenScores {
        std::vector<float> losses;
        std::vector<bool> missed;
    };
    std::function<TokenScores(const Batch&)> scores;
};

// Of an ending: −log p in nats, and the number of its tokens than which another is more likely.
struct EndingScore {
    double nats = 0, missed = 0;
};
// A note for the user on the choices that are cut; "" if there are none. start: how many tokens the tokenizer prepends.
std::string cut_choices_note(const std::vector<Choice>& choices, size_t start, int64_t T);
// Packs the choices into as few passes as possible.
std::vector<EndingScore> score_choices(const std::vector<Choice>& choices, const ChoiceScorer& scorer);

// By name, all NaN if a loss is not finite:
// - accuracy, accuracy_norm: the fraction of questions whose correct ending is the most likely one, in total and per
//   character of the ending: acc and acc_norm of lm-evaluation-harness.
// - accuracy, perplexity, where questions ask for last words: the fraction of endings of which every token is the most
//   likely one, and exp(mean nats of an ending): acc and perplexity of its lambada_openai.
using QuestionResults = std::vector<std::pair<std::string, double>>;
// choices and scores: of each ending of each question, in order.
QuestionResults question_results(const std::vector<Question>& questions, const std::vector<Choice>& choices,
                                 const std::vector<EndingScore>& scores);
