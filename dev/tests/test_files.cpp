// runtime/files/files.h and runtime/device/convert_dtype.h: whole files, atomic replacement, memory maps, .npy, and the
// text of every error.
#include "runtime/files/files.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "dev/tests/temp_dir.h"
#include "runtime/device/convert_dtype.h"

namespace {

TEST(Files, WritesAndReadsBack) {
    const TempDir dir;
    std::string bytes(100000, 'x');
    bytes[5] = '\0';
    write_file(dir.file("a"), bytes);
    EXPECT_EQ(read_file(dir.file("a")), bytes);
    write_file(dir.file("a"), "");
    EXPECT_EQ(read_file(dir.file("a")), "");
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"a"});  // no temporary file is left
}

TEST(Files, ReadErrorsNameThePath) {
    const TempDir dir;
    expect_error([&] { read_file(dir.file("none")); }, {dir.file("none"), "No such file", "check the path"});
    expect_error([&] { read_file(dir.path()); }, {dir.path(), "Is a directory", "name a file"});
    expect_error([&] { read_file(""); }, {"(empty path)"});
    write_file(dir.file("a"), "12345");
    expect_error([&] { read_file(dir.file("a"), 4); }, {dir.file("a"), "5 bytes", "more than the 4"});
    EXPECT_EQ(read_file(dir.file("a"), 5), "12345");
    expect_error([&] { read_file(dir.file("a/b")); }, {"Not a directory", "a part of the path is a file"});
    if (::geteuid() != 0) {  // root can read every file
        ASSERT_EQ(::chmod(dir.file("a").c_str(), 0), 0);
        expect_error([&] { read_file(dir.file("a")); }, {"Permission denied", "permissions"});
        expect_error([&] { FileReader file(dir.file("a")); }, {"Permission denied"});
    }
}

TEST(Files, ReadsFilesOfUnknownSize) {
    EXPECT_NE(read_file("/proc/self/status").find("Pid:"), std::string::npos);
    expect_error([&] { read_file("/dev/zero", 1000000); }, {"/dev/zero", "more than the 1000000"});
    expect_error([&] { read_file("/dev/zero"); }, {"/dev/zero", "more than the 67108864 bytes that are read here"});
    EXPECT_EQ(read_file("/dev/null"), "");
    const TempDir dir;
    const std::string fifo = dir.file("fifo");
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    std::thread writer([&] {
        FileWriter out(fifo);  // opens when the reader has opened it
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        out.write("12345", 5);
        out.finish();
    });
    EXPECT_EQ(read_file(fifo), "12345");
    writer.join();
    expect_error([&] { read_file(fifo); }, {fifo, "is a FIFO that no process writes to; name a file"});
}

TEST(Files, WriteErrorsLeaveTheOldFile) {
    const TempDir dir;
    expect_error([&] { write_file(dir.file("none/a"), "x"); }, {"none/", "No such file"});
    expect_error([&] { write_file(dir.path(), "x"); }, {dir.path(), "Is a directory"});
    make_directories(dir.file("taken"));
    expect_error([&] { FileWriter out(dir.file("taken")); }, {"taken", "Is a directory"});
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"taken"});
}

TEST(Files, FullDiskIsAnError) {
    if (!path_exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
    FileWriter out("/dev/full");
    expect_error([&] { out.write("x", 1); }, {"/dev/full", "No space left", "free some disk space"});
    expect_error([&] { write_file("/dev/full", "x"); }, {"/dev/full", "No space left"});
    EXPECT_TRUE(path_exists("/dev/full"));  // a device is opened, never replaced
}

TEST(Files, WritingKeepsSymbolicLinks) {
    const TempDir dir;
    write_file(dir.file("target"), "old");
    ASSERT_EQ(::symlink("target", dir.file("link").c_str()), 0);
    write_file(dir.file("link"), "new");
    EXPECT_EQ(read_file(dir.file("target")), "new");
    struct stat info;
    ASSERT_EQ(::lstat(dir.file("link").c_str(), &info), 0);
    EXPECT_TRUE(S_ISLNK(info.st_mode));
}

TEST(Files, FileWriterRefusesUseAfterFinish) {
    const TempDir dir;
    FileWriter out(dir.file("a"));
    out.write("ab", 2);
    out.write("c", 1);
    out.finish();
    EXPECT_EQ(read_file(dir.file("a")), "abc");
    expect_error([&] { out.write("x", 1); }, {dir.file("a"), "after it was finished"});
    expect_error([&] { out.finish(); }, {dir.file("a"), "finished twice"});
}

TEST(Files, ReadersOpenRegularFiles) {
    const TempDir dir;
    write_file(dir.file("empty"), "");
    EXPECT_EQ(FileReader(dir.file("empty")).size(), 0);
    expect_error([&] { FileReader f(dir.file("none")); }, {dir.file("none"), "No such file"});
    expect_error([&] { FileReader f(dir.path()); }, {dir.path(), "Is a directory"});
    expect_error([&] { FileReader f("/dev/zero"); }, {"/dev/zero", "not a regular file"});
    ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);  // opening it would wait for a writer
    expect_error([&] { FileReader f(dir.file("fifo")); }, {dir.file("fifo"), "not a regular file"});
}

