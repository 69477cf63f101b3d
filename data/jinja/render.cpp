#include "data/jinja/render.h"

#include <algorithm>
#include <deque>

#include "data/jinja/lexer.h"
#include "data/jinja/operators.h"
#include "data/jinja/parser.h"

namespace jinja {

namespace {

using Type = Expression::Type;

// The variables of the template, of a round of a loop, of a macro's call or of a block.
struct Scope {
    const Scope* parent = nullptr;
    std::vector<std::pair<std::string, Value>> variables = {};

    const Value* find(const std::string& name, Meter& meter) const {
        size_t compared = 0;
        const Value* found = nullptr;
        for (const Scope* scope = this; scope && !found; scope = scope->parent)
            for (auto one = scope->variables.begin(); one != scope->variables.end() && !found; ++one) {
                compared++;
                if (one->first == name) found = &one->second;
            }
        meter.work(compared * (4 + name.size()));
        return found;
    }
    void set(const std::string& name, Value value, Meter& meter) {
        meter.work(variables.size() * (4 + name.size()));
        for (auto& [known, old] : variables) {
            if (known != name) continue;
            old = std::move(value);
            return;
        }
        meter.make(2 * (sizeof(Value) + sizeof(std::string) + name.size()));
        variables.emplace_back(name, std::move(value));
    }
};

class Renderer {
  public:
    Renderer(const Template::Variables& variables, const std::tm& n, Growth* growth) : now(n) {
        meter.growth = growth;
        root.variables = variables;
    }

