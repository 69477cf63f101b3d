#include "data/jinja/render.h"

#include <algorithm>
#include <cmath>
#include <deque>

#include "data/jinja/lexer.h"
#include "data/jinja/parser.h"

namespace jinja {

namespace {

using Type = Expression::Type;

// The variables of the template, of a round of a loop, of a macro's call or of a block.
struct Scope {
    const Scope* parent = nullptr;
    std::vector<std::pair<std::string, Value>> variables = {};

    const Value* find(const std::string& name) const {
        for (const Scope* scope = this; scope; scope = scope->parent)
            for (const auto& [known, value] : scope->variables)
                if (known == name) return &value;
        return nullptr;
    }
    void set(const std::string& name, Value value) {
        for (auto& [known, old] : variables) {
            if (known != name) continue;
            old = std::move(value);
            return;
        }
        variables.emplace_back(name, std::move(value));
    }
};

int64_t input_bytes(const Value& value) {
    int64_t bytes = 8;
    if (value.is_string()) bytes += int64_t(value.text().size());
    if (value.is_sequence())
        for (const Value& item : value.sequence().items) bytes += input_bytes(item);
    if (value.is_dict())
        for (const auto& [key, item] : value.dict().items) bytes += int64_t(key.size()) + input_bytes(item);
    return bytes;
}

int64_t input_bytes(const Template::Variables& variables) {
    int64_t bytes = 0;
    for (const auto& variable : variables) bytes += input_bytes(variable.second);
    return bytes;
}

class Renderer {
  public:
    Renderer(const Template::Variables& variables, const std::tm& n) : meter(input_bytes(variables)), now(n) {
        root.variables = variables;
    }

    Text run(const Block& block) {
        Text out;
        execute(block, root, out);
        return out;
    }

    int line = 0;  // of what is rendered

  private:
    enum class Flow : uint8_t { Next, Break, Continue };

    // Counts what is evaluated inside each other: the stack is limited.
    struct Nesting {
        explicit Nesting(int& d) : depth(d) {
            require(++depth <= MAX_NESTING, "the template's macros call each other more than ", MAX_NESTING,
                    " expressions deep");
        }
        ~Nesting() { depth--; }
        int& depth;
    };

    // ---- statements -------------------------------------------------------------------------------------------------

    Flow execute(const Block& block, Scope& scope, Text& out) {
        const Nesting nesting(depth);
        for (const auto& statement : block) {
            const Flow flow = execute(*statement, scope, out);
            if (flow != Flow::Next) return flow;
        }
        return Flow::Next;
    }

    Flow execute(const Statement& s, Scope& scope, Text& out) {
        meter.work();
        line = s.line;
        switch (s.type) {
            case Statement::Type::Text:
                write(s.text.text(), out);
                break;
            case Statement::Type::Output:
                write(evaluate(*s.expression, scope).str(meter), out);
                break;
            case Statement::Type::If:
                for (size_t i = 0; i < s.blocks.size(); i++)
                    if (i == s.conditions.size() || evaluate(*s.conditions[i], scope).truth())
                        return execute(s.blocks[i], scope, out);
                break;
            case Statement::Type::For:
                return loop(s, scope, out);
            case Statement::Type::Set:
                assign(s, evaluate(*s.expression, scope), scope);
                break;
            case Statement::Type::SetBlock: {
                Scope inner{&scope};
                inner.set("", body(s.blocks[0], scope));
                scope.set(s.names[0], evaluate(*s.expression, inner));
                break;
            }
            case Statement::Type::Macro:
                scope.set(s.names[0], &s);
                break;
            case Statement::Type::Generation: {
                Text text = body(s.blocks[0], scope);
                for (char& mark : text.marks) mark = char(mark | GENERATION);
                write(text, out);
                break;
            }
            case Statement::Type::Break:
                return Flow::Break;
            case Statement::Type::Continue:
                return Flow::Continue;
        }
        return Flow::Next;
    }

    void write(const Text& text, Text& out) {
        meter.make(2 * text.size());
        out += text;
    }

    Text body(const Block& block, const Scope& around) {
        Scope scope{&around};
        Text out;
        execute(block, scope, out);
        return out;
    }

