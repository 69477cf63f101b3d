// The machine under the kernels: memory and streams. device.cpp is the CPU's definition, device.cu CUDA's.
// Errors: every function throws DeviceError naming the operation; device_alloc says how many bytes were asked for.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "runtime/device/tensor.h"

struct Blas;  // runtime/device/blas.h

// An ordered queue of work. A CUDA stream on the GPU; on the CPU work is done when the call returns. Stream{} is the
// device's default queue: it can do everything but matrix products, which need the library's handle and workspace.
struct Stream {
    void* handle = nullptr;
    Blas* blas = nullptr;  // CUDA
};

Stream create_stream();              // with its matrix library; on the CPU Stream{}
Stream create_side_stream();         // without it: for copies and collectives beside another stream's work
void destroy_stream(Stream stream);  // waits for its work

Device backend_device();           // the device that this binary's kernels run on
const char* backend_name();        // "cpu" or "cuda"
std::string device_name();         // the GPU's name as its driver gives it ("NVIDIA H100 80GB HBM3"); "" on the CPU
std::string device_description();  // "2 threads, AVX-512": for logs and `info`, beside matmul_library()

// GPUs that this process can see (CUDA_VISIBLE_DEVICES), 0 without any; 1 on the CPU. It takes no memory on any GPU.
int64_t device_count();
// Makes this the GPU that everything else here is about; without it that is the first.
void use_device(int64_t index);

void* device_alloc(size_t bytes);  // 64-byte aligned, not zeroed (pages are touched on first use)
void device_free(void* data);

// Bytes that can still be had: on the CPU the least of free memory, the control group's limit and the address-space
// limit.
int64_t device_memory_available();
// What the program itself takes beside the arenas: code, libraries and their buffers (docs/performance.md: measured).
int64_t device_overhead_bytes();
// In use on the GPU now: this program's context and memory, and what other programs hold. 0 on the CPU.
int64_t device_bytes_in_use();
// A temporary large enough to keep the device busy, small beside its memory: 64 MiB, on a GPU 1 GiB.
int64_t device_chunk_bytes();

// Memory of the host that the device can copy from and to by itself (CUDA: pinned). Other host memory is copied aside
// first, and the call waits for that.
void* host_alloc(size_t bytes);
void host_free(void* data);
using HostMemory = std::unique_ptr<void, void (*)(void*)>;  // (host_alloc(n), host_free)

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, size_t bytes, Stream stream);        // waits until the copy is done
void copy_to_host_async(void* host, const void* device, size_t bytes, Stream stream);  // host: of host_alloc()
void device_copy(void* to, const void* from, size_t bytes, Stream stream);             // both on the device, apart
void device_fill(void* device, int byte, size_t bytes, Stream stream);
void synchronize(Stream stream);

// A moment in a stream's work, and its time. On the CPU it is reached as soon as it is recorded.
class Event {
  public:
    Event();
    ~Event();
    Event(Event&& other) noexcept : handle(std::exchange(other.handle, nullptr)), seconds(other.seconds) {}
    Event& operator=(Event&&) = delete;
    void record(Stream stream);
    bool reached() const;  // true too if it was never recorded
    void wait() const;
    void make_wait(
        Stream stream) const;  // what is queued there from now on waits for this moment, and the host doesn't
    friend double elapsed_ms(const Event& from, const Event& to);  // both reached

  private:
    void* handle = nullptr;  // CUDA
    double seconds = 0;      // CPU
};

// Work that is the same every time but for what the memory it reads holds. A CUDA graph: the first run is an ordinary
// one, then the work is recorded, and each later run is a single launch. On the CPU every run is an ordinary one.
class Graph {
  public:
    Graph() = default;
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    template <typename Work>
    void run(Stream stream, Work work) {
        if (executable) return launch(stream);
        work();
        if (!begin(stream)) return;
        try {
            work();
        } catch (...) {
            abandon(stream);
            throw;
        }
        end(stream);
    }

  private:
    bool begin(Stream stream);  // false: this backend records nothing
    void end(Stream stream);
    void abandon(Stream stream);
    void launch(Stream stream);
    void* executable = nullptr;
};
// Whether a Graph replays: then a first run before the training loop records it.
bool graphs_replay();

// Profilers that wait for a sign (nsys -c cudaProfilerApi, ncu --profile-from-start off) watch what lies between.
void profiler_start();
void profiler_stop();
