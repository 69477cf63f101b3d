// Comm's transport through MPI, for the CPU build. It uses non-blocking operations and polls them until they finish or
// the time-out passes, so a rank that hangs does not hang the others.
//
// reduce_scatter is written here: each rank receives every rank's part of its block and adds the parts in rank order,
// so a sum does not depend on where blocks begin. all_reduce is reduce_scatter followed by all_gather and gives the
// same bits; each rank sends 2·n·(size − 1)/size elements, which is the minimum. These macros select MPI's C interface;
// the C++ one left the standard in 2012.
#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "runtime/communication/comm.h"
#include "runtime/communication/transport.h"
#include "runtime/device/convert_dtype.h"

namespace {

// Bytes received from each rank at a time: small enough for the cache, large enough to hide a message's latency.
constexpr int64_t CHUNK_BYTES = 1 << 20;
// MPI counts in int.
constexpr int64_t LARGEST_MESSAGE = 1 << 30;

// The block of elements that each rank owns: `block` elements, fewer or none for the last ranks.
struct Blocks {
    int64_t n, block;
    int64_t begin(int64_t rank) const { return std::min(n, rank * block); }
    int64_t length(int64_t rank) const { return begin(rank + 1) - begin(rank); }
};

// The accumulator type for sums of T.
template <typename T>
struct Sum {
    using type = T;
    static T load(T x) { return x; }
    static void store(T& to, T x) { to = x; }
};
// Unsigned, because sums wrap and signed overflow is undefined.
template <>
struct Sum<int32_t> {
    using type = uint32_t;
    static uint32_t load(int32_t x) { return uint32_t(x); }
    static void store(int32_t& to, uint32_t x) { to = int32_t(x); }
};
template <>
struct Sum<int64_t> {
    using type = uint64_t;
    static uint64_t load(int64_t x) { return uint64_t(x); }
    static void store(int64_t& to, uint64_t x) { to = int64_t(x); }
};
template <>
struct Sum<bf16> {
    using type = float;
    static float load(bf16 x) { return to_float(x); }
    static void store(bf16& to, float x) { to = to_bf16(x); }
};
template <>
struct Sum<fp16> {
    using type = float;
    static float load(fp16 x) { return to_float(x); }
    static void store(fp16& to, float x) { to = to_fp16(x); }
};

// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) + …; out may be one of the parts.
template <typename T>
void add_in_order(T* out, const std::vector<const char*>& parts, int64_t n) {
    constexpr int64_t TILE = 512;
#pragma omp parallel for schedule(static) if (n > 16 * TILE)
    for (int64_t begin = 0; begin < n; begin += TILE) {
        typename Sum<T>::type sums[TILE];
        const int64_t length = std::min(TILE, n - begin);
        for (size_t part = 0; part < parts.size(); part++) {
            const T* const x = reinterpret_cast<const T*>(parts[part]) + begin;
            if (part == 0)
                for (int64_t i = 0; i < length; i++) sums[i] = Sum<T>::load(x[i]);
            else
                for (int64_t i = 0; i < length; i++) sums[i] += Sum<T>::load(x[i]);
        }
        for (int64_t i = 0; i < length; i++) Sum<T>::store(out[begin + i], sums[i]);
    }
}

void add_in_order(void* out, const std::vector<const char*>& parts, int64_t n, DType dtype) {
    switch (dtype) {
        case DType::F32:
            return add_in_order(static_cast<float*>(out), parts, n);
        case DType::F64:
            return add_in_order(static_cast<double*>(out), parts, n);
        case DType::BF16:
            return add_in_order(static_cast<bf16*>(out), parts, n);
        case DType::F16:
            return add_in_order(static_cast<fp16*>(out), parts, n);
        case DType::I32:
            return add_in_order(static_cast<int32_t*>(out), parts, n);
        case DType::I64:
            return add_in_order(static_cast<int64_t*>(out), parts, n);
        case DType::U16:
        case DType::U8:
            break;
    }
    throw Error(str("Comm: ", dtype_name(dtype), " is not summed"));
}

class MpiTransport : public Transport {
  public:
    explicit MpiTransport(const World& world) : rank(world.rank), size(world.size), timeout_s(world.timeout_s) {
        op = "MPI_Init";
        int initialised = 0, finalised = 0, provided = 0, mpi_rank = 0, mpi_size = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        require(!initialised && !finalised, "Comm: a process can connect through MPI only once");
        done(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        done(MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank));
        done(MPI_Comm_size(MPI_COMM_WORLD, &mpi_size));
        require(mpi_rank == rank && mpi_size == size, world.launcher, " started rank ", rank, " of ", size,
                ", but to MPI it is rank ", mpi_rank, " of ", mpi_size,
                "; use the mpirun of the MPI library that this CPU build was linked with");
        share_processors();
    }

    void finish() override {
        barrier();  // detects a rank that died before it got here
        MPI_Finalize();
    }

