#include "runtime/files/safetensors.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "runtime/files/crc32c.h"
#include "runtime/files/json_keys.h"

using nlohmann::json;

namespace {

constexpr int64_t MAX_HEADER = 100'000'000;  // the safetensors project's limit

struct DTypeName {
    const char* name;
    DType dtype;
};
// The first name of a dtype is the one written. Masks stored as BOOL are bytes of 0 and 1.
constexpr DTypeName DTYPES[] = {{"F32", DType::F32}, {"F64", DType::F64}, {"BF16", DType::BF16},
                                {"F16", DType::F16}, {"I32", DType::I32}, {"I64", DType::I64},
                                {"U16", DType::U16}, {"U8", DType::U8},   {"BOOL", DType::U8}};

std::string checksum_key(const std::string& tensor) {
    return "crc32c " + tensor;
}

int64_t read_length(const std::string& path, const FileReader& file) {
    require(file.size() >= 8, path, ": is ", file.size(), " bytes, too short for a safetensors file");
    uint8_t bytes[8];
    file.read(0, bytes, 8);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    require(length <= uint64_t(MAX_HEADER), path, ": safetensors header of ", length, " bytes; at most ", MAX_HEADER,
            " are allowed, the file is corrupt or of another kind");
    require(int64_t(length) <= file.size() - 8, path, ": safetensors header of ", length,
            " bytes is longer than the file (", file.size(), " bytes); the file is truncated or corrupt");
    return int64_t(length);
}

// The header is text as the safetensors library reads it: white space around the object, and nothing else, as of
// version 0.8.
json parse_header(const std::string& path, const std::string& text) {
    const size_t begin = text.find_first_not_of(" \t\r\n");
    require(begin != std::string::npos && text[begin] == '{', path,
            ": safetensors header does not start with '{'; the file is corrupt");
    constexpr size_t DEPTH = 3;  // the header, a tensor, its shape
    const std::string fault = json_fault(text, DEPTH, true);
    require(fault.empty(), path, ": safetensors header holds ", fault, "; the file is corrupt");
    return json::parse(text);
}

// A list of whole numbers ≥ 0, checked.
std::vector<int64_t> read_numbers(const std::string& where, const json& tensor, const char* key) {
    const auto list = tensor.find(key);
    require(list != tensor.end() && list->is_array(), where, ": ", key,
            " is missing or not a list; the file is corrupt");
    std::vector<int64_t> numbers;
    for (const json& value : *list) {
        const bool valid =
            value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(std::numeric_limits<int64_t>::max());
        if (!valid)
            throw Error(str(where, ": ", key, " is ", shown(*list), ", not a list of sizes; the file is corrupt"));
        numbers.push_back(value.get<int64_t>());
    }
    return numbers;
}

SafetensorsEntry read_entry(const std::string& where, const json& tensor, int64_t data_bytes) {
    require(tensor.is_object(), where, ": its entry is not a JSON object; the file is corrupt");
    SafetensorsEntry entry;
    const auto dtype = tensor.find("dtype");
    require(dtype != tensor.end() && dtype->is_string(), where,
            ": dtype is missing or not a string; the file is corrupt");
    const auto* known =
        std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const DTypeName& d) { return *dtype == d.name; });
    require(known != std::end(DTYPES), where, ": dtype ", shown(*dtype),
            " is not supported; convert the weights to F32, BF16 or F16");
    entry.dtype = known->dtype;

    entry.shape = read_numbers(where, tensor, "shape");
    require(entry.shape.size() <= size_t(MAX_DIMS), where, ": has ", entry.shape.size(), " dimensions; at most ",
            MAX_DIMS, " are supported");
    const std::vector<int64_t> offsets = read_numbers(where, tensor, "data_offsets");
    require(offsets.size() == 2, where, ": data_offsets has ", offsets.size(),
            " numbers, expected 2; the file is corrupt");
    entry.begin = offsets[0];
    entry.end = offsets[1];
    require(entry.begin <= entry.end && entry.end <= data_bytes, where, ": its data_offsets [", entry.begin, ", ",
            entry.end, "] lie outside the ", data_bytes, " bytes of data; the file is truncated or corrupt");

    // Strides are products that leave zeros out, so those must fit as well.
    int64_t bytes = dtype_size(entry.dtype), stride = bytes;
    for (const int64_t n : entry.shape) {
        require(!__builtin_mul_overflow(stride, std::max<int64_t>(n, 1), &stride), where,
                ": the size of its shape overflows 64 bits; the file is corrupt");
        bytes *= n;
    }
    require(entry.end - entry.begin == bytes, where, ": its shape ", shown(tensor["shape"]), " takes ", bytes,
            " bytes, its data_offsets say ", entry.end - entry.begin, "; the file is corrupt");
    return entry;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file(path) {
    const int64_t header_bytes = read_length(path, file);
    data_start = 8 + header_bytes;
    const int64_t data_bytes = file.size() - data_start;
    std::string head(size_t(header_bytes), '\0');
    file.read(8, head.data(), header_bytes);
    const json header = parse_header(path, head);

    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            require(value.is_object(), path, ": __metadata__ is not a JSON object; the file is corrupt");
            for (const auto& [key, text] : value.items()) {
                require(text.is_string(), path, ": __metadata__ ", shown(json(key)),
                        " is not a string; the file is corrupt");
                meta[key] = text.get<std::string>();
            }
        } else {
            table[name] = read_entry(str(path, ": tensor ", shown(json(name))), value, data_bytes);
        }
    }

    // In the order of their offsets the tensors must follow one another from the first byte to the last.
    std::vector<std::pair<const std::string*, const SafetensorsEntry*>> order;
    for (const auto& [name, entry] : table) order.emplace_back(&name, &entry);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        return std::make_pair(a.second->begin, a.second->end) < std::make_pair(b.second->begin, b.second->end);
    });
    int64_t at = 0;
    for (const auto& [name, entry] : order) {
        require(entry->begin == at, path, ": tensor ", shown(json(*name)), " starts at byte ", entry->begin,
                " of the data, expected ", at, " (", entry->begin < at ? "overlap" : "hole", "); the file is corrupt");
        at = entry->end;
    }
    require(at == data_bytes, path, ": its tensors take ", at, " bytes, the file holds ", data_bytes,
            " bytes of data; the file is corrupt");
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
    const auto found = table.find(name);
    require(found != table.end(), path(), ": there is no tensor ", shown(json(name)));
    return found->second;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t begin, int64_t count, void* dst) const {
    const int64_t size = dtype_size(entry.dtype);
    require(begin >= 0 && count >= 0 && begin <= entry.numel() - count, path(), ": elements ", begin, " to ",
            begin + count, " are outside a tensor of ", entry.numel());
    file.read(data_start + entry.begin + begin * size, dst, count * size);
}

