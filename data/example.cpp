#include "data/example.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace {

void check_content(const std::string& content, const Tokenizer& tokenizer) {
    const std::string token = tokenizer.find_special(content);
    require(token.empty(), "a message holds the special token ", token, " as text; remove it");
}

bool is_content(char mark) {
    return mark & jinja::CONTENT;
}

// Checks what came from the messages.
void check_content(const jinja::Text& text, const Tokenizer& tokenizer) {
    for (size_t begin = 0, end; begin < text.size(); begin = end) {
        for (end = begin + 1; end < text.size() && is_content(text.marks[end]) == is_content(text.marks[begin]);) end++;
        if (is_content(text.marks[begin])) check_content(text.chars.substr(begin, end - begin), tokenizer);
    }
}

template <typename T>
size_t shared_prefix(const T& a, const T& b) {
    const size_t n = std::min(a.size(), b.size());
    return size_t(std::mismatch(a.begin(), a.begin() + int64_t(n), b.begin()).first - a.begin());
}

jinja::Text part(const jinja::Text& text, size_t begin, size_t end) {
    jinja::Text out;
    out.chars = text.chars.substr(begin, end - begin);
    out.marks = text.marks.substr(begin, end - begin);
    return out;
}

void append(jinja::Text& to, const jinja::Text& text) {
    to.chars += text.chars;
    to.marks += text.marks;
}

// Finds where the loss tokens of turns end.
class TurnEnds {
  public:
    TurnEnds(const ChatTemplate& t, const Tokenizer& k) : chat_template(t), tokenizer(k) {}

    // Of a turn that has the tokens [begin, end): after the special token that ends it. content_end(): the end of the
    // tokens that came from the message.
    template <typename F>
    size_t find(const std::vector<int32_t>& tokens, size_t begin, size_t end, const F& content_end) {
        const auto is_special = [&](int32_t id) { return tokenizer.is_special(id); };
        const auto first = tokens.begin() + int64_t(begin), last = tokens.begin() + int64_t(end);
        // A template that ignores add_generation_prompt starts the turn here, possibly with a special token.
        const auto response = std::find_if_not(first, last, is_special);
        auto found = std::find_if(response, last, is_special);
        if (found != last && std::find_if(found + 1, last, is_special) != last) {
            const auto from = tokens.begin() + int64_t(std::clamp(content_end(), begin, end));
            if (ends.empty()) ends = chat_template.end_tokens(tokenizer);
            found = std::find_first_of(from, last, ends.begin(), ends.end());
            if (found == last) found = std::find_if(from, last, is_special);
        }
        return size_t((found == last ? last : found + 1) - tokens.begin());
    }

  private:
    const ChatTemplate& chat_template;
    const Tokenizer& tokenizer;
    std::vector<int32_t> ends;
};

// A text that begins as another does, the whole conversation: as its first `shared` bytes, then `rest`, which continues
// otherwise.
struct Variant {
    size_t shared;
    jinja::Text rest;
};

Variant variant_of(const jinja::Text& whole, const jinja::Text& text) {
    const size_t shared = shared_prefix(text.chars, whole.chars);
    return {shared, part(text, shared, text.size())};
}

// The renderings of the first messages of a conversation, with a generation prompt or without. Most templates write
// what follows from each message in turn; then all renderings follow from two of the whole conversation. The others
// are rendered one by one, which takes time with the square of their length.
class Renderings {
  public:
    Renderings(const std::vector<Message>& m, const ChatTemplate& t, const std::tm& n,
               const jinja::Template::Variables& v)
        : messages(m), chat_template(t), now(n), more(v), whole(t.render(m, false, n, v, &growth)) {
        if (!growth.appends || messages[0].role == "assistant") return;
        jinja::Growth prompted;
        const jinja::Text with_prompt = t.render(m, true, n, v, &prompted);
        appends = prompted.appends && prompted.starts == growth.starts && prompted.end == growth.end &&
                  with_prompt.chars.compare(0, prompted.end, whole.chars, 0, growth.end) == 0;
        prompt_rest = part(with_prompt, std::min(prompted.end, with_prompt.size()), with_prompt.size());
        turn_rest = part(whole, std::min(growth.end, whole.size()), whole.size());
        growth.starts.push_back(growth.end);
    }

