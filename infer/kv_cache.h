// The KV cache of generation: one arena of pages (kernels/kv_page.h). A sequence owns a page for every KV_PAGE of its
// tokens, which it takes when it grows; what short sequences leave, long ones can use. The arena's size is known before
// anything is allocated, and nothing is allocated or moved while sequences grow.
//
// Layers with the same window form a group: they have the same pages and one page table, [slots, columns] int32. Of a
// layer with a window, the pages that lie wholly before the window of every token that may still come are freed. While
// a pass over prompts runs, its tokens have pages in every group.
#pragma once

#include <utility>
#include <vector>

#include "infer/page_pool.h"
#include "infer/prefix_index.h"
#include "kernels/generation/decode_step.h"
#include "runtime/device/arena.h"
#include "runtime/device/staging.h"
#include "runtime/model/model_config.h"

struct KvCacheSize {
    int64_t slots = 1;        // sequences
    int64_t capacity = 0;     // tokens of the longest sequence
    int64_t pages = 0;        // of layers without a window; 0: as many as `slots` sequences of `capacity` tokens need
    int64_t pass_tokens = 0;  // most tokens of a pass over prompts
};

class KvCache {
  public:
    // How far a sequence whose window has passed can be cut back: when the host has read the token that ends a
    // response, up to this many tokens after it are in the cache (Engine::steps_ahead).
    static constexpr int64_t STEPS_BACK = 2;

    // Plans only. Throws Error for more than 2³⁰ rows in a layer.
    KvCache(const ModelConfig& config, const KvCacheSize& size, DType dtype);
    KvCache(const KvCache&) = delete;
    KvCache& operator=(const KvCache&) = delete;
    // shared: U8 [bytes()], memory that the cache uses and does not own; null: it gets its own.
    void allocate(const Tensor& shared = {});
    // No slot holds tokens. No page is found by its content any more, and the tables are uploaded again: what the
    // memory held is lost.
    void restart();

    int64_t bytes() const { return total; }
    // The bytes that a decode step reads for a sequence of this many tokens, over all layers with softmax attention.
    int64_t bytes_read(int64_t length) const;
    // The layer's window; 0 where it has none or the capacity does not exceed it.
    int64_t window(int64_t layer) const { return layers[size_t(layer)].window; }

    // --- sequences
    // Pages of layers without a window: those that the slot lacks for `length` tokens, those that are free. There are
    // always enough for the others.
    int64_t pages_missing(int64_t slot, int64_t length) const;
    int64_t pages_for(int64_t tokens) const;  // of a sequence
    int64_t pages_available() const;
    // Takes the pages that the slot's sequence needs to have `length` tokens. Throws Error if there are too few; then
    // nothing has changed.
    void grow(int64_t slot, int64_t length);
    // Frees pages before the windows, of a slot that holds `length` tokens.
    void forget(int64_t slot, int64_t length);
    // Frees the pages of all tokens but the first `length`.
    void cut(int64_t slot, int64_t length);
    // Gives the empty slot `to` the first `length` tokens, all that slot `from` holds. Whole pages are shared; of the
    // last page, which grows, `to` gets one of its own, and copies() names it until the next call of clear_copies().
    void fork(int64_t from, int64_t to, int64_t length);
    struct PageCopies {
        std::vector<int32_t> from, to;  // pages, of all layers of a group
    };
    const PageCopies& copies(int64_t group) const { return groups[size_t(group)].copies; }
    void clear_copies();
    // Whether the page that holds the last of `length` tokens and has room for more must not be written: it is another
    // slot's, too, or found by content.
    bool ends_in_shared_page(int64_t slot, int64_t length) const;

    // Whether all of the model's layers with a cache see all tokens: only then are pages found by content.
    bool finds_prefixes() const { return groups.size() == 1 && !groups[0].window; }
    // Gives the empty slot the whole pages, found by content, that a sequence with these tokens begins with, but never
    // the page of the last token. Returns their number of tokens.
    int64_t adopt(int64_t slot, const std::vector<int32_t>& tokens, int64_t name_space);
    // The whole pages of the slot's sequence, which begins with these tokens, are found by content from now on until
    // they are needed for something else.
    void remember(int64_t slot, const std::vector<int32_t>& tokens, int64_t name_space);

    // Pages of a slot that were copied to the host.
    struct Saved {
        std::vector<std::pair<int64_t, int64_t>> columns;  // by group: first, end
        std::vector<char> bytes;                           // by layer: k, then v, of each column
    };
    // Copies the slot's pages to the host and frees them; takes pages for them again. Both wait for the stream.
    // restore() throws Error if there are too few free pages; then nothing has changed.
    Saved save(int64_t slot, Stream stream);
    void restore(int64_t slot, const Saved& saved, Stream stream);
    int64_t pages_of(const Saved& saved) const;  // of layers without a window

    // Whether the keys that a token at position `length` sees are all there.
    bool holds(int64_t slot, int64_t length) const;
    int64_t pages_in_use() const;  // in all groups

    // The row of a position in k_rows() and v_rows() of the layers of a group.
    int32_t row(int64_t group, int64_t slot, int64_t position) const {
        const int32_t page = groups[size_t(group)].table[size_t(slot * columns + position / KV_PAGE)];
        return page * int32_t(KV_PAGE) + static_cast<int32_t>(position % KV_PAGE);
    }
    int64_t num_groups() const { return int64_t(groups.size()); }
    int64_t group(int64_t layer) const { return layers[size_t(layer)].group; }

    // --- on the device
    bool tables_changed() const;
    // Copies what changed of the page tables. At most table_bytes() go through the staging buffer.
    void upload_tables(Staging& staging, Stream stream);
    int64_t table_bytes() const { return num_groups() * slots * columns * int64_t(sizeof(int32_t)); }
    // k, v [pages, KV_PAGE, NKV, HS], and the page table.
    LayerCache layer(int64_t l) const;
    // The same memory as rows, [pages·KV_PAGE, NKV, HS].
    Tensor k_rows(int64_t l) const { return rows_of(layer(l).k); }
    Tensor v_rows(int64_t l) const { return rows_of(layer(l).v); }

    const int64_t slots, capacity;

  private:
    struct Layer {
        int64_t window = 0, group = -1;  // −1: linear attention
        int64_t at = 0;                  // bytes from the arena's start to k; v follows
    };
    struct Group {
        int64_t window;
        PagePool pool;
        std::vector<int32_t> table;       // as on the device; −1: no page
        std::vector<int64_t> first, end;  // by slot: its pages are those of the columns first … end − 1
        std::vector<int64_t> changed;     // indices of table
        PageCopies copies;
    };
    int64_t row_bytes() const { return kv_heads * head_size * dtype_size(dtype); }  // of k or v
    int64_t group_of(int64_t window, const KvCacheSize& size);
    const Group* unlimited_group() const;  // of layers without a window; null: there are none
    int64_t pages_of(const Group& g, const KvCacheSize& size) const;
    template <typename F>
    void for_each_page(int64_t slot, const Saved& saved, F f) const;
    int64_t layer_bytes(const Layer& layer) const;  // of k or v
    void set_page(Group& g, int64_t slot, int64_t column, int32_t page);
    Tensor table(int64_t group) const;
    static Tensor rows_of(const Tensor& pages);

    const int64_t columns, kv_heads, head_size;
    const DType dtype;
    std::vector<Layer> layers;  // of the model
    std::vector<Group> groups;
    PrefixIndex prefixes;
    int64_t total = 0;
    Arena memory;
};
