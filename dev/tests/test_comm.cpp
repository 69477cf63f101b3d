// Collectives. Started alone this is a world of one rank; dev/tests/test_comm.py starts it on 2, 3 and 4 ranks. Each
// rank knows the inputs of all ranks, so it checks its own results.
#include <time.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>

#include "dev/tests/test_util.h"
#include "runtime/communication/comm.h"
#include "runtime/device/convert_dtype.h"

namespace {

std::unique_ptr<Comm> shared;  // connects once for all tests

class Launched : public testing::Environment {
    void SetUp() override {
        LaunchOptions options;
        if (const char* const timeout = std::getenv("TEST_COMM_TIMEOUT")) options.timeout_s = std::atof(timeout);
        shared = std::make_unique<Comm>(join_world(options));
    }
    void TearDown() override { shared.reset(); }
};
const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new Launched);

Comm& comm() {
    return *shared;
}
int64_t rank() {
    return comm().rank();
}
int64_t size() {
    return comm().size();
}

// One element, fewer than ranks, an odd number; in fp32 more than MPI's transport sends in one message.
std::vector<int64_t> sizes_of(DType dtype) {
    return {1, 2, 3, 1000, dtype == DType::F32 ? 270001 : 12345};
}
const DType FLOATS[] = {DType::F32, DType::BF16, DType::F16};

std::vector<double> values_of(int64_t r, int64_t n, DType dtype = DType::F32) {
    std::vector<double> values(static_cast<size_t>(n));
    uint64_t bits = uint64_t(n) * 1000 + uint64_t(r);
    for (double& x : values) {
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        x = rounded(dtype, double(int64_t(bits) >> 32) * 0x1p-30);
    }
    return values;
}

// Expects the sum of values_of over ranks. On the CPU it is exact to the bit: summed in rank order in fp32 and rounded
// once. NCCL has its own order of summation and rounds 16-bit floats after each addition.
void expect_sum(const char* what, const std::vector<double>& got, int64_t begin, int64_t n, DType dtype) {
    std::vector<float> sum(static_cast<size_t>(n));
    std::vector<double> magnitude(static_cast<size_t>(n));
    for (int64_t r = 0; r < size(); r++) {
        const std::vector<double> x = values_of(r, n, dtype);
        for (size_t i = 0; i < x.size(); i++) {
            sum[i] = r ? sum[i] + float(x[i]) : float(x[i]);
            magnitude[i] += std::fabs(x[i]);
        }
    }
    const double unit = dtype == DType::F32 ? UNIT_ROUNDOFF : dtype == DType::BF16 ? 0x1p-8 : 0x1p-11;
    for (size_t i = 0; i < got.size(); i++) {
        const double want = rounded(dtype, sum[size_t(begin) + i]);
        const double allowed =
            backend_device() == Device::CPU ? 0 : 2 * double(size() - 1) * unit * magnitude[size_t(begin) + i];
        ASSERT_LE(std::fabs(got[i] - want), allowed)
            << what << " of " << n << " " << dtype_name(dtype) << ", element " << i << ": got " << got[i];
    }
}

std::vector<double> slice(const std::vector<double>& values, int64_t begin, int64_t n) {
    return {values.begin() + begin, values.begin() + begin + n};
}

TEST(Comm, WorldMatchesTheLauncher) {
    const World world = world_from_environment({});
    EXPECT_EQ(rank(), world.rank);
    EXPECT_EQ(size(), world.size);
    const char* const expected = std::getenv("TEST_COMM_SIZE");
    EXPECT_EQ(std::to_string(size()), expected ? expected : "1");
}

TEST(Comm, AllReduceSumsOverRanks) {
    for (const DType dtype : FLOATS) {
        for (const int64_t n : sizes_of(dtype)) {
            const TestArray x = TestArray::of(dtype, values_of(rank(), n, dtype), {n});
            comm().all_reduce(x, Stream{});
            expect_sum("all_reduce", x.fetch(), 0, n, dtype);
        }
    }
}

