// The sum of two 4-D tensors on a GPU, the second repeated over the first, rung by rung: the cost of computing an
// element's index, and how collapsing dimensions avoids it.
//
//     make ladder OP=bin_bcast BACKEND=cuda
//     build/cuda/dev/ladder/bin_bcast --csv bin_bcast.csv && scripts/plot_ladder.py bin_bcast.csv
//
// out [8, 16, 1024, 1024] = x + y in fp32, timed with y of x's shape, which collapses to one dimension, and with y
// [1, 1, 1024, 1024], which collapses to two. GB/s count each tensor once and are compared with a device copy of 512
// MiB, timed in the same run. Every rung takes any sizes, of which y's must divide out's, and is compared with the sum
// on the host, bit for bit.
//
// Read the rungs from top to bottom: each keeps the gains of the previous rung.
#include <cstring>

#include "dev/bench/machine_limits.h"
#include "dev/ladder/device_run.cuh"
#include "dev/ladder/ladder.h"
#include "kernels/cuda/cuda_common.cuh"
#include "tensor_library/tensor_ops.h"

namespace {

constexpr int THREADS = 256, DIMS = 4;

// Row-major tensors; y's index in a dimension is out's modulo its size. The last dimension is the innermost.
struct Sum {
    float* out;
    const float *x, *y;
    int rank;
    int64_t n[DIMS], m[DIMS], y_stride[DIMS];
    int64_t numel;
};

// --- an index for each element

template <typename Index>
__device__ __forceinline__ int64_t y_offset(const Sum& a, Index i) {
    int64_t at = 0;
    for (int d = a.rank - 1; d >= 0; d--) {
        const Index size = Index(a.n[d]), index = d == 0 ? i : i % size;
        at += int64_t(index % Index(a.m[d])) * a.y_stride[d];
        i /= size;
    }
    return at;
}

template <typename Index>
__global__ void __launch_bounds__(THREADS) indexed_kernel(const __grid_constant__ Sum a) {
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i < a.numel) a.out[i] = a.x[i] + a.y[y_offset(a, Index(i))];
}

void indexed(const Sum& a, Stream stream) {
    indexed_kernel<uint64_t><<<grid_of(ceil_div(a.numel, THREADS)), THREADS, 0, cuda_stream(stream)>>>(a);
}

void short_index(const Sum& a, Stream stream) {
    if (a.numel < int64_t(1) << 31)
        indexed_kernel<uint32_t><<<grid_of(ceil_div(a.numel, THREADS)), THREADS, 0, cuda_stream(stream)>>>(a);
    else
        indexed(a, stream);
}

// --- the dimensions of the grid are those of the tensor

__global__ void __launch_bounds__(THREADS) gridded_kernel(const __grid_constant__ Sum a) {
    const int64_t column = blockIdx.x * int64_t(THREADS) + threadIdx.x, row = blockIdx.y;
    if (column >= a.n[3]) return;
    const int64_t plane = blockIdx.z % uint32_t(a.n[1]), cube = blockIdx.z / uint32_t(a.n[1]);
    const int64_t at = ((cube * a.n[1] + plane) * a.n[2] + row) * a.n[3] + column;
    a.out[at] = a.x[at] + a.y[cube % a.m[0] * a.y_stride[0] + plane % a.m[1] * a.y_stride[1] +
                              row % a.m[2] * a.y_stride[2] + column % a.m[3] * a.y_stride[3]];
}

// Grids are limited to 65,535 in y and z; a tensor that is longer there takes the previous rung.
void gridded(const Sum& a, Stream stream) {
    const int64_t planes = a.n[0] * a.n[1];
    if (a.n[2] > 65535 || planes > 65535) return short_index(a, stream);
    const dim3 grid(unsigned(ceil_div(a.n[3], THREADS)), unsigned(a.n[2]), unsigned(planes));
    gridded_kernel<<<grid, THREADS, 0, cuda_stream(stream)>>>(a);
}

// --- fewer dimensions