    Text run(const Block& block) {
        Writer out(meter);
        root_out = &out;
        execute(block, root, out);
        return out.take();
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

    Flow execute(const Block& block, Scope& scope, Writer& out) {
        const Nesting nesting(depth);
        for (const auto& statement : block) {
            const Flow flow = execute(*statement, scope, out);
            if (flow != Flow::Next) return flow;
        }
        return Flow::Next;
    }

    Flow execute(const Statement& s, Scope& scope, Writer& out) {
        meter.work();
        line = s.line;
        require(s.unsupported.empty(), s.unsupported, " is not supported");
        switch (s.type) {
            case Statement::Type::Unsupported:
                break;
            case Statement::Type::Text:
                out.put(s.text.text());
                break;
            case Statement::Type::Output:
                evaluate(*s.expression, scope).print(out);
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
            case Statement::Type::SetBlock:
                scope.set(s.names[0], filtered_body(s, scope), meter);
                break;
            case Statement::Type::Filter:
                filtered_body(s, scope).print(out);
                break;
            case Statement::Type::With: {
                Scope inner{&scope};
                for (size_t i = 0; i < s.names.size(); i++)
                    inner.set(s.names[i], evaluate(*s.conditions[i], scope), meter);
                return execute(s.blocks[0], inner, out);
            }
            case Statement::Type::Macro:
                scope.set(s.names[0], &s, meter);
                break;
            case Statement::Type::Generation: {
                Scope inner{&scope};
                Writer generated(meter);
                execute(s.blocks[0], inner, generated);
                for (char& mark : generated.text.marks) mark = char(mark | GENERATION);
                out.put(generated.text);
                break;
            }
            case Statement::Type::Break:
                return Flow::Break;
            case Statement::Type::Continue:
                return Flow::Continue;
        }
        return Flow::Next;
    }

    // The text of a block, with the filters of {% set x | upper %} or {% filter upper %}.
    Value filtered_body(const Statement& s, const Scope& around) {
        Scope scope{&around};
        Writer text(meter);
        execute(s.blocks[0], scope, text);
        Scope inner{&around};
        inner.set("", text.value(), meter);
        return evaluate(*s.expression, inner);
    }

    void assign(const Statement& s, Value value, Scope& scope) {
        if (s.attribute.empty()) return unpack(s.names, std::move(value), scope);
        const Value* const object = scope.find(s.names[0], meter);
        require(object && object->is_namespace(), "'", s.names[0], "' is not a namespace, so its attribute '",
                s.attribute, "' cannot be set");
        if (meter.growth) meter.growth->changes();
        object->name_space().set(s.attribute, std::move(value));
    }

    void unpack(const std::vector<std::string>& names, Value value, Scope& scope) {
        if (names.size() == 1) return scope.set(names[0], std::move(value), meter);
        const Items parts = value.iterate(meter);
        require(parts.size() == names.size(), parts.size(), " values cannot be unpacked into ", names.size(),
                " variables");
        for (size_t i = 0; i < names.size(); i++) scope.set(names[i], parts.all[i], meter);
    }

    // Flow::Break and Flow::Continue come from the else block and are for the loop around this one.
    Flow loop(const Statement& s, Scope& scope, Writer& out) {
        auto state = std::make_shared<Loop>();
        const Value list = evaluate(*s.expression, scope);
        Growth* const growth = list.is_list() ? list.sequence().growth : nullptr;
        if (growth) begin_watched_loop(s, list, out);
        state->growth = growth;
        state->items = growth ? copied(list.sequence().items) : list.iterate(meter);
        if (!s.conditions.empty()) {
            const auto refused = [&](const Value& item) {
                Scope inner{&scope};
                unpack(s.names, item, inner);
                return !evaluate(*s.conditions[0], inner).truth();
            };
            std::vector<Value>& items = state->items.all;
            items.erase(std::remove_if(items.begin(), items.end(), refused), items.end());
        }
        if (state->items.empty()) {
            if (growth) growth->depends();
            Scope inner{&scope};
            return execute(s.blocks[1], inner, out);
        }
        for (size_t i = 0; i < state->items.size(); i++) {
            state->index = i;
            Scope inner{&scope};
            inner.set("loop", state, meter);
            unpack(s.names, state->items.all[i], inner);
            if (growth) growth->starts.push_back(out.written().size());
            if (execute(s.blocks[0], inner, out) == Flow::Break) {
                if (growth) growth->depends();
                break;
            }
        }
        if (growth) {
            growth->end = out.written().size();
            growth->ended = true;
        }
        return Flow::Next;
    }

    Items copied(const Items& items) {
        Items out(&meter);
        for (const Value& item : items) out.add(item);
        return out;
    }

    // A loop over the watched list: one that writes to the text itself, and the only one.
    void begin_watched_loop(const Statement& s, const Value& list, const Writer& out) const {
        Growth& growth = *list.sequence().growth;
        const bool may_be_empty = list.sequence().items.empty() || list.sequence().left_out > 0;
        if (growth.began() || &out != root_out || !s.conditions.empty() || (may_be_empty && !s.blocks[1].empty()))
            growth.depends();
        growth.starts.assign(list.sequence().left_out, out.written().size());
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
                return unary_operation(e.name, operand(0));
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
                return method(e, operand(0), scope);
            case Type::Filter:
                return call_filter(e.name, operand(0), arguments(e, 1, scope), meter);
            case Type::Test:
                return call_test(e.name, operand(0), arguments(e, 1, scope), meter);
            case Type::CallValue:
                return call_value(operand(0), e, scope);
            case Type::Spread:
            case Type::Unsupported:
                throw Error(e.name + " is not supported");
        }
        return {};
    }

    Value variable(const std::string& name, const Scope& scope) {
        if (const Value* const found = scope.find(name, meter)) return *found;
        if (is_function(name)) return Method{name};
        return Undefined{"'" + shortened(name) + "' is undefined"};
    }

    Value list(const Expression& e, const Scope& scope) {
        Items items(&meter);
        for (const auto& operand : e.operands) items.add(evaluate(*operand, scope));
        return {std::move(items), e.type == Type::List ? Kind::List : Kind::Tuple};
    }

    Value dict(const Expression& e, const Scope& scope) {
        Dict out(&meter);
        for (size_t i = 0; i < e.operands.size(); i += 2) {
            const Value key = evaluate(*e.operands[i], scope);
            out.set(key, evaluate(*e.operands[i + 1], scope), meter);
        }
        return out;
    }

