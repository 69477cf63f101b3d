#include "data/jinja/parser.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>

#include "data/jinja/lexer.h"

namespace jinja {

namespace {

using TokenType = Token::Type;
using Type = Expression::Type;
using NewExpression = std::unique_ptr<Expression>;
using NewStatement = std::unique_ptr<Statement>;
using Names = std::initializer_list<std::string_view>;

class Parser {
  public:
    Parser(const std::string& source, const std::string& n) : name(n), tokens(tokenize(source, n)) {}

    Block run() { return block({}); }

  private:
    // ---- tokens -----------------------------------------------------------------------------------------------------

    const Token& peek(size_t ahead = 0) const { return tokens[std::min(at + ahead, tokens.size() - 1)]; }
    const Token& take() {
        const Token& token = peek();
        at++;
        return token;
    }
    [[noreturn]] void fail(const std::string& message) const { fail_at(name, peek().line, message); }

    bool is_operator(std::string_view text) const { return peek().type == TokenType::Operator && peek().text == text; }
    bool is_name(std::string_view text) const { return peek().type == TokenType::Name && peek().text == text; }
    bool is_name_of(Names words) const {
        return std::any_of(words.begin(), words.end(), [&](std::string_view word) { return is_name(word); });
    }
    bool skip_operator(std::string_view text) {
        const bool found = is_operator(text);
        at += found;
        return found;
    }
    bool skip_name(std::string_view text) {
        const bool found = is_name(text);
        at += found;
        return found;
    }
    std::string shown() const {
        switch (peek().type) {
            case TokenType::BlockEnd:
                return "%}";
            case TokenType::OutputEnd:
                return "}}";
            case TokenType::End:
                return "the end of the template";
            case TokenType::Text:
            case TokenType::BlockBegin:
            case TokenType::OutputBegin:
            case TokenType::Name:
            case TokenType::String:
            case TokenType::Integer:
            case TokenType::Float:
            case TokenType::Operator:
            case TokenType::Unsupported:
                break;
        }
        return "'" + peek().text + "'";
    }
    void expect_operator(std::string_view text) {
        if (!skip_operator(text)) fail(str("'", text, "' is missing before ", shown()));
    }
    std::string expect_name(const char* what) {
        if (peek().type != TokenType::Name) fail(str(what, " is missing before ", shown()));
        return take().text;
    }
    void expect_end_of_tag() {
        if (peek().type != TokenType::BlockEnd) fail("unexpected " + shown() + " in the tag");
        at++;
    }

    // ---- statements -------------------------------------------------------------------------------------------------

    // Statements up to a tag of that name, whose name is the next token; without names, to the end of the template.
    Block block(Names ends) {
        const int begin = at > 0 ? tokens[at - 1].line : 1;
        if (++nesting > MAX_DEPTH) fail(str("blocks nested more than ", MAX_DEPTH, " deep"));
        Block out;
        for (;;) {
            const Token& token = take();
            if (token.type == TokenType::End) {
                if (ends.size()) fail_at(name, begin, str("the block has no {% ", *ends.begin(), " %}"));
                break;
            }
            if (token.type == TokenType::Text) {
                NewStatement text = statement(Statement::Type::Text, token.line);
                text->text = Value(Text(token.text));
                out.push_back(std::move(text));
            } else if (token.type == TokenType::OutputBegin) {
                NewStatement output = statement(Statement::Type::Output, token.line);
                output->expression = tuple(true);
                if (peek().type != TokenType::OutputEnd) fail("unexpected " + shown() + " in the output");
                at++;
                out.push_back(std::move(output));
            } else {
                if (ends.size() && is_name_of(ends)) break;
                out.push_back(tag());
            }
        }
        nesting--;
        return out;
    }

    static NewStatement statement(Statement::Type type, int line) {
        auto out = std::make_unique<Statement>();
        out->type = type;
        out->line = line;
        return out;
    }

