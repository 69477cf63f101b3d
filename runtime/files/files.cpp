#include "runtime/files/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

const char* remedy(int error) {
    switch (error) {
        case ENOENT:
            return "; check the path";
        case ENOTDIR:
            return "; a part of the path is a file";
        case EEXIST:  // of mkdir()
            return "; name a directory";
        case EISDIR:
            return "; name a file";
        case EACCES:
        case EPERM:
            return "; check the permissions";
        case ENOSPC:
        case EDQUOT:
            return "; free some disk space";
        case EFBIG:
            return "; raise the limit on file sizes (ulimit -f)";
        case EROFS:
            return "; choose a writable directory";
        case EMFILE:
        case ENFILE:
            return "; raise the limit on open files (ulimit -n)";
        case ENOMEM:
            return "; free some memory";
        case EIO:
        case ESTALE:
            return "; check the disk or the connection to the file server, and try again";
        default:
            return "";
    }
}

// Closes a descriptor at the end of a scope, also when an Error is thrown.
struct Descriptor {
    int fd;
    explicit Descriptor(int value) : fd(value) {}
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
};

std::string parent_directory(const std::string& path) {
    const size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) return ".";
    return slash == 0 ? "/" : path.substr(0, slash);
}

// Writes parts one after another beside path, flushes, and renames over path.
void replace_file(const std::string& path, std::initializer_list<std::string_view> parts) {
    std::string target = path;
    struct stat info;
    if (::stat(path.c_str(), &info) == 0) {
        if (S_ISDIR(info.st_mode)) throw_system_error(path, "write", EISDIR);
        if (!S_ISREG(info.st_mode)) {  // a device or a pipe: there is nothing to replace, and renaming would remove it
            FileWriter out(path);
            for (const std::string_view part : parts) out.write(part.data(), int64_t(part.size()));
            out.finish();
            return;
        }
        // Through a symbolic link, the file that it points to is replaced and the link stays.
        if (char* resolved = ::realpath(path.c_str(), nullptr)) {
            target = resolved;
            std::free(resolved);
        }
    }
    // A fixed name: the next process overwrites what a killed one leaves.
    const std::string directory = parent_directory(target);
    const std::string temporary = join_path(directory, ".tmp-" + target.substr(target.find_last_of('/') + 1));
    try {
        FileWriter out(temporary, path);
        for (const std::string_view part : parts) out.write(part.data(), int64_t(part.size()));
        out.finish();
        if (::rename(temporary.c_str(), target.c_str()) != 0) throw_system_error(path, "replace", errno);
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
    flush_directory(directory);
}

// A data set may have more shards than the default limit on open files, which any process may raise up to a hard limit.
bool raise_open_file_limit() {
    struct rlimit limit;
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return false;
    limit.rlim_cur = limit.rlim_max;
    return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

// The descriptor of a regular file, and its size. A FIFO is not opened, because that would wait for a writer, nor a
// device, because that may have effects.
int open_regular_file(const std::string& path, int64_t& size) {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) throw_system_error(path, "open", errno);
    if (S_ISDIR(info.st_mode)) throw_system_error(path, "read", EISDIR);
    require(S_ISREG(info.st_mode), path, ": is a ", S_ISFIFO(info.st_mode) ? "FIFO" : "device or socket",
            ", not a regular file; copy its contents to one");
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == EMFILE && raise_open_file_limit()) fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::fstat(fd, &info) != 0) throw_system_error(path, "open", errno);
    size = info.st_size;
    return fd;
}

}  // namespace

void throw_system_error(const std::string& path, const char* action, int error) {
    throw SystemError(
        str(path.empty() ? "(empty path)" : path, ": cannot ", action, ": ", std::strerror(error), remedy(error)));
}

namespace {

// Of an open file that does not block: reading blocks from now on, and a FIFO has a writer. Without one, opening it
// would wait for ever without a word. Returns what was read.
std::string wait_for_writer(int fd, const std::string& path, bool fifo) {
    constexpr int WAIT_MS = 5000;
    pollfd event{fd, POLLIN, 0};
    std::string first;
    if (fifo && ::poll(&event, 1, WAIT_MS) == 0) {
        char byte;
        const ssize_t n = ::read(fd, &byte, 1);  // 0 if there is no writer; EAGAIN if it has not written
        require(n != 0, path, ": is a FIFO that no process writes to; name a file");
        first.assign(n > 0, byte);
    }
    ::fcntl(fd, F_SETFL, 0);
    return first;
}

}  // namespace

