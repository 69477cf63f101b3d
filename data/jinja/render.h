// Chat templates: the part of the language Jinja that models' templates are written in (parser.h says which), rendered
// as transformers renders them: jinja2's ImmutableSandboxedEnvironment with trim_blocks, lstrip_blocks, loopcontrols,
// {% generation %}, tojson, raise_exception and strftime_now. A template can change nothing outside itself, and what it
// may use is limited (meter.h).
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/builtins.h"
#include "data/jinja/syntax.h"

namespace jinja {

class Template {
  public:
    // Throws Error, "name:line: …", for wrong syntax.
    Template(const std::string& source, const std::string& name);

    using Variables = std::vector<std::pair<std::string, Value>>;
    // The text that the template writes; its marks say what came from the variables' strings. now: what strftime_now
    // shows. Throws Refusal where the template calls raise_exception (without name and line, as the message is the
    // template's), Error for every other failure, and for what is
    // not supported.
    Text render(const Variables& variables, const std::tm& now) const;
    // The same, watching how the text depends on the end of the list `growing`, which is one of the variables.
    Text render(const Variables& variables, const std::tm& now, const Value& growing, Growth& growth) const;

  private:
    Text render_watched(const Variables& variables, const std::tm& now, Growth* growth) const;

    std::string name;
    Block block;
};

}  // namespace jinja
