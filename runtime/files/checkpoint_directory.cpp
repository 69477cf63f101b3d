#include "runtime/files/checkpoint_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <system_error>

#include "runtime/files/files.h"
#include "runtime/files/weight_files.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

std::string parent_of(const std::string& path) {
    const std::string parent = std::filesystem::path(path).parent_path().string();
    return parent.empty() ? "." : parent;
}

constexpr const char* STEP_PREFIX = "step_";

// ".tmp-step_00001000-4711": an unfinished directory and the process that writes it.
std::string temporary_prefix(const std::string& name) {
    return ".tmp-" + name + "-";
}
constexpr const char* REMOVED_PREFIX = ".old-";

// Has ended, but its parent has not asked for its status: in a container without an init process it stays so.
bool is_zombie(pid_t id) {
    std::ifstream file(str("/proc/", id, "/stat"));  // 4711 (name) Z ...
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(") ");
    return name_end != std::string::npos && stat.compare(name_end + 2, 1, "Z") == 0;
}

bool process_lives(const std::string& pid) {
    if (pid.empty() || pid.size() > 9 || pid.find_first_not_of("0123456789") != std::string::npos)
        return true;  // not ours
    const pid_t id = pid_t(std::stol(pid));
    return id != ::getpid() && (::kill(id, 0) == 0 || errno == EPERM) && !is_zombie(id);
}

void remove_tree(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    require(!error, path, ": cannot remove: ", error.message());
}

void rename_directory(const std::string& from, const std::string& to) {
    const bool renamed = ::rename(from.c_str(), to.c_str()) == 0;  // before errno is read
    require(renamed, from, ": cannot rename to ", to, ": ", std::strerror(errno));
}

bool is_complete(const std::string& directory) {
    const auto has = [&](const char* name) { return path_exists(join_path(directory, name)); };
    const bool adapter = has(ADAPTER_CONFIG) && has(ADAPTER_WEIGHTS);
    return has("state.safetensors") && has("trainer.json") &&
           (adapter || (has("config.json") && holds_weights(directory)));
}

}  // namespace

// Finding models and checkpoints.

int64_t checkpoint_step(const std::string& name) {
    if (!starts_with(name, STEP_PREFIX)) return -1;
    const std::string digits = name.substr(std::strlen(STEP_PREFIX));
    const bool number = digits.find_first_not_of("0123456789") == std::string::npos;
    // Eight digits with leading zeros; more for larger steps.
    if (!number || digits.size() < 8 || digits.size() > 18 || (digits.size() > 8 && digits[0] == '0')) return -1;
    return std::stoll(digits);
}

std::vector<std::string> list_checkpoints(const std::string& run_dir) {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(run_dir)) {
        if (checkpoint_step(name) >= 0 && is_complete(join_path(run_dir, name))) names.push_back(name);
    }
    std::sort(names.begin(), names.end(),
              [](const std::string& a, const std::string& b) { return checkpoint_step(a) < checkpoint_step(b); });
    return names;
}

std::vector<std::string> list_incomplete_checkpoints(const std::string& run_dir) {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(run_dir))
        if (checkpoint_step(name) >= 0 && !is_complete(join_path(run_dir, name))) names.push_back(name);
    return names;
}

std::string resume_remedy(const std::string& checkpoint) {
    std::string previous;
    const int64_t step = checkpoint_step(std::filesystem::path(checkpoint).filename().string());
    for (const std::string& name : list_checkpoints(parent_of(checkpoint)))
        if (checkpoint_step(name) < step) previous = name;
    if (previous.empty()) return "; restore it: there is no earlier checkpoint to continue from";
    return str("; remove ", checkpoint, " to continue from ", previous);
}

// Directories.

std::string temporary_path(const std::string& path) {
    const std::string parent = parent_of(path), name = std::filesystem::path(path).filename().string();
    const std::string prefix = temporary_prefix(name);
    for (const std::string& entry : list_directory(parent)) {
        const bool leftover = starts_with(entry, prefix) && !process_lives(entry.substr(prefix.size()));
        if (leftover) remove_tree(join_path(parent, entry));
    }
    return join_path(parent, prefix + std::to_string(::getpid()));
}

