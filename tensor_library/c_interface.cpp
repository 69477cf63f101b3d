#include "tensor_library/c_interface.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "tensor_library/strided.h"

static_assert(TGK_MAX_DIMS == MAX_DIMS);
static_assert(TGK_F32 == int(DType::F32) && TGK_F64 == int(DType::F64) && TGK_BF16 == int(DType::BF16) &&
              TGK_F16 == int(DType::F16) && TGK_I32 == int(DType::I32) && TGK_I64 == int(DType::I64) &&
              TGK_U16 == int(DType::U16) && TGK_U8 == int(DType::U8));
static_assert(TGK_CPU == int(Device::CPU) && TGK_CUDA == int(Device::CUDA));

namespace c_interface {

DeviceMemory allocate(size_t bytes) {
    return {device_alloc(bytes), device_free};
}

thread_local std::string last_error;

tgk_context& checked(tgk_context* context, const char* op) {
    require(context, op, ": the context is null");
    return *context;
}

Tensor to_tensor(const char* op, const tgk_tensor* from) {
    if (!from) return {};
    require(from->rank >= 0 && from->rank <= MAX_DIMS, op, ": a tensor has ", from->rank, " dimensions, expected 0 to ",
            MAX_DIMS);
    require(from->dtype >= TGK_F32 && from->dtype <= TGK_U8, op, ": ", from->dtype, " is not a dtype");
    require(from->device == TGK_CPU || from->device == TGK_CUDA, op, ": ", from->device, " is not a device");
    Tensor t = make_tensor(from->data, DType(from->dtype), Device(from->device), from->shape, from->rank);
    int64_t reach = dtype_size(t.dtype);
    for (int d = 0; d < t.rank; d++) {
        t.stride[d] = from->stride[d];
        int64_t bytes = 0;
        const bool overflows =
            t.shape[d] > 1 && (__builtin_mul_overflow(t.stride[d], t.shape[d] - 1, &bytes) ||
                               __builtin_mul_overflow(bytes, dtype_size(t.dtype), &bytes) || bytes == INT64_MIN ||
                               __builtin_add_overflow(reach, std::llabs(bytes), &reach));
        require(!overflows, op, ": the strides of a tensor ", shape_string(t), " overflow 64 bits");
    }
    static int64_t nothing;
    if (!t.data && t.numel() == 0) t.data = &nothing;  // null data means a missing tensor
    require(bool(t), op, ": a tensor ", shape_string(t), " has no data");
    return t;
}

namespace {

// The i-th of the names "out, a, b".
std::string name_of(const char* names, int i) {
    std::istringstream in(names);
    std::string name;
    for (int n = 0; n <= i; n++) std::getline(in >> std::ws, name, ',');
    return name;
}

bool same_tensor(const Tensor& a, const Tensor& b) {
    return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank &&
           std::equal(a.shape, a.shape + a.rank, b.shape) && std::equal(a.stride, a.stride + a.rank, b.stride);
}

}  // namespace

void check_outputs(const char* op, const char* names, const Tensors& tensors, Outputs outputs) {
    for (int o = 0; o < outputs.count; o++) {
        const Tensor& out = tensors[size_t(o)];
        if (!out) continue;
        check_distinct(op, name_of(names, o).c_str(), out);
        for (int i = o + 1; i < int(tensors.size()); i++) {
            const Tensor& t = tensors[size_t(i)];
            if (outputs.elementwise && i >= outputs.count && same_tensor(out, t)) continue;
            check_disjoint(op, name_of(names, o).c_str(), out, name_of(names, i).c_str(), t);
        }
    }
}

Staging::Staging(const char* op, tgk_context& c, std::vector<Tensor>& tensors, int outputs) : context(c) {
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor& t = tensors[i];
        if (!t || t.device == backend_device()) continue;
        require(t.device == Device::CPU, op, ": a tensor lies on a GPU, and this library was built for the CPU");
        const ByteRange range = byte_range(t);
        if (range.begin == range.end) continue;
        char* data = static_cast<char*>(t.data);
        ranges.push_back({data + range.begin, data + range.end, int(i) < outputs, nullptr});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    size_t merged = 0;
    for (size_t i = 1; i < ranges.size(); i++) {
        if (ranges[i].begin < ranges[merged].end) {
            ranges[merged].end = std::max(ranges[merged].end, ranges[i].end);
            ranges[merged].written |= ranges[i].written;
        } else {
            ranges[++merged] = ranges[i];
        }
    }
    ranges.resize(std::min(ranges.size(), merged + 1));
    for (Range& range : ranges) {
        // Keeps the offset within 16 bytes, so that aligned views stay aligned.
        const size_t offset = reinterpret_cast<uintptr_t>(range.begin) % 16;
        memory.push_back(allocate(range.bytes() + offset));
        range.device = static_cast<char*>(memory.back().get()) + offset;
        copy_to_device(range.device, range.begin, range.bytes(), context.stream);
    }
    for (Tensor& t : tensors) {
        if (!t || t.device == backend_device()) continue;
        t.device = backend_device();
        for (const Range& range : ranges) {
            char* data = static_cast<char*>(t.data);
            if (t.numel() > 0 && data >= range.begin && data < range.end) t.data = range.device + (data - range.begin);
        }
    }
}

void Staging::copy_back() {
    for (const Range& range : ranges)
        if (range.written) copy_to_host(range.begin, range.device, range.bytes(), context.stream);
    if (!ranges.empty()) synchronize(context.stream);
}

Tensor scratch(tgk_context& c, int64_t bytes) {
    if (bytes == 0) return {};
    if (bytes > c.scratch_bytes) {
        synchronize(c.stream);  // earlier work may still use the old scratch
        c.scratch.reset();
        c.scratch_bytes = 0;
        c.scratch = allocate(size_t(bytes));
        c.scratch_bytes = bytes;
    }
    return make_tensor(c.scratch.get(), DType::U8, backend_device(), {c.scratch_bytes});
}

}  // namespace c_interface
