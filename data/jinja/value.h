// The values that a template computes with, and what Python does with them: truth, equality, order, printing, JSON.
// Values are shared and do not change, except namespaces.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "data/jinja/marked_text.h"
#include "data/jinja/meter.h"

namespace jinja {

class Value;
struct Statement;

struct Undefined {
    std::string what;  // "'tools' is undefined"
};
struct None {};

// A list or a tuple; a view of a dictionary (keys, values, items), which has a length but no indices; or a generator
// (what select, map and reverse return), which is true, has no length and can be read once.
struct Sequence {
    enum class Kind : uint8_t { List, Tuple, View, Generator };
    std::vector<Value> items;
    Kind kind = Kind::List;
    int depth = 1;
};

struct Dict {
    std::vector<std::pair<Text, Value>> items;  // in order of insertion
    int depth = 1;

    const Value* find(const std::string& key) const;
    void set(const Text& key, Value value);
};

// The variable `loop` of a for statement.
struct Loop {
    std::vector<Value> items;
    size_t index = 0;
};

// A method that is named but not called. Templates may only ask whether it is there.
struct Method {
    std::string name;
};

class Value {
  public:
    Value() : data(Undefined{}) {}
    Value(Undefined v) : data(std::move(v)) {}
    Value(None v) : data(v) {}
    Value(bool v) : data(v) {}
    Value(int64_t v) : data(v) {}
    Value(double v) : data(v) {}
    Value(Text v) : data(std::make_shared<const Text>(std::move(v))) {}
    Value(const char*) = delete;  // would become a bool
    // Throws Error for lists inside lists beyond MAX_DEPTH.
    Value(std::vector<Value> items, Sequence::Kind kind);
    Value(Dict dict);
    Value(Dict* name_space) : data(name_space) {}
    Value(std::shared_ptr<const Loop> loop) : data(std::move(loop)) {}
    Value(const Statement* macro) : data(macro) {}
    Value(Method method) : data(std::move(method)) {}
    // Strings get the mark. Throws Error for nesting beyond MAX_DEPTH and integers beyond 64 bits.
    Value(const nlohmann::ordered_json& json, char mark);

    bool is_undefined() const { return std::holds_alternative<Undefined>(data); }
    bool is_none() const { return std::holds_alternative<None>(data); }
    bool is_bool() const { return std::holds_alternative<bool>(data); }
    bool is_int() const { return std::holds_alternative<int64_t>(data); }
    bool is_float() const { return std::holds_alternative<double>(data); }
    bool is_number() const { return is_bool() || is_int() || is_float(); }
    bool is_string() const { return std::holds_alternative<TextPointer>(data); }
    bool is_sequence() const { return std::holds_alternative<SequencePointer>(data); }
    bool is_sequence(Sequence::Kind kind) const { return is_sequence() && sequence().kind == kind; }
    bool is_dict() const { return std::holds_alternative<DictPointer>(data); }
    bool is_namespace() const { return std::holds_alternative<Dict*>(data); }
    bool is_loop() const { return std::holds_alternative<LoopPointer>(data); }
    bool is_macro() const { return std::holds_alternative<const Statement*>(data); }
    bool is_method() const { return std::holds_alternative<Method>(data); }
    bool is_callable() const { return is_macro() || is_method(); }

    const Undefined& undefined() const { return std::get<Undefined>(data); }
    const Text& text() const { return *std::get<TextPointer>(data); }
    const Sequence& sequence() const { return *std::get<SequencePointer>(data); }
    const Dict& dict() const { return *std::get<DictPointer>(data); }
    Dict& name_space() const { return *std::get<Dict*>(data); }
    const Loop& loop() const { return *std::get<LoopPointer>(data); }
    const Statement* macro() const { return std::get<const Statement*>(data); }
    double number() const;    // of a bool, int or float
    int64_t integer() const;  // of a bool or int
    bool is_integer() const { return is_bool() || is_int(); }

    std::string type_name() const;  // Python's: "str", "int", "NoneType", …
    bool truth() const;
    Text str(Meter& meter) const;  // Python's str(); throws Error for what a template cannot sensibly print
    // The elements in a for loop: of a list, the keys of a dictionary, the characters of a string. A generator is empty
    // afterwards. Throws Error for what cannot be iterated.
    std::vector<Value> iterate(Meter& meter) const;
    int64_t length(Meter& meter) const;  // Python's len()

    // Python's ==, and <. less() throws Error for types that have no order.
    static bool equal(const Value& a, const Value& b, Meter& meter);
    static bool less(const Value& a, const Value& b, Meter& meter);
    // Python's `item in container`.
    static bool contains(const Value& container, const Value& item, Meter& meter);

  private:
    using TextPointer = std::shared_ptr<const Text>;
    using SequencePointer = std::shared_ptr<Sequence>;
    using DictPointer = std::shared_ptr<const Dict>;
    using LoopPointer = std::shared_ptr<const Loop>;

    int depth() const { return is_sequence() ? sequence().depth : is_dict() ? dict().depth : 0; }
    void repr(Text& out, Meter& meter) const;

    // Namespaces belong to the render: they can contain themselves. Macros belong to the template.
    std::variant<Undefined, None, bool, int64_t, double, TextPointer, SequencePointer, DictPointer, Dict*, LoopPointer,
                 const Statement*, Method>
        data;
};

// Throws Error, which says what is missing, for an undefined value.
void require_defined(const Value& value);

// json.dumps(value, ensure_ascii=…, indent=…, separators=…, sort_keys=…).
struct JsonStyle {
    bool ensure_ascii = false, sort_keys = false;
    std::string indent;  // of one level
    bool lines = false;  // one element a line
    std::string item_separator = ", ", key_separator = ": ";
};
Text to_json(const Value& value, const JsonStyle& style, Meter& meter);

}  // namespace jinja