    const jinja::Text& text() const { return whole; }
    Variant first(size_t count, bool generation_prompt) {
        if (!generation_prompt && count == messages.size()) return {whole.size(), {}};
        if (appends) {
            const size_t begin = growth.starts[count];
            const jinja::Text& rest = generation_prompt ? prompt_rest : turn_rest;
            const size_t same =
                shared_prefix(std::string_view(rest.chars), std::string_view(whole.chars).substr(begin));
            return {begin + same, part(rest, same, rest.size())};
        }
        const std::vector<Message> some(messages.begin(), messages.begin() + int64_t(count));
        const jinja::Text text = chat_template.render(some, generation_prompt, now, more);
        rendered += text.size();
        require(rendered <= MAX_RENDERED, chat_template.file(),
                ": writes the turns of a conversation by what follows, so ", messages.size(),
                " messages take too long; split the conversation");
        return variant_of(whole, text);
    }

  private:
    static constexpr size_t MAX_RENDERED = size_t(512) << 20;  // bytes: about 20 seconds

    const std::vector<Message>& messages;
    const ChatTemplate& chat_template;
    const std::tm& now;
    const jinja::Template::Variables& more;
    jinja::Growth growth;
    jinja::Text whole;
    bool appends = false;
    jinja::Text prompt_rest, turn_rest;
    size_t rendered = 0;
};

// The tokens of a text, and how many of them its variants begin with. What stands between special tokens is encoded by
// itself, so only the end of a variant is encoded.
class SharedTokens {
  public:
    SharedTokens(const jinja::Text& t, const Tokenizer& k) : text(t), tokenizer(k), tokens(ChatTemplate::encode(t, k)) {
        std::vector<size_t> places = special_places();
        places.push_back(text.size());
        size_t begin = 0, count = 0;
        std::vector<int32_t> joined;
        for (const size_t end : places) {
            const std::vector<int32_t> some = ChatTemplate::encode(part(text, begin, end), tokenizer);
            cuts.push_back({begin, count});
            count += some.size();
            begin = end;
            joined.insert(joined.end(), some.begin(), some.end());
        }
        if (joined != tokens) cuts.assign(1, {0, 0});
    }

    size_t shared_with(const Variant& variant) const {
        // A special token that the variant continues otherwise may be another one: the cut before it counts.
        const auto after = [](size_t place, const Cut& cut) { return place < cut.place; };
        auto cut = std::upper_bound(cuts.begin(), cuts.end(), variant.shared, after) - 1;
        if (cut != cuts.begin() && variant.shared - cut->place < LONGEST_SPECIAL) cut--;
        jinja::Text ending = part(text, cut->place, variant.shared);
        append(ending, variant.rest);
        const std::vector<int32_t> some = ChatTemplate::encode(ending, tokenizer);
        const auto here = tokens.begin() + int64_t(cut->tokens);
        const size_t most = std::min(some.size(), size_t(tokens.end() - here));
        const auto differ = std::mismatch(some.begin(), some.begin() + int64_t(most), here).first;
        return cut->tokens + size_t(differ - some.begin());
    }
    const std::vector<int32_t>& all() const { return tokens; }

  private:
    static constexpr size_t LONGEST_SPECIAL = 100;  // bytes
    struct Cut {
        size_t place, tokens;  // bytes of the text, and tokens, before it
    };

