// The renderer of chat templates against transformers' (dev/fixtures/chat_templates.json), what it refuses, its limits,
// and the origin of each byte that it writes.
#include "data/jinja/render.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/files/files.h"

namespace {

using jinja::Template;
using jinja::Text;
using jinja::Value;
using nlohmann::ordered_json;

// The date of the fixture: Saturday, 4 July 2026, 9:05.
std::tm fixture_date() {
    std::tm date = {};
    date.tm_year = 126;
    date.tm_mon = 6;
    date.tm_mday = 4;
    date.tm_hour = 9;
    date.tm_min = 5;
    return date;
}

const ordered_json& fixture() {
    static const ordered_json all = ordered_json::parse(read_file("dev/fixtures/chat_templates.json"));
    return all;
}

Text render(const std::string& source, const ordered_json& variables = ordered_json::object()) {
    Template::Variables values;
    for (const auto& [name, value] : variables.items()) values.emplace_back(name, Value(value, jinja::CONTENT));
    return Template(source, "t").render(values, fixture_date());
}

std::string error_of(const std::string& source, const ordered_json& variables = ordered_json::object()) {
    try {
        return "rendered: " + render(source, variables).chars;
    } catch (const Error& e) {
        return e.what();
    }
}

TEST(Jinja, RendersSmallTemplatesAsTransformersDoes) {
    const ordered_json& small = fixture()["small"];
    const ordered_json variables = {{"m", small["m"]}};
    ASSERT_GT(small["cases"].size(), 140u);
    for (const ordered_json& one : small["cases"]) {
        const std::string source = one["template"].get<std::string>();
        std::string found;
        try {
            found = "rendered: " + render(source, variables).chars;
        } catch (const Error& e) {
            found = str("refused: ", e.what());
        }
        if (one.contains("fails"))
            EXPECT_EQ(found.rfind("refused: ", 0), 0u) << source << "\n" << found;
        else
            EXPECT_EQ(found, "rendered: " + one["text"].get<std::string>()) << source;
    }
}

// What is right in jinja2 but not supported is an error with its line where it runs, and nothing in a branch that does
// not.
TEST(Jinja, UnsupportedConstructsAreErrorsWhereTheyRun) {
    const std::pair<const char*, const char*> cases[] = {
        {"a\n{{ x | xmlattr }}", "t:2: the filter 'xmlattr' is not supported"},
        {"{{ [1] | map('weird') | list }}", "t:1: the filter 'weird' is not supported"},
        {"{{ [1] | select('weird') | list }}", "t:1: the test 'weird' is not supported"},
        {"{{ x is weird }}", "t:1: the test 'weird' is not supported"},
        {"\n\n{{ 'x'.encode() }}", "t:3: a value of type str has no method 'encode'"},
        {"{{ lipsum(1) }}", "t:1: the function 'lipsum' is not supported"},
        {"{% if true %}\n{% include 'a' %}{% endif %}", "t:2: the tag {% include %} is not supported"},
        {"{% call f() %}{% endcall %}", "t:1: the tag {% call %} is not supported"},
        {"{% block a %}{% endblock a %}", "t:1: the tag {% block %} is not supported"},
        {"{% for x in [1] recursive %}{% endfor %}", "t:1: a recursive loop is not supported"},
        {"{% for x in [1] %}{% macro f() %}{% endmacro %}{% endfor %}",
         "t:1: a macro inside a loop or another block is not supported"},
        {"{% for a, (b, c) in [] %}{% endfor %}", "t:1: a tuple of variables inside another is not supported"},
        {"{{ '\\N{BULLET}' }}", "t:1: a character by its name, \\N{…}, is not supported"},
        {"{{ 99999999999999999999 }}",
         "t:1: the number 99999999999999999999, which is larger than 64 bits hold, is not supported"},
        {"{% set x = [3] %}{{ x[0](1) }}", "t:1: a value of type int is called, but is not a macro"},
        {"{{ '%y' % 1 }}", "t:1: %: the conversion %y is not supported"},
    };
    for (const auto& [source, message] : cases) {
        EXPECT_EQ(error_of(source), message);
        EXPECT_EQ(error_of(std::string("{% if false %}") + source + "{% endif %}x"), "rendered: x");
    }
    // Wrong syntax is an error where the template is read.
    const std::pair<const char*, const char*> wrong[] = {
        {"\n{% if false %}{% frob %}{% endif %}", "t:2: unknown tag {% frob %}"},
        {"{% if false %}{{ x | }}{% endif %}", "t:1: a filter is missing before }}"},
        {"{% if false %}\n{{ (1 }}{% endif %}", "t:2: '}' closes nothing"},
        {"{% call f() %}", "t:1: the block has no {% endcall %}"},
    };
    for (const auto& [source, message] : wrong) {
        EXPECT_EQ(error_of(source), message);
        EXPECT_THROW(Template(source, "t"), Error);
    }
}

TEST(Jinja, ErrorsNameTheLine) {
    EXPECT_EQ(error_of("a\n{{ missing.x }}"), "t:2: 'missing' is undefined");
    EXPECT_EQ(error_of("\n\n{{ m[3].role }}", {{"m", ordered_json::array()}}), "t:3: list object has no element 3");
    EXPECT_EQ(error_of("{{ d.a.b }}", {{"d", {{"c", 1}}}}), "t:1: 'dict object' has no attribute 'a'");
    EXPECT_EQ(error_of("{{ raise_exception('No ' ~ 1) }}"), "No 1");
    EXPECT_EQ(error_of("{% if x %}\n a"), "t:1: the block has no {% endif %}");
    EXPECT_EQ(error_of("{{ 'a }}"), "t:1: the string that begins with ' has no end");
    EXPECT_EQ(error_of("{{ 9223372036854775807 + 1 }}"), "t:1: a number is larger than 64 bits hold");
    EXPECT_EQ(error_of("{{ x|upper }}", {{"x", "\u00e9"}}), "t:1: upper, title and capitalize take ASCII text only");
    EXPECT_EQ(error_of("{{ x|wordcount }}", {{"x", "\u00e9"}}), "t:1: wordcount takes ASCII text only");
    EXPECT_EQ(render("{{ 'It\\'s a well-known fox_1, no?'|wordcount }}{{ ' @ '|wordcount }}").chars, "70");
    EXPECT_EQ(render("{{ x|lower }}", {{"x", "\u00c9A\u0416"}}).chars, "\u00e9a\u0436");
    EXPECT_NE(error_of("{{ x|lower }}", {{"x", "\u03a3"}}).find("depends on the text around it"), std::string::npos);
}

// A template that would run for ever, or fill the memory or the stack, ends with an error.
TEST(Jinja, LimitsAreErrors) {
    const std::string nested_loops =
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}";
    const std::pair<std::string, const char*> cases[] = {
        {nested_loops, "t:1: the template makes more than"},
        {"{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
         "t:1: the template makes more than"},
        {"{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
         "t:1: the template makes more than"},
        {"{{ 'a' * 999999999999 }}", "t:1: the template makes more than"},
        {"{{ ('a' * 999999)|replace('a', 'b' * 999999) }}", "t:1: the template makes more than"},
        {"{{ ('\\n' * 999999)|indent(999, blank=true) }}", "t:1: the template makes more than"},
        {"{% set x = range(30000)|list %}{% for i in x %}{{ '' if 30000 in x }}{% endfor %}",
         "t:1: the template takes more than 20000000 steps"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "t:1: the template's macros call each other more than 500"},
        {"{% set n = namespace(x=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% endfor %}",
         "t:1: lists nested more than 100 deep"},
        {"{{ " + std::string(500, '(') + "1" + std::string(500, ')') + " }}",
         "t:1: an expression nested more than 100 deep"},
        {"{{ 1" + std::string(500, '+') + "1 }}", "t:1: an expression nested more than 100 deep"},
        {"{{ " + std::string(5000, '-') + "1 }}", "t:1: an expression nested more than 100 deep"},
    };
    for (const auto& [source, message] : cases)
        EXPECT_EQ(error_of(source).rfind(message, 0), 0u) << source.substr(0, 100) << "\n" << error_of(source);
    std::string many;
    for (int i = 0; i < 500; i++) many += "{% if true %}";
    EXPECT_EQ(error_of(many), "t:1: blocks nested more than 100 deep");
    EXPECT_EQ(error_of(std::string(600'000, 'x')),
              "t: a template of 600000 bytes is larger than 524288, the most that is read");
    // Memory that a value held is given back: a long conversation goes through many steps.
    const std::string copies =
        "{% for i in range(10) %}{% set y = x|trim|replace('b', 'c') ~ 'd' %}{% endfor %}{{ x }}";
    EXPECT_EQ(render(copies, {{"x", std::string(8 << 20, 'a')}}).size(), size_t(8) << 20);
}

// The marks as text: T for bytes that the template wrote, C for those of the variables.
std::string origins(const std::string& source, const ordered_json& variables) {
    const Text text = render(source, variables);
    EXPECT_EQ(text.chars.size(), text.marks.size());
    std::string out;
    for (const char mark : text.marks) out += mark & jinja::CONTENT ? 'C' : mark & jinja::GENERATION ? 'G' : 'T';
    return out;
}

TEST(Jinja, EveryByteKeepsItsOrigin) {
    const ordered_json x = {{"x", "  ab,cd "}, {"m", {{{"role", "u"}, {"k", "v\n"}}}}};
    EXPECT_EQ(origins("<{{ x }}>{{ 'x' + x ~ 1 }}", x), "TCCCCCCCCTTCCCCCCCCT");
    EXPECT_EQ(origins("{{ x|trim }}{{ x.strip()[::-1] }}{{ x[2] }}{{ x|upper|trim }}", x), "CCCCCCCCCCCCCCCC");
    EXPECT_EQ(origins("{{ x.split(',')|join('--') }}", x), "CCCCTTCCC");
    EXPECT_EQ(origins("{{ x|trim|replace('b', '!!') }}", x), "CTTCCC");
    EXPECT_EQ(origins("{{ 'abc'|replace('b', x) }}", x), "TCCCCCCCCT");
    EXPECT_EQ(origins("{{ m[0].k|tojson }}{{ m[0] }}", x),
              "TCCCT"
              "TTCCCCTTTTCTTT"
              "TCTTTTCCCTT");
    EXPECT_EQ(origins("{% set y %}[{{ m[0].role }}]{% endset %}{{ y }}", x), "TCT");
    EXPECT_EQ(origins("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(m[0].role) }}", x), "TCT");
    EXPECT_EQ(origins("{{ m[0].k|indent(2) }}{{ m[0].k|first }}{{ m[0].k|list|last }}", x), "CTCC");
    EXPECT_EQ(origins("{{ strftime_now(m[0].role ~ '%d') }}{{ strftime_now('%d') }}", x), "CCCTT");
    EXPECT_EQ(origins("a{% generation %}b{{ m[0].role }}{% endgeneration %}c", x), "TGCT");
    EXPECT_EQ(origins("{% for c in m[0].role %}{{ c }}{% endfor %}{% for k in m[0] %}{{ k }}{% endfor %}", x),
              "CCCCCC");
}

// By name, expressions of the variables of ContentStaysContentInEveryBuiltin; "" for operators.
const std::vector<std::pair<std::string, std::vector<std::string>>>& content_cases() {
    static const std::vector<std::pair<std::string, std::vector<std::string>>> all = {
        {"raise_exception", {}},  // ends the render
        {"range", {}},
        {"dict", {"dict(d)", "dict(a=s)"}},
        {"namespace", {"namespace(a=s).a", "namespace(d).Zk|d(s)"}},
        {"strftime_now", {"strftime_now(s)", "strftime_now('%d' ~ s)"}},
        {"abs", {}},
        {"attr", {"d|attr(s)|d(s)"}},
        {"capitalize", {"x|capitalize"}},
        {"count", {"x|count"}},
        {"d", {"none_such|d(s)", "s|d('a')"}},
        {"default", {"none_such|default(s)", "''|default(s, true)"}},
        {"dictsort", {"{'a': s, s: 'b'}|dictsort", "{'a': s, s: 'b'}|dictsort(by='value')"}},
        {"first", {"x|first", "l|first", "d|first"}},
        {"float", {"n|float(s)"}},
        {"format", {"f|format(s, 1)", "'%s %10s %.1s %r'|format(s, s, s, s)", "'%(a)-9s'|format(a=s)"}},
        {"groupby", {"m|groupby('k')", "[{}]|groupby('k', s)", "m|groupby('k', case_sensitive=true)"}},
        {"indent", {"x|indent", "'a\\nb'|indent(s, true, true)"}},
        {"int", {"n|int(s)"}},
        {"items", {"d|items|list"}},
        {"join", {"l|join", "[1, 2]|join(s)", "m|join('-', 'k')"}},
        {"last", {"x|last", "l|last", "(d|list)[:1]|last"}},
        {"length", {"x|length"}},
        {"list", {"x|list", "d|list"}},
        {"lower", {"x|lower", "[s]|map('lower')|list"}},
        {"map",
         {"m|map(attribute='k')|list", "[{}]|map(attribute='k', default=s)|list", "l|map('replace', 'a', s)|list"}},
        {"max", {"l|max"}},
        {"min", {"l|min"}},
        {"reject", {"l|reject('none')|list"}},
        {"rejectattr", {"m|rejectattr('z')|list"}},
        {"replace", {"x|replace('a', 'b')", "'a'|replace('a', s)", "x|replace(s, s)", "x|replace('', '-')"}},
        {"reverse", {"x|reverse", "l|reverse|list"}},
        {"round", {}},
        {"safe", {"x|safe"}},
        {"select", {"l|select|list"}},
        {"selectattr", {"m|selectattr('k')|list"}},
        {"sort", {"l|sort", "m|sort(attribute='k')", "x|sort"}},
        {"string", {"x|string", "l|string", "d|string"}},
        {"sum", {"[l]|sum(start=[])", "[{'a': l}]|sum('a', [])"}},
        {"title", {"x|title"}},
        {"tojson",
         {"d|tojson", "x|tojson", "[1]|tojson(indent=s)", "[1, 2]|tojson(separators=(s, s))",
          "{'a': 1}|tojson(separators=(s, s))", "l|tojson(indent=1)", "d|tojson(ensure_ascii=true, sort_keys=true)"}},
        {"trim", {"x|trim", "x|trim('Z')", "'a'|trim(s) ~ s"}},
        {"unique", {"l|unique|list"}},
        {"upper", {"x|upper", "n|upper"}},
        {"wordcount", {"x|wordcount"}},
        {"str.capitalize", {"x.capitalize()"}},
        {"str.count", {"x.count(s)"}},
        {"str.endswith", {"x.endswith(s)"}},
        {"str.find", {"x.find(s)"}},
        {"str.format",
         {"f.format(s)", "'{:>9}{!r}{a}'.format(s, s, a=s)", "'{0[Qk]}'.format(d)",
          "(s ~ '{:' ~ s ~ '>5}').format(1)"}},
        {"str.join", {"','.join(l)", "s.join('ab')"}},
        {"str.lower", {"x.lower()"}},
        {"str.lstrip", {"x.lstrip()", "x.lstrip('Z')"}},
        {"str.removeprefix", {"x.removeprefix('Z')", "'a'.removeprefix(s) ~ s"}},
        {"str.removesuffix", {"x.removesuffix('Z')"}},
        {"str.replace", {"x.replace('a', s, 1)"}},
        {"str.rfind", {"x.rfind(s)"}},
        {"str.rsplit", {"x.rsplit(',', 1)", "x.rsplit()"}},
        {"str.rstrip", {"x.rstrip()"}},
        {"str.split", {"x.split()", "x.split(',')", "'aZb'.split('Z')|join(s)"}},
        {"str.splitlines", {"x.splitlines()"}},
        {"str.startswith", {"x.startswith(s)"}},
        {"str.strip", {"x.strip()", "x.strip('Z')"}},
        {"str.title", {"x.title()"}},
        {"str.upper", {"x.upper()"}},
        {"list.append", {"[l.append(s), l]"}},
        {"list.count", {"l.count(s)"}},
        {"list.extend", {"[l.extend(x), l]"}},
        {"list.index", {"l.index('Z'[1:] ~ l[0])"}},
        {"list.insert", {"[l.insert(0, s), l]"}},
        {"list.pop", {"l.pop()"}},
        {"tuple.count", {"(s,).count(s)"}},
        {"tuple.index", {"(s,).index(s)"}},
        {"dict.copy", {"d.copy()"}},
        {"dict.get", {"d.get('b')", "d.get('z', s)", "{s: s}.get(s)"}},
        {"dict.items", {"d.items()|list"}},
        {"dict.keys", {"d.keys()|list"}},
        {"dict.pop", {"d.pop('b')", "d.pop('z', s)"}},
        {"dict.setdefault", {"d.setdefault('z', s)", "[d.setdefault(x, 1), d]"}},
        {"dict.update", {"[d.update({s: x}, z=s), d]"}},
        {"dict.values", {"d.values()|list"}},
        {"loop.changed", {}},
        {"loop.cycle", {}},
        {"",
         {"s ~ 1", "s + 'a'", "s * 3", "[s] * 2", "(s,) + (x,)", "x[2:]", "x[::-1]", "x[0]", "f % (s, 1)", "'%5s' % s",
          "'%(a)s' % {'a': s}", "'%c' % s", "s if 1", "none_such or s", "s and x", "{s: 1}", "{'a': s}", "[[s]]"}},
    };
    return all;
}

// Every function, filter, method and operator that takes text, with content in each place where it takes any: each Q of
// the result came from content (no template has one) and is marked so. A name without an entry fails.
TEST(Jinja, ContentStaysContentInEveryBuiltin) {
    const ordered_json variables = {{"x", "Q a,Q\nqQ"},
                                    {"s", "Q"},
                                    {"f", "Q%s{}%5d"},
                                    {"n", "q7"},
                                    {"d", {{"Qk", "Qv"}, {"b", {{"c", "Q"}}}}},
                                    {"l", {"Q2", "q1", "Q2"}},
                                    {"m", {{{"k", "Q"}}, {{"k", "qq"}}}}};
    std::map<std::string, size_t> covered;
    const auto check = [&](const std::string& source, bool has_content) {
        ASSERT_TRUE(source.find('Q') == std::string::npos || source.find("[Qk]") != std::string::npos) << source;
        const Text text = render(source, variables);
        size_t found = 0;
        for (size_t i = 0; i < text.size(); i++) {
            if (text.chars[i] != 'q' && text.chars[i] != 'Q') continue;
            found++;
            EXPECT_TRUE(text.marks[i] & jinja::CONTENT) << source << "\n" << text.chars;
        }
        EXPECT_TRUE(found > 0 || !has_content) << source << "\n" << text.chars;
    };
    const std::string numbers[] = {"count",        "length",     "wordcount",   "str.count",
                                   "str.endswith", "str.find",   "str.rfind",   "str.startswith",
                                   "list.count",   "list.index", "tuple.count", "tuple.index"};
    for (const auto& [name, templates] : content_cases()) {
        covered[name]++;
        const bool text = std::find(std::begin(numbers), std::end(numbers), name) == std::end(numbers);
        for (const std::string& one : templates) check("{{ " + one + " }}", text);
    }
    for (const char* source :
         {"{% for i in l %}{{ loop.cycle(i, s) }}{{ loop.previtem }}{{ loop.changed(i) }}{% endfor %}",
          "{% filter upper %}{{ x }}{% endfilter %}", "{% with a=s %}{{ a }}{% endwith %}",
          "{% set a | trim %}{{ x }}{% endset %}{{ a }}",
          "{% macro g(a) %}{{ a }}{% endmacro %}{{ g(s) }}{{ g(*[s]) }}",
          "{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}", "{% print s %}",
          "{% set o = namespace(a=1) %}{% set o.a = s %}{{ o.a }}", "{% generation %}{{ s }}{% endgeneration %}"})
        check(source, true);
    for (const auto& names : {jinja::function_names(), jinja::filter_names(), jinja::method_names()})
        for (const std::string& name : names) EXPECT_EQ(covered[name], 1u) << name;
    // Digits and padding by a format of the user, and a character by its number, are content too.
    EXPECT_EQ(origins("{{ f % ('a', 7) }}", variables), "CTCCCCCCC");
    EXPECT_EQ(origins("{{ '%c' % 60 }}{{ '{:c}'.format(60) }}{{ '%3d' % 60 }}", variables), "CCTTT");
}

}  // namespace
