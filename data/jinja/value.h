// The values that a template computes with, and what Python does with them: truth, equality, order, printing, JSON.
// Values are shared. Only namespaces, lists and dictionaries change, by their methods.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "data/jinja/marked_text.h"
#include "data/jinja/meter.h"

namespace jinja {

class Items;
class Dict;
class Writer;
struct Sequence;
struct Loop;
struct Statement;

struct Undefined {
    std::string what;  // "'tools' is undefined"; short, since no meter counts it
};
struct None {};
inline std::string shortened(const std::string& name) {
    return name.size() <= 60 ? name : name.substr(0, 60) + "...";
}

// A method that is named but not called. Templates may only ask whether it is there.
struct Method {
    std::string name;
};

// The kinds of sequences: a list or a tuple; what groupby makes, a tuple (grouper, list); a view of a dictionary (keys,
// values, items), which has a length but no indices; or a generator (what select, map and reverse return), which is
// true, has no length and can be read once.
enum class Kind : uint8_t { List, Tuple, Group, View, Generator };

class Value {
  public:
    Value() : data(Undefined{}) {}
    Value(Undefined v) : data(std::move(v)) {}
    Value(None v) : data(v) {}
    Value(bool v) : data(v) {}
    Value(int64_t v) : data(v) {}
    Value(double v) : data(v) {}
    Value(Text v) : data(std::make_shared<const Text>(std::move(v))) {}
    Value(std::shared_ptr<const Text> v) : data(std::move(v)) {}
    Value(const char*) = delete;  // would become a bool
    // Throws Error for lists inside lists beyond MAX_DEPTH.
    Value(Items items, Kind kind);
    Value(Dict dict);
    Value(Dict* name_space) : data(name_space) {}
    Value(std::shared_ptr<Loop> loop) : data(std::move(loop)) {}
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
    bool is_integer() const { return is_bool() || is_int(); }
    bool is_string() const { return std::holds_alternative<TextPointer>(data); }
    bool is_sequence() const { return std::holds_alternative<SequencePointer>(data); }
    bool is_sequence(Kind kind) const;
    bool is_list() const { return is_sequence(Kind::List); }
    bool is_tuple() const { return is_sequence(Kind::Tuple) || is_sequence(Kind::Group); }
    bool is_dict() const { return std::holds_alternative<DictPointer>(data); }
    bool is_namespace() const { return std::holds_alternative<Dict*>(data); }
    bool is_loop() const { return std::holds_alternative<LoopPointer>(data); }
    bool is_macro() const { return std::holds_alternative<const Statement*>(data); }
    bool is_method() const { return std::holds_alternative<Method>(data); }
    bool is_callable() const { return is_macro() || is_method(); }

    const Undefined& undefined() const { return std::get<Undefined>(data); }
    const Text& text() const { return *std::get<TextPointer>(data); }
    const Sequence& sequence() const { return *std::get<SequencePointer>(data); }
    const std::vector<Value>& items() const;  // of a sequence; who asks can see its end
    void watch(Growth* growth, size_t left_out = 0) const;
    const Dict& dict() const { return *std::get<DictPointer>(data); }
    Dict& name_space() const { return *std::get<Dict*>(data); }
    Loop& loop() const { return *std::get<LoopPointer>(data); }
    const Statement* macro() const { return std::get<const Statement*>(data); }
    const Method& method() const { return std::get<Method>(data); }
    double number() const;    // of a bool, int or float
    int64_t integer() const;  // of a bool or int

    std::string type_name() const;  // Python's: "str", "int", "NoneType", …
    bool truth() const;
    // Python's str(), and repr(); they throw Error for what a template cannot sensibly print.
    Value str(Meter& meter) const;
    void print(Writer& out) const;
    void repr(Writer& out) const;
    // The elements in a for loop: of a list, the keys of a dictionary, the characters of a string. A generator is empty
    // afterwards. Throws Error for what cannot be iterated.
    Items iterate(Meter& meter) const;
    int64_t length(Meter& meter) const;  // Python's len()

    // The list or dictionary of a method that changes it. At the end of the render it is as it was, or empty if the
    // render made it.
    Sequence& changed_list(Meter& meter) const;
    Dict& changed_dict(Meter& meter) const;

    // Python's ==, and <. less() throws Error for types that have no order.
    static bool equal(const Value& a, const Value& b, Meter& meter);
    static bool less(const Value& a, const Value& b, Meter& meter);
    // Python's `item in container`.
    static bool contains(const Value& container, const Value& item, Meter& meter);

    int depth() const;  // 1 of a list without lists; as constructed

  private:
    using TextPointer = std::shared_ptr<const Text>;
    using SequencePointer = std::shared_ptr<Sequence>;
    using DictPointer = std::shared_ptr<Dict>;
    using LoopPointer = std::shared_ptr<Loop>;

