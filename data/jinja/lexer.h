// Splits a template into text, and the tokens of its tags, with jinja2's rules for white space around tags
// (trim_blocks and lstrip_blocks on, as transformers sets them): a block tag takes the line break after it and the
// spaces before it on its line; {%- and -%} take all white space, {%+ and +%} none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/error.h"

namespace jinja {

struct Token {
    enum class Type : uint8_t {
        Text,  // outside tags
        BlockBegin,
        BlockEnd,  // {% %}
        OutputBegin,
        OutputEnd,  // {{ }}
        Name,
        String,
        Integer,
        Float,
        Operator,
        Unsupported,  // text: what it is
        End,
    };
    Type type;
    std::string text;  // of a String: its value
    int line;          // from 1
};

// The last token is End. `name` stands for the template in errors, "name:line: …".
std::vector<Token> tokenize(const std::string& source, const std::string& name);

// Throws Error "name:line: message", as one line.
[[noreturn]] void fail_at(const std::string& name, int line, const std::string& message);
std::string one_line(std::string message);

}  // namespace jinja
