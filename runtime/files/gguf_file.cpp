#include "runtime/files/gguf_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

constexpr char MAGIC[] = {'G', 'G', 'U', 'F'};
constexpr uint32_t VERSION = 3;
constexpr int64_t ALIGNMENT = 32;  // if no key says otherwise
constexpr uint32_t MAX_RANK = 4;

enum ValueType : uint32_t { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };

int64_t scalar_bytes(uint32_t type) {
    switch (type) {
        case U8:
        case I8:
        case BOOL:
            return 1;
        case U16:
        case I16:
            return 2;
        case U32:
        case I32:
        case F32:
            return 4;
        case U64:
        case I64:
        case F64:
            return 8;
        default:
            return 0;
    }
}

template <typename T>
T load(const char* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// The shortest decimal number that is this float: 1e-5, not 9.99999974737875e-06.
double shortest(float x) {
    if (!std::isfinite(x)) return x;
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, x).ptr;
    double value = 0;
    std::from_chars(text, end, value);
    return value;
}

json scalar(uint32_t type, const char* bytes) {
    switch (type) {
        case U8:
            return load<uint8_t>(bytes);
        case I8:
            return load<int8_t>(bytes);
        case U16:
            return load<uint16_t>(bytes);
        case I16:
            return load<int16_t>(bytes);
        case U32:
            return load<uint32_t>(bytes);
        case I32:
            return load<int32_t>(bytes);
        case F32:
            return shortest(load<float>(bytes));
        case BOOL:
            return load<uint8_t>(bytes) != 0;
        case U64:
            return load<uint64_t>(bytes);
        case I64:
            return load<int64_t>(bytes);
        default:
            return load<double>(bytes);
    }
}

// Reads a header front to back. It never takes memory for a count that the file is too short for.
class HeaderReader {
  public:
    explicit HeaderReader(const FileReader& from) : file(from) {}

    [[noreturn]] void damaged(const std::string& what) const {
        throw Error(str(file.path(), ": ", what, "; the file is damaged or incomplete"));
    }
    void expect(uint64_t count, uint64_t size, const std::string& what) const {
        const auto left = uint64_t(file.size() - at);
        if (count > left / size)
            damaged(str(what, " takes ", count, " times ", size, " bytes or more, and the file has ", left, " left"));
    }
    template <typename T>
    T number(const std::string& what) {
        return load<T>(bytes(sizeof(T), what).data());
    }
    std::string text(const std::string& what) {
        const std::string value = bytes(number<uint64_t>(what), what);
        // JSON's writer is the UTF-8 check: it refuses what is none.
        try {
            (void)json(value).dump();
        } catch (const json::exception&) {
            damaged(str(what, " is not UTF-8"));
        }
        return value;
    }
    json value(uint32_t type, const std::string& what) {
        if (type == STRING) return text(what);
        if (type == ARRAY) return list(what);
        const int64_t size = scalar_bytes(type);
        if (!size) damaged(str(what, " has the unknown type ", type));
        return scalar(type, bytes(uint64_t(size), what).data());
    }
    int64_t position() const { return at; }

  private:
    // Through a buffer: a vocabulary has hundreds of thousands of short texts.
    std::string bytes(uint64_t n, const std::string& what) {
        expect(n, 1, what);
        std::string out(size_t(n), '\0');
        if (n > uint64_t(buffer.size())) {
            file.read(at, out.data(), int64_t(n));
        } else {
            if (at < begin || at + int64_t(n) > end) {
                begin = at;
                end = std::min(file.size(), at + int64_t(buffer.size()));
                file.read(begin, buffer.data(), end - begin);
            }
            std::memcpy(out.data(), buffer.data() + (at - begin), size_t(n));
        }
        at += int64_t(n);
        return out;
    }
    json list(const std::string& what) {
        const auto type = number<uint32_t>(what);
        const auto count = number<uint64_t>(what);
        const int64_t size = type == STRING ? 8 : scalar_bytes(type);
        if (!size) damaged(str(what, " is a list of type ", type));
        expect(count, uint64_t(size), what);
        json out = json::array();
        out.get_ref<json::array_t&>().reserve(size_t(count));
        for (uint64_t i = 0; i < count; i++) out.push_back(value(type, what));
        return out;
    }

    const FileReader& file;
    std::vector<char> buffer = std::vector<char>(1 << 16);
    int64_t at = 0, begin = 0, end = 0;  // the buffer holds [begin, end)
};

void check_readable(const GgufTypeFacts& type, const std::string& where) {
    if (type.dequantise) return;
    throw Error(str(where, " is ", type.name,
                    type.in_python ? "; convert the file with scripts/import_gguf.py, which reads this type"
                                   : "; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"));
}

