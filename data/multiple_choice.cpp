#include "data/multiple_choice.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "data/json_lines.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

std::vector<Question> read_questions(const std::string& path) {
    std::vector<Question> questions;
    for_each_line(path, [&](const std::string& line, int64_t number) {
        std::string fault;
        const json q = parse_json(line, fault);
        const bool one = q.is_object() && q.value("endings", json()).is_array() && q["endings"].size() == 1;
        const bool shaped = q.is_object() && q.value("ctx", json()).is_string() &&
                            q.value("endings", json()).is_array() &&
                            (q.value("label", json()).is_number_integer() || (one && !q.contains("label")));
        require(shaped, path, ": line ", number,
                ": expected {\"ctx\": text, \"endings\": [text, ...], \"label\": number}");
        Question question;
        question.context = q["ctx"];
        for (const json& e : q["endings"]) {
            require(e.is_string() && !e.get<std::string>().empty(), path, ": line ", number,
                    ": an ending is not a string, or is empty");
            question.endings.push_back(e);
        }
        const int64_t label = q.value("label", int64_t(0));
        require(!question.endings.empty(), path, ": line ", number, ": there is no ending");
        require(questions.empty() || one == ask_for_last_words(questions), path, ": line ", number, ": ",
                question.endings.size(), " endings, in the first line ",
                questions.empty() ? 0 : questions[0].endings.size(),
                "; put questions and texts with a last word into files of their own");
        require(label >= 0 && label < int64_t(question.endings.size()), path, ": line ", number, ": label ", label,
                " is not the index of one of the ", question.endings.size(), " endings");
        question.label = size_t(label);
        questions.push_back(std::move(question));
    });
    require(!questions.empty(), path, ": the file has no questions; write one JSON object per line");
    return questions;
}

bool ask_for_last_words(const std::vector<Question>& questions) {
    return !questions.empty() && questions[0].endings.size() == 1;
}

Choice make_choice(const Tokenizer& tokenizer, const std::string& context, const std::string& ending) {
    Choice c;
    c.tokens = tokenizer.encode(context + " " + ending);
    const std::string stripped = context.substr(0, context.find_last_not_of(" \t\r\n\v\f") + 1);
    c.first = std::min(int64_t(tokenizer.encode(stripped).size()), int64_t(c.tokens.size()) - 1);
    c.characters = std::count_if(ending.begin(), ending.end(), [](char byte) { return (byte & 0xC0) != 0x80; });
    return c;
}

std::vector<Choice> make_choices(const std::vector<Question>& questions, const Tokenizer& tokenizer,
                                 int64_t vocab_size) {
    std::vector<Choice> choices;
    for (const Question& q : questions) {
        for (const std::string& ending : q.endings) {
            choices.push_back(make_choice(tokenizer, q.context, ending));
            require(!choices.back().tokens.empty(), "question ", &q - questions.data() + 1,
                    " has no token: the tokenizer's vocabulary lacks all of its bytes");
            for (const int32_t id : choices.back().tokens)
                require(id < vocab_size, "question ", &q - questions.data() + 1, ": token ", id,
                        " is beyond the model's vocabulary of ", vocab_size, "; use the model's own tokenizer.json");
        }
    }
    return choices;
}

std::string cut_choices_note(const std::vector<Choice>& choices, size_t start, int64_t T) {
    const auto cut = std::count_if(choices.begin(), choices.end(), [&](const Choice& c) {
        const size_t before = start == 0 && c.first == 0 ? 1 : start;
        return int64_t(before + c.tokens.size()) - 1 > T;
    });
    return cut ? str(cut, " of ", choices.size(), " endings with their contexts are longer than --seq-len ", T,
                     " and lose their beginning; raise --seq-len")
               : "";
}

std::vector<EndingScore> score_choices(const std::vector<Choice>& choices, const ChoiceScorer& scorer) {
    std::vector<EndingScore> scores(choices.size());
    for (size_t begin = 0, end; begin < choices.size(); begin = end) {
        Batch batch;
        batch.cum_seqlens = {0};
        std::vector<size_t> owner;  // of each token
        for (end = begin; end < choices.size(); end++) {
            const Choice& c = choices[end];
            std::vector<int32_t> tokens = scorer.start;
            if (tokens.empty() && c.first == 0) tokens = {scorer.any_start};
            tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
            const int64_t ending = int64_t(c.tokens.size()) - c.first;
            const int64_t n = std::min(int64_t(tokens.size()) - 1, scorer.T);
            if (batch.cum_seqlens.back() + n > scorer.B * scorer.T) break;
            const size_t from = tokens.size() - size_t(n) - 1;
            for (int64_t i = 0; i < n; i++) {
                batch.tokens.push_back(tokens[from + size_t(i)]);
                batch.targets.push_back(i >= n - ending ? tokens[from + size_t(i) + 1] : Batch::NO_TARGET);
                batch.positions.push_back(static_cast<int32_t>(i));
                owner.push_back(end);
            }
            batch.cum_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
            batch.max_seqlen = std::max(batch.max_seqlen, n);
        }
        const ChoiceScorer::TokenScores of_tokens = scorer.scores(batch);
        for (size_t i = 0; i < owner.size(); i++) {
            scores[owner[i]].nats += double(of_tokens.losses[i]);
            if (!of_tokens.missed.empty()) scores[owner[i]].missed += of_tokens.missed[i];
        }
    }
    return scores;
}

QuestionResults question_results(const std::vector<Question>& questions, const std::vector<Choice>& choices,
                                 const std::vector<EndingScore>& scores) {
    const double count = double(questions.size());
    double right = 0, right_by_character = 0, nats = 0;
    for (const EndingScore& s : scores) nats += s.nats;
    if (!std::isfinite(nats)) right = right_by_character = NAN;
    if (ask_for_last_words(questions)) {
        for (const EndingScore& s : scores) right += s.missed == 0;
        return {{"accuracy", right / count}, {"perplexity", std::exp(nats / count)}};
    }
    size_t at = 0;
    for (const Question& q : questions) {
        size_t best = 0, best_by_character = 0;
        const auto by_character = [&](size_t e) { return scores[at + e].nats / double(choices[at + e].characters); };
        for (size_t e = 1; e < q.endings.size(); e++) {
            if (scores[at + e].nats < scores[at + best].nats) best = e;
            if (by_character(e) < by_character(best_by_character)) best_by_character = e;
        }
        right += best == q.label;
        right_by_character += best_by_character == q.label;
        at += q.endings.size();
    }
    return {{"accuracy", right / count}, {"accuracy_norm", right_by_character / count}};
}
