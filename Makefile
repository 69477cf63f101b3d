# train_gpt's only build file. `make help` lists the targets, docs/build.md explains the choices made here.
# Everything a build makes lies in build/<backend>[-debug|-address|-undefined]/; ./train_gpt is the driver built last.
SHELL := /bin/bash
.SHELLFLAGS := -ec
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SECONDARY:

## Variables, all optional:
## BACKEND=cpu|cuda             cuda: tests of the kernels only, so far
## DEBUG=1                      no optimisation, debug symbols
## SANITIZE=address|undefined   run under a sanitizer
## WERROR=1                     warnings are errors
## ONEDNN=no                    the built-in GEMM even where oneDNN is installed
## DEPS=no                      never install anything
## V=1                          print whole command lines
Q := $(if $(V),,@)
GOALS := $(or $(MAKECMDGOALS),all)
BUILDING := $(filter-out help clean deps venv format check-format,$(GOALS))
MODE := $(firstword -$(MAKEFLAGS))# the one-letter flags, as in -n
MAKEFLAGS += -j$(shell nproc)# all cores, unless the command line says otherwise

# ---- what the machine has ---------------------------------------------------------------------------------------------
# Looked at before anything else, because installing a library changes how the rest is compiled. Nothing is installed by
# a dry run (make -n) or a question (make -q).
DEPS ?= $(if $(findstring n,$(MODE))$(findstring q,$(MODE)),no)
ifneq ($(BUILDING),)
JOBS := build $(filter test bench data train mutants,$(GOALS:bench-binaries=bench))
$(shell CXX="$(CXX)" DEPS="$(DEPS)" scripts/deps.sh need $(JOBS) >&2)
ifneq ($(.SHELLSTATUS),0)
$(error stopped: see above)
endif
endif

