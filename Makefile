# The only build file. `make help` lists the targets.
BACKEND ?= cpu
CXX ?= g++
BUILD := build/$(BACKEND)$(if $(DEBUG),-debug)$(if $(SANITIZE),-$(SANITIZE))

WARNINGS := -Wall -Wextra -Wshadow $(if $(WERROR),-Werror)
OPT := $(if $(DEBUG),-O0 -g,$(if $(SANITIZE),-O1 -g -fno-omit-frame-pointer,-O3))
ARCH_FLAGS := -march=x86-64-v3
CXXFLAGS += -std=c++17 $(OPT) $(ARCH_FLAGS) -fopenmp -fno-math-errno -fno-trapping-math $(WARNINGS) -I. -MMD -MP \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE))
LDLIBS += -lpcre2-8 -pthread
ONEDNN ?= $(if $(wildcard /usr/include/oneapi/dnnl/dnnl.h /usr/include/x86_64-linux-gnu/oneapi/dnnl/dnnl.h),yes,no)
ifeq ($(ONEDNN),yes)
CXXFLAGS += -DUSE_ONEDNN
LDLIBS += -ldnnl
endif

LIB_SOURCES := $(wildcard kernels/*.cpp runtime/*.cpp data/*.cpp infer/*.cpp commands/*.cpp)
LIB_OBJECTS := $(LIB_SOURCES:%.cpp=$(BUILD)/%.o)
LIB := $(BUILD)/libtrain_gpt.a
TESTS := $(patsubst dev/%.cpp,$(BUILD)/dev/%,$(wildcard dev/test_*.cpp))
BENCHES := $(patsubst dev/%.cpp,$(BUILD)/dev/%,$(wildcard dev/bench_*.cpp))

.DELETE_ON_ERROR:
.SECONDARY:
all: train_gpt

train_gpt: $(BUILD)/train_gpt
	ln -sf $< $@

$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(LIB)
	$(CXX) $(CXXFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c $< -o $@

$(BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -x c++ -c $< -o $@

$(LIB): $(LIB_OBJECTS)
	rm -f $@ && ar rcs $@ $^

$(BUILD)/dev/test_%: $(BUILD)/dev/test_%.o $(BUILD)/dev/test_util_impl.o $(LIB)
	$(CXX) $(CXXFLAGS) $^ -o $@ $(LDLIBS) -lgtest -lgtest_main

$(BUILD)/dev/bench_%: $(BUILD)/dev/bench_%.o $(LIB)
	$(CXX) $(CXXFLAGS) $^ -o $@ $(LDLIBS) -lbenchmark

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