    void assign(const Statement& s, Value value, Scope& scope) {
        if (s.attribute.empty()) return unpack(s.names, std::move(value), scope);
        const Value* const object = scope.find(s.names[0]);
        require(object && object->is_namespace(), "'", s.names[0], "' is not a namespace, so its attribute '",
                s.attribute, "' cannot be set");
        meter.make(sizeof(Value) + s.attribute.size());
        object->name_space().set(Text(s.attribute), std::move(value));
    }

    void unpack(const std::vector<std::string>& names, Value value, Scope& scope) {
        if (names.size() == 1) return scope.set(names[0], std::move(value));
        const std::vector<Value> parts = value.iterate(meter);
        require(parts.size() == names.size(), parts.size(), " values cannot be unpacked into ", names.size(),
                " variables");
        for (size_t i = 0; i < names.size(); i++) scope.set(names[i], parts[i]);
    }

    // Flow::Break and Flow::Continue come from the else block and are for the loop around this one.
    Flow loop(const Statement& s, Scope& scope, Text& out) {
        auto state = std::make_shared<Loop>();
        state->items = evaluate(*s.expression, scope).iterate(meter);
        if (!s.conditions.empty()) {
            const auto refused = [&](const Value& item) {
                Scope inner{&scope};
                unpack(s.names, item, inner);
                return !evaluate(*s.conditions[0], inner).truth();
            };
            state->items.erase(std::remove_if(state->items.begin(), state->items.end(), refused), state->items.end());
        }
        if (state->items.empty()) {
            Scope inner{&scope};
            return execute(s.blocks[1], inner, out);
        }
        for (size_t i = 0; i < state->items.size(); i++) {
            state->index = i;
            Scope inner{&scope};
            inner.set("loop", std::shared_ptr<const Loop>(state));
            unpack(s.names, state->items[i], inner);
            if (execute(s.blocks[0], inner, out) == Flow::Break) break;
        }
        return Flow::Next;
    }

    // ---- expressions ------------------------------------------------------------------------------------------------

    Value evaluate(const Expression& e, const Scope& scope) {
        const Nesting nesting(depth);
        meter.work();
        line = e.line;
        const auto operand = [&](size_t i) { return evaluate(*e.operands[i], scope); };
        switch (e.type) {
            case Type::Constant:
                return e.value;
            case Type::Variable:
                return variable(e.name, scope);
            case Type::List:
            case Type::Tuple:
                return list(e, scope);
            case Type::Dict:
                return dict(e, scope);
            case Type::Unary:
                return unary(e.name, operand(0));
            case Type::Binary:
                return binary(e, scope);
            case Type::Concat:
                return concatenate(e, scope);
            case Type::Compare:
                return compare(e, scope);
            case Type::Conditional:
                if (operand(1).truth()) return operand(0);
                if (e.operands[2]) return operand(2);
                return Undefined{"the inline if-expression evaluated to false and no else section was defined"};
            case Type::Attribute:
                return attribute(operand(0), e.name);
            case Type::Item:
                return item(operand(0), operand(1), meter);
            case Type::Slice:
                return slice(e, scope);
            case Type::Call:
                return call(e, scope);
            case Type::Method:
                return call_method(e.name, operand(0), arguments(e, 1, scope), meter);
            case Type::Filter:
                return call_filter(e.name, operand(0), arguments(e, 1, scope), meter);
            case Type::Test:
                return call_test(e.name, operand(0), arguments(e, 1, scope), meter);
        }
        return {};
    }

    static Value variable(const std::string& name, const Scope& scope) {
        if (const Value* const found = scope.find(name)) return *found;
        if (is_function(name)) return Method{name};
        return Undefined{"'" + name + "' is undefined"};
    }

    Value list(const Expression& e, const Scope& scope) {
        std::vector<Value> items;
        meter.make(e.operands.size() * sizeof(Value));
        for (const auto& operand : e.operands) items.push_back(evaluate(*operand, scope));
        return {std::move(items), e.type == Type::List ? Sequence::Kind::List : Sequence::Kind::Tuple};
    }

    Value dict(const Expression& e, const Scope& scope) {
        Dict out;
        for (size_t i = 0; i < e.operands.size(); i += 2) {
            const Value key = evaluate(*e.operands[i], scope);
            require(key.is_string(), "a dictionary's key of type ", key.type_name(),
                    " is not supported; write a string");
            meter.make(sizeof(Value) + sizeof(Text) + 2 * key.text().size());
            out.set(key.text(), evaluate(*e.operands[i + 1], scope));
        }
        return out;
    }

