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

Fp8Base::Fp8Base(const ParamTable& table, int64_t first, int64_t end, bool both_orientations, DType dtype)
    : first_layer(first), end_layer(end), keeps_columns(both_orientations), rounded_to(dtype) {
    for (const Param& p : table.params) {
        if (!quantises(p)) continue;
        matrices[p.index] = {};
        plan.add(p.name, DType::U8, {p.rows, p.cols}, 0, 0);
        plan.add(p.name + " transposed", DType::U8, {p.cols, keeps_columns ? p.rows : 0}, 0, 0);
        plan.add(p.name + " scale", DType::F32, {FP8_SCALE_FLOATS}, 0, 0);
    }
    plan.assign_offsets();
}

bool Fp8Base::quantises(const Param& p) const {
    return linear_layer_index(p.role) >= 0 && p.layer >= first_layer && p.layer < end_layer;
}

std::vector<int64_t> Fp8Base::other_starts(const ParamTable& table) const {
    return packed_starts(table, 0, 1, [this](const Param& p) { return !quantises(p); });
}

void Fp8Base::allocate() {
    memory = Arena(plan.bytes(), "fp8 weights");
    auto entry = plan.entries().begin();  // in the order of the parameters, as `matrices`
    const auto next = [&] {
        const ArenaPlan::Entry& e = *entry++;
        return e.bytes ? memory.at(e.offset, e.dtype, e.shape) : Tensor{};
    };
    for (auto& [index, weight] : matrices) {
        weight.rows = next();
        weight.columns = next();
        weight.scale = next();
    }
}

const Fp8Weight* Fp8Base::find(const Param& p) const {
    const auto found = matrices.find(p.index);
    return found == matrices.end() ? nullptr : &found->second;
}

void Fp8Base::store(const Param& p, const float* values) const {
    const Fp8Weight& to = matrices.at(p.index);
    std::vector<uint8_t> codes(size_t(p.numel()));
    float scale[FP8_SCALE_FLOATS];
    const float amax =
        fp8_quantise_on_host(host_tensor(codes.data(), {p.rows, p.cols}), host_tensor(scale, {FP8_SCALE_FLOATS}),
                             host_tensor(values, {p.rows, p.cols}), rounded_to);
    require(std::isfinite(amax), "--matmul-dtype fp8: ", p.name, " has weights that are not finite in ",
            dtype_name(rounded_to), "; check the model's files");
    copy_to_device(to.rows.data, codes.data(), codes.size(), Stream{});
    copy_to_device(to.scale.data, scale, sizeof scale, Stream{});
    if (to.columns) fp8_transpose(to.columns, to.rows, Stream{});
}
