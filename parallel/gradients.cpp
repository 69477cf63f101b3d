#include "parallel/gradients.h"

#include <algorithm>

#include "kernels/accumulate.h"
#include "runtime/rng.h"

std::vector<Bucket> make_buckets(const ParamTable& table, const Sharding& sharding, const GradientOptions& options) {
    const int groups = table.num_groups(), others = table.fp32_total ? groups - 1 : groups;
    std::vector<Bucket> buckets;
    bool full = true;  // the previous bucket has reached its minimum size
    for (int g = others - 1; g >= 0; g--) {
        if (!table.group_size(g)) continue;
        if (full)
            buckets.push_back({g, g + 1});
        else
            buckets.back().first = g;
        const Bucket& b = buckets.back();
        const int64_t begin = table.group_begin[size_t(b.first)], end = table.group_begin[size_t(b.last)];
        full = options.uses_buffers(sharding) || (end - begin) * 4 >= options.bucket_bytes;
    }
    if (others < groups) buckets.push_back({others, groups});
    return buckets;
}

namespace {

// ParamArena::starts of the fp32 sums.
std::vector<int64_t> fp32_sum_starts(const ParamTable& table, const GradientOptions& options) {
    return packed_starts(table, 0, 1, [&](const Param& p) { return options.sums_apart(p); });
}

}  // namespace

Gradients::Memory Gradients::memory(const ParamTable& table, const Sharding& sharding, const GradientOptions& options) {
    Memory m;
    m.arena = table.total / sharding.parts(sharding.splits_gradients()) * dtype_size(options.kept);
    if (options.in_matmul) m.sums = fp32_sum_starts(table, options).back() * dtype_size(DType::F32);
    if (options.uses_buffers(sharding))
        m.buffers = GroupBuffers(table, LAYER_BUFFERS, true).total() * dtype_size(DType::F32);
    if (sharding.world == 1 || options.reduce == options.computed()) return m;
    for (const Bucket& b : make_buckets(table, sharding, options)) {
        const int64_t n = table.group_begin[size_t(b.last)] - table.group_begin[size_t(b.first)];
        m.exchanged = std::max(m.exchanged, n * dtype_size(options.reduce));
    }
    return m;
}

void Gradients::allocate(const ParamTable& t, const Sharding& s, const GradientOptions& gradient_options, Tensor bytes,
                         const Context* context) {
    table = &t;
    sharding = s;
    options = gradient_options;
    ctx = context;
    const Memory m = memory(t, s, options);
    int64_t at = 0;
    const auto part = [&](DType type, int64_t size) {
        const Tensor where = bytes.rows(at, at + size);
        at += size;
        return make_tensor(where.data, type, where.device, {size / dtype_size(type)});
    };
    arena = s.arena(part(options.kept, m.arena), s.splits_gradients());
    if (options.uses_buffers(s)) {
        buffers = GroupBuffers(t, LAYER_BUFFERS, true);
        arena.views = buffers.views(t, part(DType::F32, m.buffers));
        state = std::vector<BufferState>(size_t(buffers.num_buffers()));
    }
    if (options.in_matmul) {
        require(!s.splits_gradients() && options.kept == DType::BF16,
                "gradients: matmuls add to sums in bf16 of whole groups, not of parts (stage ", s.stage, ") in ",
                dtype_name(options.kept));
        fp32_sums = part(DType::F32, m.sums);
        fp32_sums.starts = fp32_sum_starts(t, options);
    }
    if (m.exchanged) exchanged = part(options.reduce, m.exchanged);
    for (int g = 0; g < t.num_groups(); g++) keys.push_back(name_hash(str("gradients of group ", g)));
    if (s.world > 1) buckets = make_buckets(t, s, options);
    for (const Bucket& b : buckets)
        names.push_back((s.stage ? "reduce_scatter of " : "all_reduce of ") +
                        t.describe_groups(b.first, b.last, options.reduce));
}

Tensor Gradients::own(int first_group, int last_group) const {
    const Tensor groups = arena.groups(*table, first_group, last_group);
    return sharding.splits_gradients() ? groups : sharding.own(groups);
}

void Gradients::begin(bool first_micro_step, bool last_micro_step, Tensor number) {
    first = first_micro_step;
    last = last_micro_step;
    micro_step = number;
    reducing = false;
    for (BufferState& b : state) b.used = false;
}

