#!/usr/bin/env python3
"""LoRA adapters that peft made: logits, merging and refusals (TRAIN_GPT names the driver).

The fixtures hold what peft computes in float64 with the adapter beside its base, and the matrices that it merges
(dev/peers/make_lora_fixture.py).
"""
import json
import os
import shutil
import tempfile
import unittest

import numpy as np

from harness import ROOT, CommandsTest, run, tokenize
from model_files import MODELS, bf16, read_json, read_model, read_safetensors, write_safetensors

ADAPTERS = os.path.join(ROOT, "dev", "fixtures", "lora")
CASES = ["gpt2", "gpt2-embedding", "llama-all", "llama-embedding", "llama-modules", "llama-patterns", "llama-rslora",
         "llama-tied", "llama-tied-embedding", "phi3"]
EPSILON = 2.0**-24  # of a rounding to fp32


class Lora(CommandsTest):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)

    def path(self, name):
        return os.path.join(self.top, name)

    def adapter(self, case):
        """A copy of a fixture's adapter, and its base."""
        path = self.path("adapter")
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(os.path.join(ADAPTERS, case, name), path)
        return path, os.path.join(MODELS, read_json(path, "adapter_config.json")["base_model_name_or_path"])

    def random_adapter(self):
        """An adapter of all matrices of a layer, and its base, with the vocabulary of bytes."""
        config = {"model_type": "llama", "hidden_size": 396, "num_attention_heads": 6, "num_key_value_heads": 6,
                  "intermediate_size": 1000, "num_hidden_layers": 1, "vocab_size": 257, "max_position_embeddings": 64,
                  "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        attention = {f"self_attn.{x}_proj": (396, 396) for x in "qkvo"}
        mlp = {"mlp.gate_proj": (1000, 396), "mlp.up_proj": (1000, 396), "mlp.down_proj": (396, 1000)}
        norms = {"input_layernorm": (396,), "post_attention_layernorm": (396,)}
        shapes = {"model.embed_tokens": (257, 396), "model.norm": (396,),
                  **{f"model.layers.0.{name}": shape for name, shape in {**attention, **mlp, **norms}.items()}}
        rng = np.random.default_rng(1)
        random = lambda *shape: (0.1 * rng.standard_normal(shape)).astype("<f4")  # noqa: E731
        base, (path, _) = self.path("base"), self.adapter("llama-all")
        os.mkdir(base)
        with open(os.path.join(base, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        write_safetensors(os.path.join(base, "model.safetensors"),
                          {f"{name}.weight": random(*shape) for name, shape in shapes.items()})
        rank = read_json(path, "adapter_config.json")["r"]
        halves = {}
        for name, (rows, cols) in {**attention, **mlp}.items():
            matrix = f"base_model.model.model.layers.0.{name}.lora_"
            halves.update({matrix + "A.weight": random(rank, cols), matrix + "B.weight": random(rows, rank)})
        write_safetensors(os.path.join(path, "adapter_model.safetensors"), halves)
        return path, base

    def set_config(self, path, **keys):
        config = read_json(path, "adapter_config.json")
        config.update(keys)
        with open(os.path.join(path, "adapter_config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)

    def set_tensors(self, path, change):
        file = os.path.join(path, "adapter_model.safetensors")
        tensors = dict(read_safetensors(file))
        change(tensors)
        write_safetensors(file, tensors)

    def ok(self, *args):
        done = run(*args)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def logits(self, model, tokens, *args):
        output = self.path("logits.npy")
        self.ok("logits", "--model", model, "--tokens", " ".join(map(str, tokens)), "--output", output, *args)
        return np.load(output).astype(np.float64)

    def test_logits(self):
        for case in CASES:
            with self.subTest(case=case):
                path, base = self.adapter(case)
                reference = read_safetensors(os.path.join(ADAPTERS, case, "reference.safetensors"))
                tokens, expected = reference["tokens"][0], reference["logits"][0]
                # As for the models themselves: fp32 sums through a few layers stay within 1e-5 of the largest logit.
                bound = 1e-5 * np.abs(expected).max()
                ours = self.logits(path, tokens, "--base", base)
                self.assertLessEqual(np.abs(ours - expected).max(), bound)
                self.assertGreater(np.abs(self.logits(base, tokens) - expected).max(), 100 * bound)
                # Merged, it is the same to the bit, because an adapter is added while weights are read.
                self.ok("convert", path, self.path(case), "--merge", "--base", base)
                np.testing.assert_array_equal(self.logits(self.path(case), tokens), ours)

    def test_merged_weights(self):
        for case in CASES:
            with self.subTest(case=case):
                path, base = self.adapter(case)
                self.ok("convert", path, self.path(case), "--merge", "--base", base)
                reference = read_safetensors(os.path.join(ADAPTERS, case, "reference.safetensors"))
                changed = {name[7:]: x for name, x in reference.items() if name.startswith("merged/")}
                config = read_json(path, "adapter_config.json")
                ours, plain = read_model(self.path(case)), read_model(base)
                ranks = [config["r"], *config["rank_pattern"].values()]
                rank, tensors = max(ranks), read_safetensors(os.path.join(path, "adapter_model.safetensors"))
                alpha = max([config["lora_alpha"], *config["alpha_pattern"].values()])
                scale = alpha / (rank**0.5 if config["use_rslora"] else min(ranks))
                self.assertEqual(sorted(ours), sorted(plain))
                for name, x in ours.items():
                    if name not in changed:
                        np.testing.assert_array_equal(x, plain[name], name)
                        continue
                    if f"base_model.model.{name}" in tensors:  # modules_to_save
                        np.testing.assert_array_equal(x, changed[name], name)
                        continue
                    half = f"base_model.model.{name[:-len('.weight')]}.lora_"
                    embedding = half + "embedding_A" in tensors
                    a, b = (half + ("embedding_A", "embedding_B")[i] if embedding else half + "AB"[i] + ".weight"
                            for i in range(2))
                    terms = scale * np.abs(tensors[b]) @ np.abs(tensors[a])
                    terms = terms.T if config["fan_in_fan_out"] or embedding else terms
                    # Roundings: s·B, the products, r - 1 sums, the sum with W, and peft's result in the fixture.
                    bound = (rank + 3) * EPSILON * (terms + np.abs(plain[name]))
                    expected = changed[name]
                    if case == "llama-tied-embedding" and embedding:  # peft adds the same to the head, which is tied
                        expected, bound = (expected.astype(np.float64) + plain[name]) / 2, 2 * bound
                    self.assertTrue((np.abs(x - expected) <= bound).all(), name)

    def test_the_base_that_the_adapter_names(self):
        path, base = self.adapter("llama-all")
        self.set_config(path, base_model_name_or_path=base)
        tokens = [3, 1, 4, 1, 5]
        np.testing.assert_array_equal(self.logits(path, tokens), self.logits(path, tokens, "--base", base))
        for name in ("HuggingFaceTB/SmolLM2-135M", None):
            self.set_config(path, base_model_name_or_path=name)
            self.refused(1, [path, name or "''", "name it with --base"], "logits", "--model", path, "--tokens", "1",
                         "--output", self.path("x.npy"))
        for model, given, words in ((path, "gpt2-tiny", ["--base gpt2-tiny", "no weights"]),
                                    (path, path, [f"--base {path}", "is an adapter"]),
                                    (base, base, [base, "is not an adapter"])):
            self.refused(1, words, "logits", "--model", model, "--base", given, "--tokens", "1", "--output",
                         self.path("x.npy"))

    def test_dtypes(self):
        path, base = self.adapter("llama-all")
        tokens = [3, 1, 4, 1, 5]
        self.set_tensors(path, lambda tensors: tensors.update(
            {name: (bf16(x).astype("<u4") << 16).view("<f4") for name, x in tensors.items()}))
        expected = self.logits(path, tokens, "--base", base)
        self.set_tensors(path, lambda tensors: tensors.update({name: bf16(x) for name, x in tensors.items()}))
        np.testing.assert_array_equal(self.logits(path, tokens, "--base", base), expected)

    def test_matrices_that_are_read_in_parts(self):
        """Parts of 2^17 elements end within rows of 396; `convert` adds the adapter to whole matrices."""
        path, base = self.random_adapter()
        self.ok("convert", path, self.path("merged"), "--merge", "--base", base)
        tokens = [3, 1, 4, 1, 5]
        merged = self.logits(self.path("merged"), tokens)
        np.testing.assert_array_equal(self.logits(path, tokens, "--base", base), merged)

    def test_convert(self):
        path, base = self.adapter("llama-all")
        self.refused(1, [path, "add --merge"], "convert", path, self.path("x"))
        self.refused(1, [base, "nothing to merge"], "convert", base, self.path("x"), "--merge")
        self.refused(2, ["--base", "add --merge"], "convert", base, self.path("x"), "--base", base)
        self.assertEqual(os.listdir(self.top), ["adapter"])
        self.ok("convert", path, self.path("half"), "--merge", "--base", base, "--dtype", "bf16")
        self.assertEqual({x.dtype.str for x in read_model(self.path("half")).values()}, {"<u2"})

    def test_info(self):
        path, _ = self.adapter("gpt2")
        info = json.loads(self.ok("info", path, "--json"))
        self.assertEqual((info["kind"], info["config"]["r"]), ("adapter", 4))

    def test_adapters_at_run_time(self):
        """The tokens of the merged model; several adapters; refusals."""
        path, base = self.random_adapter()
        text = self.path("text.txt")
        with open(text, "w", encoding="utf-8") as file:
            file.write("It was the best of times.\n" * 100)
        shutil.copy(os.path.join(tokenize(text, self.path("data")), "tokenizer.json"), base)
        second = self.path("second")
        shutil.copytree(path, second)
        self.set_tensors(second, lambda tensors: tensors.update({name: -x for name, x in tensors.items() if "B" in name}))
        prompts = self.path("prompts.txt")
        with open(prompts, "w", encoding="utf-8") as file:
            file.write("It was\n---\nthe worst of times")

        def samples(*model):
            done = run("sample", "--model", *model, "--prompt-file", prompts, "--max-tokens", "12", "--temperature", "0",
                       "--ignore-eos", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["samples"]

        tokens = lambda found: [s["tokens"] for s in found]  # noqa: E731
        plain, merged = samples(base), {a: samples(a, "--base", base) for a in (path, second)}
        self.assertEqual(len({str(tokens(x)) for x in (plain, *merged.values())}), 3)
        self.assertEqual(tokens(samples(base, "--adapter", path)), tokens(merged[path]))
        both = samples(base, "--adapter", second, "--adapter", path)
        self.assertEqual([(s["adapter"], s["prompt"]) for s in both],
                         [(a, p["prompt"]) for p in plain for a in (second, path)])
        for a in (path, second):
            self.assertEqual([s["tokens"] for s in both if s["adapter"] == a], tokens(merged[a]))
        for model, adapter, words in ((base, base, ["is no LoRA adapter"]), (base, "nowhere", ["is no LoRA adapter"]),
                                      (path, second, ["is an adapter itself", "as --model"]),
                                      ("llama-tiny", path, ["is a preset", "the adapter's base"])):
            with self.subTest(model=model, adapter=adapter):
                options = ["--base", base] if model == path else []
                self.refused(1, [f"--adapter {adapter}", *words], "sample", "--model", model, *options, "--adapter",
                             adapter, "--random-weights")
        broken = next(name for name in read_safetensors(os.path.join(second, "adapter_model.safetensors"))
                      if "up_proj.lora_B" in name)
        self.set_tensors(second, lambda tensors: tensors.update({broken: tensors[broken] * np.float32(np.inf)}))
        self.refused(1, ["the adapter's change of", "not finite in fp32", "--dtype"], "sample", "--model", base, "--adapter",
                     path, "--adapter", second)
        self.set_config(second, r=520)
        zeros = {name: np.zeros((520, x.shape[1]) if "A" in name else (x.shape[0], 520), "<f4")
                 for name, x in read_safetensors(os.path.join(path, "adapter_model.safetensors")).items()}
        write_safetensors(os.path.join(second, "adapter_model.safetensors"), zeros)
        self.refused(1, ["rank 520", "at most 512"], "sample", "--model", base, "--adapter", second)
        for case in ("llama-modules", "llama-embedding"):
            adapter, model = self.adapter(case)
            self.refused(1, ["only the linear layers", "--model"], "sample", "--model", model, "--adapter", adapter,
                         "--random-weights")

    def test_training_starts_from_the_merged_weights(self):
        path, base = self.random_adapter()
        text = self.path("text.txt")
        with open(text, "w", encoding="utf-8") as file:
            file.write("It was the best of times.\n" * 100)
        self.ok("convert", path, self.path("merged"), "--merge", "--base", base)
        data = tokenize(text, self.path("data"))
        runs = []
        for name, model in (("a", [path, "--base", base]), ("b", [self.path("merged")])):
            done = run("train", "--model", *model, "--data", data, "--out", self.path(name), "--steps", 2,
                       "--seq-len", 16, "--batch-size", 2)
            self.assertEqual(done.returncode, 0, done.stderr)
            runs.append(read_model(self.path(f"{name}/step_00000002")))
        for name, x in runs[1].items():
            np.testing.assert_array_equal(runs[0][name], x, name)

    def test_configs_that_are_refused(self):
        for keys in ({"use_dora": True}, {"rank_pattern": {"(?<x>": 4}},
                     {"alpha_pattern": {"q_proj": "4"}}, {"rank_pattern": 4}, {"modules_to_save": [4]}, {"bias": "all"}, {"lora_bias": True},
                     {"trainable_token_indices": [1]}, {"init_lora_weights": "pissa"}, {"peft_type": "IA3"},
                     {"layer_replication": [[0, 1]]}, {"key_of_the_future": 3}, {"r": 0}, {"lora_alpha": "8"}):
            with self.subTest(keys=keys):
                path, base = self.adapter("llama-all")
                self.set_config(path, **keys)
                self.refused(1, [os.path.join(path, "adapter_config.json"), f"'{next(iter(keys))}'"], "convert", path,
                             self.path("x"), "--merge", "--base", base)

    def test_a_config_without_its_type(self):
        path, base = self.adapter("llama-all")
        with open(os.path.join(path, "adapter_config.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        self.refused(1, ["'peft_type' is null"], "convert", path, self.path("x"), "--merge", "--base", base)

    def test_tensors_that_are_refused(self):
        start, name = "base_model.model.model.layers.0.self_attn.", "q_proj.lora_A.weight"
        matrix = np.zeros((3, 3), "<f4")

        def rename(to):
            return lambda tensors: tensors.update({to: tensors.pop(start + name)})

        for change, words in (
            (lambda tensors: tensors.pop(start + name), ["q_proj", "only one of"]),
            (rename(start + "q_proj.lora_embedding_A"), ["lora_embedding_A", "neither"]),
            (lambda tensors: tensors.update({start + "q_proj.weight": matrix}), ["q_proj.weight", "modules_to_save"]),
            (rename(start + "x_proj.lora_A.weight"), ["x_proj", "no such matrix"]),
            (lambda tensors: tensors.update({start + name: matrix}), [name, "shape [3, 3]", "expected [3, "]),
            (lambda tensors: tensors.update({"base_model.model.lm_head.base_layer.weight": matrix}),
             ["lm_head", "shape [3, 3]", "expected [101, 48]"]),
            (lambda tensors: tensors.update({start + "q_proj.lora_magnitude_vector.weight": matrix}),
             ["lora_magnitude_vector", "DoRA"]),
        ):
            with self.subTest(words=words):
                path, base = self.adapter("llama-all")
                self.set_tensors(path, change)
                self.refused(1, [os.path.join(path, "adapter_model.safetensors"), *words], "convert", path,
                             self.path("x"), "--merge", "--base", base)
        # A tied head changes with its embedding, or neither does.
        path, base = self.adapter("llama-tied-embedding")
        head = "base_model.model.lm_head."
        for change in (lambda tensors: tensors.update({head + "lora_A.weight": -tensors[head + "lora_A.weight"]}),
                       lambda tensors: [tensors.pop(head + f"lora_{x}.weight") for x in "AB"],
                       lambda tensors: tensors.pop(head + "base_layer.weight")):
            path, base = self.adapter("llama-tied-embedding")
            self.set_tensors(path, change)
            self.refused(1, ["lm_head.weight", "are tied", "ensure_weight_tying"], "convert", path, self.path("x"),
                         "--merge", "--base", base)
        # What modules_to_save names must be there.
        path, base = self.adapter("llama-modules")
        self.set_tensors(path, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
        self.refused(1, ["modules_to_save", "lm_head"], "convert", path, self.path("x"), "--merge", "--base", base)
        path, _ = self.adapter("llama-all")
        self.refused(1, ["name the adapter's base"], "convert", path, self.path("x"), "--merge", "--base",
                     os.path.join(MODELS, "llama-bias-tied"))
        path, _ = self.adapter("gpt2")
        os.remove(os.path.join(path, "adapter_model.safetensors"))
        self.refused(1, ["adapter_model.safetensors"], "convert", path, self.path("x"), "--merge", "--base",
                     os.path.join(MODELS, "gpt2-plain"))


if __name__ == "__main__":
    unittest.main()
