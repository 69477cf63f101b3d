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
    int64_t numel() const { return (end - begin) / dtype_size(dtype); }
};

// A checked file. Throws Error naming file and tensor on: a header longer than the file or 100 MB, broken JSON, a name
// given twice, a dtype that DType lacks (BOOL is read as U8), more than MAX_DIMS dimensions, a shape that doesn't match
// its bytes or overflows, offsets beyond the file, overlaps, holes, trailing bytes.
class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::string& path);
    const std::map<std::string, SafetensorsEntry>& entries() const { return table; }
    const std::map<std::string, std::string>& metadata() const { return meta; }
    const std::string& path() const { return file.path(); }
    const SafetensorsEntry& entry(const std::string& name) const;  // throws Error for an unknown name
    // Copies elements [begin, begin + count) of a tensor to dst, in the file's dtype. Safe from several threads. A file
    // that was truncated meanwhile is an Error.
    void read(const SafetensorsEntry& entry, int64_t begin, int64_t count, void* dst) const;
    // CRC-32C of a tensor's bytes, from the metadata; empty if the writer stored none.
    std::optional<uint32_t> checksum(const std::string& name) const;

  private:
    FileReader file;
    int64_t data_start = 0;
    std::map<std::string, SafetensorsEntry> table;
    std::map<std::string, std::string> meta;
};

// The processes that read or write a file together.
struct Ranks {
    int64_t rank = 0, count = 1;
    // all [count·bytes]: every process's own [bytes], in the order of ranks. Collective; may be null if count is 1.
    std::function<void(void* all, const void* own, size_t bytes)> all_gather;

    // The element-wise XOR over all processes. Collective.
    std::vector<uint32_t> combine(std::vector<uint32_t> own) const;
};

// Writes a file: declare every tensor, then write their bytes in the order of declaration. Several processes can write
// one file together: all declare the same tensors, each seeks to its own parts, writes them and calls end_part(); when
// all have, one of them calls finish() with the sum of the parts. The header is written last: an unfinished file is not
// a valid one.
class SafetensorsWriter {
  public:
    using Metadata = std::map<std::string, std::string>;
    // With checksums the metadata gets "crc32c <tensor>", eight hexadecimal digits: CRC-32C of the tensor's bytes.
    enum class Checksums : uint8_t { No, Yes };
    explicit SafetensorsWriter(const std::string& path, Checksums checksums = Checksums::No, Metadata metadata = {});
    const std::string& path() const { return name; }
    // Returns the tensor's number, from 0.
    size_t declare(const std::string& tensor, DType dtype, const std::vector<int64_t>& shape);
    void begin(FileWriter::Open how = FileWriter::Open::Create);
    void seek(size_t tensor, int64_t byte);       // sets the position of the next write
    void write(const void* data, int64_t bytes);  // the next bytes of the data section

    // The part of the data section that one process has written: bytes, and its contribution to each tensor's checksum.
    struct Part {
        int64_t bytes = 0;
        std::vector<uint32_t> checksums;
        void add(const Part& other);
    };
    Part end_part();               // flushes what this process has written
    void finish(const Part& sum);  // checks that all declared bytes were written once, writes the header and flushes
    void finish() { finish(end_part()); }

  private:
    const std::string name;
    const Checksums checksums;
    Metadata metadata;  // {"format": "pt"} and what the constructor was given
    std::vector<std::pair<std::string, SafetensorsEntry>> table;
    Part part;
    int64_t total = 0, at = 0, header_bytes = 0;
    size_t current = 0;  // the tensor that the byte `at` is in
    std::string header(const std::vector<uint32_t>& crc) const;
    void add_to_checksums(const char* data, int64_t bytes);
    std::unique_ptr<FileWriter> out;
};
