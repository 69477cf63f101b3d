// Checked file access: reads of wholes and parts, flushed writes and .npy arrays. Nothing is mapped: a mapped file that
// is truncated meanwhile would end the process with SIGBUS.
// Errors name the path, the system's error message and, if there is one, the remedy.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/device/tensor.h"

// A call of the system that failed: it tells nothing of a file's content, so no file is damaged for it.
struct SystemError : Error {
    using Error::Error;
};

// Throws SystemError: "<path>: cannot <action>: <the system's message><remedy>".
[[noreturn]] void throw_system_error(const std::string& path, const char* action, int error);

// Reads a whole file. Throws Error for a missing or unreadable file, a directory, or a file larger than limit.
std::string read_file(const std::string& path, int64_t limit = int64_t(1) << 32);

// Creates or replaces path atomically (temporary file, flush, rename).
void write_file(const std::string& path, std::string_view bytes);

// Reads parts of a regular file. A file that is truncated meanwhile is an Error.
class FileReader {
  public:
    // Throws Error for anything but a regular file; FIFOs and devices are not opened.
    explicit FileReader(const std::string& path);
    ~FileReader();
    FileReader(FileReader&& other) noexcept;
    FileReader(const FileReader&) = delete;
    void read(int64_t offset, void* dst, int64_t bytes) const;  // safe from several threads
    int64_t size() const { return length; }                     // when it was opened
    const std::string& path() const { return name; }

  private:
    std::string name;
    int64_t length = 0;
    int fd = -1;
};

// A file being written front to back. Every write is checked; finish() flushes to disk. Not atomic by itself: write
// into an AtomicDirectory.
class FileWriter {
  public:
    // shown_as: the name in errors if path is temporary. Create: an empty file. Shared: several processes write it, the
    // first creates it; bytes that are there stay.
    enum class Open : uint8_t { Create, Shared };
    explicit FileWriter(const std::string& path, const std::string& shown_as = "", Open how = Open::Create);
    ~FileWriter();
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    void seek(int64_t offset);  // the offset of the next write
    void write(const void* data, int64_t bytes);
    void flush();  // to disk
    void finish();

  private:
    std::string name;
    int fd = -1;
};

int64_t free_disk_bytes(const std::string& directory);  // that this user can write

void make_directories(const std::string& path);  // with parents; does nothing if it exists
void flush_directory(const std::string& path);   // fsync, so that a rename in it survives a power failure
bool path_exists(const std::string& path);       // throws SystemError if the system cannot tell
bool is_directory(const std::string& path);      // likewise
std::string join_path(const std::string& directory, const std::string& name);
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..
std::vector<std::string> glob_files(const std::string& pattern);   // paths, sorted; empty if none match
std::string glob_escape(const std::string& text);                  // a pattern that matches exactly these characters

// .npy version 1.0, little endian, C order; fp32, fp64 and int32. The tensor is on the host.
void write_npy(const std::string& path, const Tensor& t);
struct NpyArray {
    DType dtype;
    std::vector<int64_t> shape;
    std::string bytes;
    Tensor tensor();
};
NpyArray read_npy(const std::string& path);
