#!/usr/bin/env python3
"""near_duplicates.py on documents whose similarity is known."""
import os
import random
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import near_duplicates  # noqa: E402

LINES = [f"line {i}" for i in range(4000)]


def document(*ranges):
    return "\n".join(line for begin, end in ranges for line in LINES[begin:end]).encode()


def groups(*documents):
    return near_duplicates.group([near_duplicates.signature(d) for d in documents])


class NearDuplicatesTest(unittest.TestCase):
    def test_signature_estimates_the_similarity(self):
        # 400 of 600 lines in common. 200 pairs of documents: the mean is within 5 standard errors of 2/3.
        lines, estimates, n = LINES[:], [], near_duplicates.BANDS * near_duplicates.ROWS
        for i in range(200):
            a, b = (near_duplicates.signature("\n".join(lines[begin:begin + 500]).encode()) for begin in (0, 100))
            estimates.append((a == b).mean())
            np.random.default_rng(i).shuffle(lines)
        error = (2 / 9 / n / len(estimates)) ** 0.5
        self.assertLess(abs(np.mean(estimates) - 2 / 3), 5 * error)

    def test_groups(self):
        original, other = document((0, 500)), document((1000, 1500))
        edited = document((0, 400), (2000, 2050))         # similarity 400/550 to the original
        edited_again = document((0, 300), (2000, 2050))   # 300/550 to the original, 350/450 to the edited one
        partly = document((900, 1100), (3000, 3500))      # 100/1100 to the other
        self.assertEqual(groups(original, other, edited, partly, edited_again, original, b"", b" \n"),
                         [0, 1, 0, 3, 0, 0, 6, 6])

    def test_order_and_white_space_of_lines_do_not_count(self):
        lines = document((0, 100)).split(b"\n")
        random.Random(1).shuffle(lines)
        self.assertEqual(groups(document((0, 100)), b"\r\n\n\t".join(lines)), [0, 0])

    def test_similar_documents_behind_another_one_of_their_bucket(self):
        # All three have band 0 in common. The last two agree in 3 of 4 hashes of every other band, so they meet nowhere
        # else, and the first is similar to neither.
        n = near_duplicates.BANDS * near_duplicates.ROWS
        signatures = np.arange(3)[:, None] * n + np.arange(n) + 1
        signatures[2] = np.where(np.arange(n) % near_duplicates.ROWS, signatures[1], signatures[2])
        signatures[:, :near_duplicates.ROWS] = 0
        self.assertEqual(near_duplicates.group(signatures), [0, 1, 1])

    def test_a_common_header_joins_nothing(self):
        # 300 documents share 20 of 60 lines (similarity 0.2) and meet in buckets; a copy of the last is found still.
        documents = [document((0, 20)) + b"".join(f"\n{i} {j}".encode() for j in range(40)) for i in range(300)]
        self.assertEqual(groups(*documents, documents[-1]), [*range(300), 299])

    def test_nothing(self):
        self.assertEqual(groups(), [])


if __name__ == "__main__":
    unittest.main()
