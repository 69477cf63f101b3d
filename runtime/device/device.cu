#include "runtime/device/device.h"

#include <cuda_profiler_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "runtime/device/cuda_check.h"
#include "runtime/device/target.h"

Device backend_device() {
    return Device::CUDA;
}

const char* backend_name() {
    return "cuda";
}

namespace {

std::atomic<int64_t> allocations;

cudaDeviceProp properties(const char* op) {
    int device = 0;
    cuda_check(cudaGetDevice(&device), op);
    cudaDeviceProp p;
    cuda_check(cudaGetDeviceProperties(&p, device), op);
    return p;
}

// Creates no context.
int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cuda_check(cudaGetDevice(&device), "device_attribute");
    cuda_check(cudaDeviceGetAttribute(&value, attribute, device), "device_attribute");
    return value;
}

void note_this_gpu() {
    int device = 0;
    char bus[32] = "", host[256] = "";
    cuda_check(cudaGetDevice(&device), "create_stream");
    cuda_check(cudaDeviceGetPCIBusId(bus, int(sizeof bus), device), "create_stream");
    gethostname(host, sizeof host - 1);
    note_gpu(str("GPU ", device, " (", properties("create_stream").name, ", ", bus, ") of host ", host));
}

cudaEvent_t cuda_event(void* handle) {
    return static_cast<cudaEvent_t>(handle);
}

// Large blocks of pinned host memory. cudaMallocHost clears its pages with one thread: 8 GiB take 5.5 s beside an H200,
// where these huge pages, touched by all threads and then registered, take 0.43 s (docs/log/memory.md).
class PinnedBlocks {
  public:
    static constexpr size_t LEAST = size_t(64) << 20;  // of bytes; below it cudaMallocHost is fast enough

    // Null without an error if there is no memory.
    void* allocate(size_t bytes) {
        void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return nullptr;
        madvise(data, bytes, MADV_HUGEPAGE);  // best effort
        char* const at = static_cast<char*>(data);
        constexpr int64_t PAGE = 4096;
#pragma omp parallel for schedule(static)
        for (int64_t byte = 0; byte < int64_t(bytes); byte += PAGE) at[byte] = 0;
        const cudaError_t status = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
        if (status != cudaSuccess) {
            munmap(data, bytes);
            cudaGetLastError();  // must not show up at the next launch
            if (status != cudaErrorMemoryAllocation) cuda_check(status, "host_alloc");
            return nullptr;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        sizes[data] = bytes;
        return data;
    }

    // False if data is not one of these blocks.
    bool free(void* data) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = sizes.find(data);
        if (found == sizes.end()) return false;
        cudaHostUnregister(data);
        munmap(data, found->second);
        sizes.erase(found);
        return true;
    }

  private:
    std::mutex mutex;
    std::map<void*, size_t> sizes;
};

PinnedBlocks& pinned_blocks() {
    static PinnedBlocks& blocks = *new PinnedBlocks;  // never destroyed: static objects may free their memory at exit
    return blocks;
}

}  // namespace

std::string device_name() {
    return properties("device_name").name;
}

std::string device_description() {
    const cudaDeviceProp p = properties("device_description");
    return str(p.name, ", ", p.multiProcessorCount, " SMs, sm_", p.major, p.minor, ", ", p.totalGlobalMem >> 30,
               " GiB");
}

int64_t device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorNoDevice) {
        cudaGetLastError();
        return 0;
    }
    cuda_check(status, "device_count");
    return count;
}

void use_device(int64_t index) {
    cuda_check(cudaSetDevice(int(index)), "use_device");
}

int64_t device_in_use() {
    int device = 0;
    cuda_check(cudaGetDevice(&device), "device_in_use");
    return device;
}

// A blocking stream: it keeps its order with the default stream, Stream{}.
Stream create_stream() {
    static const bool noted = (note_this_gpu(), true);
    (void)noted;
    cudaStream_t handle = nullptr;
    cuda_check(cudaStreamCreate(&handle), "create_stream");
    return {handle, nullptr};
}

void destroy_stream(Stream stream) {
    if (stream.handle) cudaStreamSynchronize(cuda_stream(stream));
    delete stream.library;
    if (stream.handle) cudaStreamDestroy(cuda_stream(stream));
}

int64_t device_memory_available() {
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "device_memory_available");
    return int64_t(free_bytes);
}

Target this_target() {
    static const Target target = [] {
        const int sm = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                       device_attribute(cudaDevAttrComputeCapabilityMinor);
#ifdef HAVE_SM90A
        const bool hopper = sm == 90;
#else
        const bool hopper = false;
#endif
        return Target{Device::CUDA, device_attribute(cudaDevAttrMultiProcessorCount), sm, hopper};
    }();
    return target;
}

int64_t device_overhead_bytes() {
    return this_target().overhead_bytes();
}

int64_t device_bytes_in_use() {
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "device_bytes_in_use");
    return int64_t(total_bytes - free_bytes);
}

