// The code around the kernel of every function of the C interface (train_gpt_kernels.h): it checks the context, turns
// arguments into tensors on the device, and turns exceptions into error codes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/device/blas_stream.h"
#include "runtime/device/tensor.h"
#include "tensor_library/train_gpt_kernels.h"

using DeviceMemory = std::unique_ptr<void, void (*)(void*)>;

struct tgk_context {
    Stream stream = create_blas_stream();
    DeviceMemory scratch{nullptr, device_free};
    int64_t scratch_bytes = 0;

    tgk_context() = default;
    tgk_context(const tgk_context&) = delete;
    ~tgk_context() { destroy_stream(stream); }
};

namespace c_interface {

DeviceMemory allocate(size_t bytes);

// The message of the latest failure on this thread.
extern thread_local std::string last_error;

// Runs f and returns the status; the message of an exception goes to last_error.
template <typename F>
int guarded(F f) {
    try {
        f();
        return TGK_OK;
    } catch (const DeviceError& error) {
        last_error = error.what();
        return TGK_DEVICE_ERROR;
    } catch (const Error& error) {
        last_error = error.what();
        return TGK_INVALID_ARGUMENT;
    } catch (const std::exception& error) {  // bad_alloc
        last_error = error.what();
        return TGK_DEVICE_ERROR;
    }
}

// The context; throws Error if it is null.
tgk_context& checked(tgk_context* context, const char* op);

// The tensor that the kernels take, without data if `from` is null. Throws Error if the description is invalid.
Tensor to_tensor(const char* op, const tgk_tensor* from);

// Copies of the host's tensors of a call on the GPU. Overlapping ranges of memory are copied as one, so that tensors
// that share memory on the host also share it on the GPU.
class Staging {
  public:
    // Copies the tensors to the device and redirects them to the copies. The first `outputs` of them are written.
    Staging(const char* op, tgk_context& c, std::vector<Tensor>& tensors, int outputs);
    // Copies written ranges back to the host and waits.
    void copy_back();

  private:
    struct Range {
        char *begin, *end;
        bool written;
        char* device;
        size_t bytes() const { return size_t(end - begin); }
    };
    tgk_context& context;
    std::vector<Range> ranges;
    std::vector<DeviceMemory> memory;
};

using Tensors = std::vector<Tensor>;

// The tensors of a call, and their names: "out, a, b".
struct Arguments {
    const char* names;
    std::initializer_list<const tgk_tensor*> tensors;
};
#define ARGUMENTS(...)       \
    c_interface::Arguments { \
#__VA_ARGS__, {      \
            __VA_ARGS__      \
        }                    \
    }

// How many of the tensors are written, or read and written: the first ones.
struct Outputs {
    int count;
    bool elementwise = false;  // each thread reads an element before it writes there: an output may be an input
};

// Throws Error if an output shares memory with another tensor, or with itself. The kernels would compute wrong numbers:
// they write some results before they have read all inputs.
void check_outputs(const char* op, const char* names, const Tensors& tensors, Outputs outputs);

// Runs body(tensors, context) with the tensors on the device.
template <typename Body>
int call(const char* op, tgk_context* context, Outputs outputs, Arguments arguments, Body body) {
    return guarded([&] {
        tgk_context& c = checked(context, op);
        Tensors tensors;
        for (const tgk_tensor* argument : arguments.tensors) tensors.push_back(to_tensor(op, argument));
        check_outputs(op, arguments.names, tensors, outputs);
        Staging staging(op, c, tensors, outputs.count);
        body(tensors, c);
        staging.copy_back();
    });
}

// Scratch of `bytes` bytes, which the context keeps for later calls.
Tensor scratch(tgk_context& c, int64_t bytes);

}  // namespace c_interface
