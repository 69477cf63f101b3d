// Memory in a few large blocks whose layout is known before anything is allocated.
//
// ArenaPlan: each tensor has a first and a last phase of use. Tensors whose lifetimes do not overlap share memory. The
// plan's size is the arena's size; `train_gpt plan` prints it without allocating anything.
// Offsets: largest first, each at the lowest offset that is free during its lifetime (Pisarchyk, Lee 2020, "Efficient
// memory management for deep neural net inference", greedy by size).
#pragma once

#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// Where an arena lies. Host: in pinned memory of the host, which kernels and copies reach over PCIe at the same
// address. On the CPU both are the same.
enum class MemoryPlace { Device, Host };

// One block of memory for kernels. Throws Error if the allocation fails.
class Arena {
  public:
    Arena() = default;
    Arena(int64_t bytes, const char* what, MemoryPlace where = MemoryPlace::Device);
    // Memory that another arena owns and that outlives this one: a contiguous tensor on the backend's device.
    explicit Arena(const Tensor& part);
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;

    // A tensor at a byte offset; throws Error if it would run past the end.
    Tensor at(int64_t offset, DType dtype, const int64_t* shape, size_t rank) const;
    Tensor at(int64_t offset, DType dtype, std::initializer_list<int64_t> shape) const {
        return at(offset, dtype, shape.begin(), shape.size());
    }
    Tensor at(int64_t offset, DType dtype, const std::vector<int64_t>& shape) const {
        return at(offset, dtype, shape.data(), shape.size());
    }
    int64_t bytes() const { return size; }
    explicit operator bool() const { return base != nullptr; }

  private:
    char* base = nullptr;
    int64_t size = 0;
    MemoryPlace place = MemoryPlace::Device;
    bool borrowed = false;
};

class ArenaPlan {
  public:
    struct Entry {
        std::string name;
        DType dtype;
        std::vector<int64_t> shape;
        int64_t first, last;  // phases of first and last use, both inclusive
        int64_t bytes, offset;
    };
    // The largest alignment that GPU kernels and GEMM libraries ask for. All tensors have it, so that the choice of a
    // GEMM algorithm does not depend on a tensor's offset.
    static constexpr int64_t ALIGNMENT = 256;
    static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

    // Returns the entry's index. Bytes are rounded up to ALIGNMENT.
    int64_t add(const std::string& name, DType dtype, const std::vector<int64_t>& shape, int64_t first, int64_t last);
    // Sets all offsets. overlap = false gives every tensor memory of its own (tests compare the two).
    void assign_offsets(bool overlap = true);

    int64_t bytes() const { return total; }
    const std::vector<Entry>& entries() const { return list; }

  private:
    std::vector<Entry> list;
    int64_t total = 0;
};