int64_t device_chunk_bytes() {
    return this_target().chunk_bytes();
}

int64_t device_allocations() {
    return allocations;
}

// cudaMalloc aligns to 256 bytes.
void* device_alloc(size_t bytes) {
    allocations++;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, std::max<size_t>(bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // reported below; must not show up at the next launch
        throw DeviceError(str("device_alloc: cannot allocate ", bytes, " bytes of GPU memory (",
                              device_memory_available(), " are free); use a smaller model, batch or context"));
    }
    cuda_check(status, "device_alloc");
    return data;
}

// Called by destructors, so it does not throw. The error of an earlier kernel is thrown by the next synchronisation.
void device_free(void* data) {
    cudaFree(data);
}

void* host_alloc(size_t bytes) {
    allocations++;
    void* data = nullptr;
    if (bytes >= PinnedBlocks::LEAST) {
        data = pinned_blocks().allocate(bytes);
    } else {
        const cudaError_t status = cudaMallocHost(&data, std::max<size_t>(bytes, 1));
        if (status == cudaErrorMemoryAllocation)
            cudaGetLastError();
        else
            cuda_check(status, "host_alloc");
    }
    if (!data)
        throw DeviceError(str("host_alloc: cannot allocate ", bytes,
                              " bytes of page-locked host memory; lower --batch-size or "
                              "--seq-len, or free memory of the host"));
    return data;
}

void host_free(void* data) {
    if (data && !pinned_blocks().free(data)) cudaFreeHost(data);
}

// cudaMemcpyDefault: what kernels use may lie in pinned host memory (MemoryPlace).
void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyDefault, cuda_stream(stream)), "copy_to_device");
}

void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, cuda_stream(stream)), "copy_to_host");
    cuda_check(cudaStreamSynchronize(cuda_stream(stream)), "copy_to_host");
}

void copy_to_host_async(void* host, const void* device, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, cuda_stream(stream)), "copy_to_host_async");
}

void device_copy(void* to, const void* from, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)), "device_copy");
}

void device_fill(void* device, int byte, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    cuda_check(cudaMemsetAsync(device, byte, bytes, cuda_stream(stream)), "device_fill");
}

void synchronize(Stream stream) {
    cuda_check(cudaStreamSynchronize(cuda_stream(stream)), "synchronize");
}

Event::Event() {
    cudaEvent_t event = nullptr;
    cuda_check(cudaEventCreate(&event), "Event");
    handle = event;
}

Event::~Event() {
    if (handle) cudaEventDestroy(cuda_event(handle));
}

void Event::record(Stream stream) {
    cuda_check(cudaEventRecord(cuda_event(handle), cuda_stream(stream)), "Event::record");
}

bool Event::reached() const {
    const cudaError_t status = cudaEventQuery(cuda_event(handle));
    if (status != cudaErrorNotReady) cuda_check(status, "Event::reached");
    return status == cudaSuccess;
}

void Event::wait() const {
    cuda_check(cudaEventSynchronize(cuda_event(handle)), "Event::wait");
}

void Event::make_wait(Stream stream) const {
    cuda_check(cudaStreamWaitEvent(cuda_stream(stream), cuda_event(handle), 0), "Event::make_wait");
}

void Event::make_wait_in_graph(Stream stream) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(cuda_stream(stream), &status), "Event::make_wait_in_graph");
    const unsigned flag = status == cudaStreamCaptureStatusActive ? cudaEventWaitExternal : cudaEventWaitDefault;
    cuda_check(cudaStreamWaitEvent(cuda_stream(stream), cuda_event(handle), flag), "Event::make_wait_in_graph");
}

double elapsed_ms(const Event& from, const Event& to) {
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, cuda_event(from.handle), cuda_event(to.handle)), "elapsed_ms");
    return ms;
}

Graph::~Graph() {
    if (executable) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable));
}

// Thread-local: other threads may make calls that a capture forbids.
bool Graph::begin(Stream stream) {
    cuda_check(cudaStreamBeginCapture(cuda_stream(stream), cudaStreamCaptureModeThreadLocal), "Graph::begin");
    return true;
}

void Graph::end(Stream stream) {
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamEndCapture(cuda_stream(stream), &graph), "Graph::end");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    cuda_check(status, "Graph::end");
    executable = exec;
    cuda_check(cudaGraphUpload(exec, cuda_stream(stream)), "Graph::end");
}

void Graph::abandon(Stream stream) {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(cuda_stream(stream), &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();  // the exception that ended the capture is already being thrown
}

void Graph::launch(Stream stream) {
    cuda_check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), cuda_stream(stream)), "Graph::launch");
}

bool graphs_replay() {
    return true;
}

void profiler_start() {
    cuda_check(cudaProfilerStart(), "profiler_start");
}

void profiler_stop() {
    cuda_check(cudaProfilerStop(), "profiler_stop");
}
