// The program's output: std::cout and std::cerr, and text for a terminal.
#pragma once

#include <memory>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

// Replaces what a terminal would obey instead of show: control characters (C0 except newline and tab, DEL, and C1 in
// UTF-8 or as a single byte) become \x1b, \x9b, and so on. Text may be given in parts that divide a character.
class ControlEscaper {
  public:
    std::string operator()(std::string_view part);

  private:
    int continuation = 0;  // bytes that the current UTF-8 character still needs
    bool c2_held = false;  // C2 starts either a C1 control character or a letter
};

// A message for stderr: names from files in it may hold control characters. They are escaped wherever stderr leads, as
// logs are shown on terminals later.
std::string for_stderr(std::string_view text);

// Sends an SGR sequence ("32": green, "0": off) to the terminal that stdout is; elsewhere nothing. The only control
// characters that reach a terminal.
void set_terminal_style(const char* sgr);

// During its lifetime std::cerr escapes control characters, std::cout on a terminal, and a failed write to std::cout
// throws std::ios_base::failure. Standard streams that the process was started without are opened on /dev/null, because
// the next file to be opened would take their descriptors; writing to them fails.
class Console {
  public:
    Console();
    ~Console();
    Console(const Console&) = delete;
    Console& operator=(const Console&) = delete;

    // Flushes std::cout, and ends its line if that is incomplete. Failed writes are ignored.
    void end_line();
    // Whether stdout is a pipe whose reader has closed it.
    static bool reader_gone();

  private:
    class Buffer;
    std::unique_ptr<Buffer> out, err;
};
