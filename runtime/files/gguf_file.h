// The container of GGUF (llama.cpp's format of models), versions 2 and 3, little endian: "GGUF", version, number of
// tensors, number of keys; each key's name, type and value; each tensor's name, sizes (the innermost first), type and
// offset; padding; the tensors' bytes, each at a multiple of general.alignment (32).
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/files/files.h"
#include "runtime/files/gguf_types.h"

struct GgufTensor {
    const GgufTypeFacts* type;
    std::vector<int64_t> shape;  // rows first, as elsewhere here
    int64_t offset;              // bytes from the start of the file
    int64_t numel() const;
};

// A checked file. Throws Error naming file, and key or tensor, on: another magic number, big-endian order, another
// version; a count, a length or a tensor that the file is too short for, before memory is taken for it; an unknown
// type of a value, a list of lists, text that is not UTF-8, a key or a tensor given twice; more than 4 dimensions, a
// size below 1 or a product that overflows; a type that is unknown or not read here (the line then names
// scripts/import_gguf.py if that reads it); rows that are no whole number of blocks; offsets that are not aligned, that
// lie beyond the file or overlap.
class GgufFile {
  public:
    explicit GgufFile(const std::string& path);
    static bool has_magic(const std::string& path);  // whether a regular file starts with "GGUF"

    const std::string& path() const { return file.path(); }
    // Text, whole numbers, numbers (of a float the shortest decimal number that is this float), booleans, and lists.
    const nlohmann::json& keys() const { return values; }
    const std::map<std::string, GgufTensor>& tensors() const { return table; }
    const GgufTensor& tensor(const std::string& name) const;  // throws Error for an unknown name

    // The values of elements [begin, begin + count). Safe from several threads. Throws Error naming the tensor if a
    // scale is infinite or NaN, or the file was truncated meanwhile.
    void read(const std::string& name, int64_t begin, int64_t count, float* dst) const;
    // The bytes of the blocks of the same elements, which are whole blocks.
    void read_blocks(const std::string& name, int64_t begin, int64_t count, uint8_t* dst) const;

  private:
    FileReader file;
    nlohmann::json values = nlohmann::json::object();
    std::map<std::string, GgufTensor> table;
};

// Writes version 3: set keys and declare tensors, then begin() and write each tensor's bytes in the order of
// declaration. Not atomic: callers write a temporary file and rename it. Keys and tensors follow in the order given.
class GgufWriter {
  public:
    void set(const std::string& key, const std::string& text);
    void set(const std::string& key, const char* text) { set(key, std::string(text)); }
    void set(const std::string& key, bool value);
    void set(const std::string& key, int64_t value);  // as uint32; throws Error for one that it cannot hold
    void set(const std::string& key, double value);   // as float32
    void set(const std::string& key, const std::vector<std::string>& texts);
    void set(const std::string& key, const std::vector<float>& numbers);
    void set(const std::string& key, const std::vector<int32_t>& numbers);

    void declare(const std::string& tensor, GgufType type, const std::vector<int64_t>& shape);
    // path: to write; shown_as: its name in errors.
    void begin(const std::string& path, const std::string& shown_as);
    void write(const void* data, int64_t bytes);  // the next bytes of the tensor; pads behind its last one
    void finish();                                // throws Error unless all bytes were written

  private:
    struct Declared {
        std::string name;
        GgufType type;
        std::vector<int64_t> shape;
        int64_t bytes;
    };
    template <typename T>
    void put(T value);
    void put_text(const std::string& text);
    void put_key(const std::string& key, uint32_t type);
    template <typename T>
    void put_list(const std::string& key, uint32_t type, const std::vector<T>& list);

    std::string header;  // the keys so far
    int64_t keys = 0;
    std::vector<Declared> tensors;
    size_t current = 0;   // the tensor that is being written
    int64_t written = 0;  // bytes of it
    std::unique_ptr<FileWriter> out;
};
