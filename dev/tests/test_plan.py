#!/usr/bin/env python3
"""`plan` for a GPU that is not here: what the CPU build prints for a GPU is what a CUDA build prints on it.

    python3 dev/tests/test_plan.py                                    the tests
    TRAIN_GPT=build/cuda/train_gpt python3 dev/tests/test_plan.py --record
                                                                writes dev/fixtures/plans/<GPU>.json on a GPU of the table that
                                                                no other program uses
"""
import glob
import json
import os
import re
import subprocess
import sys
import unittest

from harness import ROOT, run

FIXTURES = os.path.join(ROOT, "dev", "fixtures", "plans")
# A plan for the GPU that is here counts what other programs have in use there.
OF_AN_H100 = ["--gpu", "H100 80GB HBM3"]

# Each formula of kernels/scratch.h is the largest scratch of one of these, or close to it.
PLANS = [
    "--model gpt2-124M --batch-size 32 --seq-len 1024 --dtype bf16",
    "--model gpt2-124M --batch-size 8 --seq-len 1024 --dtype fp32 --recompute block",
    "--model llama-1B --batch-size 4 --seq-len 2048 --dtype bf16 --nondeterministic",
    "--model llama-3B --batch-size 1 --seq-len 8192 --dtype bf16 --master-weights off --recompute norms",
    "--model qwen3-0.6B --batch-size 1 --seq-len 256 --dtype bf16",
    "--model gpt2-124M --batch-size 16 --seq-len 4096 --dtype bf16 --max-positions 4096 --attention G",
    "--model modern-124M --batch-size 32 --seq-len 1024 --dtype bf16 --optimizer muon",
    "--model llama-8B --batch-size 1 --seq-len 2048 --dtype bf16 --world 8 --zero-stage 3 --optimizer muon",
    "--model gpt2-tiny --batch-size 1 --seq-len 64 --dtype bf16",
    "--model gpt2-1558M --batch-size 4 --seq-len 1024 --dtype bf16 --inference",
]


def plan(arguments, *more):
    done = run("plan", *arguments.split(), *more)
    if done.returncode:
        raise AssertionError(f"plan {arguments}: {done.stderr}")
    return done.stdout


