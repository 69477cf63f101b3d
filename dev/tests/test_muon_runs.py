#!/usr/bin/env python3
"""Training with Muon: its options, the state, resuming, the plan."""
import json
import os
import shutil
import unittest

from harness import MODEL, BaseRunTest, digest, digests, losses, run, tensor_bytes, text_of


class MuonRunsTest(BaseRunTest):
    def test_muon(self):
        """The state has no second moment of Muon's matrices, a resumed run goes on to the same bits, and the loss
        falls."""
        llama = ["--model", "llama-tiny", "--layers", 2, "--channels", 32, "--heads", 2, "--kv-heads", 1]
        for name, extra in (("gpt2", []), ("llama", llama), ("masked", ["--document-mask", "--recompute", "block"])):
            args = ["--steps", 8, "--save-every", 4, "--optimizer", "muon", "--lr", 0.02, "--momentum-warmup", 6,
                    "--muon-coefficients", "quintic", *extra]
            run_dir = self.train("muon_" + name, *args)
            toml, trainer = (text_of(os.path.join(run_dir, file))
                             for file in ("run.toml", "step_00000008/trainer.json"))
            for line in ('optimizer="muon"', "lr=0.02", "momentum-warmup=6", 'muon-coefficients="quintic"'):
                self.assertIn(line, toml)
            self.assertEqual(json.loads(trainer)["optimizer"], "muon")
            self.assertEqual(json.loads(trainer)["learning_rates"],
                             {"hidden_matrices": 0.02, "embeddings": 0.005, "head": 0.005, "vectors": 0.01})
            self.assertIn("trainer.optimizer muon", run("info", run_dir).stdout)
            state = tensor_bytes(os.path.join(run_dir, "step_00000008", "state.safetensors"))
            hidden = {f"layers.{i}.{matrix}.weight" for i in range(2) for matrix in ("qkv", "proj", "fc", "fcproj")}
            self.assertEqual({name[2:] for name in state if name.startswith("m/")} - hidden,
                             {name[2:] for name in state if name.startswith("v/")})
            self.assertLess(losses(run_dir)[8], losses(run_dir)[1])
            whole = digests(os.path.join(run_dir, "step_00000008"))
            shutil.rmtree(os.path.join(run_dir, "step_00000008"))
            done = run("train", "--resume", "--out", run_dir)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), whole)
        self.refused(1, ["--optimizer was", "muon", "cannot change"], "train", "--resume", "--out", run_dir,
                     "--optimizer", "adamw", "--config", os.path.join(self.base, "run.toml"), "--steps", 9)
        self.refused(1, ["--optimizer was", "adamw", "cannot change"], "train", "--resume", "--out", self.base,
                     "--optimizer", "muon", "--steps", 9)

    def test_muon_options_have_an_effect(self):
        args = ["--steps", 3, "--optimizer", "muon", "--lr", 0.02]
        runs = {name: losses(self.train("muon_" + name, *args, *extra))[3] for name, extra in (
            ("plain", ()), ("momentum", ("--momentum", 0.5)), ("warmed", ("--momentum-warmup", 3)),
            ("quintic", ("--muon-coefficients", "quintic")), ("two", ("--muon-iterations", 2)),
            ("rms", ("--muon-scale", "rms")), ("decay", ("--weight-decay", 2)),
            ("adam_decay", ("--adam-weight-decay", 2)))}
        self.assertEqual(len(set(runs.values())), len(runs), runs)
        same = losses(self.train("muon_as_by_default", *args, "--momentum", 0.95, "--momentum-warmup", 0,
                                 "--muon-coefficients", "polar-express", "--muon-iterations", 5,
                                 "--muon-scale", "spectral", "--adam-weight-decay", 0.1))
        self.assertEqual(same[3], runs["plain"])
        groups = ("hidden_matrices", "embeddings", "head", "vectors")
        for scale, rates in (("spectral", [0.02, 5e-3, 5e-3, 1e-2]), ("rms", [6e-4] * 4)):
            command = self.train_args("muon_rates_" + scale, *args[:4], "--muon-scale", scale)
            at = command.index("--lr")
            done = run(*command[:at], *command[at + 2:])
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(self.top, "muon_rates_" + scale, "step_00000003", "trainer.json")) as file:
                self.assertEqual(json.load(file)["learning_rates"], dict(zip(groups, rates)))

    def test_runs_from_before_muon_resume_to_the_same_bits(self):
        """Older runs have neither the options nor the keys of rate groups and optimizers."""
        run_dir = self.copy_with_checkpoint("before_muon", 4)
        path = os.path.join(run_dir, "step_00000004", "trainer.json")
        with open(path) as file:
            trainer = json.load(file)
        del trainer["optimizer"], trainer["learning_rates"]
        with open(path, "w") as file:
            json.dump(trainer, file)
        toml = os.path.join(run_dir, "run.toml")
        lines = [line for line in text_of(toml).splitlines() if line.split("=")[0] not in ("optimizer", "adam-eps")]
        with open(toml, "w") as file:
            file.write("\n".join(lines) + "\n")
        done = run("train", "--resume", "--out", run_dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("model.safetensors", "state.safetensors"):
            self.assertEqual(*(digest(os.path.join(at, "step_00000008", name)) for at in (run_dir, self.base)))

    def test_resumed_muon_keeps_its_learning_rates(self):
        """Also those of a run whose run.toml does not name them, because its version had other defaults."""
        run_dir = self.train("rates_of_before", "--optimizer", "muon", "--steps", 2, "--save-every", 1, "--keep", 2)
        def trainer(step):
            return os.path.join(run_dir, f"step_{step:08}", "trainer.json")
        shutil.rmtree(os.path.dirname(trainer(2)))
        with open(trainer(1)) as file:
            stored = json.load(file)
        stored["learning_rates"] = {"hidden_matrices": 0.03, "embeddings": 0.004, "head": 0.005, "vectors": 0.006}
        with open(trainer(1), "w") as file:
            json.dump(stored, file)
        toml = os.path.join(run_dir, "run.toml")
        lines = [line for line in text_of(toml).splitlines()
                 if not line.startswith(("lr=", "embedding-lr=", "vector-lr="))]
        with open(toml, "w") as file:
            file.write("\n".join(lines) + "\n")
        done = run("train", "--resume", "--out", run_dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(trainer(2)) as file:
            self.assertEqual(json.load(file)["learning_rates"], stored["learning_rates"])
        stored["learning_rates"]["head"] = -1
        with open(trainer(2), "w") as file:
            json.dump({**stored, "step": 2, "adam_steps": 2}, file)
        done = run("train", "--resume", "--out", run_dir, "--steps", 3)
        self.assertEqual(done.returncode, 1)
        self.assertIn("learning_rates.head", done.stderr)

    def test_plan_of_muon(self):
        adamw, muon = (json.loads(run("plan", *MODEL, "--seq-len", 32, "--optimizer", name, "--json").stdout)
                       for name in ("adamw", "muon"))
        groups = muon["parameters"]
        self.assertEqual({name: group["optimizer"] for name, group in groups.items()},
                         {"hidden_matrices": "muon", "embeddings": "adamw", "vectors": "adamw"})
        self.assertEqual(sum(group["weights"] for group in groups.values()), muon["weights"])
        saved = adamw["bytes"]["optimizer (m, v)"] - muon["bytes"]["optimizer (m, v)"]
        self.assertGreaterEqual(saved, 4 * groups["hidden_matrices"]["weights"])  # and the padding of groups
        self.assertLess(saved, 4 * groups["hidden_matrices"]["weights"] + 4 * 4096)
        self.assertRegex(run("plan", *MODEL, "--seq-len", 32, "--optimizer", "muon").stdout,
                         r"hidden matrices +24,576 \(muon\)\n  embeddings +\S+ \(adamw\)")


if __name__ == "__main__":
    unittest.main()
