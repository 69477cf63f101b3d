// runtime/files/safetensors.h: round trips in each dtype, every rule of the format broken once, and random damage.
#include "runtime/files/safetensors.h"

#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "dev/tests/stored_tensors.h"
#include "dev/tests/temp_dir.h"
#include "runtime/files/crc32c.h"

namespace {

std::string file_of(const std::string& header, const std::string& data, int64_t length = -1) {
    const uint64_t n = length < 0 ? header.size() : uint64_t(length);
    std::string bytes;
    for (int i = 0; i < 8; i++) bytes += char(n >> 8 * i & 255);
    return bytes + header + data;
}

void expect_refused(const std::string& bytes, const std::vector<std::string>& parts) {
    const TempDir dir;
    const std::string path = dir.file("x.safetensors");
    put_file(path, bytes);
    std::vector<std::string> all = parts;
    all.push_back(path);
    expect_error([&] { SafetensorsFile file(path); }, all);
}

TEST(Safetensors, RoundTripsEveryDtype) {
    const TempDir dir;
    const std::string path = dir.file("x.safetensors");
    std::vector<char> data(24 * 8);
    for (size_t i = 0; i < data.size(); i++) data[i] = char(i * 37);
    const DType dtypes[] = {DType::U8,  DType::F32, DType::F64, DType::BF16,
                            DType::F16, DType::I32, DType::I64, DType::U16};
    SafetensorsWriter writer(path);
    for (const DType dtype : dtypes) writer.declare(dtype_name(dtype), dtype, {2, 3, 4});
    writer.declare("scalar", DType::F32, {});
    writer.declare("empty", DType::F32, {0, 7});
    writer.begin();
    for (const DType dtype : dtypes) writer.write(data.data(), 24 * dtype_size(dtype));
    writer.write(data.data(), 3);  // in any number of writes
    writer.write(data.data() + 3, 1);
    writer.finish();

    const StoredTensors file(path);
    EXPECT_EQ(file.entries().size(), 10u);
    EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
    for (const DType dtype : dtypes) {
        const Tensor t = file.tensor(dtype_name(dtype));
        EXPECT_EQ(t.dtype, dtype);
        ASSERT_EQ(t.rank, 3);
        EXPECT_EQ(t.shape[0], 2);
        EXPECT_EQ(t.shape[1], 3);
        EXPECT_EQ(t.shape[2], 4);
        EXPECT_EQ(std::memcmp(t.data, data.data(), size_t(t.bytes())), 0) << dtype_name(dtype);
    }
    EXPECT_EQ(file.tensor("scalar").rank, 0);
    EXPECT_EQ(std::memcmp(file.tensor("scalar").data, data.data(), 4), 0);
    EXPECT_EQ(file.tensor("empty").numel(), 0);
    expect_error([&] { file.tensor("none"); }, {path, "there is no tensor \"none\""});
    const std::string bytes = read_file(path);
    EXPECT_EQ(uint8_t(bytes[0]) % 8, 0);  // the data starts at a multiple of 8 bytes
}

TEST(Safetensors, Checksums) {
    const TempDir dir;
    const std::string data = "The quick brown fox";
    SafetensorsWriter writer(dir.file("x"), SafetensorsWriter::Checksums::Yes, {{"step", "7"}});
    writer.declare("a", DType::U8, {9});
    writer.declare("empty", DType::F32, {0});
    writer.declare("b", DType::U8, {10});
    writer.begin();
    writer.write(data.data(), 4);
    writer.write(data.data() + 4, 7);  // the end of a, the beginning of b
    writer.seek(2, 6);
    writer.write(data.data() + 15, 4);
    writer.seek(2, 2);
    writer.write(data.data() + 11, 4);
    writer.finish();
    const StoredTensors file(dir.file("x"));
    EXPECT_EQ(std::string(static_cast<const char*>(file.tensor("a").data), 9), data.substr(0, 9));
    EXPECT_EQ(std::string(static_cast<const char*>(file.tensor("b").data), 10), data.substr(9));
    EXPECT_EQ(file.checksum("a"), crc32c(data.data(), 9));
    EXPECT_EQ(file.checksum("b"), crc32c(data.data() + 9, 10));
    EXPECT_EQ(file.checksum("empty"), 0u);
    EXPECT_EQ(file.checksum("none"), std::nullopt);
    EXPECT_EQ(file.metadata().at("step"), "7");
    EXPECT_EQ(file.metadata().at("format"), "pt");
}

TEST(Safetensors, WriterRejectsInvalidTensors) {
    const TempDir dir;
    SafetensorsWriter writer(dir.file("x"));
    writer.declare("a", DType::F32, {2});
    expect_error([&] { writer.write("", 0); }, {dir.file("x")});
    writer.begin();
    expect_error([&] { writer.begin(); }, {"begin() was called twice"});
    expect_error([&] { writer.declare("b", DType::F32, {1}); }, {"after begin()"});
    expect_error([&] { writer.write("123456789", 9); }, {"9 bytes", "of the 8"});
    writer.write("1234", 4);
    expect_error([&] { writer.finish(); }, {"after 4 of the 8"});
    SafetensorsWriter twice(dir.file("y"));
    twice.declare("a", DType::F32, {2});
    twice.declare("a", DType::F32, {2});
    expect_error([&] { twice.begin(); }, {"a is declared twice"});
    expect_error([&] { twice.declare("b", DType::F64, {int64_t(1) << 40, int64_t(1) << 40}); }, {"not valid"});
    expect_error([&] { twice.declare("b", DType::F64, {-1}); }, {"not valid"});
}

TEST(Safetensors, ReadsFilesOfOtherWriters) {
    const TempDir dir;
    // White space around the header, BOOL, offsets that aren't aligned, tensors in another order than their names.
    write_file(dir.file("x"),
               file_of(std::string(" \t\r\n") + R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},)"
                                                R"("a":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}}    )",
                       std::string("\1\0\1\0\0\x80\x3f", 7)));
    const StoredTensors file(dir.file("x"));
    EXPECT_EQ(file.tensor("b").dtype, DType::U8);
    EXPECT_EQ(file.tensor("b").as<uint8_t>()[2], 1);
    float a;
    std::memcpy(&a, file.tensor("a").data, 4);
    EXPECT_EQ(a, 1.0f);
    EXPECT_TRUE(file.metadata().empty());
    write_file(dir.file("none"), file_of("{}", ""));
    EXPECT_TRUE(SafetensorsFile(dir.file("none")).entries().empty());
}

