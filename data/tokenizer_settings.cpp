#include "data/tokenizer_settings.h"

#include "runtime/error.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"

void check_tokenizer_settings(const std::string& directory, const TextStart& start) {
    const std::string path = join_path(directory, "tokenizer_config.json");
    if (!path_exists(path)) return;
    const JsonKeys keys = {path, read_json(path)};
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
