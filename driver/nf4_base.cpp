#include "driver/nf4_base.h"

#include <algorithm>

#include "runtime/model/roles.h"

bool Nf4Base::quantises(const Param& p) {
    return linear_layer_index(p.role) >= 0;
}

std::vector<int64_t> Nf4Base::other_starts(const ParamTable& table) {
    return packed_starts(table, 0, 1, [](const Param& p) { return !quantises(p); });
}

Nf4Base::Nf4Base(const ParamTable& table, const FrozenMemory::Kept& kept) : memory(kept) {
    for (const Param& p : table.params) {
        if (!quantises(p)) continue;
        require(p.cols % NF4_BLOCK == 0, p.name, ": has ", p.cols, " inputs; NF4 needs a multiple of ", NF4_BLOCK,
                "; leave out --qlora or --weights nf4");
        Nf4Matrix& matrix = matrices[p.index];
        matrix.rows = p.rows;
        matrix.cols = p.cols;
        for (const SourceTensor& source : p.sources) matrix.parts.push_back({source.row, source.rows, {}});
        memory.add(matrix.fp8_scale, p.layer, DType::F32, {FP8_SCALE_FLOATS});
        for (Nf4Matrix::Part& part : matrix.parts) {
            const int64_t n = part.rows * p.cols;
            memory.add(part.weights.codes, p.layer, DType::U8, {n / 2});
            memory.add(part.weights.absmax_codes, p.layer, DType::U8, {nf4_blocks(n)});
            memory.add(part.weights.group_absmax, p.layer, DType::F32, {nf4_groups(n)});
            memory.add(part.weights.mean, p.layer, DType::F32, {1});
        }
        largest_weight = std::max(largest_weight, p.numel());
    }
    memory.assign_offsets();
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
        const Nf4Weights& to = part.weights;
        const auto [first, end] = memory.own(p.layer, to.codes);  // bytes, of two weights each
        amax = std::max(amax, nf4_quantise(host, host_tensor(values + part.row * p.cols, {n}), 2 * first, 2 * end));
        for (const auto& [tensor, from] : {std::pair(to.codes, host.codes),
                                           {to.absmax_codes, host.absmax_codes},
                                           {to.group_absmax, host.group_absmax},
                                           {to.mean, host.mean}})
            memory.store(p.layer, tensor, from.data);
    }
    float scale[FP8_SCALE_FLOATS];
    fp8_store_scale(scale, fp8_scale_exponent(amax, Fp8Format::E4M3, 0));
    memory.store(p.layer, matrix(p).fp8_scale, scale);
}