TEST(Safetensors, RejectsDamagedFiles) {
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", data(8, 'x');
    const TempDir dir;
    write_file(dir.file("good"), file_of(good, data));
    EXPECT_EQ(SafetensorsFile(dir.file("good")).entries().size(), 1u);
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string header = good;
        header.replace(header.find(from), from.size(), to);
        return file_of(header, data);
    };

    expect_refused("", {"0 bytes", "too short"});
    expect_refused("1234567", {"7 bytes", "too short"});
    expect_refused(file_of(good, data, 500), {"header of 500 bytes is longer than the file"});
    expect_refused(file_of(good, data, int64_t(1) << 40), {"at most 100000000"});
    expect_refused(std::string(16, '\xff'), {"header of 18446744073709551615 bytes"});
    expect_refused(file_of("", ""), {"does not start with '{'"});
    expect_refused(file_of("[]", ""), {"does not start with '{'"});
    expect_refused(file_of("\f" + good, data), {"does not start with '{'"});
    expect_refused(file_of(good + '\0', data), {"NUL at byte 55"});
    expect_refused(file_of("{\"a\":", ""), {"broken JSON at byte"});
    expect_refused(file_of("{\"a\xff\":1}", ""), {"broken JSON at byte"});
    expect_refused(file_of(good + "x", data), {"broken JSON at byte"});
    expect_refused(with("[2]", "[1e999]"), {"out of range"});
    expect_refused(file_of("{\"a\":" + std::string(100000, '['), ""), {"nested more than 3 deep"});
    expect_refused(with("\"F32\"", std::string(100000, '[') + std::string(100000, ']')), {"nested more than 3 deep"});
    expect_refused(file_of("{" + good.substr(1, good.size() - 2) + "," + good.substr(1), data), {"\"a\" twice"});
    expect_refused(with("\"shape\"", "\"dtype\":\"F32\",\"shape\""), {"\"dtype\" twice"});

    expect_refused(with("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}", "7"),
                   {"\"a\"", "not a JSON object"});
    expect_refused(with("F32", "F8_E4M3"), {"tensor \"a\"", "dtype \"F8_E4M3\" is not supported", "convert"});
    expect_refused(with("\"F32\"", "32"), {"tensor \"a\"", "dtype"});
    expect_refused(with("dtype", "dtyp"), {"tensor \"a\"", "dtype is missing"});
    expect_refused(with("[2]", "[3]"), {"tensor \"a\"", "takes 12 bytes", "say 8"});
    expect_refused(with("[2]", "[-2]"), {"tensor \"a\"", "not a list of sizes"});
    expect_refused(with("[2]", "[2.0]"), {"tensor \"a\"", "not a list of sizes"});
    expect_refused(with("[2]", "2"), {"tensor \"a\"", "shape is missing or not a list"});
    expect_refused(with("[2]", "[18446744073709551615]"), {"tensor \"a\"", "not a list of sizes"});
    expect_refused(with("[2]", "[4611686018427387904,4,2]"), {"tensor \"a\"", "overflows"});
    expect_refused(with("[2]", "[0,4611686018427387904,4]"), {"tensor \"a\"", "overflows"});
    expect_refused(with("[2]", "[1,1,1,1,1,1,1,1,2]"), {"tensor \"a\"", "9 dimensions"});
    expect_refused(with("[0,8]", "[0]"), {"tensor \"a\"", "data_offsets has 1 numbers"});
    expect_refused(with("[0,8]", "[8,0]"), {"tensor \"a\"", "lie outside"});
    expect_refused(with("[0,8]", "[-8,0]"), {"tensor \"a\"", "data_offsets"});
    expect_refused(with("[0,8]", "[8,16]"), {"tensor \"a\"", "lie outside the 8 bytes"});
    expect_refused(with("[0,8]", "[9223372036854775800,9223372036854775807]"), {"tensor \"a\"", "lie outside"});
    expect_refused(file_of(good, data + "y"), {"take 8 bytes", "holds 9"});
    expect_refused(file_of(good, data.substr(1)), {"lie outside the 7 bytes", "truncated"});
    const std::string b = R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[)";
    expect_refused(with("}}", "}" + b + "4,12]}}") + "yyyy", {"tensor \"b\"", "starts at byte 4", "overlap"});
    expect_refused(with("}}", "}" + b + "0,8]}}"), {"overlap"});
    expect_refused(with("}}", "}" + b + "12,20]}}") + std::string(12, 'y'), {"tensor \"b\"", "hole"});
    expect_refused(with("{\"a\"", "{\"__metadata__\":7,\"a\""), {"__metadata__"});
    expect_refused(with("{\"a\"", "{\"__metadata__\":{\"k\":7},\"a\""), {"__metadata__", "\"k\""});
    const std::string odd_name = with("\"a\"", "\"line\\nbreak\\u0007\"");
    expect_refused(odd_name + "y", {"holds 9"});
}

