#!/usr/bin/env python3
"""Options of the architecture: models of each are trained, resumed, evaluated, sampled and planned."""
import json
import os
import shutil
import unittest

from harness import TrainingTest, digest, losses, run, text_of


class ModelOptionsTest(TrainingTest):
    def test_attention_types(self):
        def described(*args):
            done = run("plan", "--model", "gpt2-tiny", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout.split("\n")[0]
        for written, letters in (("linear", "LLLL"), ("G", "GGGG"), ("GGGS", "GGGS"),
                                 ("linear,gated_linear,softmax,softmax", "LGSS"), ("SS,linear,G", "SSLG")):
            self.assertIn(f"attention {letters},", described("--attention", written))
        self.assertEqual(described("--attention", "softmax"), described())
        # In a configuration file too.
        path, out = os.path.join(self.top, "attention.toml"), os.path.join(self.top, "attention")
        for written in '"linear,softmax"', '"LS"':
            with open(path, "w") as file:
                file.write(f"attention={written}\n")
            done = run(*self.train_args("attention", "--steps", 1, "--config", path))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn('attention="LS"', text_of(os.path.join(out, "run.toml")))
            shutil.rmtree(out)
        with open(path, "w") as file:
            file.write("atention=\"L\"\n")
        self.refused(2, ["--config: unknown option atention, did you mean attention?"],
                     *self.train_args("attention", "--config", path))

    def test_mixed_attention_types(self):
        whole = self.train("mixed", "--model", "llama-tiny", "--layers", 3, "--channels", 32, "--heads", 4,
                           "--kv-heads", 2, "--attention", "LGS", "--linear-rope", "no", "--document-mask",
                           "--steps", 6, "--save-every", 3, "--eval-every", 6)
        end = os.path.join(whole, "step_00000006")
        self.assertIn("attention LGS", self.repeats_after_resume(whole, end))
        self.assertIn('attention="LGS"', text_of(os.path.join(whole, "run.toml")))
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        self.assertEqual([config[key] for key in ("model_type", "attention", "linear_rope")],
                         ["train_gpt", "LGS", False])
        # Converted, it is the same model. Dumps hold the activations that only gated_linear layers have.
        copy, arrays = os.path.join(self.top, "mixed_copy"), os.path.join(self.top, "mixed_arrays")
        self.assertEqual(run("convert", whole, copy).returncode, 0)
        for model, path in (whole, arrays + "a.npy"), (copy, arrays + "b.npy"):
            done = run("logits", "--model", model, "--tokens", "1 2 3 4 5", "--output", path, "--dump", arrays)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(digest(arrays + "a.npy"), digest(arrays + "b.npy"))
        dumped = os.listdir(arrays)
        for name in ("layers.1.gate.npy", "layers.1.mix.npy", "layers.0.att.npy"):
            self.assertIn(name, dumped)
        self.assertNotIn("layers.0.gate.npy", dumped)
        done = run("sample", "--model", copy, "--prompt", "The cat", "--max-tokens", 8, "--ignore-eos",
                   "--num-samples", 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(run("plan", "--model", whole, "--generate", "--seq-len", 64, "--json").stdout)
        self.assertGreater(plan["bytes"]["linear states"], 0)

    def test_sliding_windows(self):
        # Trained on packed documents, resumed, evaluated, sampled beyond the window; refused windows.
        model = ["--model", "llama-tiny", "--layers", 3, "--channels", 32, "--heads", 4, "--kv-heads", 2,
                 "--window", "7,0,4"]
        whole = self.train("window", *model, "--document-mask", "--steps", 6, "--save-every", 3, "--eval-every", 6)
        end = os.path.join(whole, "step_00000006")
        self.repeats_after_resume(whole, end)
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        self.assertEqual((config["model_type"], config["layer_windows"]), ("train_gpt", [7, 0, 4]))
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 30, "--top-k", 1, "--num-samples", 3],
                     ["sample", "--max-tokens", 30, "--context", 20, "--keep-tokens", 3]):
            done = run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)

        def plan(*args):
            return json.loads(run("plan", "--model", "llama-tiny", "--json", *args).stdout)

        # A window keeps 3 pages and, while a prompt is computed, those of a pass: 512 or 8192 tokens of 100,000.
        full, window, one = (plan("--generate", "--seq-len", 100000, *args)["bytes"]["KV cache"]
                             for args in ([], ["--window", 99], ["--window", "99,0,0,0"]))
        self.assertLess(window / full, 0.09)
        self.assertAlmostEqual(one / full, 0.75 + window / full / 4, delta=0.001)
        flop = [plan("--seq-len", 1000, "--window", w)["flop_per_token"] for w in (0, 1000, 100)]
        self.assertEqual(flop[0], flop[1])
        self.assertAlmostEqual(flop[0] - flop[2], 6 * 4 * 128 * (1000 - 190))
        for status, words, args in (
            (2, ["--window", "'' is not a number of tokens"], ["--window", ""]),
            (2, ["--window", "-1 is not a number of tokens", "one per layer"], ["--window", "4,-1,0,0"]),
            (1, ["--window 4,5: 2 windows for 4 layers", "give one for all, or one per layer"], ["--window", "4,5"]),
            (1, ["--window 4 needs --attention softmax"], ["--window", 4, "--attention", "L"]),
            (1, ["linear attention has a window of 4"], ["--window", "0,4,0,0", "--attention", "SLSS"]),
        ):
            self.refused(status, words, "plan", "--model", "llama-tiny", *args)

    def test_modern_architecture(self):
        # Trained, resumed, evaluated, sampled; every option is in run.toml or in config.json.
        model = ["--model", "modern-124M", "--layers", 2, "--channels", 32, "--heads", 2, "--qk-norm", "weights",
                 "--logit-softcap", 20, "--softcap-function", "tanh", "--rope-theta", 500, "--attention-scale", 0.3]
        whole = self.train("modern", *model, "--steps", 6, "--save-every", 3, "--eval-every", 6, "--recompute", "norms")
        end = os.path.join(whole, "step_00000006")
        self.repeats_after_resume(whole, end)
        trained = losses(whole)
        self.assertLess(trained[6], trained[1])
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        expected_keys = {"model_type": "train_gpt", "qk_norm": "weights", "embedding_norm": True, "head_bias": True,
                         "logit_softcap": 20.0, "softcap_function": "tanh", "rope_theta": 500.0,
                         "attention_scale": 0.3, "partial_rotary_factor": 0.5}
        self.assertEqual({key: config[key] for key in expected_keys}, expected_keys)
        self.assertEqual(config["rope_scaling"], {"rope_type": "truncated"})
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8, "--top-k", 1]):
            done = run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(1, ["fixes the shape", "leave out the model options"], "plan", "--model", end, "--qk-norm", "off")
        for words, args in (
            (["--softcap-function rsqrt needs --logit-softcap"], ["gpt2-tiny", "--softcap-function", "rsqrt"]),
            (["--rope-theta", "--positions rope"], ["gpt2-tiny", "--rope-fraction", 0.5]),
            (["rotates 3 of 32 channels", "even"], ["llama-tiny", "--rope-fraction", 0.1]),
            (["--rope-partial frequencies", "another way"], ["llama-1B", "--rope-partial", "frequencies"]),
        ):
            self.refused(1, words, "plan", "--model", *args)

    def test_norms_after(self):
        # A small OLMo2, trained with Muon and a document mask, resumed, evaluated, sampled; what it is saved as.
        small = ["--layers", 2, "--channels", 32, "--heads", 4, "--ffn", 64]
        own = ["llama-tiny", "--norm-placement", "after", "--qk-norm", "weights"]
        for name, model, model_type in (("olmo2", ["olmo2-1B"], "olmo2"), ("own", own, "train_gpt")):
            whole = self.train(name, "--model", *model, *small, "--optimizer", "muon", "--document-mask", "--steps", 6,
                               "--save-every", 3, "--eval-every", 6, "--recompute", "block")
            end = os.path.join(whole, "step_00000006")
            self.repeats_after_resume(whole, end)
            trained = losses(whole)
            self.assertLess(trained[6], trained[1])
            with open(os.path.join(end, "config.json")) as file:
                self.assertEqual(json.load(file)["model_type"], model_type)
            for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8, "--top-k", 1]):
                done = run(args[0], "--model", whole, *args[1:])
                self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(1, ["RMSNorm", "--norm rmsnorm"], "plan", "--model", "gpt2-tiny", "--norm-placement", "after")


if __name__ == "__main__":
    unittest.main()