std::string read_file(const std::string& path, int64_t limit) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.fd < 0) throw_system_error(path, "open", errno);
    struct stat info;
    if (::fstat(file.fd, &info) != 0) throw_system_error(path, "read", errno);
    if (S_ISDIR(info.st_mode)) throw_system_error(path, "read", EISDIR);
    // What has no size may have no end.
    if (!S_ISREG(info.st_mode)) limit = std::min(limit, int64_t(1) << 26);
    require(info.st_size <= limit, path, ": is ", info.st_size, " bytes, more than the ", limit, " that are read here");
    std::string bytes = wait_for_writer(file.fd, path, S_ISFIFO(info.st_mode));
    if (info.st_size > 0) bytes.reserve(size_t(info.st_size) + 1);
    // Read to the end rather than to st_size: pipes and /proc have no size.
    for (;;) {
        const size_t have = bytes.size();
        const size_t room = std::max<size_t>(bytes.capacity() - have, 65536);
        bytes.resize(have + room);
        const ssize_t n = ::read(file.fd, &bytes[have], room);
        const int error = errno;
        bytes.resize(have + size_t(std::max<ssize_t>(n, 0)));
        if (n < 0 && error != EINTR) throw_system_error(path, "read", error);
        if (n == 0) return bytes;
        require(int64_t(bytes.size()) <= limit, path, ": holds more than the ", limit, " bytes that are read here");
    }
}

void write_file(const std::string& path, std::string_view bytes) {
    replace_file(path, {bytes});
}

FileReader::FileReader(const std::string& path) : name(path), fd(open_regular_file(path, length)) {}

FileReader::~FileReader() {
    if (fd >= 0) ::close(fd);
}

FileReader::FileReader(FileReader&& other) noexcept
    : name(std::move(other.name)), length(other.length), fd(std::exchange(other.fd, -1)) {}

void FileReader::read(int64_t offset, void* dst, int64_t bytes) const {
    require(offset >= 0 && bytes >= 0 && offset <= length - bytes, name, ": ", bytes, " bytes from byte ", offset,
            " on are beyond its end; it has ", length);
    char* to = static_cast<char*>(dst);
    while (bytes > 0) {
        const ssize_t n = ::pread(fd, to, size_t(bytes), offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) throw_system_error(name, "read", errno);
        if (n == 0) {
            struct stat now;
            if (::fstat(fd, &now) != 0) throw_system_error(name, "read", errno);
            throw Error(str(name, ": has ", now.st_size, " bytes, but had ", length,
                            " when it was opened: it was truncated; restore the file"));
        }
        to += n;
        offset += n;
        bytes -= n;
    }
}

FileWriter::FileWriter(const std::string& path, const std::string& shown_as, Open how)
    : name(shown_as.empty() ? path : shown_as) {
    fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_CREAT | (how == Open::Create ? O_TRUNC : 0), 0666);
    if (fd < 0) throw_system_error(name, "create", errno);
}

FileWriter::~FileWriter() {
    if (fd >= 0) ::close(fd);
}

void FileWriter::seek(int64_t offset) {
    require(fd >= 0, name, ": written to after it was finished");
    if (::lseek(fd, offset, SEEK_SET) < 0) throw_system_error(name, "seek", errno);
}

void FileWriter::write(const void* data, int64_t bytes) {
    require(fd >= 0, name, ": written to after it was finished");
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t n = ::write(fd, next, size_t(bytes));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) throw_system_error(name, "write", errno);
        next += n;
        bytes -= n;
    }
}

void FileWriter::flush() {
    require(fd >= 0, name, ": finished twice");
    // EINVAL: a pipe or a device, which has nothing to flush. Some file systems report a full disk only here or at
    // close.
    if (::fsync(fd) != 0 && errno != EINVAL) throw_system_error(name, "flush", errno);
}

void FileWriter::finish() {
    flush();
    if (::close(std::exchange(fd, -1)) != 0) throw_system_error(name, "close", errno);
}

int64_t free_disk_bytes(const std::string& directory) {
    struct statvfs info;
    if (::statvfs(directory.c_str(), &info) != 0) throw_system_error(directory, "ask for the free space of", errno);
    return int64_t(std::min<uint64_t>(uint64_t(info.f_bavail) * info.f_frsize, INT64_MAX));
}

