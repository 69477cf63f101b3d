#include "data/token_files.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "data/tokenizer.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

namespace {

constexpr int64_t HEADER_INTS = 256, HEADER_BYTES = HEADER_INTS * 4;

struct Format {
    int32_t magic, version;
    int width;  // bytes per token
};
constexpr Format FORMATS[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr uint32_t MASK_MAGIC = 20261121, MASK_VERSION = 3;

const char* const REMEDY = "; make it again with `make data`";

struct Header {
    int64_t count;
    int width;
};

// Checks everything that the header says against the file.
Header read_header(const FileReader& file) {
    const std::string& path = file.path();
    require(file.size() >= HEADER_BYTES, path, ": ", file.size(),
            " bytes are too few for a token file; the header alone has ", HEADER_BYTES, REMEDY);
    uint32_t header[4];
    file.read(0, header, sizeof header);

    const Format* format = nullptr;
    for (const Format& f : FORMATS)
        if (header[0] == uint32_t(f.magic)) format = &f;
    require(format, path, ": not a token file: it starts with the number ", header[0], " instead of ", FORMATS[0].magic,
            " or ", FORMATS[1].magic, REMEDY);
    require(header[1] == uint32_t(format->version), path, ": token file version ", header[1],
            " is not supported; the supported version is ", format->version, REMEDY);

    const uint64_t count = uint64_t(header[3]) << 32 | header[2];
    require(count > 0, path, ": holds no tokens", REMEDY);
    const uint64_t payload = uint64_t(file.size() - HEADER_BYTES);
    // A division, because a multiplication could overflow if the count is damaged.
    require(payload % uint64_t(format->width) == 0 && payload / uint64_t(format->width) == count, path,
            ": the header gives ", count, " tokens of ", format->width, " bytes, but ", payload,
            " bytes follow it: the file is truncated or damaged", REMEDY);
    return {int64_t(count), format->width};
}

// Opens the mask of a token file with `count` tokens, if there is one. Sets its version then.
std::optional<FileReader> open_mask(const std::string& tokens, int64_t count, uint32_t& version) {
    if (!ends_with(tokens, ".bin")) return {};
    const std::string path = tokens.substr(0, tokens.size() - 4) + ".mask";
    if (!path_exists(path)) return {};
    FileReader file(path);
    uint32_t header[4] = {};
    file.read(0, header, std::min<int64_t>(file.size(), sizeof header));
    require(header[0] == MASK_MAGIC && 1 <= header[1] && header[1] <= MASK_VERSION, path,
            ": not a mask file of version 1 to ", MASK_VERSION, REMEDY);
    version = header[1];
    require((uint64_t(header[3]) << 32 | header[2]) == uint64_t(count) && file.size() == HEADER_BYTES + count, path,
            ": does not have one byte for each of the ", count, " tokens of ", tokens, REMEDY);
    return file;
}

// Tokens offset, offset + 1, ... of a file as int32.
template <typename T>
void read_checked(const FileReader& file, int64_t offset, int64_t count, int32_t* dst, uint32_t limit) {
    T block[4096];
    for (int64_t n; count > 0; offset += n, dst += n, count -= n) {
        n = std::min<int64_t>(count, std::size(block));
        file.read(HEADER_BYTES + offset * int64_t(sizeof(T)), block, n * int64_t(sizeof(T)));
        uint32_t worst = 0;  // this loop has no branches; the second one finds the bad token if there is one
        for (int64_t i = 0; i < n; i++) {
            dst[i] = int32_t(block[i]);
            worst = std::max(worst, uint32_t(block[i]));
        }
        if (worst < limit) continue;
        for (int64_t i = 0; i < n; i++)
            require(uint32_t(dst[i]) < limit, file.path(), ": token ", offset + i, " is ", uint32_t(dst[i]),
                    ", outside the vocabulary of ", limit, "; the file is damaged or was made with another tokenizer");
    }
}

}  // namespace

TokenFiles::TokenFiles(const std::string& pattern) : name(pattern) {
    const std::vector<std::string> found = glob_files(pattern);
    require(!found.empty(), pattern, ": no token files match; make some with `make data`");
    shards.reserve(found.size());
    for (const std::string& path : found) {
        FileReader file(path);
        const Header header = read_header(file);
        require(shards.empty() || shards[0].width == header.width, path, ": has tokens of ", header.width,
                " bytes, but ", found[0], " has tokens of ", shards.empty() ? 0 : shards[0].width,
                " bytes; all shards must have the same format", REMEDY);
        uint32_t version = 1;
        std::optional<FileReader> mask = open_mask(path, header.count, version);
        require(shards.empty() || (version >= 2) == has_examples(), path, has_examples() ? ": has no" : ": has a",
                " mask that says where examples start, unlike ", found[0], "; all shards must have one, or none",
                REMEDY);
        require(shards.empty() || (version >= 3) == has_pairs(), path, has_pairs() ? ": does not hold" : ": holds",
                " preference pairs, unlike ", found[0], "; all shards must hold pairs, or none", REMEDY);
        any_mask = any_mask || mask;
        mask_version = version;
        shards.push_back({std::move(file), total, header.count, header.width, std::move(mask)});
        require(!__builtin_add_overflow(total, header.count, &total), pattern, ": more than 2^63 tokens");
    }
}

void TokenFiles::check_range(int64_t begin, int64_t count) const {
    require(begin >= 0 && count >= 0 && begin <= total - count, name, ": ", count, " tokens from token ", begin,
            " on are out of range; the files have ", total, " tokens");
}

const TokenFiles::Shard* TokenFiles::shard_of(int64_t token) const {
    const auto after =
        std::upper_bound(shards.begin(), shards.end(), token, [](int64_t t, const Shard& s) { return t < s.begin; });
    return &*(after - 1);
}

void TokenFiles::read_mask(int64_t begin, int64_t count, uint8_t* dst) const {
    read_flags(begin, count, dst);
    for (int64_t i = 0; i < count; i++) dst[i] &= LOSS;
}

void TokenFiles::read_flags(int64_t begin, int64_t count, uint8_t* dst) const {
    check_range(begin, count);
    const uint8_t all_flags = has_pairs()      ? LOSS | EXAMPLE_START | REJECTED
                              : has_examples() ? LOSS | EXAMPLE_START
                                               : LOSS;
    for (const Shard* shard = shard_of(begin); count > 0; ++shard) {
        const int64_t offset = begin - shard->begin, n = std::min(count, shard->count - offset);
        if (shard->mask) {
            shard->mask->read(HEADER_BYTES + offset, dst, n);
            const bool valid = std::all_of(dst, dst + n, [&](uint8_t m) { return m <= all_flags; });
            require(valid, shard->mask->path(), ": holds a byte above ", int(all_flags), "; the file is damaged",
                    REMEDY);
            const auto misplaced =
                std::find_if(dst, dst + n, [](uint8_t m) { return (m & (REJECTED | EXAMPLE_START)) == REJECTED; });
            require(misplaced == dst + n, shard->mask->path(), ": marks token ", offset + (misplaced - dst),
                    " as the first one of a rejected response, but no example starts there; the file is damaged",
                    REMEDY);
        } else {
            std::fill_n(dst, n, LOSS);
        }
        begin += n;
        count -= n;
        dst += n;
    }
}

void TokenFiles::read(int64_t begin, int64_t count, int32_t* dst, int64_t vocab_size) const {
    check_range(begin, count);
    // The rest of the program stores ids as int32, so they end at 2^31 even if the vocabulary is unknown.
    const int64_t int32_end = int64_t(std::numeric_limits<int32_t>::max()) + 1;
    const auto limit = uint32_t(vocab_size > 0 ? std::min(vocab_size, int32_end) : int32_end);

    for (const Shard* shard = shard_of(begin); count > 0; ++shard) {
        const int64_t offset = begin - shard->begin, n = std::min(count, shard->count - offset);
        if (shard->width == 2)
            read_checked<uint16_t>(shard->file, offset, n, dst, limit);
        else
            read_checked<uint32_t>(shard->file, offset, n, dst, limit);
        begin += n;
        count -= n;
        dst += n;
    }
}

std::vector<std::string> TokenFiles::paths() const {
    std::vector<std::string> all;
    for (const Shard& shard : shards) all.push_back(shard.file.path());
    return all;
}

std::string DataDirectory::tokenizer_path() const {
    const std::string file = join_path(path, "tokenizer.json");
    return path_exists(file) ? file : "";
}

std::string DataDirectory::train_pattern() const {
    return join_path(glob_escape(path), "train_*.bin");
}
std::string DataDirectory::val_pattern() const {
    return join_path(glob_escape(path), "val_*.bin");
}

bool holds_tokens(const std::string& directory) {
    DataDirectory data;
    data.path = directory;
    return !glob_files(data.train_pattern()).empty() || !glob_files(data.val_pattern()).empty();
}

DataDirectory open_data(const std::string& path) {
    require(path_exists(path), path, ": no such data directory; make one with `make data`");
    require(is_directory(path), path,
            ": not a directory; a data directory holds train_*.bin and val_*.bin (`make data`)");
    DataDirectory data;
    data.path = path;
    require(holds_tokens(path), path,
            ": holds neither train_*.bin nor val_*.bin; make a data directory with `make data`");

    if (const std::string tokenizer_path = data.tokenizer_path(); !tokenizer_path.empty()) {
        const Tokenizer tokenizer(tokenizer_path);
        data.vocab_size = tokenizer.vocab_size();
        data.end_of_text = tokenizer.end_of_text();
    }

    const std::string meta_path = join_path(path, "meta.json");
    if (!path_exists(meta_path)) return data;
    const JsonKeys meta{meta_path, read_json(meta_path)}, train = meta.keys_of("train"), val = meta.keys_of("val");
    data.train_bytes = train.whole_number("bytes", 0);
    data.train_documents = train.whole_number("documents", 0);
    data.val_bytes = val.whole_number("bytes", 0);
    data.val_documents = val.whole_number("documents", 0);
    if (train.has("tokens")) data.train_tokens = train.whole_number("tokens", 0);
    if (val.has("tokens")) data.val_tokens = val.whole_number("tokens", 0);
    if (meta.has("chat_template")) data.chat_template = meta.boolean("chat_template");
    const int64_t vocab_size = meta.whole_number("vocab_size", 1, std::numeric_limits<int32_t>::max());
    require(data.vocab_size == 0 || data.vocab_size == vocab_size, meta_path, ": vocab_size is ", vocab_size,
            " but tokenizer.json beside it has ", data.vocab_size,
            " tokens: the files were made with another tokenizer", REMEDY);
    data.vocab_size = vocab_size;
    data.end_of_text = int32_t(meta.whole_number("end_of_text", 0, vocab_size - 1));
    if (meta.has("end_of_turn")) data.end_of_turn = int32_t(meta.whole_number("end_of_turn", 0, vocab_size - 1));
    return data;
}

TokenFiles open_split(const DataDirectory& data, bool train_split) {
    TokenFiles files(train_split ? data.train_pattern() : data.val_pattern());
    const int64_t noted = train_split ? data.train_tokens : data.val_tokens;
    require(noted < 0 || noted == files.size(), join_path(data.path, "meta.json"), ": key '",
            train_split ? "train" : "val", ".tokens' is ", noted, ", but ", files.pattern(), " holds ", files.size(),
            " tokens: a file is missing or of another data set, and bits per byte would be wrong", REMEDY);
    return files;
}

int64_t text_bytes(const DataDirectory& data, const TokenFiles& files, bool train_split) {
    const int64_t noted = train_split ? data.train_bytes : data.val_bytes;
    if (noted || data.tokenizer_path().empty()) return noted;
    const Tokenizer tokenizer(data.tokenizer_path());
    std::vector<int64_t> length(static_cast<size_t>(tokenizer.vocab_size()));
    for (size_t id = 0; id < length.size(); id++) {
        const int32_t token = static_cast<int32_t>(id);
        if (tokenizer.contains(token)) length[id] = static_cast<int64_t>(tokenizer.decode(token).size());
    }
    if (tokenizer.end_of_text() >= 0) length[static_cast<size_t>(tokenizer.end_of_text())] = 0;
    int64_t bytes = 0;
    std::vector<int32_t> block(1 << 16);
    for (int64_t begin = 0; begin < files.size(); begin += int64_t(block.size())) {
        const int64_t n = std::min(int64_t(block.size()), files.size() - begin);
        files.read(begin, n, block.data(), tokenizer.vocab_size());
        for (int64_t i = 0; i < n; i++) bytes += length[static_cast<size_t>(block[static_cast<size_t>(i)])];
    }
    return bytes;
}
