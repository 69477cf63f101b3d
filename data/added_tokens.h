// The added tokens of a tokenizer.json: found in text before it is split into words, with the rules of the package
// `tokenizers`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/unicode.h"

struct AddedToken {
    std::string content;
    int32_t id = -1;
    bool special = false;
    bool single_word = false;             // not found inside a word
    bool lstrip = false, rstrip = false;  // takes the white space before it, after it
};

class AddedTokens {
  public:
    void add(const AddedToken& token);  // the content is not empty

    // Calls plain(string_view) and found(id) for the parts of the text, in order. The leftmost match wins; at one
    // position, the longest; of two tokens with the same content the special one, then the first. A special
    // token stays text unless allow_special(begin, size), in bytes of the text. A match that stays text, or that
    // single_word rejects, hides the matches inside it.
    template <typename Allow, typename Plain, typename Found>
    void split(std::string_view text, const Allow& allow_special, const Plain& plain, const Found& found) const {
        size_t done = 0;
        for (size_t i = 0; i < text.size() && !tokens.empty();) {
            const int64_t match = longest(text, i);
            if (match < 0) {
                i++;
                continue;
            }
            const AddedToken& token = tokens[size_t(match)];
            const std::string_view before = text.substr(0, i), after = text.substr(i + token.content.size());
            i = text.size() - after.size();
            if (token.special && !allow_special(before.size(), token.content.size())) continue;
            if (token.single_word && (ends_with_word(before) || starts_with_word(after))) continue;
            const size_t begin = token.lstrip ? std::max(done, before.size() - space_at_end(before)) : before.size();
            const size_t end = token.rstrip ? i + space_at_start(after) : i;
            if (done < begin) plain(text.substr(done, begin - done));
            found(token.id);
            // As in the package, a match in white space that rstrip took begins before `done`.
            done = end;
        }
        if (done < text.size()) plain(text.substr(done));
    }

  private:
    // The index of the longest token at text[i], −1 if there is none.
    int64_t longest(std::string_view text, size_t i) const {
        int32_t node = roots[uint8_t(text[i])];
        if (node < 0) return -1;
        int64_t match = nodes[size_t(node)];
        while (++i < text.size()) {
            const auto next = children.find(child_key(node, text[i]));
            if (next == children.end()) break;
            node = next->second;
            if (nodes[size_t(node)] >= 0) match = nodes[size_t(node)];
        }
        return match;
    }
    static uint64_t child_key(int32_t node, char c) { return uint64_t(node) << 8 | uint8_t(c); }

    std::vector<AddedToken> tokens;
    // A trie of the contents' bytes. A node holds the index of the token that ends there, or −1.
    std::vector<int32_t> nodes;
    std::array<int32_t, 256> roots = filled();  // by the first byte; −1: no token begins with it
    std::unordered_map<uint64_t, int32_t> children;

    static std::array<int32_t, 256> filled() {
        std::array<int32_t, 256> all;
        all.fill(-1);
        return all;
    }
};