TEST(Comm, ReduceScatterGivesEachRankItsShard) {
    for (const DType dtype : FLOATS) {
        for (const int64_t n : sizes_of(dtype)) {
            const std::vector<double> own = values_of(rank(), n * size(), dtype);
            const TestArray inp = TestArray::of(dtype, own, {n * size()}), out = TestArray::poisoned(dtype, {n});
            comm().reduce_scatter(out, inp, Stream{});
            expect_sum("reduce_scatter", out.fetch(), rank() * n, n * size(), dtype);
            expect_same_bits("the input", inp.fetch(), own);
            // In place, with the same bits as all_reduce.
            comm().reduce_scatter(inp.tensor().rows(rank() * n, (rank() + 1) * n), inp, Stream{});
            const std::vector<double> after = inp.fetch();
            expect_same_bits("in place", slice(after, rank() * n, n), out.fetch());
            expect_same_bits("parts before", slice(after, 0, rank() * n), slice(own, 0, rank() * n));
            const int64_t end = (rank() + 1) * n;
            expect_same_bits("parts after", slice(after, end, size() * n - end), slice(own, end, size() * n - end));
            if (backend_device() != Device::CPU) continue;
            const TestArray x = TestArray::of(dtype, own, {n * size()});
            comm().all_reduce(x, Stream{});
            expect_same_bits("all_reduce", slice(x.fetch(), rank() * n, n), out.fetch());
        }
    }
}

TEST(Comm, AllGatherConcatenatesInRankOrder) {
    for (const DType dtype : FLOATS) {
        for (const int64_t n : sizes_of(dtype)) {
            std::vector<double> all;
            for (int64_t r = 0; r < size(); r++) {
                const std::vector<double> part = values_of(r, n, dtype);
                all.insert(all.end(), part.begin(), part.end());
            }
            const TestArray inp = TestArray::of(dtype, values_of(rank(), n, dtype), {n});
            const TestArray out = TestArray::poisoned(dtype, {n * size()});
            comm().all_gather(out, inp, Stream{});
            expect_same_bits("all_gather", out.fetch(), all);
            const TestArray whole = TestArray::poisoned(dtype, {n * size()});
            const Tensor part = whole.tensor().rows(rank() * n, (rank() + 1) * n);
            device_copy(part.data, inp.tensor().data, size_t(part.bytes()), Stream{});
            comm().all_gather(whole, part, Stream{});
            expect_same_bits("all_gather in place", whole.fetch(), all);
        }
    }
}

// The length of the block that rank `from` sends to rank `to`. Some blocks are empty. One is longer than MPI's
// transport sends in one message of a reduction.
int64_t block(int64_t from, int64_t to) {
    return (from + to) % 3 == 2 ? 0 : from == 0 && to == 1 ? 270001 : 7 * from + 3 * to + 1;
}

std::vector<int64_t> blocks(const std::function<int64_t(int64_t)>& of) {
    std::vector<int64_t> all;
    for (int64_t r = 0; r < size(); r++) all.push_back(of(r));
    return all;
}

TEST(Comm, AllToAllExchangesBlocksOfAnySize) {
    const std::vector<int64_t> send = blocks([](int64_t r) { return block(rank(), r); }),
                               receive = blocks([](int64_t r) { return block(r, rank()); });
    for (const DType dtype : FLOATS) {
        std::vector<double> own, expected;
        for (int64_t r = 0; r < size(); r++) {
            const std::vector<double> to = values_of(100 * rank() + r, send[size_t(r)], dtype),
                                      from = values_of(100 * r + rank(), receive[size_t(r)], dtype);
            own.insert(own.end(), to.begin(), to.end());
            expected.insert(expected.end(), from.begin(), from.end());
        }
        const TestArray inp = TestArray::of(dtype, own, {int64_t(own.size())}),
                        out = TestArray::poisoned(dtype, {int64_t(expected.size())}),
                        back = TestArray::poisoned(dtype, {int64_t(own.size())});
        comm().all_to_all(out, inp, receive, send, Stream{});
        expect_same_bits("all_to_all", out.fetch(), expected);
        comm().group_start();
        comm().all_to_all(back, out, send, receive, Stream{});
        comm().group_end();
        expect_same_bits("all_to_all back", back.fetch(), own);
        expect_same_bits("the input", out.fetch(), expected);
    }
    const TestArray none = TestArray::of(DType::F32, {}, {0});
    const std::vector<int64_t> nothing(size_t(size()), 0);
    comm().all_to_all(none, none, nothing, nothing, Stream{});
}

