#!/usr/bin/env python3
"""Checks the pages: links, and names of pages in sources, lead somewhere; the pages are short enough.

    scripts/check_docs.py        exit status 1 and a line for each that leads nowhere and each group that is too long

It also reads what others check: the commands of code blocks and of `backquotes` (dev/tests/test_docs.py runs them).
"""
import glob
import os
import re
import shlex
import sys
from dataclasses import dataclass

import check_words

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Words of the pages of each group together, as wc -w counts them. The pages of docs/log may be as long as they like.
BUDGETS = [("README.md", 900), ("README.md docs/use/*.md", 15_000), ("docs/understand/*.md", 15_000)]
MARK = re.compile(r"<!-- not run: *(.*?) *-->$")
SHELLS = ("bash", "sh", "console")
# How a line begins in a block without a language that has commands.
COMMAND = re.compile(r"^ *([A-Z_]+=\S+ )*(sudo |\./|make\s|train_gpt |python3? |(scripts|data|dev|\.venv|\.ci|build)/)",
                     re.M)
# In a page, a source or a help text: a page or picture of docs, perhaps with an anchor.
NAMED = re.compile(r"(?<![\w./-])docs/(?:use|understand|log)/[\w-]+\.(?:md|png)(?:#[\w-]+)?")
EXCEPT = ("scripts/test_check_docs.py",)


@dataclass
class Block:
    """A code block: the line of the page where its text begins, and why it is not run (None: it is)."""
    line: int
    language: str
    text: str
    reason: str = None

    def has_commands(self):
        return self.language in SHELLS or (not self.language and bool(COMMAND.search(self.text)))


def read(name):
    with open(os.path.join(TOP, name), encoding="utf-8") as page:
        return page.read()


def pages(pattern):
    """The names, relative to the project's root, of the pages of a group."""
    found = (glob.glob(os.path.join(TOP, *part.split("/"))) for part in pattern.split())
    return sorted(os.path.relpath(path, TOP) for paths in found for path in paths)


def blocks(page):
    """The code blocks of a page's text."""
    found, fence, before = [], None, ""
    for number, line in enumerate(page.splitlines(), 1):
        bare = line.strip()
        if fence is None and bare.startswith("```"):
            mark = MARK.match(before)
            fence = line[:len(line) - len(line.lstrip())]
            found.append(Block(number + 1, bare[3:].strip(), "", mark[1] if mark else None))
        elif fence is not None and bare == "```":
            fence = None
        elif fence is not None:
            found[-1].text += line.removeprefix(fence) + "\n"
        before = bare
    return found


def without_blocks(page):
    """The text with empty lines for code blocks, so that lines keep their numbers."""
    lines, inside = [], False
    for line in page.splitlines():
        fence = line.strip().startswith("```")
        lines.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(lines)


def spans(page):
    """(line, text) of what stands between backquotes, outside code blocks; it may go over the end of a line."""
    text = without_blocks(page)
    for paragraph in re.finditer(r"(?:[^\n]+\n?)+", text):
        for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", paragraph[0]):
            line = text.count("\n", 0, paragraph.start() + found.start()) + 1
            yield line, re.sub(r"\s*\n\s*", " ", found[1]).replace("\\|", "|")


def split(line):
    """The words of a line of a shell. Alternatives (fp32|bf16) are one word, &&, | and > words of their own."""
    line = re.sub(r"(?<=[\w.\]])\|(?=[\w\[])", "\u00a6", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
    lexer.commenters, lexer.whitespace_split = "", True
    return [word.replace("\u00a6", "|") for word in lexer]


def commands(text):
    """(line within the text, words) of each command in lines of a shell, without comments and redirections."""
    begun, first = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if not begun:
            first = number
        begun += re.sub(r"(^|\s+)#.*", "", line)
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            words = split(begun)
        except ValueError:  # a quotation goes on in the next line
            begun += "\n"
            continue
        begun, command = "", []
        for before, word in zip([""] + words, words + [";"]):
            if re.fullmatch("[&|;()]+", word):
                if command:
                    yield first, command
                command = []
            elif not re.search("[<>]", before + word) or re.match(r"[<\w]+>", word):
                command.append(word)


def page_commands(page):
    """(line, words) of what a page's blocks of commands hold, and of what stands between backquotes."""
    for block in blocks(page):
        if block.has_commands():
            yield from ((block.line + line - 1, words) for line, words in commands(block.text))
    for line, text in spans(page):
        yield from ((line, words) for _, words in commands(text))


def slugs(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"^#+ +(.*?) *$", without_blocks(page), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if not number else f"{slug}-{number}" for slug, last in found.items() for number in range(last + 1)}


def leads_nowhere(target, folder):
    """Why there is nothing at path#anchor, seen from the folder; None if there is."""
    path, _, anchor = target.partition("#")
    name = os.path.normpath(os.path.join(folder, path))
    if not os.path.exists(os.path.join(TOP, name)):
        return f"there is no {name}"
    if anchor and anchor not in slugs(read(name)):
        return f"{name} has no heading #{anchor}"
    return None


def references(name, text):
    """(line, target, folder that it is seen from): the links of a page; pages that another file names."""
    page = name.endswith(".md")
    for number, line in enumerate((without_blocks(text) if page else text).splitlines(), 1):
        if page:
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                target = os.path.basename(name) + target if target.startswith("#") else target
                if not re.match(r"\w+:", target):
                    yield number, target, os.path.dirname(name)
        else:
            yield from ((number, target, "") for target in NAMED.findall(line))


def broken_links(names):
    """A line for each reference that leads nowhere."""
    for name in names:
        for line, target, folder in references(name, read(name)):
            fault = leads_nowhere(target, folder)
            if fault:
                yield f"{name}:{line}: {fault}"


def too_long(budgets):
    """A line for each group of pages with more words than its budget."""
    for pattern, budget in budgets:
        words = {name: len(read(name).split()) for name in pages(pattern)}
        if sum(words.values()) > budget:
            longest = sorted(words, key=words.get, reverse=True)[:3]
            yield (f"{pattern}: {sum(words.values()):,} words, more than {budget:,}: shorten them, or move "
                   f"measurements to docs/log. The longest: {', '.join(f'{name} {words[name]:,}' for name in longest)}")


def main():
    names = [name for name in check_words.tracked_files() if not name.startswith(EXCEPT)]
    found = [*broken_links(names), *too_long(BUDGETS)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