    Value binary(const Expression& e, const Scope& scope) {
        Value left = evaluate(*e.operands[0], scope);
        if (e.name == "and") return left.truth() ? evaluate(*e.operands[1], scope) : left;
        if (e.name == "or") return left.truth() ? left : evaluate(*e.operands[1], scope);
        return binary_operation(e.name, left, evaluate(*e.operands[1], scope), meter);
    }

    Value concatenate(const Expression& e, const Scope& scope) {
        Writer out(meter);
        for (const auto& operand : e.operands) evaluate(*operand, scope).print(out);
        return out.value();
    }

    // A chain a < b < c holds if a < b and b < c.
    Value compare(const Expression& e, const Scope& scope) {
        Value left = evaluate(*e.operands[0], scope);
        for (size_t i = 0; i < e.names.size(); i++) {
            const Value right = evaluate(*e.operands[i + 1], scope);
            if (!comparison(left, e.names[i], right, meter)) return false;
            left = right;
        }
        return true;
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
        const bool is_text = object.is_string();
        if (!is_text && !object.is_list() && !object.is_tuple())
            return Undefined{str(object.type_name(), " object has no slices")};
        require(bounds[2] != 0, "a slice's step is 0");
        if (object.is_list() && object.sequence().growth && bounds[0] >= 0 && !given[1] && bounds[2] == 1)
            return watched_slice(object.sequence(), size_t(bounds[0]));
        const int64_t n = object.length(meter), step = std::clamp(bounds[2], -n - 1, n + 1);
        // Python's slice.indices(n).
        const auto clipped = [&](int i, int64_t otherwise) {
            if (!given[i]) return otherwise;
            const int64_t at = bounds[i] < 0 ? std::max(bounds[i], -n - 1) + n : bounds[i];
            return std::clamp(at, step < 0 ? int64_t(-1) : 0, step < 0 ? n - 1 : n);
        };
        const int64_t begin = clipped(0, step < 0 ? n - 1 : 0), end = clipped(1, step < 0 ? -1 : n);
        if (is_text) return text_slice(object, begin, end, step);
        Items items(&meter);
        for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) items.add(object.items()[size_t(i)]);
        return {std::move(items), object.is_list() ? Kind::List : Kind::Tuple};
    }

    // The watched list without its first elements.
    Value watched_slice(const Sequence& list, size_t begin) {
        Items items(&meter);
        for (size_t i = begin; i < list.items.size(); i++) items.add(list.items.all[i]);
        Value out(std::move(items), Kind::List);
        out.watch(list.growth, list.left_out + begin);
        return out;
    }

    Value text_slice(const Value& object, int64_t begin, int64_t end, int64_t step) {
        const Text& text = object.text();
        meter.scan(text.size());
        if (step == 1) {
            const size_t from = character_start(text.chars, size_t(begin)),
                         to = character_start(text.chars, size_t(end));
            return part_of(text, {from, std::max(from, to)}, meter);
        }
        const Items characters = object.iterate(meter);
        Writer out(meter);
        for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) out.put(characters.all[size_t(i)].text());
        return out.value();
    }

    Arguments arguments(const Expression& e, size_t first, const Scope& scope) {
        Arguments out;
        for (size_t i = first; i < e.operands.size(); i++) {
            if (e.operands[i]->type == Type::Spread)
                spread(*e.operands[i], scope, out);
            else
                out.values.push_back(evaluate(*e.operands[i], scope));
        }
        for (const auto& [key, value] : e.keywords) out.keywords.emplace_back(key, evaluate(*value, scope));
        return out;
    }

    // f(*list) and f(**dict).
    void spread(const Expression& e, const Scope& scope, Arguments& out) {
        const Value value = evaluate(*e.operands[0], scope);
        require(e.name == "*" || value.is_dict(), "a call with ** takes a dictionary, not a value of type ",
                value.type_name());
        const Items items = value.iterate(meter);
        require(items.size() <= 1000, "a call with ", items.size(), " arguments; at most 1,000 are supported");
        for (const Value& one : items) {
            require(e.name == "*" || one.is_string(), "a call with ** takes names that are text");
            if (e.name == "*")
                out.values.push_back(one);
            else
                out.keywords.emplace_back(one.text().chars, item(value, one, meter));
        }
    }

