#!/usr/bin/env python3
"""bench_attention.py: parsing of dev/bench_attention's output, and the table (needs neither PyTorch nor a GPU)."""
import os
import re
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench_attention  # noqa: E402
from bench_attention import CUDNN, DETERMINISTIC, FLASH, NONDETERMINISTIC, OURS, BenchError, Shape  # noqa: E402

MACHINE = "limits measured now: copy 2810.1 GB/s, triad 2790.0 GB/s, 51000 GFLOP/s fp32, 760000 GFLOP/s bf16 (A GPU, sm_90)"
FORWARD = "forward/bf16/B:64/T:1024/NH:12/NKV:12/HS:64                  0.3000 ms     343.9 TFLOP/s    45% of peak"
BACKWARD = "backward/bf16/B:64/T:1024/NH:12/NKV:12/HS:64                 1.0000 ms     257.9 TFLOP/s    34% of peak"
FASTER = BACKWARD.replace("backward", "backward_nondeterministic").replace("1.0000", "0.8000")
GROUPED = [line.replace("NKV:12", "NKV:4") for line in (FORWARD, BACKWARD, FASTER)]
FP32 = FORWARD.replace("bf16", "fp32")
GPT2, GQA = Shape(64, 1024, 12, 12, 64), Shape(64, 1024, 12, 4, 64)


class Parse(unittest.TestCase):
    def test_bf16_alone(self):
        times, machine = bench_attention.parse_bench("\n".join([MACHINE, FORWARD, FP32, BACKWARD, FASTER, *GROUPED, ""]))
        self.assertEqual(machine, MACHINE)
        self.assertEqual(times, {(GPT2, "forward"): 0.3, (GPT2, "backward"): 1.0, (GPT2, NONDETERMINISTIC): 0.8,
                                 (GQA, "forward"): 0.3, (GQA, "backward"): 1.0, (GQA, NONDETERMINISTIC): 0.8})

    def test_missing_results(self):
        whole = [MACHINE, FORWARD, BACKWARD, FASTER, *GROUPED]
        for i in range(len(whole)):
            with self.assertRaises(BenchError):
                bench_attention.parse_bench("\n".join(whole[:i] + whole[i + 1:]))
        with self.assertRaises(BenchError):
            bench_attention.parse_bench("\n".join([MACHINE, FP32]))

    def test_program(self):
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "bench")

            def run(script):
                with open(program, "w", encoding="utf-8") as file:
                    file.write("#!/bin/sh\n" + script)
                os.chmod(program, 0o755)
                return bench_attention.run_bench(program)

            lines = "\n".join([MACHINE, FORWARD, BACKWARD, FASTER])
            times, _ = run(f'[ "$*" = --benchmark_filter=/bf16/ ] && cat <<END\n{lines}\nEND\n')
            self.assertEqual(len(times), 3)
            with self.assertRaisesRegex(BenchError, "status 1: error: no GPU"):
                run("echo first >&2; echo error: no GPU >&2; exit 1")
            os.remove(program)
            with self.assertRaises(OSError):
                bench_attention.run_bench(program)

    def test_timing_matches_the_project(self):
        sources = []
        for name in ("bench_util.cpp", "cache_flush.h"):
            with open(os.path.join(ROOT, "dev", "bench", name), encoding="utf-8") as file:
                sources.append(file.read())
        runs = re.search(r"WARM_UP = (\d+), RUNS = (\d+);", sources[0])
        mib = re.search(r"BYTES = size_t\((\d+)\) << 20;", sources[1])
        self.assertEqual((int(runs[1]), int(runs[2]), int(mib[1]) << 20),
                         (bench_attention.WARM_UP, bench_attention.RUNS, bench_attention.FLUSH_BYTES))


class Table(unittest.TestCase):
    def test_cells(self):
        def turn(factor):
            times = {(GPT2, "forward", OURS): 0.25, (GPT2, "backward", OURS): 1.0, (GPT2, NONDETERMINISTIC, OURS): 0.8,
                     (GPT2, "forward", CUDNN): 0.3 * factor,
                     (GPT2, "backward", CUDNN): 0.9, (GPT2, "backward", CUDNN + DETERMINISTIC): 1.1}
            return {**times, (GQA, "forward", OURS): 0.5, (GQA, "backward", OURS): 2.0, (GQA, NONDETERMINISTIC, OURS): 2.0,
                    (GQA, "forward", FLASH): 0.25}

        # 64·12·(1024·1025/2) pairs · 64 · 2 · 2 products = 0.10318 TFLOP forward, 2.5 times that backward.
        self.assertEqual(bench_attention.table([turn(1), turn(10), turn(1.1)]).splitlines(), [
            "| shape | pass | this project | cuDNN | cuDNN, deterministic | FlashAttention-2 | FlashAttention-2, deterministic |",
            "|---|---|---|---|---|---|---|",
            "| B64 H12 T1024 D64 | forward | 413 | 313 (1.32x) |  |  |  |",
            "| B64 H12 T1024 D64 | backward | 258 | 287 (0.90x) | 234 (1.10x) |  |  |",
            "| B64 H12 T1024 D64 | backward, nondeterministic | 322 | 287 (1.12x) |  |  |  |",
            "| B64 H12/4 T1024 D64 | forward | 206 |  |  | 413 (0.50x) |  |",
            "| B64 H12/4 T1024 D64 | backward | 129 |  |  |  |  |",
            "| B64 H12/4 T1024 D64 | backward, nondeterministic | 129 |  |  |  |  |"])
        self.assertAlmostEqual(bench_attention.largest_spread([turn(1), turn(1.1)]), 0.1)


if __name__ == "__main__":
    unittest.main()
