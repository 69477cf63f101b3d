// Bus bandwidth of the collectives between the GPUs of this machine, compared with a plain loop of NCCL calls in the
// same run. Rank 0 prints one line for each operation and size.
//
//     build/cuda/dev/bench_comm              one process on each GPU here
//     torchrun --nproc-per-node 2 --no-python build/cuda/dev/bench_comm
//
// Bus bandwidth is the least that each GPU must send, divided by the time: 2·(n−1)/n of the tensor for all_reduce,
// (n−1)/n for reduce_scatter and all_gather. So it compares with the links' bandwidth for any number of GPUs.
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "runtime/communication/comm.h"
#include "runtime/device/cuda_check.h"

namespace {

// A blocking NCCL communicator.
class BareNccl {
  public:
    explicit BareNccl(Comm& comm) {
        ncclUniqueId id;
        if (comm.rank() == 0) check(ncclGetUniqueId(&id));
        comm.broadcast_host(id, 0);
        check(ncclCommInitRank(&handle, int(comm.size()), id, int(comm.rank())));
    }
    ~BareNccl() { ncclCommDestroy(handle); }
    BareNccl(const BareNccl&) = delete;
    BareNccl& operator=(const BareNccl&) = delete;
    static void check(ncclResult_t status) {
        require(status == ncclSuccess, "bench_comm: NCCL: ", ncclGetErrorString(status));
    }
    ncclComm_t handle = nullptr;
};

// The time of one call, averaged over a queue of calls, on the slowest rank.
double seconds(Comm& comm, Stream stream, int calls, const std::function<void()>& call) {
    Event start, end;
    comm.barrier();
    start.record(stream);
    for (int i = 0; i < calls; i++) call();
    end.record(stream);
    end.wait();
    double slowest = 0;
    for (const double s : comm.all_gather_host(elapsed_ms(start, end) * 1e-3 / calls)) slowest = std::max(slowest, s);
    return slowest;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void run(const World& world) {
    const Stream stream = create_stream();
    const int64_t before = device_bytes_in_use();
    Comm comm(world);
    const int64_t most = int64_t(1) << 30, n = comm.size();
    const std::shared_ptr<void> memory(device_alloc(size_t(most)), device_free);
    device_fill(memory.get(), 0, size_t(most), stream);
    char* const data = static_cast<char*>(memory.get());
    const cudaStream_t cuda = cuda_stream(stream);
    const bool prints = comm.rank() == 0;
    // The communicator allocates its buffers in the first calls.
    const int64_t connected = device_bytes_in_use();
    for (const int64_t bytes : {int64_t(1) << 10, int64_t(1) << 20, most}) {
        const Tensor whole = make_tensor(data, DType::F32, Device::CUDA, {bytes / 4 / n * n});
        const Tensor part = whole.rows(comm.rank() * (bytes / 4 / n), (comm.rank() + 1) * (bytes / 4 / n));
        comm.all_reduce(whole, stream);
        comm.reduce_scatter(part, whole, stream);
        comm.all_gather(whole, part, stream);
    }
    synchronize(stream);
    const int64_t used = device_bytes_in_use();
    BareNccl bare(comm);
    if (prints) {
        std::printf("%lld x %s, %s, fp32, GiB/s of the bus (time of one call)\n", (long long)n, device_name().c_str(),
                    comm_library().c_str());
        std::printf("%-15s %6s  %-22s  %-22s  %s\n", "operation", "MiB", "Comm", "NCCL", "Comm/NCCL");
    }
    for (const char* const op : {"all_reduce", "reduce_scatter", "all_gather"}) {
        for (int64_t bytes = int64_t(1) << 20; bytes <= most; bytes *= bytes < (int64_t(1) << 28) ? 4 : 2) {
            const int64_t count = bytes / 4 / n;  // per rank
            const Tensor whole = make_tensor(data, DType::F32, Device::CUDA, {count * n});
            const Tensor part = whole.rows(comm.rank() * count, (comm.rank() + 1) * count);
            const std::string name = op;
            const std::function<void()> ours = [&] {
                if (name == "all_reduce")
                    comm.all_reduce(whole, stream);
                else if (name == "reduce_scatter")
                    comm.reduce_scatter(part, whole, stream);
                else
                    comm.all_gather(whole, part, stream);
            };
            const std::function<void()> theirs = [&] {
                if (name == "all_reduce")
                    BareNccl::check(
                        ncclAllReduce(data, data, size_t(count * n), ncclFloat, ncclSum, bare.handle, cuda));
                else if (name == "reduce_scatter")
                    BareNccl::check(
                        ncclReduceScatter(data, part.data, size_t(count), ncclFloat, ncclSum, bare.handle, cuda));
                else
                    BareNccl::check(ncclAllGather(part.data, data, size_t(count), ncclFloat, bare.handle, cuda));
            };
            // About 4 GiB of tensors, so that each measurement stays short.
            const int calls = int(std::clamp<int64_t>((int64_t(4) << 30) / bytes, 8, 200));
            seconds(comm, stream, 5, ours);
            seconds(comm, stream, 5, theirs);
            std::vector<double> a, b;
            for (int round = 0; round < 5; round++) {
                a.push_back(seconds(comm, stream, calls, ours));
                b.push_back(seconds(comm, stream, calls, theirs));
            }
            const double sent = double(count * 4 * (n - 1)) * (name == "all_reduce" ? 2 : 1) / double(1 << 30);
            const double x = median(a), y = median(b);
            if (prints)
                std::printf("%-15s %6lld  %7.1f (%9.1f us)  %7.1f (%9.1f us)  %.3f\n", op, (long long)(bytes >> 20),
                            sent / x, x * 1e6, sent / y, y * 1e6, y / x);
        }
    }
    if (prints)
        std::printf("memory of the communicator: %.0f MiB when connected, %.0f MiB after use\n",
                    double(connected - most - before) / (1 << 20), double(used - most - before) / (1 << 20));
    destroy_stream(stream);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        LaunchOptions options;
        options.gpus = "all";
        if (const int64_t ranks = ranks_to_start(options)) {
            run_ranks(ranks, std::vector<std::string>(argv + 1, argv + argc));
            return 0;
        }
        const World world = join_world(options);
        if (world.size == 1) {
            std::printf("bench_comm: nothing to measure with one GPU; run it where there are two or more\n");
            return 0;
        }
        run(world);
        return 0;
    } catch (const RanksFailed& failure) {
        return failure.status;
    } catch (const Error& error) {
        std::fprintf(stderr, "bench_comm: %s\n", error.what());
        return 1;
    }
}