    Value call(const Expression& e, const Scope& scope) {
        const Value* const found = scope.find(e.name, meter);
        if (found) return call_value(*found, e, scope, 0);
        require(is_function(e.name), "the function '", shortened(e.name), "' is not supported");
        if (e.name != "namespace") return call_function(e.name, arguments(e, 0, scope), now, meter);
        const Arguments given = arguments(e, 0, scope);
        const Value attributes = call_function("dict", given, now, meter);
        namespaces.push_back(attributes.dict().copy(&meter));
        return &namespaces.back();
    }

    Value call_value(const Value& callee, const Expression& e, const Scope& scope, size_t first = 1) {
        require(callee.is_macro(), e.name.empty() ? "a value" : "'" + e.name + "'", " of type ", callee.type_name(),
                " is called, but is not a macro");
        return call_macro(*callee.macro(), arguments(e, first, scope));
    }

    // A method, or a macro that a namespace or a dictionary holds.
    Value method(const Expression& e, const Value& object, const Scope& scope) {
        const bool holds_macro = (object.is_namespace() || object.is_dict()) && !has_method(object, e.name);
        const Value held = holds_macro ? attribute(object, e.name) : Value();
        if (held.is_macro()) return call_value(held, e, scope);
        return call_method(e.name, object, arguments(e, 1, scope), meter);
    }

    Value call_macro(const Statement& macro, const Arguments& given) {
        const size_t count = macro.names.size() - 1;
        require(given.values.size() <= count, "macro '", macro.names[0], "' takes ", count, " arguments, not ",
                given.values.size());
        Scope scope{&root};
        std::vector<bool> is_given(count);
        for (size_t i = 0; i < given.values.size(); i++) {
            scope.set(macro.names[i + 1], given.values[i], meter);
            is_given[i] = true;
        }
        for (const auto& [key, value] : given.keywords) {
            const auto at = std::find(macro.names.begin() + 1, macro.names.end(), key);
            require(at != macro.names.end() && !is_given[size_t(at - macro.names.begin()) - 1], "macro '",
                    macro.names[0], "' takes no argument '", key, "', or has it already");
            scope.set(key, value, meter);
            is_given[size_t(at - macro.names.begin()) - 1] = true;
        }
        for (size_t i = 0; i < count; i++) {
            if (is_given[i]) continue;
            scope.set(macro.names[i + 1],
                      macro.conditions[i]
                          ? evaluate(*macro.conditions[i], scope)
                          : Value(Undefined{"parameter '" + shortened(macro.names[i + 1]) + "' was not provided"}),
                      meter);
        }
        Writer out(meter);
        execute(macro.blocks[0], scope, out);
        return out.value();
    }

    Meter meter;
    const std::tm& now;
    Scope root;
    const Writer* root_out = nullptr;
    std::deque<Dict> namespaces;
    int depth = 0;
};

}  // namespace

Template::Template(const std::string& source, const std::string& n) : name(n), block(parse(source, n)) {}

Text Template::render(const Variables& variables, const std::tm& now) const {
    return render_watched(variables, now, nullptr);
}

Text Template::render(const Variables& variables, const std::tm& now, const Value& growing, Growth& growth) const {
    struct Watch {
        Watch(const Value& v, Growth& g) : value(v) { value.watch(&g); }
        ~Watch() { value.watch(nullptr); }
        const Value& value;
    };
    const Watch watch(growing, growth);
    Text out = render_watched(variables, now, &growth);
    if (!growth.ended) growth.depends();
    return out;
}

Text Template::render_watched(const Variables& variables, const std::tm& now, Growth* growth) const {
    Renderer renderer(variables, now, growth);
    try {
        return renderer.run(block);
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        fail_at(name, renderer.line, e.what());
    }
}

}  // namespace jinja
