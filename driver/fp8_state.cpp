#include "driver/fp8_state.h"

#include <algorithm>
#include <iterator>

#include "runtime/error.h"

LinearSizes linear_layer_sizes(const ModelConfig& c, Role role) {
    switch (role) {
        case QKV_W:
            return {c.qkv_channels(), c.channels};
        case PROJ_W:
            return {c.channels, c.heads * c.head_size};
        case FC_W:
            return {c.fc_channels(), c.channels};
        case FCPROJ_W:
            return {c.channels, c.ffn};
        default:
            throw Error("linear_layer_sizes: not a linear layer of a block");
    }
}

void check_fp8(const Fp8Options& o, const ModelConfig& c, DType dtype, int64_t tokens, const Target& target) {
    if (!o.on) return;
    const std::string unavailable = matmul_fp8_unavailable(target);
    require(unavailable.empty(), "--matmul-dtype fp8: ", unavailable, "; leave the option out");
    require(target.device == Device::CPU || dtype == DType::BF16,
            "--matmul-dtype fp8 quantises bf16; add --dtype bf16");
    require(
        !c.norm_after,
        "--matmul-dtype fp8 takes norms before attention and the MLP, not --norm-placement after (OLMo2); leave the "
        "option out");
    require(o.skip_first < c.layers && o.skip_last < c.layers - o.skip_first, "--fp8-skip-first ", o.skip_first,
            " and --fp8-skip-last ", o.skip_last, " leave none of the ", c.layers,
            " layers in fp8; lower them or leave out --matmul-dtype fp8");
    const std::pair<const char*, int64_t> sizes[] = {{"--channels", c.channels},
                                                     {"--heads x --head-size", c.heads * c.head_size},
                                                     {"the output of the QKV projection", c.qkv_channels()},
                                                     {"--ffn", c.ffn},
                                                     {"--batch-size x --seq-len", tokens}};
    for (const auto& [name, size] : sizes)
        require(size % 16 == 0, "--matmul-dtype fp8: ", name, " is ", size,
                ", which is not a multiple of 16; change it or leave the option out");
}

namespace {

// Row i of a matrix, and element i of its first row, as vectors.
Tensor row(const Tensor& t, int64_t i) {
    const Tensor r = t.rows(i, i + 1);
    return make_tensor(r.data, r.dtype, r.device, {t.shape[1]});
}
Tensor element(const Tensor& t, int64_t i) {
    const Tensor e = t.columns(i, i + 1);
    return make_tensor(e.data, e.dtype, e.device, {1});
}

// Elements of a weight as a matrix, which fp8_quantise() takes. Tensors and the parts of ranks begin at multiples of
// 128 elements, and the sides of a matrix in fp8 are multiples of 16 (check_fp8).
Tensor as_matrix(const Tensor& t) {
    constexpr int64_t COLUMNS = 128;
    if (!t || t.rank > 1) return t;
    require(t.shape[0] % COLUMNS == 0, "Fp8State: ", t.shape[0], " elements are no rows of ", COLUMNS);
    return make_tensor(t.data, t.dtype, t.device, {t.shape[0] / COLUMNS, COLUMNS});
}

}  // namespace

Fp8State::Fp8State(const ModelConfig& model_config, const Fp8Options& fp8_options)
    : options(fp8_options), config(model_config), linear_layers(model_config.layers * NUM_LINEAR_LAYERS) {}

// The tensors of the state one after the other, aligned as an ArenaPlan aligns them. Returns their bytes; without an
// arena the tensors have no memory.
int64_t Fp8State::lay_out(const Arena* arena, int64_t world) {
    int64_t at = 0;
    const auto add = [&](Tensor& t, DType dtype, std::initializer_list<int64_t> shape) {
        t = arena ? arena->at(at, dtype, shape) : make_tensor(nullptr, dtype, backend_device(), shape);
        at += (t.bytes() + ArenaPlan::ALIGNMENT - 1) / ArenaPlan::ALIGNMENT * ArenaPlan::ALIGNMENT;
    };
    add(scales, DType::F32, {2 * linear_layers, FP8_SCALE_FLOATS});
    add(amaxes, DType::F32, {world, 2 * linear_layers});
    add(past_amaxes, DType::F32, {FP8_HISTORY, 2 * linear_layers});
    add(records, DType::I64, {2 * linear_layers, NUM_FP8_COUNTS});
    add(totals, DType::I64, {NUM_FP8_COUNTS});
    add(weight_scales, DType::F32, {linear_layers, FP8_SCALE_FLOATS});
    add(weight_amaxes, DType::F32, {world, linear_layers});
    return at;
}

int64_t Fp8State::scale_bytes(int64_t world) const {
    return Fp8State(config, options).lay_out(nullptr, world);
}

int64_t Fp8State::weight_bytes() const {
    int64_t bytes = 0;
    for (int64_t l = 0; options.keep_weights && !options.frozen && l < config.layers; l++)
        if (options.in_layer(l, config.layers)) bytes += layer_weight_bytes();
    return bytes;
}

int64_t Fp8State::layer_weight_bytes() const {
    int64_t bytes = 0;
    for (const Role role : LINEAR_LAYERS)
        bytes += 2 * linear_layer_sizes(config, role).outputs * linear_layer_sizes(config, role).inputs;
    return bytes;
}

void Fp8State::allocate(const Context& ctx) {
    state = Arena(scale_bytes(ctx.world), "fp8 scales");
    device_fill(state.at(0, DType::U8, {state.bytes()}).data, 0, size_t(state.bytes()), ctx.stream);
    lay_out(&state, ctx.world);
    own_amaxes = amaxes.rows(ctx.rank, ctx.rank + 1);
    weights = Arena(weight_bytes(), "fp8 weights");
    restore(std::vector<float>(size_t(history_size())), 0, ctx.stream);
}