    NewStatement tag() {
        const int line = peek().line;
        const std::string tag_name = expect_name("the tag's name");
        if (tag_name == "if") return if_statement(line);
        if (tag_name == "for") return for_statement(line);
        if (tag_name == "set") return set_statement(line);
        if (tag_name == "macro") return macro(line);
        if (tag_name == "with") return with_statement(line);
        if (tag_name == "filter") return filter_statement(line);
        if (tag_name == "print") {
            NewStatement out = statement(Statement::Type::Output, line);
            NewExpression all = make(Type::Concat, line);
            do add(*all, expression());
            while (skip_operator(","));
            out->expression = std::move(all);
            expect_end_of_tag();
            return out;
        }
        if (tag_name == "generation") {
            NewStatement out = statement(Statement::Type::Generation, line);
            expect_end_of_tag();
            out->blocks.push_back(body({"endgeneration"}));
            at++;
            expect_end_of_tag();
            return out;
        }
        if (tag_name == "break" || tag_name == "continue") {
            if (loops == 0) fail_at(name, line, tag_name + " stands outside a for loop");
            expect_end_of_tag();
            return statement(tag_name == "break" ? Statement::Type::Break : Statement::Type::Continue, line);
        }
        if (tag_name == "else" || tag_name == "elif" || tag_name.rfind("end", 0) == 0)
            fail_at(name, line, "{% " + tag_name + " %} closes nothing");
        for (const char* known : {"include", "import", "from", "extends", "block", "call", "autoescape"})
            if (tag_name == known) return unsupported_statement(line, tag_name);
        fail_at(name, line, "unknown tag {% " + tag_name + " %}");
    }

    // A tag of jinja2 that is an error where it is executed, not in a branch that never runs.
    NewStatement unsupported_statement(int line, const std::string& tag_name) {
        NewStatement out = statement(Statement::Type::Unsupported, line);
        out->unsupported = "the tag {% " + tag_name + " %}";
        const auto skip_tag = [&] {
            while (peek().type != TokenType::BlockEnd) at++;
            at++;
        };
        skip_tag();
        if (tag_name == "block") out->blocks.push_back(body({"endblock"}));
        if (tag_name == "call") out->blocks.push_back(body({"endcall"}));
        if (tag_name == "autoescape") out->blocks.push_back(body({"endautoescape"}));
        if (!out->blocks.empty()) skip_tag();
        return out;
    }

    NewStatement if_statement(int line) {
        NewStatement out = statement(Statement::Type::If, line);
        do {
            out->conditions.push_back(tuple(false));
            expect_end_of_tag();
            out->blocks.push_back(block({"endif", "elif", "else"}));
        } while (skip_name("elif"));
        if (skip_name("else")) {
            expect_end_of_tag();
            out->blocks.push_back(block({"endif"}));
        }
        at++;
        expect_end_of_tag();
        return out;
    }

    // The variables that a value is unpacked into. (a, (b, c)) is a tuple inside a tuple, which is not supported.
    std::vector<std::string> targets(Statement& statement) {
        const bool bracket = skip_operator("(");
        std::vector<std::string> out;
        do {
            if (is_operator("(")) {
                statement.unsupported = "a tuple of variables inside another";
                targets(statement);
                out.emplace_back();
            } else {
                out.push_back(expect_name("a variable"));
            }
        } while (skip_operator(",") && ((peek().type == TokenType::Name && !is_name("in")) || is_operator("(")));
        if (bracket) expect_operator(")");
        for (const std::string& target : out)
            if (target == "true" || target == "false" || target == "none" || target == "loop")
                fail("'" + target + "' is no name for a variable");
        return out;
    }

    NewStatement for_statement(int line) {
        NewStatement out = statement(Statement::Type::For, line);
        out->names = targets(*out);
        if (!skip_name("in")) fail("'in' is missing before " + shown());
        out->expression = tuple(false);
        if (skip_name("if")) out->conditions.push_back(expression());
        if (skip_name("recursive")) out->unsupported = "a recursive loop";
        expect_end_of_tag();
        loops++;
        out->blocks.push_back(block({"endfor", "else"}));
        loops--;
        out->blocks.emplace_back();
        if (skip_name("else")) {
            expect_end_of_tag();
            out->blocks.back() = block({"endfor"});
        }
        at++;
        expect_end_of_tag();
        return out;
    }

    NewStatement set_statement(int line) {
        NewStatement out = statement(Statement::Type::Set, line);
        out->names = targets(*out);
        if (out->names.size() == 1 && skip_operator(".")) out->attribute = expect_name("an attribute");
        if (skip_operator("=")) {
            out->expression = tuple(true);
            expect_end_of_tag();
            return out;
        }
        if (out->names.size() > 1 || !out->attribute.empty()) fail("'=' is missing before " + shown());
        out->type = Statement::Type::SetBlock;
        NewExpression value = make(Type::Variable, line);
        while (is_operator("|")) value = filter(std::move(value));
        out->expression = std::move(value);
        expect_end_of_tag();
        out->blocks.push_back(body({"endset"}));
        at++;
        expect_end_of_tag();
        return out;
    }

