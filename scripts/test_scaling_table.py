#!/usr/bin/env python3
"""Tests of scripts/scaling_table.py: its formulas against measurements and hand calculations."""
import argparse
import unittest

from scaling_table import GIB, Cluster, Shape, plan_stage, state_bytes

CLUSTER = Cluster(332 * GIB, 5e-6, 46.6 * GIB, 14e-6, 8, 989.4e12)
ARGS = argparse.Namespace(gradient_bytes=4, weight_bytes=2, gpus_per_machine=8)
# 10 groups of 1 GiB of weights: nine layers, and the embedding.
SHAPE = Shape("test", 10 * 2 ** 30, 9, 2 ** 30, 1e9)


class ScalingTable(unittest.TestCase):
    def test_defaults_match_measurements_on_four_gpus(self):
        for nbytes, measured in ((32 * 2 ** 20, 274), (2 ** 30, 330)):
            seconds = CLUSTER.all_reduce(nbytes, 4)
            self.assertAlmostEqual(1.5 * nbytes / seconds / GIB, measured, delta=0.01 * measured)

    def test_one_gpu_sends_nothing(self):
        for stage in (0, 1, 2, 3):
            plan = plan_stage(CLUSTER, SHAPE, stage, 1, 4, 1.0, ARGS)
            self.assertEqual((plan.sent, plan.seconds), (0, 0))

    def test_bytes_of_the_stages(self):
        n, micro_steps, part = 8, 3, 7 / 8
        sent = {stage: plan_stage(CLUSTER, SHAPE, stage, n, micro_steps, 1.0, ARGS).sent / SHAPE.weights for stage in (0, 1, 2, 3)}
        self.assertEqual(sent, {0: part * 8, 1: part * 6, 2: part * (3 * 4 + 2), 3: part * 3 * 8})

    def test_seconds_of_stage_3(self):
        # Ten groups, each gathered twice as 2 GiB and reduced once as 4 GiB, in two micro-steps.
        plan = plan_stage(CLUSTER, SHAPE, 3, 8, 2, 1.0, ARGS)
        self.assertAlmostEqual(plan.seconds, 2 * 10 * (7 / 8 * (2 + 2 + 4) / 332 + 3 * 7 * 5e-6), places=9)
        # Between machines a ring has one slow step per machine; the network cards together are faster than NVLink here.
        plan = plan_stage(CLUSTER, SHAPE, 3, 64, 1, 1.0, ARGS)
        self.assertAlmostEqual(plan.seconds, 10 * (63 / 64 * 8 / 332 + 3 * (7 * 14e-6 + 56 * 5e-6)), places=9)

    def test_slow_network_is_the_limit(self):
        slow = Cluster(332 * GIB, 0, 10 * GIB, 0, 8, 989.4e12)
        self.assertAlmostEqual(slow.gather(80 * GIB, 16), 15 / 16 * 80 / 80)
        self.assertAlmostEqual(slow.gather(80 * GIB, 8), 7 / 8 * 80 / 332)

    def test_hybrid(self):
        within = plan_stage(CLUSTER, SHAPE, 3, 8, 2, 1.0, ARGS)
        plan = plan_stage(CLUSTER, SHAPE, "hybrid", 32, 2, 1.0, ARGS)
        # An eighth of each group's gradients among four machines, over one card: trees of two levels.
        between = 10 * (2 * 3 / 4 * 0.5 / 46.6 + 2 * 2 * 14e-6)
        self.assertAlmostEqual(plan.seconds, within.seconds + between, places=9)
        self.assertAlmostEqual(plan.sent, within.sent + 2 * 3 / 4 * SHAPE.weights * 4 / 8)
        self.assertEqual(plan_stage(CLUSTER, SHAPE, "hybrid", 8, 2, 1.0, ARGS), within)

    def test_state(self):
        bytes_per_weight = {stage: state_bytes(SHAPE, stage, 16, ARGS) / SHAPE.weights for stage in (0, 1, 2, 3, "hybrid")}
        self.assertEqual(bytes_per_weight, {0: 18, 1: 6 + 12 / 16, 2: 2 + 16 / 16, 3: 18 / 16, "hybrid": 18 / 8})


if __name__ == "__main__":
    unittest.main()
