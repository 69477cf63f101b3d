#!/usr/bin/env python3
"""Resumed runs have the bits of runs that were not stopped. What cannot be resumed is refused in one line that names
file, value and remedy."""
import json
import os
import shutil
import struct
import unittest

from harness import BaseRunTest, checkpoints, digest, digests, log, losses, run, tensor_bytes


class ResumeTest(BaseRunTest):
    def test_resume_is_bit_exact(self):
        other = self.copy_with_checkpoint("resumed", 4)
        done = run("train", "--out", other, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        for step in range(1, 5):
            self.assertNotIn(f"step {step}/8", done.stderr)  # really from the checkpoint
        self.assertEqual(losses(other), losses(self.base))
        self.assertEqual([line["step"] for line in log(other)], [line["step"] for line in log(self.base)])
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000008")) for run_dir in (other, self.base)))

    def test_finished_run_reports_that_it_is_finished(self):
        done = run("train", "--out", self.base, "--resume")
        self.assertEqual(done.returncode, 0)
        self.assertIn("is done: step 8 of 8", done.stderr)

    def test_a_rate_that_goes_up_is_named(self):
        """Where a resumed run's schedule has a higher rate than the run had, a line names both and the rates with which
        it goes on as it was."""
        def resumed(name, *options):
            done = run("train", "--resume", "--out", os.path.join(self.top, name), *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = [line for line in done.stderr.splitlines() if line.startswith("the learning rate goes up")]
            rates = {line["step"]: line["lr"] for line in log(os.path.join(self.top, name)) if "lr" in line}
            return "".join(lines), rates

        self.train("up", "--steps", 6, "--warmup", 4, "--save-every", 2, "--optimizer", "muon", "--embedding-lr", 0.01)
        shutil.copytree(os.path.join(self.top, "up"), os.path.join(self.top, "warm"))
        for step in 4, 6:
            shutil.rmtree(os.path.join(self.top, "warm", f"step_{step:08}"))
        said, rates = resumed("warm")  # in the warmup the same schedule rises by itself
        self.assertEqual(said, "")
        self.assertLess(rates[2], rates[3])
        said, rates = resumed("up", "--steps", 12)
        self.assertEqual(said, "the learning rate goes up: it was 0.0003 in step 6, where the schedule of 12 steps has "
                         "0.00287; with --lr 0.000314 --embedding-lr 0.00105 --vector-lr 0.00105 it goes on from there")
        self.assertGreater(rates[7], 5 * rates[6])
        shutil.rmtree(os.path.join(self.top, "up"))
        self.train("up", "--steps", 6, "--warmup", 4, "--optimizer", "muon", "--embedding-lr", 0.01)
        quiet, rates = resumed("up", "--steps", 12, *said.split("with ")[1].split(" it goes")[0].split())
        self.assertEqual(quiet, "")
        self.assertTrue(0.8 < rates[7] / rates[6] < 1, rates)

    def test_resumed_overfitting_uses_the_same_batch(self):
        whole = self.train("overfit_whole", "--steps", 4, "--save-every", 2, "--schedule", "constant",
                           "--overfit-one-batch")
        other = os.path.join(self.top, "overfit_resumed")
        shutil.copytree(whole, other)
        shutil.rmtree(os.path.join(other, "step_00000004"))
        done = run("train", "--out", other, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(other), losses(whole))

    def test_keep_preserves_the_best_checkpoint(self):
        # The first checkpoint is the best: from there on the learning rate is absurd.
        run_dir = self.copy_with_checkpoint("keep", 4)
        done = run("train", "--out", run_dir, "--resume", "--steps", 16, "--save-every", 2, "--eval-every", 2,
                   "--keep", 2, "--lr", 3, "--schedule", "constant", "--grad-clip", 0, "--max-skips", 100)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(checkpoints(run_dir), ["step_00000004", "step_00000014", "step_00000016"])

    def change_state(self, path, change):
        """Rewrites a state.safetensors: change(header, data) changes both in place. The header keeps its length."""
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header, data = json.loads(file.read(size)), bytearray(file.read())
        change(header, data)
        text = json.dumps(header, separators=(",", ":")).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", size) + text.ljust(size) + data)

    def bf16_run(self):
        """A copy of the base run up to step 4, with the weights in bf16 and what bf16 loses in the state."""
        out = os.path.join(self.top, "bf16_base")
        if not os.path.exists(out):
            self.train("bf16_base", "--steps", 8, "--save-every", 4, "--save-dtype", "bf16")
            shutil.rmtree(os.path.join(out, "step_00000008"))
        return out

    def test_resume_reads_the_weights(self):
        """A changed value does not match its checksum; without checksums, as in files of older versions, it is used."""
        def raise_a_value(header, data):
            name = next(n for n in header if n.startswith(tensor) and n.endswith(weight))
            at = header[name]["data_offsets"][0]
            data[at:at + 4] = struct.pack("<f", struct.unpack("<f", data[at:at + 4])[0] * 1.5 + 1e-3)
        for tensor, file, run_dir in (("params/", "state", self.bf16_run()), ("m/", "state", self.base),
                                      ("v/", "state", self.base), ("transformer.", "model", self.base)):
            weight = "attn.weight" if file == "model" else "qkv.weight"
            other = os.path.join(self.top, f"changed_{tensor[0]}")
            shutil.copytree(run_dir, other)
            shutil.rmtree(os.path.join(other, "step_00000008"), ignore_errors=True)
            checkpoint = os.path.join(other, "step_00000004")
            path = os.path.join(checkpoint, file + ".safetensors")
            self.change_state(path, raise_a_value)
            done = run("train", "--out", other, "--resume")
            self.assertEqual(done.returncode, 1, tensor)
            self.assertRegex(done.stderr.splitlines()[-1],
                             rf"{path}: tensor {tensor}\S+: .*checksum.*; restore it: there is no earlier checkpoint")
        # The state of older versions held all weights, and at first no checksums.
        other = os.path.join(self.top, "changed_p")
        self.change_state(os.path.join(other, "step_00000004", "state.safetensors"),
                          lambda header, data: header.update(__metadata__={"format": "pt"}))
        os.truncate(os.path.join(other, "step_00000004", "model.safetensors"), 100)  # not read then
        done = run("train", "--out", other, "--resume", "--save-dtype", "fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEqual(*(digest(os.path.join(run_dir, "step_00000008", "model.safetensors"))
                              for run_dir in (other, self.base)))

    def test_save_dtype(self):
        """The run continues with the same bits, whatever the exported model's dtype."""
        def data_bytes(checkpoint):
            return {name: sum(map(len, tensor_bytes(os.path.join(checkpoint, name + ".safetensors")).values()))
                    for name in ("model", "state")}
        other = os.path.join(self.top, "save_dtype")
        shutil.copytree(self.bf16_run(), other)
        found, plain = (data_bytes(os.path.join(run_dir, "step_00000004")) for run_dir in (other, self.base))
        weights = plain["model"] // 4
        self.assertEqual((plain["state"], found["model"], found["state"]), (8 * weights, 2 * weights, 12 * weights))
        done = run("train", "--out", other, "--resume", "--save-dtype", "fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000008")) for run_dir in (other, self.base)))
        self.assertEqual(losses(other), losses(self.base))
        self.refused(2, ["--save-dtype", "fp16"], *self.train_args("refused", "--save-dtype", "fp16"))

    def test_weights_of_another_checkpoint_are_refused(self):
        other = os.path.join(self.top, "weights_of_another")
        shutil.copytree(self.base, other)
        checkpoint = os.path.join(other, "step_00000008")
        path = os.path.join(checkpoint, "model.safetensors")
        shutil.copyfile(os.path.join(other, "step_00000004", "model.safetensors"), path)
        self.refused(1, [path, "'step' is 4", f"; remove {checkpoint}"],
                     "train", "--out", other, "--resume", "--steps", 12)

    def test_checkpoints_that_cannot_be_resumed(self):
        """One line names file, value and remedy, before anything else is printed; the run directory stays as it is."""
        other = os.path.join(self.top, "unusable")
        shutil.copytree(self.base, other)
        checkpoint = os.path.join(other, "step_00000008")
        trainer, state, model = (os.path.join(checkpoint, name)
                                 for name in ("trainer.json", "state.safetensors", "model.safetensors"))
        remedy = f"; remove {checkpoint} to continue from step_00000004"
        files = {}
        for path in (trainer, state, model):
            with open(path, "rb") as file:
                files[path] = file.read()
        good = json.loads(files[trainer])
        resume = ("train", "--out", other, "--resume", "--steps", 12)
        for key, values in (("step", (7, 40000000000, -8, 8.0, "8", None)), ("adam_steps", (0.5, 1, 9, -1, "8", None)),
                            ("seq_len", (0, "32", None)), ("total_batch_tokens", (0, 1.5, None)), ("data", (3, None)),
                            ("seed", ("x",))):
            for value in values:
                changed = {k: v for k, v in {**good, key: value}.items() if v is not None}
                with open(trainer, "w") as file:
                    json.dump(changed, file)
                # One update fewer is plausible in itself: the state's file has another number.
                named = state if (key, value) == ("adam_steps", 1) else trainer
                self.refused(1, [named, f"'{key}'", remedy], *resume)
        for text in ("", "{", "[1]", files[trainer].decode()[:40]):
            with open(trainer, "w") as file:
                file.write(text)
            self.refused(1, [trainer, "damaged", remedy], *resume)
        with open(trainer, "wb") as file:
            file.write(files[trainer])
        for path in (state, model):
            for size in (0, 5, 3000, len(files[path]) - 1):
                with open(path, "wb") as file:
                    file.write(files[path][:size])
                self.refused(1, [path, remedy], *resume)
            with open(path, "wb") as file:
                file.write(files[path])
        self.assertEqual(run(*resume).returncode, 0)

    def test_an_incomplete_checkpoint_in_the_way(self):
        """A run that could not save its last checkpoint is refused before it starts."""
        out = os.path.join(self.top, "in_the_way")
        shutil.copytree(self.base, out)
        os.remove(os.path.join(out, "step_00000008", "model.safetensors"))
        self.refused(1, ["--out " + out, "step_00000008 is not a complete checkpoint", "restore its files"],
                     "train", "--out", out, "--resume")
        self.assertEqual(run("train", "--out", out, "--resume", "--steps", 7).returncode, 0)  # it comes to step 7 only
        shutil.rmtree(os.path.join(out, "step_00000008"))
        self.assertEqual(run("train", "--out", out, "--resume", "--steps", 8).returncode, 0)
        self.assertEqual(checkpoints(out), ["step_00000004", "step_00000007", "step_00000008"])


if __name__ == "__main__":
    unittest.main()
