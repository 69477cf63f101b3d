// Shared by the ladders of both backends: their options, the check of a rung against the oracle, and the table with its
// CSV file, which scripts/plot_ladder.py plots.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "dev/oracle/reference.h"
#include "runtime/device/tensor.h"
#include "runtime/error.h"

// --- options

struct LadderOptions {
    std::string csv;   // empty: no file is written
    int64_t size = 0;  // of the timed problem
};

// Parses --csv FILE and --size N. size_name says what --size sets (null: no --size).
inline LadderOptions ladder_options(int argc, char** argv, const char* size_name = nullptr, int64_t default_size = 0,
                                    int64_t max_size = 0) {
    LadderOptions options;
    options.size = default_size;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        const bool is_size = size_name && name == "--size";
        if (i + 1 == argc || (name != "--csv" && !is_size))
            throw UsageError(
                str("usage: ", argv[0], " [--csv FILE]", size_name ? str(" [--size N (", size_name, ")]") : ""));
        if (!is_size) {
            options.csv = argv[i + 1];
            continue;
        }
        char* end = nullptr;
        errno = 0;
        options.size = std::strtoll(argv[i + 1], &end, 10);
        if (errno || *end || options.size < 1 || options.size > max_size)
            throw UsageError(str("--size is ", argv[i + 1], ", expected 1 to ", max_size));
    }
    return options;
}

// main() of a ladder. The exit status is 1 if a rung is wrong.
template <typename Body>
int ladder_main(Body body) {
    try {
        return body() ? 0 : 1;
    } catch (const UsageError& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}

// --- correctness

// Collects the errors of a rung's results one by one and checks the bounds of docs/understand/numerics.md: for all
// results together, with an allowance for sampling, and for 16-bit results also for each element.
class ErrorBound {
  public:
    // Results of `dtype` whose sums have K terms; 16-bit results have this many roundings.
    ErrorBound(DType dtype, int64_t K, int roundings = 1) : sum_bound(4 * 0x1p-24 * std::sqrt(1 + double(K) / 4096)) {
        if (dtype == DType::BF16) {
            storage_rms = 2e-3 * std::sqrt(roundings);
            storage_largest = 0x1p-8 * roundings;
        }
    }

    void add(double got, const reference::Value& ref) {
        const double e = got - ref.value, s = sum_bound * ref.mag + storage_rms * std::fabs(ref.value);
        error2 += e * e;
        s2 += s * s;
        s4 += s * s * s * s;
        largest = std::max(largest, s * s);
        if (storage_largest > 0 && !(std::fabs(e) <= (storage_largest + 8 * sum_bound) * ref.mag)) within = false;
        count++;
    }

    bool holds() const {
        const double x = std::log(1000.0);
        return count > 0 && within && error2 <= s2 + 2 * std::sqrt(x * s4) + 2 * x * largest;  // false for NaN too
    }

  private:
    double sum_bound, storage_rms = 0, storage_largest = 0;
    double error2 = 0, s2 = 0, s4 = 0, largest = 0;
    bool within = true;
    int64_t count = 0;
};

// --- the table

// The rungs of one ladder, from the slowest to the fastest.
struct LadderTable {
    struct Row {
        std::string rung;
        double ms;
        double rate;   // FLOP/s or bytes/s
        double limit;  // what the rate is compared with, measured in the same run
        bool correct;
        const char* why;
    };
    std::string title, unit, limit_name;  // "matmul fp32", "TFLOP/s", "cuBLAS"
    double unit_size = 1;
    std::vector<Row> rows;

    bool correct() const {
        return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.correct; });
    }

    void print() const {
        std::printf("%-26s %10s %10s %12s  %s\n", title.c_str(), "ms", unit.c_str(), ("of " + limit_name).c_str(),
                    "speedup over previous rung");
        for (size_t i = 0; i < rows.size(); i++) {
            const Row& row = rows[i];
            std::printf("%-26s %10.4g %10.4g %11.1f%%", row.rung.c_str(), row.ms, row.rate / unit_size,
                        100 * row.rate / row.limit);
            if (i > 0) std::printf("  %.2fx", rows[i - 1].ms / row.ms);
            std::printf("%s\n", row.correct ? "" : "  WRONG RESULT");
        }
        std::printf("\n");
    }

    // Why each rung is faster than the previous one, in lines of at most 120 characters.
    void explain() const {
        for (const Row& row : rows) {
            std::printf("%s\n", row.rung.c_str());
            std::istringstream words(row.why);
            std::string line, word;
            while (words >> word) {
                if (line.size() + 1 + word.size() > 120) {
                    std::printf("%s\n", line.c_str());
                    line.clear();
                }
                line += (line.empty() ? "" : " ") + word;
            }
            std::printf("%s\n\n", line.c_str());
        }
    }
};

inline void write_ladder_csv(const std::string& path, const std::vector<LadderTable>& tables) {
    if (path.empty()) return;
    std::ofstream file(path);
    file << "ladder,rung,ms,rate,unit,limit_name,limit,fraction,factor\n";
    for (const LadderTable& table : tables)
        for (size_t i = 0; i < table.rows.size(); i++) {
            const LadderTable::Row& row = table.rows[i];
            file << table.title << ",\"" << row.rung << "\"," << row.ms << ',' << row.rate / table.unit_size << ','
                 << table.unit << ',' << table.limit_name << ',' << row.limit / table.unit_size << ','
                 << row.rate / row.limit << ',';
            if (i > 0) file << table.rows[i - 1].ms / row.ms;
            file << '\n';
        }
    file.close();
    require(file.good(), path, ": cannot be written: ", std::strerror(errno));
}
