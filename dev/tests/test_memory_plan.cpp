// The text of a memory plan.
#include "runtime/device/memory_plan.h"

#include <gtest/gtest.h>

#include <sstream>

namespace {

// A name may have any length; on a GPU the lines of host memory are longer than they are on the CPU.
TEST(MemoryPlan, SizesStandInOneColumn) {
    const std::string longest = "the copy of the weights and moments for a checkpoint";
    MemoryPlan plan;
    plan.add("weights", 1 << 20);
    plan.add(longest, 3 << 20, MemoryPlace::Host);
    std::istringstream text(plan.text(5 << 20));
    size_t lines = 0, column = std::string::npos;
    for (std::string line; std::getline(text, line); lines++) {
        const size_t unit = line.find(" MiB");
        ASSERT_NE(unit, std::string::npos) << line;
        const size_t begin = line.rfind("  ", unit) + 2;
        if (column == std::string::npos) column = begin;
        EXPECT_EQ(begin, column) << line;
    }
    EXPECT_EQ(lines, 4u);  // two of add(), the total, and what is already in use
    EXPECT_NE(plan.text(0).find(longest), std::string::npos);
}

}  // namespace
