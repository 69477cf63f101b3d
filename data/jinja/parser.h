// Reads a template into a tree (syntax.h). Wrong syntax is an error here, "chat_template.jinja:12: …". What is right in
// jinja2 but not supported is an error where it is executed: a template may have it in a branch that never runs.
//
// Supported: output, if, for (with if and else, unpacking, loop.*, break, continue), set (also of blocks and namespace
// attributes), with, filter, macro, generation, raw, comments; all expressions of jinja2. Not supported: template
// inheritance, include and import, call blocks, recursive loops, macros inside loops; and the functions, filters, tests
// and methods that builtins.cpp and methods.cpp do not list.
#pragma once

#include <string>

#include "data/jinja/syntax.h"

namespace jinja {

Block parse(const std::string& source, const std::string& name);

}  // namespace jinja