    NewStatement macro(int line) {
        NewStatement out = statement(Statement::Type::Macro, line);
        // A macro sees the variables of the template, so it is written where those are.
        if (loops > 0 || bodies > 0) out->unsupported = "a macro inside a loop or another block";
        out->names.push_back(expect_name("the macro's name"));
        expect_operator("(");
        while (!is_operator(")")) {
            out->names.push_back(expect_name("an argument"));
            out->conditions.push_back(skip_operator("=") ? expression() : nullptr);
            if (!out->conditions.back() && out->conditions.size() > 1 && out->conditions[out->conditions.size() - 2])
                fail("an argument without a default follows one with a default");
            if (!is_operator(")")) expect_operator(",");
        }
        at++;
        expect_end_of_tag();
        out->blocks.push_back(body({"endmacro"}));
        at++;
        expect_end_of_tag();
        return out;
    }

    NewStatement with_statement(int line) {
        NewStatement out = statement(Statement::Type::With, line);
        while (peek().type != TokenType::BlockEnd) {
            if (!out->names.empty()) expect_operator(",");
            out->names.push_back(expect_name("a variable"));
            expect_operator("=");
            out->conditions.push_back(expression());
        }
        at++;
        out->blocks.push_back(block({"endwith"}));
        at++;
        expect_end_of_tag();
        return out;
    }

    NewStatement filter_statement(int line) {
        NewStatement out = statement(Statement::Type::Filter, line);
        at--;  // the name of the tag stands where | would
        NewExpression value = filter(make(Type::Variable, line));
        while (is_operator("|")) value = filter(std::move(value));
        out->expression = std::move(value);
        expect_end_of_tag();
        out->blocks.push_back(body({"endfilter"}));
        at++;
        expect_end_of_tag();
        return out;
    }

    // A block that is rendered apart: no loop around it can be left from inside.
    Block body(Names ends) {
        const int around = std::exchange(loops, 0);
        bodies++;
        Block out = block(ends);
        bodies--;
        loops = around;
        return out;
    }

    // ---- expressions, from the loosest to the tightest --------------------------------------------------------------

    static NewExpression make(Type type, int line, std::string text = "") {
        auto out = std::make_unique<Expression>();
        out->type = type;
        out->line = line;
        out->name = std::move(text);
        return out;
    }

    // Adds an operand, which may be null.
    void add(Expression& to, NewExpression operand) const {
        if (operand) to.depth = std::max(to.depth, operand->depth + 1);
        if (to.depth > MAX_DEPTH) fail_at(name, to.line, str("an expression nested more than ", MAX_DEPTH, " deep"));
        to.operands.push_back(std::move(operand));
    }

    NewExpression binary(NewExpression left, const std::string& op, NewExpression right) const {
        NewExpression out = make(Type::Binary, left->line, op);
        add(*out, std::move(left));
        add(*out, std::move(right));
        return out;
    }

    // One expression, or a tuple without brackets.
    NewExpression tuple(bool with_conditional) {
        const int line = peek().line;
        const auto one = [&] { return with_conditional ? expression() : or_expression(); };
        NewExpression first = one();
        if (!is_operator(",")) return first;
        NewExpression out = make(Type::Tuple, line);
        add(*out, std::move(first));
        while (skip_operator(",") && !is_operator(")") && peek().type != TokenType::BlockEnd &&
               peek().type != TokenType::OutputEnd)
            add(*out, one());
        return out;
    }

    NewExpression expression() {
        if (++nesting > MAX_DEPTH) fail(str("an expression nested more than ", MAX_DEPTH, " deep"));
        NewExpression value = or_expression();
        while (skip_name("if")) {
            NewExpression out = make(Type::Conditional, value->line);
            add(*out, std::move(value));
            add(*out, or_expression());
            add(*out, skip_name("else") ? expression() : nullptr);
            value = std::move(out);
        }
        nesting--;
        return value;
    }

    NewExpression or_expression() {
        NewExpression left = and_expression();
        while (skip_name("or")) left = binary(std::move(left), "or", and_expression());
        return left;
    }

    NewExpression and_expression() {
        NewExpression left = not_expression();
        while (skip_name("and")) left = binary(std::move(left), "and", not_expression());
        return left;
    }

    NewExpression not_expression() {
        const int line = peek().line;
        if (!skip_name("not")) return comparison();
        if (++nesting > MAX_DEPTH) fail(str("an expression nested more than ", MAX_DEPTH, " deep"));
        NewExpression out = make(Type::Unary, line, "not");
        add(*out, not_expression());
        nesting--;
        return out;
    }