void make_directories(const std::string& path) {
    if (is_directory(path)) return;
    if (path.empty()) throw_system_error(path, "create the directory", ENOENT);
    const std::string parent = parent_directory(path);
    if (parent != path) make_directories(parent);
    if (::mkdir(path.c_str(), 0777) == 0) return flush_directory(parent);
    const int error = errno;
    if (!is_directory(path))
        throw_system_error(path, "create the directory", error);  // "a/" or another process was first: fine
}

void flush_directory(const std::string& path) {
    const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.fd < 0) throw_system_error(path, "open the directory", errno);
    // EINVAL: a file system that can't flush directories. There is nothing more to be done then.
    if (::fsync(directory.fd) != 0 && errno != EINVAL) throw_system_error(path, "flush the directory", errno);
}

namespace {

// False: there is nothing of this name.
bool look_up(const std::string& path, struct stat& info) {
    if (::stat(path.c_str(), &info) == 0) return true;
    for (const int absent : {ENOENT, ENOTDIR, ENAMETOOLONG, ELOOP})
        if (errno == absent) return false;
    throw_system_error(path, "look up", errno);
}

}  // namespace

bool path_exists(const std::string& path) {
    struct stat info;
    return look_up(path, info);
}

bool is_directory(const std::string& path) {
    struct stat info;
    return look_up(path, info) && S_ISDIR(info.st_mode);
}

std::string join_path(const std::string& directory, const std::string& name) {
    if (directory.empty()) return name;
    return directory.back() == '/' ? directory + name : directory + "/" + name;
}

std::vector<std::string> list_directory(const std::string& path) {
    DIR* directory = ::opendir(path.c_str());
    if (!directory) throw_system_error(path, "list the directory", errno);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory)) {
        const std::string name = entry->d_name;
        if (name != "." && name != "..") names.push_back(name);
        errno = 0;
    }
    const int error = errno;
    ::closedir(directory);
    if (error) throw_system_error(path, "list the directory", error);
    std::sort(names.begin(), names.end());
    return names;
}

namespace {

// The error of a directory that glob() could not read; glob() itself takes that for the directory's end.
thread_local int glob_error;

void* open_for_glob(const char* path) {
    DIR* const directory = ::opendir(path);
    if (!directory && errno != ENOENT && errno != ENOTDIR) glob_error = errno;
    return directory;
}

dirent* read_for_glob(void* directory) {
    errno = 0;
    dirent* const entry = ::readdir(static_cast<DIR*>(directory));
    if (!entry && errno) glob_error = errno;
    return entry;
}

}  // namespace

std::vector<std::string> glob_files(const std::string& pattern) {
    glob_t found = {};
    found.gl_opendir = open_for_glob;
    found.gl_readdir = read_for_glob;
    found.gl_closedir = [](void* directory) { ::closedir(static_cast<DIR*>(directory)); };
    found.gl_stat = ::stat;
    found.gl_lstat = ::lstat;
    glob_error = 0;
    const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_ALTDIRFUNC, nullptr, &found);
    std::vector<std::string> paths;
    for (size_t i = 0; status == 0 && i < found.gl_pathc; i++) paths.emplace_back(found.gl_pathv[i]);
    ::globfree(&found);
    if (glob_error) throw_system_error(pattern, "list the files that match", glob_error);
    require(status == 0 || status == GLOB_NOMATCH, pattern, ": cannot list the files that match");
    std::sort(paths.begin(), paths.end());  // by bytes: glob's own order depends on the locale
    return paths;
}

std::string glob_escape(const std::string& text) {
    std::string escaped;
    for (const char c : text) {
        if (std::strchr("*?[\\", c) && c) escaped += '\\';
        escaped += c;
    }
    return escaped;
}

// .npy: "\x93NUMPY", version 1.0, u16 header length, a Python dictionary padded with spaces so that the data starts at
// a multiple of 64 bytes. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

