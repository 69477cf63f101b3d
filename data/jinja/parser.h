// Reads a template into a tree (syntax.h). Everything that this program does not support is found here, before a
// conversation begins: "chat_template.jinja:12: the filter 'sort' is not supported; …".
//
// Supported: output, if, for (with if and else, unpacking, loop.*, break, continue), set (also of blocks and namespace
// attributes), macro, generation, raw, comments; all expressions of jinja2. Not supported: template inheritance,
// include and import, call, filter and with blocks, recursive loops, macros inside loops; and the functions, tests and
// methods that builtins.cpp does not list.
#pragma once

#include <string>

#include "data/jinja/syntax.h"

namespace jinja {

Block parse(const std::string& source, const std::string& name);

}  // namespace jinja
