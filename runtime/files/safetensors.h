// The safetensors format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, raw little-endian data.
// The specification and its limits (header ≤ 100 MB, no holes, no overlaps) are those of the safetensors project.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/device/tensor.h"
#include "runtime/files/files.h"

struct SafetensorsEntry {
    DType dtype;
    std::vector<int64_t> shape;
    int64_t begin, end;  // bytes from the start of the data section
};

// A checked, memory-mapped file. Throws Error naming file and tensor on: a header longer than the file or 100 MB,
// broken JSON, a name given twice, a dtype that DType lacks (BOOL is read as U8), more than MAX_DIMS dimensions, a
// shape that doesn't match its bytes or overflows, offsets beyond the file, overlaps, holes, trailing bytes.
class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::string& path);
    const std::map<std::string, SafetensorsEntry>& entries() const { return table; }
    const std::map<std::string, std::string>& metadata() const { return meta; }
    const std::string& path() const { return file.path(); }
    // A view into the map, in the file's dtype, valid while this object lives. Throws Error for an unknown name.
    Tensor tensor(const std::string& name) const;
    void release(const std::string& name) const;  // MappedFile::release for a tensor that was read
    // CRC-32C of a tensor's bytes, from the metadata; empty if the writer stored none.
    std::optional<uint32_t> checksum(const std::string& name) const;

  private:
    MappedFile file;
    int64_t data_start = 0;
    std::map<std::string, SafetensorsEntry> table;
    std::map<std::string, std::string> meta;
};

// The processes that read or write a file together. Each calls the same functions in the same order.
struct Ranks {
    int64_t rank = 0, count = 1;
    std::function<void()> barrier = [] {};  // returns when all have called it
    // all [count·bytes]: every process's own [bytes], in the order of ranks.
    std::function<void(void* all, const void* own, size_t bytes)> all_gather;  // may be null if count is 1

    // The element-wise XOR over all processes.
    std::vector<uint32_t> combine(std::vector<uint32_t> own) const;
};

// Writes a file: declare every tensor, then write their bytes in the order of declaration. Several processes can write
// one file together; each seeks to its own parts. The header is written last: an unfinished file is not a valid one.
class SafetensorsWriter {
  public:
    using Metadata = std::map<std::string, std::string>;
    // With checksums the metadata gets "crc32c <tensor>", eight hexadecimal digits: CRC-32C of the tensor's bytes.
    enum class Checksums : uint8_t { No, Yes };
    explicit SafetensorsWriter(const std::string& path, Checksums checksums = Checksums::No, Metadata metadata = {});
    // Returns the tensor's number, from 0.
    size_t declare(const std::string& tensor, DType dtype, const std::vector<int64_t>& shape);
    void begin(const Ranks& ranks = {});          // creates the file; all processes declare the same
    void seek(size_t tensor, int64_t byte);       // sets the position of the next write
    void write(const void* data, int64_t bytes);  // the next bytes of the data section
    void finish();  // checks that all declared bytes were written once, writes the header and flushes

  private:
    const std::string name;
    const Checksums checksums;
    Metadata metadata;  // {"format": "pt"} and what the constructor was given
    Ranks ranks;
    std::vector<std::pair<std::string, SafetensorsEntry>> table;
    std::vector<uint32_t> crc;  // of each tensor: this process's contribution
    int64_t total = 0, at = 0, written = 0, header_bytes = 0;
    size_t current = 0;  // the tensor that the byte `at` is in
    std::string header() const;
    void add_to_checksums(const char* data, int64_t bytes);
    std::unique_ptr<FileWriter> out;
};
