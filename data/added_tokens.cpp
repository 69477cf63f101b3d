#include "data/added_tokens.h"

void AddedTokens::add(const AddedToken& token) {
    const auto new_node = [&] {
        nodes.emplace_back();
        return int32_t(nodes.size()) - 1;
    };
    int32_t& root = roots[uint8_t(token.content[0])];
    if (root < 0) root = new_node();
    int32_t node = root;
    for (const char c : token.content.substr(1)) {
        int32_t next = nodes[size_t(node)].child(c);
        if (next < 0) {
            next = new_node();
            nodes[size_t(node)].children.emplace_back(c, next);
        }
        node = next;
    }
    int32_t& index = nodes[size_t(node)].token;
    if (index < 0 || (token.special && !tokens[size_t(index)].special)) index = int32_t(tokens.size());
    tokens.push_back(token);
}
