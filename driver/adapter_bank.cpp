#include "driver/adapter_bank.h"

#include <algorithm>
#include <cmath>

#include "driver/inference.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/model/roles.h"

namespace {

AdapterWeights& of_role(BlockAdapters& b, int role) {
    AdapterWeights* const all[] = {&b.qkv, &b.proj, &b.fc, &b.fcproj};
    return *all[linear_layer_index(role)];
}

bool is_linear_layer(const Param& p) {
    return linear_layer_index(p.role) >= 0;
}

}  // namespace

int64_t round_up_rank(int64_t rank) {
    require(rank <= LORA_MAX_RANK, "an adapter of rank ", rank, ": adapters at run time have a rank of at most ",
            LORA_MAX_RANK, "; merge it: give it as --model");
    return (rank + LORA_RANK_MULTIPLE - 1) / LORA_RANK_MULTIPLE * LORA_RANK_MULTIPLE;
}

AdapterBank::AdapterBank(const ParamTable& base, int64_t count, int64_t rank, DType T)
    : table(base), adapters(count), R(rank), dtype(T) {
    for (const Param& p : table.params) {
        if (!is_linear_layer(p)) continue;
        plan.add("A", dtype, {adapters, int64_t(p.sources.size()) * R, p.cols}, 0, 0);
        plan.add("B", dtype, {p.rows, adapters, R}, 0, 0);
    }
    plan.assign_offsets();
}

void AdapterBank::clear(Stream stream) const {
    device_fill(memory.at(0, DType::U8, {plan.bytes()}).data, 0, size_t(plan.bytes()), stream);
}

void AdapterBank::allocate(Stream stream, const Tensor& shared) {
    memory = shared ? Arena(shared) : Arena(plan.bytes(), "adapters");
    clear(stream);
    const auto* entry = plan.entries().data();
    for (const Param& p : table.params) {
        if (!is_linear_layer(p)) continue;
        layers.resize(std::max(layers.size(), size_t(p.layer + 1)));
        AdapterWeights& w = of_role(layers[size_t(p.layer)], p.role);
        for (Tensor* t : {&w.a, &w.b}) {
            *t = memory.at(entry->offset, entry->dtype, entry->shape);
            entry++;
        }
        for (size_t i = 0; i < p.sources.size(); i++) w.part_ends.at(i) = p.sources[i].row + p.sources[i].rows;
    }
}

// The rows of A [rank, C] and of B [rows, adapters·R] that an adapter of a part of p has, whose first output is `row`.
std::pair<Tensor, Tensor> AdapterBank::places(int64_t i, const Param& p, int64_t row, int64_t rows) const {
    BlockAdapters of_layer = layers[size_t(p.layer)];
    const AdapterWeights& w = of_role(of_layer, p.role);
    const int64_t width = w.a.shape[1];
    const Tensor a = make_tensor(w.a.data, dtype, w.a.device, {adapters * width, p.cols}),
                 b = make_tensor(w.b.data, dtype, w.b.device, {p.rows, adapters * R});
    int64_t part = 0;
    while (p.sources[size_t(part)].row != row) part++;
    return {a.rows(i * width + part * R, i * width + (part + 1) * R), b.rows(row, row + rows)};
}

void AdapterBank::store(int64_t i, const Param& p, const Update& u, Stream stream) const {
    // Copies rows of `width` values to columns [first, first + columns) of a matrix, filled up with zeros. Its other
    // columns are read and written back.
    const auto put = [&](const Tensor& to, int64_t first, int64_t columns, const std::vector<float>& values,
                         int64_t width) {
        const int64_t item = dtype_size(dtype), count = int64_t(values.size()) / width, stride = to.shape[1];
        std::vector<char> bytes(size_t(count * stride * item));
        if (columns < stride) copy_to_host(bytes.data(), to.data, bytes.size(), stream);
        if (width == stride) {  // at once, on all cores
            convert_from_float(bytes.data(), dtype, values.data(), int64_t(values.size()));
        } else {
            std::vector<float> row(size_t(columns), 0.0f);
            for (int64_t n = 0; n < count; n++) {
                std::copy_n(values.begin() + n * width, width, row.begin());
                convert_from_float(bytes.data() + (n * stride + first) * item, dtype, row.data(), columns);
            }
        }
        copy_to_device(to.data, bytes.data(), bytes.size(), stream);
        synchronize(stream);  // `bytes` is a local variable
    };
    const auto [a, b] = places(i, p, u.row, u.rows);
    put(a, 0, p.cols, u.a, p.cols);
    put(b, i * R, R, u.b, u.rank);
}

void AdapterBank::store(int64_t i, const LoraAdapter& adapter, Stream stream) const {
    const char* const remedy =
        "; at run time only the linear layers of blocks have adapters; merge it: give it as --model";
    for (const Param& p : table.params) {
        require(!adapter.replaces(p), "the adapter replaces ", p.name, remedy);
        for (const LoraAdapter::Update& u : adapter.updates_of(p)) {
            require(is_linear_layer(p), "the adapter changes ", p.name, remedy);
            // Kernels add 0 times another adapter's values (linear_with_adapters): those of a broken one would reach
            // the rows of all.
            const float most = dtype == DType::F16 ? 65504.0f : 3e38f;
            require(std::all_of(u.b.begin(), u.b.end(), [&](float x) { return std::fabs(x) <= most; }),
                    "the adapter's change of ", p.name, " has values that are not finite in ", dtype_name(dtype),
                    "; train it again, or give a wider --dtype");
            store(i, p, {u.row, u.rows, u.rank, u.a, u.b}, stream);
        }
    }
}

// On the device where the matrices lie there as they do here. Through the host it took 0.6 s of each rollout of LLaMA
// 8B.
void AdapterBank::store(int64_t i, const Context& ctx, const Model& model) const {
    const LoraTable& lora = *model.lora;
    const int64_t rank = lora.options.rank;
    const auto scale = static_cast<float>(lora.options.scale());
    for (const auto& [of, parts] : lora.parts) {
        const auto& [role, layer] = of;
        const Param& p = *model.table.find(role, static_cast<int>(layer));
        const Tensor all_a = model.adapters->weight(lora_a(Role(role)), layer),
                     all_b = model.adapters->weight(lora_b(Role(role)), layer);
        int64_t b_row = 0;
        for (size_t k = 0; k < parts.size(); k++) {
            const int64_t a_row = int64_t(k) * rank, rows = parts[k].rows;
            const Tensor from_a = all_a.rows(a_row, a_row + rank), from_b = all_b.rows(b_row, b_row + rows);
            b_row += rows;
            if (scale == 1 && rank == R && adapters == 1 && all_a.dtype == dtype && all_b.dtype == dtype) {
                const auto [to_a, to_b] = places(i, p, parts[k].row, rows);
                device_copy(to_a.data, from_a.data, size_t(to_a.bytes()), ctx.stream);
                device_copy(to_b.data, from_b.data, size_t(to_b.bytes()), ctx.stream);
                continue;
            }
            const std::vector<float> a = fetch_floats(ctx, from_a);
            std::vector<float> b = fetch_floats(ctx, from_b);
            for (float& value : b) value *= scale;
            store(i, p, {parts[k].row, rows, rank, a, b}, ctx.stream);
        }
    }
}
