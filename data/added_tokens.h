// The added tokens of a tokenizer.json: found in text before it is split into words, with the rules of the package
// `tokenizers`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
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
        const auto begins_token = [&](char c) { return roots[uint8_t(c)] >= 0; };
        for (size_t i = 0;;) {
            i = size_t(std::find_if(text.begin() + int64_t(i), text.end(), begins_token) - text.begin());
            if (i == text.size()) break;
            const int32_t match = longest(text, i);
            if (match < 0) {
                i++;
                continue;
            }
            const AddedToken& token = tokens[size_t(match)];
            const std::string_view before = text.substr(0, i), after = text.substr(i + token.content.size());
            i = text.size() - after.size();
            if (token.special && !allow_special(before.size(), token.content.size())) continue;
            if (token.single_word && (ends_with_word(before) || starts_with_word(after))) continue;
            const size_t begin = before.size() - (token.lstrip ? space_at_end(before) : 0);
            const size_t end = token.rstrip ? i + space_at_start(after) : i;
            if (done < begin) plain(text.substr(done, begin - done));
            found(token.id);
            // As in the package, a match in white space that rstrip took begins before `done`.
            done = end;
        }
        if (done < text.size()) plain(text.substr(done));
    }

  private:
    // A node of a trie of the contents' bytes.
    struct Node {
        int32_t token = -1;  // index of the token that ends here, −1: none does
        std::vector<std::pair<char, int32_t>> children;

        int32_t child(char c) const {
            for (const auto& [byte, node] : children)
                if (byte == c) return node;
            return -1;
        }
    };

    // The index of the longest token at text[i], −1 if there is none. Some token begins with text[i].
    int32_t longest(std::string_view text, size_t i) const {
        int32_t match = -1;
        for (int32_t node = roots[uint8_t(text[i])]; node >= 0;) {
            if (nodes[size_t(node)].token >= 0) match = nodes[size_t(node)].token;
            node = ++i < text.size() ? nodes[size_t(node)].child(text[i]) : -1;
        }
        return match;
    }

    static std::array<int32_t, 256> no_roots() {
        std::array<int32_t, 256> all;
        all.fill(-1);
        return all;
    }

    std::vector<AddedToken> tokens;
    std::vector<Node> nodes;
    std::array<int32_t, 256> roots = no_roots();  // by the first byte; −1: no token begins with it
};
