#include "infer/kv_cache.h"

#include <algorithm>

namespace {

int64_t pages_of_tokens(int64_t tokens) {
    return (tokens + KV_PAGE - 1) / KV_PAGE;
}

}  // namespace

KvCache::KvCache(const ModelConfig& c, const KvCacheSize& size, DType type)
    : slots(size.slots),
      capacity(size.capacity),
      columns(pages_of_tokens(size.capacity)),
      kv_heads(c.kv_heads),
      head_size(c.head_size),
      dtype(type) {
    constexpr int64_t MAX_ROWS = int64_t(1) << 30;  // of a layer
    int64_t all_rows;
    const bool fits = !__builtin_mul_overflow(slots, columns * KV_PAGE, &all_rows) && all_rows <= MAX_ROWS;
    for (int64_t l = 0; l < c.layers; l++) {
        Layer layer;
        if (c.attention_type(l) == AttentionType::Softmax) {
            require(fits, "a KV cache for ", slots, " sequences of ", capacity,
                    " tokens has more than 2^30 rows; use fewer sequences (--batch-size) or a shorter context");
            layer.window = c.window(l) < capacity ? c.window(l) : 0;
            layer.group = group_of(layer.window, size);
            layer.at = total;
            total += 2 * layer_bytes(layer);
        }
        layers.push_back(layer);
    }
    total += num_groups() ? ArenaPlan::aligned(table_bytes()) : 0;
}

int64_t KvCache::group_of(int64_t window, const KvCacheSize& size) {
    for (size_t i = 0; i < groups.size(); i++)
        if (groups[i].window == window) return int64_t(i);
    Group g{window, PagePool(), std::vector<int32_t>(size_t(slots * columns), -1), {}, {}, {}, {}};
    g.first.assign(size_t(slots), 0);
    g.end.assign(size_t(slots), 0);
    g.pool = PagePool(pages_of(g, size), [this](int32_t page) { prefixes.remove(page); });
    if (!window) prefixes = PrefixIndex(g.pool.size());
    for (int64_t i = 0; i < slots * columns; i++) g.changed.push_back(i);
    groups.push_back(std::move(g));
    return int64_t(groups.size()) - 1;
}

// A window needs the pages that its tokens can touch. During a pass there are, beside these, pages for the pass's
// tokens, the first of which may begin a page in each sequence.
int64_t KvCache::pages_of(const Group& g, const KvCacheSize& size) const {
    const int64_t all = slots * columns;
    if (!g.window) return size.pages ? std::min(size.pages, all) : all;
    const int64_t of_window = pages_of_tokens(g.window - 1 + STEPS_BACK) + 1;
    return std::min(all, slots * (of_window + 1) + pages_of_tokens(size.pass_tokens));
}

int64_t KvCache::layer_bytes(const Layer& layer) const {
    return ArenaPlan::aligned(groups[size_t(layer.group)].pool.size() * KV_PAGE * row_bytes());
}

int64_t KvCache::bytes_read(int64_t length) const {
    int64_t rows = 0;
    for (const Layer& layer : layers)
        if (layer.group >= 0) rows += layer.window ? std::min(layer.window, length) : length;
    return 2 * rows * row_bytes();
}

void KvCache::set_page(Group& g, int64_t slot, int64_t column, int32_t page) {
    g.table[size_t(slot * columns + column)] = page;
    g.changed.push_back(slot * columns + column);
}

int64_t KvCache::pages_missing(int64_t slot, int64_t length) const {
    const Group* const g = unlimited_group();
    return g ? std::max<int64_t>(pages_of_tokens(length) - g->end[size_t(slot)], 0) : 0;
}

int64_t KvCache::pages_for(int64_t tokens) const {
    return unlimited_group() ? pages_of_tokens(tokens) : 0;
}

int64_t KvCache::pages_available() const {
    const Group* const g = unlimited_group();
    return g ? g->pool.available() : 0;
}

const KvCache::Group* KvCache::unlimited_group() const {
    const auto found = std::find_if(groups.begin(), groups.end(), [](const Group& g) { return g.window == 0; });
    return found == groups.end() ? nullptr : &*found;
}

void KvCache::grow(int64_t slot, int64_t length) {
    require(length <= capacity, "a sequence of ", length, " tokens exceeds the KV cache's ", capacity);
    for (const Group& g : groups)
        require(pages_of_tokens(length) - g.end[size_t(slot)] <= g.pool.available(), "the KV cache has ",
                g.pool.available(), " free pages, too few for a sequence of ", length, " tokens");
    for (Group& g : groups)
        for (int64_t& end = g.end[size_t(slot)]; end < pages_of_tokens(length); end++)
            set_page(g, slot, end, g.pool.take());
}

