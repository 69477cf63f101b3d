// Questions with several endings to choose from, a JSON object a line: {"ctx": text, "endings": [text, …], "label": i}.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
