#!/usr/bin/env python3
"""Gradients on several ranks: runs dev/tests/test_gradients.cpp."""
import unittest

import mpi


class SeveralRanksTest(unittest.TestCase):
    def test_on_several_ranks(self):
        mpi.run_test_on_several_ranks(self, "test_gradients")


if __name__ == "__main__":
    unittest.main()
