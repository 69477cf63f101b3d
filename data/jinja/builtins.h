// The functions, filters, tests and methods that templates may call. They do what jinja2's of the same name do
// (jinja2/filters.py, tests.py), or Python's str, list and dict. Text that they make of content is marked as content.
#pragma once

#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/value.h"

namespace jinja {

// The arguments of a call.
struct Arguments {
    std::vector<Value> values;
    std::vector<std::pair<std::string, Value>> keywords;
};

// Their names, in order.
std::vector<std::string> function_names();
std::vector<std::string> filter_names();
std::vector<std::string> test_names();
std::vector<std::string> method_names();  // of any type
bool is_function(const std::string& name);

// A refusal by the template itself: raise_exception(message).
struct Refusal : Error {
    using Error::Error;
};

// All throw Error for wrong arguments, with a message that names the filter or method, and for names that are not
// known: "the filter 'xmlattr' is not supported".
Value call_filter(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter);
bool call_test(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter);
Value call_method(const std::string& name, const Value& object, const Arguments& arguments, Meter& meter);
bool has_method(const Value& object, const std::string& name);
// The functions without state: raise_exception, strftime_now (of `now`), range, dict. namespace is the renderer's.
Value call_function(const std::string& name, const Arguments& arguments, const std::tm& now, Meter& meter);

// object.name and object[key] as jinja2 looks them up: what is not there is undefined. An attribute of undefined is an
// error.
Value attribute(const Value& object, const std::string& name);
Value item(const Value& object, const Value& key, Meter& meter);

}  // namespace jinja
