#!/usr/bin/env python3
"""Tests of dev/peers/scaling_table.py: its formulas against measurements and hand calculations."""
import argparse
import unittest

from scaling_table import GIB, Cluster, Shape, plan_stage, state_bytes

CLUSTER = Cluster(326 * GIB, 4.6e-6, 46.6 * GIB, 14e-6, 8, 989.4e12)  # the defaults
ARGS = argparse.Namespace(gradient_bytes=4, weight_bytes=2, gpus_per_machine=8)
# 10 groups of 1 GiB of weights: nine layers, and the embedding.
SHAPE = Shape("test", 10 * 2 ** 30, 9, 2 ** 30, 1e9)


class ScalingTable(unittest.TestCase):
    def test_defaults_match_measurements_on_eight_gpus(self):
        # The mean of reduce_scatter and all_gather of 64 MiB and 1 GiB (docs/log/communication.md), GiB/s of the bus.
        for nbytes, measured in ((64 * 2 ** 20, 272.8), (2 ** 30, 322.1)):
            seconds = CLUSTER.gather(nbytes, 8)
            self.assertAlmostEqual(7 / 8 * nbytes / seconds / GIB, measured, delta=0.01 * measured)

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
        self.assertAlmostEqual(plan.seconds, 2 * 10 * (7 / 8 * (2 + 2 + 4) / 326 + 3 * 7 * 4.6e-6), places=9)
        # Between machines a ring has one slow step per machine; the network cards together are faster than NVLink here.
        plan = plan_stage(CLUSTER, SHAPE, 3, 64, 1, 1.0, ARGS)
        self.assertAlmostEqual(plan.seconds, 10 * (63 / 64 * 8 / 326 + 3 * (7 * 14e-6 + 56 * 4.6e-6)), places=9)

    def test_slow_network_is_the_limit(self):
        slow = Cluster(326 * GIB, 0, 10 * GIB, 0, 8, 989.4e12)
        self.assertAlmostEqual(slow.gather(80 * GIB, 16), 15 / 16 * 80 / 80)
        self.assertAlmostEqual(slow.gather(80 * GIB, 8), 7 / 8 * 80 / 326)

    def test_hybrid(self):
        within = plan_stage(CLUSTER, SHAPE, 3, 8, 2, 1.0, ARGS)
        plan = plan_stage(CLUSTER, SHAPE, "hybrid", 32, 2, 1.0, ARGS)
        # An eighth of each group's gradients among four machines, over one card: trees of two levels.
        between = 10 * (2 * 3 / 4 * 0.5 / 46.6 + 2 * 2 * 14e-6)
        self.assertAlmostEqual(plan.seconds, within.seconds + between, places=9)
        self.assertAlmostEqual(plan.sent, within.sent + 2 * 3 / 4 * SHAPE.weights * 4 / 8)
        self.assertEqual(plan_stage(CLUSTER, SHAPE, "hybrid", 8, 2, 1.0, ARGS), within)

    def test_update_waits_for_weights(self):
        # Stage 1: ten groups of 4 GiB of gradients behind two thirds of 30 s; 2 GiB of weights each behind nothing.
        plan = plan_stage(CLUSTER, SHAPE, 1, 8, 1, 30.0, ARGS)
        weights = 10 * (7 / 8 * 2 / 326 + 7 * 4.6e-6)
        self.assertAlmostEqual(plan.exposed, weights, places=9)
        # With 0.03 s of computation 0.02 s of the gradients' time is hidden.
        plan = plan_stage(CLUSTER, SHAPE, 1, 8, 1, 0.03, ARGS)
        self.assertAlmostEqual(plan.exposed, weights + 10 * (7 / 8 * 4 / 326 + 7 * 4.6e-6) - 0.02, places=9)

    def test_state(self):
        bytes_per_weight = {stage: state_bytes(SHAPE, stage, 16, ARGS) / SHAPE.weights for stage in (0, 1, 2, 3, "hybrid")}
        self.assertEqual(bytes_per_weight, {0: 18, 1: 6 + 12 / 16, 2: 2 + 16 / 16, 3: 18 / 16, "hybrid": 18 / 8})


if __name__ == "__main__":
    unittest.main()