std::optional<uint32_t> SafetensorsFile::checksum(const std::string& name) const {
    const auto found = meta.find(checksum_key(name));
    if (found == meta.end()) return {};
    const std::string& digits = found->second;
    require(digits.size() == 8 && digits.find_first_not_of("0123456789abcdef") == std::string::npos, path(),
            ": __metadata__ ", shown(json(found->first)), " is ", shown(json(digits)),
            ", not eight hexadecimal digits; the file is corrupt");
    return uint32_t(std::stoul(digits, nullptr, 16));
}

std::vector<uint32_t> Ranks::combine(std::vector<uint32_t> own) const {
    if (count == 1 || own.empty()) return own;
    std::vector<uint32_t> all(own.size() * size_t(count));
    all_gather(all.data(), own.data(), own.size() * sizeof own[0]);
    for (size_t i = 0; i < own.size(); i++) {
        own[i] = 0;
        for (size_t r = 0; r < size_t(count); r++) own[i] ^= all[r * own.size() + i];
    }
    return own;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, Checksums with_checksums, Metadata extra)
    : name(path), checksums(with_checksums), metadata(std::move(extra)) {
    metadata["format"] = "pt";
}

size_t SafetensorsWriter::declare(const std::string& tensor, DType dtype, const std::vector<int64_t>& shape) {
    require(!out, name, ": tensor ", tensor, " is declared after begin()");
    int64_t bytes = dtype_size(dtype);
    for (const int64_t n : shape) {
        require(n >= 0 && !__builtin_mul_overflow(bytes, n, &bytes), name, ": tensor ", tensor,
                ": its size is not valid");
    }
    table.push_back({tensor, {dtype, shape, total, total + bytes}});
    require(!__builtin_add_overflow(total, bytes, &total), name, ": the size of the file overflows 64 bits");
    return table.size() - 1;
}

