// Which data set each sample of a run comes from: train --data web:0.7,code:0.3.
//
// The weights are scaled to integers p_k without a common divisor, of sum P. Sample i takes the source that is furthest
// behind its share of the samples up to i: the one with the largest p_k·(i + 1) − P·n_k, where n_k of the i samples
// before it came from source k. Of equal sources it takes the first. This is the order of Megatron-LM's blended data
// sets. So samples [j·P, (j + 1)·P) hold exactly p_k of source k, and each of K sources is always less than K − 1
// samples off its share. The order repeats after P samples: a table of one period gives any sample in O(1). The number
// of a sample alone says where it comes from, whatever the ranks, micro-steps and interruptions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

class Mixture {
  public:
    // weights: positive, one for each source. Throws Error, which names --data, if P is above MAX_PERIOD.
    explicit Mixture(const std::vector<int64_t>& weights);

    // Sample i of the run is the one with this number among those of its source.
    struct Location {
        size_t source;
        uint64_t index;
    };
    Location locate(uint64_t i) const;
    // The samples of a source in a period, and all: its share is share(k)/period().
    int64_t share(size_t source) const { return shares[source]; }
    int64_t period() const { return int64_t(order.size()); }

    static constexpr int64_t MAX_PERIOD = 1'000'000;

  private:
    std::vector<int64_t> shares;  // p_k
    std::vector<Location> order;  // of one period
};

// A data directory and its weight, as an integer that compares with those of the others.
struct DataShare {
    std::string path;
    int64_t weight;
};

// Reads "dir" or "dir:0.7,dir:0.3": decimal weights of at most 6 digits after the point, which need not add up to 1.
// A name of an existing directory is that directory, also with a comma or a colon in it. Throws UsageError that begins
// with the option's name.
std::vector<DataShare> parse_data_shares(const std::string& option, const std::string& text);