    // Python's integers have no limit; those here have 64 bits.
    static void no_overflow(bool overflow) { require(!overflow, "a number is larger than 64 bits hold"); }
    static int64_t negated(int64_t x) {
        no_overflow(x == INT64_MIN);
        return -x;
    }

    static Value unary(const std::string& op, const Value& value) {
        if (op == "not") return !value.truth();
        require_defined(value);
        require(value.is_number(), "'", op, "' takes a number, not a value of type ", value.type_name());
        if (value.is_float()) return op == "-" ? -value.number() : value.number();
        return op == "-" ? negated(value.integer()) : value.integer();
    }

    Value binary(const Expression& e, const Scope& scope) {
        Value left = evaluate(*e.operands[0], scope);
        if (e.name == "and") return left.truth() ? evaluate(*e.operands[1], scope) : left;
        if (e.name == "or") return left.truth() ? left : evaluate(*e.operands[1], scope);
        const Value right = evaluate(*e.operands[1], scope);
        require_defined(left);
        require_defined(right);
        if (left.is_number() && right.is_number()) return arithmetic(e.name, left, right);
        if (e.name == "+" && left.is_string() && right.is_string()) {
            Text out;
            write(left.text(), out);
            write(right.text(), out);
            return out;
        }
        if (e.name == "+" && left.is_sequence() && right.is_sequence(left.sequence().kind) &&
            left.sequence().kind <= Sequence::Kind::Tuple) {
            std::vector<Value> items = left.iterate(meter);
            for (Value& item : right.iterate(meter)) items.push_back(std::move(item));
            return {std::move(items), left.sequence().kind};
        }
        if (e.name == "*" && (left.is_string() || right.is_string()) && (left.is_integer() || right.is_integer()))
            return repeat(left.is_string() ? left.text() : right.text(), (left.is_string() ? right : left).integer());
        throw Error(str("'", e.name, "' of values of types ", left.type_name(), " and ", right.type_name(),
                        " is not supported"));
    }

    Value repeat(const Text& text, int64_t count) {
        if (text.empty() || count <= 0) return Text();
        meter.make(count > INT32_MAX ? size_t(INT64_MAX) / 2 : 2 * text.size() * size_t(count));
        Text out;
        for (int64_t i = 0; i < count; i++) out += text;
        return out;
    }

