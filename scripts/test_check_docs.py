#!/usr/bin/env python3
"""Links of the pages lead somewhere, and check_docs.py finds those that do not, and pages that are too long."""
import os
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_docs  # noqa: E402
import check_words  # noqa: E402

FILES = {
    "README.md": "# One\n[a](docs/use/a.md#two-words-1) [b](docs/use/a.md#three) [c](no.md) `x`\n"
                 "```\n[d](nor.md)\n```\n[e](#one) [f](#two)\n[g](https://a.b/c#d) ![h](docs/use/)\n",
    "docs/use/a.md": "## Two `words`\n## [Two](x) words!\n```\n## Three\n```\n"
                     "[up](../../README.md) [up](../README.md)\n",
    "train.cpp": '// docs/use/a.md, docs/use/b.md\n"see docs/use/a.md#two-words or docs/use/a.md#four"\n',
}


class DocsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name, text in FILES.items():
            path = os.path.join(folder.name, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        self.folder = folder.name

    def test_finds_broken_links(self):
        with mock.patch.object(check_docs, "TOP", self.folder):
            found = list(check_docs.broken_links(FILES))
        self.assertEqual(found, ["README.md:2: docs/use/a.md has no heading #three", "README.md:2: there is no no.md",
                                 "README.md:6: README.md has no heading #two",
                                 "docs/use/a.md:2: there is no docs/use/x",
                                 "docs/use/a.md:6: there is no docs/README.md",
                                 "train.cpp:1: there is no docs/use/b.md",
                                 "train.cpp:2: docs/use/a.md has no heading #four"])

    def test_finds_pages_that_are_too_long(self):
        words = sum(len(FILES[name].split()) for name in ("README.md", "docs/use/a.md"))
        with mock.patch.object(check_docs, "TOP", self.folder):
            self.assertEqual(list(check_docs.too_long([("README.md docs/use/*.md", words)])), [])
            found, = check_docs.too_long([("README.md docs/use/*.md", words - 1)])
        self.assertIn(f"README.md docs/use/*.md: {words} words, more than {words - 1}", found)

    def test_links(self):
        if not check_words.in_a_clone():
            self.skipTest("needs git and a clone, which tell the project's files from others")
        names = [name for name in check_words.tracked_files() if not name.startswith(check_docs.EXCEPT)]
        self.assertEqual(list(check_docs.broken_links(names)), [])

    def test_lengths(self):
        self.assertEqual(list(check_docs.too_long(check_docs.BUDGETS)), [])


if __name__ == "__main__":
    unittest.main()