int64_t Fp8State::index(Role role, int64_t l) const {
    return l * NUM_LINEAR_LAYERS + linear_layer_index(role);
}

Fp8Record Fp8State::record_of(Fp8Operand operand, Role role, int64_t l) const {
    const int64_t i = index(role, l) + (operand == Fp8Operand::Gradient ? linear_layers : 0);
    return {row(scales, i), element(own_amaxes, i), row(records, i)};
}

// The rows and the columns of a kept weight.
std::pair<Tensor, Tensor> Fp8State::kept(Role role, int64_t l) const {
    int64_t at = (l - options.skip_first) * layer_weight_bytes();
    for (const Role before : LINEAR_LAYERS) {
        if (before == role) break;
        at += 2 * linear_layer_sizes(config, before).outputs * linear_layer_sizes(config, before).inputs;
    }
    const auto [outputs, inputs] = linear_layer_sizes(config, role);
    return {weights.at(at, DType::U8, {outputs, inputs}),
            weights.at(at + outputs * inputs, DType::U8, {inputs, outputs})};
}

void Fp8State::scale_weights(const Context& ctx, const std::function<Tensor(Role, int64_t)>& own) const {
    const Tensor measured = weight_amaxes.rows(ctx.rank, ctx.rank + 1);
    device_fill(measured.data, 0, size_t(measured.bytes()), ctx.stream);
    for (int64_t l = 0; l < config.layers; l++)
        for (const Role role : LINEAR_LAYERS) {
            const int64_t i = index(role, l);
            const Fp8Record record{row(weight_scales, i), element(measured, i), {}};
            if (!options.in_layer(l, config.layers)) continue;
            if (const Tensor from = own(role, l))
                fp8_quantise({Fp8Format::E4M3, record, {}, {}}, as_matrix(from), ctx.stream);
        }
    ctx.comm->all_gather(weight_amaxes, measured, ctx.stream);
    // A history of one step, this one, in the place of the first rank's maxima.
    fp8_update_scales(weight_scales, weight_amaxes.rows(0, 1), weight_amaxes, Fp8Format::E4M3, 0, ctx.stream);
}

void Fp8State::quantise_weight(Role role, int64_t l, Tensor from, Tensor rows, Tensor columns, Stream stream) const {
    fp8_quantise({Fp8Format::E4M3, {row(weight_scales, index(role, l)), {}, {}}, as_matrix(rows), columns},
                 as_matrix(from), stream);
}

void Fp8State::keep_weight(Role role, int64_t l, Tensor from, Stream stream) const {
    const auto [rows, columns] = kept(role, l);
    quantise_weight(role, l, from, rows, columns, stream);
}

Fp8Matrix Fp8State::weight(Role role, int64_t l, bool transposed, Tensor from, Tensor scratch, Stream stream) const {
    const auto [outputs, inputs] = linear_layer_sizes(config, role);
    const Tensor written = transposed ? make_tensor(scratch.data, DType::U8, scratch.device, {inputs, outputs})
                                      : make_tensor(scratch.data, DType::U8, scratch.device, {outputs, inputs});
    Tensor codes = written;
    if (options.keep_weights)
        codes = transposed ? kept(role, l).second : kept(role, l).first;
    else if (from.dtype != DType::U8)
        quantise_weight(role, l, from, transposed ? Tensor{} : written, transposed ? written : Tensor{}, stream);
    else if (transposed)
        fp8_transpose(written, from, stream);
    else
        codes = from;
    return {codes, Fp8Format::E4M3, row(weight_scales, index(role, l))};
}

void Fp8State::begin_step(Stream stream) const {
    device_fill(own_amaxes.data, 0, size_t(own_amaxes.bytes()), stream);
    device_fill(records.data, 0, size_t(records.bytes()), stream);
}

void Fp8State::update(const Context& ctx) {
    fp8_sum_counts(totals, records, ctx.stream);
    if (!options.delayed) return;
    ctx.comm->all_gather(amaxes, own_amaxes, ctx.stream);
    for (const Fp8Operand operand : {Fp8Operand::Input, Fp8Operand::Gradient}) {
        const int64_t begin = operand == Fp8Operand::Gradient ? linear_layers : 0, end = begin + linear_layers;
        fp8_update_scales(scales.rows(begin, end), past_amaxes.columns(begin, end), amaxes.columns(begin, end),
                          format(operand), FP8_MARGIN, ctx.stream);
    }
    steps_recorded++;
}

std::vector<float> Fp8State::history(Stream stream) const {
    std::vector<float> host(static_cast<size_t>(history_size()));
    copy_to_host(host.data(), past_amaxes.data, host.size() * sizeof(float), stream);
    return host;
}

void Fp8State::restore(const std::vector<float>& host, int64_t steps, Stream stream) {
    std::vector<float> host_scales(size_t(2 * linear_layers * FP8_SCALE_FLOATS));
    for (int64_t i = 0; i < 2 * linear_layers; i++) {
        float largest = 0;
        for (int64_t step = 0; step < FP8_HISTORY; step++)
            largest = std::max(largest, host[size_t(step * 2 * linear_layers + i)]);
        const Fp8Operand operand = i < linear_layers ? Fp8Operand::Input : Fp8Operand::Gradient;
        fp8_store_scale(&host_scales[size_t(i * FP8_SCALE_FLOATS)],
                        fp8_scale_exponent(largest, format(operand), FP8_MARGIN));
    }
    copy_to_device(past_amaxes.data, host.data(), host.size() * sizeof(float), stream);
    copy_to_device(scales.data, host_scales.data(), host_scales.size() * sizeof(float), stream);
    steps_recorded = steps;
}
