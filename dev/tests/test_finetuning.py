#!/usr/bin/env python3
"""Training on prompts with responses: loss tokens, packed examples, samples for given prompts."""
import json
import os
import re
import shutil
import unittest

from harness import MODEL, BaseRunTest, digests, log, losses, run, tensor_bytes, text_of, tokenize, write_tokens


class FinetuningTest(BaseRunTest):
    def make_examples(self, name, examples, *options):
        """A data set of (prompt, response) in byte tokens: an example has one token more than its text."""
        path = os.path.join(self.top, name + ".jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps({"prompt": prompt, "response": response}) + "\n"
                            for prompt, response in examples)
        return tokenize(path, os.path.join(self.top, name), *options)

    def test_defaults_of_a_run_from_a_checkpoint(self):
        data = ["--data", self.data, "--seq-len", 32, "--dtype", "fp32", "--eval-every", 0]

        def defaults(name, *options):
            done = run("train", *data, "--out", os.path.join(self.top, name), *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            toml = dict(line.split("=") for line in text_of(os.path.join(self.top, name, "run.toml")).split() if "=" in line)
            said = [line for line in done.stderr.splitlines() if line.startswith("defaults for a run")]
            return said, [float(toml[key]) for key in ("lr", "warmup", "weight-decay")], int(toml["steps"])

        scratch = defaults("scratch", *MODEL, "--steps", 40)
        self.assertEqual(scratch, ([], [6e-4, 2, 0.1], 40))
        sequences = json.loads(run("info", self.data, "--json").stdout)["train"]["tokens"] // 32
        said, values, steps = defaults("full", "--model", self.base, "--batch-size", 2)
        self.assertEqual((values, steps), ([2e-5, int(0.03 * steps), 0], -(-3 * sequences // 2)))
        self.assertEqual(said, [f"defaults for a run from a checkpoint: --lr 2e-05 --epochs 3 --warmup {values[1]:.0f} "
                                "--weight-decay 0 (from scratch: 6e-4, 1000 steps, 5% warmup, weight decay 0.1)"])
        said, values, steps = defaults("lora", "--model", self.base, "--lora-rank", 2, "--steps", 40, "--weight-decay", 0.1)
        self.assertEqual((values, steps), ([2e-4, 1, 0.1], 40))
        self.assertEqual(said, ["defaults for a run from a checkpoint: --lr 0.0002 --warmup 1 (from scratch: 6e-4, 5% warmup)"])
        muon = defaults("muon", "--model", self.base, "--optimizer", "muon", "--steps", 4)
        self.assertAlmostEqual(muon[1][0], 0.02 / 30)
        given = defaults("given", "--model", self.base, "--lr", 1e-3, "--steps", 4, "--warmup", 1, "--weight-decay", 0)
        self.assertEqual(given, ([], [1e-3, 1, 0], 4))
        # An older run.toml names what it was started with, and a resumed run keeps it.
        done = run("train", "--resume", "--out", os.path.join(self.top, "given"), "--steps", 6)
        self.assertNotIn("defaults for", done.stderr)
        self.assertEqual(log(os.path.join(self.top, "given"))[-1]["step"], 6)

    def test_few_conversations(self):
        """A run from a checkpoint takes smaller steps where 3 epochs are less than 50 of them and nothing says how large
        a step is. One line says so where a run has less than 20 steps."""
        examples = [(f"{i:04} + ", "1234") for i in range(40)]
        data = {n: self.make_examples(f"few_{n}", examples[:n], "--val", "0") for n in (5, 10, 40)}

        def lengths(n, *options):
            out = os.path.join(self.top, "few")
            model = [] if "--model" in options else ["--model", self.base]
            done = run("train", *model, "--data", data[n], "--out", out, "--seq-len", 16, "--dtype", "fp32", *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            toml = dict(line.split("=") for line in text_of(os.path.join(out, "run.toml")).split() if "=" in line)
            self.assertEqual(log(out)[-1]["step"], int(toml["steps"]))
            shutil.rmtree(out)
            said = [line for line in done.stderr.splitlines() if line.startswith(("the whole run", "defaults for"))]
            return int(toml["batch-size"]), int(toml["steps"]), "\n".join(said)

        batch, steps, said = lengths(40)  # each example fills a sequence: 30 steps of 4, 60 of 2
        self.assertEqual((batch, steps), (2, 60))
        self.assertIn("--epochs 3 --batch-size 2 --warmup 1 --weight-decay 0 (from scratch: 6e-4, 1000 steps, batch size 4, ",
                      said)
        self.assertNotIn("the whole run", said)
        self.assertEqual(lengths(40, "--epochs", 5)[:2], (4, 50))
        self.assertEqual(lengths(10)[:2], (1, 30))
        batch, steps, said = lengths(5)
        self.assertEqual((batch, steps), (1, 15))
        self.assertTrue(said.endswith("the whole run is 15 steps; if it learns too little, raise --epochs (now 3)"),
                        said)
        # What is given stays.
        self.assertEqual(lengths(5, "--batch-size", 4), (4, 4, said.replace(" --batch-size 1", "").replace(
            " batch size 4,", "").replace("is 15", "is 4").replace(
                "(now 3)", "(now 3) or lower --batch-size (now 4)")))
        batch, steps, said = lengths(5, "--total-batch-tokens", 128)
        self.assertEqual((batch, steps), (4, 2))
        self.assertIn("whole run is 2 steps; if it learns too little, raise --epochs (now 3) or lower "
                      "--total-batch-tokens (now 128)", said)
        batch, steps, said = lengths(5, "--steps", 3)
        self.assertEqual((batch, steps), (4, 3))
        self.assertNotIn("the whole run", said)
        self.assertEqual(lengths(5, *MODEL, "--epochs", 1), (4, 2, ""))

    def test_prompts_are_not_loss_tokens(self):
        # All training sequences hold the same 32 tokens and every third one is a prompt: the loss tokens have the mean
        # loss and the mean gradient of a run in which all tokens are loss tokens.
        T, sequences = 32, 60
        tokens = [(7 * i * i + 3) % 50 for i in range(T)] * sequences + [3]
        runs = {}
        for name in ("all", "some"):
            mask = [(i - 1) // T % 3 != 0 for i in range(len(tokens))]
            data = write_tokens(os.path.join(self.top, "repeated_" + name), tokens, mask if name == "some" else None)
            for micro in (1, 4):
                out = os.path.join(self.top, f"repeated_{name}_{micro}")
                # In fp32: the rounding of bf16 differs between micro-batches.
                done = run("train", *MODEL, "--dtype", "fp32", "--vocab-size", 50, "--data", data, "--out", out,
                           "--steps", 8, "--seq-len", T, "--batch-size", 4 // micro, "--total-batch-tokens", 4 * T,
                           "--lr", "1e-3", "--grad-clip", 0.5, "--save-every", 0)
                self.assertEqual(done.returncode, 0, done.stderr)
                runs[name, micro] = log(out)
        for key, lines in runs.items():
            for line, reference in zip(lines, runs["all", 1]):
                self.assertAlmostEqual(line["loss"] / reference["loss"], 1, delta=1e-5, msg=key)
                self.assertAlmostEqual(line["grad_norm"] / reference["grad_norm"], 1, delta=1e-4, msg=key)
        self.assertLess(runs["some", 1][-1]["loss"], runs["some", 1][0]["loss"] - 0.05)

    def test_steps_without_loss_tokens(self):
        """They are marked, change nothing, count neither for the median of norms nor for --max-skips, and are not drawn."""
        T, sequences = 32, 200
        tokens = [(7 * i * i + 3) % 50 for i in range(T * sequences + 1)]
        mask = [(i - 1) // T % 3 == 0 for i in range(len(tokens))]
        data, out = write_tokens(os.path.join(self.top, "mostly_prompts"), tokens, mask), os.path.join(self.top, "no_loss")

        def train(*args):
            done = run("train", *MODEL, "--vocab-size", 50, "--data", data, "--out", out, "--seq-len", T, "--batch-size", 1,
                       "--lr", "1e-3", "--spike-factor", 10, "--max-skips", 1, *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stderr
        stderr = train("--steps", 30, "--save-every", 1, "--keep", 30)
        stderr += train("--steps", 170, "--save-every", 0, "--keep", 40, "--resume")
        lines = log(out)
        without = [line["step"] for line in lines if line.get("no_loss_tokens")]
        self.assertTrue(90 < len(without) < 130, without)  # so many that the median would be one of them
        for line in lines:
            self.assertEqual(line["loss"] is None, line["step"] in without, line)
            self.assertEqual(line["grad_norm"] is None, line["step"] in without, line)
            self.assertEqual(line.get("skipped", False), line["step"] in without, line)
            self.assertNotIn("spike", line)
        self.assertEqual(lines[-1].get("skips", 0) or len(without), len(without))
        states = {}
        for step in range(1, 31):
            checkpoint = os.path.join(out, f"step_{step:08}")
            with open(os.path.join(checkpoint, "trainer.json")) as file:
                trainer = json.load(file)
            updates = step - sum(other <= step for other in without)
            self.assertEqual((trainer["adam_steps"], trainer["norm_count"]), (updates, updates))
            states[step] = [tensor_bytes(os.path.join(checkpoint, name)) for name in ("model.safetensors", "state.safetensors")]
            if step > 1:
                self.assertEqual(states[step] == states[step - 1], step in without, step)
        self.assertIn(f"step {without[0]}: none of its tokens has a loss; update skipped, 1 so far\n", stderr)

    def test_splits_without_loss_tokens(self):
        """Refused at the start: training would change nothing, and the first evaluation would end the run."""
        tokens, data = [i % 50 for i in range(200)], {}
        for name, mask in ("none", [False] * 200), ("late", [i >= 100 for i in range(200)]):
            data[name] = write_tokens(os.path.join(self.top, name), tokens, mask)
        for kind in "bin", "mask":
            shutil.copy(os.path.join(data["none"], f"train_000000.{kind}"),
                        os.path.join(data["late"], f"val_000000.{kind}"))
        args = ["train", *MODEL, "--vocab-size", 50, "--steps", 1, "--seq-len", 32, "--out", os.path.join(self.top, "out")]
        self.refused(1, [f"{data['none']}/train_*.bin: the mask has no loss token; use"], *args, "--data", data["none"])
        self.refused(1, [f"{data['late']}/val_*.bin: the mask has no loss token; use"], *args, "--data", data["late"])
        for kind in "bin", "mask":
            shutil.copy(os.path.join(data["late"], f"train_000000.{kind}"),
                        os.path.join(data["late"], f"val_000000.{kind}"))
        self.refused(1, ["val_*.bin: the mask has no loss token in the first 90 tokens (--eval-tokens); use"], *args,
                     "--data", data["late"], "--eval-tokens", 90)
        done = run(*args, "--data", data["late"], "--eval-tokens", 110)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_pairs(self):
        # From JSONL: the loss tokens are those of the responses.
        path, data = os.path.join(self.top, "pairs.jsonl"), os.path.join(self.top, "pairs")
        with open(path, "w") as file:
            for i in range(200):
                a, b = i % 10, i // 10 % 10
                file.write(json.dumps({"prompt": f"{a} + {b} = ", "response": str(a + b)}) + "\n")
        tokenize(path, data, "--val", "0.2")
        with open(os.path.join(data, "meta.json")) as file:
            meta = json.load(file)
        info = json.loads(run("info", data, "--json").stdout)
        self.assertEqual(info["val"]["loss_tokens"], meta["val"]["loss_tokens"])
        scores = json.loads(run("eval", "--model", self.base, "--data", data, "--json").stdout)
        self.assertEqual(scores["loss_tokens"], meta["val"]["loss_tokens"])
        self.assertEqual(list(scores), ["loss_tokens", "val_loss", "perplexity"])
        lines = run("eval", "--model", self.base, "--data", data).stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines], list(scores))

    def test_packed_examples(self):
        examples = [(f"{i} + {i * 7 % 30} = ", str(i + i * 7 % 30) + "." * (i * i % 17)) for i in range(300)]
        data = self.make_examples("sums", examples, "--val", "0.2")
        args = ["--data", data, "--seq-len", 48, "--batch-size", 2, "--save-every", 4]
        run_dir = self.train("packed", *args, "--steps", 8)
        self.assertIn('pack="examples"', text_of(os.path.join(run_dir, "run.toml")))
        trainer = json.loads(text_of(os.path.join(run_dir, "step_00000008", "trainer.json")))
        self.assertEqual(trainer["pack"], "examples")
        self.assertLess(losses(run_dir)[8], losses(run_dir)[1])
        evaluated = [line for line in log(run_dir) if "val_loss" in line]
        self.assertEqual([list(line) for line in evaluated], [["step", "val_loss"]] * len(evaluated))
        done = run(*self.train_args("packed_again", *args, "--steps", 1))
        self.assertRegex(done.stderr, r"training tokens: 2\d\d examples in \d+ training sequences "
                                      r"\(\d\.\d% padding, 0 longer")
        # Resumed, and in micro-steps of one sequence: the same examples.
        whole = digests(os.path.join(run_dir, "step_00000008"))
        shutil.rmtree(os.path.join(run_dir, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), whole)
        micro = self.train("packed_micro", *args[:4], "--batch-size", 1, "--total-batch-tokens", 96, "--steps", 8)
        for step, loss in losses(run_dir).items():
            self.assertAlmostEqual(losses(micro)[step] / loss, 1, delta=2e-5)
        self.refused(1, ["--resume: --pack was examples", "cannot change"], "train", "--resume", "--out", run_dir,
                     "--pack", "none", "--steps", 9)
        # The same loss at the end of training as by the command, in one order as in another.
        val = [line["val_loss"] for line in log(run_dir) if "val_loss" in line][-1]
        for options in ([], ["--seq-len", 64], ["--batch-size", 1]):
            score = json.loads(run("eval", "--model", run_dir, "--data", data, "--json", *options).stdout)
            self.assertAlmostEqual(score["val_loss"] / val, 1, delta=1e-5)
        self.assertFalse(os.path.exists(os.path.join(self.top, "nothing")))
        for words, options in (
            (["of 2", "examples are longer than --seq-len 16; raise it (the longest needs 3"], ["--seq-len", 16]),
            (["--document-mask: packed examples"], ["--document-mask"]),
            (["--pack examples: ", "is text, without examples"], ["--data", self.data, "--pack", "examples"]),
        ):
            kept = [x for key, value in zip(args[::2], args[1::2]) if key not in options for x in (key, value)]
            self.refused(1, words, *self.train_args("nothing", "--steps", 1, *kept, *options))
        skipped = run(*self.train_args("skipped", *args[:2], "--seq-len", 16, "--too-long", "skip", "--steps", 1))
        self.assertRegex(skipped.stderr, r"padding, 1\d\d longer examples left out\)")
        cut = run(*self.train_args("cut", *args, "--pack", "none", "--steps", 1))
        self.assertRegex(cut.stderr, r"training sequences \(\d+ tokens at the end left out\)")

    def test_evaluation_of_packed_examples_is_that_of_each_alone(self):
        examples = [(f"{i:02} times {i * 7 % 30:02} is ", f"{i * (i * 7 % 30):04}") for i in range(60)]
        data = self.make_examples("alone", examples, "--val", "0.5")
        scores = [json.loads(run("eval", "--model", self.base, "--data", data, "--json", "--seq-len", n).stdout)
                  for n in (19, 20, 37, 38, 64)]
        self.assertEqual(scores[0]["loss_tokens"], 30 * 5)
        for score in scores:  # 19: each alone; 38 and more: two or three in a sequence
            self.assertEqual(score["loss_tokens"], scores[0]["loss_tokens"])
            self.assertAlmostEqual(score["val_loss"] / scores[0]["val_loss"], 1, delta=1e-6)
        done = run("eval", "--model", self.base, "--data", data, "--seq-len", 18, "--too-long", "skip")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("none of 30 examples fits into --seq-len 18; raise it (the longest needs 19)", done.stderr)

    def test_info_shows_examples_with_their_loss_tokens(self):
        data = self.make_examples("shown", [("1 + 1 = ", "2"), ("[4] / 2 = ", "[2]"), ("3 = ", "3")], "--val", "0")
        done = run("info", "--data", data, "--show", 2)
        self.assertEqual(done.stdout, "--- example 1: 10 tokens, 2 of them loss tokens\n"
                                      "1 + 1 = [2<|endoftext|>]\n"
                                      "--- example 2: 14 tokens, 4 of them loss tokens\n"
                                      "[4] / 2 = [[2]<|endoftext|>]\n", done.stderr)
        lines = [json.loads(line) for line in run("info", data, "--show", 9, "--json").stdout.splitlines()]
        self.assertEqual(len(lines), 3)
        parts = [{"loss": False, "text": "1 + 1 = "}, {"loss": True, "text": "2<|endoftext|>"}]
        self.assertEqual(lines[0], {"tokens": 10, "loss_tokens": 2, "parts": parts})
        self.refused(1, ["is text, in which every token is a loss token"], "info", "--data", self.data, "--show", 1)
        self.refused(2, ["--show", "--data"], "info", "--show", 1)
        os.remove(os.path.join(data, "tokenizer.json"))
        self.refused(1, ["no tokenizer.json"], "info", data, "--show", 1)

    def test_info_shows_both_responses_of_a_pair(self):
        path = os.path.join(self.top, "pairs.jsonl")
        with open(path, "w") as file:
            for answer in 2, 3, 4:
                row = {"prompt": f"1 + {answer - 1} = ", "chosen": f"{answer}", "rejected": "5?"}
                file.write(json.dumps(row) + "\n")
        data = tokenize(path, os.path.join(self.top, "pairs"), "--val", "0.34")
        info = json.loads(run("info", data, "--json").stdout)
        self.assertEqual((info["train"]["pairs"], info["train"]["documents"], info["val"]["pairs"]), (2, 2, 1))
        done = run("info", data, "--show", 1)
        prompt, answer = re.search(r"\n(1 \+ . = )\[(.)", done.stdout).groups()
        self.assertEqual(done.stdout, "--- pair 1, chosen: 10 tokens, 2 of them loss tokens\n"
                                      f"{prompt}[{answer}<|endoftext|>]\n"
                                      "--- pair 1, rejected: 11 tokens, 3 of them loss tokens\n"
                                      f"{prompt}[5?<|endoftext|>]\n", done.stderr)
        lines = [json.loads(line) for line in run("info", data, "--show", 9, "--json").stdout.splitlines()]
        self.assertEqual([(line["pair"], line["response"], line["tokens"]) for line in lines],
                         [(1, "chosen", 10), (1, "rejected", 11), (2, "chosen", 10), (2, "rejected", 11)])
        self.assertEqual(lines[1]["parts"],
                         [{"loss": False, "text": prompt}, {"loss": True, "text": "5?<|endoftext|>"}])

    def test_without_a_tokenizer_the_data_says_its_vocabulary(self):
        data = self.make_examples("no_tokenizer", [(f"{i} = ", str(i)) for i in range(100)], "--val", "0")
        os.remove(os.path.join(data, "tokenizer.json"))
        args = ["train", *MODEL, "--data", data, "--steps", 1, "--seq-len", 32, "--batch-size", 1]
        out = os.path.join(self.top, "no_tokenizer_run")
        done = run(*args, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        config = json.loads(text_of(os.path.join(out, "step_00000001", "config.json")))
        self.assertEqual((config["vocab_size"], config["eos_token_id"]), (257, 256))
        self.refused(1, ["--vocab-size 200 is smaller than the data's vocabulary of 257"],
                     *args, "--vocab-size", 200, "--out", os.path.join(self.top, "nothing"))

    def test_sample_prompts(self):
        """Answers to given prompts while training: on the screen and in the log, the same in each run."""
        data = self.make_examples("asked", [(f"{i} = ", str(i)) for i in range(100)], "--val", "0")
        prompts = os.path.join(self.top, "prompts.txt")
        with open(prompts, "w") as file:
            file.write("7 = \n---\nsecond\nline\n")
        args = ["--data", data, "--seq-len", 48, "--batch-size", 2, "--steps", 4, "--sample-prompts", prompts]
        done = run(*self.train_args("asked_run", *args, "--sample-every", 2))
        self.assertEqual(done.returncode, 0, done.stderr)
        for step in (2, 4):
            self.assertIn(f"step {step}  prompt: 7 = \n  response: ", done.stderr)
        self.assertIn("  prompt: second\nline\n  response: ", done.stderr)
        lines = log(os.path.join(self.top, "asked_run"))
        samples = [line["samples"] for line in lines if "samples" in line]
        self.assertEqual([[sample["prompt"] for sample in entry] for entry in samples], [["7 = ", "second\nline"]] * 2)
        self.assertNotEqual(samples[0][0]["text"], samples[0][1]["text"])
        # Resumed: the prompts of run.toml, the same samples.
        resumed = os.path.join(self.top, "asked_run")
        self.assertEqual(run("train", "--resume", "--out", resumed, "--steps", 6).returncode, 0)
        self.assertEqual([line["samples"] for line in log(resumed) if "samples" in line][:2], samples)
        self.assertEqual([line["step"] for line in log(resumed) if "samples" in line], [2, 4, 6])
        with open(prompts, "w") as file:
            file.write("x" * 49)
        self.refused(1, ["prompt 1 of", "has 49 tokens, more than --seq-len 48"],
                     *self.train_args("nothing", *args, "--sample-every", 1))
        self.refused(2, ["--sample-prompts", "add --sample-every"], *self.train_args("nothing", *args))
        missing = os.path.join(self.top, "missing")
        self.refused(1, [missing], *self.train_args("nothing", *args[:-1], missing, "--sample-every", 1))


if __name__ == "__main__":
    unittest.main()
