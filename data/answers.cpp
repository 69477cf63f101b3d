#include "data/answers.h"

#include <algorithm>
#include <cmath>

#include "data/json_lines.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

std::vector<Message> read_messages(const json& list) {
    const char* const expected = ", expected a list of {\"role\": text, \"content\": text}";
    require(list.is_array() && !list.empty(), "key 'messages' is ", shown(list), expected);
    std::vector<Message> messages;
    for (const json& message : list) {
        const bool shaped = message.is_object() && message.size() == 2 && message.value("role", json()).is_string() &&
                            message.value("content", json()).is_string();
        require(shaped, "a message is ", shown(message), expected);
        messages.push_back({message["role"], message["content"]});
    }
    require(messages.back().role != "assistant", "the last message is the assistant's; end with what it responds to");
    return messages;
}

WeightedVerifier read_verifier(json options, const std::string& answer, bool has_command) {
    WeightedVerifier out;
    if (options.contains("weight")) {
        const json weight = options["weight"];
        require(weight.is_number() && weight.get<double>() >= 0 && std::isfinite(weight.get<double>()),
                "key 'weight' is ", shown(weight), ", expected a number of at least 0");
        out.weight = weight;
        options.erase("weight");
    }
    if (options == json{{"name", COMMAND_VERIFIER}}) {
        require(has_command, "the verifier 'command' is the one that --verifier names; give that option");
        out.name = COMMAND_VERIFIER;
        return out;
    }
    out.score = make_verifier(options, answer);
    out.name = options["name"];
    return out;
}

std::vector<WeightedVerifier> read_verifiers(const json& value, const std::string& answer, bool has_command) {
    if (value.is_null() && has_command) return {{COMMAND_VERIFIER, 1, nullptr}};
    if (value.is_string()) return {read_verifier({{"name", value}}, answer, has_command)};
    require(value.is_array() && !value.empty(), "key 'verifier' is ", value.is_null() ? "missing" : shown(value),
            ", expected a name or a list of {\"name\": text, \"weight\": number}; the names are ", verifier_names());
    std::vector<WeightedVerifier> out;
    for (const json& options : value) {
        require(options.is_object(), "a verifier is ", shown(options), ", expected {\"name\": text}");
        out.push_back(read_verifier(options, answer, has_command));
    }
    return out;
}

Problem read_problem(const std::string& line, bool has_command) {
    const std::string fault = json_fault(line, 100, true);
    require(fault.empty(), fault);
    const json row = json::parse(line);
    require(row.is_object(), shown(row), " is not an object");
    for (const auto& [key, value] : row.items())
        require(key == "prompt" || key == "messages" || key == "answer" || key == "verifier", "key ", shown(json(key)),
                " is unknown; the keys are prompt, messages, answer and verifier");
    require(row.contains("prompt") != row.contains("messages"), "expected the key 'prompt' or the key 'messages'");
    Problem out;
    if (row.contains("prompt")) {
        require(row["prompt"].is_string(), "key 'prompt' is ", shown(row["prompt"]), ", expected text");
        out.prompt = row["prompt"];
    } else {
        out.messages = read_messages(row["messages"]);
        out.prompt = out.messages.back().content;
    }
    const json answer = row.value("answer", json());
    require(answer.is_string() || answer.is_number(), "key 'answer' is ", answer.is_null() ? "missing" : shown(answer),
            ", expected text or a number");
    out.answer = answer.is_string() ? answer.get<std::string>() : answer.dump();
    out.verifiers = read_verifiers(row.value("verifier", json()), out.answer, has_command);
    return out;
}

}  // namespace

double Problem::reward(const std::vector<double>& scores) const {
    double sum = 0;
    for (size_t i = 0; i < verifiers.size(); i++) sum += verifiers[i].weight * scores[i];
    return sum;
}

std::vector<Problem> read_problems(const std::string& path, bool has_command) {
    std::vector<Problem> problems;
    bool uses_command = false;
    for_each_line(path, [&](const std::string& line, int64_t number) {
        try {
            problems.push_back(read_problem(line, has_command));
        } catch (const Error& e) {
            throw Error(str(path, ": line ", number, ": ", e.what()));
        }
        for (const WeightedVerifier& v : problems.back().verifiers) uses_command |= !v.score;
    });
    require(!problems.empty(), path, ": the file has no prompts; write one JSON object per line");
    require(uses_command || !has_command, path,
            ": every line names its verifiers, and none is 'command', so --verifier ",
            "has no effect; add {\"name\": \"command\"} or leave out the option");
    return problems;
}

double pass_at_k(int64_t n, int64_t c, int64_t k) {
    if (n - c < k) return 1;
    double none = 1;
    for (int64_t i = n - c + 1; i <= n; i++) none *= 1 - double(k) / double(i);
    return 1 - none;
}
