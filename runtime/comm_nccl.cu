// Comm's transport through NCCL, for the CUDA build.
//
// The ranks meet over the hosts' own connection (runtime/control.h), which also carries what the hosts say to each
// other. NCCL's communicator is a non-blocking one: its calls return at once, and we ask until they are done.
//
// A watchdog thread asks, ten times a second, whether a peer has ended, NCCL has met an error, or watched work has gone
// on for too long. Then it aborts the communicator, so that kernels that wait for a peer return, and with them a host
// that waits for the GPU: what they computed is worthless, and the next call of Comm throws.
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/comm.h"
#include "runtime/control.h"
#include "runtime/cuda_check.h"
#include "runtime/transport.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto WATCH_INTERVAL = std::chrono::milliseconds(100);
// A rank that ends by an error of its own should be the first to say so.
constexpr auto COURTESY = std::chrono::milliseconds(500);
// How long a host may take to notice that the communicator was aborted.
constexpr auto GRACE = std::chrono::seconds(30);

std::string nccl_version() {
    int version = 0;
    ncclGetVersion(&version);  // 22803: 2.28.3
    return str("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// Elements of each dtype as NCCL knows them; where nothing is added, those it doesn't know travel as bytes.
struct Elements {
    ncclDataType_t type;
    size_t count;
};
Elements elements(DType dtype, int64_t n) {
    switch (dtype) {
        case DType::F32:
            return {ncclFloat32, size_t(n)};
        case DType::F64:
            return {ncclFloat64, size_t(n)};
        case DType::BF16:
            return {ncclBfloat16, size_t(n)};
        case DType::F16:
            return {ncclFloat16, size_t(n)};
        case DType::I32:
            return {ncclInt32, size_t(n)};
        case DType::I64:
            return {ncclInt64, size_t(n)};
        case DType::U16:
        case DType::U8:
            break;
    }
    return {ncclUint8, size_t(n * dtype_size(dtype))};
}

Member own_member() {
    int device = 0;
    cuda_check(cudaGetDevice(&device), "Comm");
    cudaDeviceProp p;
    cuda_check(cudaGetDeviceProperties(&p, device), "Comm");
    std::string id = "GPU-";
    for (const char byte : p.uuid.bytes) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", unsigned(uint8_t(byte)));
        id += hex;
    }
    return {p.name, id, nccl_version()};
}

class NcclTransport : public Transport {
  public:
    explicit NcclTransport(const World& world)
        : rank(world.rank), timeout_s(world.timeout_s), control(world, own_member()) {
        cuda_check(cudaGetDevice(&device), "Comm");
        ncclUniqueId id;
        if (rank == 0) {
            const ncclResult_t status = ncclGetUniqueId(&id);
            require(status == ncclSuccess, "rank 0: ncclGetUniqueId: ", nccl_says(status));
        }
        control.broadcast(&id, sizeof id, 0);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        const ncclResult_t status = ncclCommInitRankConfig(&comm, int(world.size), id, int(rank), &config);
        require(going_on(status), "rank ", rank, ": ncclCommInitRank: ", nccl_says(status));
        watchdog = std::thread([this] { watch_over(); });
        try {
            settle("ncclCommInitRank", status);
        } catch (...) {
            part();
            throw;
        }
    }

    ~NcclTransport() override {
        if (!finished) part();
        for (const Watched& w : watched) cudaEventDestroy(w.event);
        for (const cudaEvent_t event : spare) cudaEventDestroy(event);
    }

    void finish() override {
        check();
        ending = true;  // from here on a peer may have ended
        control.barrier();
        stop_watchdog();
        settle("ncclCommFinalize", ncclCommFinalize(comm));
        ncclCommDestroy(comm);
        finished = true;
    }

    void all_reduce(void* x, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue(describe("all_reduce", n, dtype), stream,
              [&] { return ncclAllReduce(x, x, e.count, e.type, ncclSum, comm, cuda_stream(stream)); });
    }

    void reduce_scatter(void* out, const void* inp, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue(describe("reduce_scatter", n, dtype), stream,
              [&] { return ncclReduceScatter(inp, out, e.count, e.type, ncclSum, comm, cuda_stream(stream)); });
    }

    void all_gather(void* out, const void* inp, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue(describe("all_gather", n, dtype), stream,
              [&] { return ncclAllGather(inp, out, e.count, e.type, comm, cuda_stream(stream)); });
    }

    void broadcast(void* x, int64_t n, DType dtype, int64_t root, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue(describe("broadcast", n, dtype), stream,
              [&] { return ncclBroadcast(x, x, e.count, e.type, int(root), comm, cuda_stream(stream)); });
    }

    void group_start() override {
        check();
        if (group_depth++ == 0) settle("group_start", ncclGroupStart());
    }

    void group_end() override {
        if (--group_depth > 0) return;
        ncclResult_t status = ncclSuccess;
        {
            const std::lock_guard<std::timed_mutex> lock(calls);
            if (!aborted) status = ncclGroupEnd();
        }
        settle(group_what, status);
        for (const Stream stream : group_streams) watch(group_what, stream);
        group_streams.clear();
    }

    void barrier() override {
        hosts([&] { control.barrier(); });
    }
    void broadcast_host(void* bytes, size_t n, int64_t root) override {
        hosts([&] { control.broadcast(bytes, n, root); });
    }
    void all_gather_host(void* all, const void* own, size_t n) override {
        hosts([&] { control.all_gather(all, own, n); });
    }

    void check() override {
        const std::lock_guard<std::mutex> lock(state);
        if (failure.empty()) return;
        noticed = true;
        throw Error(failure);
    }

    void watch(const std::string& what, Stream stream) override {
        check();
        cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
        cuda_check(cudaStreamIsCapturing(cuda_stream(stream), &recording), "Comm");
        if (recording != cudaStreamCaptureStatusNone) return;  // it runs later
        const std::lock_guard<std::mutex> lock(state);
        take_off_finished();
        cudaEvent_t event = nullptr;
        if (spare.empty()) {
            cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "Comm");
        } else {
            event = spare.back();
            spare.pop_back();
        }
        cuda_check(cudaEventRecord(event, cuda_stream(stream)), "Comm");
        if (watched.empty()) progress = Clock::now();
        watched.push_back({event, what});
    }

  private:
    // Work on a stream, done when the event is reached.
    struct Watched {
        cudaEvent_t event;
        std::string what;
    };

    std::string describe(const char* op, int64_t n, DType dtype) const {
        return str(op, " of ", n, " ", dtype_name(dtype));
    }

    static bool going_on(ncclResult_t status) { return status == ncclSuccess || status == ncclInProgress; }

    // patience: how long another thread may be inside a call of NCCL, which takes one at a time.
    ncclResult_t asynchronous_error(std::chrono::milliseconds patience) {
        const std::unique_lock<std::timed_mutex> lock(calls, patience);
        ncclResult_t status = ncclInProgress;
        if (lock && !aborted) ncclCommGetAsyncError(comm, &status);
        return status;
    }

    template <typename Call>
    void queue(const std::string& what, Stream stream, Call call) {
        check();
        ncclResult_t status = ncclSuccess;
        {
            const std::lock_guard<std::timed_mutex> lock(calls);
            if (!aborted) status = call();
        }
        if (group_depth > 0) {
            if (!going_on(status)) fail(what, nccl_says(status));
            group_what = what;
            if (group_streams.empty() || group_streams.back().handle != stream.handle) group_streams.push_back(stream);
            return;
        }
        settle(what, status);
        watch(what, stream);
    }

    // Until NCCL has done what was asked for on the host's side: usually at once.
    void settle(const std::string& what, ncclResult_t status) {
        const auto start = Clock::now();
        const auto until =
            start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
        while (status == ncclInProgress) {
            check();
            status = asynchronous_error(WATCH_INTERVAL);
            const auto now = Clock::now();
            if (status == ncclInProgress && now > until)
                fail(what, str("no answer from the other ranks within ", timeout_s,
                               " s (--comm-timeout); one of them has ended or hangs"));
            if (now - start > std::chrono::milliseconds(1)) std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        check();
        if (status != ncclSuccess) fail(what, nccl_says(status));
    }

    static std::string nccl_says(ncclResult_t status) {
        const char* const detail = ncclGetLastError(nullptr);
        return str(ncclGetErrorString(status), detail && *detail ? str(": ", detail) : "",
                   " (NCCL_DEBUG=WARN tells more)");
    }

    template <typename Work>
    void hosts(Work work) {
        check();
        try {
            work();
        } catch (const Error& error) {
            declare(error.what());
            check();
        }
    }

    // From now on every call throws this.
    void declare(const std::string& line) {
        const std::lock_guard<std::mutex> lock(state);
        if (failure.empty()) failure = line;
    }

    [[noreturn]] void fail(const std::string& what, const std::string& why) {
        declare(str("rank ", rank, ": ", what, ": ", why));
        check();
        throw Error(failure);
    }

    // state is locked.
    void take_off_finished() {
        while (!watched.empty() && cudaEventQuery(watched.front().event) != cudaErrorNotReady) {
            spare.push_back(watched.front().event);
            watched.pop_front();
            progress = Clock::now();
        }
    }

    // What is wrong now, and with what; empty: nothing.
    std::string look() {
        const std::lock_guard<std::mutex> lock(state);
        if (!failure.empty()) return failure;
        take_off_finished();
        const std::string what = watched.empty() ? "" : watched.front().what + ": ";
        const std::string trouble = ending ? "" : control.trouble();
        if (!trouble.empty()) {
            control.tell(trouble);
            return str("rank ", rank, ": ", what, trouble);
        }
        if (!watched.empty() && std::chrono::duration<double>(Clock::now() - progress).count() > timeout_s)
            return str("rank ", rank, ": ", what, "not done within ", timeout_s,
                       " s (--comm-timeout); another rank hangs, or the time is too short");
        return "";
    }

    void watch_over() {
        cudaSetDevice(device);
        std::unique_lock<std::mutex> lock(stopping);
        std::string line;
        while (line.empty()) {
            if (stop_sign.wait_for(lock, WATCH_INTERVAL, [&] { return stop; })) return;
            line = look();
            if (!line.empty()) continue;
            const ncclResult_t status = asynchronous_error(std::chrono::milliseconds(0));
            if (!going_on(status)) line = str("rank ", rank, ": ", nccl_says(status));
        }
        if (stop_sign.wait_for(lock, COURTESY, [&] { return stop; })) return;
        declare(line);
        abort();
        // The main thread reports it, unless it is stuck in a call of the driver that never returns.
        if (stop_sign.wait_for(lock, GRACE, [&] { return stop; }) || noticed) return;
        std::fprintf(stderr, "train_gpt: %s\n", line.c_str());
        _exit(1);
    }

    // Kernels that wait for a peer return. NCCL takes this from any thread, also while another is stuck inside a call.
    // It may hang in its turn, so it has a thread of its own.
    void abort() {
        {
            const std::unique_lock<std::timed_mutex> lock(calls, std::chrono::seconds(1));
            if (aborted.exchange(true)) return;
        }
        std::packaged_task<void()> task([handle = comm, on = device] {
            cudaSetDevice(on);
            ncclCommAbort(handle);
        });
        abort_ended = task.get_future();
        std::thread(std::move(task)).detach();
    }

    void stop_watchdog() {
        {
            const std::lock_guard<std::mutex> lock(stopping);
            stop = true;
        }
        stop_sign.notify_all();
        if (watchdog.joinable()) watchdog.join();
    }

    // Without the others: an error has come up. They notice when the process ends, and with it the connections.
    void part() {
        stop_watchdog();
        abort();
        abort_ended.wait_for(std::chrono::seconds(10));
    }

    const int64_t rank;
    const double timeout_s;
    ControlChannel control;
    int device = 0;
    ncclComm_t comm = nullptr;

    int group_depth = 0;
    std::string group_what;
    std::vector<Stream> group_streams;

    std::timed_mutex calls;  // of the communicator
    std::future<void> abort_ended;
    std::atomic<bool> aborted{false}, ending{false}, noticed{false};
    bool finished = false;

    std::mutex state;  // of what follows
    std::string failure;
    std::deque<Watched> watched;
    std::vector<cudaEvent_t> spare;
    Clock::time_point progress;  // when the first of them became the first

    std::mutex stopping;
    std::condition_variable stop_sign;
    bool stop = false;
    std::thread watchdog;
};

}  // namespace

std::string comm_library() {
    return nccl_version();
}

std::unique_ptr<Transport> connect(const World& world) {
    return std::make_unique<NcclTransport>(world);
}
