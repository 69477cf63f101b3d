#!/usr/bin/env python3
"""`eval` and `logits`: scores of text, of questions and of last words, against the log and the logits."""
import json
import math
import os
import shutil
import struct
import unittest

import numpy as np

from harness import BaseRunTest, checkpoints, log, losses, run, tokenize


class EvalTest(BaseRunTest):
    def test_eval(self):
        result = json.loads(run("eval", "--model", self.base, "--data", self.data, "--json").stdout)
        with open(os.path.join(self.data, "meta.json")) as file:
            meta = json.load(file)
        self.assertEqual(result["tokens"], meta["val"]["tokens"])
        self.assertEqual(result["bytes"], meta["val"]["bytes"])
        self.assertAlmostEqual(result["perplexity"], math.exp(result["val_loss"]), places=6)
        bits = result["val_loss"] * result["tokens"] / math.log(2)
        self.assertAlmostEqual(result["bits_per_byte"], bits / result["bytes"], places=9)
        logged = [line["val_loss"] for line in log(self.base) if "val_loss" in line][-1]
        self.assertAlmostEqual(result["val_loss"], logged, places=5)
        plain = run("eval", "--model", self.base, "--data", self.data, "--batch-size", 3).stdout.split()
        self.assertEqual(plain[::2], ["tokens", "bytes", "val_loss", "perplexity", "bits_per_byte"])
        self.assertAlmostEqual(float(plain[5]), result["val_loss"], places=5)

    def test_dynamic_rope_follows_each_example(self):
        """Not --seq-len, which only says how many examples are packed into a row; nor that of training."""
        base = self.train("rope", "--positions", "rope")
        model = os.path.join(self.top, "dynamic")
        shutil.copytree(os.path.join(base, checkpoints(base)[-1]), model)
        path = os.path.join(model, "config.json")
        with open(path) as file:
            config = json.load(file)
        source, data = os.path.join(self.top, "pairs.jsonl"), os.path.join(self.top, "pairs")
        with open(source, "w") as file:
            for i in range(12):
                file.write(json.dumps({"prompt": "ab " * (i % 3) + "x", "response": "cd" * (i % 4 + 1)}) + "\n")
        tokenize(source, data, "--val", "0.5", tokenizer=model)

        def val_loss(original, seq_len):
            config["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": original}
            with open(path, "w") as file:
                json.dump(config, file)
            done = run("eval", "--model", model, "--data", data, "--seq-len", seq_len, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["val_loss"]

        for original in 8, 24:  # shorter than some examples, and than none
            with self.subTest(original):
                expected = val_loss(original, 24)
                for seq_len in 40, 100:
                    self.assertAlmostEqual(val_loss(original, seq_len), expected, places=5)
        self.assertGreater(abs(val_loss(8, 24) - val_loss(24, 24)), 1e-4)  # scaling has an effect where it begins
        with open(os.path.join(data, "meta.json")) as file:
            self.assertGreater(json.load(file)["val"]["tokens"], 24)  # several examples
        # Training begins with the loss that eval gives, and its log does not depend on --seq-len either.
        first = []
        for seq_len in 24, 100:
            out = os.path.join(self.top, f"dynamic_{seq_len}")
            done = run("train", "--model", model, "--data", data, "--out", out, "--seq-len", seq_len, "--batch-size", 1,
                       "--steps", 1, "--lr", "1e-9", "--eval-every", 1, "--dtype", "fp32")
            self.assertEqual(done.returncode, 0, done.stderr)
            first.append([line["val_loss"] for line in log(out) if "val_loss" in line][0])
        self.assertAlmostEqual(first[0], first[1], places=5)
        self.assertAlmostEqual(first[0], val_loss(24, 24), places=4)

    def test_multiple_choice(self):
        path = os.path.join(self.top, "questions.jsonl")
        endings = ["sat on the mat", "zzz zzz zzz zz", "qqqqqqqqqqqqqq"]
        questions = [{"ctx": "The cat", "endings": endings, "label": i % 3} for i in range(6)]
        with open(path, "w") as file:
            file.writelines(json.dumps(question) + "\n" for question in questions)
        result = json.loads(run("eval", "--model", self.base, "--multiple-choice", path, "--json").stdout)
        self.assertEqual(result["count"], 6)
        self.assertAlmostEqual(result["accuracy"], 1 / 3)  # the same ending each time, which is right for two of six
        self.assertAlmostEqual(result["accuracy_norm"], 1 / 3)
        small = run("eval", "--model", self.base, "--multiple-choice", path, "--json", "--batch-size", 1)
        self.assertEqual(json.loads(small.stdout), result)
        both = run("eval", "--model", self.base, "--multiple-choice", path, "--data", self.data)
        self.assertEqual(both.returncode, 2)
        # During training: at each evaluation, with the result of the command.
        trained = self.train("questions", "--steps", 8, "--eval-multiple-choice", path)
        lines = [line for line in log(trained) if "accuracy" in line]
        self.assertEqual([(line["step"], "val_loss" in line) for line in lines], [(4, True), (8, True)])
        alone = json.loads(run("eval", "--model", trained, "--multiple-choice", path, "--json").stdout)
        for score in ("accuracy", "accuracy_norm"):
            self.assertEqual(lines[-1][score], alone[score])
        self.assertEqual(losses(trained), losses(self.base))  # questions change nothing
        missing = os.path.join(self.top, "no_questions")
        self.refused(1, ["no_questions: "], *self.train_args("refused", "--eval-multiple-choice", missing))
        with open(path, "a") as file:
            file.write("{}\n")
        broken = run("eval", "--model", self.base, "--multiple-choice", path)
        self.assertEqual((broken.returncode, broken.stderr.count("\n")), (1, 1))
        self.assertIn("line 7", broken.stderr)

    def test_last_words(self):
        """Texts with one ending, against the logits: the tokenizer's tokens are bytes."""
        path = os.path.join(self.top, "last_words.jsonl")
        texts = [("The cat sat on the", "mat"), ("To be or not to", "be"), ("Thou art a", "man")]
        with open(path, "w") as file:
            file.writelines(json.dumps({"ctx": context, "endings": [word]}) + "\n" for context, word in texts)
        result = json.loads(run("eval", "--model", self.base, "--multiple-choice", path, "--json").stdout)
        nats, right = 0, 0
        for context, word in texts:
            ids = list(f"{context} {word}".encode())
            out = os.path.join(self.top, "last_word.npy")
            run("logits", "--model", self.base, "--tokens", " ".join(map(str, ids)), "--output", out)
            logits = np.load(out).reshape(len(ids), -1).astype(float)
            scored = range(len(context), len(ids))
            nats += sum(np.log(np.exp(logits[i - 1]).sum()) - logits[i - 1, ids[i]] for i in scored)
            right += all(logits[i - 1].argmax() == ids[i] for i in scored)
        self.assertEqual(set(result), {"accuracy", "perplexity", "count"})
        self.assertEqual((result["accuracy"], result["count"]), (right / len(texts), len(texts)))
        self.assertAlmostEqual(result["perplexity"] / math.exp(nats / len(texts)), 1, delta=1e-4)
        trained = self.train("last_words", "--eval-multiple-choice", path)
        last = [line for line in log(trained) if "accuracy" in line][-1]
        alone = json.loads(run("eval", "--model", trained, "--multiple-choice", path, "--json").stdout)
        self.assertEqual([last["accuracy"], last["perplexity"]], [alone["accuracy"], alone["perplexity"]])

    def test_logits(self):
        out, dump = os.path.join(self.top, "logits.npy"), os.path.join(self.top, "dump")
        done = run("logits", "--model", self.base, "--tokens", "84 104 101", "--output", out, "--dump", dump)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(out, "rb") as file:
            blob = file.read()
        size = struct.unpack("<H", blob[8:10])[0]
        self.assertIn(b"'shape': (3, 257)", blob[:10 + size])
        values = struct.unpack("<771f", blob[10 + size:])
        self.assertTrue(all(math.isfinite(v) for v in values))
        names = set(os.listdir(dump))
        self.assertLessEqual({"layers.0.res1.npy", "layers.1.qkv.npy", "layers.1.act.npy", "normf.npy"}, names)
        greedy = run("sample", "--model", self.base, "--prompt", "The", "--temperature", 0, "--max-tokens", 1,
                     "--ignore-eos", "--json")
        last = values[-257:]
        self.assertEqual(last.index(max(last)), json.loads(greedy.stdout)["samples"][0]["tokens"][0])


if __name__ == "__main__":
    unittest.main()
