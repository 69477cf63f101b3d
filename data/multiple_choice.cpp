#include "data/multiple_choice.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/files.h"

using nlohmann::json;

std::vector<Question> read_questions(const std::string& path) {
    const std::string text = read_file(path);
    std::vector<Question> questions;
    int64_t number = 0;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        begin = end + 1;
        number++;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        const json q = json::parse(line, nullptr, false);
        const bool shaped = q.is_object() && q.value("ctx", json()).is_string() &&
                            q.value("endings", json()).is_array() && q.value("label", json()).is_number_integer();
        require(shaped, path, ": line ", number,
                ": expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}");
        Question question;
        question.context = q["ctx"];
        for (const json& e : q["endings"]) {
            require(e.is_string() && !e.get<std::string>().empty(), path, ": line ", number,
                    ": an ending is no text or empty");
            question.endings.push_back(e);
        }
        const int64_t label = q["label"];
        require(question.endings.size() >= 2, path, ": line ", number, ": ", question.endings.size(),
                " endings; there must be two or more");
        require(label >= 0 && label < int64_t(question.endings.size()), path, ": line ", number, ": label ", label,
                " names none of ", question.endings.size(), " endings");
        question.label = size_t(label);
        questions.push_back(std::move(question));
    }
    require(!questions.empty(), path, ": there is no question in it");
    return questions;
}

Choice make_choice(const Tokenizer& tokenizer, const std::string& context, const std::string& ending) {
    const bool spaced = context.empty() || context.back() == ' ' || ending[0] == ' ';
    const std::string rest = (spaced ? "" : " ") + ending;
    Choice c;
    c.tokens = tokenizer.encode(context + rest);
    c.first = std::min(int64_t(tokenizer.encode(context).size()), int64_t(c.tokens.size()) - 1);
    c.bytes = int64_t(rest.size());
    return c;
}