TEST(Files, ReadsParts) {
    const TempDir dir;
    write_file(dir.file("a"), "0123456789");
    FileReader first(dir.file("a"));
    const FileReader file(std::move(first));
    EXPECT_EQ(file.size(), 10);
    EXPECT_EQ(file.path(), dir.file("a"));
    char part[4] = "";
    file.read(7, part, 3);
    EXPECT_STREQ(part, "789");
    file.read(10, part, 0);
    expect_error([&] { file.read(8, part, 3); }, {dir.file("a"), "3 bytes from byte 8 on", "it has 10"});
    ASSERT_EQ(::truncate(dir.file("a").c_str(), 5), 0);
    expect_error([&] { file.read(4, part, 3); }, {dir.file("a"), "has 5 bytes, but had 10", "truncated"});
    EXPECT_EQ(part[0], '4');
    expect_error([&] { FileReader r(dir.file("none")); }, {dir.file("none"), "No such file"});
    expect_error([&] { FileReader r(dir.path()); }, {dir.path(), "Is a directory"});
    expect_error([&] { FileReader r("/dev/zero"); }, {"/dev/zero", "not a regular file"});
    ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);  // opening it would wait for a writer
    expect_error([&] { FileReader r(dir.file("fifo")); }, {dir.file("fifo"), "FIFO, not a regular file"});
}

