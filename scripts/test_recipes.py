#!/usr/bin/env python3
"""Tests of the recipes scripts/run_*.sh with a driver that only records its arguments, and of their options with the real driver
(TRAIN_GPT)."""
import glob
import os
import subprocess
import tempfile
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(__file__))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT") or os.path.join(SCRIPTS, "..", "train_gpt"))
OTHERS = {os.path.join(SCRIPTS, name) for name in ("run_quickstart.sh", "run_pipeline.sh")}
RECIPES = sorted(set(glob.glob(os.path.join(SCRIPTS, "run_*.sh"))) - OTHERS)
LAUNCHERS = {"RANK": "3", "OMPI_COMM_WORLD_RANK": "3", "MPI_LOCALRANKID": "3", "SLURM_STEP_NUM_TASKS": "8"}


class RecipeTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = directory.name
        self.data, self.out = os.path.join(self.top, "data"), os.path.join(self.top, "run")
        self.noting = os.path.join(self.top, "driver")
        with open(self.noting, "w", encoding="utf-8") as script:
            script.write('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        os.chmod(self.noting, 0o755)

    def run_recipe(self, recipe, *options, **variables):
        env = {name: value for name, value in os.environ.items()
               if name not in ("DATA", "TEXT", "TOKENIZER", "OUT", "GPUS", "STEPS", "BATCH", *LAUNCHERS)}
        env.update({"DRIVER": self.noting, "DATA": self.data, "OUT": self.out, **variables})
        return subprocess.run([recipe, *options], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)

    def arguments(self, *options, **variables):
        done = self.run_recipe(RECIPES[0], *options, **variables)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.splitlines()

    def test_recipes_are_found(self):
        self.assertEqual([os.path.basename(recipe) for recipe in RECIPES],
                         ["run_gpt2_124M.sh", "run_gpt2_1558M.sh", "run_llama_1B.sh", "run_llama_8B.sh", "run_modern_124M.sh"])

    def test_driver_accepts_their_options(self):
        os.mkdir(self.data)
        for recipe in RECIPES:
            done = self.run_recipe(recipe, DRIVER=DRIVER, GPUS="1", STEPS="10", BATCH="1")
            # Past the options, which would be exit status 2; the data is what it stumbles over.
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(self.data, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_variables_and_options(self):
        os.mkdir(self.data)
        got = self.arguments("--eval-every", "7", GPUS="2", STEPS="9", BATCH="3")
        self.assertEqual(got[:7], ["train", "--data", self.data, "--out", self.out, "--gpus", "2"])
        pairs = dict(zip(got[1::2], got[2::2]))
        self.assertEqual((pairs["--steps"], pairs["--batch-size"], got[-2:]), ("9", "3", ["--eval-every", "7"]))
        self.assertNotIn("--resume", got)
        self.assertEqual(self.arguments()[5:7], ["--gpus", "all"])

    def test_resumes_from_checkpoints(self):
        os.makedirs(os.path.join(self.out, "step_00000010"))
        os.mkdir(self.data)
        self.assertIn("--resume", self.arguments())

    def test_launched_ranks_start_no_further_ranks(self):
        os.mkdir(self.data)
        for name, value in LAUNCHERS.items():
            self.assertNotIn("--gpus", self.arguments(**{name: value}))
        self.assertIn("--gpus", self.arguments(SLURM_STEP_NUM_TASKS="1"))

    def test_no_tokens(self):
        for variables in ({}, {"RANK": "0"}):
            done = self.run_recipe(RECIPES[0], **variables)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(f"run_gpt2_124M.sh: there are no tokens in {self.data}", done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_tokenizes_text(self):
        text = os.path.join(self.top, "text")
        os.mkdir(text)
        for i in range(50):
            with open(os.path.join(text, f"{i}.txt"), "w", encoding="utf-8") as file:
                file.write(f"The cat sees {i} red stones.\n" * 40)
        done = self.run_recipe(RECIPES[0], TEXT=text, TOKENIZER="byte", DEPS="no")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.path.exists(os.path.join(self.data, "train_000000.bin")))
        self.assertTrue(os.path.exists(os.path.join(self.data, "val_000000.bin")))

    def test_no_driver(self):
        done = self.run_recipe(RECIPES[0], DRIVER=os.path.join(self.top, "nowhere"))
        self.assertEqual((done.returncode, done.stderr), (1, f"run_gpt2_124M.sh: there is no {self.top}/nowhere: run make first.\n"))


if __name__ == "__main__":
    unittest.main()