    // Namespaces belong to the render: they can contain themselves. Macros belong to the template.
    std::variant<Undefined, None, bool, int64_t, double, TextPointer, SequencePointer, DictPointer, Dict*, LoopPointer,
                 const Statement*, Method>
        data;
};

// What a list takes for each value, with room to grow; and a text or list beside its contents.
constexpr size_t VALUE_BYTES = 2 * sizeof(Value), HEADER_BYTES = 96;

// Values whose memory a meter counts, until they end. Without a meter they are the input's.
class Items {
  public:
    explicit Items(Meter* m = nullptr) : meter(m) { charge(HEADER_BYTES); }
    Items(Items&& other) noexcept { *this = std::move(other); }
    Items& operator=(Items&& other) noexcept;
    ~Items() {
        if (meter) meter->give_back(charged);
    }

    void add(Value value);
    size_t size() const { return all.size(); }
    bool empty() const { return all.empty(); }
    std::vector<Value>::const_iterator begin() const { return all.begin(); }
    std::vector<Value>::const_iterator end() const { return all.end(); }
    Meter* payer() const { return meter; }

    std::vector<Value> all;

  private:
    void charge(size_t bytes) {
        if (meter) meter->make(bytes);
        charged += meter ? bytes : 0;
    }

    Meter* meter = nullptr;
    size_t charged = 0;
};

struct Sequence {
    Items items;
    Kind kind = Kind::List;
    int depth = 1;
    bool changed = false;      // by a method
    Growth* growth = nullptr;  // of a list whose end is watched; and how many elements of that list are left out here
    size_t left_out = 0;
};

// A dictionary, in order of insertion. Keys are equal as in Python: 1, 1.0 and True are one key.
class Dict {
  public:
    struct Entry {
        Value key, value;
    };

    explicit Dict(Meter* m = nullptr) : meter(m) { charge(2 * HEADER_BYTES); }
    Dict(Dict&& other) noexcept { *this = std::move(other); }
    Dict& operator=(Dict&& other) noexcept;
    ~Dict() {
        if (meter) meter->give_back(charged);
    }
    Dict copy(Meter* payer) const;

    const Value* find(const std::string& name) const;
    // Throw Error for what cannot be a key: a list or a dictionary.
    const Value* find(const Value& key, Meter& work) const;
    void set(const Value& key, Value value, Meter& work);
    void set(const std::string& name, Value value) { put(name, Text(name), std::move(value)); }
    void erase(const Value& key, Meter& work);
    const std::vector<Entry>& entries() const { return all; }
    size_t size() const { return all.size(); }
    Meter* payer() const { return meter; }

    int depth = 1;
    bool changed = false;  // by a method

  private:
    void put(const std::string& id, Value key, Value value);
    void charge(size_t bytes) {
        if (meter) meter->make(bytes);
        charged += meter ? bytes : 0;
    }

    Meter* meter = nullptr;
    size_t charged = 0;
    std::vector<Entry> all;
    std::map<std::string, size_t> places;  // by what identifies a key
};

// The variable `loop` of a for statement.
struct Loop {
    Items items;
    size_t index = 0;
    Growth* growth = nullptr;
    std::vector<Value> last_changed;  // the arguments of loop.changed()
    bool any_changed = false;
};

// Text that grows. Its memory is charged before it is allocated, and given back when the value ends.
class Writer {
  public:
    explicit Writer(Meter& m) : meter(m) { charge(HEADER_BYTES); }
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;
    ~Writer() { meter.give_back(charged); }

    void put(std::string_view chars, char mark = TEMPLATE) {
        charge(2 * chars.size());
        text.append(chars, mark);
    }
    void put(const Text& other) { put(other, {0, other.size()}); }
    void put(const Text& other, Range part) {
        charge(2 * part.size());
        text.chars.append(other.chars, part.begin, part.size());
        text.marks.append(other.marks, part.begin, part.size());
    }
    void put_times(const Text& other, int64_t times);
    const Text& written() const { return text; }
    Text take() { return std::move(text); }
    Value value();  // what is written; the writer is empty afterwards

    Meter& meter;
    Text text;

  private:
    void charge(size_t bytes) {
        meter.make(bytes);
        charged += bytes;
    }

    size_t charged = 0;
};

// Parts of a text, as values.
Value part_of(const Text& text, Range part, Meter& meter);
Value made(const Text& text, Meter& meter);  // of text that is small

// Throws Error, which says what is missing, for an undefined value.
void require_defined(const Value& value);

// json.dumps(value, ensure_ascii=…, indent=…, separators=…, sort_keys=…).
struct JsonStyle {
    bool ensure_ascii = false, sort_keys = false;
    Text indent;         // of one level
    bool lines = false;  // one element a line
    Text item_separator = Text(", "), key_separator = Text(": ");
};
Value to_json(const Value& value, const JsonStyle& style, Meter& meter);

}  // namespace jinja