// While checksums are unknown they are written as zeros: the length of the header does not depend on them.
std::string SafetensorsWriter::header(const std::vector<uint32_t>& crc) const {
    json names = {{"__metadata__", metadata}};
    for (size_t i = 0; i < table.size(); i++) {
        const auto& [tensor, entry] = table[i];
        require(!names.contains(tensor), name, ": tensor ", tensor, " is declared twice");
        const auto* dtype = std::find_if(std::begin(DTYPES), std::end(DTYPES),
                                         [&, type = entry.dtype](const DTypeName& d) { return d.dtype == type; });
        names[tensor] = {{"dtype", dtype->name}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
        if (checksums == Checksums::No) continue;
        char digits[9];
        std::snprintf(digits, sizeof digits, "%08" PRIx32, crc[i]);
        names["__metadata__"][checksum_key(tensor)] = digits;
    }
    std::string text = names.dump();
    text.append((8 - text.size() % 8) % 8, ' ');  // the data starts at a multiple of 8 bytes, as the format advises
    require(int64_t(text.size()) <= MAX_HEADER, name, ": safetensors header of ", text.size(), " bytes; at most ",
            MAX_HEADER, " are allowed");
    std::string length(8, '\0');
    for (size_t i = 0; i < 8; i++) length[i] = char(uint64_t(text.size()) >> 8 * i & 255);
    return length + text;
}

void SafetensorsWriter::begin(FileWriter::Open how) {
    require(!out, name, ": begin() was called twice");
    part.checksums.assign(table.size(), 0);
    header_bytes = int64_t(header(part.checksums).size());
    out = std::make_unique<FileWriter>(name, "", how);
    out->seek(header_bytes);
}

void SafetensorsWriter::seek(size_t tensor, int64_t byte) {
    const SafetensorsEntry& entry = table.at(tensor).second;
    require(out && byte >= 0 && byte <= entry.end - entry.begin, name, ": sought byte ", byte, " of a tensor of ",
            entry.end - entry.begin, " bytes");
    current = tensor;
    at = entry.begin + byte;
    out->seek(header_bytes + at);
}

// A part of a tensor contributes its checksum, shifted by the bytes that follow it (runtime/files/crc32c.h).
void SafetensorsWriter::add_to_checksums(const char* data, int64_t bytes) {
    for (int64_t begin = at; bytes > 0;) {
        const int64_t end = table[current].second.end, n = std::min(bytes, end - begin);
        part.checksums[current] ^= crc32c_shift(crc32c(data, n), end - begin - n);
        begin += n;
        data += n;
        bytes -= n;
        if (begin == end) current++;
    }
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
    require(out && bytes >= 0 && bytes <= total - at, name, ": ", bytes, " bytes written after ", at, " of the ", total,
            " declared");
    if (checksums == Checksums::Yes) add_to_checksums(static_cast<const char*>(data), bytes);
    out->write(data, bytes);
    at += bytes;
    part.bytes += bytes;
}

void SafetensorsWriter::Part::add(const Part& other) {
    require(checksums.size() == other.checksums.size(), "parts of different safetensors files");
    bytes += other.bytes;
    for (size_t i = 0; i < checksums.size(); i++) checksums[i] ^= other.checksums[i];
}

SafetensorsWriter::Part SafetensorsWriter::end_part() {
    require(bool(out), name, ": end_part() before begin()");
    out->flush();
    return part;
}

void SafetensorsWriter::finish(const Part& sum) {
    require(out && sum.bytes == total, name, ": finished after ", sum.bytes, " of the ", total, " bytes declared");
    const std::string text = header(sum.checksums);
    out->seek(0);
    out->write(text.data(), int64_t(text.size()));
    out->finish();
}