void Gradients::open(int group, Stream stream) {
    if (state.empty() || group >= table->num_groups()) return;  // beyond the last layer with an adapter
    const BufferState& own = state[size_t(buffers.buffer(group))];
    if (own.used) {
        const Range range(ctx->profiler, "wait for a buffer");
        own.free.make_wait(stream);
    }
    // Clear the padding between tensors: it counts in the global norm, and another group used this buffer before.
    const Tensor& view = arena.views[size_t(group)];
    int64_t end = 0;
    const auto clear_to = [&](int64_t begin) {
        if (begin > end) device_fill(view.as<float>() + end, 0, size_t(begin - end) * sizeof(float), stream);
    };
    for (const Param& param : table->params) {
        if (param.group != group) continue;
        clear_to(param.offset - param.group_begin);
        end = param.offset - param.group_begin + param.padded_numel();
    }
    clear_to(table->group_size(group));
}

void Gradients::close(int group, Stream stream) {
    if (group >= table->num_groups()) return;
    if (options.in_matmul && last) round_fp32_sums(group, stream);
    if (sharding.world == 1 || (!last && !sharding.splits_gradients())) {
        if (state.empty() || !table->group_size(group)) return;
        return keep(group, arena.groups(*table, group, group + 1), arena.views[size_t(group)], 0, !first, stream);
    }
    for (size_t i = 0; i < buckets.size(); i++)
        if (buckets[i].first == group) reduce(buckets[i], names[i].c_str(), stream);
}

// sum = gradient or sum += gradient, elements of a group from first_element on.
void Gradients::keep(int group, Tensor sum, Tensor gradient, int64_t first_element, bool add, Stream stream) const {
    if (options.kept == DType::F32) return ::accumulate(sum, gradient, add, stream);
    accumulate_stochastic(sum, gradient, add, {options.seed, keys[size_t(group)], first_element, micro_step}, stream);
}

void Gradients::round_fp32_sums(int group, Stream stream) const {
    for (const Param& p : table->params) {
        if (p.group != group || !options.sums_apart(p)) continue;
        const auto elements = [&](const ParamArena& of) { return of.elements(of.span(p, 0, p.padded_numel())); };
        ::accumulate(elements(arena), elements(fp32_sums), false, stream);
    }
}

// Reduces in place where possible: the whole gradient is not needed after its part of the sum is there.
void Gradients::reduce(const Bucket& b, const char* name, Stream stream) {
    Comm* const comm = ctx->comm.get();
    const Stream side = ctx->side;
    complete.record(stream);
    complete.make_wait(side);
    reducing = true;
    const Range range(ctx->profiler, name, side);
    const bool in_buffer = !state.empty(), split = sharding.splits_gradients();
    const Tensor sums = arena.groups(*table, b.first, b.last);  // the rank's part of them if split
    Tensor whole = in_buffer ? arena.views[size_t(b.first)] : sums;
    const Tensor computed = whole;
    if (in_buffer && !split && !first) ::accumulate(computed, sums, true, side);
    if (exchanged) {
        whole = exchanged.rows(0, computed.shape[0]);
        ::accumulate(whole, computed, false, side);
    }
    if (sharding.stage == 0) {
        comm->all_reduce(whole, side);
        if (exchanged) ::accumulate(computed, whole, false, side);
        if (in_buffer) keep(b.first, sums, computed, 0, false, side);
    } else if (in_buffer) {
        const Tensor part = split ? sums : sharding.own(sums);
        const bool direct = first && !exchanged && options.kept == DType::F32;  // no intermediate copy
        comm->reduce_scatter(direct ? part : sharding.own(whole), whole, side);
        if (!direct) keep(b.first, part, sharding.own(whole), sharding.rank * part.shape[0], split && !first, side);
    } else {
        const int64_t begin = table->group_begin[size_t(b.first)];
        const auto group = [&](const Tensor& bucket, int g) {
            return bucket.rows(table->group_begin[size_t(g)] - begin, table->group_begin[size_t(g) + 1] - begin);
        };
        comm->group_start();
        for (int g = b.first; g < b.last; g++)
            if (table->group_size(g)) comm->reduce_scatter(sharding.own(group(whole, g)), group(whole, g), side);
        comm->group_end();
        for (int g = b.first; exchanged && g < b.last; g++)
            ::accumulate(sharding.own(group(computed, g)), sharding.own(group(whole, g)), false, side);
    }
    if (!in_buffer) return;
    BufferState& own = state[size_t(buffers.buffer(b.first))];
    own.free.record(side);
    own.used = true;
}

void Gradients::end(Stream stream) {
    if (!reducing) return;
    const Range range(ctx->profiler, "wait for gradients");
    summed.record(ctx->side);
    summed.make_wait(stream);
}
