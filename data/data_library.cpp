#include "data/data_library.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "data/conversation_json.h"
#include "data/example.h"

#define TGD_API extern "C" __attribute__((visibility("default")))

struct tgd_encoder {
    Tokenizer tokenizer;
    std::optional<ChatTemplate> chat_template;
    bool reads_parts = false;
    std::tm date = {};
    std::vector<int32_t> tokens;
    std::vector<uint8_t> flags;

    tgd_encoder(const char* tokenizer_json, const char* model_directory, int64_t unix_time)
        : tokenizer(tokenizer_json) {
        const ModelFiles model = model_directory ? ModelFiles(model_directory) : ModelFiles();
        if (ChatTemplate::exists(model)) {
            chat_template.emplace(model);
            reads_parts = chat_template->reads_parts();
        }
        const std::time_t time = unix_time;
        localtime_r(&time, &date);
    }

    Example encode(const ConversationInput& conversation) const {
        const std::vector<Message>& messages = conversation.messages;
        if (chat_template)
            return encode_conversation(messages, *chat_template, date, tokenizer, conversation.variables);
        require(messages.size() == 2 && messages[0].role == "user" && messages[1].role == "assistant",
                "a conversation of other turns than a prompt and its response needs a chat template; give --tokenizer "
                "DIR, the directory of a chat model");
        return encode_prompt_response(messages[0].content, messages[1].content, tokenizer);
    }
};

namespace {

thread_local std::string last_error;

template <typename F>
int guarded(const F& work) {
    try {
        work();
        return 0;
    } catch (const std::exception& e) {
        last_error = e.what();
        return 1;
    }
}

// The documents of a call, in order: successive texts are encoded in one batch.
class Documents {
  public:
    Documents(tgd_encoder& out, int64_t* token_counts, int64_t* lost_bytes)
        : encoder(out), tokens(token_counts), lost(lost_bytes) {
        encoder.tokens.clear();
        encoder.flags.clear();
    }

    void add_text(std::string_view text, bool ends) {
        texts.push_back(text);
        text_ends.push_back(ends);
    }
    void add_conversation(std::string_view json, bool rejected) {
        finish_texts();
        const ConversationInput conversation = read_conversation(json, encoder.reads_parts);
        const Example example = encoder.encode(conversation);
        int64_t lost_here = 0;
        for (const std::string& text : conversation.texts) lost_here += encoder.tokenizer.lost_bytes(text);
        const size_t begin = encoder.flags.size();
        append(example.tokens.data(), example.tokens.size());
        encoder.flags.insert(encoder.flags.end(), example.loss.begin(), example.loss.end());
        // The first token of an example has no context: it is never predicted.
        encoder.flags[begin] = rejected ? TGD_EXAMPLE_START | TGD_REJECTED : TGD_EXAMPLE_START;
        done(example.tokens.size(), lost_here);
    }
    void finish_texts() {
        const Tokenizer::Batch batch = encoder.tokenizer.encode_batch(texts);
        size_t begin = 0;
        for (size_t i = 0; i < texts.size(); i++) {
            const size_t count = batch.ends[i] - begin;
            append(batch.tokens.data() + begin, count);
            if (text_ends[i]) encoder.tokens.push_back(encoder.tokenizer.end_of_text());
            encoder.flags.resize(encoder.tokens.size(), TGD_LOSS);
            done(count + text_ends[i], batch.lost[i]);
            begin = batch.ends[i];
        }
        texts.clear();
        text_ends.clear();
    }

  private:
    void append(const int32_t* ids, size_t count) { encoder.tokens.insert(encoder.tokens.end(), ids, ids + count); }
    void done(size_t count, int64_t lost_here) {
        *tokens++ = int64_t(count);
        *lost++ = lost_here;
    }

    tgd_encoder& encoder;
    int64_t *tokens, *lost;  // of the next document
    std::vector<std::string_view> texts;
    std::vector<bool> text_ends;
};

template <typename Id>
void copy_ids(const std::vector<int32_t>& tokens, void* out) {
    Id* ids = static_cast<Id*>(out);
    for (const int32_t token : tokens) *ids++ = Id(token);
}

}  // namespace

TGD_API tgd_encoder* tgd_open(const char* tokenizer_json, const char* model_directory, int64_t unix_time) {
    tgd_encoder* encoder = nullptr;
    guarded([&] { encoder = new tgd_encoder(tokenizer_json, model_directory, unix_time); });
    return encoder;
}

TGD_API void tgd_close(tgd_encoder* encoder) {
    delete encoder;
}

TGD_API const char* tgd_error(void) {
    return last_error.c_str();
}

TGD_API int64_t tgd_vocab_size(const tgd_encoder* encoder) {
    return encoder->tokenizer.vocab_size();
}

TGD_API int32_t tgd_end_of_text(const tgd_encoder* encoder) {
    return encoder->tokenizer.end_of_text();
}

TGD_API int tgd_has_chat_template(const tgd_encoder* encoder) {
    return encoder->chat_template.has_value();
}

TGD_API int32_t tgd_end_of_turn(const tgd_encoder* encoder) {
    int32_t id = -1;  // also of a template that refuses such a conversation
    guarded([&] {
        if (encoder->chat_template) id = encoder->chat_template->end_of_turn(encoder->tokenizer);
    });
    return id;
}

TGD_API int tgd_encode(tgd_encoder* encoder, const char* data, const int64_t* sizes, const uint8_t* kinds,
                       int64_t documents, int64_t* tokens, int64_t* lost, int64_t* failed) {
    return guarded([&] {
        Documents out(*encoder, tokens, lost);
        for (int64_t& i = *failed = 0; i < documents; i++) {
            const std::string_view content(data, size_t(sizes[i]));
            data += sizes[i];
            if (kinds[i] >= TGD_CONVERSATION)
                out.add_conversation(content, kinds[i] == TGD_REJECTED_CONVERSATION);
            else
                out.add_text(content, kinds[i] == TGD_TEXT);
        }
        out.finish_texts();
    });
}

TGD_API int tgd_copy(const tgd_encoder* encoder, int width, void* ids, uint8_t* flags) {
    return guarded([&] {
        require(width == 4 || (width == 2 && encoder->tokenizer.vocab_size() <= 65536), "ids of ", width,
                " bytes cannot hold a vocabulary of ", encoder->tokenizer.vocab_size());
        if (width == 2)
            copy_ids<uint16_t>(encoder->tokens, ids);
        else
            copy_ids<int32_t>(encoder->tokens, ids);
        if (flags) std::copy(encoder->flags.begin(), encoder->flags.end(), flags);
    });
}