    static Value arithmetic(const std::string& op, const Value& left, const Value& right) {
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

    static int64_t whole_arithmetic(const std::string& op, int64_t a, int64_t b) {
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

    Value concatenate(const Expression& e, const Scope& scope) {
        Text out;
        for (const auto& operand : e.operands) write(evaluate(*operand, scope).str(meter), out);
        return out;
    }

    // A chain a < b < c holds if a < b and b < c.
    Value compare(const Expression& e, const Scope& scope) {
        Value left = evaluate(*e.operands[0], scope);
        for (size_t i = 0; i < e.names.size(); i++) {
            const Value right = evaluate(*e.operands[i + 1], scope);
            if (!holds(left, e.names[i], right)) return false;
            left = right;
        }
        return true;
    }

    bool holds(const Value& left, const std::string& op, const Value& right) {
        if (op == "==") return Value::equal(left, right, meter);
        if (op == "!=") return !Value::equal(left, right, meter);
        if (op == "in") return Value::contains(right, left, meter);
        if (op == "not in") return !Value::contains(right, left, meter);
        if (op == "<") return Value::less(left, right, meter);
        if (op == ">") return Value::less(right, left, meter);
        const bool strictly = op == "<=" ? Value::less(left, right, meter) : Value::less(right, left, meter);
        return strictly || Value::equal(left, right, meter);
    }

    Value slice(const Expression& e, const Scope& scope) {
        const Value object = evaluate(*e.operands[0], scope);
        int64_t bounds[3] = {0, 0, 1};
        bool given[3] = {};
        for (size_t i = 0; i < 3; i++) {
            if (!e.operands[i + 1]) continue;
            const Value bound = evaluate(*e.operands[i + 1], scope);
            if (bound.is_none()) continue;
            require(bound.is_integer(), "a slice's bound is of type ", bound.type_name(), ", not int");
            bounds[i] = bound.integer();
            given[i] = true;
        }
        require_defined(object);
        const bool is_list = object.is_sequence() && object.sequence().kind <= Sequence::Kind::Tuple;
        if (!object.is_string() && !is_list) return Undefined{str(object.type_name(), " object has no slices")};
        require(bounds[2] != 0, "a slice's step is 0");
        const std::vector<size_t> ends =
            object.is_string() ? character_bounds(object.text().chars) : std::vector<size_t>();
        const auto n = is_list ? int64_t(object.sequence().items.size()) : int64_t(ends.size()) - 1;
        const int64_t step = std::clamp(bounds[2], -n - 1, n + 1);
        // Python's slice.indices(n).
        const auto clipped = [&](int i, int64_t otherwise) {
            if (!given[i]) return otherwise;
            const int64_t at = bounds[i] < 0 ? std::max(bounds[i], -n - 1) + n : bounds[i];
            return std::clamp(at, step < 0 ? int64_t(-1) : 0, step < 0 ? n - 1 : n);
        };
        const int64_t begin = clipped(0, step < 0 ? n - 1 : 0), end = clipped(1, step < 0 ? -1 : n);
        Text text;
        std::vector<Value> items;
        meter.make(is_list ? size_t(n) * sizeof(Value) : 10 * object.text().size());
        for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
            if (is_list)
                items.push_back(object.sequence().items[size_t(i)]);
            else
                text += object.text().part(ends[size_t(i)], ends[size_t(i) + 1]);
        }
        return is_list ? Value(std::move(items), object.sequence().kind) : Value(std::move(text));
    }

    Arguments arguments(const Expression& e, size_t first, const Scope& scope) {
        Arguments out;
        for (size_t i = first; i < e.operands.size(); i++) out.values.push_back(evaluate(*e.operands[i], scope));
        for (const auto& [key, value] : e.keywords) out.keywords.emplace_back(key, evaluate(*value, scope));
        return out;
    }

    Value call(const Expression& e, const Scope& scope) {
        const Value* const found = scope.find(e.name);
        if (found && found->is_macro()) return call_macro(*found->macro(), arguments(e, 0, scope));
        require(!found && is_function(e.name), "'", e.name, "' is ",
                found ? "a value, not a macro" : "not a macro yet");
        if (e.name != "namespace") return call_function(e.name, arguments(e, 0, scope), now, meter);
        const Arguments given = arguments(e, 0, scope);
        Dict attributes;
        if (!given.values.empty()) attributes = call_function("dict", {given.values, {}}, now, meter).dict();
        for (const auto& [key, value] : given.keywords) attributes.set(Text(key), value);
        meter.make(sizeof(Dict) + given.keywords.size() * (sizeof(Value) + sizeof(Text)));
        namespaces.push_back(std::move(attributes));
        return &namespaces.back();
    }

    Value call_macro(const Statement& macro, const Arguments& given) {
        const size_t count = macro.names.size() - 1;
        require(given.values.size() <= count, "macro '", macro.names[0], "' takes ", count, " arguments, not ",
                given.values.size());
        Scope scope{&root};
        std::vector<bool> is_given(count);
        for (size_t i = 0; i < given.values.size(); i++) {
            scope.set(macro.names[i + 1], given.values[i]);
            is_given[i] = true;
        }
        for (const auto& [key, value] : given.keywords) {
            const auto at = std::find(macro.names.begin() + 1, macro.names.end(), key);
            require(at != macro.names.end() && !is_given[size_t(at - macro.names.begin()) - 1], "macro '",
                    macro.names[0], "' takes no argument '", key, "', or has it already");
            scope.set(key, value);
            is_given[size_t(at - macro.names.begin()) - 1] = true;
        }
        for (size_t i = 0; i < count; i++) {
            if (is_given[i]) continue;
            scope.set(macro.names[i + 1],
                      macro.conditions[i]
                          ? evaluate(*macro.conditions[i], scope)
                          : Value(Undefined{"parameter '" + macro.names[i + 1] + "' was not provided"}));
        }
        Text out;
        execute(macro.blocks[0], scope, out);
        return out;
    }

    Meter meter;
    const std::tm& now;
    Scope root;
    std::deque<Dict> namespaces;
    int depth = 0;
};

}  // namespace

Template::Template(const std::string& source, const std::string& n) : name(n), block(parse(source, n)) {}

Text Template::render(const Variables& variables, const std::tm& now) const {
    Renderer renderer(variables, now);
    try {
        return renderer.run(block);
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        fail_at(name, renderer.line, e.what());
    }
}

}  // namespace jinja
