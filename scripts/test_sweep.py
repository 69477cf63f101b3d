#!/usr/bin/env python3
"""sweep.py: combinations, seeds of the best one, interruption and going on, errors."""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "dev", "tests"))
from harness import DRIVER, cuda  # noqa: E402

FILE = """
[common]
data = "{data}"
model = "gpt2-tiny"
layers = 1
channels = 32
heads = 1
vocab-size = 64
steps = {steps}
batch-size = 1
seq-len = 16
warmup = 0
eval-every = {steps}
save-every = 0
seeds = [1, 2]
[arms.adamw]
lr = [1e-4, 1e-2, 0]
[arms.muon]
optimizer = "muon"
"""


class SweepTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        random = np.random.default_rng(0)
        for split, count in ("train", 4000), ("val", 200):
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, count
            with open(os.path.join(self.root, f"{split}_000000.bin"), "wb") as file:
                file.write(header.tobytes() + (random.random(count) ** 4 * 64).astype("<u2").tobytes())

    def sweep(self, text, *options, env=None):
        path = os.path.join(self.root, "arms.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "sweep.py"), path, "--driver", DRIVER, "--out",
                               os.path.join(self.root, "runs"), *options], env=env, capture_output=True, text=True, check=False)

    def results(self):
        with open(os.path.join(self.root, "runs", "sweep.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_best_of_each_arm_takes_all_seeds(self):
        text = FILE.format(data=self.root, steps=40)
        done = self.sweep(text, "--jobs", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        seeds = {(r["arm"], r["options"].get("lr")): r["seeds"] for r in self.results()}
        self.assertEqual(seeds, {("adamw", 0.01): [1, 2], ("adamw", 1e-4): [1], ("adamw", 0): [1], ("muon", None): [1, 2]})
        best, *others = [r for r in self.results() if r["arm"] == "adamw"]
        self.assertEqual(best["options"], {"lr": 0.01})
        self.assertEqual(best["tokens"], 640)
        for other in others:
            self.assertLess(sum(best["values"]) / 2, other["values"][0])
        row = next(line for line in done.stdout.splitlines() if "lr=0.01" in line)
        self.assertTrue(row.endswith("|  |"), row)  # not at an edge
        again = self.sweep(text)
        self.assertEqual((again.returncode, again.stdout), (0, done.stdout))
        self.assertNotIn("$", again.stderr)  # nothing is trained again
        at_edge = self.sweep(text.replace("[1e-4, 1e-2, 0]", "[0, 1e-2]"))
        self.assertIn("| lr |", at_edge.stdout)

    def test_climbs_to_the_best_neighbour(self):
        text = FILE.format(data=self.root, steps=40).replace("steps = 40", "tokens = 1280\ntuning-tokens = 640\nsearch = 'climb'")
        text = text.replace("lr = [1e-4, 1e-2, 0]", "lr = 1\nlr-scale = [0, 1e-2, 1e-6, 1e-5, 1e-4]\ntotal-batch-tokens = [64, 16, 80]")
        done = self.sweep(text.split("[arms.muon]")[0], "--jobs", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        tuned = {(r["options"]["lr-scale"], r["options"]["total-batch-tokens"]): r for r in self.results() if r["tokens"] < 1000}
        # The middle is (1e-6, 16). Uphill is 1e-2, which wins at every batch size; from there 0 is a neighbour, 1e-4 is not.
        self.assertEqual(set(tuned), {(1e-6, 16), (1e-2, 16), (1e-5, 16), (1e-6, 64), (1e-6, 80),
                                      (0, 16), (1e-2, 64), (1e-2, 80)})
        longer = [r for r in self.results() if r["tokens"] == 1280]
        self.assertEqual([(r["options"], r["seeds"]) for r in longer], [({"lr-scale": 1e-2, "total-batch-tokens": 16}, [1, 2])])
        self.assertIn("--lr 0.01", done.stderr)
        self.assertNotIn("lr-scale", done.stderr.replace("lr-scale=", ""))
        self.assertEqual([line.split("|")[2].strip() for line in done.stdout.splitlines()[2:4]],
                         ["lr-scale=0.01 total-batch-tokens=16"] * 2)
        again = self.sweep(text.split("[arms.muon]")[0])
        self.assertEqual((again.returncode, again.stdout), (0, done.stdout))
        self.assertNotIn("$", again.stderr)

    def test_runs_go_to_gpus_that_are_there(self):
        """A driver in Python says how many GPUs it sees, and notes on which one a run was started."""
        text = FILE.format(data=self.root, steps=2).split("[arms.muon]")[0].replace("[1, 2]", "[1]")
        driver, notes = os.path.join(self.root, "driver"), os.path.join(self.root, "gpus")
        for count, visible, expected in ((1, None, {"0"}), (2, None, {"0", "1"}), (2, "5,GPU-3f", {"5", "GPU-3f"}),
                                         (1, "7,99,2", {"7"}), (0, None, {"none"})):
            with open(driver, "w", encoding="utf-8") as file:
                file.write(f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "info":
    print(json.dumps({{"gpus": {count}}} if {count} else {{}}))
else:
    with open({notes!r}, "a") as notes:
        notes.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
    out = sys.argv[sys.argv.index("--out") + 1]
    os.makedirs(out)
    with open(out + "/log.jsonl", "w") as log:
        for line in ({{"step": 1, "loss": 1, "lr": 1, "grad_norm": 1, "ms": 1, "tokens_per_s": 16}}, {{"step": 1, "val_loss": 1}}):
            log.write(json.dumps(line) + "\\n")
""")
            os.chmod(driver, 0o755)
            for left in notes, os.path.join(self.root, "runs"):
                shutil.rmtree(left) if os.path.isdir(left) else os.path.exists(left) and os.remove(left)
            env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
            done = self.sweep(text, "--jobs", "3", "--driver", driver, env={**env, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})})
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(notes, encoding="utf-8") as file:
                self.assertEqual(set(file.read().split()), expected)

    def test_goes_on_after_its_time(self):
        # Seconds of training: on a busy GPU a run starts for longer than twice the time that it then trains.
        steps = 200_000 if cuda() else 12_000
        text = FILE.format(data=self.root, steps=steps).replace("[1e-4, 1e-2, 0]", "1e-3").replace("[1, 2]", "[1]")
        for minutes in ("0.01", "0.02", "0.03", "0.05", "0.1", "0.2"):  # until the run has come to its first step
            stopped = self.sweep(text, "--minutes", minutes, "--arms", "adamw")
            self.assertEqual(stopped.returncode, 3, stopped.stderr)
            if glob.glob(os.path.join(self.root, "runs", "*", "*", "*", "step_*")):
                break
        done = self.sweep(text, "--arms", "adamw")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--resume", done.stderr)
        self.assertEqual(self.results()[0]["tokens"], 16 * steps)

    def test_flags(self):
        text = FILE.format(data=self.root, steps=2).replace("[1e-4, 1e-2, 0]", "1e-3\ndocument-mask = false")
        done = self.sweep(text.replace("[1, 2]", "[1]") + "overfit-one-batch = [true, false]\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        commands = [line.split() for line in done.stderr.splitlines() if line.startswith("$")]
        self.assertEqual(["--overfit-one-batch" in words for words in commands], [False, True, False])
        self.assertFalse(any("--document-mask" in words or "False" in words for words in commands))

    def test_an_arm_like_another(self):
        text = FILE.format(data=self.root, steps=2).replace("[1e-4, 1e-2, 0]", "1e-3\nhead-lr = 1e-2\ntied = 'no'\nlr-scale = 2")
        text = text.replace("[1, 2]", "[1]").replace("[arms.muon]", "[arms.muon]\nlike = 'adamw'\nhead-lr = false\ntied = 'yes'\nlr-scale = 4")
        done = self.sweep(text)
        self.assertEqual(done.returncode, 0, done.stderr)
        adamw, muon = (line for line in done.stderr.splitlines() if line.startswith("$"))
        for words, line in ((("--lr 0.002", "--head-lr 0.02", "--tied no"), adamw), (("--lr 0.004", "--tied yes", "--optimizer muon"), muon)):
            for word in words:
                self.assertIn(f" {word} ", line + " ")
        self.assertNotIn("--head-lr", muon)

    def test_tokens_stand_for_steps(self):
        text = FILE.format(data=self.root, steps=2).replace("steps = 2", "tokens = 1e3").replace("[1e-4, 1e-2, 0]", "1e-3")
        text = text.replace("[1, 2]", "[1]").replace("[arms.muon]", "total-batch-tokens = [16, 64]\n[arms.muon]\ntotal-batch-tokens = 160")
        done = self.sweep(text)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = {(r["arm"], r["options"].get("total-batch-tokens")): r["tokens"] for r in self.results()}
        self.assertEqual(found, {("adamw", 16): 992, ("adamw", 64): 1024, ("muon", None): 960})  # 1000/16 is 62.5, to even
        for wrong in ("tokens = 8", "tokens = 'x'", "steps = 3"):
            done = self.sweep(text + wrong + "\n")
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("arm muon: tokens is", done.stderr)

    def test_errors(self):
        for text, message in (("[common]\n", "at least one [arms.NAME]"), ("[arms.a]\nlr = \n", "arms.toml"),
                              ("[arms]\na = 1\n", "at least one [arms.NAME]"), ("arms = 1\n", "at least one [arms.NAME]"),
                              ("[common]\nseeds = []\n[arms.a]\n", "seeds is []; give a list"),
                              ("[common]\nseeds = 1\n[arms.a]\n", "seeds is 1; give a list"),
                              ("[common]\nsearch = 'x'\n[arms.a]\n", "search is x; choose from grid, climb"),
                              ("[arms.a]\nlike = 'b'\n", "like is b in [arms.a]; name another arm"),
                              ("[arms.a]\nlike = 'b'\n[arms.b]\nlike = 'a'\n", "like is a in [arms.b]; name another arm"),
                              ("[arms.a]\nmodle = 'x'\n", "modle")):
            done = self.sweep(text)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(message, done.stderr.strip().splitlines()[-1])
        done = self.sweep(FILE.format(data=self.root, steps=4), "--arms", "other")
        self.assertIn("has no arm other; it has adamw, muon", done.stderr)
        done = self.sweep(FILE.format(data=self.root, steps=4), "--jobs", "0")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--jobs is 0; it must be at least 1", done.stderr)


if __name__ == "__main__":
    unittest.main()
