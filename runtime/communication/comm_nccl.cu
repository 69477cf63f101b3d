// Comm's transport through NCCL, for the CUDA build.
//
// The ranks meet over the hosts' own connection (runtime/communication/control.h), which also carries what the hosts
// say to each other. NCCL's communicator is an ordinary one, whose calls may wait for the peers: a non-blocking one
// starts a thread for each call, which costs 50 us (measured, H200).
//
// A watchdog thread asks, ten times a second, whether a peer has ended, NCCL has met an error, or a call or the work
// that it queued has gone on for too long. Then it aborts the communicator, so that kernels that wait for a peer
// return, and with them a host that waits for the GPU: what they computed is worthless, and the next call of Comm
// throws.
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

#include "runtime/communication/comm.h"
#include "runtime/communication/control.h"
#include "runtime/communication/transport.h"
#include "runtime/device/cuda_check.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto WATCH_INTERVAL = std::chrono::milliseconds(100);
// A rank that ends by an error of its own should be the first to say so.
constexpr auto COURTESY = std::chrono::milliseconds(500);
// How long a host may take to notice that the communicator was aborted.
constexpr auto GRACE = std::chrono::seconds(30);
// How long a rank that ends by an error waits for NCCL to let go: a thread that is inside it must not meet the end of
// the process.
constexpr auto PARTING = std::chrono::seconds(10);

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
        connect_gpus(int(world.size), id);
        watchdog = std::thread([this] { watch_over(); });
    }

    ~NcclTransport() override {
        if (!finished) {
            part();
            abort_ended.wait_for(PARTING);  // as a rule at once: where a Graph held operations, it is gone
        }
        for (const Watched& w : watched) cudaEventDestroy(w.event);
        for (const cudaEvent_t event : spare) cudaEventDestroy(event);
    }

    void finish() override {
        check();
        ending = true;  // from here on a peer may have ended
        control.barrier();
        stop_watchdog();
        ncclCommDestroy(comm);
        finished = true;
    }

    void part() override {
        stop_watchdog();
        abort();
    }

    void all_reduce(void* x, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue({"all_reduce", n, dtype}, stream,
              [&] { return ncclAllReduce(x, x, e.count, e.type, ncclSum, comm, cuda_stream(stream)); });
    }

    void reduce_scatter(void* out, const void* inp, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue({"reduce_scatter", n, dtype}, stream,
              [&] { return ncclReduceScatter(inp, out, e.count, e.type, ncclSum, comm, cuda_stream(stream)); });
    }

    void all_gather(void* out, const void* inp, int64_t n, DType dtype, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue({"all_gather", n, dtype}, stream,
              [&] { return ncclAllGather(inp, out, e.count, e.type, comm, cuda_stream(stream)); });
    }

    void broadcast(void* x, int64_t n, DType dtype, int64_t root, Stream stream) override {
        const Elements e = elements(dtype, n);
        queue({"broadcast", n, dtype}, stream,
              [&] { return ncclBroadcast(x, x, e.count, e.type, int(root), comm, cuda_stream(stream)); });
    }

    void group_start() override {
        if (group_depth++ == 0) call({nullptr, 0, DType::F32, "group_start"}, [] { return ncclGroupStart(); });
    }

    void group_end() override {
        if (--group_depth > 0) return;
        call(group_what, [] { return ncclGroupEnd(); });
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

    void watch(const std::string& what, Stream stream) override { watch(What{nullptr, 0, DType::F32, what}, stream); }

  private:
    // What is made text of only when it is told: operations are many, and their calls short.
    struct What {
        const char* op = nullptr;
        int64_t n = 0;
        DType dtype = DType::F32;
        std::string other = {};  // instead

        explicit operator bool() const { return op || !other.empty(); }
        std::string text() const { return op ? str(op, " of ", n, " ", dtype_name(dtype)) : other; }
    };
    // Work on a stream, done when the event is reached.
    struct Watched {
        cudaEvent_t event;
        What what;
    };

    void watch(const What& what, Stream stream) {
        check();
        cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
        cuda_check(cudaStreamIsCapturing(cuda_stream(stream), &recording), "Comm");
        if (recording != cudaStreamCaptureStatusNone) return;  // it runs later
        const std::lock_guard<std::mutex> lock(state);
        if (spare.empty()) take_off_finished();  // as a rule the watchdog does it
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

    // On a thread of its own, because NCCL waits for all ranks and knows no time-out. If it is given up the thread ends
    // with the process.
    void connect_gpus(int ranks, const ncclUniqueId& id) {
        const auto handle = std::make_shared<ncclComm_t>();
        std::packaged_task<ncclResult_t()> task([handle, ranks, id, own = int(rank), on = device] {
            cudaSetDevice(on);
            return ncclCommInitRank(handle.get(), ranks, id, own);
        });
        std::future<ncclResult_t> result = task.get_future();
        std::thread(std::move(task)).detach();
        const auto start = Clock::now();
        while (result.wait_for(WATCH_INTERVAL) != std::future_status::ready) {
            const std::string trouble = control.trouble();
            if (!trouble.empty()) control.tell(trouble);
            require(trouble.empty(), "rank ", rank, ": ncclCommInitRank: ", trouble);
            require(seconds_since(start) < timeout_s, "rank ", rank, ": ncclCommInitRank: not done within ", timeout_s,
                    " s (--comm-timeout); do the machines reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)?");
        }
        const ncclResult_t status = result.get();
        require(status == ncclSuccess, "rank ", rank, ": ncclCommInitRank: ", nccl_says(status));
        comm = *handle;
    }

    static double seconds_since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }

    // Calls NCCL, which may wait for peers, or for room in a queue; the watchdog sees for how long.
    template <typename Call>
    void call(const What& what, Call nccl) {
        check();
        {
            const std::lock_guard<std::mutex> lock(state);
            calling = what;
            call_start = Clock::now();
        }
        ncclResult_t status = ncclSuccess;
        {
            const std::lock_guard<std::timed_mutex> lock(calls);
            if (!aborted) status = nccl();
        }
        {
            const std::lock_guard<std::mutex> lock(state);
            calling = {};
        }
        check();
        if (status == ncclSuccess) return;
        const std::string line = str("rank ", rank, ": ", what.text(), ": ", nccl_says(status));
        declare(line);
        throw Error(line);
    }

    template <typename Call>
    void queue(const What& what, Stream stream, Call nccl) {
        call(what, nccl);
        if (group_depth == 0) return watch(what, stream);
        group_what = what;
        if (group_streams.empty() || group_streams.back().handle != stream.handle) group_streams.push_back(stream);
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
            std::this_thread::sleep_for(COURTESY);
            declare(error.what());
            check();
        }
    }

    // From now on every call throws this.
    void declare(const std::string& line) {
        const std::lock_guard<std::mutex> lock(state);
        if (failure.empty()) failure = line;
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
        const std::string what = calling ? calling.text() : watched.empty() ? "" : watched.front().what.text();
        const std::string who = str("rank ", rank, ": ", what, what.empty() ? "" : ": ");
        // First, because it asks nothing of the driver, which may be stuck.
        const std::string trouble = ending ? "" : control.trouble();
        if (!trouble.empty()) {
            control.tell(trouble);
            return who + trouble;
        }
        take_off_finished();
        if ((calling && seconds_since(call_start) > timeout_s) ||
            (!watched.empty() && seconds_since(progress) > timeout_s))
            return str(who, "not done within ", timeout_s,
                       " s (--comm-timeout); another rank hangs, or the time is too short");
        ncclResult_t status = ncclSuccess;
        const std::unique_lock<std::timed_mutex> idle(calls, std::try_to_lock);
        if (idle && !aborted) ncclCommGetAsyncError(comm, &status);
        return status == ncclSuccess || status == ncclInProgress ? "" : who + nccl_says(status);
    }

    void watch_over() {
        cudaSetDevice(device);
        std::unique_lock<std::mutex> lock(stopping);
        std::string line;
        while (line.empty()) {
            if (stop_sign.wait_for(lock, WATCH_INTERVAL, [&] { return stop; })) return;
            line = look();
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

    const int64_t rank;
    const double timeout_s;
    ControlChannel control;
    int device = 0;
    ncclComm_t comm = nullptr;

    int group_depth = 0;
    What group_what;
    std::vector<Stream> group_streams;

    std::timed_mutex calls;  // of the communicator
    std::future<void> abort_ended;
    std::atomic<bool> aborted{false}, ending{false}, noticed{false};
    bool finished = false;

    std::mutex state;  // of what follows
    std::string failure;
    What calling;  // the call of NCCL that the main thread is in
    Clock::time_point call_start;
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

// Measured with two ranks on a host (NCCL 2.28.9, H200): what a run uses beyond its plan without this line.
int64_t comm_overhead_bytes() {
    return int64_t(840) << 20;
}

std::unique_ptr<Transport> connect(const World& world) {
    return std::make_unique<NcclTransport>(world);
}
