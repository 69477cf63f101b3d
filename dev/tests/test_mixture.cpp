// data/mixture.h: exact proportions, in any prefix too, and the option that states them.
#include "data/mixture.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dev/tests/temp_dir.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

namespace {

std::string parse_error(const std::string& text) {
    try {
        parse_data_shares("--data", text);
    } catch (const UsageError& e) {
        return e.what();
    }
    return "";
}

TEST(Mixture, SharesAreExactInEveryPeriodAndCloseInBetween) {
    for (const std::vector<int64_t>& weights : std::vector<std::vector<int64_t>>{
             {1}, {7, 3}, {700000, 300000}, {1, 1, 1}, {5, 3, 2, 1}, {1, 99}, {997, 2, 1}}) {
        const Mixture mixture(weights);
        double sum = 0;
        for (const int64_t w : weights) sum += double(w);
        std::vector<uint64_t> taken(weights.size(), 0);
        for (int64_t i = 0; i < 3 * mixture.period(); i++) {
            const Mixture::Location place = mixture.locate(uint64_t(i));
            ASSERT_EQ(place.index, taken[place.source]++) << i;  // counts the samples of the source
            for (size_t k = 0; k < weights.size(); k++) {
                const double share = double(weights[k]) / sum * double(i + 1);
                ASSERT_LT(std::fabs(double(taken[k]) - share), double(weights.size() - 1) + 1e-9) << i << " " << k;
            }
            if ((i + 1) % mixture.period()) continue;
            for (size_t k = 0; k < weights.size(); k++)
                ASSERT_EQ(taken[k], uint64_t(mixture.share(k) * ((i + 1) / mixture.period())));
        }
    }
    EXPECT_EQ(Mixture({700000, 300000}).period(), 10);
    EXPECT_EQ(Mixture({7}).period(), 1);
}

TEST(Mixture, LargeNumbersOfSamples) {
    const Mixture mixture({3, 1});
    EXPECT_EQ(mixture.locate(uint64_t(4) << 40).index, uint64_t(3) << 40);
}

TEST(Mixture, InvalidWeightsAreErrors) {
    EXPECT_THROW(Mixture({}), Error);
    EXPECT_THROW(Mixture({1, 0}), Error);
    EXPECT_THROW(Mixture({1, -1}), Error);
    try {
        const Mixture mixture({999999, 2});
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()),
                  "--data: with these weights the order of the samples repeats only after 1000001 samples; round the "
                  "weights, so that it repeats after at most 1000000");
    }
}

TEST(DataShares, AreADirectoryOrSeveralWithWeights) {
    const auto expect = [](const std::string& text, const std::vector<std::pair<std::string, int64_t>>& expected) {
        std::vector<std::pair<std::string, int64_t>> found;
        for (const DataShare& share : parse_data_shares("--data", text)) found.emplace_back(share.path, share.weight);
        EXPECT_EQ(found, expected) << text;
    };
    expect("data/mine", {{"data/mine", 1}});
    expect("a:0.7,b:0.3", {{"a", 700000}, {"b", 300000}});
    expect("a:7,b:.25,c:1.", {{"a", 7000000}, {"b", 250000}, {"c", 1000000}});
    expect("C:x:2,b:1", {{"C:x", 2000000}, {"b", 1000000}});
    const TempDir dir;
    const std::string odd = dir.file("a:1,b:2");
    make_directories(odd);
    expect(odd, {{odd, 1}});
    for (const char* text : {"a:0.7,b", "a,b", "a:0,b:1", "a:-1,b:2", "a:1e3,b:1", "a:0.1234567,b:1", "a:1,", "a:1,:2",
                             "a:nan,b:1", "a:,b:1", "a:.,b:1", "a:12345678,b:1"})
        EXPECT_NE(parse_error(text).find("is not a directory with its weight, as in a:0.7,b:0.3"), std::string::npos)
            << text << ": " << parse_error(text);
    EXPECT_EQ(parse_error("a:1,b:1,a:2"), "--data: a is given twice; add its weights");
}

}  // namespace