AtomicDirectory::AtomicDirectory(const std::string& path) : final_path(path) {
    while (final_path.size() > 1 && final_path.back() == '/') final_path.pop_back();
    require(!path_exists(final_path), final_path, ": exists already; choose another name or remove it");
    temporary = temporary_path(final_path);
    const bool made = ::mkdir(temporary.c_str(), 0777) == 0;
    if (!made) throw_system_error(temporary, "create the directory", errno);
}

AtomicDirectory::~AtomicDirectory() {
    std::error_code ignored;  // a destructor cannot report an error
    if (!committed) std::filesystem::remove_all(temporary, ignored);
}

void AtomicDirectory::commit() {
    // Not every caller flushes the files that it writes here.
    for (const std::string& name : list_directory(temporary)) {
        const std::string path = join_path(temporary, name);
        const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        require(fd >= 0, path, ": cannot open: ", std::strerror(errno));
        const int error = ::fsync(fd) == 0 ? 0 : errno;
        ::close(fd);
        require(error == 0, path, ": cannot flush: ", std::strerror(error));
    }
    flush_directory(temporary);
    require(!path_exists(final_path), final_path, ": exists already; choose another name or remove it");
    rename_directory(temporary, final_path);
    committed = true;
    flush_directory(parent_of(final_path));
}

int64_t trained_seq_len(const std::string& directory) {
    const std::string path = join_path(directory, "trainer.json");
    if (!path_exists(path)) return 0;
    const json length = read_json(path).value("seq_len", json());
    require(length.is_number_integer(), path, ": key 'seq_len' is missing or not an integer; the file is damaged");
    return length;
}

std::string best_checkpoint(const std::string& run_dir) {
    std::string best;
    double lowest = INFINITY;
    for (const std::string& name : list_checkpoints(run_dir)) {
        json loss;
        try {
            loss = read_json(join_path(join_path(run_dir, name), "trainer.json")).value("val_loss", json());
        } catch (const SystemError&) {
            throw;
        } catch (const Error&) {  // a damaged checkpoint must not end a run that has a newer one
        }
        if (loss.is_number() && loss.get<double>() < lowest) {
            lowest = loss.get<double>();
            best = name;
        }
    }
    return best;
}

namespace {

// locked: no other process writes here, whatever process has the number of the one that did. In a container numbers are
// small, so some process always has it.
bool is_leftover_checkpoint(const std::string& name, bool locked) {
    const size_t dash = name.find_last_of('-');
    const bool unfinished = starts_with(name, ".tmp-") && dash > 5 && dash != std::string::npos &&
                            checkpoint_step(name.substr(5, dash - 5)) >= 0 &&
                            (locked || !process_lives(name.substr(dash + 1)));
    return unfinished ||
           (starts_with(name, REMOVED_PREFIX) && checkpoint_step(name.substr(std::strlen(REMOVED_PREFIX))) >= 0);
}

}  // namespace

void remove_leftovers(const std::string& run_dir, bool locked) {
    for (const std::string& name : list_directory(run_dir)) {
        const bool unfinished_file = name == ".tmp-log.jsonl" || name == ".tmp-run.toml";
        if (unfinished_file || is_leftover_checkpoint(name, locked)) remove_tree(join_path(run_dir, name));
    }
}

void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& spare) {
    require(keep >= 1, run_dir, ": cannot keep ", keep, " checkpoints; keep at least 1");
    for (const std::string& name : list_directory(run_dir))  // not the files: this process may be writing one
        if (is_leftover_checkpoint(name, false)) remove_tree(join_path(run_dir, name));
    std::vector<std::string> names = list_checkpoints(run_dir);
    names.resize(size_t(std::max<int64_t>(0, int64_t(names.size()) - keep)));
    for (const std::string& name : names) {
        if (name == spare) continue;
        const std::string removed = join_path(run_dir, REMOVED_PREFIX + name);
        rename_directory(join_path(run_dir, name), removed);
        flush_directory(run_dir);
        remove_tree(removed);
    }
}
