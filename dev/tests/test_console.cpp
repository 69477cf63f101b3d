// runtime/console.h: what a terminal would obey is escaped, in whatever parts the text arrives.
#include "runtime/console.h"

#include <gtest/gtest.h>

#include <iostream>

namespace {

// The text given whole, and byte by byte.
std::string escaped(const std::string& text) {
    const std::string whole = ControlEscaper()(text);
    ControlEscaper escape;
    std::string parts;
    for (const char c : text) parts += escape(std::string(1, c));
    EXPECT_EQ(parts, whole);
    return whole;
}

}  // namespace

TEST(Console, ControlCharactersAreEscaped) {
    EXPECT_EQ(escaped("\x1b[31mred\x07\r\x7f"), "\\x1b[31mred\\x07\\x0d\\x7f");
    EXPECT_EQ(escaped(std::string("a\0b", 3)), "a\\x00b");
    EXPECT_EQ(escaped("\xC2\x9B"
                      "31m"),
              "\\x9b31m");                                         // U+009B, which starts a sequence as ESC [ does
    EXPECT_EQ(escaped("\x9B"), "\\x9b");                           // the same in 8 bits
    EXPECT_EQ(escaped("\xC2\x1b\xE2\x1b"), "\xC2\\x1b\xE2\\x1b");  // after characters that are cut off
    EXPECT_EQ(escaped("\xF8\x90"), "\\xf8\\x90");                  // never in UTF-8
}

TEST(Console, TextIsUnchanged) {
    const std::string text = "line\n\ttab \xC2\xA0\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 ~";  // nbsp, é, €, a smiley
    EXPECT_EQ(escaped(text), text);
    EXPECT_EQ(escaped("\xE2\x9B\x84 \xF0\x9F\x9B\x80"), "\xE2\x9B\x84 \xF0\x9F\x9B\x80");  // bytes 9B inside characters
}

TEST(Console, ResultsAreEscapedOnTerminalsMessagesEverywhere) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    {
        Console console;
        std::cout << "\x1b[31m" << std::flush;
        std::cerr << "\x1b[31m" << std::flush;
    }
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "\x1b[31m");
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "\\x1b[31m");
    EXPECT_EQ(for_stderr("\x1b[31m"), "\\x1b[31m");
}

TEST(Console, AnErrorGetsALineOfItsOwn) {
    testing::internal::CaptureStdout();
    {
        Console console;
        console.end_line();  // nothing was printed: nothing to end
        std::cout << "two\nlines\n";
        console.end_line();
        std::cout << "The cat";
        console.end_line();
    }
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "two\nlines\nThe cat\n");
}
