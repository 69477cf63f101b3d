#include "rl/advantages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

constexpr double EPSILON = 1e-4;

using Rewards = std::vector<double>::const_iterator;

double mean(Rewards begin, Rewards end) {
    return std::accumulate(begin, end, 0.0) / double(end - begin);
}

double deviation(Rewards begin, Rewards end) {
    const double centre = mean(begin, end);
    double squares = 0;
    for (Rewards r = begin; r < end; r++) squares += (*r - centre) * (*r - centre);
    return std::sqrt(squares / double(end - begin - 1));
}

}  // namespace

bool group_differs(const std::vector<double>& rewards, size_t begin, int64_t G) {
    const Rewards first = rewards.begin() + long(begin);
    return std::any_of(first, first + G, [&](double r) { return r != *first; });
}

std::vector<float> advantages(const std::vector<double>& rewards, int64_t G, Advantage method) {
    require(G >= 2 && int64_t(rewards.size()) % G == 0, "advantages: ", rewards.size(), " rewards of groups of ", G);
    std::vector<float> out(rewards.size(), 0.0f);
    const double of_all = rewards.size() > 1 ? deviation(rewards.begin(), rewards.end()) : 0;
    for (size_t begin = 0; begin < rewards.size(); begin += size_t(G)) {
        if (!group_differs(rewards, begin, G)) continue;
        const Rewards first = rewards.begin() + long(begin), last = first + G;
        const double centre = mean(first, last);
        const double scale = method == Advantage::MeanOnly ? 1
                             : method == Advantage::Batch  ? of_all + EPSILON
                                                           : deviation(first, last) + EPSILON;
        for (int64_t i = 0; i < G; i++) out[begin + size_t(i)] = float((first[i] - centre) / scale);
    }
    return out;
}

float token_weight(LossNorm norm, int64_t length) {
    return norm == LossNorm::Sequence ? 1 / float(length) : 1.0f;
}

int64_t loss_divisor(LossNorm norm, const std::vector<int64_t>& lengths, int64_t max_tokens) {
    const auto count = int64_t(lengths.size());
    switch (norm) {
        case LossNorm::Sequence:
            return count;
        case LossNorm::Batch:
            return std::accumulate(lengths.begin(), lengths.end(), int64_t(0));
        case LossNorm::Constant:
            return count * max_tokens;
    }
    return count;
}