class PlanTest(unittest.TestCase):
    def test_fixtures(self):
        paths = sorted(set(glob.glob(os.path.join(FIXTURES, "*.json"))) - set(glob.glob(os.path.join(FIXTURES, "*.runs.json"))))
        if not paths:
            self.skipTest("no plans of a GPU are recorded (dev/tests/test_plan.py --record on one)")
        for path in paths:
            with open(path) as file:
                recorded = json.load(file)
            for arguments, printed in recorded["plans"].items():
                with self.subTest(gpu=recorded["gpu"], arguments=arguments):
                    self.assertEqual(plan(arguments, "--gpu", recorded["gpu"]), printed)

    # The output of training on a GPU, and the most memory that nvidia-smi saw in use there.
    def test_runs_on_gpus(self):
        paths = glob.glob(os.path.join(FIXTURES, "*.runs.json"))
        self.assertTrue(paths)
        for path in paths:
            with open(path) as file:
                recorded = json.load(file)
            for measured in recorded["runs"]:
                with self.subTest(gpu=recorded["gpu"], arguments=measured["arguments"]):
                    printed = plan(measured["arguments"], "--gpu", recorded["gpu"])
                    lines = dict(re.findall(r"^  (\S.*?)  +(\S+ \S+)$", printed, re.MULTILINE))
                    lines["already in use"] = lines.pop("CUDA context")
                    for name, value in measured["printed"].items():
                        self.assertEqual(lines.get(name), value, name)
                    whole = json.loads(plan(measured["arguments"], "--gpu", recorded["gpu"], "--json"))
                    mib = (whole["total_bytes"] + whole["in_use_before"]) / 2**20
                    self.assertLess(abs(mib / measured["peak_mib"] - 1), 0.02, f"planned {mib:.0f} MiB, used {measured['peak_mib']}")

    # On a GPU of the table: the plan for its name is the plan for it. Other programs may use it.
    def test_this_gpu(self):
        build = json.loads(run("info", "--json").stdout)
        if build["backend"] != "cuda":
            self.skipTest("this build has no GPU")
        name = gpu_name()
        if run("plan", "--model", "gpt2-tiny", "--gpu", name).returncode:
            self.skipTest(f"{name} is not in the table of GPUs")
        for arguments in PLANS:
            here, there = (json.loads(plan(arguments, "--json", *more)) for more in ([], ["--gpu", name]))
            here["in_use_before"] = there["in_use_before"]
            self.assertEqual(here, there, arguments)

    def test_every_byte_of_the_state(self):
        weights = json.loads(plan("--model llama-1B --dtype bf16 --gpu 4090 --json"))["bytes"]
        fp32 = json.loads(plan("--model llama-1B --dtype fp32 --gpu 4090 --json"))["bytes"]
        self.assertEqual(2 * weights["weights"], fp32["weights"])
        self.assertEqual(weights["master weights"], fp32["weights"])
        self.assertEqual(weights["gradients"], fp32["gradients"])
        self.assertEqual(weights["program and libraries"], 64 << 20)

    def test_dtype_auto(self):
        def kept(*args):
            return json.loads(plan("--model gpt2-tiny --json", *args))["bytes"]
        self.assertEqual(kept("--gpu", "L4"), kept("--gpu", "L4", "--dtype", "bf16"))
        self.assertEqual(kept("--gpu", "L4", "--inference"), kept("--gpu", "L4", "--inference", "--dtype", "fp32"))

    def test_says_the_dtype_and_for_which_device(self):
        h100 = "bf16 (--dtype auto), on H100 80GB HBM3"
        for options, ending in (([], "auto)"), (["--gpu", "L4"], "bf16 (--dtype auto), on L4"), (OF_AN_H100, h100),
                                (["--gpu", "L4", "--inference"], "fp32, on L4"), (["--dtype", "fp32"], "fp32")):
            printed = plan("--model gpt2-tiny", *options)
            self.assertTrue(printed.splitlines()[0].endswith(ending), printed)
            self.assertEqual("  CUDA context  " in printed, "--gpu" in options)
        if "backend cpu" in run("info").stdout:
            self.assertNotIn("in use", plan("--model gpt2-tiny"))
            limited = plan("--model gpt2-tiny", "--gpu-memory", "24GiB")
            self.assertTrue(limited.splitlines()[0].endswith(h100))
            self.assertNotIn("already in use", limited)

    def test_gpus_differ_where_their_kernels_do(self):
        def activations(gpu, *more):
            plan_of_gpu = plan("--model llama-1B --batch-size 2 --seq-len 4096 --dtype bf16 --json", "--gpu", gpu, *more)
            return json.loads(plan_of_gpu)["bytes"]["activations"]
        # Hopper's single backward pass sums dq in fp32: tokens x heads x 64 floats are the largest part of the scratch.
        self.assertEqual(activations("A100-SXM4-80GB"), activations("A100-SXM4-80GB", "--nondeterministic"))
        self.assertGreater(activations("H100 80GB", "--nondeterministic"), activations("H100 80GB") + (32 << 20))

    def test_limit(self):
        arguments = "--model gpt2-124M --batch-size 32 --seq-len 1024 --dtype bf16 --gpu A10G"
        whole = json.loads(plan(arguments, "--json"))
        needed = whole["total_bytes"] + whole["in_use_before"]
        for mib, fits in ((needed // 2**20, False), (needed // 2**20 + 1, True)):
            limited = json.loads(plan(arguments, "--gpu-memory", f"{mib}MiB", "--json"))
            self.assertEqual(limited["fits"], fits)
            self.assertIn("  fits: " if fits else "  does not fit: ", plan(arguments, "--gpu-memory", f"{mib}MiB"))
        for size in ("24", "GiB", "-1GiB", "0GiB", "24 gallons", ""):
            refused = run("plan", "--model", "gpt2-tiny", "--gpu-memory", size)
            self.assertEqual(refused.returncode, 2, size)
            self.assertIn("is not an amount of memory; write it as in 24GiB (or MiB, GB, MB)", refused.stderr)
        sizes = {size: json.loads(plan(arguments, "--gpu-memory", size, "--json", "--fit"))["fit"]["available_bytes"] + whole["in_use_before"]
                 for size in ("20GiB", "20480MiB", "20GB", "20000MB")}
        self.assertEqual(list(sizes.values()), [20 << 30, 20 << 30, 20 * 10**9, 20 * 10**9])
        self.assertIn("GiB and MiB are of 1024, GB and MB of 1000", " ".join(run("plan", "--help").stdout.split()))

    def test_fit(self):
        arguments = {"--model": "gpt2-124M", "--batch-size": "12", "--seq-len": "1024", "--dtype": "bf16"}
        text = " ".join(f"{name} {value}" for name, value in arguments.items())
        seen = []
        for mib in (8000, 6400, 6000, 5600, 5200, 4200, 2000):
            limit = [*OF_AN_H100, "--gpu-memory", f"{mib}MiB"]
            fit = json.loads(plan(text, *limit, "--fit", "--json"))
            found, tried = fit["fit"], fit["fit"]["tried"]
            seen.append(found["options"])
            self.assertTrue(fit["fits"])
            self.assertEqual(found["options"], tried[-1]["options"])
            self.assertTrue(all(t["total_bytes"] > found["available_bytes"] for t in tried[:-1]), mib)
            self.assertLessEqual(tried[-1]["total_bytes"], found["available_bytes"])
            # The plan with these options is the one that is shown.
            options = found["options"].split()
            changed = {**arguments, **dict(zip(options[::2], options[1::2]))}
            again = json.loads(plan(" ".join(f"{name} {value}" for name, value in changed.items()), *limit, "--json"))
            self.assertEqual(again["bytes"], fit["bytes"])
            self.assertEqual(again["total_bytes"], tried[-1]["total_bytes"])
        self.assertEqual(seen[0], "")
        self.assertEqual(len(set(seen)), len(seen), seen)
        kept = json.loads(plan(text, *OF_AN_H100, "--gpu-memory", "2800MiB", "--fit", "--json", "--recompute", "norms", "--master-weights", "off"))
        self.assertFalse([t for t in kept["fit"]["tried"] if "recompute activation" in t["options"] or "master" in t["options"]])

    def test_fit_plans_what_plan_plans(self):
        """On a CPU the copy for checkpoints counts, too."""
        fit = json.loads(plan("--model gpt2-124M --batch-size 4 --seq-len 64 --fit --json"))
        self.assertEqual(fit["fit"]["tried"][-1]["total_bytes"], fit["total_bytes"])
        self.assertEqual(fit["total_bytes"], sum(fit["bytes"].values()))

    def test_fit_text_and_refusals(self):
        none = run("plan", "--model", "llama-8B", *OF_AN_H100, "--gpu-memory", "24GiB", "--fit")
        self.assertEqual((none.returncode, none.stderr.count("\n")), (1, 1))
        self.assertIn("--fit: nothing fits into 23.49 GiB; the least is ", none.stderr)
        arguments = "--model gpt2-124M --batch-size 12 --seq-len 1024 --dtype bf16"
        short = plan(arguments, *OF_AN_H100, "--gpu-memory", "6000MiB", "--fit")
        self.assertIn(", the fastest first; 2 take more (--verbose lists them)\n  --recompute norms: ", short)
        self.assertIn("\n  as given: ", plan(arguments, *OF_AN_H100, "--gpu-memory", "6000MiB", "--fit", "--verbose"))
        self.assertIn("\n  as given: ", plan(arguments, "--gpu", "4090", "--fit"))
        self.assertEqual(run("plan", "--model", "gpt2-tiny", "--fit", "--inference").returncode, 2)

    def test_gradients_in_bf16(self):
        arguments = ("--model llama-8B --batch-size 1 --seq-len 2048 --gpu-memory 80GiB --dtype bf16 --optimizer-dtype bf16 "
                     "--master-weights off")
        whole, half = (json.loads(plan(arguments, "--json", "--grad-dtype", dtype)) for dtype in ("fp32", "bf16"))
        self.assertEqual(2 * half["bytes"]["gradients"], whole["bytes"]["gradients"])
        state = sum(half["bytes"][line] for line in ("weights", "gradients", "optimizer (m, v)"))
        self.assertAlmostEqual(state / whole["weights"], 8, delta=0.01)
        # fp32 buffers: two layers, and the embedding or the head.
        hidden, ffn, kv, vocab = 4096, 14336, 1024, 128256
        layer = 2 * hidden * (hidden + kv) + 3 * hidden * ffn
        self.assertAlmostEqual(half["bytes"]["gradients in progress"] / (4 * (2 * layer + hidden * vocab)), 1, delta=0.001)
        self.assertNotIn("gradients in progress", whole["bytes"])
        # Added in the matmuls, they need no buffers; the embedding, the norms have sums in fp32.
        added = json.loads(plan(arguments, "--json", "--grad-dtype", "bf16", "--grad-rounding", "nearest"))
        self.assertEqual(added["bytes"]["gradients"], half["bytes"]["gradients"])
        self.assertAlmostEqual(added["bytes"]["gradients in progress"] / (4 * hidden * vocab), 1, delta=0.001)
        # Several ranks add up one group at a time in fp32.
        ranks = json.loads(plan(arguments, "--json", "--grad-dtype", "bf16", "--grad-rounding", "nearest", "--world", "2", "--zero-stage", 1))
        self.assertAlmostEqual(ranks["bytes"]["gradients in progress"] / (4 * 2 * hidden * vocab), 1, delta=0.001)
        for given, message in (("--dtype fp32", "not of fp32; add --dtype bf16"), ("--dtype bf16 --world 2 --zero-stage 2", "2 ranks add up")):
            refused = run("plan", "--model", "llama-8B", "--gpu-memory", "80GiB", "--grad-dtype", "bf16", "--grad-rounding", "nearest",
                          *given.split())
            self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1))
            self.assertIn(message, refused.stderr)

    def test_offload(self):
        arguments = "--model llama-8B --batch-size 1 --seq-len 2048 --gpu-memory 80GiB --dtype bf16 --json --offload"
        plans = {what: json.loads(plan(arguments, what)) for what in ("none", "optimizer", "master", "optimizer,master")}
        kept = plans["none"]
        for what, lines in (("optimizer", ["optimizer (m, v)"]), ("master", ["master weights"]), ("optimizer,master", ["optimizer (m, v)", "master weights"])):
            offloaded = plans[what]
            for line in lines:
                self.assertEqual(offloaded["host_bytes"][line], kept["bytes"][line])
                self.assertNotIn(line, offloaded["bytes"])
                self.assertNotIn(line, kept["host_bytes"])
            self.assertEqual(offloaded["total_bytes"], kept["total_bytes"] - sum(kept["bytes"][line] for line in lines))
        if json.loads(run("info", "--json").stdout)["backend"] == "cpu":  # there it changes nothing
            self.assertEqual(*(plan("--model gpt2-tiny --recompute block --offload", what) for what in ("none", "optimizer,activations")))

    def test_offloaded_activations(self):
        """With --recompute block the inputs of all blocks but the last go to the host, and two to three stay at a time."""
        arguments = "--model llama-8B --batch-size 4 --seq-len 2048 --gpu-memory 80GiB --dtype bf16 --recompute block --json --offload"
        kept, moved, all_moved = (json.loads(plan(arguments, what)) for what in ("none", "activations", "activations,optimizer"))
        layers, one = 32, 4 * 2048 * 4096 * 2
        self.assertEqual(moved["host_bytes"]["block inputs"], (layers - 1) * one)
        self.assertNotIn("block inputs", kept["host_bytes"])
        saved = kept["total_bytes"] - moved["total_bytes"]
        self.assertEqual(saved, kept["bytes"]["activations"] - moved["bytes"]["activations"])
        self.assertTrue((layers - 3) * one <= saved < layers * one, saved / one)
        self.assertIn("optimizer (m, v)", all_moved["host_bytes"])
        self.assertEqual(all_moved["host_bytes"]["block inputs"], moved["host_bytes"]["block inputs"])

    def test_offload_and_fit(self):
        fit = json.loads(plan("--model llama-1B --batch-size 4 --seq-len 2048 --gpu-memory 14GiB --dtype bf16 --json --fit --offload master",
                              *OF_AN_H100))
        self.assertFalse([t for t in fit["fit"]["tried"] if "--master-weights" in t["options"]])
        arguments = "--model llama-8B --dtype bf16 --batch-size 16 --seq-len 4096 --master-weights off --optimizer-dtype bf16 --json --fit"
        fit = json.loads(plan(arguments, *OF_AN_H100, "--gpu-memory", "78GiB"))
        self.assertEqual(fit["fit"]["options"], "--recompute block:31 --grad-dtype bf16 --grad-rounding nearest --offload activations")
        first = next(i for i, tried in enumerate(fit["fit"]["tried"]) if "activations" in tried["options"])
        self.assertTrue(all("--recompute block" in tried["options"] for tried in fit["fit"]["tried"][first - 1:]))

    def test_refusals(self):
        for arguments, words in ((["--dtype", "fp32"], "--offload optimizer,master: there are no master weights with --dtype fp32; leave master out"),
                                 (["--dtype", "bf16", "--master-weights", "off"], "there are no master weights with --master-weights off"),
                                 (["--inference"], "--offload")):
            refused = run("plan", "--model", "gpt2-tiny", "--offload", "optimizer,master", *arguments)
            self.assertEqual(refused.returncode, 2)
            self.assertIn(words, refused.stderr)
        for arguments, words in ((["--gpu", "H100"], "fits several GPUs: H100 80GB HBM3, "), (["--gpu", "MI300X"], "is not in the table of GPUs: ")):
            refused = run("plan", "--model", "gpt2-tiny", *arguments)
            self.assertEqual((refused.returncode, refused.stderr.count("\n")), (1, 1))
            self.assertIn(words, refused.stderr)
        self.assertEqual(run("plan", "--model", "gpt2-tiny", "--gpu", "L4", "--generate").returncode, 2)
        self.assertIn("does not fit", plan("--model llama-8B --dtype bf16 --gpu-memory 24GiB"))


def gpu_name():
    return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"], capture_output=True, text=True,
                          check=True).stdout.strip()


def record():
    name = gpu_name()
    os.makedirs(FIXTURES, exist_ok=True)
    path = os.path.join(FIXTURES, name.removeprefix("NVIDIA ").replace(" ", "_") + ".json")
    with open(path, "w") as file:
        json.dump({"gpu": name, "plans": {arguments: plan(arguments) for arguments in PLANS}}, file, indent=1)
        file.write("\n")
    print(path)


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        unittest.main()