    // Where the template's own special tokens begin.
    std::vector<size_t> special_places() const {
        std::set<int32_t> special;
        for (const int32_t id : tokens)
            if (tokenizer.is_special(id)) special.insert(id);
        std::vector<size_t> places;
        for (const int32_t id : special) {
            const std::string token = tokenizer.decode(id);
            for (size_t at = 0; !token.empty() && (at = text.chars.find(token, at)) != std::string::npos; at++)
                if (at > 0 && !(text.marks[at] & jinja::CONTENT)) places.push_back(at);
        }
        std::sort(places.begin(), places.end());
        return places;
    }

    const jinja::Text& text;
    const Tokenizer& tokenizer;
    const std::vector<int32_t> tokens;
    std::vector<Cut> cuts;
};

jinja::Text text_of(const jinja::Text& whole, const Variant& variant) {
    jinja::Text out = part(whole, 0, variant.shared);
    append(out, variant.rest);
    return out;
}

// Whether a text begins as another does; both vary the same one.
bool begins_with(const jinja::Text& whole, const Variant& text, const Variant& begin) {
    if (begin.shared < text.shared) return begin.rest.empty();
    const std::string rest = whole.chars.substr(text.shared, begin.shared - text.shared) + begin.rest.chars;
    return text.rest.chars.compare(0, rest.size(), rest) == 0;
}

// Whether a template sees no more of a message than its role and text.
bool is_plain(const Message& message) {
    if (message.fields.is_undefined()) return true;
    const jinja::Value* const content = message.fields.dict().find("content");
    return content && content->is_string() && message.fields.dict().size() == 2;
}

// A response that the template stores without what its generation prompt ends with, and without the reasoning behind
// that ("<think>\n" of DeepSeek-R1). What the model is to generate is in the message, if that begins so. Then the
// example is the prompt and what follows in the message, up to where the template ends the turn. Returns false if the
// message does not begin so.
bool encode_generated(const jinja::Text& whole, const jinja::Text& prompt, size_t shared, const std::string& content,
                      TurnEnds& ends, const Tokenizer& tokenizer, Example& example) {
    const auto last = std::find_if(whole.marks.rbegin(), whole.marks.rend(), is_content).base();
    const auto first = std::find_if_not(std::make_reverse_iterator(last), whole.marks.rend(), is_content).base();
    const auto begin = size_t(first - whole.marks.begin()), end = size_t(last - whole.marks.begin());
    const size_t stored = content.rfind(whole.chars.substr(begin, end - begin));
    size_t opened = std::min(content.size(), prompt.size());  // bytes of the message that the prompt ends with
    while (opened > 0 && prompt.chars.compare(prompt.size() - opened, opened, content, 0, opened) != 0) opened--;
    if (opened == 0 || prompt.size() - opened > shared || begin < shared || stored == std::string::npos) return false;
    const size_t content_end = stored + (end - begin);
    if (content_end < opened) return false;
    jinja::Text text = prompt;
    text.append(std::string_view(content).substr(opened, content_end - opened), jinja::CONTENT);
    const jinja::Text before_end = text;
    append(text, part(whole, end, whole.size()));
    check_content(text, tokenizer);
    example.tokens = ChatTemplate::encode(text, tokenizer);
    example.loss.assign(example.tokens.size(), 0);
    const size_t inputs = shared_prefix(ChatTemplate::encode(prompt, tokenizer), example.tokens);
    const size_t stop = ends.find(example.tokens, inputs, example.tokens.size(), [&] {
        return shared_prefix(ChatTemplate::encode(before_end, tokenizer), example.tokens);
    });
    std::fill(example.loss.begin() + int64_t(inputs), example.loss.begin() + int64_t(stop), uint8_t(1));
    return true;
}

std::string quoted(const std::string& text) {
    std::string out = "'";
    for (const char c : text) out += c == '\n' ? "\\n" : std::string(1, c);
    return out + "'";
}

}  // namespace

