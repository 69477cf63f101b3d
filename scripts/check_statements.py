#!/usr/bin/env python3
"""Checks that C++ and CUDA sources have one statement a line: no assignments or calls joined by commas.

    scripts/check_statements.py        exit status 1 and a line for each such statement

Declarations (`int64_t B, T;`) and the headers of for loops may have commas. This is a reader of brackets and words, not
of C++: compilers see the comma operator better, but none reads all of these files in a second.
"""
import os
import re
import sys

from check_includes import sources

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Left out: comments, strings, characters, lines of the preprocessor, and what is between <<< and >>> at a launch.
BLANKED = re.compile(r"""
    //[^\n]* | /\*.*?\*/ | R"(?P<tag>[^("\s]*)\(.*?\)(?P=tag)" | "(?:\\.|[^"\\\n])*" | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+' |
    ^[ \t]*\#(?:\\\n|[^\n])* | <<<.*?>>>""", re.X | re.S | re.M)
WORDS = re.compile(r"(return|throw|delete|using|typedef|template|enum|struct|class|union|namespace|friend|goto|extern|operator|"
                   r"const|static|constexpr|auto|unsigned|int|float|double|bool|char|void|long|asm)\b")
LABEL = re.compile(r"\s*(?:case\b[^;{}]*?(?<!:):(?!:)|(?:default|public|private|protected)\s*:(?!:))")
ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)|[-+*/%&|^]=|<<=|>>=")


def blank(text):
    """The text without what has no statements; every other character stays where it is."""
    return BLANKED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def without_brackets(text):
    flat, depth = "", 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character not in ")]}":
            flat += character
    return flat


def is_declaration(first):
    """Whether the statement up to its first comma declares something, or is no expression."""
    left = without_brackets(ASSIGNMENT.split(first)[0]).strip()
    return not left or bool(WORDS.match(left) or re.match(r"[\w:]+(\s*<[^;]*>)?[\s*&]+[A-Za-z_]", left))


def in_template_arguments(text):
    """Whether the text ends inside <...>; a comparison has spaces around its sign."""
    return len(re.findall(r"\w<(?![<=\s])", text)) > len(re.findall(r"(?<![\s=-])>(?!=)", text))


def skip_headers(text, at, end):
    """Where the statement begins behind labels, else, and the headers of if, for, while and switch."""
    while True:
        found = LABEL.match(text, at, end) or re.compile(r"\s*(?:else|do)\b").match(text, at, end)
        if found:
            at = found.end()
            continue
        found = re.compile(r"\s*(?:if|for|while|switch)\s*(?:constexpr\s*)?\(").match(text, at, end)
        if not found:
            return at
        at, depth = found.end(), 1
        while depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1


def joined_statements(text):
    """(line number, statement) of each."""
    text = blank(text)
    found, outer, start, commas = [], [], 0, []
    for at, character in enumerate(text):
        if character in "([{":
            outer.append((character, start, commas))
            if character == "{":
                start, commas = at + 1, []
        elif character in ")]}" and outer:
            opening, start, commas = outer.pop()
            # A block ends the statement before it; the braces of an initialiser or a lambda are part of one.
            if opening == "{" and not re.compile(r"\s*[;,).}\[(?:+\-*/]").match(text, at + 1):
                start, commas = at + 1, []
        elif character == "," and (not outer or outer[-1][0] == "{"):
            commas.append(at)
        elif character == ";" and (not outer or outer[-1][0] == "{"):
            begin = skip_headers(text, start, at) if commas else at
            first = next((comma for comma in commas
                          if comma > begin and not in_template_arguments(text[begin:comma])), None)
            if first and not is_declaration(text[begin:first]):
                begin += len(text[begin:at]) - len(text[begin:at].lstrip())
                found.append((text.count("\n", 0, begin) + 1, " ".join(text[begin:at].split())))
            start, commas = at + 1, []
    return found


def main():
    faults = 0
    for name in sources():
        with open(os.path.join(TOP, name), encoding="utf-8") as file:
            for number, statement in joined_statements(file.read()):
                print(f"{name}:{number}: one statement a line, not joined by commas: {statement[:100]}")
                faults += 1
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
