#include "data/mixture.h"

#include <algorithm>
#include <numeric>

#include "runtime/error.h"
#include "runtime/files/files.h"

Mixture::Mixture(const std::vector<int64_t>& weights) : shares(weights) {
    require(!weights.empty(), "--data: no directory");
    int64_t divisor = 0, period = 0;
    for (const int64_t w : weights) {
        require(w > 0 && w <= int64_t(1) << 40, "--data: the weight ", w, " is out of range");
        divisor = std::gcd(divisor, w);
    }
    for (int64_t& p : shares) period += p /= divisor;
    require(period <= MAX_PERIOD, "--data: with these weights the order of the samples repeats only after ", period,
            " samples; round the weights, so that it repeats after at most ", MAX_PERIOD);
    order.reserve(size_t(period));
    std::vector<int64_t> taken(shares.size(), 0);
    for (int64_t i = 0; i < period; i++) {
        const auto behind = [&](size_t k) { return shares[k] * (i + 1) - period * taken[k]; };
        size_t furthest = 0;
        for (size_t k = 1; k < shares.size(); k++)
            if (behind(k) > behind(furthest)) furthest = k;
        order.push_back({furthest, uint64_t(taken[furthest]++)});
    }
}

Mixture::Location Mixture::locate(uint64_t i) const {
    const uint64_t period = order.size();
    const Location in_period = order[i % period];
    return {in_period.source, i / period * uint64_t(shares[in_period.source]) + in_period.index};
}

namespace {

constexpr int DECIMALS = 6;

// A decimal number in units of 10^-DECIMALS; 0 if the text is not one, or has more digits.
int64_t decimal(const std::string& text) {
    const size_t point = std::min(text.find('.'), text.size());
    const std::string whole = text.substr(0, point);
    std::string fraction = point < text.size() ? text.substr(point + 1) : "";
    const auto digits = [](const std::string& s) { return s.find_first_not_of("0123456789") == std::string::npos; };
    if (!digits(whole) || !digits(fraction) || whole.size() > 6 || fraction.size() > DECIMALS) return 0;
    fraction.resize(DECIMALS, '0');
    return std::stoll("0" + whole + fraction);
}

}  // namespace

std::vector<DataShare> parse_data_shares(const std::string& option, const std::string& text) {
    if (is_directory(text)) return {{text, 1}};
    std::vector<DataShare> shares;
    for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
        end = std::min(text.find(',', begin), text.size());
        const std::string part = text.substr(begin, end - begin);
        const size_t colon = part.rfind(':');
        if (colon == std::string::npos && end == text.size() && shares.empty()) return {{text, 1}};
        const int64_t weight = colon == std::string::npos ? 0 : decimal(part.substr(colon + 1));
        if (weight == 0 || colon == 0)
            throw UsageError(str(option, ": '", part,
                                 "' is not a directory with its weight, as in a:0.7,b:0.3; the "
                                 "weight is a positive number with at most ",
                                 DECIMALS, " decimals"));
        shares.push_back({part.substr(0, colon), weight});
        for (size_t k = 0; k + 1 < shares.size(); k++)
            if (shares[k].path == shares.back().path)
                throw UsageError(str(option, ": ", shares[k].path, " is given twice; add its weights"));
    }
    return shares;
}