// offset: in the file, from the start of the tensors' data.
GgufTensor read_tensor(HeaderReader& header, const std::string& where, const std::string& what) {
    const auto rank = header.number<uint32_t>(what);
    if (rank > MAX_RANK) header.damaged(str(what, " has ", rank, " dimensions, more than ", MAX_RANK));
    std::vector<int64_t> shape;
    uint64_t elements = 1;
    for (uint32_t i = 0; i < rank; i++) {
        const auto size = header.number<uint64_t>(what);
        constexpr uint64_t MOST = uint64_t(1) << 56;  // less than overflows as bytes
        if (!size || size > MOST / elements) header.damaged(str(what, " has a dimension of ", size));
        elements *= size;
        shape.insert(shape.begin(), int64_t(size));
    }
    const auto number = header.number<uint32_t>(what);
    const GgufTypeFacts* const known = find_gguf_type(number);
    require(known, where, " has the unknown type ", number, "; the file is damaged or newer than this program");
    const GgufTypeFacts& type = *known;
    const int64_t row = shape.empty() ? 1 : shape.back();
    require(row % type.block_size == 0, where, " is ", type.name, " with rows of ", row,
            ", which are no whole number of blocks of ", type.block_size, "; the file is damaged");
    const auto offset = header.number<uint64_t>(what);
    if (offset > uint64_t(std::numeric_limits<int64_t>::max() / 2))
        header.damaged(str(what, " has the offset ", offset));
    return {&type, std::move(shape), int64_t(offset)};
}

int64_t alignment_of(const json& values, const std::string& path) {
    const json found = values.value("general.alignment", json(ALIGNMENT));
    const int64_t n = found.is_number_integer() ? found.get<int64_t>() : 0;
    require(n > 0 && n < (1 << 30) && (n & (n - 1)) == 0, path, ": key general.alignment is ", shown(found),
            ", not a power of two; the file is damaged");
    return n;
}

int64_t padded(int64_t n, int64_t alignment) {
    return (n + alignment - 1) / alignment * alignment;
}

void check_offsets(const std::map<std::string, GgufTensor>& table, int64_t alignment, int64_t begin,
                   const FileReader& file) {
    std::map<int64_t, const std::string*> by_offset;
    for (const auto& [name, tensor] : table) {
        const std::string where = str(file.path(), ": tensor ", shown_text(name));
        require((tensor.offset - begin) % alignment == 0, where, " is at offset ", tensor.offset - begin,
                ", which is no multiple of ", alignment, "; the file is damaged");
        const int64_t bytes = tensor.type->bytes(tensor.numel());
        require(tensor.offset <= file.size() && bytes <= file.size() - tensor.offset, where, " takes ", bytes,
                " bytes at offset ", tensor.offset, " of the file, which ends at ", file.size(),
                "; the file is incomplete");
        const auto [other, is_new] = by_offset.insert({tensor.offset, &name});
        require(is_new, where, " overlaps tensor ", shown_text(*other->second), "; the file is damaged");
    }
    int64_t end = begin;
    const std::string* previous = nullptr;
    for (const auto& [offset, name] : by_offset) {
        require(offset >= end, file.path(), ": tensor ", shown_text(*name), " overlaps tensor ",
                previous ? shown_text(*previous) : "", "; the file is damaged");
        const GgufTensor& tensor = table.at(*name);
        end = offset + tensor.type->bytes(tensor.numel());
        previous = name;
    }
}

}  // namespace

int64_t GgufTensor::numel() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
}

bool GgufFile::has_magic(const std::string& path) {
    const FileReader file(path);
    char magic[sizeof MAGIC] = {};
    if (file.size() >= int64_t(sizeof magic)) file.read(0, magic, sizeof magic);
    return std::memcmp(magic, MAGIC, sizeof magic) == 0;
}

GgufFile::GgufFile(const std::string& path) : file(path) {
    require(has_magic(path), path, ": is not a GGUF file: it does not start with GGUF");
    HeaderReader header(file);
    (void)header.number<uint32_t>("the magic number");
    const auto version = header.number<uint32_t>("the version");
    require((version & 0xFFFF) != 0, path, ": is big-endian; convert it with `gguf-convert-endian ",
            path.substr(path.rfind('/') + 1), " little`");
    require(version == 2 || version == 3, path, ": is GGUF version ", version, "; supported: 2, 3");
    const auto num_tensors = header.number<uint64_t>("the number of tensors"),
               num_keys = header.number<uint64_t>("the number of keys");
    header.expect(num_keys, 13, str("a header with ", num_keys, " keys"));
    for (uint64_t i = 0; i < num_keys; i++) {
        const std::string name = header.text("the name of a key"), what = str("key ", shown_text(name));
        if (values.contains(name)) header.damaged(str(what, " occurs twice"));
        const auto type = header.number<uint32_t>(what);
        values[name] = header.value(type, what);
    }
    header.expect(num_tensors, 24, str("a header with ", num_tensors, " tensors"));
    for (uint64_t i = 0; i < num_tensors; i++) {
        const std::string name = header.text("the name of a tensor"), what = str("tensor ", shown_text(name));
        const bool is_new = table.insert({name, read_tensor(header, str(path, ": ", what), what)}).second;
        if (!is_new) header.damaged(str(what, " occurs twice"));
    }
    const int64_t alignment = alignment_of(values, path), begin = padded(header.position(), alignment);
    for (auto& [name, tensor] : table) tensor.offset += begin;
    check_offsets(table, alignment, begin, file);
    for (const auto& [name, tensor] : table) check_readable(*tensor.type, str(path, ": tensor ", shown_text(name)));
}