void KvCache::forget(int64_t slot, int64_t length) {
    for (Group& g : groups) {
        if (!g.window) continue;
        const int64_t oldest = std::max<int64_t>(length - STEPS_BACK + 1 - g.window, 0);  // position still seen
        for (int64_t& first = g.first[size_t(slot)]; first < std::min(oldest / KV_PAGE, g.end[size_t(slot)]); first++) {
            g.pool.release(g.table[size_t(slot * columns + first)]);
            set_page(g, slot, first, -1);
        }
    }
}

void KvCache::cut(int64_t slot, int64_t length) {
    for (Group& g : groups) {
        int64_t &first = g.first[size_t(slot)], &end = g.end[size_t(slot)];
        while (end > std::max(first, pages_of_tokens(length))) {
            end--;
            g.pool.release(g.table[size_t(slot * columns + end)]);
            set_page(g, slot, end, -1);
        }
        if (length == 0) first = end = 0;
    }
}

void KvCache::fork(int64_t from, int64_t to, int64_t length) {
    for (Group& g : groups) {
        const int64_t first = g.first[size_t(from)], end = g.end[size_t(from)], whole = std::min(length / KV_PAGE, end);
        require(g.end[size_t(to)] == 0, "slot ", to, " of the KV cache is not empty");
        require(end - std::max(first, whole) <= g.pool.available(), "the KV cache has no free page for a copy");
        g.first[size_t(to)] = first;
        g.end[size_t(to)] = end;
        for (int64_t column = first; column < end; column++) {
            int32_t page = g.table[size_t(from * columns + column)];
            if (column < whole) {
                g.pool.share(page);
            } else {
                g.copies.from.push_back(page);
                page = g.pool.take();
                g.copies.to.push_back(page);
            }
            set_page(g, to, column, page);
        }
    }
}

int64_t KvCache::adopt(int64_t slot, const std::vector<int32_t>& tokens, int64_t name_space) {
    if (!finds_prefixes()) return 0;
    Group& g = groups[0];
    int64_t& end = g.end[size_t(slot)];
    require(end == 0, "slot ", slot, " of the KV cache is not empty");
    PrefixIndex::Id before = PrefixIndex::beginning(name_space);
    for (; (end + 1) * KV_PAGE < int64_t(tokens.size()); end++) {
        const int32_t page = prefixes.find(before, tokens.data() + end * KV_PAGE);
        if (page < 0) break;
        g.pool.share(page);
        set_page(g, slot, end, page);
        before = prefixes.id_of(page);
    }
    return end * KV_PAGE;
}

void KvCache::remember(int64_t slot, const std::vector<int32_t>& tokens, int64_t name_space) {
    if (!finds_prefixes()) return;
    Group& g = groups[0];
    PrefixIndex::Id before = PrefixIndex::beginning(name_space);
    for (int64_t i = 0; (i + 1) * KV_PAGE <= int64_t(tokens.size()); i++) {
        const int32_t page = g.table[size_t(slot * columns + i)],
                      found = prefixes.find(before, &tokens[size_t(i * KV_PAGE)]);
        if (found < 0 && !g.pool.is_remembered(page)) {
            prefixes.add(page, before, &tokens[size_t(i * KV_PAGE)]);
            g.pool.remember(page);
        } else if (found < 0) {
            return;  // the page before it was computed twice; this one is known as the other's next
        }
        before = prefixes.id_of(found < 0 ? page : found);
    }
}

void KvCache::clear_copies() {
    for (Group& g : groups) {
        g.copies.from.clear();
        g.copies.to.clear();
    }
}

bool KvCache::ends_in_shared_page(int64_t slot, int64_t length) const {
    if (length % KV_PAGE == 0) return false;
    return std::any_of(groups.begin(), groups.end(), [&](const Group& g) {
        const int64_t column = length / KV_PAGE;
        if (column < g.first[size_t(slot)] || column >= g.end[size_t(slot)]) return false;
        const int32_t page = g.table[size_t(slot * columns + column)];
        return g.pool.users_of(page) > 1 || g.pool.is_remembered(page);
    });
}

// f(a page of k or v, [1, KV_PAGE, NKV, HS]; bytes from the start of Saved::bytes)
template <typename F>
void KvCache::for_each_page(int64_t slot, const Saved& saved, F f) const {
    int64_t at = 0;
    for (int64_t l = 0; l < int64_t(layers.size()); l++) {
        if (layers[size_t(l)].group < 0) continue;
        const Group& g = groups[size_t(layers[size_t(l)].group)];
        const LayerCache cache = layer(l);
        const auto [first, end] = saved.columns[size_t(layers[size_t(l)].group)];
        for (const Tensor& t : {cache.k, cache.v})
            for (int64_t column = first; column < end; column++) {
                const int64_t page = g.table[size_t(slot * columns + column)];
                f(t.rows(page, page + 1), at);
                at += KV_PAGE * row_bytes();
            }
    }
}

