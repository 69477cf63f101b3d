// Tests data/unicode.h against facts of the Unicode standard.
#include "data/unicode.h"

#include <gtest/gtest.h>

#include <cstdio>

TEST(Unicode, FormC) {
    const struct {
        const char *text, *form_c;
    } cases[] = {
        {"", ""},
        {"plain text\n", "plain text\n"},
        {"e\u0301", "\u00e9"},
        {"a e\u0301 b\u0301", "a \u00e9 b\u0301"},
        {"\u0301a", "\u0301a"},
        {"\u212b", "\u00c5"},                // singletons
        {"\u2126\u0301", "\u038f"},          // composes after decomposition
        {"q\u0307\u0323", "q\u0323\u0307"},  // canonical order
        {"\u1e0b\u0323", "\u1e0d\u0307"},    // and composition over it
        {"a\u0315\u0300\u05ae\u0300b", "\u00e0\u05ae\u0300\u0315b"},
        {"\u0958", "\u0915\u093c"},        // excluded from composition
        {"\u1100\u1161\u11a8", "\uac01"},  // Hangul
        {"\uac00\u11a8", "\uac01"},
        {"\u304b\u3099", "\u304c"},
        {"\ufb01", "\ufb01"},  // compatibility characters stay
        {"\U0001d15e", "\U0001d157\U0001d165"},
        {"\u0344", "\u0308\u0301"},
        {">\u0338", "\u226f"},
    };
    for (const auto& [text, form_c] : cases) {
        EXPECT_EQ(nfc(text), form_c);
        EXPECT_EQ(nfc(form_c), form_c);
        if (std::string(text) != form_c) {
            EXPECT_TRUE(may_need_nfc(text)) << text;
        }
    }
    EXPECT_FALSE(may_need_nfc("caf\u00e9 \u024f"));
}

TEST(Unicode, BytesThatAreNotTextStay) {
    // Each part that is UTF-8 is normalized by itself.
    EXPECT_EQ(nfc("e\xFF\u0301 e\u0301\xF0\x9F\u0301"), "e\xFF\u0301 \u00e9\xF0\x9F\u0301");
    EXPECT_EQ(nfc("\xE2\x82"), "\xE2\x82");
    EXPECT_EQ(nfc("\xFF\xFE\xED\xA0\x80"), "\xFF\xFE\xED\xA0\x80");
    EXPECT_EQ(nfc("\x80\xCC\x81"), "\x80\xCC\x81");
}

TEST(Unicode, LongRunsAreFast) {
    std::string marks = "a";
    for (int i = 0; i < 100000; i++) marks += i % 2 ? "\u0323" : "\u0301";  // quadratic sorting takes minutes
    const std::string ordered = nfc(marks);
    EXPECT_EQ(ordered.size(), marks.size());  // a and one U+0323 became U+1EA1
    EXPECT_EQ(ordered.substr(0, 5), "\u1ea1\u0323");
    EXPECT_EQ(ordered.substr(ordered.size() - 2), "\u0301");
}

TEST(Unicode, WhiteSpace) {
    const std::string all =
        "\t\n\v\f\r "
        "\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f"
        "\u205f\u3000";
    EXPECT_EQ(space_at_start(all + "x" + all), all.size());
    EXPECT_EQ(space_at_end(all + "x" + all), all.size());
    EXPECT_EQ(space_at_start(all), all.size());
    EXPECT_EQ(space_at_end(all), all.size());
    for (const char* other : {"", "\u180e", "\u200b", "\u2060", "\ufeff", "\x1c", "\xFF", "\xE2\x80", "\x80"}) {
        EXPECT_EQ(space_at_start(other + all), std::string(other).empty() ? all.size() : 0) << other;
        EXPECT_EQ(space_at_end(all + other), std::string(other).empty() ? all.size() : 0) << other;
    }
}

TEST(Unicode, Words) {
    for (const char* word : {"a", "Z", "_", "7", "\u00e9", "\u00aa", "\u0301", "\u203f", "\u4e2d", "\u2160", "\u24b6",
                             "\u200d", "\U0001f130", "\U0001d7ce", "\u0663", "\u0903", "\u20dd"}) {
        EXPECT_TRUE(starts_with_word(word + std::string(" "))) << word;
        EXPECT_TRUE(ends_with_word(std::string(" ") + word)) << word;
        EXPECT_FALSE(starts_with_word(std::string(" ") + word)) << word;
        EXPECT_FALSE(ends_with_word(word + std::string(" "))) << word;
    }
    for (const char* other :
         {"", " ", "-", "'", "\u00b2", "\u00bd", "\u2460", "\u2022", "\U0001f600", "\u00a0", "\xC3", "\xFF"}) {
        EXPECT_FALSE(starts_with_word(other)) << other;
        EXPECT_FALSE(ends_with_word(other)) << other;
    }
}

TEST(Unicode, TheLibrarySaysWhichUnicodeItKnows) {
    int version[3], unicode[3], end = 0;
    const std::string library = unicode_library();
    EXPECT_EQ(std::sscanf(library.c_str(), "utf8proc %d.%d.%d, Unicode %d.%d.%d%n", version, version + 1, version + 2,
                          unicode, unicode + 1, unicode + 2, &end),
              6)
        << library;
    EXPECT_EQ(end, int(library.size())) << library;
}
