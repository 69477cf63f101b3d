// Python's operators between values.
#pragma once

#include <string>

#include "data/jinja/value.h"

namespace jinja {

// "-", "+", "not". Throws Error for types that have no such operator, as the others do.
Value unary_operation(const std::string& op, const Value& value);
// "+", "-", "*", "/", "//", "%", "**": of numbers, text, lists and tuples; "%" of text formats it.
Value binary_operation(const std::string& op, const Value& left, const Value& right, Meter& meter);
// "==", "!=", "<", "<=", ">", ">=", "in", "not in".
bool comparison(const Value& left, const std::string& op, const Value& right, Meter& meter);

}  // namespace jinja
