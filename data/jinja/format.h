// Text made by Python's two ways of formatting: '%-5s|%03d' % values, and '{:>5} {name}'.format(…). What a value's text
// brings keeps its origin; digits, signs and padding have that of the format.
#pragma once

#include "data/jinja/value.h"

namespace jinja {

struct Arguments;

// Throw Error for wrong formats and for values that do not fit them.
Value format_percent(const Text& format, const Value& values, Meter& meter);
Value format_braces(const Text& format, const Arguments& arguments, Meter& meter);

}  // namespace jinja
