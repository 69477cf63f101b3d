#!/usr/bin/env python3
"""`convert` and `info` between Hugging Face directories and the .bin files of llm.c and llama2.c (TRAIN_GPT names the driver).

The .bin files are written here from the fixtures' weights, by the formats' definitions and not by the driver; what llama2.c
would compute from its file is computed here too, in float64, with RoPE on neighbouring channels as it has it.
"""
import glob
import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest

import numpy as np

from harness import CommandsTest, run, tokenize
from model_files import MODELS, bf16, read_json, read_model, write_safetensors


def read_config(folder):
    return read_json(folder, "config.json")


def llmc_file(weights, config, version):
    L, C, V = config["n_layer"], config["n_embd"], config["vocab_size"]
    padded = (V + 127) // 128 * 128
    header = np.zeros(256, "<i4")
    header[:8] = 20240326, version, config["n_positions"], V, L, config["n_head"], C, padded
    parts = [np.vstack([weights["transformer.wte.weight"], np.zeros((padded - V, C), "<f4")]), weights["transformer.wpe.weight"]]
    for name, matrix in (("ln_1.weight", 0), ("ln_1.bias", 0), ("attn.c_attn.weight", 1), ("attn.c_attn.bias", 0), ("attn.c_proj.weight", 1),
                         ("attn.c_proj.bias", 0), ("ln_2.weight", 0), ("ln_2.bias", 0), ("mlp.c_fc.weight", 1), ("mlp.c_fc.bias", 0),
                         ("mlp.c_proj.weight", 1), ("mlp.c_proj.bias", 0)):
        for layer in range(L):
            x = weights[f"transformer.h.{layer}.{name}"]
            parts.append(x.T if matrix else x)
    parts += [weights["transformer.ln_f.weight"], weights["transformer.ln_f.bias"]]
    convert = bf16 if version == 5 else (lambda x: np.ascontiguousarray(x, "<f4"))
    return header.tobytes() + b"".join(convert(x).tobytes() for x in parts)


def interleave(x, heads):
    """Rows of q or k from the half-split to the interleaved RoPE layout."""
    return x.reshape(heads, 2, -1, x.shape[1]).transpose(0, 2, 1, 3).reshape(x.shape)


def llama2c_parts(weights, config):
    """The file's tensors by its own names, each a list of layers."""
    m = "model.layers.{}."
    layers = range(config["num_hidden_layers"])
    every = lambda name: [weights[m.format(layer) + name + ".weight"] for layer in layers]
    return {
        "tok_embeddings": [weights["model.embed_tokens.weight"]], "attention_norm": every("input_layernorm"),
        "wq": [interleave(x, config["num_attention_heads"]) for x in every("self_attn.q_proj")],
        "wk": [interleave(x, config["num_key_value_heads"]) for x in every("self_attn.k_proj")],
        "wv": every("self_attn.v_proj"), "wo": every("self_attn.o_proj"), "ffn_norm": every("post_attention_layernorm"),
        "w1": every("mlp.gate_proj"), "w2": every("mlp.down_proj"), "w3": every("mlp.up_proj"), "norm": [weights["model.norm.weight"]],
        "output": [weights[name] for name in ("lm_head.weight",) if name in weights],
    }


