// Numbers as people write them, compared exactly and not as floating-point numbers.
#pragma once

#include <optional>
#include <string>
#include <string_view>

// A fraction of two whole numbers, in decimal digits without leading zeros.
struct ExactNumber {
    bool negative = false;
    std::string numerator = "0", denominator = "1";

    bool operator==(const ExactNumber& other) const;
};

// Bytes of the longest number at text[i]; 0 if none begins there. A number is
// - a sign: - or + or U+2212. It counts only where no letter, digit or closing bracket is in front ("7-5" has 7 and 5);
// - $, € or £, which is ignored, as is one % after the number;
// - digits, in groups of three behind commas, "{,}" of LaTeX or narrow spaces (U+00A0, U+2009, U+202F) or without;
// - a point and digits; either side may lack its digits, but a point without any after it ends a sentence;
// - an exponent of at most four digits, as e-3;
// - a slash and a whole number that is not 0, which is the denominator. "1/2/2024" has no fraction.
size_t number_at(std::string_view text, size_t i);

// The value of a text that is one number, and nothing where it is not or has more than 2,000 digits.
std::optional<ExactNumber> exact_number(std::string_view text);

// The last number in a text, as it is written there; "" if there is none.
std::string_view last_number(std::string_view text);