    NewExpression comparison() {
        NewExpression first = sum();
        NewExpression out = make(Type::Compare, first->line);
        for (;;) {
            std::string op;
            for (const char* symbol : {"==", "!=", "<", "<=", ">", ">="})
                if (is_operator(symbol)) op = symbol;
            if (is_name("in")) op = "in";
            if (is_name("not") && peek(1).type == TokenType::Name && peek(1).text == "in") op = "not in";
            if (op.empty()) break;
            at += op == "not in" ? 2 : 1;
            if (first) add(*out, std::move(first));
            out->names.push_back(op);
            add(*out, sum());
        }
        return first ? std::move(first) : std::move(out);
    }

    NewExpression sum() {
        NewExpression left = concatenation();
        while (is_operator("+") || is_operator("-")) {
            const std::string op = take().text;
            left = binary(std::move(left), op, concatenation());
        }
        return left;
    }

    NewExpression concatenation() {
        NewExpression first = product();
        if (!is_operator("~")) return first;
        NewExpression out = make(Type::Concat, first->line);
        add(*out, std::move(first));
        while (skip_operator("~")) add(*out, product());
        return out;
    }

    NewExpression product() {
        NewExpression left = power();
        while (is_operator("*") || is_operator("/") || is_operator("//") || is_operator("%")) {
            const std::string op = take().text;
            left = binary(std::move(left), op, power());
        }
        return left;
    }

    NewExpression power() {
        NewExpression left = unary(true);
        while (skip_operator("**")) left = binary(std::move(left), "**", unary(true));
        return left;
    }

    NewExpression unary(bool with_filters) {
        const int line = peek().line;
        NewExpression value;
        if (is_operator("-") || is_operator("+")) {
            if (++nesting > MAX_DEPTH) fail(str("an expression nested more than ", MAX_DEPTH, " deep"));
            value = make(Type::Unary, line, take().text);
            add(*value, unary(false));
            nesting--;
        } else {
            value = primary();
        }
        value = postfix(std::move(value));
        for (bool more = with_filters; more;) {
            if (is_operator("|")) {
                value = filter(std::move(value));
            } else if (is_name("is")) {
                value = test(std::move(value));
            } else {
                more = is_operator("(");
                if (more) value = call_value(std::move(value), line);
            }
        }
        return value;
    }

    NewExpression primary() {
        const Token& token = take();
        NewExpression out = make(Type::Constant, token.line);
        if (token.type == TokenType::Name) {
            if (token.text == "true" || token.text == "True" || token.text == "false" || token.text == "False") {
                out->value = Value(token.text == "true" || token.text == "True");
            } else if (token.text == "none" || token.text == "None") {
                out->value = Value(None{});
            } else {
                out->type = Type::Variable;
                out->name = token.text;
            }
        } else if (token.type == TokenType::String) {
            std::string text = token.text;
            while (peek().type == TokenType::String) text += take().text;
            out->value = Value(Text(text));
        } else if (token.type == TokenType::Integer) {
            set_whole_number(*out, token.text);
        } else if (token.type == TokenType::Unsupported) {
            out->type = Type::Unsupported;
            out->name = token.text;
        } else if (token.type == TokenType::Float) {
            out->value = Value(std::strtod(token.text.c_str(), nullptr));
        } else if (token.type == TokenType::Operator && token.text == "(") {
            if (skip_operator(")")) return make(Type::Tuple, token.line);
            out = tuple(true);
            expect_operator(")");
        } else if (token.type == TokenType::Operator && token.text == "[") {
            out->type = Type::List;
            while (!skip_operator("]")) {
                add(*out, expression());
                if (!is_operator("]")) expect_operator(",");
            }
        } else if (token.type == TokenType::Operator && token.text == "{") {
            out->type = Type::Dict;
            while (!skip_operator("}")) {
                add(*out, expression());
                expect_operator(":");
                add(*out, expression());
                if (!is_operator("}")) expect_operator(",");
            }
        } else {
            at--;
            fail("an expression is missing before " + shown());
        }
        return out;
    }

    static void set_whole_number(Expression& out, const std::string& text) {
        const char prefix = text.size() > 2 ? char(text[1] | 0x20) : '0';
        const int base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
        const char* const end = text.data() + text.size();
        int64_t number = 0;
        const auto [last, error] = std::from_chars(text.data() + (base == 10 ? 0 : 2), end, number, base);
        out.value = Value(number);
        if (error == std::errc() && last == end) return;
        out.type = Type::Unsupported;
        out.name = "the number " + shortened(text) + ", which is larger than 64 bits hold,";
    }

