// Which pages of a KV cache are free, and how many sequences use each of the others. Pages are numbers from 0 on; their
// memory belongs to KvCache (infer/kv_cache.h).
//
// A page whose content may be wanted again is remembered: without users it still counts as available, but is taken
// last, the one that was released longest ago first.
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/error.h"

class PagePool {
  public:
    // forget: called with a remembered page before it is taken for something else.
    explicit PagePool(int64_t pages = 0, std::function<void(int32_t)> forget = {})
        : users(size_t(pages), 0),
          remembered(size_t(pages), false),
          free_pages(size_t(pages)),
          older(size_t(pages) + 1, int32_t(pages)),
          newer(size_t(pages) + 1, int32_t(pages)),
          on_forget(std::move(forget)) {
        std::iota(free_pages.rbegin(), free_pages.rend(), 0);  // page 0 is taken first
    }
    int64_t size() const { return int64_t(users.size()); }
    int64_t available() const { return int64_t(free_pages.size()) + idle; }
    int64_t users_of(int32_t page) const { return users[size_t(page)]; }
    bool is_remembered(int32_t page) const { return remembered[size_t(page)]; }

    // An available page, with one user. Throws Error if there is none.
    int32_t take() {
        require(available() > 0, "the KV cache has no free page of its ", size());
        if (free_pages.empty()) forget_oldest();
        const int32_t page = free_pages.back();
        free_pages.pop_back();
        users[size_t(page)] = 1;
        return page;
    }
    // One more user of a page that has one, or is remembered.
    void share(int32_t page) {
        require(users_of(page) > 0 || is_remembered(page), "page ", page, " of the KV cache is free");
        if (users[size_t(page)]++ == 0) unlink(page);
    }
    // One user less.
    void release(int32_t page) {
        require(users_of(page) > 0, "page ", page, " of the KV cache is free");
        if (--users[size_t(page)] > 0) return;
        if (is_remembered(page))
            link_newest(page);
        else
            free_pages.push_back(page);
    }
    // Forgets all remembered pages, which have no users.
    void forget_all() {
        while (idle > 0) forget_oldest();
    }
    // A page with users.
    void remember(int32_t page) { remembered[size_t(page)] = true; }

  private:
    void forget_oldest() {
        const int32_t oldest = newer[users.size()];
        unlink(oldest);
        on_forget(oldest);
        remembered[size_t(oldest)] = false;
        free_pages.push_back(oldest);
    }
    // Remembered pages without users form a ring from the oldest to the newest; its head is the entry after all pages.
    void link_newest(int32_t page) {
        const size_t head = users.size();
        const int32_t last = older[head];
        older[size_t(page)] = last;
        newer[size_t(page)] = int32_t(head);
        newer[size_t(last)] = older[head] = page;
        idle++;
    }
    void unlink(int32_t page) {
        newer[size_t(older[size_t(page)])] = newer[size_t(page)];
        older[size_t(newer[size_t(page)])] = older[size_t(page)];
        idle--;
    }

    std::vector<int32_t> users;  // by page
    std::vector<bool> remembered;
    std::vector<int32_t> free_pages;  // the last one is taken next
    std::vector<int32_t> older, newer;
    int64_t idle = 0;  // remembered pages without users
    std::function<void(int32_t)> on_forget;
};
