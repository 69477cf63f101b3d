// The arguments of one call, by position or name. Reading marks them as used; done() refuses the others.
#pragma once

#include <algorithm>
#include <string>

#include "data/jinja/builtins.h"

namespace jinja {

class ArgumentReader {
  public:
    ArgumentReader(const std::string& n, const Arguments& a, Meter& m) : name(n), arguments(a), meter(m) {}

    const Value* find(size_t position, const char* keyword) {
        if (position < arguments.values.size()) {
            used = std::max(used, position + 1);
            return &arguments.values[position];
        }
        for (const auto& [key, value] : arguments.keywords) {
            if (key != keyword) continue;
            keywords_used++;
            return &value;
        }
        return nullptr;
    }
    const Value& get(size_t position, const char* keyword) {
        const Value* const found = find(position, keyword);
        require(found, name, ": the argument '", keyword, "' is missing");
        return *found;
    }
    const Text& text(size_t position, const char* keyword) {
        const Value& found = get(position, keyword);
        require(found.is_string(), name, ": the argument '", keyword, "' is of type ", found.type_name(), ", not str");
        return found.text();
    }
    int64_t integer(size_t position, const char* keyword, int64_t otherwise) {
        const Value* const found = find(position, keyword);
        if (!found || found->is_none()) return otherwise;
        require(found->is_integer(), name, ": the argument '", keyword, "' is of type ", found->type_name(),
                ", not int");
        return found->integer();
    }
    bool flag(size_t position, const char* keyword, bool otherwise) {
        const Value* const found = find(position, keyword);
        return found ? found->truth() : otherwise;
    }
    void done() const {
        require(used >= arguments.values.size() && keywords_used >= arguments.keywords.size(), name,
                ": an argument that is not supported");
    }
    // The arguments from a position on, for another filter or test.
    Arguments rest(size_t position) {
        Arguments out;
        for (size_t i = position; i < arguments.values.size(); i++) out.values.push_back(arguments.values[i]);
        out.keywords = arguments.keywords;
        take_all();
        return out;
    }
    void take_all() {
        used = arguments.values.size();
        keywords_used = arguments.keywords.size();
    }
    size_t count() const { return arguments.values.size(); }

    const std::string& name;
    const Arguments& arguments;
    Meter& meter;

  private:
    size_t used = 0, keywords_used = 0;
};

// What filters and methods share.
Value strip_text(ArgumentReader& in, const Text& text, Sides sides);
Value replace_text(ArgumentReader& in, const Text& text);
Value join_strings(ArgumentReader& in, const Text& separator, const Value& list);
Value cased(const Text& text, Case to, Meter& meter);
Value list_of(const Text& text, const std::vector<Range>& parts, Meter& meter);
Value pair_of(Value first, Value second, Kind kind, Meter& meter);  // a tuple or a group

}  // namespace jinja
