#include "data/exact_number.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "runtime/text.h"

namespace {

constexpr size_t MOST_DIGITS = 2000;
constexpr std::string_view MINUS = "\xE2\x88\x92";
constexpr std::string_view CURRENCIES[] = {"$", "\\$", "\xE2\x82\xAC", "\xC2\xA3"};
constexpr std::string_view SEPARATORS[] = {",", "{,}", "\xC2\xA0", "\xE2\x80\x89", "\xE2\x80\xAF"};

bool is_letter(char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z');
}

// Reads a number at a place of a text.
class NumberReader {
  public:
    NumberReader(std::string_view all, size_t from) : text(all), begin(from), at(from) {}

    bool read() {
        if (is_inside_number()) return false;
        read_sign();
        take_any(CURRENCIES);
        if (!signed_already) read_sign();
        if (!read_digits()) return false;
        read_exponent();
        read_denominator();
        if (now() == '%') at++;
        return true;
    }
    size_t size() const { return at - begin; }

    bool negative = false;
    std::string digits, denominator;  // of the value: digits · 10^(exponent − decimals) / denominator
    int64_t decimals = 0, exponent = 0;

  private:
    char before(size_t i) const { return text[i - 1]; }
    char now() const { return at < text.size() ? text[at] : '\0'; }
    char after(size_t n) const { return at + n < text.size() ? text[at + n] : '\0'; }
    std::string_view rest() const { return text.substr(at); }

    bool take(std::string_view word) {
        if (!starts_with(rest(), word)) return false;
        at += word.size();
        return true;
    }
    template <typename Words>
    bool take_any(const Words& words) {
        return std::any_of(std::begin(words), std::end(words), [&](std::string_view word) { return take(word); });
    }

    // Of a number that cannot be read as one, as "1.2.3", or of dots in front of one.
    bool is_inside_number() const {
        if (begin == 0) return false;
        if (before(begin) == '.') return now() == '.' || (begin > 1 && is_digit(before(begin - 1)));
        return is_digit(before(begin));
    }

    void read_sign() {
        const char c = at > 0 ? before(at) : ' ';
        if (is_letter(c) || c == ')' || c == ']' || c == '}') return;
        negative = take("-") || take(MINUS);
        signed_already = negative || take("+");
    }

    size_t count_digits(size_t from) const {
        size_t n = 0;
        while (from + n < text.size() && is_digit(text[from + n])) n++;
        return n;
    }

    bool read_digits() {
        const size_t whole = count_digits(at);
        take_digits(whole);
        while (whole > 0 && whole <= 3) {
            const size_t kept = at;
            if (take_any(SEPARATORS) && count_digits(at) == 3) {
                take_digits(3);
                continue;
            }
            at = kept;
            break;
        }
        if (now() == '.' && is_digit(after(1))) {
            at++;
            const size_t n = count_digits(at);
            take_digits(n);
            decimals = int64_t(n);
        }
        return !digits.empty();
    }

    void take_digits(size_t n) {
        digits += text.substr(at, n);
        at += n;
    }

    void read_exponent() {
        if (now() != 'e' && now() != 'E') return;
        const size_t sign = after(1) == '-' || after(1) == '+' ? 1 : 0;
        const size_t first = at + 1 + sign, n = count_digits(first);
        if (n == 0 || n > 4 || (first + n < text.size() && is_letter(text[first + n]))) return;
        exponent = std::atoi(std::string(text.substr(at + 1, sign + n)).c_str());
        at = first + n;
    }

    void read_denominator() {
        if (now() != '/' || (begin > 0 && before(begin) == '/')) return;
        const size_t n = count_digits(at + 1);
        const std::string_view found = text.substr(at + 1, n), behind = text.substr(at + 1 + n);
        if (found.find_first_not_of('0') == std::string_view::npos || starts_with(behind, "/")) return;
        if (behind.size() > 1 && behind[0] == '.' && is_digit(behind[1])) return;
        denominator = found;
        at += 1 + n;
    }

    const std::string_view text;
    const size_t begin;
    size_t at;
    bool signed_already = false;
};

std::string without_leading_zeros(const std::string& digits) {
    const size_t first = digits.find_first_not_of('0');
    return first == std::string::npos ? "0" : digits.substr(first);
}

// Of two whole numbers, as at school.
std::string product(const std::string& a, const std::string& b) {
    std::vector<int64_t> sums(a.size() + b.size(), 0);
    for (size_t i = 0; i < a.size(); i++)
        for (size_t j = 0; j < b.size(); j++) sums[i + j + 1] += (a[i] - '0') * (b[j] - '0');
    std::string out(sums.size(), '0');
    int64_t carry = 0;
    for (size_t i = sums.size(); i-- > 0;) {
        carry += sums[i];
        out[i] = char('0' + carry % 10);
        carry /= 10;
    }
    return without_leading_zeros(out);
}

}  // namespace

bool ExactNumber::operator==(const ExactNumber& other) const {
    const std::string left = product(numerator, other.denominator), right = product(other.numerator, denominator);
    return left == right && (negative == other.negative || left == "0");
}

size_t number_at(std::string_view text, size_t i) {
    NumberReader reader(text, i);
    return reader.read() ? reader.size() : 0;
}

std::optional<ExactNumber> exact_number(std::string_view text) {
    NumberReader reader(text, 0);
    if (!reader.read() || reader.size() != text.size()) return std::nullopt;
    const int64_t shift = reader.exponent - reader.decimals;
    if (reader.digits.size() + reader.denominator.size() + size_t(std::abs(shift)) > MOST_DIGITS) return std::nullopt;
    const std::string zeros(size_t(std::abs(shift)), '0'),
        under = reader.denominator.empty() ? "1" : reader.denominator;
    return ExactNumber{reader.negative, without_leading_zeros(reader.digits + (shift > 0 ? zeros : "")),
                       without_leading_zeros(under + (shift < 0 ? zeros : ""))};
}

std::string_view last_number(std::string_view text) {
    std::string_view last;
    for (size_t i = 0; i < text.size();) {
        const size_t n = number_at(text, i);
        if (n) last = text.substr(i, n);
        i += n ? n : 1;
    }
    return last;
}
