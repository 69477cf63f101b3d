#!/usr/bin/env python3
"""`info`, `plan` and --help, and commands that a launcher starts."""
import json
import os
import re
import shutil
import unittest

from harness import MODEL, BaseRunTest, run


class InfoTest(BaseRunTest):
    def test_plan_and_info(self):
        plan = json.loads(run("plan", *MODEL, "--batch-size", 4, "--seq-len", 32, "--json").stdout)
        self.assertEqual(plan["total_bytes"], sum(plan["bytes"].values()))
        less = run("plan", *MODEL, "--batch-size", 4, "--seq-len", 32, "--recompute", "block", "--json")
        self.assertLess(json.loads(less.stdout)["bytes"]["activations"], plan["bytes"]["activations"])
        some = run("plan", *MODEL, "--batch-size", 4, "--seq-len", 32, "--recompute", "block:1", "--json")
        self.assertLess(json.loads(less.stdout)["bytes"]["activations"],
                        json.loads(some.stdout)["bytes"]["activations"])
        for level in ("block:", "block:0", "block:-1", "none:1", "blocks", "block:1:2", "block:x"):
            with self.subTest(level=level):
                refused = run("plan", *MODEL, "--recompute", level)
                self.assertEqual(refused.returncode, 2)
                self.assertIn(f"--recompute: {level} is none of none, activation, norms, block", refused.stderr)
        self.assertIn("--recompute block:99: the model has 2 layers",
                      run("plan", *MODEL, "--recompute", "block:99").stderr)
        generate = json.loads(run("plan", *MODEL, "--batch-size", 4, "--seq-len", 64, "--generate", "--json").stdout)
        # k and v, layers, sequences, tokens of a page, channels, bytes; and the page table
        self.assertEqual(generate["bytes"]["KV cache"], 2 * 2 * 4 * 128 * 32 * 4 + 256)
        self.assertEqual(generate["total_bytes"], sum(generate["bytes"].values()))
        plain, verbose = (run("plan", *MODEL, "--seq-len", 32, *args).stdout for args in ([], ["--verbose"]))
        self.assertIn("largest activations", plain)
        self.assertNotIn("phases", plain)
        self.assertRegex(verbose, r"layers\.0\.fc .* phases \d+ to \d+\n")
        big = run("plan", "--model", "llama-8B", "--batch-size", 64, "--seq-len", 8192)  # nothing is allocated
        self.assertEqual(big.returncode, 0, big.stderr)
        build = json.loads(run("info", "--json").stdout)
        self.assertIn(build["backend"], ("cpu", "cuda"))
        self.assertEqual(build.get("gpus", 0) > 0, build["backend"] == "cuda")
        self.assertRegex(build["regex"], r"^PCRE2 10\.\d+, Unicode \d")
        self.assertRegex(build["unicode"], r"^utf8proc \d+\.\d+\.\d+, Unicode \d")
        info = json.loads(run("info", self.base, "--json").stdout)
        self.assertEqual(info["trainer"]["step"], 8)
        self.assertEqual(info["config"]["n_layer"], 2)
        tokens = json.loads(run("info", os.path.join(self.data, "val_000000.bin"), "--json").stdout)
        self.assertLess(tokens["largest_token"], 257)
        only_val = os.path.join(self.top, "val [only]")
        shutil.copytree(self.data, only_val, ignore=shutil.ignore_patterns("train_*"))
        info = json.loads(run("info", only_val, "--json").stdout)
        self.assertEqual((info["kind"], "train" in info, info["val"]["tokens"]), ("data", False, tokens["tokens"]))

    def test_paths_that_are_no_utf8(self):
        model = os.path.join(self.top, os.fsdecode(b"caf\xe9"))
        shutil.copytree(os.path.join(self.base, "step_00000008"), model)
        self.assertIn("caf", json.loads(run("info", model, "--json").stdout)["directory"])
        self.assertIn("directory " + self.top, run("info", model).stdout)

    def test_help_lists_every_option(self):
        overview = run("--help").stdout
        for command in ("train", "rl", "eval", "sample", "chat", "serve", "logits", "plan", "convert", "info"):
            self.assertIn(command, overview)
            done = run(command, "--help")
            if "was built without" not in done.stderr:
                self.assertEqual((done.returncode, done.stderr), (0, ""))
        text = run("train", "--help", "all").stdout
        with open(os.path.join(self.base, "run.toml")) as file:
            options = [line.split("=")[0] for line in file if "=" in line]
        self.assertGreater(len(options), 20)
        for option in options:
            self.assertIn("--" + option, text)

    def test_help_of_train_is_short_and_has_groups(self):
        def options(*arguments):
            return re.findall(r"^  (?:-h,)?(--[a-z0-9-]+)", run("train", *arguments).stdout, re.MULTILINE)
        short, everything = options("--help"), options("--help", "all")
        self.assertTrue(15 <= len(short) <= 20, short)
        self.assertGreater(len(everything), 100)
        self.assertEqual(len(everything), len(set(everything)))
        self.assertLess(set(short), set(everything))
        groups = re.search(r"Groups: (.*)", run("train", "--help").stdout).group(1).split(", ")
        of_groups = [option for group in groups for option in options("--help", group)]
        self.assertEqual(len(of_groups), len(set(of_groups)))
        self.assertEqual(set(everything) - set(of_groups), {"--model", "--base", "--dtype", "--data", "--out", "--resume",
                                                            "--config", "--seed"})  # the options without a group
        self.assertIn("--momentum", options("--help", "muon"))
        self.assertLess({"--optimizer", "--fit"}, set(short))
        text = " ".join(run("train", "--help").stdout.split())
        for option in "--model", "--data":
            self.assertIn(f"{option} TEXT required without --resume: ", text)
        self.assertIn("--out TEXT REQUIRED ", text)
        self.assertIn("preset ('--help shape' lists them)", text)
        for command in "train", "plan":
            self.assertRegex(run(command, "--help", "shape").stdout, r"Presets, .*: gpt2-tiny, .*modern-tiny, .*qwen3-0\.6B")
        self.assertEqual(options("-h"), short)
        done = run("train", "--help", "mun")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--help mun: there is no such group of options; there are shape, length", done.stderr)

    def test_version(self):
        lines = dict(line.split(" ", 1) for line in run("--version").stdout.splitlines())
        self.assertRegex(lines.pop("train_gpt"), r"^\d+\.\d+\.\d+$")
        self.assertRegex(lines.pop("commit"), r"^([0-9a-f]{7,40}(\+changes)?|unknown)$")
        self.assertRegex(lines.pop("architectures"), r"^(sm_\d+[af]?( sm_\d+[af]?)*|x86-64-v3|armv8.1-a|)$")
        build = json.loads(run("info", "--json").stdout)
        self.assertEqual(lines, {key: str(value) for key, value in build.items()})

    def test_train_alone_names_a_command_that_works(self):
        self.assertIn("for example: ./train_gpt train --model gpt2-tiny --data data/tokens/quickstart --out runs/first",
                      run("train").stderr)

    def test_commands_of_one_process_refuse_a_launcher(self):
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": "29500"}
        for command in ("eval", "sample", "chat", "logits", "convert"):
            with self.subTest(command):
                done = run(command, env=ranks)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertEqual(done.stderr, f"train_gpt: {command}: torchrun started 2 processes, but only train "
                                 "divides its work among processes; start one process of this command\n")
        self.assertEqual(run("info", env=ranks).returncode, 0)


if __name__ == "__main__":
    unittest.main()