    NewExpression postfix(NewExpression value) {
        for (;;) {
            const int line = peek().line;
            if (skip_operator(".")) {
                if (peek().type == TokenType::Integer) {
                    NewExpression index = primary();
                    value = item(std::move(value), std::move(index), line);
                    continue;
                }
                value = member(std::move(value), expect_name("an attribute"), line);
            } else if (skip_operator("[")) {
                value = subscript(std::move(value), line);
            } else if (is_operator("(")) {
                value = call(std::move(value), line);
            } else {
                return value;
            }
        }
    }

    NewExpression item(NewExpression object, NewExpression key, int line) const {
        NewExpression out = make(Type::Item, line);
        add(*out, std::move(object));
        add(*out, std::move(key));
        return out;
    }

    NewExpression member(NewExpression object, const std::string& member_name, int line) const {
        NewExpression out = make(Type::Attribute, line, member_name);
        add(*out, std::move(object));
        return out;
    }

    NewExpression subscript(NewExpression object, int line) {
        NewExpression parts[3];
        int colons = 0;
        while (!is_operator("]")) {
            if (skip_operator(":")) {
                if (++colons > 2) fail("a slice has at most three parts");
            } else if (parts[colons]) {
                fail("']' is missing before " + shown());
            } else {
                parts[colons] = expression();
            }
        }
        at++;
        if (colons == 0) {
            if (!parts[0]) fail_at(name, line, "the index is missing in []");
            return item(std::move(object), std::move(parts[0]), line);
        }
        NewExpression out = make(Type::Slice, line);
        add(*out, std::move(object));
        for (NewExpression& part : parts) add(*out, std::move(part));
        return out;
    }

    NewExpression call(NewExpression callee, int line) {
        if (callee->type == Type::Variable) {
            NewExpression out = make(Type::Call, line, callee->name);
            arguments(*out);
            return out;
        }
        if (callee->type != Type::Attribute) return call_value(std::move(callee), line);
        callee->type = Type::Method;
        arguments(*callee);
        return callee;
    }

    NewExpression call_value(NewExpression callee, int line) {
        NewExpression out = make(Type::CallValue, line);
        add(*out, std::move(callee));
        arguments(*out);
        return out;
    }

    // The arguments of a call in brackets.
    void arguments(Expression& to) {
        expect_operator("(");
        while (!skip_operator(")")) {
            if (is_operator("*") || is_operator("**")) {
                NewExpression spread = make(Type::Spread, peek().line, take().text);
                add(*spread, expression());
                add(to, std::move(spread));
            } else if (peek().type == TokenType::Name && peek(1).type == TokenType::Operator && peek(1).text == "=") {
                std::string keyword = take().text;
                at++;
                NewExpression value = expression();
                to.depth = std::max(to.depth, value->depth + 1);
                to.keywords.emplace_back(std::move(keyword), std::move(value));
            } else {
                if (!to.keywords.empty()) fail("an argument without a name follows one with a name");
                add(to, expression());
            }
            if (!is_operator(")")) expect_operator(",");
        }
    }

    NewExpression filter(NewExpression value) {
        const int line = take().line;
        NewExpression out = make(Type::Filter, line, dotted_name("a filter"));
        add(*out, std::move(value));
        if (is_operator("(")) arguments(*out);
        return out;
    }

    std::string dotted_name(const char* what) {
        std::string out = expect_name(what);
        while (skip_operator(".")) out += "." + expect_name(what);
        return out;
    }

    NewExpression test(NewExpression value) {
        const int line = take().line;
        const bool negated = skip_name("not");
        NewExpression out = make(Type::Test, line, dotted_name("a test"));
        add(*out, std::move(value));
        const TokenType next = peek().type;
        if (is_operator("(")) {
            arguments(*out);
        } else if ((next == TokenType::Name && !is_name_of({"else", "or", "and"})) || next == TokenType::String ||
                   next == TokenType::Integer || next == TokenType::Float || is_operator("[") || is_operator("{")) {
            if (is_name("is")) fail("tests cannot be chained");
            add(*out, postfix(primary()));
        }
        if (!negated) return out;
        NewExpression negation = make(Type::Unary, line, "not");
        add(*negation, std::move(out));
        return negation;
    }

    const std::string& name;
    const std::vector<Token> tokens;
    size_t at = 0;
    int nesting = 0, loops = 0, bodies = 0;
};

}  // namespace

Block parse(const std::string& source, const std::string& name) {
    require(source.size() <= MAX_SOURCE, name, ": a template of ", source.size(), " bytes is larger than ", MAX_SOURCE,
            ", the most that is read");
    return Parser(source, name).run();
}

}  // namespace jinja
