#include "tensor_library/strided.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace {

// Lists the dimensions larger than 1, largest strides first, and returns their number.
int dimensions_by_stride(const Tensor& t, int* order) {
    int n = 0;
    for (int d = 0; d < t.rank; d++)
        if (t.shape[d] != 1) order[n++] = d;
    std::stable_sort(order, order + n, [&](int a, int b) { return std::llabs(t.stride[a]) > std::llabs(t.stride[b]); });
    return n;
}

}  // namespace

StridedLoop strided_loop(std::initializer_list<Tensor> operands) {
    const Tensor& first = *operands.begin();
    int order[MAX_DIMS];
    const int kept = dimensions_by_stride(first, order);

    StridedLoop loop;
    loop.operands = int(operands.size());
    for (int k = 0; k < loop.operands; k++) {
        loop.operand[k].data = operands.begin()[k].data;
        loop.operand[k].dtype = operands.begin()[k].dtype;
    }
    for (int i = 0; i < kept; i++) {
        const int d = order[i];
        // The previous dimension merges into this one if its stride equals the extent of this one in every operand.
        const int before = loop.rank - 1;
        bool merges = before >= 0;
        for (int k = 0; merges && k < loop.operands; k++)
            merges = loop.operand[k].stride[before] == operands.begin()[k].stride[d] * first.shape[d];
        const int to = merges ? before : loop.rank++;
        loop.shape[to] = (merges ? loop.shape[to] : 1) * first.shape[d];
        for (int k = 0; k < loop.operands; k++) loop.operand[k].stride[to] = operands.begin()[k].stride[d];
    }
    if (loop.rank == 0) {
        loop.rank = 1;
        loop.shape[0] = 1;
    }
    return loop;
}

Tensor broadcast_to(const char* op, const char* name, const Tensor& t, const Tensor& to) {
    bool fits = t.rank <= to.rank;
    Tensor r = to;
    r.data = t.data;
    r.dtype = t.dtype;
    r.device = t.device;
    for (int d = 0; fits && d < to.rank; d++) {
        const int from = d - (to.rank - t.rank);
        const int64_t size = from < 0 ? 1 : t.shape[from];
        fits = size == 1 || size == to.shape[d];
        r.stride[d] = size == 1 && to.shape[d] != 1 ? 0 : (from < 0 ? 0 : t.stride[from]);
    }
    require(fits, op, ": ", name, " ", shape_string(t), " does not broadcast to ", shape_string(to));
    return r;
}

ByteRange byte_range(const Tensor& t) {
    if (t.numel() == 0) return {0, 0};
    const int64_t size = dtype_size(t.dtype);
    ByteRange range{0, size};
    for (int d = 0; d < t.rank; d++) {
        const int64_t reach = (t.shape[d] - 1) * t.stride[d] * size;
        (reach < 0 ? range.begin : range.end) += reach;
    }
    return range;
}

void check_distinct(const char* op, const char* name, const Tensor& out) {
    if (out.numel() == 0) return;
    int order[MAX_DIMS];
    const int kept = dimensions_by_stride(out, order);
    int64_t covered = 1;
    for (int i = kept - 1; i >= 0; i--) {
        const int64_t stride = std::llabs(out.stride[order[i]]);
        require(stride >= covered, op, ": ", name, " ", shape_string(out), " has a stride of ", out.stride[order[i]],
                " in dimension ", order[i], ": its elements overlap each other");
        covered += (out.shape[order[i]] - 1) * stride;
    }
}

namespace {

struct Term {
    int64_t step, most;
};

// Whether Σ_k x_k·step_k = target has a solution with 0 ≤ x_k ≤ most_k; steps are descending and positive. A
// depth-first search from the largest step: the range of the smaller steps leaves few values to try. Also true if
// `work` is exhausted.
bool reachable(const Term* terms, int n, int64_t target, int64_t& work) {
    if (target == 0) return true;
    if (n == 0 || target < 0) return false;
    int64_t rest = 0, divisor = 0;
    for (int k = 1; k < n; k++) {
        rest += terms[k].step * terms[k].most;
        divisor = std::gcd(divisor, terms[k].step);
    }
    if (target % std::gcd(divisor, terms[0].step) != 0) return false;
    const int64_t step = terms[0].step, short_by = target - rest;
    const int64_t least = short_by > 0 ? (short_by + step - 1) / step : 0;
    for (int64_t x = std::min(terms[0].most, target / step); x >= least; x--) {
        if (--work < 0) return true;
        if (reachable(terms + 1, n - 1, target - x * step, work)) return true;
    }
    return false;
}

}  // namespace

bool tensors_overlap(const Tensor& a, const Tensor& b) {
    const ByteRange ra = byte_range(a), rb = byte_range(b);
    const int64_t begin_a = int64_t(a.data) + ra.begin, end_a = int64_t(a.data) + ra.end;
    const int64_t begin_b = int64_t(b.data) + rb.begin, end_b = int64_t(b.data) + rb.end;
    if (ra.begin == ra.end || rb.begin == rb.end || end_a <= begin_b || end_b <= begin_a) return false;
    // A byte of a is at begin_a + Σ x·|stride| + (byte in the element), and a byte of b likewise. They are the same
    // byte if the two sums differ by begin_b − begin_a. With b's indices counted from their ends all terms are
    // positive.
    Term terms[2 * (MAX_DIMS + 1)];
    int n = 0;
    for (const Tensor* t : {&a, &b}) {
        const int64_t size = dtype_size(t->dtype);
        for (int d = 0; d < t->rank; d++)
            if (t->shape[d] > 1 && t->stride[d] != 0) terms[n++] = {std::llabs(t->stride[d]) * size, t->shape[d] - 1};
        terms[n++] = {1, size - 1};
    }
    std::sort(terms, terms + n, [](const Term& x, const Term& y) { return x.step > y.step; });
    int64_t work = 1 << 16;
    return reachable(terms, n, end_b - 1 - begin_a, work);
}

void check_disjoint(const char* op, const char* out_name, const Tensor& out, const char* name, const Tensor& t) {
    require(!t || !tensors_overlap(out, t), op, ": ", out_name, " overlaps ", name, "; give it memory of its own");
}
