#!/usr/bin/env python3
"""Data of a run: mixtures, new data for a resumed run, damaged files."""
import json
import os
import shutil
import struct
import unittest

from harness import MODEL, BaseRunTest, digests, log, losses, run, text_of, tokenize


class TrainingDataTest(BaseRunTest):
    def make_text_data(self, name, line, files=12):
        """A data directory of another text, with byte tokens."""
        text = os.path.join(self.top, name + "_text")
        os.mkdir(text)
        for i in range(files):
            with open(os.path.join(text, f"{i:02}.txt"), "w") as file:
                file.writelines(line.format(i * 7 + j) for j in range(20))
        return tokenize(text, os.path.join(self.top, name), "--val", "0.2")

    def test_mixed_data(self):
        numbers = self.make_text_data("numbers", "{0} is a number.\n")
        mixed = f"{self.data}:0.75,{numbers}:0.25"
        args = ["--data", mixed, "--steps", 8, "--save-every", 4]
        done = run(*self.train_args("mixed_data", *args))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, rf"{self.data}: 75% of the samples, [\d.]+ epochs: [\d,]+ training tokens in "
                                      r"\d+ training seq")
        self.assertRegex(done.stderr, rf"{numbers}: 25% of the samples, ")
        whole = os.path.join(self.top, "mixed_data")
        self.assertIn(f'data="{mixed}"', text_of(os.path.join(whole, "run.toml")))
        last = [line for line in log(whole) if "val_loss" in line][-1]
        self.assertEqual(set(last), {"step", "val_loss", "val"})
        self.assertEqual(set(last["val"]), {self.data, numbers})
        for directory, score in last["val"].items():  # as the command scores each
            alone = json.loads(run("eval", "--model", whole, "--data", directory, "--json").stdout)
            self.assertAlmostEqual(alone["val_loss"], score["val_loss"], places=5)
            self.assertAlmostEqual(alone["bits_per_byte"], score["bits_per_byte"], places=5)
        mean = 0.75 * last["val"][self.data]["val_loss"] + 0.25 * last["val"][numbers]["val_loss"]
        self.assertAlmostEqual(last["val_loss"], mean, places=9)
        # Resumed to the same bits, with the options of run.toml; and in micro-steps of one sequence the same losses.
        expected, expected_losses = digests(os.path.join(whole, "step_00000008")), losses(whole)
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", whole).returncode, 0)
        self.assertEqual((digests(os.path.join(whole, "step_00000008")), losses(whole)), (expected, expected_losses))
        micro = self.train("mixed_micro", *args, "--batch-size", 1, "--total-batch-tokens", 128)
        for step, loss in expected_losses.items():
            self.assertAlmostEqual(losses(micro)[step] / loss, 1, delta=2e-5)
        # Other weights are other data. Weights that mean the same are not.
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        self.refused(1, ["--resume: ", "is not the data that", "by --new-data"], "train", "--resume", "--out", whole,
                     "--data", f"{self.data}:1,{numbers}:1")
        same = run("train", "--resume", "--out", whole, "--data", f"{self.data}:3,{numbers}:1")
        self.assertEqual((same.returncode, losses(whole)), (0, expected_losses), same.stderr)
        other = self.with_another_tokenizer(self.data)
        for words, data in ((["was made with another tokenizer than"], f"{self.data}:1,{other}:1"),
                            (["'" + numbers + "' is not a directory with its weight"], f"{self.data}:1,{numbers}")):
            self.refused(2 if "weight" in words[0] else 1, words, *self.train_args("refused", "--data", data))

    def test_new_data(self):
        """A resumed run goes on with other data from its first sample on, and says so."""
        other = self.make_text_data("letters", "letter {0}\n")
        run_dir = self.copy_with_checkpoint("new_data", 4)

        def history(step):
            return json.loads(text_of(os.path.join(run_dir, f"step_{step:08}", "trainer.json")))["data_history"]
        self.refused(1, ["is not the data that"], "train", "--resume", "--out", run_dir, "--data", other)
        self.refused(1, ["--new-data: ", "is the data that", "leave the option out"], "train", "--resume",
                     "--out", run_dir, "--new-data", self.data)
        self.refused(1, ["was made with another tokenizer"], "train", "--resume", "--out", run_dir,
                     "--new-data", self.with_another_tokenizer(other))
        self.refused(2, ["--new-data is for --resume"], *self.train_args("nothing", "--new-data", other))
        self.refused(2, ["--new-data takes the place of --data"], "train", "--resume", "--out", run_dir,
                     "--data", other, "--new-data", other)
        done = run("train", "--resume", "--out", run_dir, "--new-data", other, "--steps", 8, "--save-every", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("with new data", done.stderr)
        self.assertIn(f'data="{other}"', text_of(os.path.join(run_dir, "run.toml")))
        self.assertNotIn("new-data", text_of(os.path.join(run_dir, "run.toml")))
        self.assertEqual([(use["first_step"], use["data"]) for use in history(8)], [(0, self.data), (4, other)])
        self.assertNotEqual(losses(run_dir)[8], losses(self.base)[8])
        # It resumes to the same bits without consent to anything, and a second change is noted, too.
        expected, expected_losses = digests(os.path.join(run_dir, "step_00000008")), losses(run_dir)
        shutil.rmtree(os.path.join(run_dir, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), expected)
        self.assertEqual(losses(run_dir), expected_losses)
        back = run("train", "--resume", "--out", run_dir, "--new-data", self.data, "--steps", 9)
        self.assertEqual(back.returncode, 0, back.stderr)
        self.assertEqual([use["first_step"] for use in history(9)], [0, 4, 8])
        # The steps on new data read what a new run from that checkpoint's weights reads.
        fresh = self.train("fresh_data", "--model", os.path.join(self.base, "step_00000004"), "--data", other,
                           "--steps", 1)
        self.assertEqual(losses(fresh)[1], expected_losses[5])

    def test_damaged_data(self):
        def damaged(name, change):
            folder = os.path.join(self.top, "damaged")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.data, folder)
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                blob = bytearray(file.read())
            with open(path, "wb") as file:
                file.write(change(blob))
            return folder, path
        token = lambda b: b[:1024 + 20] + struct.pack("<H", 300) + b[1024 + 22:]
        for name, change, words in (
            ("train_000000.bin", lambda b: b[:100], []), ("train_000000.bin", lambda b: b[:-1], []),
            ("train_000000.bin", lambda b: b"\1" + b[1:], ["not a token file"]),
            ("train_000000.bin", lambda b: b"", []),
            ("train_000000.bin", lambda b: b[:8] + b"\0\0\0\0" + b[12:1024], []),
            ("val_000000.bin", token, ["300"]), ("tokenizer.json", lambda b: b[:50], []),
            ("meta.json", lambda b: b"[1]", []),
            ("meta.json", lambda b: b.replace(b'"bytes"', b'"bites"', 1), ["key 'train.bytes' is missing"]),
            ("meta.json", lambda b: b.replace(b'"tokens": ', b'"tokens": 1', 1),
             ["'train.tokens' is 1", "train_*.bin holds "]),
            ("meta.json", lambda b: b.replace(b'"vocab_size": 257', b'"vocab_size": []'),
             ["'vocab_size' is [], expected"]),
        ):
            folder, path = damaged(name, change)
            if change is token:
                done = run("eval", "--model", self.base, "--data", folder)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
                self.assertIn(path, done.stderr)
                continue
            self.refused(1, [path, *words], "train", *MODEL, "--data", folder, "--out", self.top + "/x")
        shutil.rmtree(os.path.join(self.top, "damaged"))


if __name__ == "__main__":
    unittest.main()
