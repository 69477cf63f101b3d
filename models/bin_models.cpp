#include "models/bin_models.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>

#include "models/llama_block.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/files/checkpoint_directory.h"

namespace {

constexpr int32_t LLMC_MAGIC = 20240326;
constexpr uint32_t LLAMA2C_MAGIC = 0x616B3432;  // "ak42"
constexpr int64_t LLMC_HEADER = 256 * 4, LLAMA2C_V0_HEADER = 7 * 4, LLAMA2C_HEADER = 256;
constexpr double EPSILON = 1e-5;  // of the norms, in both programs

// Rows of a parameter that are stored as one block. heads: > 0 for q or k, whose rows are permuted for RoPE; 0: stored
// as they are.
struct Block {
    std::string param;
    int64_t row, rows, cols;  // cols 0: a vector
    int64_t heads;
    int64_t offset;  // elements from the start of the weights

    int64_t row_size() const { return cols ? cols : 1; }
    int64_t numel() const { return rows * row_size(); }
};

// The blocks of a file in its order.
struct Layout {
    std::vector<Block> blocks;
    int64_t elements = 0;

    void add(const std::string& param, int64_t row, int64_t rows, int64_t cols, int64_t heads = 0) {
        blocks.push_back({param, row, rows, cols, heads, elements});
        elements += blocks.back().numel();
    }
    void skip(int64_t count) { elements += count; }
};

Layout llmc_layout(const ModelConfig& c, int64_t padded_vocab) {
    Layout layout;
    const int64_t C = c.channels;
    layout.add("wte.weight", 0, c.vocab_size, C);
    layout.skip((padded_vocab - c.vocab_size) * C);
    layout.add("wpe.weight", 0, c.max_positions, C);
    const auto layers = [&](const char* name, int64_t rows, int64_t cols) {
        for (int64_t l = 0; l < c.layers; l++) layout.add(str("layers.", l, ".", name), 0, rows, cols);
    };
    layers("norm1.weight", C, 0);
    layers("norm1.bias", C, 0);
    layers("qkv.weight", 3 * C, C);
    layers("qkv.bias", 3 * C, 0);
    layers("proj.weight", C, C);
    layers("proj.bias", C, 0);
    layers("norm2.weight", C, 0);
    layers("norm2.bias", C, 0);
    layers("fc.weight", 4 * C, C);
    layers("fc.bias", 4 * C, 0);
    layers("fcproj.weight", C, 4 * C);
    layers("fcproj.bias", C, 0);
    layout.add("normf.weight", 0, C, 0);
    layout.add("normf.bias", 0, C, 0);
    return layout;
}

Layout llama2c_layout(const ModelConfig& c, int32_t version) {
    Layout layout;
    const int64_t C = c.channels, Q = c.heads * c.head_size, K = c.kv_heads * c.head_size;
    const auto layers = [&](const char* name, int64_t row, int64_t rows, int64_t cols, int64_t heads = 0) {
        for (int64_t l = 0; l < c.layers; l++) layout.add(str("layers.", l, ".", name), row, rows, cols, heads);
    };
    const auto attention = [&] {
        layers("qkv.weight", 0, Q, C, c.heads);
        layers("qkv.weight", Q, K, C, c.kv_heads);
        layers("qkv.weight", Q + K, K, C);
        layers("proj.weight", 0, C, Q);
    };
    const auto mlp = [&] {
        layers("fc.weight", 0, c.ffn, C);
        layers("fcproj.weight", 0, C, c.ffn);
        layers("fc.weight", c.ffn, c.ffn, C);
    };
    if (version == 0) {
        layout.add("wte.weight", 0, c.vocab_size, C);
        layers("norm1.weight", 0, C, 0);
        attention();
        layers("norm2.weight", 0, C, 0);
        mlp();
        layout.add("normf.weight", 0, C, 0);
        layout.skip(c.max_positions * c.head_size);  // RoPE's cosines and sines
    } else {
        layers("norm1.weight", 0, C, 0);
        layers("norm2.weight", 0, C, 0);
        layout.add("normf.weight", 0, C, 0);
        layout.add("wte.weight", 0, c.vocab_size, C);
        attention();
        mlp();
    }
    if (!c.tied) layout.add("head.weight", 0, c.vocab_size, C);
    return layout;
}

// How many elements the layout has, without making it: a damaged header may name a billion layers.
double llmc_elements(const ModelConfig& c, int64_t padded_vocab) {
    const double C = double(c.channels);
    return C * double(padded_vocab + c.max_positions) + double(c.layers) * (12 * C * C + 13 * C) + 2 * C;
}

double llama2c_elements(const ModelConfig& c, int32_t version) {
    const double C = double(c.channels), Q = double(c.heads * c.head_size), K = double(c.kv_heads * c.head_size);
    const double layer = 2 * C + 2 * C * (Q + K) + 3 * C * double(c.ffn);
    const double table = version == 0 ? double(c.max_positions) * double(c.head_size) : 0;
    return double(c.layers) * layer + C + double(c.tied ? 1 : 2) * double(c.vocab_size) * C + table;
}

ModelConfig llmc_config(const int32_t* header, const std::string& path) {
    ModelConfig c;
    c.max_positions = header[2];
    c.vocab_size = header[3];
    c.layers = header[4];
    c.heads = header[5];
    c.channels = header[6];
    c.norm_eps = EPSILON;
    if (c.vocab_size == 50257) c.bos = c.eos = 50256;
    fill_defaults(c, path);
    validate(c, path);
    return c;
}

ModelConfig llama2c_config(const int32_t* sizes, bool tied, const std::string& path) {
    ModelConfig c = llama_block(sizes[2], sizes[0], sizes[3], sizes[4], sizes[1]);
    c.vocab_size = sizes[5];
    c.max_positions = sizes[6];
    c.tied = tied;
    c.norm_eps = EPSILON;
    c.bos = c.vocab_size > 1 ? 1 : -1;
    c.eos = c.vocab_size > 2 ? 2 : -1;
    require(c.kv_heads > 0 && c.ffn > 0, path, ": ", c.kv_heads, " KV heads and an inner width of ", c.ffn,
            "; the file is damaged");
    fill_defaults(c, path);
    validate(c, path);
    return c;
}

// Version 0 has no magic number: its sizes must account for the whole file.
bool is_llama2c_v0(const FileReader& file, int32_t sizes[7], bool& tied) {
    if (file.size() < LLAMA2C_V0_HEADER) return false;
    file.read(0, sizes, LLAMA2C_V0_HEADER);
    tied = sizes[5] > 0;
    if (sizes[5] == std::numeric_limits<int32_t>::min()) return false;
    sizes[5] = std::abs(sizes[5]);
    try {
        const ModelConfig c = llama2c_config(sizes, tied, file.path());
        return llama2c_elements(c, 0) * 4 == double(file.size() - LLAMA2C_V0_HEADER);
    } catch (const Error&) {
        return false;
    }
}

BinKind kind_of(const FileReader& file) {
    uint32_t magic = 0;
    if (file.size() >= 4) file.read(0, &magic, 4);
    if (magic == uint32_t(LLMC_MAGIC)) return BinKind::Llmc;
    int32_t sizes[7];
    bool tied;
    return magic == LLAMA2C_MAGIC || is_llama2c_v0(file, sizes, tied) ? BinKind::Llama2c : BinKind::Other;
}

// Row r of a head in llama2.c's order (the two channels of a RoPE pair are adjacent) is row split_row(r) in ours (they
// are half a head apart).
int64_t split_row(int64_t r, int64_t head_size) {
    return r / 2 + (r % 2) * (head_size / 2);
}

}  // namespace