TEST(Comm, CollectivesOnIntegersAndBytes) {
    const TestArray x = TestArray::ints({int32_t(rank()), -1, INT32_MAX}, {3});
    comm().all_reduce(x, Stream{});
    const uint32_t ranks = uint32_t(size()), largest = uint32_t(INT32_MAX);
    EXPECT_EQ(x.fetch_ints(),
              (std::vector<int32_t>{int32_t(ranks * (ranks - 1) / 2), -int32_t(ranks), int32_t(ranks * largest)}));

    const int64_t big = (int64_t(1) << 40) + rank();
    const TestArray bytes = TestArray::bytes(&big, sizeof big);
    const Tensor y = make_tensor(bytes.tensor().data, DType::I64, backend_device(), {1});
    comm().all_reduce(y, Stream{});
    int64_t sum = 0;
    bytes.fetch_bytes(&sum);
    EXPECT_EQ(sum, (size() << 40) + size() * (size() - 1) / 2);

    const TestArray d = TestArray::doubles({1.0 / double(rank() + 3)}, {1});
    comm().all_reduce(d, Stream{});
    double reciprocals = 0;
    for (int64_t r = 0; r < size(); r++) reciprocals += 1.0 / double(r + 3);
    EXPECT_NEAR(d.fetch()[0], reciprocals, 1e-15);

    // Two-byte elements without arithmetic.
    const uint16_t own[] = {uint16_t(rank()), 0xFFFF, uint16_t(1000 + rank())};
    std::vector<uint16_t> all(size_t(3 * size()));
    const TestArray inp = TestArray::bytes(own, sizeof own), out = TestArray::scratch(6 * size());
    comm().all_gather(make_tensor(out.tensor().data, DType::U16, backend_device(), {3 * size()}),
                      make_tensor(inp.tensor().data, DType::U16, backend_device(), {3}), Stream{});
    out.fetch_bytes(all.data());
    for (int64_t r = 0; r < size(); r++) {
        EXPECT_EQ(all[size_t(3 * r)], r);
        EXPECT_EQ(all[size_t(3 * r + 1)], 0xFFFF);
        EXPECT_EQ(all[size_t(3 * r + 2)], 1000 + r);
    }
}

TEST(Comm, BroadcastFromEachRoot) {
    for (int64_t root = 0; root < size(); root++) {
        for (const int64_t n : sizes_of(DType::F32)) {
            const TestArray x = TestArray::of(DType::F32, values_of(rank(), n), {n});
            comm().broadcast(x, root, Stream{});
            expect_same_bits("broadcast", x.fetch(), values_of(root, n));
        }
    }
}

TEST(Comm, ResultDoesNotDependOnShape) {
    const TestArray x = TestArray::of(DType::F32, values_of(rank(), 24), {2, 3, 4});
    comm().all_reduce(x, Stream{});
    expect_sum("all_reduce", x.fetch(), 0, 24, DType::F32);
    const TestArray none = TestArray::of(DType::F32, {}, {0});
    comm().all_reduce(none, Stream{});
    comm().all_gather(none, none, Stream{});
    comm().reduce_scatter(none, none, Stream{});
    comm().broadcast(none, 0, Stream{});
}