// Neighbouring dimensions become one where y is repeated in neither, or is a single element in both.
Sum collapsed(const Sum& a) {
    Sum c = a;
    c.rank = 0;
    for (int d = 0; d < a.rank; d++) {
        const int last = c.rank - 1;
        const bool whole = last >= 0 && c.n[last] == c.m[last] && a.n[d] == a.m[d];
        const bool one = last >= 0 && c.m[last] == 1 && a.m[d] == 1;
        if (whole || one) {
            c.n[last] *= a.n[d];
            c.m[last] *= a.m[d];
            c.y_stride[last] = a.y_stride[d];
        } else {
            c.n[c.rank] = a.n[d];
            c.m[c.rank] = a.m[d];
            c.y_stride[c.rank] = a.y_stride[d];
            c.rank++;
        }
    }
    return c;
}

void collapsing(const Sum& a, Stream stream) {
    short_index(collapsed(a), stream);
}

// With and without collapsing: 4 elements for each index, if they are also contiguous in y.
__global__ void __launch_bounds__(THREADS) vectors_kernel(const __grid_constant__ Sum a) {
    const int64_t i = (blockIdx.x * int64_t(THREADS) + threadIdx.x) * 4;
    if (i >= a.numel) return;
    const Floats<4> x = load_floats<4>(a.x + i);
    Floats<4> z = load_floats<4>(a.y + y_offset(a, uint32_t(i)));
#pragma unroll
    for (int k = 0; k < 4; k++) z[k] += x[k];
    store_floats<4>(a.out + i, z);
}

void vectors(const Sum& a, bool collapse, Stream stream) {
    const Sum c = collapse ? collapsed(a) : a;
    const int last = c.rank - 1;
    bool fits = c.numel < int64_t(1) << 31 && c.m[last] % 4 == 0 && c.y_stride[last] == 1;
    for (int d = 0; d < last; d++) fits = fits && c.y_stride[d] % 4 == 0;
    if (fits)
        vectors_kernel<<<grid_of(ceil_div(c.numel / 4, THREADS)), THREADS, 0, cuda_stream(stream)>>>(c);
    else
        short_index(c, stream);
}

void vectors_of_four(const Sum& a, Stream stream) {
    vectors(a, false, stream);
}
void vectors_collapsed(const Sum& a, Stream stream) {
    vectors(a, true, stream);
}

// --- the kernel in use: tensor_bin_bcast

void kernel_in_use(const Sum& a, Stream stream) {
    const auto tensor = [](const float* data, const int64_t* shape) {
        return make_tensor(const_cast<float*>(data), DType::F32, Device::CUDA, shape, DIMS);
    };
    tensor_bin_bcast(tensor(a.out, a.n), TensorFunction::Add, tensor(a.x, a.n), tensor(a.y, a.m), stream);
}

// ---------------------------------------------------------------------------------------------------------------------

struct Rung {
    const char* name;
    void (*add)(const Sum& a, Stream stream);
    const char* why;
};

const std::vector<Rung> RUNGS = {
    {"64-bit index", indexed,
     "One thread for each element. To find the element of y it decomposes the index of out, with three divisions "
     "and seven remainders of 64 bits, each a subroutine of dozens of instructions: the index arithmetic takes "
     "longer than the memory access."},
    {"32-bit index", short_index,
     "The same with 32 bits, for tensors of less than 2^31 elements: a division takes about twenty instructions."},
    {"the grid's dimensions", gridded,
     "Row, plane and cube come from the block index, so only the remainders are left. Grids are limited to 65,535 "
     "in y and z, and rows that are short or not a multiple of the block leave threads idle."},
    {"collapsed", collapsing,
     "Two adjacent dimensions in which y is not repeated are one longer dimension; so are two in which y is a "
     "single element. Tensors of one shape become one dimension without any division, a repeated plane becomes "
     "two dimensions, and the limits of the grid do not matter."},
    {"4 at a time", vectors_of_four,
     "Without collapsing, but 16 bytes and one index for four elements. It shows how much of the gain of "
     "collapsing is the cost of indices."},
    {"4 at a time, collapsed", vectors_collapsed, "Both together."},
    {"kernels/tensor_library", kernel_in_use,
     "tensor_bin_bcast(): before dimensions are collapsed, a repeated dimension is split into the repeats, of "
     "stride 0, and the block. No remainders are left, any strides and dtypes work, and the loop is that of zip."},
};

