// A conversation as data/conversations.py writes it: a JSON object with `messages`, `inputs` (the indices of those that
// are no loss tokens, whoever wrote them), and what else a chat template is given: `tools`, `documents`, and the
// variables in `chat_template_kwargs`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"

struct ConversationInput {
    std::vector<Message> messages;
    jinja::Template::Variables variables;
    std::vector<std::string> texts;  // all of it that is text
};

// parts: lists of parts of text stay lists (ChatTemplate::reads_parts()); else a message has one text, of a line or
// more for each part.
ConversationInput read_conversation(std::string_view json, bool parts);
