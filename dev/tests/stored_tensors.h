// The tensors of a safetensors file, read into memory when a test asks for them.
#pragma once

#include <map>
#include <string>

#include "runtime/files/safetensors.h"

class StoredTensors : public SafetensorsFile {
  public:
    using SafetensorsFile::SafetensorsFile;
    // Valid while this object lives. Throws Error for an unknown name.
    Tensor tensor(const std::string& name) const {
        const SafetensorsEntry& stored = entry(name);
        const auto [bytes, added] = read_so_far.try_emplace(name, size_t(stored.end - stored.begin), '\0');
        if (added) read(stored, 0, stored.numel(), bytes->second.data());
        return make_tensor(bytes->second.data(), stored.dtype, Device::CPU, stored.shape.data(),
                           int(stored.shape.size()));
    }

  private:
    mutable std::map<std::string, std::string> read_so_far;
};
