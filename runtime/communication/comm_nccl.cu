// Comm's transport through NCCL, for the CUDA build.
//
// The ranks connect over the control channel (runtime/communication/control.h), which also carries host data. The NCCL
// communicator is a blocking one: a non-blocking communicator starts a thread for each call, which costs 50 us
// (measured, H200).
//
// A watchdog thread checks ten times a second whether a peer has ended, NCCL reports an error, or a call or the work
// that it queued exceeds the time-out. Then it aborts the communicator: kernels that wait for a peer return, and so
// does a host that waits for the GPU. Their results are invalid, and the next call of Comm throws.
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "runtime/communication/comm.h"
#include "runtime/communication/control.h"
#include "runtime/communication/transport.h"
#include "runtime/device/cuda_check.h"
#include "runtime/timing.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto WATCH_INTERVAL = std::chrono::milliseconds(100);
// A rank that fails with an error of its own should print it first; the others wait this long before they report it.
constexpr auto REPORT_DELAY = std::chrono::milliseconds(500);
// How long the main thread may take to notice that the communicator was aborted.
constexpr auto NOTICE_TIMEOUT = std::chrono::seconds(30);
// How long a failing rank waits for ncclCommAbort: the process must not exit while a thread is inside NCCL.
constexpr auto ABORT_TIMEOUT = std::chrono::seconds(10);

