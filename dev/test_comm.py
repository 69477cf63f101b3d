#!/usr/bin/env python3
"""The collectives between processes: dev/test_comm.cpp's binary under mpirun on 1 to 4 ranks, and with a rank that hangs or
dies. The binary is found beside the driver (TRAIN_GPT)."""
import os
import re
import time
import unittest

import mpi

DRIVER = os.environ.get("TRAIN_GPT", "")
BINARY = os.path.join(os.path.dirname(DRIVER), "dev", "test_comm")
WHY_NOT = mpi.why_not(DRIVER)


@unittest.skipIf(WHY_NOT, WHY_NOT)
class CommTest(unittest.TestCase):
    def test_collectives(self):
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks):
                done = mpi.mpirun(ranks, [BINARY], TEST_COMM_SIZE=str(ranks))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(len(re.findall(r"\[  PASSED  \]", done.stdout)), ranks, done.stdout)

    def test_a_rank_that_hangs_ends_the_run_with_a_line_that_names_it(self):
        start = time.monotonic()
        done = mpi.mpirun(2, [BINARY, "--gtest_also_run_disabled_tests", "--gtest_filter=Comm.DISABLED_OneRankHangs"],
                          TEST_COMM_SIZE="2", TEST_COMM_TIMEOUT="1.5")
        seconds = time.monotonic() - start
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 0: all_reduce of 1000 fp32: no answer from the other ranks within 1.5 s (--comm-timeout); "
                      "one of them has ended or hangs", done.stdout + done.stderr)
        self.assertLess(seconds, 20)

    def test_a_rank_that_dies_ends_the_run(self):
        start = time.monotonic()
        done = mpi.mpirun(3, [BINARY, "--gtest_also_run_disabled_tests", "--gtest_filter=Comm.DISABLED_OneRankDies"],
                          TEST_COMM_SIZE="3", TEST_COMM_TIMEOUT="20")
        self.assertNotEqual(done.returncode, 0)
        self.assertLess(time.monotonic() - start, 30)

    def test_ranks_without_mpirun_are_refused_in_one_line(self):
        done = mpi.run([BINARY, "--gtest_filter=Comm.WorldIsTheLaunchers"], RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                       LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        self.assertIn("torchrun started rank 0 of 2, but to MPI it is rank 0 of 1; start the build for the CPU with the mpirun "
                      "of the MPI that it was built with", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
