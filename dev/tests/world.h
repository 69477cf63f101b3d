// The world of ranks, for tests that run alone (a world of one rank) or under mpirun.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "runtime/context.h"

// Connects once for all tests of a program.
class LaunchedWorld : public testing::Environment {
  public:
    static const Context& context() { return *shared(); }

  private:
    static std::unique_ptr<Context>& shared() {
        static std::unique_ptr<Context> context;
        return context;
    }
    void SetUp() override { shared() = std::make_unique<Context>(join_world({})); }
    void TearDown() override { shared().reset(); }
};
