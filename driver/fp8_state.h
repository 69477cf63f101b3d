// The scales of the blocks' linear layers in fp8 training, and their quantised weights (docs/use/low_precision.md).
//
// Each linear layer has two operands that change with every micro-step: its input (E4M3) and the gradient of its output
// (E5M2 or E4M3). An operand has a scale for the whole tensor, by one of two methods:
//
//   delayed   from the largest amax of the last FP8_HISTORY steps, over all ranks and micro-steps, with a factor of
//             2^FP8_MARGIN in reserve. One pass quantises, and micro-batches and ranks do not change the scale. Until
//             the history is full, a pass before the quantisation computes the amax, and the scale is from the largest
//             of the step so far.
//   current   from the amax of the tensor itself, which a pass before the quantisation computes.
//
// Frozen weights beside adapters are in driver/fp8_base.h. Trained weights are scaled by their own amax after each
// update: each rank measures the parts that it owns, so nothing waits for the weights of other ranks. They are
// quantised then and kept, in both orientations (2 bytes a weight), or as codes that ranks gather
// (driver/fp8_shards.h), or quantised at each use.
#pragma once

#include <functional>
#include <vector>

#include "driver/options.h"
#include "kernels/fp8.h"
#include "kernels/matmul_fp8.h"
#include "runtime/context.h"
#include "runtime/device/arena.h"
#include "runtime/device/target.h"
#include "runtime/model/model_config.h"
#include "runtime/model/roles.h"

constexpr int64_t FP8_HISTORY = 16;  // steps
constexpr int FP8_MARGIN = 1;

// The sizes of a block's linear layers (LINEAR_LAYERS).
struct LinearSizes {
    int64_t outputs, inputs;
};
LinearSizes linear_layer_sizes(const ModelConfig& config, Role role);

// Throws Error if the model or a micro-step of so many tokens cannot be trained in fp8 on that device.
void check_fp8(const Fp8Options& options, const ModelConfig& config, DType dtype, int64_t tokens, const Target& target);

enum class Fp8Operand : uint8_t { Input, Gradient };

class Fp8State {
  public:
    Fp8State(const ModelConfig& model_config, const Fp8Options& fp8_options);
    void allocate(const Context& ctx);
    int64_t scale_bytes(int64_t world) const;
    int64_t weight_bytes() const;  // of the weights that are kept

    // Quantises an operand into rows and columns, either of which may be null. produce(Fp8Output) is called with what
    // is to be written, once or twice. again: what this micro-step has quantised before; the scale stays, nothing is
    // recorded.
    template <typename Produce>
    void quantise(Fp8Operand operand, Role role, int64_t l, Tensor rows, Tensor columns, bool again, Stream stream,
                  const Produce& produce) const {
        Fp8Output out{format(operand), record_of(operand, role, l), rows, columns};
        if (again) {
            out.record.amax = out.record.counts = {};
        } else if (measures()) {
            if (!options.delayed) device_fill(out.record.amax.data, 0, sizeof(float), stream);
            produce(Fp8Output{out.format, {out.record.scale, out.record.amax, {}}, {}, {}});
            fp8_set_scale(out.record, out.format, 0, stream);
            out.record.amax = {};
        }
        produce(out);
    }
    // An operand that quantise() has written.
    Fp8Matrix matrix(Fp8Operand operand, Role role, int64_t l, Tensor codes) const {
        return {codes, format(operand), record_of(operand, role, l).scale};
    }

    // The weight of a linear layer; the backward pass takes it transposed [inputs, outputs]. If weights are not kept,
    // `from` is the weight, which is quantised into scratch (U8), or its codes, which are transposed there.
    Fp8Matrix weight(Role role, int64_t l, bool transposed, Tensor from, Tensor scratch, Stream stream) const;
    // New scales of all weights. own(role, l): the elements that this rank owns, [n] with n a multiple of 128, or null;
    // together those of all ranks are the weight. All ranks call it.
    void scale_weights(const Context& ctx, const std::function<Tensor(Role, int64_t)>& own) const;
    // After that: codes of a weight, or of elements of it: from and rows [n], columns null. Then those that are kept.
    void quantise_weight(Role role, int64_t l, Tensor from, Tensor rows, Tensor columns, Stream stream) const;
    void keep_weight(Role role, int64_t l, Tensor from, Stream stream) const;

    // Forgets the amaxes and the counts: before the first micro-step of a step.
    void begin_step(Stream stream) const;
    // The scales of the next step. All ranks call it.
    void update(const Context& ctx);
    // FP8_ELEMENTS, FP8_SATURATED and FP8_UNDERFLOWED of this rank's operands in the step before update(): int64.
    Tensor counts() const { return totals; }

    // Whether a micro-step computes scales itself, and not only update(): then it is not the one that a graph repeats.
    bool calibrates() const { return options.delayed && !held && steps_recorded < FP8_HISTORY; }
    // true: uses the scales as they are, for warming up.
    void hold_scales(bool hold) { held = hold; }

    // For checkpoints: the number of steps that the history holds, and the amaxes [FP8_HISTORY, 2·S], the newest first.
    int64_t recorded() const { return steps_recorded; }
    std::vector<float> history(Stream stream) const;
    void restore(const std::vector<float>& amaxes, int64_t steps, Stream stream);
    int64_t history_size() const { return FP8_HISTORY * 2 * linear_layers; }

    const Fp8Options options;

  private:
    bool measures() const { return !options.delayed || calibrates(); }
    Fp8Format format(Fp8Operand operand) const {
        return operand == Fp8Operand::Input ? Fp8Format::E4M3 : options.gradients;
    }
    int64_t lay_out(const Arena* arena, int64_t world);
    int64_t layer_weight_bytes() const;
    int64_t index(Role role, int64_t l) const;
    Fp8Record record_of(Fp8Operand operand, Role role, int64_t l) const;
    std::pair<Tensor, Tensor> kept(Role role, int64_t l) const;

    const ModelConfig config;
    int64_t linear_layers;  // S, of one operand: those of the inputs come first
    Arena state, weights;
    Tensor scales, amaxes, own_amaxes,
        past_amaxes;         // [2·S, FP8_SCALE_FLOATS], [ranks, 2·S], this rank's row, [FP8_HISTORY, 2·S]
    Tensor records, totals;  // [2·S, NUM_FP8_COUNTS], [NUM_FP8_COUNTS]
    Tensor weight_scales, weight_amaxes;  // [S, FP8_SCALE_FLOATS], [ranks, S]
    int64_t steps_recorded = 0;
    bool held = false;
};
