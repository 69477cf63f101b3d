// Finds the tensors of a model that hold NaN or infinities, while its weights are read.
#pragma once

#include <string>
#include <vector>

#include "runtime/files/weight_files.h"

bool all_finite(const float* values, int64_t n);

class NonFiniteTensors {
  public:
    // `fetch`, which also looks at what it fetches. This object must outlive the result.
    FetchParam watch(FetchParam fetch);
    void add(const std::string& tensor);
    // A line for stderr that names `where` and the tensors, as their file does; empty if all values are finite.
    std::string warning(const std::string& where) const;

  private:
    std::vector<std::string> names;
};
