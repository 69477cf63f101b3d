#!/usr/bin/env python3
"""Gradients on several ranks: runs the binary of dev/test_gradients.cpp beside the driver (TRAIN_GPT)."""
import os
import re
import unittest

import mpi

DRIVER = os.environ.get("TRAIN_GPT", "")
BINARY = os.path.join(os.path.dirname(DRIVER), "dev", "test_gradients")
WHY_NOT = mpi.why_not(DRIVER)


@unittest.skipIf(WHY_NOT, WHY_NOT)
class SeveralRanksTest(unittest.TestCase):
    def test_on_several_ranks(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                done = mpi.mpirun(ranks, [BINARY])
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(len(re.findall(r"\[  PASSED  \]", done.stdout)), ranks, done.stdout)


if __name__ == "__main__":
    unittest.main()
