// The models of dev/fixtures/models with PyTorch's float64 results (dev/peers/make_reference.py).
#pragma once

#include <string>
#include <vector>

#include "dev/tests/stored_tensors.h"
#include "models/model_source.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"

// Relative to the project's root, where tests run.
inline std::string fixture_directory(const std::string& name) {
    return "dev/fixtures/models/" + name;
}

struct Fixture {
    std::string directory;
    ModelConfig config;
    StoredTensors file;  // reference.safetensors
    int64_t B, T;

    explicit Fixture(const std::string& name)
        : directory(fixture_directory(name)),
          config(find_model(directory).config),
          file(join_path(directory, "reference.safetensors")),
          B(file.tensor("tokens").shape[0]),
          T(file.tensor("tokens").shape[1]) {}

    template <typename U>
    std::vector<U> values(const std::string& name) const {
        const Tensor t = file.tensor(name);
        return std::vector<U>(t.as<U>(), t.as<U>() + t.numel());
    }
    std::vector<int32_t> tokens() const { return values<int32_t>("tokens"); }
    std::vector<int32_t> targets() const { return values<int32_t>("targets"); }
    double loss() const { return values<double>("loss")[0]; }
};

inline std::vector<std::string> fixture_names() {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(fixture_directory(""))) {
        if (is_directory(fixture_directory(name))) names.push_back(name);
    }
    return names;
}