BinKind bin_model_kind(const std::string& path) {
    return kind_of(FileReader(path));
}

BinModel::BinModel(const std::string& path) : file(std::make_shared<FileReader>(path)) {
    kind = kind_of(*file);
    require(kind != BinKind::Other, path,
            ": is neither a model of llm.c nor one of llama2.c; name a model directory, or a .bin file of theirs");
    double elements = 0;
    int32_t header[256] = {};
    if (kind == BinKind::Llmc) {
        require(file->size() >= LLMC_HEADER, path, ": ends inside the header; the file is truncated");
        file->read(0, header, LLMC_HEADER);
        version = header[1];
        require(version == 3 || version == 5, path, ": is of version ", version,
                " of llm.c's model files; 3 (fp32) and 5 (bf16) are supported");
        stored = version == 5 ? DType::BF16 : DType::F32;
        model = llmc_config(header, path);
        padded_vocab = header[7];
        require(padded_vocab >= model.vocab_size, path, ": the padded vocabulary of ", padded_vocab,
                " is smaller than the vocabulary of ", model.vocab_size, "; the file is damaged");
        data_start = LLMC_HEADER;
        elements = llmc_elements(model, padded_vocab);
    } else {
        bool tied = false;
        if (!is_llama2c_v0(*file, header, tied)) {
            require(file->size() >= LLAMA2C_HEADER, path, ": ends inside the header; the file is truncated");
            file->read(8, header, 7 * 4);
            file->read(4, &version, 4);
            require(version == 1, path, ": is of version ", version,
                    " of llama2.c's model files; 0 and 1 (fp32) are supported");
            char own_head = 0;
            file->read(8 + 7 * 4, &own_head, 1);
            tied = own_head != 0;
        }
        model = llama2c_config(header, tied, path);
        data_start = version == 0 ? LLAMA2C_V0_HEADER : LLAMA2C_HEADER;
        elements = llama2c_elements(model, version);
    }
    const double expected = elements * double(dtype_size(stored));
    require(expected == double(file->size() - data_start), path, ": the header promises ", int64_t(expected),
            " bytes of weights and ", file->size() - data_start, " are there; the file is truncated or damaged");
}