CUDA_SOURCES := $(wildcard kernels/*.cu)
NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
# nvidia-smi takes most of a second on some machines, so it is asked only where no device file answers (as under WSL).
GPU := $(or $(firstword $(wildcard /dev/nvidia[0-9]*)),$(shell command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null))
# The driver does not run on a GPU yet, so the CPU is the default everywhere.
BACKEND ?= cpu
ifneq ($(and $(GPU),$(filter cpu,$(BACKEND)),$(BUILDING)),)
  $(info There is a GPU here, but so far only the kernels have a CUDA half (make test BACKEND=cuda): building for the CPU.)
endif

# ---- how it is compiled -----------------------------------------------------------------------------------------------
BUILD := build/$(BACKEND)$(if $(DEBUG),-debug)$(if $(SANITIZE),-$(SANITIZE))

# x86-64-v3 is AVX2 and FMA; kernels reach AVX-512 by run-time dispatch (kernels/cpu.h), so that a binary may be copied.
ARCH_FLAGS := $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
OPTIMISE := $(if $(DEBUG),-O0 -g,$(if $(SANITIZE),-O1 -g -fno-omit-frame-pointer,-O3))
# Kernels pass 512-bit vectors through inlined functions only, so that their ABI (-Wpsabi) does not matter.
WARNINGS := -Wall -Wextra -Wshadow -Wno-psabi $(if $(WERROR),-Werror)
# The undefined-behaviour build takes the AVX2 code paths, so that CI tests them on machines with AVX-512 too.
SANITIZER := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all $(if $(filter undefined,$(SANITIZE)),-DNO_AVX512))
CPPFLAGS += -I. -MMD -MP
COMPILE := $(CXX) -std=c++17 $(OPTIMISE) $(ARCH_FLAGS) -fopenmp -fno-math-errno -fno-trapping-math $(WARNINGS) $(SANITIZER) $(CXXFLAGS)
LDLIBS += -lpcre2-8 -pthread -ldl

# kernels/x.cu replaces kernels/x.cpp in a CUDA build, likewise in runtime/; nothing above these rooms asks.
SOURCES := $(wildcard kernels/*.cpp runtime/*.cpp data/*.cpp infer/*.cpp commands/*.cpp)
ifeq ($(BACKEND),cuda)
  ifneq ($(filter all train_gpt train bench ladder mutants,$(GOALS)),)
    $(error BACKEND=cuda: so far only the kernels have a CUDA half; make test BACKEND=cuda tests them, BACKEND=cpu builds the driver)
  endif
  ifeq ($(NVCC),)
    $(error BACKEND=cuda: no nvcc found; install the CUDA Toolkit (12.4 or newer) or set NVCC=/path/to/nvcc)
  endif
  CU := $(wildcard kernels/*.cu runtime/*.cu)
  SOURCES := $(filter-out $(CU:.cu=.cpp),$(SOURCES)) $(CU)
  ifneq ($(shell $(NVCC) --version | grep -q 'release \(12\.[4-9]\|1[3-9]\)' || echo old),)
    $(error BACKEND=cuda: $(NVCC) is older than CUDA 12.4)
  endif
  CUDA_HOME := $(abspath $(dir $(NVCC))/..)
  ARCH ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n1 | tr -d .),90a)
  CPPFLAGS += -DUSE_CUDA -isystem $(CUDA_HOME)/include
  LDLIBS += -L$(CUDA_HOME)/lib64 -lcublasLt -lcublas -lcudart
  NVCC_FLAGS := -std=c++17 $(if $(DEBUG),-O0 -g -G,-O3 -lineinfo) -arch=sm_$(ARCH) --expt-relaxed-constexpr \
                -Xcompiler -fopenmp,-Wall,-Wextra $(if $(WERROR),-Werror all-warnings)
  COMPILE_CU := $(NVCC) -ccbin $(CXX) $(NVCC_FLAGS)
else ifeq ($(BACKEND),cpu)
  COMPILE_CU := $(COMPILE) -x c++
  ONEDNN ?= $(shell echo '__has_include(<oneapi/dnnl/dnnl.h>)' | $(CXX) -std=c++17 -E -P -x c++ - 2>/dev/null)
  ifneq ($(filter 1 yes,$(ONEDNN)),)
    CPPFLAGS += -DUSE_ONEDNN
    LDLIBS += -ldnnl
  else ifneq ($(BUILDING),)
    $(info Building without oneDNN: matrix products use the built-in GEMM, which is slower (`make deps` installs oneDNN).)
  endif
else
  $(error BACKEND is cpu or cuda, not $(BACKEND))
endif

OBJECTS := $(SOURCES:%=$(BUILD)/%.o)
LIB := $(BUILD)/libtrain_gpt.a
DRIVER := $(BUILD)/train_gpt

# ---- rules ------------------------------------------------------------------------------------------------------------
# The stamps change only when their text does: another flag, compiler or library recompiles, a removed source re-archives.
$(BUILD)/flags: TEXT = $(COMPILE) $(CPPFLAGS) $(COMPILE_CU) $(LDLIBS) $(shell $(CXX) --version | head -n1)
$(BUILD)/sources: TEXT = $(OBJECTS)
$(BUILD)/flags $(BUILD)/sources: FORCE
	@mkdir -p $(@D)
	@echo '$(TEXT)' | cmp -s - $@ || echo '$(TEXT)' > $@

$(BUILD)/%.cpp.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  compile $<")
	$(Q)$(COMPILE) $(CPPFLAGS) -c $< -o $@

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  compile $<")
	$(Q)$(COMPILE_CU) $(CPPFLAGS) -c $< -o $@

$(LIB): $(OBJECTS) $(BUILD)/sources
	$(Q)rm -f $@ && ar rcs $@ $(OBJECTS)

LINK = $(if $(V),,@echo "  link    $@" &&) $(COMPILE) $(filter %.o %.a,$^) -o $@ $(LDLIBS)

$(DRIVER): $(BUILD)/train_gpt.cu.o $(LIB)
	$(LINK)

$(BUILD)/test_gpt: $(BUILD)/test_gpt.cu.o $(BUILD)/dev/test_util.cpp.o $(LIB)
	$(LINK) -lgtest -lgtest_main

$(BUILD)/dev/test_%: $(BUILD)/dev/test_%.cpp.o $(BUILD)/dev/test_util.cpp.o $(LIB)
	$(LINK) -lgtest -lgtest_main

$(BUILD)/dev/bench_%: $(BUILD)/dev/bench_%.cpp.o $(BUILD)/dev/bench_util.cpp.o $(BUILD)/dev/machine_limits.cpp.o $(LIB)
	$(LINK) -lbenchmark

# The checkpoint tests preload this library into themselves.
$(BUILD)/dev/test_checkpoint: | $(BUILD)/dev/crash_shim.so

LADDER_SUFFIX := $(if $(filter cuda,$(BACKEND)),cu,cpp)
$(BUILD)/dev/ladder/%: $(BUILD)/dev/ladder/%.$(LADDER_SUFFIX).o $(BUILD)/dev/machine_limits.cpp.o $(LIB)
	$(LINK)

$(BUILD)/dev/%.so: dev/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(CC) -O1 -Wall -Wextra -fPIC -shared $< -o $@ -ldl

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- targets ----------------------------------------------------------------------------------------------------------
.PHONY: all train_gpt train data test bench ladder mutants deps venv format check-format clean help FORCE test-binaries bench-binaries

PYTHON := .venv/bin/python
# All of an op's kind in dev/, or the one that OP names.
in_dev = $(patsubst dev/%.$(2),$(BUILD)/dev/%,$(wildcard dev/$(1)$(or $(OP),*).$(2)))

all train_gpt: $(DRIVER)  ## build the driver; ./train_gpt links to it
	@ln -sfn $(DRIVER) train_gpt && echo "./train_gpt -> $(DRIVER)"

train: all $(PYTHON)  ## the quick start: data, training into runs/quickstart, evaluation, loss curve, a sample
	@scripts/run_quickstart.sh $(DRIVER)

data: $(PYTHON)  ## tokenise the quick start's corpus, or your own: TEXT=file|folder [NAME=] [TOKENIZER=byte|bpe|gpt2|DIR] [VOCAB=4096] [VAL=0.05]
ifdef TEXT
	@$(PYTHON) data/make_data.py --text "$(TEXT)" $(if $(NAME),--name "$(NAME)") $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") \
	    $(if $(VOCAB),--vocab $(VOCAB)) $(if $(VAL),--val $(VAL))
else
	@$(if $(NAME)$(TOKENIZER)$(VOCAB)$(VAL),echo "NAME, TOKENIZER, VOCAB and VAL go with TEXT=file|folder." >&2; exit 1)
	@$(PYTHON) data/quickstart.py
endif

# Python tests may run the driver, so it is built as well; they find it as TRAIN_GPT.
TEST_BINARIES := $(filter-out %/test_util,$(call in_dev,test_,cpp)) $(if $(filter gpt,$(or $(OP),gpt)),$(patsubst %.cu,$(BUILD)/%,$(wildcard test_gpt.cu)))
TEST_SCRIPTS := $(wildcard $(foreach room,data dev scripts,$(room)/test_$(or $(OP),*).py))
ifneq ($(filter test,$(GOALS)),)
  $(if $(strip $(TEST_BINARIES) $(TEST_SCRIPTS)),,$(error OP=$(OP): there is no dev/test_$(OP).cpp and no data/test_$(OP).py))
endif
ifeq ($(BACKEND),cuda)
# Only kernels have a CUDA half so far: the tests of the ops with a kernels/<op>.cu.
TEST_BINARIES := $(filter $(patsubst kernels/%.cu,$(BUILD)/dev/test_%,$(CUDA_SOURCES)),$(TEST_BINARIES))
TEST_SCRIPTS :=
test-binaries: $(TEST_BINARIES)
else
test-binaries: $(TEST_BINARIES) $(DRIVER) $(BUILD)/dev/crash_shim.so
endif

test: test-binaries $(PYTHON)  ## every test, with one closing line; OP=layernorm for one op
ifeq ($(BACKEND),cuda)
	@$(if $(GPU),,echo "BACKEND=cuda: no GPU found, so its tests cannot run." >&2; exit 1)
endif
	@TRAIN_GPT=$(DRIVER) $(PYTHON) scripts/run_tests.py $(TEST_BINARIES) $(TEST_SCRIPTS)

BENCHES := $(filter-out %/bench_util,$(call in_dev,bench_,cpp))
bench-binaries: $(BENCHES) $(call in_dev,ladder/,$(LADDER_SUFFIX))

bench: $(BENCHES)  ## time every kernel against the machine's limits; OP=matmul for one op
	@$(if $(BENCHES),,echo "There is no benchmark dev/bench_$(or $(OP),*).cpp." >&2; exit 1;) for bench in $(BENCHES); do $$bench; done

LADDERS := $(call in_dev,ladder/,$(LADDER_SUFFIX))
ladder: $(LADDERS)  ## the kernel ladders, checked and timed rung by rung; OP=matmul for one
	@$(if $(LADDERS),,echo "There is no ladder dev/ladder/$(or $(OP),*).$(LADDER_SUFFIX)." >&2; exit 1;) for ladder in $(LADDERS); do $$ladder; done

mutants: $(PYTHON)  ## break the code one line at a time (dev/mutants/): every break must fail a test
	@$(PYTHON) scripts/run_mutants.py $(OP)

deps:  ## install what is missing: distribution packages (as root or with sudo), then the Python packages
	@DEPS="$(DEPS)" CXX="$(CXX)" scripts/deps.sh install
	@DEPS="$(DEPS)" scripts/venv.sh

venv: $(PYTHON)  ## the Python environment .venv with the packages of scripts/requirements.txt

# Not a file to make wait for: the script itself sees in milliseconds whether its packages are there.
$(PYTHON): FORCE
	@DEPS="$(DEPS)" scripts/venv.sh

format: venv  ## lay out the C++ and CUDA sources by .clang-format
	@scripts/format.sh

check-format: venv  ## fail where `make format` would change something
	@scripts/format.sh --check

clean:  ## remove what was built (not data/, runs/ or .venv)
	rm -rf build train_gpt

help:  ## this list
	@awk -F':.*  ## ' '/^[a-z_ -]+:.*  ## / {sub(/ .*/, "", $$1); printf "make %-13s %s\n", $$1, $$2} /^## / {sub(/^## /, ""); vars = vars $$0 "\n"} \
	    END {printf "\n%s", vars}' $(firstword $(MAKEFILE_LIST))
