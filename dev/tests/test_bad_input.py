#!/usr/bin/env python3
"""Wrong options, paths and files: each is an error of one line, and no file is made."""
import json
import math
import os
import shutil
import struct
import unittest

from harness import MODEL, BaseRunTest, cuda, run


class BadInputTest(BaseRunTest):
    def fifo(self):
        """A FIFO that no process writes to."""
        path = os.path.join(self.top, "fifo")
        if not os.path.exists(path):
            os.mkfifo(path)
        return path

    def test_wrong_flags(self):
        for words, args in (
            (["no command"], []),
            (["unknown command 'trian', did you mean 'train'?"], ["trian"]),
            (["unknown command 'frobnicate'; "], ["frobnicate"]),
            (["--model is required"], ["train", "--data", self.data, "--out", "x"]),
            (["train: unknown option --bogus; see"], self.train_args("x", "--bogus")),
            (["train: unknown option --modle, did you mean --model?; see"], ["train", "--modle", "gpt2-tiny"]),
            (["train: unknown option --modle, did you mean --model?; see"], ["train", "--modle=gpt2-tiny"]),
            (["--steps: 0 is not a whole number of at least 1 (and at most 2^40); unknown option --sed, did you mean "
              "--seed?; --layers: 0 is"], ["train", "--steps", 0, "--sed", 3, "--layers", 0]),
            (["did you mean --keep-tokens?"], ["sample", "--model", "gpt2-tiny", "--keep", 2]),
            (["unexpected argument 'there'"], ["sample", "--model", "gpt2-tiny", "--prompt", "Hello", "there"]),
            (["--steps: the value is missing"], self.train_args("x", "--steps")),
            (["--seed: 2 values; give one"], self.train_args("x", "--seed", 1, "--seed", 2)),
            (["--prompt excludes --prompt-file; leave"],
             ["sample", "--model", "x", "--prompt", "a", "--prompt-file", "b"]),
            *((["--attention: 'X", "write softmax, linear or gated_linear"], ["plan", *MODEL, "--attention", wrong])
              for wrong in ("X", "XS", "XSoftmax", "softmax,X", "S,X")),
            (["run.toml", "rename"], self.train_args("x#y")),
            (["--steps", "0 is not"], self.train_args("x", "--steps", 0)),
            (["--steps", "-3 is not"], self.train_args("x", "--steps", -3)),
            (["--steps", "1e3"], self.train_args("x", "--steps", "1e3")),
            (["--batch-size", "99999999999999999999"], self.train_args("x", "--batch-size", "99999999999999999999")),
            (["--lr", "nan"], self.train_args("x", "--lr", "nan")),
            *(([option + " is an option of --optimizer muon"], self.train_args("x", option, value))
              for option, value in (("--momentum", 0.9), ("--momentum-warmup", 3), ("--muon-coefficients", "simple"),
                                    ("--muon-iterations", 5), ("--muon-scale", "rms"), ("--adam-weight-decay", 0.1))),
            (["--optimizer: sgd is not one of {adamw,muon}"], self.train_args("x", "--optimizer", "sgd")),
            (["--muon-iterations", "0 is not"], self.train_args("x", "--optimizer", "muon", "--muon-iterations", 0)),
            (["--muon-iterations", "101"], self.train_args("x", "--optimizer", "muon", "--muon-iterations", 101)),
            (["--muon-coefficients: cubic is not one of"],
             self.train_args("x", "--optimizer", "muon", "--muon-coefficients", "cubic")),
            (["--lr 0", "scaled with it"], self.train_args("x", "--lr", 0, "--embedding-lr", 1e-3)),
            (["--decay-fraction 0: wsd would never reach --final-lr; raise it, or use --schedule constant"],
             self.train_args("x", "--schedule", "wsd", "--decay-fraction", 0)),
            (["--schedule: cosin is not one of {cosine,"], self.train_args("x", "--schedule", "cosin")),
            (["--config: /nonexistent.toml: cannot open: No such file"], ["train", "--config", "/nonexistent.toml"]),
            (["--config: /dev/zero: holds more than the 1048576 bytes"], ["train", "--config=/dev/zero"]),
            (["--config: ", "is a FIFO that no process writes to"], ["train", "--config", self.fifo()]),
            (["--temperature"], ["sample", "--model", self.base, "--temperature", "-1"]),
            (["--presence-penalty: 2000 is not"], ["sample", "--model", self.base, "--presence-penalty", "2000"]),
            (["--top-logprobs: 21 is not"], ["sample", "--model", self.base, "--top-logprobs", "21", "--json"]),
            (["--top-logprobs", "--json"], ["sample", "--model", self.base, "--top-logprobs", "3"]),
            (["--tokens", "'x'"], ["logits", "--model", self.base, "--tokens", "1 x", "--output", "x.npy"]),
            (["--seed"], ["sample", "--model", self.base, "--seed", "-1"]),
            *(([f"{option}: '' is not"], self.train_args("x", option, ""))
              for option in ("--zero-stage", "--seed", "--save-every", "--lr", "--dtype", "--schedule")),
            (["--zero-stage: 4 is not one of {0,"], self.train_args("x", "--zero-stage", 4)),
            (["--config: the value is empty"], self.train_args("x", "--config", "")),
            # An octal and a hexadecimal number would be read as another one, or as two different ones.
            *(([f"{option}: {value} is not"], ["plan", *MODEL, option, value])
              for option in ("--seq-len", "--window") for value in ("010", "0x10", "1_0", " 4", "4 ")),
            *(([f"{option}: '' is not"], ["plan", *MODEL, option, value])
              for option, value in (("--window", "4,"), ("--attention", "S,"), ("--attention", ""))),
            (["--model: the value is empty; give one; --gpu: the value is empty; give one, or leave the option out"],
             ["plan", "--model", "", "--gpu", ""]),
            (["--data: the value is empty"], self.train_args("x", "--data", "")),
            (["--out: the value is empty"], ["train", *MODEL, "--data", self.data, "--out="]),
            (["--gpu: the value is empty"], ["plan", *MODEL, "--gpu=", "--json"]),
            (["DST: the value is empty"], ["convert", self.base, ""]),
            (["--data: the value is empty"], ["info", ""]),
            (["--rendezvous nowhere is not HOST:PORT"], self.train_args("x", "--rendezvous", "nowhere")),
            (["--world: 65537 is not"], ["plan", *MODEL, "--world", 65537]),
            *((["--multiple-choice excludes " + option],
               ["eval", "--model", self.base, "--multiple-choice", "x", option, value])
              for option, value in (("--split", "train"), ("--too-long", "skip"))),
            (["--sample-prompts has no effect without --sample-every"], self.train_args("x", "--sample-prompts", "x")),
        ):
            self.refused(2, words, *args)
        done = run("sample", "--model", self.base, "--prompt=", "--max-tokens", 1, "--stop", "")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_bad_input(self):
        top, base, data = self.top, self.base, self.data
        other_data = self.with_another_tokenizer(data)
        checkpoint = os.path.join(base, "step_00000008")
        for words, args in (
            (["nosuch", "gpt2-124M"], self.train_args("x", "--model", "nosuch")),
            (["--resume", top + "/x is not a directory", "leave --resume out"], self.train_args("x", "--resume")),
            (["--resume", top + "/x is not a directory"], ["train", "--out", top + "/x", "--resume"]),
            (["--resume", "holds neither a checkpoint nor run.toml"], ["train", "--out", data, "--resume"]),
            (["--num-samples 1099511627776", "at most 1000000"], ["sample", "--model", base, "--num-samples", 1 << 40]),
            (["/nonexistent"], ["train", *MODEL, "--data", "/nonexistent", "--out", top + "/x"]),
            (["train_"], ["train", *MODEL, "--data", top, "--out", top + "/x"]),
            ([data + "/meta.json", "--out"], ["train", *MODEL, "--data", data, "--out", data + "/meta.json"]),
            (["--resume"], self.train_args("base", "--steps", 9)),
            (["--seed"], ["train", "--out", base, "--resume", "--seed", 7]),
            (["--seq-len"], ["train", "--out", base, "--resume", "--seq-len", 16]),
            (["shape"], ["train", "--out", base, "--resume", "--layers", 3]),
            (["--head-lr", "tied", "--embedding-lr"], self.train_args("x", "--head-lr", 1e-3)),
            (["64 rows"], self.train_args("x", "--seq-len", 65)),
            (["3 heads", "32 channels"],
             ["train", "--model", "gpt2-tiny", "--channels", 32, "--heads", 3, "--data", data, "--out", top + "/x"]),
            (["3 KV heads"], [*self.train_args("x"), "--kv-heads", 3]),
            (["too large"], self.train_args("x", "--batch-size", 1 << 30)),
            (["free"], self.train_args("x", "--model", "llama-8B", "--batch-size", 512, "--seq-len", 2048)),
            (["100", "128"], self.train_args("x", "--total-batch-tokens", 100)),
            (["--vocab-size 100", "257"], [*self.train_args("x"), "--vocab-size", 100]),
            *([(["fp16", "linear attention"],
                ["sample", *MODEL, "--attention", "G", "--random-weights", "--dtype", "fp16"])] if cuda() else []),
            (["attention 'SSS' names 3 layers, the model has 2"],
             [*self.train_args("x"), "--attention", "softmax,S,softmax"]),
            (["--linear-rope", "--positions rope"], [*self.train_args("x"), "--attention", "L", "--linear-rope", "no"]),
            *([] if cuda() else [(["bf16"], self.train_args("x", "--dtype", "bf16"))]),
            (["preset without weights"], ["eval", "--model", "gpt2-tiny", "--data", data]),
            (["another tokenizer"], ["eval", "--model", base, "--data", other_data]),
            (["another tokenizer"], ["train", "--model", base, "--data", other_data, "--out", top + "/x"]),
            (["checkpoint and fixes the shape"], ["eval", "--model", base, "--layers", 3, "--data", data]),
            (["beyond the model's vocabulary"],
             ["logits", "--model", base, "--tokens", "257", "--output", top + "/x.npy"]),
            (["/nonexistent"], ["info", "/nonexistent"]),
            (["/nonexistent"], ["sample", "--model", base, "--prompt-file", "/nonexistent"]),
            ([data], ["sample", "--model", base, "--prompt-file", data]),
            *(([endless, "more than the 67108864 bytes"], [*args, endless]) for endless in ["/dev/zero"] for args in (
                ["sample", "--model", base, "--prompt-file"], ["eval", "--model", base, "--multiple-choice"],
                [*self.train_args("x"), "--sample-every", 1, "--sample-prompts"],
                [*self.train_args("x"), "--eval-multiple-choice"])),
            (["is a FIFO"], ["sample", "--model", base, "--prompt-file", self.fifo()]),
            (["is a FIFO"], ["info", self.fifo()]),
            (["/nonexistent/x.npy"], ["logits", "--model", base, "--tokens", "1", "--output", "/nonexistent/x.npy"]),
            (["neither a config.json", "gpt2-124M"], ["sample", "--model", top, "--prompt", "x"]),
            (["tokenizer.json"], ["sample", "--model", "gpt2-tiny", "--prompt", "x"]),
            (["a token file"], ["info", os.path.join(base, "run.toml")]),
            (["not a tokenizer.json"], ["info", os.path.join(checkpoint, "config.json")]),
            (["--fit", "1.00 MiB", "are less than", "raise --gpu-memory"],
             ["plan", *MODEL, "--gpu", "h100 80gb", "--gpu-memory", "1MiB", "--fit"]),
            (["no room to keep 5", "--keep-tokens"],
             ["sample", "--model", base, "--prompt", "x", "--keep-tokens", 5, "--context", 4]),
            (["a prompt of 9 tokens", "--context"],
             ["sample", "--model", base, "--prompt", "x" * 9, "--context", 8, "--context-full", "stop"]),
            (["train: " + top + "/base/run.toml", "cannot create the directory", "name a directory"],
             ["train", *MODEL, "--seq-len", 32, "--data", data, "--out", base + "/run.toml/x"]),
            (["cannot create the directory"],
             ["logits", "--model", base, "--tokens", "1", "--output", top + "/x.npy", "--dump", base + "/run.toml/x"]),
        ):
            self.refused(1, words, *args)

    def test_damaged_checkpoint(self):
        for name, change in (
            ("config.json", lambda b: b[:20]),
            ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": 0')),
            ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": 3')),
            ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": "2"')),
            ("model.safetensors", lambda b: b[:-5]), ("model.safetensors", lambda b: b"\xff" * 8 + b[8:]),
            ("model.safetensors", lambda b: b.replace(b"F32", b"I32", 1)), ("model.safetensors", lambda b: b""),
        ):
            folder = os.path.join(self.top, "model_copy")
            shutil.copytree(os.path.join(self.base, "step_00000008"), folder)
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                blob = file.read()
            self.assertNotEqual(change(blob), blob, name)
            with open(path, "wb") as file:
                file.write(change(blob))
            self.refused(1, [path], "eval", "--model", folder, "--data", self.data)
            shutil.rmtree(folder)

    def test_weights_that_are_not_finite(self):
        """They are named wherever they are read; a loss that is not a number is an error."""
        model, copy = os.path.join(self.top, "not_finite"), os.path.join(self.top, "not_finite_copy")
        shutil.copytree(os.path.join(self.base, "step_00000008"), model)
        path = os.path.join(model, "model.safetensors")
        with open(path, "r+b") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(size))
            for name, value in (("h.1.mlp.c_fc.weight", math.inf), ("h.0.ln_1.bias", math.nan)):
                full = next(tensor for tensor in header if tensor.endswith(name))
                file.seek(8 + size + header[full]["data_offsets"][1] - 4)
                file.write(struct.pack("<f", value))
        questions = os.path.join(self.top, "one_question.jsonl")
        with open(questions, "w") as file:
            file.write(json.dumps({"ctx": "The cat", "endings": ["sat", "ran"], "label": 0}) + "\n")
        for status, args in (
            (0, ["logits", "--model", model, "--tokens", "1 2", "--output", os.path.join(self.top, "not_finite.npy")]),
            (0, ["convert", model, copy]),
            (0, ["convert", model, copy + ".bin"]),
            (0, ["convert", copy + ".bin", copy + "2"]),
            (1, ["sample", "--model", model, "--max-tokens", 2]),
            (1, ["eval", "--model", model, "--data", self.data]),
            (1, ["eval", "--model", model, "--multiple-choice", questions]),
            (1, self.train_args("not_finite_run", "--model", model, "--steps", 3, "--max-skips", 2)),
        ):
            done = run(*args)
            self.assertEqual(done.returncode, status, (args, done.stderr))
            self.assertRegex(done.stderr, r"warning: .*: NaN or infinite values in .*h\.0\.ln_1\.bias", args)
            self.assertRegex(done.stderr, r"NaN or infinite values in .*h\.1\.mlp\.c_fc\.weight", args)
            if args[0] == "eval":
                self.assertIn("the loss", done.stderr)
                self.assertEqual(done.stdout, "")
        self.assertNotIn("warning", run("eval", "--model", self.base, "--data", self.data).stderr)


if __name__ == "__main__":
    unittest.main()
