// Reads parameters from safetensors and GGUF files on all cores: in chunks that stay in a core's cache for a host
// arena, in large blocks of pinned memory for a device.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/files/gguf_file.h"
#include "runtime/files/safetensors.h"
#include "runtime/model/params.h"

// Where a file holds elements [begin, begin + rows·cols) of a parameter. transposed: the file stores [cols, rows].
struct StoredPart {
    const SafetensorsFile* file;  // null: a GGUF file holds it
    const SafetensorsEntry* entry;
    int64_t begin, rows, cols;
    bool transposed;
    const GgufFile* gguf = nullptr;
    std::string gguf_name = "";
    // Of q and k where RoPE rotates neighbouring channels: row 2i + s of a head in the file is row i + s·head_size/2.
    int64_t interleaved_head_size = 0;

    int64_t numel() const { return rows * cols; }
    int64_t file_row(int64_t row) const;            // in a GGUF file
    DType dtype() const;                            // of numbers that hold the file's values
    std::vector<int64_t> shape(bool matrix) const;  // as the file has it
    // Reads elements [begin, end) of the tensor as fp32: in the file's order, but for interleaved heads.
    void read_values(int64_t first, int64_t end, float* dst) const;
};

// A callback that gets elements [begin, begin + count) of a parameter as fp32 values on the host. It may change them.
using TakeValues = std::function<void(int64_t begin, int64_t count, float* values)>;

// Returns memory that elements [begin, begin + count) of a parameter are read into as fp32 values, or null for the
// reader's own buffer. TakeValues then gets that memory, filled.
using FindValues = std::function<float*(int64_t begin, int64_t count)>;

// The CRC-32C of a range of a stored tensor, computed while it is read.
struct RangeChecksum {
    int64_t begin = 0, end = 0;  // elements of the tensor in the file's order
    uint32_t value = 0;          // the range's contribution to the checksum of the whole tensor
};

class ParamReader {
  public:
    // Which threads call TakeValues. AllThreads: all at once, with chunks. Caller: the calling thread, with blocks of
    // pinned memory, which stay unchanged until the work that TakeValues has queued on the default stream is done.
    enum class Takers : uint8_t { AllThreads, Caller };
    explicit ParamReader(Takers takers);
    ~ParamReader();
    ParamReader(const ParamReader&) = delete;
    ParamReader& operator=(const ParamReader&) = delete;
    // The takers that can store into an arena.
    static Takers takers_of(const WeightArenas& arenas);

    // Calls take for the elements of [begin, begin + count) that the part holds. With a checksum it also reads that
    // range, which must be in the part; if the part is not transposed it must be in [begin, begin + count). find is
    // used with Takers::AllThreads alone.
    void read(const StoredPart& part, int64_t begin, int64_t count, const TakeValues& take,
              RangeChecksum* checksum = nullptr, const FindValues& find = {});
    // For WeightArenas::store() within TakeValues, with its values: pinned memory for them rounded to 16 bits, which
    // stays unchanged as they do. Null with Takers::AllThreads.
    uint16_t* rounded(float* values) const;

  private:
    // For blocks of [begin, end), elements of the part: calls fill(block, begin, end) and take for what is filled.
    template <typename Fill>
    void deliver_blocks(const StoredPart& part, int64_t begin, int64_t end, const Fill& fill, const TakeValues& take);
    void read_in_order(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                       RangeChecksum* checksum, const FindValues& find);
    void read_transposed(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                         RangeChecksum* checksum, const FindValues& find);
    const Takers takers;
    std::vector<HostMemory> blocks;  // two, while the device copies one the other is filled
    Event copied[2];
    size_t next = 0;
    std::vector<float> buffer;  // of a transposed part, where find does not say where they may lie
};
