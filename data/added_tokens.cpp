#include "data/added_tokens.h"

void AddedTokens::add(const AddedToken& token) {
    const auto new_node = [&] {
        nodes.push_back(-1);
        return int32_t(nodes.size()) - 1;
    };
    int32_t& root = roots[uint8_t(token.content[0])];
    if (root < 0) root = new_node();
    int32_t node = root;
    for (const char c : token.content.substr(1)) {
        const auto [child, is_new] = children.try_emplace(child_key(node, c), -1);
        if (is_new) child->second = new_node();
        node = child->second;
    }
    int32_t& index = nodes[size_t(node)];
    if (index < 0 || (token.special && !tokens[size_t(index)].special)) index = int32_t(tokens.size());
    tokens.push_back(token);
}