Example encode_conversation(const std::vector<Message>& messages, const ChatTemplate& chat_template, const std::tm& now,
                            const Tokenizer& tokenizer, const jinja::Template::Variables& more) {
    const auto is_learnt = [](const Message& message) { return message.role == "assistant" && !message.is_input; };
    const auto turns = std::count_if(messages.begin(), messages.end(), is_learnt);
    require(turns > 0, "the conversation has no assistant turn, so there is nothing to learn; remove it");
    Renderings renderings(messages, chat_template, now, more);
    const jinja::Text& whole = renderings.text();
    check_content(whole, tokenizer);
    const SharedTokens tokens(whole, tokenizer);
    TurnEnds ends(chat_template, tokenizer);
    Example example;
    example.tokens = tokens.all();
    example.loss.assign(example.tokens.size(), 0);
    for (size_t i = 0; i < messages.size(); i++) {
        if (!is_learnt(messages[i])) continue;
        const bool last = i + 1 == messages.size();
        const Variant prompt = renderings.first(i, true), turn = renderings.first(i + 1, false);
        if (!begins_with(whole, turn, prompt)) {
            const Variant before = renderings.first(i, false);
            const jinja::Text prompt_text = text_of(whole, prompt), before_text = text_of(whole, before);
            // Else the template rewrites what is before the turn.
            const bool differs_in_prompt = begins_with(whole, turn, before) && begins_with(whole, prompt, before);
            if (differs_in_prompt && last && turns == 1 && is_plain(messages[i]) &&
                encode_generated(whole, prompt_text, prompt.shared, messages[i].content, ends, tokenizer, example))
                return example;
            require(!differs_in_prompt, chat_template.file(), ": the generation prompt is ",
                    quoted(prompt_text.chars.substr(before_text.size())), ", but message ", i + 1,
                    ", an assistant turn, does not begin so, so what a model generates is not in the conversation; "
                    "begin the only response of a conversation with what the generation prompt ends with, or use a "
                    "template whose assistant turns begin as its generation prompt");
        }
        // Only what the template writes after the content may differ when more turns follow (Phi-3's end of the text).
        const bool content_follows = std::any_of(turn.rest.marks.begin(), turn.rest.marks.end(), is_content);
        require(
            prompt.rest.empty() && prompt.shared <= turn.shared && !content_follows, chat_template.file(),
            ": writes message ", i + 1,
            ", an assistant turn, or what is before it, otherwise when the conversation goes on, so its loss tokens "
            "are not defined; leave out later turns, or use a template that only appends");
        const auto marks = whole.marks.begin();
        require(!messages[i].no_content ||
                    std::any_of(marks + int64_t(prompt.shared), marks + int64_t(turn.shared), is_content),
                chat_template.file(), ": writes nothing of message ", i + 1,
                ", an assistant turn with calls of tools or reasoning and no content; leave it out, or use a template "
                "for them");
        const size_t begin = tokens.shared_with(prompt);
        const size_t end = last ? example.tokens.size() : std::max(begin, tokens.shared_with(turn));
        const size_t stop = ends.find(example.tokens, begin, end, [&] {
            const auto after = std::make_reverse_iterator(marks + int64_t(turn.shared));
            return tokens.shared_with(
                {size_t(whole.marks.rend() - std::find_if(after, whole.marks.rend(), is_content)), {}});
        });
        std::fill(example.loss.begin() + int64_t(begin), example.loss.begin() + int64_t(stop), uint8_t(1));
    }
    return example;
}

Example encode_prompt_response(const std::string& prompt, const std::string& response, const Tokenizer& tokenizer) {
    check_content(prompt, tokenizer);
    check_content(response, tokenizer);
    const std::vector<int32_t> text = tokenizer.encode(prompt + response);
    const size_t inputs = tokenizer.start_of_text().size() + shared_prefix(tokenizer.encode(prompt), text);
    Example example;
    example.tokens = tokenizer.start_of_text();
    example.tokens.insert(example.tokens.end(), text.begin(), text.end());
    example.tokens.push_back(tokenizer.end_of_text());
    example.loss.assign(example.tokens.size(), 1);
    std::fill_n(example.loss.begin(), inputs, uint8_t(0));
    return example;
}