    void all_reduce(void* x, int64_t n, DType dtype, Stream) override {
        const Operation operation(*this, "all_reduce", n, dtype);
        const Blocks blocks{n, (n + size - 1) / size};
        char* const own = static_cast<char*>(x) + blocks.begin(rank) * dtype_size(dtype);
        reduce(own, x, blocks, dtype);
        gather(x, own, blocks, dtype_size(dtype));
    }

    void reduce_scatter(void* out, const void* inp, int64_t n, DType dtype, Stream) override {
        const Operation operation(*this, "reduce_scatter", n, dtype);
        reduce(out, inp, {n * size, n}, dtype);
    }

    void all_gather(void* out, const void* inp, int64_t n, DType dtype, Stream) override {
        const Operation operation(*this, "all_gather", n, dtype);
        gather(out, inp, {n * size, n}, dtype_size(dtype));
    }

    void all_to_all(void* out, const void* inp, const int64_t* receive, const int64_t* send, DType dtype,
                    Stream) override {
        const Operation operation(*this, "all_to_all", std::accumulate(send, send + size, int64_t(0)), dtype);
        exchange(static_cast<char*>(out), static_cast<const char*>(inp), receive, send, dtype_size(dtype));
    }

    void broadcast(void* x, int64_t n, DType dtype, int64_t root, Stream) override {
        const Operation operation(*this, "broadcast", n, dtype);
        send_from(root, x, n * dtype_size(dtype));
    }

    void group_start() override {}
    void group_end() override {}

    void barrier() override {
        const Operation operation(*this, "barrier", 0, DType::U8);
        MPI_Request request;
        done(MPI_Ibarrier(MPI_COMM_WORLD, &request));
        requests.push_back(request);
        wait();
    }

    void broadcast_host(void* bytes, size_t n, int64_t root) override {
        const Operation operation(*this, "broadcast_host", int64_t(n), DType::U8);
        send_from(root, bytes, int64_t(n));
    }

    void all_gather_host(void* all, const void* own, size_t n) override {
        const Operation operation(*this, "all_gather_host", int64_t(n), DType::U8);
        gather(all, own, {int64_t(n) * size, int64_t(n)}, 1);
    }

    void check() override {
        if (!failure.empty()) throw Error(failure);
    }
    void watch(const std::string&, Stream) override {}

  private:
    // Sets the name for errors and the deadline of an operation.
    struct Operation {
        Operation(MpiTransport& t, const char* name, int64_t n, DType dtype) {
            t.check();
            t.op = n ? str(name, " of ", n, " ", dtype_name(dtype)) : name;
            t.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                                std::chrono::duration<double>(t.timeout_s));
        }
    };

    [[noreturn]] void fail(const std::string& what) {
        failure = str("rank ", rank, ": ", op, ": ", what);
        throw Error(failure);
    }

    void done(int status) {
        if (status == MPI_SUCCESS) return;
        char text[MPI_MAX_ERROR_STRING] = "";
        int length = 0;
        MPI_Error_string(status, text, &length);
        fail(text);
    }

