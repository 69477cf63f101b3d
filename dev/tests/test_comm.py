#!/usr/bin/env python3
"""Collectives between processes: runs the binary of dev/tests/test_comm.cpp on 1 to 4 ranks, and with a rank that hangs or dies. The
binary is in the dev/ directory beside the driver (TRAIN_GPT), whose build decides between MPI and NCCL."""
import os
import re
import time
import unittest

import mpi
from harness import DRIVER

BINARY = os.path.join(os.path.dirname(DRIVER), "dev", "test_comm")
WHY_NOT = mpi.why_not()
LIBRARY = mpi.collectives()
DIES, HANGS = (["--gtest_also_run_disabled_tests", f"--gtest_filter=Comm.DISABLED_OneRank{what}"] for what in ("Dies", "Hangs"))


@unittest.skipIf(WHY_NOT, WHY_NOT)
class MpiTest(unittest.TestCase):
    def test_collectives(self):
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks):
                done = mpi.mpirun(ranks, [BINARY], TEST_COMM_SIZE=str(ranks))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(len(re.findall(r"\[  PASSED  \]", done.stdout)), ranks, done.stdout)

    def test_hanging_rank_ends_the_run_with_an_error(self):
        start = time.monotonic()
        done = mpi.mpirun(2, [BINARY, *HANGS], TEST_COMM_SIZE="2", TEST_COMM_TIMEOUT="5")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 0: all_reduce of 1000 fp32: no answer from the other ranks within 5 s (--comm-timeout); "
                      "one of them has ended or hangs", done.stdout + done.stderr)
        self.assertLess(time.monotonic() - start, 50)

    def test_dead_rank_ends_the_run(self):
        start = time.monotonic()
        done = mpi.mpirun(3, [BINARY, *DIES], TEST_COMM_SIZE="3", TEST_COMM_TIMEOUT="20")
        self.assertNotEqual(done.returncode, 0)
        self.assertLess(time.monotonic() - start, 30)

    def test_ranks_without_mpirun_are_rejected(self):
        done = mpi.run([BINARY, "--gtest_filter=Comm.WorldMatchesTheLauncher"], RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                       LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        self.assertIn("torchrun started rank 0 of 2, but to MPI it is rank 0 of 1; use the mpirun "
                      "of the MPI library that this CPU build was linked with", done.stdout + done.stderr)


@unittest.skipIf(WHY_NOT, WHY_NOT)
class NcclTest(unittest.TestCase):
    def launch(self, ranks, *options, **variables):
        """Each rank's exit status and output, and the seconds until all had ended."""
        start = time.monotonic()
        processes = mpi.start_as_torchrun_does(ranks, [BINARY, *options], TEST_COMM_SIZE=str(ranks), **variables)
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [process.returncode for process in processes], outputs, time.monotonic() - start

    def test_collectives(self):
        for ranks in (2, 3, 4):
            if ranks > mpi.gpus():
                break
            with self.subTest(ranks=ranks):
                statuses, outputs, _ = self.launch(ranks)
                self.assertEqual(statuses, [0] * ranks, "\n".join(outputs))

    def test_dead_rank_is_named_by_the_others(self):
        statuses, outputs, seconds = self.launch(2, *DIES, TEST_COMM_TIMEOUT="60")
        self.assertEqual(statuses, [1, 3], "\n".join(outputs))
        self.assertRegex(outputs[0], r"rank 0: \w+.*: rank 1 has ended")
        self.assertLess(seconds, 40)  # long before the time-out

    def test_hanging_rank_ends_the_run_within_the_timeout(self):
        statuses, outputs, seconds = self.launch(2, *HANGS, TEST_COMM_TIMEOUT="10")
        self.assertEqual(statuses[0], 1, "\n".join(outputs))
        self.assertRegex(outputs[0], r"rank 0: all_reduce of 1000 fp32: not done within 10 s \(--comm-timeout\)")
        self.assertLess(seconds, 40)

    def test_ranks_that_share_a_gpu_are_rejected(self):
        statuses, outputs, _ = self.launch(2, "--gtest_filter=Comm.WorldMatchesTheLauncher", CUDA_VISIBLE_DEVICES="0")
        self.assertEqual(statuses, [1, 1], "\n".join(outputs))
        for output in outputs:
            self.assertRegex(output, r"rank \d: ranks 0 and 1 on \S+ have the same GPU \(GPU-[0-9a-f]{32}\); start as many ranks as "
                                     r"there are GPUs")


class NoLibraryTest(unittest.TestCase):
    def test_ranks_are_rejected(self):
        done = mpi.run([BINARY, "--gtest_filter=Comm.WorldMatchesTheLauncher"], RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                       LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        self.assertRegex(done.stdout + done.stderr, "torchrun started 2 ranks, but this build has no library to connect them; install ")


# Only the class of this build, so that the tests of the others are not listed as skipped.
if LIBRARY.startswith("NCCL"):
    del MpiTest, NoLibraryTest
elif LIBRARY.startswith("MPI"):
    del NcclTest, NoLibraryTest
else:
    del MpiTest, NcclTest


if __name__ == "__main__":
    unittest.main()