KvCache::Saved KvCache::save(int64_t slot, Stream stream) {
    Saved saved;
    int64_t bytes = 0;
    for (const Group& g : groups) saved.columns.emplace_back(g.first[size_t(slot)], g.end[size_t(slot)]);
    for (const Layer& layer : layers) {
        if (layer.group < 0) continue;
        const auto [first, end] = saved.columns[size_t(layer.group)];
        bytes += 2 * (end - first) * KV_PAGE * row_bytes();
    }
    saved.bytes.resize(size_t(bytes));
    for_each_page(slot, saved, [&](const Tensor& page, int64_t at) {
        copy_to_host(saved.bytes.data() + at, page.data, size_t(page.bytes()), stream);
    });
    cut(slot, 0);
    return saved;
}

int64_t KvCache::pages_of(const Saved& saved) const {
    for (size_t i = 0; i < groups.size(); i++)
        if (!groups[i].window) return saved.columns[i].second - saved.columns[i].first;
    return 0;
}

void KvCache::restore(int64_t slot, const Saved& saved, Stream stream) {
    for (size_t i = 0; i < groups.size(); i++)
        require(saved.columns[i].second - saved.columns[i].first <= groups[i].pool.available(),
                "the KV cache has too few free pages for a sequence that was suspended");
    for (size_t i = 0; i < groups.size(); i++) {
        Group& g = groups[i];
        g.first[size_t(slot)] = saved.columns[i].first;
        g.end[size_t(slot)] = saved.columns[i].second;
        for (int64_t column = saved.columns[i].first; column < saved.columns[i].second; column++)
            set_page(g, slot, column, g.pool.take());
    }
    for_each_page(slot, saved, [&](const Tensor& page, int64_t at) {
        copy_to_device(page.data, saved.bytes.data() + at, size_t(page.bytes()), stream);
    });
    synchronize(stream);  // the caller may free `saved`
}

bool KvCache::holds(int64_t slot, int64_t length) const {
    return std::all_of(groups.begin(), groups.end(), [&](const Group& g) {
        const int64_t oldest = g.window ? std::max<int64_t>(length + 1 - g.window, 0) : 0;
        return oldest >= length || g.first[size_t(slot)] <= oldest / KV_PAGE;
    });
}

int64_t KvCache::pages_in_use() const {
    int64_t pages = 0;
    for (const Group& g : groups) pages += g.pool.size() - g.pool.available();
    return pages;
}

LayerCache KvCache::layer(int64_t l) const {
    const Layer& layer = layers[size_t(l)];
    const int64_t pages = groups[size_t(layer.group)].pool.size();
    const auto view = [&](int64_t at) { return memory.at(at, dtype, {pages, KV_PAGE, kv_heads, head_size}); };
    return {view(layer.at), view(layer.at + layer_bytes(layer)), table(layer.group)};
}

Tensor KvCache::table(int64_t group) const {
    const int64_t bytes = slots * columns * int64_t(sizeof(int32_t));
    return memory.at(total - ArenaPlan::aligned(table_bytes()) + group * bytes, DType::I32, {slots, columns});
}

Tensor KvCache::rows_of(const Tensor& t) {
    return make_tensor(t.data, t.dtype, t.device, {t.shape[0] * KV_PAGE, t.shape[2], t.shape[3]});
}

bool KvCache::tables_changed() const {
    return std::any_of(groups.begin(), groups.end(), [](const Group& g) { return !g.changed.empty(); });
}

// A few entries, as in a decode step, are copied one by one; otherwise all between the first and the last.
void KvCache::upload_tables(Staging& staging, Stream stream) {
    constexpr size_t FEW = 8;
    for (size_t i = 0; i < groups.size(); i++) {
        Group& g = groups[i];
        if (g.changed.empty()) continue;
        int32_t* const device = table(int64_t(i)).as<int32_t>();
        const auto put = [&](int64_t begin, int64_t end) {
            staging.put(device + begin, g.table.data() + begin, (end - begin) * int64_t(sizeof(int32_t)), stream);
        };
        const auto [least, most] = std::minmax_element(g.changed.begin(), g.changed.end());
        if (g.changed.size() > FEW)
            put(*least, *most + 1);
        else
            for (const int64_t at : g.changed) put(at, at + 1);
        g.changed.clear();
    }
}

void KvCache::allocate(const Tensor& shared) {
    memory = shared ? Arena(shared) : Arena(total, "KV cache");
}

void KvCache::restart() {
    for (Group& g : groups) {
        g.pool.forget_all();
        g.changed.clear();
        for (int64_t i = 0; i < slots * columns; i++) g.changed.push_back(i);
    }
}