// Seconds that reading a header of about n bytes takes: of empty tensors, or of one with a shape of ones.
double seconds_to_read(const std::string& path, int64_t n, bool tensors) {
    std::string header = R"({"a":{"dtype":"F32","shape":[0)";
    if (!tensors) {
        while (int64_t(header.size()) < n) header += ",1";
    }
    header += R"(],"data_offsets":[0,0]})";
    for (int64_t i = 0; tensors && int64_t(header.size()) < n; i++)
        header += str(",\"", i, R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})");
    put_file(path, file_of(header + "}", ""));
    const std::clock_t begin = std::clock();  // of this process: other programs may run
    if (tensors)
        SafetensorsFile file(path);
    else
        expect_error([&] { SafetensorsFile file(path); }, {"dimensions; at most 8"});
    return double(std::clock() - begin) / CLOCKS_PER_SEC;
}

TEST(Safetensors, TimeGrowsWithTheHeader) {
    const TempDir dir;
    for (const bool tensors : {true, false}) {
        seconds_to_read(dir.file("x"), 30000, tensors);
        const double small = seconds_to_read(dir.file("x"), 300'000, tensors);
        // 10 times the bytes took 100 times as long.
        EXPECT_LT(seconds_to_read(dir.file("x"), 3'000'000, tensors), 35 * small + 0.1);
    }
}

TEST(Safetensors, RandomDamageNeverCrashes) {
    const TempDir dir;
    SafetensorsWriter writer(dir.file("good"));
    writer.declare("first.weight", DType::F32, {4, 3});
    writer.declare("second.bias", DType::BF16, {5});
    writer.declare("third", DType::I64, {2, 1, 1});
    writer.begin();
    writer.write(std::string(74, 'x').data(), 74);
    writer.finish();
    const std::string good = read_file(dir.file("good"));
    const std::string alphabet = "0123456789[]{}\",:-.eF \xff";
    std::mt19937 random(3);
    int refused = 0;
    for (int i = 0; i < 600; i++) {
        std::string bytes = good;
        for (uint32_t changes = 1 + random() % 3; changes > 0; changes--) {
            const size_t at = random() % bytes.size();
            switch (random() % 4) {
                case 0:
                    bytes[at] = char(random());
                    break;
                case 1:
                    bytes[at] = alphabet[random() % alphabet.size()];
                    break;
                case 2:
                    bytes.erase(at, 1 + random() % 4);
                    break;
                case 3:
                    bytes.insert(at, 1, alphabet[random() % alphabet.size()]);
                    break;
            }
        }
        if (i % 5 == 0) bytes.resize(random() % good.size());
        put_file(dir.file("bad"), bytes);
        try {
            const StoredTensors damaged(dir.file("bad"));
            for (const auto& [name, entry] : damaged.entries()) {  // what is accepted can be read
                const Tensor t = damaged.tensor(name);
                unsigned sum = 0;
                for (int64_t k = 0; k < t.bytes(); k++) sum += static_cast<const uint8_t*>(t.data)[k];
                EXPECT_LE(sum, 255 * t.bytes());
            }
        } catch (const Error& e) {
            refused++;
            EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
        }
    }
    EXPECT_GT(refused, 400);  // damage in the data itself is not detected
}

}  // namespace
