// Copies and sums between fp32 and bf16: exactly the fp32 sum, rounded once.
#include "kernels/accumulate.h"

#include "dev/test_util.h"

TEST(Accumulate, AddsEveryPairOfDtypes) {
    for (const DType to : {DType::F32, DType::BF16}) {
        for (const DType from : {DType::F32, DType::BF16}) {
            for (const bool add : {false, true}) {
                for (const int64_t n : {0, 1, 4, 31, 1000, 20001}) {
                    SCOPED_TRACE(str(dtype_name(from), " to ", dtype_name(to), " add ", add, " n ", n));
                    const TestArray before = TestArray::random(to, {n}, 1), inp = TestArray::random(from, {n}, 2);
                    const TestArray poisoned = TestArray::poisoned(to, {n});
                    const Tensor out = add ? before : poisoned;
                    accumulate(out, inp, add, Stream{});
                    std::vector<double> expected;
                    for (int64_t i = 0; i < n; i++) {
                        const float x = float(inp.data()[i]);
                        expected.push_back(rounded(to, double(add ? float(before.data()[i]) + x : x)));
                    }
                    expect_same_bits("out", add ? before.fetch() : poisoned.fetch(), expected);
                }
            }
        }
    }
}

TEST(Accumulate, InvalidArgumentsAreErrors) {
    const TestArray a = TestArray::random({8}, 1), b = TestArray::random({9}, 2), matrix = TestArray::random({2, 4}, 3);
    const TestArray ints = TestArray::ints(std::vector<int32_t>(8), {8});
    expect_error([&] { accumulate(a, b, true, Stream{}); }, "accumulate: inp is fp32 [9], expected fp32 [8]");
    expect_error([&] { accumulate(a, ints, true, Stream{}); },
                 "accumulate: inp is int32 [8], expected fp32 or bf16 [n]");
    expect_error([&] { accumulate(matrix, a, true, Stream{}); },
                 "accumulate: out is fp32 [2, 4], expected fp32 or bf16 [n]");
    expect_error([&] { accumulate(Tensor{}, a, true, Stream{}); }, "accumulate: out is missing");
}