def llama2c_file(weights, config, version, tied):
    parts = llama2c_parts(weights, config)
    sizes = [config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], config["num_attention_heads"],
             config["num_key_value_heads"], config["vocab_size"], config["max_position_embeddings"]]
    if version == 0:
        sizes[5] *= 1 if tied else -1
        head = struct.pack("<7i", *sizes)
        order = ["tok_embeddings", "attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "norm", "freqs"]
        parts["freqs"] = [np.full(sizes[6] * sizes[0] // sizes[3], 7, "<f4")]  # cosines and sines, which nobody needs
    else:
        head = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, tied).ljust(256, b"\0")
        order = ["attention_norm", "ffn_norm", "norm", "tok_embeddings", "wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    return head + b"".join(x.astype("<f4").tobytes() for name in [*order, *([] if tied else ["output"])] for x in parts[name])


def llama2c_logits(parts, config, tokens, tied):
    """The forward pass of llama2.c in float64."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    T, d = len(tokens), config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    w = {name: [x.astype(np.float64) for x in layers] for name, layers in parts.items()}
    norm = lambda x, weight: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    angle = np.arange(T)[:, None] / 10000.0 ** (np.arange(0, d, 2) / d)

    def rope(x):  # [T, heads, d]: channels 2i and 2i + 1 turn together
        even, odd, c, s = x[..., ::2], x[..., 1::2], np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(x.shape)

    x = w["tok_embeddings"][0][tokens]
    for layer in range(config["num_hidden_layers"]):
        h = norm(x, w["attention_norm"][layer])
        q, k = (rope((h @ w[name][layer].T).reshape(T, -1, d)) for name in ("wq", "wk"))
        v = (h @ w["wv"][layer].T).reshape(T, kv_heads, d)
        k, v = (np.repeat(y, heads // kv_heads, 1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d) + np.triu(np.full((T, T), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(T, -1) @ w["wo"][layer].T
        h = norm(x, w["ffn_norm"][layer])
        gate = h @ w["w1"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][layer].T)) @ w["w2"][layer].T
    return norm(x, w["norm"][0]) @ w["tok_embeddings" if tied else "output"][0].T


class ConvertTest(CommandsTest):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)

    def path(self, name):
        return os.path.join(self.top, name)

    def write(self, name, blob):
        with open(self.path(name), "wb") as file:
            file.write(blob)
        return self.path(name)

    def convert(self, *args):
        done = run("convert", *args)
        self.assertEqual((done.returncode, done.stderr, done.stdout), (0, "", ""))

    def logits(self, model, tokens):
        done = run("logits", "--model", model, "--tokens", " ".join(map(str, tokens)), "--output", self.path("logits.npy"))
        self.assertEqual(done.returncode, 0, done.stderr)
        return np.load(self.path("logits.npy")).astype(np.float64)

    def info(self, path):
        done = run("info", path, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def assert_same(self, ours, reference):
        self.assertEqual(sorted(ours), sorted(reference))
        for name, x in reference.items():
            self.assertEqual(ours[name].dtype, x.dtype, name)
            np.testing.assert_array_equal(ours[name], x, name)

    def test_llmc(self):
        fixture = os.path.join(MODELS, "gpt2-plain")
        weights, config = read_model(fixture), read_config(fixture)
        self.convert(self.write("v3.bin", llmc_file(weights, config, 3)), self.path("v3"))
        self.assert_same(read_model(self.path("v3")), weights)
        np.testing.assert_array_equal(self.logits(self.path("v3"), range(20)), self.logits(fixture, range(20)))
        self.convert(self.write("v5.bin", llmc_file(weights, config, 5)), self.path("v5"))
        self.assert_same(read_model(self.path("v5")), {name: bf16(x) for name, x in weights.items()})

        info = self.info(self.path("v5.bin"))
        self.assertEqual((info["kind"], info["format"], info["dtype"], info["config"]["n_layer"]), ("model", "llm.c v5", "bf16", 3))
        # And back: the files are the same to the byte.
        dead = subprocess.Popen(["true"])
        dead.wait()
        self.write(f".tmp-back.bin-{dead.pid}", b"of a convert that was killed")
        self.write(f".tmp-back.bin-{os.getpid()}", b"of one that runs")
        for name, options in (("v3", []), ("v5", ["--dtype", "bf16"])):
            self.convert(fixture, self.path("back.bin"), *options)
            self.assertEqual(glob.glob(self.path(".tmp-*")), [self.path(f".tmp-back.bin-{os.getpid()}")])
            with open(self.path("back.bin"), "rb") as a, open(self.path(name + ".bin"), "rb") as b:
                self.assertEqual(a.read(), b.read())
            os.remove(self.path("back.bin"))

    def llama_config(self, tied):
        config = read_config(os.path.join(MODELS, "llama-gqa"))
        return {**config, "tie_word_embeddings": tied}

    def test_llama2c(self):
        weights = read_model(os.path.join(MODELS, "llama-gqa"))
        tokens = [5, 0, 77, 100, 3, 5, 5, 41]
        for version in (0, 1):
            for tied in (False, True):
                with self.subTest(version=version, tied=tied):
                    config = self.llama_config(tied)
                    expected = {name: x for name, x in weights.items() if not (tied and name == "lm_head.weight")}
                    name = f"v{version}-{tied}"
                    self.convert(self.write(name + ".bin", llama2c_file(weights, config, version, tied)), self.path(name))
                    self.assert_same(read_model(self.path(name)), expected)
                    written = read_config(self.path(name))
                    self.assertEqual((written["rms_norm_eps"], written["rope_theta"], written["tie_word_embeddings"]), (1e-5, 10000, tied))
                    reference = llama2c_logits(llama2c_parts(weights, config), config, tokens, tied)
                    error = np.abs(self.logits(self.path(name), tokens) - reference).max()
                    self.assertLessEqual(error, 1e-5 * np.abs(reference).max())
                    self.assertEqual(self.info(self.path(name + ".bin"))["format"], f"llama2.c v{version}")

    def test_directories(self):
        # Shards become one file, another dtype is rounded, what goes along goes along.
        self.convert(os.path.join(MODELS, "llama-sharded"), self.path("whole"))
        self.assert_same(read_model(self.path("whole")), read_model(os.path.join(MODELS, "llama-sharded")))
        self.assertEqual(sorted(os.listdir(self.path("whole"))), ["config.json", "generation_config.json", "model.safetensors"])
        with open(self.path("whole/chat_template.jinja"), "w") as file:
            file.write("{{ x }}")
        self.convert(self.path("whole"), self.path("rounded"), "--dtype", "bf16")
        self.assert_same(read_model(self.path("rounded")), {name: bf16(x) for name, x in read_model(self.path("whole")).items()})
        self.assertIn("chat_template.jinja", os.listdir(self.path("rounded")))
        self.convert(self.path("rounded"), self.path("same"))  # the dtype stays
        self.assert_same(read_model(self.path("same")), read_model(self.path("rounded")))
        self.convert(os.path.join(MODELS, "gpt2-fp16"), self.path("half"))
        self.assert_same(read_model(self.path("half")), read_model(os.path.join(MODELS, "gpt2-fp16")))

    def directory(self, name, config, tensors):
        """A model directory of arrays, whose bf16 are uint16."""
        os.mkdir(self.path(name))
        write_safetensors(self.path(f"{name}/model.safetensors"), tensors)
        self.write(f"{name}/config.json", json.dumps(config).encode())
        return self.path(name)

    # Keys that say what the model computes; those of transformers 5's form are compared by test_model_config.
    FAMILY_KEYS = ["model_type", "architectures", "hidden_size", "num_key_value_heads", "head_dim", "sliding_window",
                   "use_sliding_window", "layer_types", "no_rope_layers", "attention_bias", "mlp_bias", "rope_theta",
                   "partial_rotary_factor", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "vocab_size"]

    def test_families(self):
        for family in ("qwen2", "qwen3", "smollm3", "mistral", "phi3", "olmo2"):
            with self.subTest(family=family):
                fixture = os.path.join(MODELS, family)
                original = read_json(fixture, "config_transformers4.json")
                self.convert(fixture, self.path(family))
                self.assert_same(read_model(self.path(family)), read_model(fixture))
                config = read_config(self.path(family))
                self.assertEqual(config["model_type"], family)
                for key in self.FAMILY_KEYS:
                    if "layer_types" not in key or config.get("use_sliding_window"):
                        self.assertEqual(config.get(key), original.get(key), key)

    def test_each_tensor_keeps_its_dtype(self):
        fixture = os.path.join(MODELS, "llama-gqa")
        weights = read_model(fixture)
        mixed = {name: bf16(x) if "embed" in name else x.astype("<f2") if "k_proj" in name else x
                 for name, x in weights.items()}
        self.convert(self.directory("mixed", read_config(fixture), mixed), self.path("same"))
        self.assert_same(read_model(self.path("same")), mixed)

    def test_values_beyond_fp16_are_errors(self):
        fixture = os.path.join(MODELS, "llama-gqa")
        weights = {name: x.copy() for name, x in read_model(fixture).items()}
        weights["model.layers.1.mlp.up_proj.weight"][3, 1] = 70000
        source = self.directory("large", read_config(fixture), weights)
        self.refused(1, ["tensor model.layers.1.mlp.up_proj.weight", "70000", "too large for fp16", "use bf16 or fp32"],
                     "convert", source, self.path("half"), "--dtype", "fp16")
        self.assertEqual(os.listdir(self.top), ["large"])

    def test_heads_that_do_not_divide_the_channels(self):
        config = {"model_type": "llama", "hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1,
                  "head_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 257,
                  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
        shapes = {"self_attn.q_proj": (96, 40), "self_attn.k_proj": (32, 40), "self_attn.v_proj": (32, 40),
                  "self_attn.o_proj": (40, 96), "mlp.gate_proj": (48, 40), "mlp.up_proj": (48, 40),
                  "mlp.down_proj": (40, 48), "input_layernorm": (40,), "post_attention_layernorm": (40,)}
        shapes = {"model.embed_tokens": (257, 40), "model.norm": (40,), "lm_head": (257, 40),
                  **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}}
        rng = np.random.default_rng(1)
        weights = {f"{name}.weight": (0.2 * rng.standard_normal(shape)).astype("<f4") for name, shape in shapes.items()}
        source, tokens = self.directory("odd", config, weights), [5, 0, 77, 100, 3]
        reference = llama2c_logits(llama2c_parts(weights, config), config, tokens, False)
        error = np.abs(self.logits(source, tokens) - reference).max()
        self.assertLessEqual(error, 1e-5 * np.abs(reference).max())
        self.convert(source, self.path("back"))
        self.assert_same(read_model(self.path("back")), weights)
        self.assertEqual({key: read_config(self.path("back"))[key] for key in config}, config)
        # It trains, and a checkpoint has the same names.
        text = self.write("text.txt", b"It was the best of times.\n" * 100)
        data = tokenize(text, self.path("data"))
        done = run("train", "--model", source, "--data", data, "--out", self.path("run"), "--steps", 2,
                   "--seq-len", 16, "--batch-size", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        trained = read_model(self.path("run/step_00000002"))
        self.assertEqual({name: x.shape for name, x in trained.items()}, {name: x.shape for name, x in weights.items()})

    def test_a_config_of_another_type_is_named(self):
        os.mkdir(self.path("mamba"))
        self.write("mamba/config.json", b'{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
        self.refused(1, ["mamba/config.json", "'model_type'", "mamba2", "supported: gpt2, llama"], "info",
                     self.path("mamba"))

    def tokenizer_bin(self, extra):
        pieces = ["<unk>", "\n<s>\n", "\n</s>\n", " ", "a", " a", *extra]
        return self.write("tokenizer.bin", struct.pack("<i", 9) + b"".join(
            struct.pack("<fi", -i, len(piece)) + piece.encode() for i, piece in enumerate(pieces)))

    def test_tokenizer(self):
        weights, config = read_model(os.path.join(MODELS, "llama-gqa")), self.llama_config(False)
        model = self.write("model.bin", llama2c_file(weights, config, 0, False))
        self.convert(model, self.path("with"), "--tokenizer", self.tokenizer_bin([]))
        self.assertEqual(self.info(self.path("with/tokenizer.json")),
                         {"kind": "tokenizer", "vocab_size": 6, "end_of_text": 2, "start_of_text": [1]})
        self.assertTrue(self.info(self.path("with"))["tokenizer"])
        self.refused(1, ["tokenizer.bin", "117 tokens", "101"], "convert", model, self.path("x"), "--tokenizer",
                     self.tokenizer_bin([f"b{i}" for i in range(111)]))
        self.refused(2, ["--tokenizer"], "convert", model, self.path("x.bin"), "--tokenizer", self.path("tokenizer.bin"))
        for content in b"{}", b"{]":  # the file that was given is named, not the copy in the unfinished directory
            path = self.write("bad.json", content)
            self.refused(1, [f"convert: {path}: not a "], "convert", model, self.path("x"), "--tokenizer", path)
        self.assertEqual([name for name in os.listdir(self.top) if "x" in name or "tmp" in name], [])

    def test_errors(self):
        fixture = os.path.join(MODELS, "gpt2-plain")
        weights, config = read_model(fixture), read_config(fixture)
        llmc = llmc_file(weights, config, 3)
        weights, config = read_model(os.path.join(MODELS, "llama-gqa")), self.llama_config(False)
        v0, v1 = (llama2c_file(weights, config, version, False) for version in (0, 1))
        number = lambda blob, at, value: blob[:at] + struct.pack("<i", value) + blob[at + 4:]
        for blob, words in (
            (llmc[:-1], ["truncated"]), (llmc + b"\0", ["damaged"]), (llmc[:900], ["header"]), (number(llmc, 4, 1), ["version 1"]),
            (number(llmc, 20, 5), ["heads"]), (number(llmc, 16, 2**31 - 1), ["layers"]), (number(llmc, 12, 0), ["vocabulary"]),
            (number(llmc, 28, 60), ["padded"]), (v1[:100], ["header"]), (v1[:-4], ["truncated"]), (number(v1, 4, 2), ["version 2"]),
            (number(v1, 24, 0), ["KV heads"]), (number(v1, 28, -5), ["vocabulary"]), (v0[:-4], ["neither"]), (number(v0, 8, 3), ["neither"]),
            (number(v0, 20, -2**31), ["neither"]), (b"", ["neither"]), (b"abc", ["neither"]),
        ):
            self.refused(1, [self.path("bad.bin"), *words], "convert", self.write("bad.bin", blob), self.path("x"))
        good = self.write("good.bin", v0)
        self.refused(1, ["exists"], "convert", fixture, good)
        self.refused(1, ["exists"], "convert", good, self.top)
        self.refused(1, ["preset"], "convert", "gpt2-tiny", self.path("x"))
        self.refused(1, ["/nonexistent"], "convert", "/nonexistent", self.path("x"))
        self.refused(1, ["/nonexistent"], "convert", good, "/nonexistent/x")
        self.refused(1, ["/nonexistent"], "convert", fixture, "/nonexistent/x.bin")
        self.refused(1, ["llm.c's format"], "convert", os.path.join(MODELS, "gpt2-inner-eps"), self.path("x.bin"))
        self.refused(1, ["llm.c's format"], "convert", good, self.path("x.bin"))
        self.refused(2, ["fp16"], "convert", fixture, self.path("x.bin"), "--dtype", "fp16")
        self.refused(2, ["DST"], "convert", fixture)
        self.assertEqual(sorted(os.listdir(self.top)), ["bad.bin", "good.bin"])


if __name__ == "__main__":
    unittest.main()
