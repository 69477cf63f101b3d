#!/usr/bin/env python3
"""The sources have one statement a line, and check_statements.py finds those that are joined by commas."""
import os
import unittest

import check_statements
import check_words
from check_statements import joined_statements


class StatementsTest(unittest.TestCase):
    def test_the_tree(self):
        if not check_words.in_a_clone():
            self.skipTest("needs git and a clone, which tell the project's files from others")
        names = check_statements.sources()
        self.assertIn("train_gpt.cu", names)
        for name in names:
            with self.subTest(name=name), open(os.path.join(check_statements.TOP, name), encoding="utf-8") as file:
                self.assertEqual(joined_statements(file.read()), [])

    def test_what_is_joined(self):
        for text, statement in [
                ("void f() {\n    a = 1, b = 2;\n}", "a = 1, b = 2"),
                ("void f() {\n    if (x < y) a[i] += 1, b++;\n}", "a[i] += 1, b++"),
                ("void f() {\n    else c.norm = Norm::RMS, c.kv_heads = 2;\n}", "c.norm = Norm::RMS, c.kv_heads = 2"),
                ("void f() {\n    for (int i = 0, j = 9; i < j; i++, j--) x.add(i), y.add(j);\n}", "x.add(i), y.add(j)"),
                ("auto f = [] {\n    p->value = g<A, B>(x), q = 1;\n};", "p->value = g<A, B>(x), q = 1"),
                ("switch (x) {\n    case Y: a = 1, b = 2;\n}", "a = 1, b = 2"),
                ("call([] {\n    a = 1, b = 2; }, 3);", "a = 1, b = 2")]:
            self.assertEqual(joined_statements(text), [(2, statement)], text)

    def test_what_is_not(self):
        for text in ["void f() { int64_t B, T; }", "void f() { const Tensor a = g(x, y), b = a; }", "int f(int a, int b);",
                     "void f() { std::map<int, int> m; }", "void f() { for (i = 0, j = 1; i < j; i++, j--) x(); }",
                     "void f() { kernel<A, B><<<grid, threads, 0, stream>>>(a, b); }", "enum { A, B };", "f(a, b);",
                     "struct S { int a, b; S() : a(1), b(2) {} };", "int a[] = {1, 2}; // a = 1, b = 2;",
                     "void f() { return g(), h(); }", 'f("a = 1, b = 2;");', "#define F a = 1, b = 2;\n", "auto [a, b] = f();",
                     "x = {1, 2};", "void f() { a = 1; } int b, c;", "case 1: case 2: int a, b;"]:
            self.assertEqual(joined_statements(text), [], text)


if __name__ == "__main__":
    unittest.main()