    // Waits until all requests are done: spins first, because most finish soon; then yields, because the other rank may
    // need this core; then sleeps.
    void wait() {
        using clock = std::chrono::steady_clock;
        const auto start = clock::now();
        for (int round = 0;; round++) {
            int all_done = 0;
            done(MPI_Testall(int(requests.size()), requests.data(), &all_done, MPI_STATUSES_IGNORE));
            if (all_done) break;
            if (round < 100) continue;
            const auto now = clock::now();
            if (now >= deadline)
                fail(str("no answer from the other ranks within ", timeout_s,
                         " s (--comm-timeout); one of them has ended or hangs"));
            if (now - start < std::chrono::milliseconds(2))
                sched_yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        requests.clear();
    }

    void send(const char* bytes, int64_t n, int64_t to) {
        MPI_Request request;
        done(MPI_Isend(bytes, int(n), MPI_BYTE, int(to), 0, MPI_COMM_WORLD, &request));
        requests.push_back(request);
    }

    void receive(char* bytes, int64_t n, int64_t from) {
        MPI_Request request;
        done(MPI_Irecv(bytes, int(n), MPI_BYTE, int(from), 0, MPI_COMM_WORLD, &request));
        requests.push_back(request);
    }

    // out = the sum over ranks of this rank's block of inp.
    void reduce(void* out, const void* inp, const Blocks& blocks, DType dtype) {
        const int64_t element = dtype_size(dtype), chunk = CHUNK_BYTES / element;
        received.resize(size_t(size * std::min(chunk, blocks.block) * element));
        const char* const own = static_cast<const char*>(inp) + blocks.begin(rank) * element;
        std::vector<const char*> parts(static_cast<size_t>(size));
        for (int64_t begin = 0; begin < blocks.block; begin += chunk) {
            const auto length = [&](int64_t r) { return std::clamp<int64_t>(blocks.length(r) - begin, 0, chunk); };
            for (int64_t r = 0; r < size; r++) {
                char* const part = received.data() + r * std::min(chunk, blocks.block) * element;
                parts[size_t(r)] = r == rank ? own + begin * element : part;
                if (r != rank && length(rank)) receive(part, length(rank) * element, r);
            }
            for (int64_t r = 0; r < size; r++) {
                const char* const theirs = static_cast<const char*>(inp) + (blocks.begin(r) + begin) * element;
                if (r != rank && length(r)) send(theirs, length(r) * element, r);
            }
            wait();
            if (length(rank)) add_in_order(static_cast<char*>(out) + begin * element, parts, length(rank), dtype);
        }
    }

    // out = the blocks of all ranks; inp is this rank's block.
    void gather(void* out, const void* inp, const Blocks& blocks, int64_t element) {
        char* const all = static_cast<char*>(out);
        const char* const own = static_cast<const char*>(inp);
        char* const own_place = all + blocks.begin(rank) * element;
        if (own != own_place && blocks.length(rank)) std::memcpy(own_place, own, size_t(blocks.length(rank) * element));
        for (int64_t begin = 0; begin < blocks.block * element; begin += LARGEST_MESSAGE) {
            const auto length = [&](int64_t r) {
                return std::clamp<int64_t>(blocks.length(r) * element - begin, 0, LARGEST_MESSAGE);
            };
            for (int64_t r = 0; r < size; r++)
                if (r != rank && length(r)) receive(all + blocks.begin(r) * element + begin, length(r), r);
            for (int64_t r = 0; r < size; r++)
                if (r != rank && length(rank)) send(own_place + begin, length(rank), r);
            wait();
        }
    }

    // The blocks that ranks have for each other; this rank's block for itself is copied.
    void exchange(char* out, const char* inp, const int64_t* counts_in, const int64_t* counts_out, int64_t element) {
        int64_t largest = 0;
        for (int64_t r = 0; r < size; r++) largest = std::max({largest, counts_in[r], counts_out[r]});
        for (int64_t begin = 0; begin < largest * element; begin += LARGEST_MESSAGE) {
            const auto length = [&](int64_t n) { return std::clamp<int64_t>(n * element - begin, 0, LARGEST_MESSAGE); };
            char* to = out + begin;
            for (int64_t r = 0; r < size; to += counts_in[r++] * element)
                if (r != rank && length(counts_in[r])) receive(to, length(counts_in[r]), r);
            const char* from = inp + begin;
            for (int64_t r = 0; r < size; from += counts_out[r++] * element)
                if (r != rank && length(counts_out[r])) send(from, length(counts_out[r]), r);
            wait();
        }
        const int64_t before = std::accumulate(counts_in, counts_in + rank, int64_t(0)),
                      own = std::accumulate(counts_out, counts_out + rank, int64_t(0));
        if (counts_out[rank])
            std::memcpy(out + before * element, inp + own * element, size_t(counts_out[rank] * element));
    }

    void send_from(int64_t root, void* bytes, int64_t n) {
        for (int64_t begin = 0; begin < n; begin += LARGEST_MESSAGE) {
            MPI_Request request;
            done(MPI_Ibcast(static_cast<char*>(bytes) + begin, int(std::min(n - begin, LARGEST_MESSAGE)), MPI_BYTE,
                            int(root), MPI_COMM_WORLD, &request));
            requests.push_back(request);
            wait();
        }
    }

    // Ranks on one host with the same CPU affinity divide its processors among them, unless OMP_NUM_THREADS is set.
    // A rank that the launcher bound to processors of its own uses all of those.
    void share_processors() {
        if (std::getenv("OMP_NUM_THREADS")) return;
        struct Affinity {
            char machine[MPI_MAX_PROCESSOR_NAME] = "";
            cpu_set_t processors;
        };
        std::vector<Affinity> all(static_cast<size_t>(size));
        Affinity own;
        int length = 0;
        MPI_Get_processor_name(own.machine, &length);
        CPU_ZERO(&own.processors);
        if (sched_getaffinity(0, sizeof own.processors, &own.processors) != 0) return;
        all_gather_host(all.data(), &own, sizeof own);
        int sharing = 0;
        for (const Affinity& p : all)
            sharing += !std::strcmp(p.machine, own.machine) && CPU_EQUAL(&p.processors, &own.processors);
        omp_set_num_threads(std::max(1, CPU_COUNT(&own.processors) / sharing));
    }

    const int64_t rank, size;
    const double timeout_s;
    std::string op, failure;
    std::chrono::steady_clock::time_point deadline;
    std::vector<MPI_Request> requests;
    std::vector<char> received;
};

}  // namespace

// "Open MPI v4.1.4, package: ..." in Open MPI, with more lines in others.
std::string comm_library() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text, size_t(length));
    return str("MPI (", version.substr(0, version.find_first_of(",\n")), ")");
}

std::unique_ptr<Transport> connect(const World& world) {
    return std::make_unique<MpiTransport>(world);
}