std::string BinModel::format() const {
    return str(kind == BinKind::Llmc ? "llm.c v" : "llama2.c v", version);
}

WeightSource BinModel::weights(const ParamTable& table) const {
    const Layout layout = kind == BinKind::Llmc ? llmc_layout(model, padded_vocab) : llama2c_layout(model, version);
    std::map<std::string, std::vector<Block>> blocks;
    for (const Block& b : layout.blocks) blocks[b.param].push_back(b);
    for (const Param& p : table.params) {
        int64_t rows = 0;
        for (const Block& b : blocks[p.name]) rows += b.cols == p.cols ? b.rows : 0;
        require(rows == p.rows, file->path(), ": holds ", rows, " rows of ", p.name, ", expected ", p.rows);
    }
    const auto fetch = [blocks, file = file, start = data_start, T = stored, HS = model.head_size](
                           const Param& p, std::vector<float>& buffer) {
        buffer.assign(size_t(p.padded_numel()), 0.0f);
        for (const Block& b : blocks.at(p.name)) {
            const int64_t C = b.row_size(), row_bytes = C * dtype_size(T);
            float* const dst = buffer.data() + b.row * C;
            std::vector<char> rows(size_t(b.rows * row_bytes));
            file->read(start + b.offset * dtype_size(T), rows.data(), int64_t(rows.size()));
            if (!b.heads) {
                convert_to_float(dst, rows.data(), T, b.numel());
                continue;
            }
            for (int64_t r = 0; r < b.rows; r++) {
                const int64_t to = r / HS * HS + split_row(r % HS, HS);
                convert_to_float(dst + to * C, rows.data() + r * row_bytes, T, C);
            }
        }
        return static_cast<const float*>(buffer.data());
    };
    return {fetch, [T = stored](const Param&, const SourceTensor&) { return T; }};
}

void write_llmc_model(const std::string& path, const ModelConfig& c, const ParamTable& table, const FetchParam& fetch,
                      DType dtype) {
    const bool fits =
        &family_of(c) == &gpt2::family() && c.tied && c.ffn == 4 * c.channels && std::fabs(c.norm_eps - EPSILON) < 1e-9;
    require(fits, path, ": llm.c's format holds GPT-2 with a tied head, an inner width of 4 times the channels and a ",
            "norm epsilon of 1e-5; save this model as a directory");
    require(dtype == DType::F32 || dtype == DType::BF16, path, ": llm.c's format holds fp32 or bf16, not ",
            dtype_name(dtype));
    require(!path_exists(path), path, ": exists already; choose another name or remove it");
    const std::string temporary = temporary_path(path);
    try {
        FileWriter out(temporary, path);
        int32_t header[256] = {LLMC_MAGIC, dtype == DType::F32 ? 3 : 5};
        const int64_t sizes[] = {c.max_positions, c.vocab_size, c.layers, c.heads, c.channels, c.padded_vocab()};
        for (size_t i = 0; i < 6; i++) header[2 + i] = int32_t(sizes[i]);  // validate() keeps them below 2^31
        out.write(header, sizeof header);
        std::vector<float> buffer;
        std::vector<char> converted;
        int64_t written = 0;
        const auto write = [&](const float* values, int64_t n) {
            converted.resize(size_t(n * dtype_size(dtype)));
            convert_from_float(converted.data(), dtype, values, n);
            out.write(converted.data(), int64_t(converted.size()));
            written += n;
        };
        const Layout layout = llmc_layout(c, c.padded_vocab());
        for (const Block& b : layout.blocks) {
            const std::vector<float> padding(size_t(b.offset - written), 0.0f);
            write(padding.data(), int64_t(padding.size()));
            write(fetch(table.by_name(b.param), buffer), b.numel());
        }
        out.finish();
        const bool renamed = std::rename(temporary.c_str(), path.c_str()) == 0;
        require(renamed, path, ": cannot rename ", temporary, " to it: ", std::strerror(errno));
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
}