class Problem {
  public:
    Problem(const int64_t (&n)[DIMS], const int64_t (&m)[DIMS], Stream stream)
        : out(numel(n), stream),
          x(DeviceArray<float>::random(numel(n), 1, 1, 0, stream)),
          y(DeviceArray<float>::random(numel(m), 2, 1, 0, stream)) {
        a.out = out.data();
        a.x = x.data();
        a.y = y.data();
        a.rank = DIMS;
        a.numel = numel(n);
        int64_t stride = 1;
        for (int d = DIMS - 1; d >= 0; d--) {
            a.n[d] = n[d];
            a.m[d] = m[d];
            a.y_stride[d] = stride;
            stride *= m[d];
        }
    }
    void run(const Rung& rung, Stream stream) const {
        rung.add(a, stream);
        check_launch(rung.name, stream);
    }
    bool correct(const Rung& rung, Stream stream) {
        out.poison(stream);
        run(rung, stream);
        const std::vector<float> got = out.fetch(stream);
        bool right = out.guard_intact(stream);
#pragma omp parallel for reduction(&& : right)
        for (int64_t i = 0; i < a.numel; i++) {
            int64_t at = 0, rest = i;
            for (int d = DIMS - 1; d >= 0; d--) {
                at += rest % a.n[d] % a.m[d] * a.y_stride[d];
                rest /= a.n[d];
            }
            const float expected = float(x.values()[size_t(i)]) + float(y.values()[size_t(at)]);
            right = right && got[size_t(i)] == expected;
        }
        return right;
    }
    double bytes() const {
        return double(out.bytes() + x.bytes() + y.bytes());
    }

  private:
    static int64_t numel(const int64_t (&n)[DIMS]) {
        return n[0] * n[1] * n[2] * n[3];
    }
    DeviceArray<float> out, x, y;
    Sum a{};
};

LadderTable climb(const char* title, const int64_t (&n)[DIMS], const int64_t (&m)[DIMS], Stream stream) {
    std::vector<Problem> small;
    const int64_t sizes[][2][DIMS] = {{{1, 1, 1, 1}, {1, 1, 1, 1}},     {{2, 3, 4, 5}, {2, 3, 4, 5}},
                                      {{2, 6, 4, 9}, {1, 3, 2, 3}},     {{2, 3, 5, 8}, {2, 1, 5, 4}},
                                      {{3, 1, 7, 64}, {1, 1, 7, 64}},   {{2, 2, 70000, 3}, {1, 2, 1, 3}},
                                      {{70000, 2, 1, 4}, {1, 1, 1, 4}}, {{4, 4, 9, 260}, {4, 1, 3, 1}}};
    for (const auto& s : sizes) small.emplace_back(s[0], s[1], stream);
    Problem large(n, m, stream);
    ColdTimer timer(stream);
    LadderTable table;
    table.title = title;
    table.unit = "GB/s";
    table.unit_size = 1e9;
    table.limit_name = "copy";
    for (const Rung& rung : RUNGS) {
        bool right = large.correct(rung, stream);
        for (Problem& problem : small) right = problem.correct(rung, stream) && right;
        const double ms = timer.median_ms([&] { large.run(rung, stream); });
        table.rows.push_back({rung.name, ms, large.bytes() / (ms * 1e-3), machine_limits().copy, right, rung.why});
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    return ladder_main([&] {
        const LadderOptions options = ladder_options(argc, argv);
        const Stream stream{};
        std::printf("Sums of 4-D tensors on %s. A copy reaches %.0f GB/s.\n\n", device_description().c_str(),
                    machine_limits().copy * 1e-9);
        const std::vector<LadderTable> tables = {
            climb("x + y of one shape", {8, 16, 1024, 1024}, {8, 16, 1024, 1024}, stream),
            climb("x + a plane repeated", {8, 16, 1024, 1024}, {1, 1, 1024, 1024}, stream)};
        for (const LadderTable& table : tables) table.print();
        tables.front().explain();  // the same rungs in both
        write_ladder_csv(options.csv, tables);
        return std::all_of(tables.begin(), tables.end(), [](const LadderTable& table) { return table.correct(); });
    });
}