TEST(Comm, GroupedCallsInGraphs) {
    const int64_t n = 1000;
    const std::vector<double> own = values_of(rank(), n * size());
    const TestArray inp = TestArray::of(DType::F32, own, {n * size()}), part = TestArray::poisoned({n}),
                    whole = TestArray::poisoned({n * size()}), sum = TestArray::poisoned({n * size()});
    const Stream stream = create_stream();
    Graph graph;
    for (int run = 0; run < 3; run++) {
        graph.run(stream, [&] {
            device_copy(sum.tensor().data, inp.tensor().data, size_t(inp.tensor().bytes()), stream);
            comm().group_start();
            comm().reduce_scatter(part, inp, stream);
            comm().all_reduce(sum, stream);
            comm().group_end();
            comm().all_gather(whole, part, stream);
        });
        comm().watch(str("run ", run), stream);
        synchronize(stream);
        comm().check();
        expect_sum("all_reduce", sum.fetch(), 0, n * size(), DType::F32);
        expect_sum("reduce_scatter and all_gather", whole.fetch(), 0, n * size(), DType::F32);
        device_fill(whole.tensor().data, 0xFF, size_t(whole.tensor().bytes()), stream);
        device_fill(sum.tensor().data, 0xFF, size_t(sum.tensor().bytes()), stream);
        synchronize(stream);
    }
    destroy_stream(stream);
}

TEST(Comm, AllReduceIsDeterministic) {
    const int64_t n = 100003;
    const auto sum = [&] {
        const TestArray x = TestArray::of(DType::F32, values_of(rank(), n), {n});
        comm().all_reduce(x, Stream{});
        return x.fetch();
    };
    const std::vector<double> first = sum();
    expect_same_bits("all_reduce", first, sum());
    // The bits are the same on every rank.
    uint64_t hash = 0;
    for (const double x : first) {
        uint64_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        hash = hash * 31 + bits;
    }
    for (const uint64_t other : comm().all_gather_host(hash)) EXPECT_EQ(other, hash);
}

TEST(Comm, HostCollectives) {
    struct Choice {
        int64_t rank;
        double norm;
        char name[7];
    };
    Choice own{rank(), 0.5 * double(rank()), "rank"};
    own.name[4] = char('0' + rank());
    const std::vector<Choice> all = comm().all_gather_host(own);
    for (int64_t r = 0; r < size(); r++) {
        EXPECT_EQ(all[size_t(r)].rank, r);
        EXPECT_EQ(all[size_t(r)].norm, 0.5 * double(r));
        EXPECT_EQ(all[size_t(r)].name[4], char('0' + r));
    }
    for (int64_t root = 0; root < size(); root++) {
        std::string text = rank() == root ? std::string(size_t(root) * 100000, 'x') + "end" : "something else";
        comm().broadcast_host(text, root);
        EXPECT_EQ(text.size(), size_t(root) * 100000 + 3);
        EXPECT_EQ(text.substr(text.size() - 3), "end");
        std::string empty = rank() == root ? "" : "not empty";
        comm().broadcast_host(empty, root);
        EXPECT_EQ(empty, "");
        bool stop = rank() == root;
        comm().broadcast_host(stop, root);
        EXPECT_TRUE(stop);
    }
}

TEST(Comm, BarrierWaitsForAllRanks) {
    const auto now = [] {  // the same clock in all processes of a machine
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    };
    for (int64_t last = 0; last < size(); last++) {
        if (rank() == last) usleep(20000);
        const double entered = now();
        comm().barrier();
        const double left = now();
        for (const double other : comm().all_gather_host(entered)) EXPECT_LE(other, left);
    }
}

