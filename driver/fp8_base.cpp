#include "driver/fp8_base.h"

#include <cmath>

#include "kernels/fp8.h"
#include "runtime/model/roles.h"

Fp8Matrix Fp8Weight::matrix(bool transposed, Tensor scratch, Stream stream) const {
    if (!transposed) return {rows, Fp8Format::E4M3, scale};
    if (columns) return {columns, Fp8Format::E4M3, scale};
    const Tensor turned = make_tensor(scratch.data, DType::U8, scratch.device, {rows.shape[1], rows.shape[0]});
    fp8_transpose(turned, rows, stream);
    return {turned, Fp8Format::E4M3, scale};
}

Fp8Base::Fp8Base(const ParamTable& table, int64_t first, int64_t end, bool both_orientations, DType dtype,
                 const FrozenMemory::Kept& kept)
    : memory(kept), first_layer(first), end_layer(end), rounded_to(dtype) {
    for (const Param& p : table.params) {
        if (!quantises(p)) continue;
        Fp8Weight& weight = matrices[p.index];
        memory.add(weight.rows, p.layer, DType::U8, {p.rows, p.cols});
        if (both_orientations && memory.in_place()) memory.add(weight.columns, p.layer, DType::U8, {p.cols, p.rows});
        memory.add(weight.scale, p.layer, DType::F32, {FP8_SCALE_FLOATS});
    }
    memory.assign_offsets();
}

bool Fp8Base::quantises(const Param& p) const {
    return linear_layer_index(p.role) >= 0 && p.layer >= first_layer && p.layer < end_layer;
}

std::vector<int64_t> Fp8Base::other_starts(const ParamTable& table) const {
    return packed_starts(table, 0, 1, [this](const Param& p) { return !quantises(p); });
}

const Fp8Weight* Fp8Base::find(const Param& p) const {
    const auto found = matrices.find(p.index);
    return found == matrices.end() ? nullptr : &found->second;
}

void Fp8Base::store(const Param& p, const float* values) const {
    const Fp8Weight& to = matrices.at(p.index);
    std::vector<uint8_t> codes(size_t(p.numel()));
    float scale[FP8_SCALE_FLOATS];
    const auto [first, end] = memory.own(p.layer, to.rows);
    const float amax =
        fp8_quantise_on_host(host_tensor(codes.data(), {p.rows, p.cols}), host_tensor(scale, {FP8_SCALE_FLOATS}),
                             host_tensor(values, {p.rows, p.cols}), rounded_to, first, end);
    require(std::isfinite(amax), "--matmul-dtype fp8: ", p.name, " has weights that are not finite in ",
            dtype_name(rounded_to), "; check the model's files");
    memory.store(p.layer, to.rows, codes.data());
    memory.store(p.layer, to.scale, scale);
    if (to.columns) fp8_transpose(to.columns, to.rows, Stream{});
}