std::string nccl_version() {
    int version = 0;
    ncclGetVersion(&version);  // 22803: 2.28.3
    return str("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// NCCL's type and count for n elements. Dtypes that NCCL lacks are sent as bytes, which is right where nothing is
// summed.
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
        : rank(world.rank), size(world.size), timeout_s(world.timeout_s), control(world, own_member()) {
        cuda_check(cudaGetDevice(&device), "Comm");
        ncclUniqueId id;
        if (rank == 0) {
            const ncclResult_t status = ncclGetUniqueId(&id);
            require(status == ncclSuccess, "rank 0: ncclGetUniqueId: ", nccl_error(status));
        }
        control.broadcast(&id, sizeof id, 0);
        connect_gpus(int(world.size), id);
        watchdog = std::thread([this] { watch_over(); });
    }

    ~NcclTransport() override {
        stop_watchdog();  // still runs if finish() found a failure
        if (!finished) {
            abort_communicator();
            abort_ended.wait_for(ABORT_TIMEOUT);  // usually immediate: Graphs with operations are destroyed by now
        }
        for (const Watched& w : watched) cudaEventDestroy(w.event);
        for (const cudaEvent_t event : spare) cudaEventDestroy(event);
    }

    void finish() override {
        check();
        ending = true;  // from here on a peer may exit
        control.barrier();
        stop_watchdog();
        ncclCommDestroy(comm);
        finished = true;
    }

    void abort() override {
        stop_watchdog();
        abort_communicator();
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

    // NCCL has no operation for blocks of several sizes: a group of messages.
    void all_to_all(void* out, const void* inp, const int64_t* receive, const int64_t* send, DType dtype,
                    Stream stream) override {
        const int64_t n = std::accumulate(send, send + size, int64_t(0));
        queue({"all_to_all", n, dtype}, stream, [&] {
            ncclResult_t status = ncclGroupStart();
            char* to = static_cast<char*>(out);
            const char* from = static_cast<const char*>(inp);
            for (int r = 0; r < size && status == ncclSuccess; r++) {
                const Elements in = elements(dtype, receive[r]), own = elements(dtype, send[r]);
                if (receive[r]) status = ncclRecv(to, in.count, in.type, r, comm, cuda_stream(stream));
                if (send[r] && status == ncclSuccess)
                    status = ncclSend(from, own.count, own.type, r, comm, cuda_stream(stream));
                to += receive[r] * dtype_size(dtype);
                from += send[r] * dtype_size(dtype);
            }
            const ncclResult_t end = ncclGroupEnd();
            return status == ncclSuccess ? end : status;
        });
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
    // Describes an operation. The text is formatted only for errors, because operations are frequent and short.
    struct What {
        const char* op = nullptr;
        int64_t n = 0;
        DType dtype = DType::F32;
        std::string other = {};  // instead

        explicit operator bool() const { return op || !other.empty(); }
        std::string text() const { return op ? str(op, " of ", n, " ", dtype_name(dtype)) : other; }
    };
    // Work on a stream; it is done when the event is reached.
    struct Watched {
        cudaEvent_t event;
        What what;
    };

    void watch(const What& what, Stream stream) {
        check();
        cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
        cuda_check(cudaStreamIsCapturing(cuda_stream(stream), &recording), "Comm");
        if (recording != cudaStreamCaptureStatusNone) return;  // a recorded graph runs later
        const std::lock_guard<std::mutex> lock(state);
        if (spare.empty()) recycle_finished();  // usually the watchdog has done it
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

    // Runs in its own thread, because ncclCommInitRank waits for all ranks without a time-out. After a time-out here
    // the thread ends with the process.
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
            if (!trouble.empty()) control.report(trouble);
            require(trouble.empty(), "rank ", rank, ": ncclCommInitRank: ", trouble);
            require(
                seconds_since(start) < timeout_s, "rank ", rank, ": ncclCommInitRank: not done within ", timeout_s,
                " s (--comm-timeout); check that the machines reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)");
        }
        const ncclResult_t status = result.get();
        require(status == ncclSuccess, "rank ", rank, ": ncclCommInitRank: ", nccl_error(status));
        comm = *handle;
    }

    // Calls NCCL. The call may block on peers or on a full queue; the watchdog measures for how long.
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
        const std::string line = str("rank ", rank, ": ", what.text(), ": ", nccl_error(status));
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

    static std::string nccl_error(ncclResult_t status) {
        const char* const detail = ncclGetLastError(nullptr);
        return str(ncclGetErrorString(status), detail && *detail ? str(": ", detail) : "",
                   " (set NCCL_DEBUG=WARN for details)");
    }

    template <typename Work>
    void hosts(Work work) {
        check();
        try {
            work();
        } catch (const Error& error) {
            std::this_thread::sleep_for(REPORT_DELAY);
            declare(error.what());
            check();
        }
    }

    // Every later call throws this error.
    void declare(const std::string& line) {
        const std::lock_guard<std::mutex> lock(state);
        if (failure.empty()) failure = line;
    }

    // Call with `state` locked.
    void recycle_finished() {
        while (!watched.empty() && cudaEventQuery(watched.front().event) != cudaErrorNotReady) {
            spare.push_back(watched.front().event);
            watched.pop_front();
            progress = Clock::now();
        }
    }

    // The current failure and the operation that it concerns; empty if there is none.
    std::string find_failure() {
        const std::lock_guard<std::mutex> lock(state);
        if (!failure.empty()) return failure;
        const std::string what = calling ? calling.text() : watched.empty() ? "" : watched.front().what.text();
        const std::string who = str("rank ", rank, ": ", what, what.empty() ? "" : ": ");
        // Checked first, because it does not call the driver, which may hang.
        const std::string trouble = ending ? "" : control.trouble();
        if (!trouble.empty()) {
            control.report(trouble);
            return who + trouble;
        }
        recycle_finished();
        if ((calling && seconds_since(call_start) > timeout_s) ||
            (!watched.empty() && seconds_since(progress) > timeout_s))
            return str(who, "not done within ", timeout_s,
                       " s (--comm-timeout); another rank hangs, or the time-out is too short");
        ncclResult_t status = ncclSuccess;
        const std::unique_lock<std::timed_mutex> idle(calls, std::try_to_lock);
        if (idle && !aborted) ncclCommGetAsyncError(comm, &status);
        return status == ncclSuccess || status == ncclInProgress ? "" : who + nccl_error(status);
    }

    void watch_over() {
        cudaSetDevice(device);
        std::unique_lock<std::mutex> lock(stopping);
        std::string line;
        while (line.empty()) {
            if (stop_sign.wait_for(lock, WATCH_INTERVAL, [&] { return stop; })) return;
            line = find_failure();
        }
        if (stop_sign.wait_for(lock, REPORT_DELAY, [&] { return stop; })) return;
        declare(line);
        abort_communicator();
        // The main thread reports the error, unless it is stuck in a driver call that never returns.
        if (stop_sign.wait_for(lock, NOTICE_TIMEOUT, [&] { return stop; }) || noticed) return;
        std::fprintf(stderr, "train_gpt: %s\n", line.c_str());
        _exit(1);
    }

    // Makes kernels that wait for a peer return. NCCL allows this from any thread, even while another thread is inside
    // a call. ncclCommAbort may hang itself, so it runs in a thread of its own.
    void abort_communicator() {
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

    const int64_t rank, size;
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

    std::mutex state;  // guards the members below
    std::string failure;
    What calling;  // the NCCL call that the main thread is in
    Clock::time_point call_start;
    std::deque<Watched> watched;
    std::vector<cudaEvent_t> spare;
    Clock::time_point progress;  // when the front of `watched` last changed

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
