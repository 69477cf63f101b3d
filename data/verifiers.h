// Verifiers: how much a completion is worth, from 0 to 1, compared with the answer that the data gives.
//
// Texts are the same if they are equal after normalization: Unicode's form C, lower case, white space at the ends left
// out and one space elsewhere, without one full stop at the end; or if both are numbers (data/exact_number.h) of the
// same value.
//
// A verifier gives 1, and else 0, if
// - exact_match: the completion and the answer are the same;
// - last_number: the last number in the completion has the value of the answer;
// - boxed_answer: the last \boxed{…} or \fbox{…} whose braces are balanced holds the answer, both as plain_latex()
//   writes them;
// - multiple_choice: chosen_letter() is the answer, a letter;
// - regex: the answer, a regular expression, matches somewhere. With the option `pattern`: what that matches, in an
//   expression with groups the first group that took part and is not empty, is the same as the answer. The option
//   `select` takes the "first" match (default) or the "last";
// - length: the completion has `min` to `max` characters, options of which one may be missing;
// - gsm8k_strict, gsm8k_flexible: the filters strict-match and flexible-extract of lm-evaluation-harness's task gsm8k
//   extract the answer, compared as its exact_match does: without commas, $ and all up to "#### ".
//
// Regular expressions are PCRE2's, with \w and \s as Unicode has them. One that backtracks for too long is an Error.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

using Verifier = std::function<double(std::string_view completion)>;

// The verifier {"name": ..., its options}, bound to an answer. Throws Error for an unknown name or option, a wrong
// value, and an answer that the verifier cannot compare with.
Verifier make_verifier(const nlohmann::json& options, const std::string& answer);
// Their names, as an error message lists them.
std::string verifier_names();

bool same_text(std::string_view a, std::string_view b);

// What the last \boxed{…} holds; "" if there is none.
std::string_view boxed(std::string_view completion);
// LaTeX without layout: without $, spaces, \left, \right, a degree sign and units in \text{…} behind a number; \text{…}
// alone as its text, \dfrac and \tfrac as \frac, a fraction of two whole numbers as a/b.
std::string plain_latex(std::string_view latex);

// The letter of A to Z that a completion chooses, in upper case; '\0' if none. The first of these that there is:
// 1. the last capital letter that stands alone behind "answer", "choice" or "option" and "is", ":" or nothing
//    ("The answer is (B).", "**Answer: B**");
// 2. a capital letter at the start, alone or followed by . ) : , or a line's end ("B) because"); either case if the
//    completion has nothing else ("b", "(b).");
// 3. the last capital letter in parentheses.
char chosen_letter(std::string_view completion);
