#include "driver/nf4_base.h"

#include <algorithm>

#include "runtime/model/roles.h"

namespace {

constexpr int64_t round_up(int64_t bytes) {
    return (bytes + ArenaPlan::ALIGNMENT - 1) / ArenaPlan::ALIGNMENT * ArenaPlan::ALIGNMENT;
}

// The bytes of n weights, and where the tensors of Nf4Weights begin.
struct Layout {
    int64_t absmax_codes, group_absmax, mean, bytes;
    explicit Layout(int64_t n)
        : absmax_codes(round_up(n / 2)),
          group_absmax(absmax_codes + round_up(nf4_blocks(n))),
          mean(group_absmax + round_up(4 * nf4_groups(n))),
          bytes(mean + ArenaPlan::ALIGNMENT) {}
};

}  // namespace

bool Nf4Base::quantises(const Param& p) {
    return linear_layer_index(p.role) >= 0;
}

std::vector<int64_t> Nf4Base::other_starts(const ParamTable& table) {
    return packed_starts(table, 0, 1, [](const Param& p) { return !quantises(p); });
}

Nf4Base::Nf4Base(const ParamTable& table) {
    for (const Param& p : table.params) {
        if (!quantises(p)) continue;
        require(p.cols % NF4_BLOCK == 0, p.name, ": has ", p.cols, " inputs; NF4 needs a multiple of ", NF4_BLOCK,
                "; leave out --qlora or --weights nf4");
        Nf4Matrix& matrix = matrices[p.index];
        matrix.rows = p.rows;
        matrix.cols = p.cols;
        for (const SourceTensor& source : p.sources) {
            matrix.parts.push_back({source.row, source.rows, {}});
            end += Layout(source.rows * p.cols).bytes;
        }
        end += ArenaPlan::ALIGNMENT;  // fp8_scale
        largest_weight = std::max(largest_weight, p.numel());
    }
}

void Nf4Base::allocate() {
    memory = Arena(end, "NF4 weights");
    int64_t at = 0;
    for (auto& [index, matrix] : matrices) {
        matrix.fp8_scale = memory.at(at, DType::F32, {FP8_SCALE_FLOATS});
        at += ArenaPlan::ALIGNMENT;
        for (Nf4Matrix::Part& part : matrix.parts) {
            const int64_t n = part.rows * matrix.cols;
            const Layout layout(n);
            part.weights = {memory.at(at, DType::U8, {n / 2}),
                            memory.at(at + layout.absmax_codes, DType::U8, {nf4_blocks(n)}),
                            memory.at(at + layout.group_absmax, DType::F32, {nf4_groups(n)}),
                            memory.at(at + layout.mean, DType::F32, {1})};
            at += layout.bytes;
        }
    }
}

void Nf4Base::store(const Param& p, const float* values) const {
    float amax = 0;
    for (const Nf4Matrix::Part& part : matrix(p).parts) {
        const int64_t n = part.rows * p.cols;
        std::vector<uint8_t> codes(size_t(n / 2)), absmax_codes(size_t(nf4_blocks(n)));
        std::vector<float> group_absmax(size_t(nf4_groups(n)));
        float mean = 0;
        const Nf4Weights host = {host_tensor(codes.data(), {n / 2}), host_tensor(absmax_codes.data(), {nf4_blocks(n)}),
                                 host_tensor(group_absmax.data(), {nf4_groups(n)}), host_tensor(&mean, {1})};
        nf4_quantise(host, host_tensor(values + part.row * p.cols, {n}));
        amax = std::max(amax, nf4_amax(host));
        const Nf4Weights& to = part.weights;
        for (const auto& [device, from] : {std::pair(to.codes, host.codes),
                                           {to.absmax_codes, host.absmax_codes},
                                           {to.group_absmax, host.group_absmax},
                                           {to.mean, host.mean}})
            copy_to_device(device.data, from.data, size_t(from.bytes()), Stream{});
    }
    float scale[FP8_SCALE_FLOATS];
    fp8_store_scale(scale, fp8_scale_exponent(amax, Fp8Format::E4M3, 0));
    copy_to_device(matrix(p).fp8_scale.data, scale, sizeof scale, Stream{});
}
