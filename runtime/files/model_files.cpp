#include "runtime/files/model_files.h"

#include <utility>

#include "runtime/error.h"
#include "runtime/files/files.h"

ModelFiles::ModelFiles(std::string model_directory) : where(std::move(model_directory)) {}

ModelFiles::ModelFiles(std::string model_file, Contents contents)
    : where(std::move(model_file)), made(std::move(contents)), directory(false) {}

bool ModelFiles::has(const std::string& name) const {
    if (directory) return !where.empty() && path_exists(join_path(where, name));
    return made.count(name) > 0;
}

std::string ModelFiles::read(const std::string& name, int64_t limit) const {
    if (directory) return read_file(join_path(where, name), limit);
    require(has(name), shown_as(name), " is missing");
    return made.at(name)();
}

std::string ModelFiles::shown_as(const std::string& name) const {
    return directory ? join_path(where, name) : str(where, ": ", name);
}

std::vector<std::string> ModelFiles::names(const std::string& subdirectory) const {
    std::vector<std::string> all;
    if (!directory) {
        for (const auto& [name, _] : made)
            if (subdirectory.empty()) all.push_back(name);
        return all;
    }
    const std::string folder = join_path(where, subdirectory);
    if (where.empty() || !is_directory(folder)) return all;
    for (const std::string& name : list_directory(folder))
        if (!is_directory(join_path(folder, name))) all.push_back(join_path(subdirectory, name));
    return all;
}
