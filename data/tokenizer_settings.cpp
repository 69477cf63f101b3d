#include "data/tokenizer_settings.h"

#include "runtime/error.h"
#include "runtime/files/json_keys.h"

void check_tokenizer_settings(const ModelFiles& model, const TextStart& start) {
    constexpr const char* NAME = "tokenizer_config.json";
    if (!model.has(NAME)) return;
    const std::string path = model.shown_as(NAME);
    const JsonKeys keys = {path, parse_json_object(model.read(NAME), path)};
    const auto demand = [&](const char* key, bool supported, const char* remedy) {
        if (!keys.has(key) || keys.object[key].is_null() || keys.boolean(key) == supported) return;
        throw Error(str(path, ": key '", key, "' is ", supported ? "false" : "true", "; ", remedy));
    };
    demand("split_special_tokens", false, "only false is supported");
    demand("fix_mistral_regex", false, "save tokenizer.json with the expression that transformers puts in its place");
    demand("add_eos_token", false, "no token is put behind a text here; set it to false");
    demand("add_bos_token", start.tokens,
           start.tokens ? "tokenizer.json puts tokens in front of a text (post_processor); make the two agree"
                        : "tokenizer.json puts no token in front of a text (post_processor); make the two agree");
    if (start.space_known) demand("add_prefix_space", start.space, "tokenizer.json says otherwise; make the two agree");
}
