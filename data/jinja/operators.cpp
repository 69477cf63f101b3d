#include "data/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "data/jinja/format.h"

namespace jinja {

namespace {

// Python's integers have no limit; those here have 64 bits.
void no_overflow(bool overflow) {
    require(!overflow, "a number is larger than 64 bits hold");
}

int64_t negated(int64_t x) {
    no_overflow(x == INT64_MIN);
    return -x;
}

int64_t whole_arithmetic(const std::string& op, int64_t a, int64_t b) {
    int64_t out = 1;
    if (op == "+") {
        no_overflow(__builtin_add_overflow(a, b, &out));
    } else if (op == "-") {
        no_overflow(__builtin_sub_overflow(a, b, &out));
    } else if (op == "*") {
        no_overflow(__builtin_mul_overflow(a, b, &out));
    } else if (op == "**") {
        if (-1 <= a && a <= 1) return b == 0 || a == 1 ? 1 : a == 0 ? 0 : b % 2 ? -1 : 1;
        for (int64_t i = 0; i < b; i++) no_overflow(__builtin_mul_overflow(out, a, &out));
    } else if (b == -1) {
        return op == "%" ? 0 : negated(a);
    } else {  // Python rounds down; the remainder has the divisor's sign
        const int64_t remainder = a % b;
        const bool other_sign = remainder != 0 && (remainder < 0) != (b < 0);
        return op == "%" ? remainder + (other_sign ? b : 0) : a / b - other_sign;
    }
    return out;
}

Value arithmetic(const std::string& op, const Value& left, const Value& right) {
    const double x = left.number(), y = right.number();
    const bool divides = op == "/" || op == "//" || op == "%" || (op == "**" && y < 0);
    require(!divides || (op == "**" ? x : y) != 0, "division by zero");
    if (op == "/") return x / y;
    if (left.is_integer() && right.is_integer() && !(op == "**" && y < 0))
        return whole_arithmetic(op, left.integer(), right.integer());
    if (op == "+") return x + y;
    if (op == "-") return x - y;
    if (op == "*") return x * y;
    if (op == "**") return std::pow(x, y);
    const double remainder = std::fmod(x, y);
    const bool other_sign = remainder != 0 && (remainder < 0) != (y < 0);  // Python's has the divisor's sign
    return op == "%" ? (other_sign ? remainder + y : remainder) : std::floor(x / y);
}

// Text, a list or a tuple, `times` times.
Value repeated(const Value& value, int64_t times, Meter& meter) {
    if (value.is_string()) {
        Writer out(meter);
        out.put_times(value.text(), times);
        return out.value();
    }
    Items out(&meter);
    for (int64_t i = 0; i < times && !value.items().empty(); i++)
        for (const Value& item : value.items()) out.add(item);
    return {std::move(out), value.is_list() ? Kind::List : Kind::Tuple};
}

}  // namespace

Value unary_operation(const std::string& op, const Value& value) {
    if (op == "not") return !value.truth();
    require_defined(value);
    require(value.is_number(), "'", op, "' takes a number, not a value of type ", value.type_name());
    if (value.is_float()) return op == "-" ? -value.number() : value.number();
    return op == "-" ? negated(value.integer()) : value.integer();
}

Value binary_operation(const std::string& op, const Value& left, const Value& right, Meter& meter) {
    require_defined(left);
    require_defined(right);
    const auto repeats = [](const Value& v) { return v.is_string() || v.is_list() || v.is_tuple(); };
    if (left.is_number() && right.is_number()) return arithmetic(op, left, right);
    if (op == "%" && left.is_string()) return format_percent(left.text(), right, meter);
    if (op == "+" && left.is_string() && right.is_string()) {
        Writer out(meter);
        out.put(left.text());
        out.put(right.text());
        return out.value();
    }
    if (op == "+" && ((left.is_list() && right.is_list()) || (left.is_tuple() && right.is_tuple()))) {
        Items items(&meter);
        for (const Value& item : left.items()) items.add(item);
        for (const Value& item : right.items()) items.add(item);
        return {std::move(items), left.is_list() ? Kind::List : Kind::Tuple};
    }
    if (op == "*" && repeats(left) && right.is_integer()) return repeated(left, right.integer(), meter);
    if (op == "*" && repeats(right) && left.is_integer()) return repeated(right, left.integer(), meter);
    throw Error(
        str("'", op, "' of values of types ", left.type_name(), " and ", right.type_name(), " is not supported"));
}

bool comparison(const Value& left, const std::string& op, const Value& right, Meter& meter) {
    if (op == "==") return Value::equal(left, right, meter);
    if (op == "!=") return !Value::equal(left, right, meter);
    if (op == "in") return Value::contains(right, left, meter);
    if (op == "not in") return !Value::contains(right, left, meter);
    if (op == "<") return Value::less(left, right, meter);
    if (op == ">") return Value::less(right, left, meter);
    const bool strictly = op == "<=" ? Value::less(left, right, meter) : Value::less(right, left, meter);
    return strictly || Value::equal(left, right, meter);
}

}  // namespace jinja
