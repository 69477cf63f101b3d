// A template as a tree.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/value.h"

namespace jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct Expression {
    enum class Type : uint8_t {
        Constant,  // value
        Variable,  // name
        List,
        Tuple,    // operands
        Dict,     // operands: key, value, key, value, …
        Unary,    // name: "-", "+", "not"
        Binary,   // name: "+", "-", "*", "/", "//", "%", "**", "and", "or"
        Concat,   // operands joined by ~
        Compare,  // operands[0] names[0] operands[1] names[1] operands[2] …; names: "==", "<", "in", "not in", …
        Conditional,  // operands[0] if operands[1] else operands[2], which may be missing
        Attribute,    // operands[0].name
        Item,         // operands[0][operands[1]]
        Slice,        // operands[0][operands[1]:operands[2]:operands[3]]; missing ones are null
        Call,         // name(operands): a function or a macro
        Method,       // operands[0].name(operands[1] …)
        Filter,       // operands[0] | name(operands[1] …)
        Test,         // operands[0] is name(operands[1] …)
        CallValue,    // operands[0](operands[1] …)
        Spread,       // name: "*" or "**", an argument of a call
        Unsupported,  // name: what it is; an error where it is evaluated
    };
    Type type;
    int line;
    std::string name;
    Value value;
    std::vector<std::string> names;
    std::vector<ExpressionPtr> operands;
    std::vector<std::pair<std::string, ExpressionPtr>> keywords;  // of Call, Method, Filter
    int depth = 1;                                                // expressions inside each other
};

struct Statement;
using Block = std::vector<std::unique_ptr<const Statement>>;

struct Statement {
    enum class Type : uint8_t {
        Text,      // text
        Output,    // {{ expression }}
        If,        // conditions[i] ▶ blocks[i]; one more block: else
        For,       // for names in expression if conditions[0] ▶ blocks[0]; blocks[1]: else
        Set,       // set names = expression; attribute: set names[0].attribute = expression
        SetBlock,  // set names[0] ▶ blocks[0]; expression: its filters, applied to the variable ""
        With,      // with names[i] = conditions[i] ▶ blocks[0]
        Filter,    // filter ▶ blocks[0]; expression: its filters, applied to the variable ""
        Macro,     // macro names[0](names[1] …) ▶ blocks[0]; conditions: the arguments' defaults, null without one
        Generation,  // generation ▶ blocks[0]
        Break,
        Continue,
        Unsupported,
    };
    Type type;
    int line;
    std::string unsupported;  // what it is, if it is an error where it is executed
    Value text;
    std::vector<std::string> names;
    std::string attribute;
    ExpressionPtr expression;
    std::vector<ExpressionPtr> conditions;
    std::vector<Block> blocks;
};

}  // namespace jinja
