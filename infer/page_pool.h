// Which pages of a KV cache are free, and how many sequences use each of the others. Pages are numbers from 0 on; their
// memory belongs to KvCache (infer/kv_cache.h).
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "runtime/error.h"

class PagePool {
  public:
    explicit PagePool(int64_t pages = 0) : users(size_t(pages), 0), free_pages(size_t(pages)) {
        std::iota(free_pages.rbegin(), free_pages.rend(), 0);  // page 0 is taken first
    }
    int64_t size() const { return int64_t(users.size()); }
    int64_t available() const { return int64_t(free_pages.size()); }
    int64_t users_of(int32_t page) const { return users[size_t(page)]; }

    // A free page, with one user. Throws Error if there is none.
    int32_t take() {
        require(!free_pages.empty(), "the KV cache has no free page of its ", size());
        const int32_t page = free_pages.back();
        free_pages.pop_back();
        users[size_t(page)] = 1;
        return page;
    }
    // One more user of a page that has one.
    void share(int32_t page) {
        require(users_of(page) > 0, "page ", page, " of the KV cache is free");
        users[size_t(page)]++;
    }
    // One user less. A page without users is free.
    void release(int32_t page) {
        require(users_of(page) > 0, "page ", page, " of the KV cache is free");
        if (--users[size_t(page)] == 0) free_pages.push_back(page);
    }

  private:
    std::vector<int32_t> users;       // by page
    std::vector<int32_t> free_pages;  // the last one is taken next
};
