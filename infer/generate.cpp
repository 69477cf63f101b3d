#include "infer/generate.h"

#include <algorithm>

Generated generate(LanguageModel& model, const Tokenizer* tokenizer, const std::vector<int32_t>& prompt,
                   const GenerateOptions& options) {
    require(!prompt.empty(), "generate: the prompt has no token to start from; give a prompt");
    require(tokenizer || options.stop.empty(), "generate: stop strings need a tokenizer");
    Generated out;
    out.finish = "length";
    std::vector<int32_t> context = prompt;
    for (int64_t step = 0; step < options.max_tokens; step++) {
        const int32_t token = model.next_token(context, options.sampling, options.sequence, step);
        if (token == options.eos) {
            out.finish = "eos";
            break;
        }
        context.push_back(token);
        out.tokens.push_back(token);
        // A model's vocabulary may be larger than the tokenizer's (padded): such tokens have no text.
        if (!tokenizer || !tokenizer->contains(token)) continue;
        out.text += tokenizer->decode(token);
        size_t end = std::string::npos;
        for (const std::string& stop : options.stop) {
            if (!stop.empty()) end = std::min(end, out.text.find(stop));
        }
        if (end != std::string::npos) {
            out.text.resize(end);
            out.finish = "stop";
            break;
        }
    }
    return out;
}