namespace {

constexpr std::string_view NPY_MAGIC("\x93NUMPY\x01\x00", 8);

struct NpyDType {
    DType dtype;
    const char* descr;
};
constexpr NpyDType NPY_DTYPES[] = {{DType::F32, "<f4"}, {DType::F64, "<f8"}, {DType::I32, "<i4"}};

// The text after `'key':` in the header's dictionary, without the blanks.
std::string_view npy_value(const std::string& path, std::string_view header, const std::string& key) {
    const size_t at = header.find("'" + key + "'");
    const size_t colon = at == std::string_view::npos ? at : header.find(':', at);
    const size_t value = colon == std::string_view::npos ? colon : header.find_first_not_of(" ", colon + 1);
    require(value != std::string_view::npos, path, ": broken .npy header: no '", key, "'");
    return header.substr(value);
}

std::vector<int64_t> npy_shape(const std::string& path, std::string_view header) {
    std::string_view text = npy_value(path, header, "shape");
    const size_t close = text.find(')');
    require(text[0] == '(' && close != std::string_view::npos, path, ": broken .npy header: shape is not a tuple");
    text = text.substr(1, close - 1);
    std::vector<int64_t> shape;
    bool number = false;  // in the middle of one
    for (const char ch : text) {
        if (ch >= '0' && ch <= '9') {
            if (!number) shape.push_back(0);
            number = true;
            int64_t& n = shape.back();
            require(!__builtin_mul_overflow(n, int64_t(10), &n) && !__builtin_add_overflow(n, int64_t(ch - '0'), &n),
                    path, ": broken .npy header: a dimension overflows 64 bits");
        } else {
            require(ch == ',' || ch == ' ', path, ": broken .npy header: shape is not a tuple of numbers");
            number = false;
        }
    }
    return shape;
}

}  // namespace

void write_npy(const std::string& path, const Tensor& t) {
    const char* descr = nullptr;
    for (const NpyDType& d : NPY_DTYPES) {
        if (d.dtype == t.dtype) descr = d.descr;
    }
    require(descr, path, ": cannot write a .npy array of ", dtype_name(t.dtype), "; convert it to fp32 first");
    require(t.device == Device::CPU && t.contiguous(), path, ": a .npy array is written from contiguous host memory");
    std::string header = str("{'descr': '", descr, "', 'fortran_order': False, 'shape': (");
    for (int i = 0; i < t.rank; i++)
        header += std::to_string(t.shape[i]) + (i + 1 < t.rank ? ", " : t.rank == 1 ? "," : "");
    header += "), }";
    header.append(63 - (NPY_MAGIC.size() + 2 + header.size()) % 64, ' ');
    header += '\n';
    const char length[2] = {char(header.size() & 255), char(header.size() >> 8)};
    replace_file(path, {NPY_MAGIC, {length, 2}, header, {static_cast<const char*>(t.data), size_t(t.bytes())}});
}

NpyArray read_npy(const std::string& path) {
    std::string file = read_file(path, int64_t(1) << 40);
    require(file.size() >= 10 && std::string_view(file).substr(0, 8) == NPY_MAGIC, path,
            ": not a .npy file of version 1.0; save it with numpy.save");
    const size_t header_size = size_t(uint8_t(file[8])) | size_t(uint8_t(file[9])) << 8;
    require(10 + header_size <= file.size(), path, ": broken .npy header: it is longer than the file");
    const std::string header = file.substr(10, header_size);

    NpyArray array;
    const std::string descr(npy_value(path, header, "descr").substr(0, 5));
    const auto* known = std::find_if(std::begin(NPY_DTYPES), std::end(NPY_DTYPES),
                                     [&](const NpyDType& d) { return descr == str("'", d.descr, "'"); });
    require(known != std::end(NPY_DTYPES), path, ": .npy dtype is none of '<f4', '<f8' and '<i4', which are read");
    array.dtype = known->dtype;
    require(npy_value(path, header, "fortran_order").substr(0, 5) == "False", path,
            ": .npy array in Fortran order; save numpy.ascontiguousarray of it");
    array.shape = npy_shape(path, header);
    require(array.shape.size() <= MAX_DIMS, path, ": .npy array of ", array.shape.size(), " dimensions; at most ",
            MAX_DIMS, " are read");

    int64_t bytes = dtype_size(array.dtype);
    for (const int64_t n : array.shape) {
        require(!__builtin_mul_overflow(bytes, n, &bytes), path, ": broken .npy header: the size overflows 64 bits");
    }
    require(int64_t(file.size() - 10 - header_size) == bytes, path, ": .npy file holds ",
            file.size() - 10 - header_size, " bytes of data, its header says ", bytes);
    file.erase(0, 10 + header_size);
    array.bytes = std::move(file);
    return array;
}

Tensor NpyArray::tensor() {
    return make_tensor(&bytes[0], dtype, Device::CPU, shape.data(), int(shape.size()));
}
