// Log-probabilities of several tokens from one token's loss, against the softmax in double.
#include "kernels/generation/token_logprobs.h"

#include "dev/tests/test_util.h"
#include "kernels/cross_entropy.h"

namespace {

class TokenLogprobs : public DTypeTest {};

TEST_P(TokenLogprobs, MatchOracle) {
    for (const auto& [B, V, k] : {std::array<int64_t, 3>{1, 1, 1}, {3, 50, 5}, {5, 3001, 40}}) {
        const int64_t Vp = V + 7;
        const TestArray logits = TestArray::random(activation(), {B, Vp}, 3, 2.5);
        std::vector<int32_t> ids, targets;
        for (int64_t i = 0; i < B * k; i++) ids.push_back(int32_t((i * 7919 + 3) % V));
        for (int64_t b = 0; b < B; b++) targets.push_back(int32_t((b * 31 + 1) % V));
        if (B > 1) targets[1] = IGNORE_TARGET;
        const TestArray id = TestArray::ints(ids, {B, k}), target = TestArray::ints(targets, {B}),
                        losses = TestArray::poisoned({B}), out = TestArray::poisoned({B, k});
        cross_entropy_forward(losses, logits, target, V, {}, Stream{});
        token_logprobs(out, id, losses, target, logits, Stream{});
        const std::vector<double> got = out.fetch();
        for (int64_t b = 0; b < B; b++) {
            const double* row = logits.data() + b * Vp;
            double sum = 0;
            for (int64_t v = 0; v < V; v++) sum += std::exp(row[v]);
            for (int64_t i = 0; i < k; i++) {
                const size_t at = size_t(b * k + i);
                if (targets[size_t(b)] < 0)
                    EXPECT_TRUE(std::isnan(got[at]));
                else
                    EXPECT_NEAR(got[at], row[ids[at]] - std::log(sum), 1e-5) << "row " << b << " token " << i;
            }
        }
    }
}

INSTANTIATE_DTYPES(TokenLogprobs);

TEST(TokenLogprobsErrors, InvalidArguments) {
    const TestArray logits = TestArray::random({2, 9}, 1), out = TestArray::poisoned({2, 3}),
                    losses = TestArray::random({2}, 2), targets = TestArray::ints({0, 9}, {2}),
                    ids = TestArray::ints(std::vector<int32_t>(6, 1), {2, 3}),
                    few = TestArray::ints(std::vector<int32_t>(3, 1), {1, 3});
    expect_error([&] { token_logprobs(out, few, losses, targets, logits, Stream{}); },
                 "token_logprobs: ids is int32 [1, 3], expected int32 [2, 3]");
    if (backend_device() == Device::CPU)
        expect_error([&] { token_logprobs(out, ids, losses, targets, logits, Stream{}); },
                     "token_logprobs: target 9 lies outside a row of 9");
}

}  // namespace
