// The device that kernels run on: its memory, streams, events and graphs. device.cpp is the definition for the CPU,
// device.cu for CUDA. Errors: every function throws DeviceError, which names the operation; that of device_alloc also
// states the bytes requested. Sizes are in bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "runtime/device/tensor.h"

// The state of a library for one stream, such as a handle and a workspace.
struct StreamLibrary {
    virtual ~StreamLibrary() = default;
};

// An ordered queue of work: a CUDA stream on the GPU; on the CPU work is done when the call returns. Stream{} is the
// device's default stream. Matmuls need a stream of create_blas_stream() (runtime/device/blas_stream.h).
struct Stream {
    void* handle = nullptr;            // cudaStream_t
    StreamLibrary* library = nullptr;  // owned by the stream; null: none
};

Stream create_stream();              // on the CPU Stream{}
void destroy_stream(Stream stream);  // waits for its work, then frees it and its library

Device backend_device();           // the device that the kernels of this binary run on
const char* backend_name();        // "cpu" or "cuda"
std::string device_name();         // the name of the GPU from its driver ("NVIDIA H100 80GB HBM3"); "" on the CPU
std::string device_description();  // for logs and `info`: "2 threads, AVX-512"

// The number of GPUs that this process can see (CUDA_VISIBLE_DEVICES); 1 on the CPU. Allocates no memory on any GPU.
int64_t device_count();
// Selects the GPU for all other functions of this header, by default the first.
void use_device(int64_t index);
int64_t device_in_use();  // what the calling thread has selected: a new thread starts with the first

void* device_alloc(size_t bytes);  // 64-byte aligned, not zeroed (pages are touched on first use)
void device_free(void* data);
int64_t device_allocations();  // how often device_alloc() and host_alloc() were called so far, for tests

// Memory that can still be allocated. On the CPU: host_memory_available() of runtime/limits.h.
int64_t device_memory_available();
// Memory that the program takes beside the arenas: code, libraries and their buffers. A measured constant.
int64_t device_overhead_bytes();
// Memory in use on the GPU now, by this program (its context included) and by others. 0 on the CPU.
int64_t device_bytes_in_use();
// Size for temporary buffers that keep the device busy and are small beside its memory: 64 MiB, on a GPU 1 GiB.
int64_t device_chunk_bytes();

// Pinned host memory, which the device copies from and to asynchronously. Copies of other host memory go through a
// staging buffer, and the call waits for that.
void* host_alloc(size_t bytes);
void host_free(void* data);
using HostMemory = std::unique_ptr<void, void (*)(void*)>;  // (host_alloc(n), host_free)

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, size_t bytes, Stream stream);        // waits until the copy is done
void copy_to_host_async(void* host, const void* device, size_t bytes, Stream stream);  // host: from host_alloc()
void device_copy(void* to, const void* from, size_t bytes, Stream stream);  // both on the device, not overlapping
void device_fill(void* device, int byte, size_t bytes, Stream stream);
void synchronize(Stream stream);

// A point in the work of a stream, and its time. On the CPU it is reached as soon as it is recorded.
class Event {
  public:
    Event();
    ~Event();
    Event(Event&& other) noexcept : handle(std::exchange(other.handle, nullptr)), seconds(other.seconds) {}
    Event& operator=(Event&&) = delete;
    void record(Stream stream);
    bool reached() const;  // also true if it was never recorded
    void wait() const;
    void make_wait(Stream stream) const;  // later work of the stream waits for this event; the host does not
    // The same, and in a graph each of its runs waits for what was recorded last, outside of the graph.
    void make_wait_in_graph(Stream stream) const;
    friend double elapsed_ms(const Event& from, const Event& to);  // both reached

  private:
    void* handle = nullptr;  // CUDA
    double seconds = 0;      // CPU
};

// Work that launches the same kernels with the same arguments every time. On the GPU a CUDA graph: the first run
// executes the work directly and then records it; each later run is a single launch. On the CPU every run executes it
// directly.
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
    bool begin(Stream stream);  // false: this backend does not record
    void end(Stream stream);
    void abandon(Stream stream);
    void launch(Stream stream);
    void* executable = nullptr;
};
// Whether this backend replays Graphs. If so, run each Graph once before the training loop, so that it is recorded.
bool graphs_replay();

// Start and end of what profilers capture with nsys -c cudaProfilerApi or ncu --profile-from-start off.
void profiler_start();
void profiler_stop();
