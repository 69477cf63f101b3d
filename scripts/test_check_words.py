#!/usr/bin/env python3
"""The tree and the help texts use standard terms (docs/understand/glossary.md), and check_words.py finds what is not one."""
import os
import sys
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(__file__))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT") or os.path.join(SCRIPTS, "..", "train_gpt"))
sys.path.insert(0, SCRIPTS)
import check_words  # noqa: E402


class WordsTest(unittest.TestCase):
    def assert_clean(self, pages):
        findings = [f"{name}:{number}: '{words}': write {instead}"
                    for name, text in pages for number, words, instead in check_words.find(text)]
        self.assertEqual(findings, [])

    def test_sources_and_pages(self):
        if not check_words.in_a_clone():
            self.skipTest("needs git and a clone, which tell the project's files from others")
        names = check_words.tracked_files()
        for expected in ("README.md", "Makefile", "train_gpt.cu", "kernels/norm.h", "data/make_data.py"):
            self.assertIn(expected, names)
        pages = []
        for name in names:
            with open(os.path.join(check_words.TOP, name), encoding="utf-8") as source:
                pages.append((name, source.read()))
        self.assert_clean(pages)

    def test_help_texts(self):
        pages = check_words.help_texts(DRIVER)
        self.assertEqual([name.split()[0] for name, _ in pages],
                         ["--help", "train", "rl", "eval", "sample", "chat", "serve", "logits", "plan", "convert", "info"])
        self.assert_clean(pages)

    def test_finds_every_word(self):
        samples = ["64 texts of 124M", "MATRIX products", "a few rows", "132 multiprocessors", "what the kernel before wrote",
                   "the likeliest token", "the learnt tokens", "a run begins anew", "on machine C", "The house",
                   "the knobs of a model", "layers of kind G", "void mix_forward(", "copy_box(tile)", "product_wait<0>()",
                   "claim_registers<240>()", "wait_for_previous();", "if (settled)", "Farewell farewell", "a step in one launch",
                   "what is wrong is one line", "tensors live at moments"]
        self.assertEqual(len(samples), len(check_words.WORDS))
        for number, (sample, (_, instead)) in enumerate(zip(samples, check_words.WORDS), 1):
            with self.subTest(sample=sample):
                lines = "\n" * (number - 1) + sample
                self.assertEqual([(line, write) for line, _, write in check_words.find(lines)], [(number, instead)])

    def test_leaves_plain_english_alone(self):
        for line in ["text files", "the dot product", "no room left in the cache", "Adam's first moment", "cudaDevAttrMultiProcessorCount",
                     "a kind of error", "a place in the list", "it turns out"]:
            self.assertEqual(check_words.find(line), [], line)


if __name__ == "__main__":
    unittest.main()