const GgufTensor& GgufFile::tensor(const std::string& name) const {
    const auto found = table.find(name);
    require(found != table.end(), path(), ": tensor ", name, " is missing");
    return found->second;
}

void GgufFile::read(const std::string& name, int64_t begin, int64_t count, float* dst) const {
    thread_local std::vector<uint8_t> raw;
    thread_local std::vector<float> values_of_blocks;
    const GgufTensor& t = tensor(name);
    const int64_t size = t.type->block_size, first = begin / size, blocks = (begin + count + size - 1) / size - first;
    raw.resize(size_t(blocks * t.type->block_bytes));
    read_blocks(name, first * size, blocks * size, raw.data());
    const bool whole = begin % size == 0 && count % size == 0;
    if (!whole) values_of_blocks.resize(size_t(blocks * size));
    const bool finite = t.type->dequantise(whole ? dst : values_of_blocks.data(), raw.data(), blocks);
    require(finite, path(), ": tensor ", name, ": a scale of its ", t.type->name,
            " blocks is infinite or NaN; the file is damaged");
    if (!whole) std::copy_n(values_of_blocks.data() + (begin - first * size), count, dst);
}

void GgufFile::read_blocks(const std::string& name, int64_t begin, int64_t count, uint8_t* dst) const {
    const GgufTensor& t = tensor(name);
    file.read(t.offset + t.type->bytes(begin), dst, t.type->bytes(count));
}

template <typename T>
void GgufWriter::put(T value) {
    header.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void GgufWriter::put_text(const std::string& text) {
    put(uint64_t(text.size()));
    header += text;
}

void GgufWriter::put_key(const std::string& key, uint32_t type) {
    put_text(key);
    put(type);
    keys++;
}

template <typename T>
void GgufWriter::put_list(const std::string& key, uint32_t type, const std::vector<T>& list) {
    put_key(key, ARRAY);
    put(type);
    put(uint64_t(list.size()));
    for (const T& value : list) {
        if constexpr (std::is_same_v<T, std::string>)
            put_text(value);
        else
            put(value);
    }
}

void GgufWriter::set(const std::string& key, const std::string& text) {
    put_key(key, STRING);
    put_text(text);
}

void GgufWriter::set(const std::string& key, bool value) {
    put_key(key, BOOL);
    put(uint8_t(value));
}

void GgufWriter::set(const std::string& key, int64_t value) {
    require(value >= 0 && value <= std::numeric_limits<uint32_t>::max(), "key ", key, " would be ", value,
            ", which GGUF's uint32 cannot hold");
    put_key(key, U32);
    put(uint32_t(value));
}

void GgufWriter::set(const std::string& key, double value) {
    put_key(key, F32);
    put(float(value));
}

void GgufWriter::set(const std::string& key, const std::vector<std::string>& texts) {
    put_list(key, STRING, texts);
}

void GgufWriter::set(const std::string& key, const std::vector<float>& numbers) {
    put_list(key, F32, numbers);
}

void GgufWriter::set(const std::string& key, const std::vector<int32_t>& numbers) {
    put_list(key, I32, numbers);
}

void GgufWriter::declare(const std::string& tensor, GgufType type, const std::vector<int64_t>& shape) {
    const int64_t bytes = facts_of(type).bytes(GgufTensor{&facts_of(type), shape, 0}.numel());
    tensors.push_back({tensor, type, shape, bytes});
}

void GgufWriter::begin(const std::string& path, const std::string& shown_as) {
    const std::string all_keys = std::move(header);
    header.assign(MAGIC, sizeof MAGIC);
    put(VERSION);
    put(uint64_t(tensors.size()));
    put(uint64_t(keys));
    header += all_keys;
    int64_t offset = 0;
    for (const Declared& tensor : tensors) {
        put_text(tensor.name);
        put(uint32_t(tensor.shape.size()));
        for (size_t i = tensor.shape.size(); i-- > 0;) put(uint64_t(tensor.shape[i]));
        put(uint32_t(tensor.type));
        put(uint64_t(offset));
        offset += padded(tensor.bytes, ALIGNMENT);
    }
    header.resize(size_t(padded(int64_t(header.size()), ALIGNMENT)), '\0');
    out = std::make_unique<FileWriter>(path, shown_as);
    out->write(header.data(), int64_t(header.size()));
}

void GgufWriter::write(const void* data, int64_t bytes) {
    require(current < tensors.size() && bytes <= tensors[current].bytes - written,
            "GgufWriter: more bytes than were declared");
    out->write(data, bytes);
    written += bytes;
    if (written < tensors[current].bytes) return;
    const std::string padding(size_t(padded(written, ALIGNMENT) - written), '\0');
    out->write(padding.data(), int64_t(padding.size()));
    current++;
    written = 0;
}

void GgufWriter::finish() {
    require(current == tensors.size(), "GgufWriter: ", current, " of ", tensors.size(), " tensors were written");
    out->finish();
}
