#!/usr/bin/env python3
"""`rl`: rewards rise, resuming to the bit, what is logged, options, ranks and refusals (TRAIN_GPT names the driver)."""
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unittest

import several_ranks
from harness import DRIVER, ENVIRONMENT, TrainingTest, checkpoints, cuda, digest, log, run, sanitized

# A prompt of more than a page of the KV cache, which a cache that is not emptied would find again.
LONG = "The cat sees 4 of the red stones. " * 4
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for so small a model the fastest
TIMES = {"ms", "tokens_per_s", "mfu", "rollout_seconds", "rollout_tokens_per_s", "scoring_seconds",
         "log_probability_seconds"}
# Rewards the share of vowels.
VERIFIER = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    share = sum(letter in "aeiou" for letter in row["completion"]) / max(1, len(row["completion"]))
    print(json.dumps({"id": row["id"], "reward": share}), flush=True)
"""


# Answers after so many seconds, and nonsense for the owl.
FAILING = """
import json, sys, time
for line in sys.stdin:
    row = json.loads(line)
    time.sleep(float(sys.argv[1]))
    reward = json.dumps({"id": row["id"], "reward": 1 / (1 + len(row["completion"]))})
    print("nonsense" if "owl" in row["prompt"] else reward, flush=True)
"""


def write_rows(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


EXACT = ["--rollout", "exact", "--dtype", "bf16" if cuda() else "fp32"]


def count_lines(path):
    try:
        with open(path, "rb") as file:
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0


def why_not_exact():
    done = run("plan", "--model", "llama-tiny", "--batch-size", 1, "--seq-len", 8, "--rollout-batch-size", 1, *EXACT)
    return "this GPU has no exact rollouts" if "sm_90a" in done.stderr else None


NOT_EXACT = why_not_exact()


class RlTest(TrainingTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.base = cls.train("base", "--model", "llama-tiny", "--layers", 2, "--channels", 64, "--heads", 2,
                             "--kv-heads", 1, "--steps", 8)
        verifiers = [{"name": "regex"}, {"name": "length", "max": 100, "weight": 0}]
        cls.problems = write_rows(os.path.join(cls.top, "problems.jsonl"), [
            {"prompt": prompt, "answer": "e", "verifier": verifiers}
            for prompt in ("The cat sees ", "The dog sees ", "The owl", LONG)])

    def rl_args(self, name, *args):
        defaults = {"--model": self.base, "--data": self.problems, "--prompts": 4, "--completions": 4,
                    "--max-tokens": 6, "--batch-size": 1, "--lr": 1e-2, "--steps": 6, "--save-every": 3,
                    "--dtype": "fp32", "--truncated": "keep"}
        kept = [x for k, v in defaults.items() if k not in args for x in (k, v)]
        return ["--out", os.path.join(self.top, name), *kept, *args]

    def environment(self):
        """A cache of matmul algorithms of its own: other tests that run meanwhile choose theirs."""
        return {**ONE_THREAD, "XDG_CACHE_HOME": self.top}

    def rl(self, name, *args):
        done = run("rl", *self.rl_args(name, *args), env=self.environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        return os.path.join(self.top, name)

    def without_choices(self):
        """An empty cache: a run that goes on has the algorithms of its checkpoint alone."""
        return {**ONE_THREAD, "XDG_CACHE_HOME": tempfile.mkdtemp(dir=self.top)}

    def resume(self, out, *args):
        done = run("rl", "--resume", "--out", out, *args, env=self.without_choices())
        self.assertEqual(done.returncode, 0, done.stderr)

    def state(self, out):
        """Of the last checkpoint: its training state, and what it exports."""
        last = os.path.join(out, checkpoints(out)[-1])
        return tuple(digest(os.path.join(last, name)) for name in sorted(os.listdir(last))
                     if name.endswith(".safetensors"))

    def untimed(self, out):
        return [{k: v for k, v in line.items() if k not in TIMES} for line in log(out)]

    def test_rewards_rise(self):
        out = self.rl("rises", "--steps", 40, "--completions", 8, "--save-every", 0)
        lines = log(out)
        self.assertEqual([line["step"] for line in lines], list(range(1, 41)))
        rewards = [line["reward"] for line in lines]
        self.assertLess(sum(rewards[:5]) / 5, 0.5, rewards)
        self.assertGreater(sum(rewards[-5:]) / 5, 0.9, rewards)
        for key in ("reward_std", "reward_regex", "reward_length", "completion_length", "truncated", "entropy", "kl",
                    "clip_fraction", "sampler_gap", "sampler_gap_largest", "groups_left_out", "rollout_seconds",
                    "rollout_tokens_per_s", "scoring_seconds"):
            self.assertIn(key, lines[0])
        learnt = [line for line in lines if line["policy_tokens"]]
        for line in learnt:
            # Sampling and training compute in fp32: a log-probability of about −5 differs by some of its last bits.
            self.assertLess(line["sampler_gap_largest"], 1e-4)
            self.assertLessEqual(line["sampler_gap"], line["sampler_gap_largest"])
            self.assertLessEqual(line["policy_tokens"], 32 * 6)
            self.assertEqual((line["kl"], line["clip_fraction"]), (0, 0))  # with one update π_θ is π_old
        self.assertGreater(max(line["sampler_gap_largest"] for line in learnt), 0)
        idle = [line for line in lines if line.get("idle")]
        self.assertEqual([line["groups_left_out"] for line in idle], [4] * len(idle))
        with open(os.path.join(out, "completions.jsonl")) as file:
            written = [json.loads(line) for line in file]
        self.assertEqual(sorted({line["step"] for line in written}), [1, 11, 21, 31])
        first = [line for line in written if line["step"] == 1]
        self.assertEqual(len(first), 32)
        self.assertAlmostEqual(sum(line["reward"] for line in first) / 32, rewards[0])
        for line in first:
            self.assertEqual(line["reward"], float("e" in line["completion"]))

    def test_every_rollout_samples_anew(self):
        out = self.rl("anew", "--lr", 0, "--steps", 3, "--completions-every", 1)
        texts = {}
        with open(os.path.join(out, "completions.jsonl")) as file:
            for line in map(json.loads, file):
                texts.setdefault(line["step"], {}).setdefault(line["prompt"], []).append(line["completion"])
        self.assertEqual(len(texts), 3)
        for of_step in texts.values():
            self.assertEqual([len(of_prompt) for of_prompt in of_step.values()], [4] * 4)  # each prompt once an epoch
        groups = [tuple(of_prompt) for of_step in texts.values() for of_prompt in of_step.values()]
        self.assertEqual(len(set(groups)), 12)
        self.assertGreater(len({tuple(of_step) for of_step in texts.values()}), 1)  # in another order

    def test_resumes_to_the_bit(self):
        for name, options in {"muon": ["--optimizer", "muon"], "reference": ["--kl", 0.05],
                              "lora": ["--lora-rank", 8, "--lora-alpha", 16, "--kl", 0.05],
                              "qlora": ["--lora-rank", 8, "--lora-alpha", 8, "--qlora"],
                              "updates": ["--updates-per-rollout", 3, "--recompute", "block", "--temperature", 0.7]
                              }.items():
            with self.subTest(name):
                whole, part = self.rl("whole_" + name, *options), self.rl("part_" + name, *options, "--steps", 3)
                self.resume(part, "--steps", 6)
                self.assertEqual(self.state(part), self.state(whole))
                self.assertEqual(self.untimed(part), self.untimed(whole))
                if name == "updates":  # times are of the first update of a rollout, so that their sum is the run's
                    for key in "rollout_seconds", "scoring_seconds", "log_probability_seconds":
                        self.assertEqual([key in line for line in log(whole)], [True, False, False] * 2)
                for line in log(whole):  # also with a temperature, and with adapters
                    self.assertLess(line["sampler_gap_largest"], 1e-4)

    def test_the_reference_is_the_model_that_the_run_started_from(self):
        first = os.path.join(self.top, "first")
        shutil.copytree(self.base, first)
        run_directory = self.rl("from_first", "--model", first, "--kl", 0.05, "--steps", 2)
        shutil.rmtree(first)
        shutil.copytree(self.train("second", "--model", "llama-tiny", "--layers", 2, "--channels", 64, "--heads", 2,
                                   "--kv-heads", 1, "--steps", 9), first)
        self.refused(1, [first, "is not the model that the run started from", "--kl", "restore it"],
                     "rl", "--resume", "--out", run_directory, "--steps", 4)
        # A base with an adapter, which changes.
        adapter = self.train("adapter", "--model", self.base, "--lora-rank", 2, "--steps", 2)
        run_directory = self.rl("from_adapter", "--model", adapter, "--kl", 0.05, "--steps", 2)
        shutil.rmtree(adapter)
        self.train("adapter", "--model", self.base, "--lora-rank", 2, "--steps", 3)
        self.refused(1, ["is not the model that the run started from", "with adapter"],
                     "rl", "--resume", "--out", run_directory, "--steps", 4)

    @unittest.skipIf(NOT_EXACT, NOT_EXACT)
    def test_exact_rollouts_sample_what_is_learnt_from(self):
        """Real steps: the largest difference of log-probabilities is 0, to the bit, in each."""
        small = ["--layers", 2, "--channels", 64, "--heads", 2, "--steps", 4]
        bases = {"gpt2": ["--model", "gpt2-tiny"], "qk_norm": ["--model", "llama-tiny", "--qk-norm", "weights"],
                 "after": ["--model", "llama-tiny", "--norm-placement", "after"]}
        long = ["--max-tokens", 100, "--steps", 3, "--save-every", 0, "--ignore-eos"]
        cases = {"plain": [], "gpt2": [*long, "--completions", 8], "qk_norm": [*long, "--batch-size", 3],
                 "after": long, "lora": [*long, "--lora-rank", 8, "--kl", 0.05, "--temperature", 0.8],
                 "qlora": ["--lora-rank", 8, "--qlora"],
                 "block": [*long, "--recompute", "block", "--batch-size", 2, "--rollout-batch-size", 3],
                 "updates": ["--updates-per-rollout", 3, "--optimizer", "muon", "--temperature", 0.7]}
        for name, options in cases.items():
            with self.subTest(name):
                model = self.train("base_" + name, *bases[name], *small) if name in bases else self.base
                out = self.rl("exact_" + name, *EXACT, "--model", model, *options)
                lines = log(out)
                self.assertGreater(sum(line["policy_tokens"] for line in lines), 0)
                self.assertEqual({(line["sampler_gap"], line["sampler_gap_largest"]) for line in lines}, {(0, 0)})
        # A resumed run goes on with the same bits, and not with the other kind.
        whole, part = (self.rl("exact_" + name, *EXACT, "--steps", steps)
                       for name, steps in (("whole", 6), ("part", 3)))
        self.resume(part, "--steps", 6)
        self.assertEqual(self.state(part), self.state(whole))
        done = run("rl", "--resume", "--out", part, "--rollout", "fast", "--steps", 9)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot change", done.stderr)

    def test_killed_runs_resume_to_the_bit(self):
        """Killed in the middle of three steps, or of KILLS (in the environment), always the same ones."""
        steps, kills, chance = 30, int(os.environ.get("KILLS", "3")), random.Random(1)
        options = ["--steps", steps, "--save-every", 2, "--updates-per-rollout", 2]
        whole, part = self.rl("never_killed", *options), os.path.join(self.top, "killed")
        command, lines = ["rl", *self.rl_args("killed", *options)], os.path.join(part, "log.jsonl")
        killed, environment = 0, self.environment()
        for step in sorted(chance.sample(range(1, steps - 8), kills)):
            process = subprocess.Popen([DRIVER, *map(str, command)], env={**ENVIRONMENT, **environment},
                                       stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.addCleanup(process.kill)
            end, wanted = time.monotonic() + 60, max(step, count_lines(lines) + 1)
            while count_lines(lines) < wanted and process.poll() is None:
                self.assertLess(time.monotonic(), end, f"step {step} is not logged")
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.005))
            process.kill()
            killed += process.wait() == -signal.SIGKILL
            command = ["rl", "--resume", "--out", part]
            if checkpoints(part):  # without one it starts again, as the whole run did
                environment = self.without_choices()
        self.assertGreater(killed, kills // 2)  # on a busy machine the last one may come too late
        done = run(*command, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.state(part), self.state(whole))
        self.assertEqual(self.untimed(part), self.untimed(whole))

    @unittest.skipIf(sanitized(), "starts runs that the other tests start, with other numbers")
    def test_options_change_what_is_learnt(self):
        several = ["--steps", 4, "--save-every", 0, "--updates-per-rollout", 2, "--completions", 8, "--lr", 3e-2]
        cases = {"": [], "batch": ["--advantage", "batch"], "mean": ["--advantage", "mean-only"],
                 "tokens": ["--loss-norm", "batch"], "constant": ["--loss-norm", "constant"],
                 "low": ["--clip-low", 0.01], "high": ["--clip-high", 0.01], "cap": ["--importance-cap", 1],
                 "mask": ["--truncated", "mask"], "temperature": ["--temperature", 1.5], "eos": ["--ignore-eos"],
                 "seed": ["--seed", 1], "updates": ["--updates-per-rollout", 1],
                 "lora": ["--lora-rank", 2], "kl": ["--lora-rank", 2, "--kl", 1], "copy": ["--kl", 1]}
        states = {}
        for name, options in cases.items():
            kept = [x for k, v in zip(several[::2], several[1::2]) if k not in options for x in (k, v)]
            out = self.rl("option_" + name, *kept, *options)
            states.setdefault(self.state(out), []).append(name)
            if "--kl" in options:
                values = [line["kl"] for line in log(out)]
                # The weights are the reference's; of adapters B is 0. On a GPU the pass without adapters has other
                # matmuls: a log-probability d ≤ 8·2⁻²⁴·5 off, and d²/2 of divergence.
                self.assertLessEqual(values[0], 3e-12 if cuda() else 0)
                self.assertGreater(values[2], 1e-9)  # the first update of the second rollout: π_θ is π_old, not the reference
        self.assertEqual([names for names in states.values() if len(names) > 1], [])
        # A step's size is not part of the mathematics: batches hold other completions.
        sizes = [log(self.rl(f"batch_{size}", *several, "--batch-size", size)) for size in (1, 3)]
        for one, other in zip(*sizes):
            for key in ("reward", "policy_tokens", "clip_fraction"):
                self.assertEqual(one[key], other[key])
            self.assertAlmostEqual(one["grad_norm"], other["grad_norm"], delta=1e-4 * one["grad_norm"])
        self.assertGreater(max(line["clip_fraction"] for line in sizes[0][1::2]), 0)
        self.assertEqual({line["clip_fraction"] for line in sizes[0][::2]}, {0})

    def test_masked_completions_do_not_count(self):
        """The loss of a first update is Σ −A·w over the tokens of completions that ended, divided by their number."""
        out = self.rl("masked", "--truncated", "mask", "--loss-norm", "batch", "--max-tokens", 60, "--completions", 16,
                      "--steps", 1, "--completions-every", 1)
        with open(os.path.join(out, "completions.jsonl")) as file:
            rows = [json.loads(line) for line in file]
        total = 0
        for prompt in {row["prompt"] for row in rows}:
            group = [row for row in rows if row["prompt"] == prompt]
            rewards = [row["reward"] for row in group]
            if len(set(rewards)) > 1:
                total -= sum((row["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) * row["tokens"]
                             for row in group if row["finish"] != "length")
        counted = sum(row["tokens"] for row in rows if row["finish"] != "length")
        self.assertTrue(0 < counted < sum(row["tokens"] for row in rows) / 2)
        # Importance weights are 1 but for the gap between the kernels, which is below 1e-5 in fp32 on every backend.
        self.assertAlmostEqual(log(out)[0]["loss"], total / counted, delta=1e-4)

    def test_verifiers_of_ones_own(self):
        verifier = os.path.join(self.top, "verifier.py")
        with open(verifier, "w") as file:
            file.write(VERIFIER)
        rows = write_rows(os.path.join(self.top, "plain.jsonl"), [{"prompt": "The ", "answer": ""}] * 3)
        options = ["--data", rows, "--verifier", f"{sys.executable} {verifier}", "--verifier-processes", 1]
        whole = self.rl("command", *options)
        part = self.rl("command_part", *options, "--steps", 3)
        self.resume(part, "--steps", 6)
        self.assertEqual(self.state(part), self.state(whole))
        with open(os.path.join(whole, "completions.jsonl")) as file:
            for line in map(json.loads, file):
                share = sum(letter in "aeiou" for letter in line["completion"]) / max(1, len(line["completion"]))
                self.assertAlmostEqual(line["reward"], share)

    def failing(self, seconds=0):
        """Options for rewards by a program that fails for one prompt of four."""
        program = write_rows(os.path.join(self.top, "failing.py"), [])
        with open(program, "w") as file:
            file.write(FAILING)
        rows = write_rows(os.path.join(self.top, "unscored.jsonl"), [
            {"prompt": prompt, "answer": ""} for prompt in ("The cat ", "The dog ", "The owl ", "The red ")])
        return ["--data", rows, "--verifier", f"{sys.executable} {program} {seconds}", "--verifier-processes", 1]

    def test_verifiers_that_fail(self):
        done = run("rl", *self.rl_args("fails", *self.failing()), env=ONE_THREAD)
        self.assertEqual(done.returncode, 1)
        last = done.stderr.splitlines()[-1]
        for words in "train_gpt: rl: --verifier ", "it wrote 'nonsense'", "; --on-verifier-error zero makes the reward 0":
            self.assertIn(words, last)

        options = [*self.failing(), "--on-verifier-error", "zero", "--completions-every", 1]
        done = run("rl", *self.rl_args("counts", *options, "--steps", 3), env=self.environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        said = [line for line in done.stderr.splitlines() if "verifier error" in line]
        self.assertEqual(len(said), 1, done.stderr)
        self.assertRegex(said[0], r"^step 1: reward 0 for 4 verifier errors.*; the first: --verifier .*it wrote 'nonsense'")
        part = os.path.join(self.top, "counts")
        self.resume(part, "--steps", 6)
        whole = self.rl("counts_whole", *options)
        self.assertEqual(self.untimed(part), self.untimed(whole))
        self.assertEqual({line["verifier_errors"] for line in log(whole)}, {4})  # of each rollout
        with open(os.path.join(whole, "completions.jsonl")) as file:
            for line in map(json.loads, file):
                self.assertEqual(line["reward"], 0 if "owl" in line["prompt"] else 1 / (1 + len(line["completion"])))

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_verifiers_that_fail_on_one_rank(self):
        for seed in 0, 1:  # the other rank's prompt in the first rollout
            name = f"fails_{seed}"
            args = self.rl_args(name, *self.failing(), "--on-verifier-error", "zero", "--steps", 2, "--seed", seed)
            done = several_ranks.run(2, *args, name="rl")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("it wrote 'nonsense'"), 1, done.stderr)
            self.assertEqual([line["verifier_errors"] for line in log(os.path.join(self.top, name))], [4, 4])

    def test_the_time_left_counts_rollouts(self):
        options = [*self.failing(0.1), "--on-verifier-error", "zero", "--prompts", 1, "--completions", 3, "--steps", 1001]
        with subprocess.Popen([DRIVER, "rl", *map(str, self.rl_args("slow", *options))], stdin=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, env={**ENVIRONMENT, **ONE_THREAD}, text=True) as process:
            self.addCleanup(process.kill)
            line = next((line for line in process.stderr if " ETA " in line), "")
            process.kill()
        self.assertIn(" ETA ", line)
        left = 0  # seconds
        for part in line.split(" ETA ")[1].split(":"):
            left = 60 * left + int(part)
        # 0.3 s of scoring before each step. On a GPU the second rollout may have begun.
        self.assertGreaterEqual(left, 300)

    def test_stops_where_nothing_is_to_be_learnt(self):
        rows = write_rows(os.path.join(self.top, "same.jsonl"), [
            {"prompt": "The ", "answer": "", "verifier": [{"name": "length", "max": 100}]}])
        args = self.rl_args("idle", "--data", rows, "--max-idle-steps", 3)
        done = run("rl", *args, env=ONE_THREAD)
        self.assertEqual(done.returncode, 0, done.stderr)
        stopped = "step 3: in 3 rollouts in a row the completions of each prompt had equal rewards, so there is nothing to " \
            "learn; the run stops (--max-idle-steps 3)\n"
        self.assertIn(stopped, done.stderr)
        out = os.path.join(self.top, "idle")
        self.assertEqual(checkpoints(out), ["step_00000002"])
        for line in log(out):
            self.assertTrue(line["idle"])
            self.assertEqual((line["reward"], line["groups_left_out"], line["policy_tokens"]), (1, 4, 0))
        # The count goes on with the run.
        again = run("rl", "--resume", "--out", out, env=ONE_THREAD)
        self.assertEqual((again.returncode, len(log(out))), (0, 2), again.stderr)
        self.assertIn(stopped, again.stderr)
        self.resume(out, "--max-idle-steps", 0)
        self.assertEqual(len(log(out)), 6)
        # It is one of rollouts, whose steps are all idle; a run may be left in the middle of the count.
        options = ["--data", rows, "--updates-per-rollout", 2, "--max-idle-steps", 4]
        out = self.rl("idle_updates", *options, "--steps", 4, "--save-every", 2)
        again = run("rl", "--resume", "--out", out, "--steps", 20, env=ONE_THREAD)
        self.assertIn("step 7: in 4 rollouts in a row", again.stderr)
        self.assertEqual(len(log(out)), 6)
        # A run that goes on says so once.
        done = run("rl", *self.rl_args("goes_on", "--data", rows, "--max-idle-steps", 0, "--steps", 52, "--completions", 2),
                   env=ONE_THREAD)
        self.assertEqual(done.stderr.count(" rollouts in a row "), 1, done.stderr)
        self.assertIn("step 50: in 50 rollouts in a row the completions of each prompt had equal rewards, so there is nothing "
                      "to learn; the run goes on (--max-idle-steps 0)\n", done.stderr)
        # Rewards differ, but completions that were all cut are masked: the policy is not updated.
        done = run("rl", *self.rl_args("all_cut", "--truncated", "mask", "--ignore-eos", "--max-idle-steps", 1), env=ONE_THREAD)
        self.assertIn("step 1: in 1 rollouts in a row the completions of each prompt had equal rewards, or --max-tokens cut "
                      "them, so there is nothing to learn; the run stops (--max-idle-steps 1)\n", done.stderr)
        # The divergence has a gradient whatever the rewards are.
        for line in log(self.rl("alike", "--data", rows, "--lora-rank", 2, "--kl", 0.05, "--steps", 2)):
            self.assertEqual((line["groups_left_out"], line.get("idle")), (0, None))
            self.assertGreater(line["policy_tokens"], 0)

    def test_epochs_are_passes_over_the_prompts(self):
        args = self.rl_args("epochs", "--epochs", 1.5, "--prompts", 2)  # of 4
        steps = args.index("--steps")
        done = run("rl", *args[:steps], *args[steps + 2:], env=ONE_THREAD)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line["step"] for line in log(os.path.join(self.top, "epochs"))], [1, 2, 3])

    def test_plan_counts_shared_memory_once(self):
        def planned(*args):
            done = run("plan", "--model", self.base, "--batch-size", 2, "--seq-len", 142, "--dtype", "fp32", "--json", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["bytes"]["activations"]
        alone, few, many = planned(), planned("--rollout-batch-size", 1), planned("--rollout-batch-size", 64)
        self.assertLess(few, 1.1 * alone)  # what a policy's loss needs of each token
        # Pages of 128 tokens: 2 for each sequence, of k and v in 2 layers of 1 head of 32 channels in fp32.
        self.assertGreater(many, 64 * 2 * 128 * 2 * 2 * 32 * 4)
        for how, *kl in ("fast",), ("fast", "--kl", 0.1), *([] if cuda() else [("exact",)]):
            out = self.rl(f"planned_{how}{len(kl)}", "--steps", 3, "--batch-size", 2, "--prompts", 8, "--completions", 8,
                          "--rollout", how, *kl)
            memory = log(out)[0]["memory"]
            done = run("plan", "--model", self.base, "--batch-size", 2, "--seq-len", 142, "--dtype", "fp32", "--json",
                       "--rollout-batch-size", 64, "--rollout", how, *kl)
            plan = json.loads(done.stdout)  # of a run that saves meanwhile, which this one does not; on a GPU into host memory
            self.assertEqual(plan["total_bytes"] - plan["bytes"].get("checkpoint snapshot", 0), memory)

    def test_plan_knows_which_gpus_have_exact_rollouts(self):
        shape = ["plan", "--model", "llama-1B", "--batch-size", 2, "--seq-len", 768, "--rollout-batch-size", 512, "--rollout",
                 "exact"]
        done = run(*shape, "--gpu", "H100 80GB", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(json.loads(done.stdout)["bytes"]["activations"], 512 * 128256 * 4)  # logits in fp32
        self.refused(1, ["--rollout exact", "sm_90a"], *shape, "--gpu", "A100 80GB")
        self.refused(2, ["--kl", "--matmul-dtype fp8"], *shape[:-2], "--kl", 0.1, "--matmul-dtype", "fp8", "--gpu", "H100 80GB")

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_ranks_sample_what_one_does(self):
        sizes = ["--steps", 3, "--completions", 16, "--lr", 1e-3]
        cases = {"adamw": ([], (0, 1, 2)), "muon": (["--optimizer", "muon"], (0, 2)),
                 "lora": (["--lora-rank", 8, "--kl", 0.05], (0, 2)), "qlora": (["--lora-rank", 8, "--qlora"], (1,))}
        for case, (options, stages) in cases.items():
            one = log(self.rl("one_rank_" + case, *sizes, *options))
            for stage in stages:
                with self.subTest(case, stage=stage):
                    name = f"{case}_{stage}"
                    done = several_ranks.run(2, *self.rl_args(name, *sizes, *options, "--zero-stage", stage), name="rl")
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.compare_ranks(log(os.path.join(self.top, name)), one)

    def compare_ranks(self, several, one):
        for ours, theirs in zip(several, one, strict=True):
            for key in ("reward", "reward_std", "completion_length", "groups_left_out", "policy_tokens"):
                self.assertAlmostEqual(ours[key], theirs[key])
            self.assertFalse(theirs.get("idle"))
            # Only the order of sums differs; a step's gradient is a sum of fewer than 10⁴ terms in fp32.
            self.assertAlmostEqual(ours["grad_norm"], theirs["grad_norm"], delta=1e-3 * theirs["grad_norm"])

    def test_refusals(self):
        def refused(status, words, *args):
            self.refused(status, words, "rl", *self.rl_args("refused", *args))
        refused(2, ["--zero-stage 3", "at most 2"], "--zero-stage", 3)
        refused(2, ["--kl", "--matmul-dtype fp8", "--lora-rank"], "--kl", 0.1, "--matmul-dtype", "fp8")
        refused(2, ["--offload weights", "leave weights out"], "--offload", "weights", "--lora-rank", 2)
        refused(2, ["--matmul-dtype fp8", "--qlora"], "--matmul-dtype", "fp8", "--lora-rank", 2)
        for option in ("--top-k", "--top-p", "--min-p", "--repeat-penalty", "--presence-penalty", "--frequency-penalty"):
            refused(2, [option, "--temperature"], option, 1)
        refused(1, ["gpt2-tiny", "preset without weights"], "--model", "gpt2-tiny")
        refused(2, ["--completions", "at least 2"], "--completions", 1)
        refused(2, ["--rollout", "exact"], "--rollout", "slow")
        if NOT_EXACT:
            refused(1, ["--rollout exact", "sm_90a", "--rollout fast"], *EXACT)
        else:
            linear = self.train("linear", "--model", "gpt2-tiny", "--attention", "linear", "--layers", 1, "--steps", 1)
            refused(1, ["--rollout exact", "linear attention", "--rollout fast"], *EXACT, "--model", linear)
        if cuda() and not NOT_EXACT:
            refused(1, ["--rollout exact", "--dtype bf16"], "--rollout", "exact", "--dtype", "fp32")
            refused(1, ["--rollout exact", "--lora-rank", "multiple of 8"], *EXACT, "--lora-rank", 2)
        refused(1, ["verifier"], "--data", write_rows(os.path.join(self.top, "bad.jsonl"),
                                                      [{"prompt": "a", "answer": "b"}]))
        done = run("rl", "--out", os.path.join(self.rl("changed", "--steps", 3)), "--resume", "--completions", 2)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot change", done.stderr)


if __name__ == "__main__":
    unittest.main()
