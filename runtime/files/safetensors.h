// The safetensors format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, raw little-endian data.
// The specification and its limits (header ≤ 100 MB, no holes, no overlaps) are those of the safetensors project.
#pragma once

#include <map>
#include <memory>
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

  private:
    MappedFile file;
    int64_t data_start = 0;
    std::map<std::string, SafetensorsEntry> table;
    std::map<std::string, std::string> meta;
};

// Writes a file: declare every tensor, then write their bytes in the order of declaration. Several processes can write
// one file together; each seeks to its own parts.
class SafetensorsWriter {
  public:
    explicit SafetensorsWriter(const std::string& path) : name(path) {}
    // Returns the tensor's number, from 0.
    size_t declare(const std::string& tensor, DType dtype, const std::vector<int64_t>& shape);
    void begin();                                 // writes the header (metadata {"format": "pt"})
    void join();                                  // instead of begin(): another process wrote the same header
    void seek(size_t tensor, int64_t byte);       // sets the position of the next write
    void write(const void* data, int64_t bytes);  // the next bytes of the data section
    void finish();  // checks that all declared bytes were written (unless other processes write too) and flushes

  private:
    std::string name;
    std::vector<std::pair<std::string, SafetensorsEntry>> table;
    int64_t total = 0, written = 0, header_bytes = 0;
    bool partial = false;  // other processes write the rest
    std::string header() const;
    std::unique_ptr<FileWriter> out;
};