// More files than the default limit, which the process may raise itself.
TEST(Files, RaisesTheLimitOnOpenFiles) {
    const TempDir dir;
    write_file(dir.file("a"), "x");
    rlimit before;
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    if (before.rlim_max < 400) GTEST_SKIP() << "the hard limit on open files is " << before.rlim_max;
    const rlimit low = {100, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    std::vector<FileReader> files;
    EXPECT_NO_THROW(while (files.size() < 200) files.emplace_back(dir.file("a")));
    files.clear();
    const rlimit lowest = {20, 20};
    const pid_t child = ::fork();  // a hard limit cannot be raised again
    if (child == 0) {
        ::setrlimit(RLIMIT_NOFILE, &lowest);
        try {
            while (files.size() < 200) files.emplace_back(dir.file("a"));
            ::_exit(1);
        } catch (const Error& e) {
            ::_exit(std::string(e.what()).find("ulimit -n") == std::string::npos);
        }
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Files, CreatesAndListsDirectories) {
    const TempDir dir;
    make_directories(dir.file("a/b/c"));
    make_directories(dir.file("a/b/c"));
    make_directories(dir.file("a/d/"));
    EXPECT_TRUE(is_directory(dir.file("a/b/c")));
    EXPECT_TRUE(is_directory(dir.file("a/d")));
    write_file(dir.file("a/x2"), "");
    write_file(dir.file("a/x1"), "");
    EXPECT_EQ(list_directory(dir.file("a")), (std::vector<std::string>{"b", "d", "x1", "x2"}));
    EXPECT_EQ(glob_files(dir.file("a/x*")), (std::vector<std::string>{dir.file("a/x1"), dir.file("a/x2")}));
    EXPECT_TRUE(glob_files(dir.file("a/y*")).empty());
    EXPECT_TRUE(glob_files(dir.file("none/y*")).empty());
    // A directory that cannot be read is not an empty one.
    rlimit limit;
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlimit none = {0, limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    expect_error([&] { glob_files(dir.file("a/x*")); },
                 {dir.file("a/x*"), "cannot list the files that match", "Too many open files"});
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_FALSE(is_directory(dir.file("a/x1")));
    EXPECT_FALSE(path_exists(dir.file("a/x3")));
    expect_error([&] { make_directories(dir.file("a/x1")); }, {"a/x1", "File exists"});
    expect_error([&] { make_directories(dir.file("a/x1/y")); }, {"a/x1"});
    expect_error([&] { make_directories(""); }, {"create the directory"});
    expect_error([&] { list_directory(dir.file("none")); }, {"none", "No such file"});
    expect_error([&] { flush_directory(dir.file("none")); }, {"none", "No such file"});
    EXPECT_EQ(join_path("a", "b"), "a/b");
    EXPECT_EQ(join_path("a/", "b"), "a/b");
    EXPECT_EQ(join_path("", "b"), "b");
}

template <typename T>
void expect_npy_round_trip(const std::vector<int64_t>& shape, std::vector<T> values) {
    const TempDir dir;
    const Tensor t = make_tensor(values.data(), dtype_of<T>(), Device::CPU, shape.data(), int(shape.size()));
    write_npy(dir.file("a.npy"), t);
    NpyArray read = read_npy(dir.file("a.npy"));
    EXPECT_EQ(read.dtype, dtype_of<T>());
    EXPECT_EQ(read.shape, shape);
    const std::string expected(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    EXPECT_EQ(std::string(static_cast<const char*>(read.tensor().data), read.bytes.size()), expected);
    EXPECT_EQ(read_file(dir.file("a.npy")).size() % 64, read.bytes.size() % 64);  // the data starts at a multiple of 64
}

TEST(Npy, RoundTrips) {
    expect_npy_round_trip<float>({2, 3}, {1, -2.5f, 0, 1e30f, 5, 6});
    expect_npy_round_trip<float>({3}, {1, 2, 3});
    expect_npy_round_trip<float>({}, {7});
    expect_npy_round_trip<double>({1, 2, 1}, {0.1, -0.2});
    expect_npy_round_trip<int32_t>({4}, {1, -2, 3, 2147483647});
    expect_npy_round_trip<float>({0, 5}, {});
}

TEST(Npy, MatchesNumpysFormat) {
    const TempDir dir;
    float values[] = {1, 2, 3, 4, 5, 6};
    write_npy(dir.file("a.npy"), host_tensor(values, {2, 3}));
    const std::string file = read_file(dir.file("a.npy"));
    const std::string expected("\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
                               69);
    EXPECT_EQ(file.substr(0, 69), expected);
    EXPECT_EQ(file[127], '\n');
    EXPECT_EQ(file.size(), 128 + sizeof(values));
}

TEST(Npy, InvalidFilesAreErrors) {
    const TempDir dir;
    float values[] = {1, 2, 3, 4};
    write_npy(dir.file("a.npy"), host_tensor(values, {2, 2}));
    const std::string good = read_file(dir.file("a.npy"));
    const auto broken = [&](std::string bytes, const std::string& from, const std::string& to) {
        bytes.replace(bytes.find(from), from.size(), to);
        put_file(dir.file("b.npy"), bytes);
        return [&] { read_npy(dir.file("b.npy")); };
    };
    expect_error(broken(good, "NUMPY", "NUMPI"), {"b.npy", "not a .npy file"});
    expect_error(broken(good, "<f4", "<f2"), {"b.npy", "dtype is none of", "'<f4'"});
    expect_error(broken(good, "False", "True "), {"b.npy", "Fortran"});
    expect_error(broken(good, "(2, 2)", "(2, 3)"), {"b.npy", "16 bytes", "24"});
    expect_error(broken(good, "(2, 2)", "(2,-2)"), {"b.npy", "tuple"});
    expect_error(broken(good, "(2, 2), }", "(9999999999999999999, 2), }"), {"b.npy", "overflows"});
    expect_error(broken(good, "'shape'", "'shapf'"), {"b.npy", "shape"});
    expect_error(broken(good.substr(0, 20), "NUMPY", "NUMPY"), {"b.npy", "longer than the file"});
    uint8_t bytes[2] = {};
    expect_error([&] { write_npy(dir.file("c.npy"), host_tensor(bytes, {2})); }, {"c.npy", "uint8", "convert"});
    EXPECT_FALSE(path_exists(dir.file("c.npy")));
    std::mt19937 random(1);
    for (int i = 0; i < 500; i++) {  // damage never crashes
        std::string bytes2 = good.substr(0, i % 3 ? good.size() : random() % good.size());
        if (!bytes2.empty()) bytes2[random() % bytes2.size()] = char(random());
        put_file(dir.file("d.npy"), bytes2);
        try {
            read_npy(dir.file("d.npy")).tensor();
        } catch (const Error&) {
        }
    }
}

uint32_t bits_of(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

// The nearest value of a 16-bit format, found by bisection over its positive numbers: independent of the bit operations
// under test. Ties go to the even bit pattern. Half a step beyond the largest finite number rounds to infinity.
template <typename T>
uint16_t nearest(double x, uint16_t infinity, double last_step) {
    uint16_t low = 0, high = infinity;
    const auto value = [&](uint16_t bits) {
        return bits == infinity ? double(to_float(T{uint16_t(infinity - 1)})) + last_step : double(to_float(T{bits}));
    };
    while (high - low > 1) {
        const uint16_t middle = uint16_t((low + high) / 2);
        (value(middle) <= x ? low : high) = middle;
    }
    const double below = x - value(low), above = value(high) - x;
    if (below != above) return below < above ? low : high;
    return low % 2 == 0 ? low : high;
}

TEST(Convert, Fp16ValuesAreExact) {
    EXPECT_EQ(to_float(fp16{0x0001}), 0x1p-24f);
    EXPECT_EQ(to_float(fp16{0x03FF}), 1023 * 0x1p-24f);
    EXPECT_EQ(to_float(fp16{0x0400}), 0x1p-14f);
    EXPECT_EQ(to_float(fp16{0x3C00}), 1.0f);
    EXPECT_EQ(to_float(fp16{0xC100}), -2.5f);
    EXPECT_EQ(to_float(fp16{0x7BFF}), 65504.0f);
    EXPECT_EQ(to_float(fp16{0xFC00}), -INFINITY);
    EXPECT_TRUE(std::isnan(to_float(fp16{0x7E00})));
    EXPECT_EQ(bits_of(to_float(fp16{0x8000})), 0x80000000u);
    for (uint32_t bits = 0; bits < 0x7C00; bits++) {
        const float f = std::ldexp(float((bits & 1023) + (bits >> 10 ? 1024 : 0)), int(std::max(1u, bits >> 10)) - 25);
        ASSERT_EQ(to_float(fp16{uint16_t(bits)}), f) << bits;
        ASSERT_EQ(to_fp16(f).bits, bits);
        ASSERT_EQ(to_fp16(-f).bits, bits | 0x8000);
    }
}

TEST(Convert, RoundsToNearestEven) {
    std::mt19937 random(7);
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = random() & 0x7FFFFFFFu;
        if (i % 4 == 1) bits = 0x38000000u + random() % 0x10000000u;        // fp16's normal range
        if (i % 4 == 2) bits = 0x33000000u - 1000 + random() % 0x5800000u;  // its subnormals
        if (i % 4 == 3) bits = (bits & 0xFFFFF000u) | 0x1000u;              // ties are frequent
        float f;
        std::memcpy(&f, &bits, 4);
        if (!std::isfinite(f)) continue;
        ASSERT_EQ(to_fp16(f).bits, nearest<fp16>(f, 0x7C00, 32)) << f;
        ASSERT_EQ(to_fp16(-f).bits, to_fp16(f).bits | 0x8000) << f;
        ASSERT_EQ(to_bf16(f).bits, nearest<bf16>(f, 0x7F80, 0x1p120)) << f;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(to_float(to_fp16(nan))));
    EXPECT_TRUE(std::isnan(to_float(to_bf16(nan))));
    EXPECT_EQ(to_fp16(INFINITY).bits, 0x7C00);
    EXPECT_EQ(to_fp16(65519.99f).bits, 0x7BFF);
    EXPECT_EQ(to_fp16(65520.0f).bits, 0x7C00);
    EXPECT_EQ(to_fp16(1e10f).bits, 0x7C00);
}

TEST(Convert, ConvertsArraysOfAnyAlignment) {
    const int64_t n = 100001;  // large enough to use several threads
    std::vector<float> values(size_t(n), 0.0f), back(size_t(n), 0.0f);
    for (const DType dtype : {DType::F32, DType::F64, DType::BF16, DType::F16}) {
        std::vector<char> bytes(size_t(n * dtype_size(dtype) + 1));
        for (int64_t i = 0; i < n; i++) values[size_t(i)] = float(i % 256 - 128) / 8;  // exact in every format
        convert_from_float(bytes.data() + 1, dtype, values.data(), n);
        convert_to_float(back.data(), bytes.data() + 1, dtype, n);
        EXPECT_EQ(values, back) << dtype_name(dtype);
    }
    expect_error([&] { convert_to_float(back.data(), values.data(), DType::I32, 1); }, {"int32"});
    expect_error([&] { convert_from_float(back.data(), DType::U8, values.data(), 1); }, {"uint8"});
}

}  // namespace