TEST(Comm, InvalidArgumentsAreErrors) {
    const std::string who = size() > 1 ? str("rank ", rank(), ": ") : "";
    const Tensor x = make_tensor(device_alloc(4096), DType::F32, backend_device(), {8 * size()});
    const Tensor part = x.rows(0, 8), half = x.rows(0, 4);
    const std::string of = str(" is not 1/", size(), " of ");
    expect_error(
        [&] {
            comm().all_reduce(Tensor{nullptr, DType::F32, backend_device(), 1, {4}, {1}}, Stream{});
        },
        who + "all_reduce: x is not given");
    Tensor gaps = x;
    gaps.shape[0] = 4;
    gaps.stride[0] = 2;
    expect_error([&] { comm().all_reduce(gaps, Stream{}); }, who + "all_reduce: x [4] is not contiguous");
    Tensor elsewhere = x;
    elsewhere.device = backend_device() == Device::CPU ? Device::CUDA : Device::CPU;
    expect_error([&] { comm().broadcast(elsewhere, 0, Stream{}); },
                 who + str("broadcast: x is not in the memory of the ", backend_name(), " backend"));
    expect_error([&] { comm().broadcast(x, size(), Stream{}); },
                 who + str("broadcast: root ", size(), " is outside a world of ", size()));
    Tensor bytes = x;
    bytes.dtype = DType::U8;
    expect_error([&] { comm().all_reduce(bytes, Stream{}); }, who + "all_reduce: x holds uint8, which is not summed");
    expect_error([&] { comm().reduce_scatter(half, x, Stream{}); },
                 who + "reduce_scatter: out [4] of fp32" + of + "inp " + shape_string(x) + " of fp32");
    Tensor ints = part;
    ints.dtype = DType::I32;
    expect_error([&] { comm().all_gather(x, ints, Stream{}); },
                 who + "all_gather: inp [8] of int32" + of + "out " + shape_string(x) + " of fp32");
    if (size() > 1) {
        const int64_t wrong = (rank() + 1) % size();
        expect_error([&] { comm().all_gather(x, x.rows(8 * wrong, 8 * wrong + 8), Stream{}); },
                     who + str("all_gather: inp overlaps out elsewhere than at rank ", rank(), "'s part"));
        Tensor shifted = x.rows(8 * rank(), 8 * rank() + 8);
        shifted.data = static_cast<char*>(shifted.data) + (rank() ? -4 : 4);
        expect_error([&] { comm().reduce_scatter(shifted, x, Stream{}); },
                     who + str("reduce_scatter: out overlaps inp elsewhere than at rank ", rank(), "'s part"));
    }
    std::vector<int64_t> few(size_t(size()), 0), negative = few, all = few;
    few[0] = 4;
    negative[0] = -1;
    all[size_t(rank())] = 8;
    const auto made_of = [&](int64_t given, int64_t elements) {
        return str(" is not made of the ", given, " given blocks, ", elements, " elements for ", size(), " ranks");
    };
    expect_error([&] { comm().all_to_all(part, part, few, all, Stream{}); },
                 who + "all_to_all: out [8]" + made_of(size(), 4));
    expect_error([&] { comm().all_to_all(part, part, all, negative, Stream{}); },
                 who + "all_to_all: inp [8]" + made_of(size(), -1));
    expect_error([&] { comm().all_to_all(part, part, {}, all, Stream{}); },
                 who + "all_to_all: out [8]" + made_of(0, 0));
    expect_error([&] { comm().all_to_all(part, ints, all, all, Stream{}); },
                 who + "all_to_all: inp sends itself 8 int32, but out receives 8 fp32");
    expect_error([&] { comm().all_to_all(part, part, all, all, Stream{}); }, who + "all_to_all: out overlaps inp");
    device_free(x.data);
}

// dev/tests/test_comm.py runs these by name. Rank 0 must end with a one-line error within the timeout.
TEST(Comm, DISABLED_OneRankHangs) {
    if (rank() == size() - 1) sleep(60);
    const TestArray x = TestArray::of(DType::F32, values_of(rank(), 1000), {1000});
    comm().all_reduce(x, Stream{});
    synchronize(Stream{});
    comm().check();
}

TEST(Comm, DISABLED_OneRankDies) {
    if (rank() == size() - 1) _exit(3);
    for (;;) {
        comm().barrier();
        const TestArray x = TestArray::of(DType::F32, values_of(rank(), 1000), {1000});
        comm().all_reduce(x, Stream{});
        synchronize(Stream{});
        comm().check();
    }
}

TEST(Comm, SecondCommunicator) {
    Comm alone;
    EXPECT_EQ(alone.size(), 1);
    alone.barrier();
    if (size() > 1 && backend_device() == Device::CPU)
        expect_error([] { Comm again(world_from_environment({})); },
                     "Comm: a process can connect through MPI only once");
}

}  // namespace
