"""scripts/import_gguf.py and scripts/import_pytorch.py on files written from the models and tokenizers of the fixtures."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)

import import_pytorch  # noqa: E402
import tokenizer_json  # noqa: E402

MODELS = os.path.join(ROOT, "dev", "fixtures", "models")
DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}
LINEAR = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
META = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj"}


def missing(package):
    try:
        __import__(package)
    except ImportError:
        return f"the Python package {package} is not installed"
    return None


def read_safetensors(path):
    with open(path, "rb") as file:
        blob = file.read()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:8 + size])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(blob[8 + size:][slice(*e["data_offsets"])], DTYPES[e["dtype"]]).reshape(e["shape"]) for name, e in header.items()}


def read_json(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)


def interleaved(x, heads):
    """Rows of q or k from the half-split RoPE layout to the interleaved one of Meta and llama.cpp."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def fixture_tokenizer(name):
    return next(case for case in read_json(ROOT, "dev/fixtures/tokenizer/tokenizers.json")["cases"] if case["name"] == name)


class ImportTest(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)
        self.weights = read_safetensors(os.path.join(MODELS, "llama-gqa", "model.safetensors"))
        self.config = read_json(MODELS, "llama-gqa", "config.json")

    def path(self, name):
        return os.path.join(self.top, name)

    def script(self, name, *args):
        return subprocess.run([sys.executable, os.path.join(HERE, name), *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=120)

    def imported(self, name, *args):
        done = self.script(name, *args)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def refused(self, words, name, *args):
        done = self.script(name, *args)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def assert_same(self, folder, expected):
        got = read_safetensors(os.path.join(folder, "model.safetensors"))
        self.assertEqual(sorted(got), sorted(expected))
        for name, x in expected.items():
            self.assertEqual(got[name].dtype, x.dtype)
            np.testing.assert_array_equal(got[name], x, name)

    def assert_same_shape(self, folder, **changed):
        config = read_json(folder, "config.json")
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
                    "rms_norm_eps"):
            self.assertEqual(config[key], changed.get(key, self.config[key]), key)
        return config


def write_sizes(writer, config):
    """The keys of a GGUF file that every architecture has, from a config.json."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])


@unittest.skipIf(missing("gguf"), missing("gguf"))
class GgufTest(ImportTest):
    def write(self, quantise=None, tokenizer=None, change=lambda writer: None, tensors=lambda weights: weights, architecture="llama"):
        import gguf

        c = self.config
        writer = gguf.GGUFWriter(self.path("model.gguf"), architecture)
        write_sizes(writer, c)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
        (tokenizer or self.byte_level_tokenizer)(writer)
        change(writer)
        w = {"token_embd.weight": self.weights["model.embed_tokens.weight"], "output_norm.weight": self.weights["model.norm.weight"],
             "output.weight": self.weights["lm_head.weight"]}
        for layer in range(c["num_hidden_layers"]):
            ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
            w[theirs + "attn_norm.weight"] = self.weights[ours + "input_layernorm.weight"]
            w[theirs + "ffn_norm.weight"] = self.weights[ours + "post_attention_layernorm.weight"]
            for name, part in LINEAR.items():
                x = self.weights[f"{ours}{part}.weight"]
                heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}.get(name)
                w[f"{theirs}{name}.weight"] = interleaved(x, heads) if heads else x
        for name, x in tensors(w).items():
            x = np.ascontiguousarray(x)
            if quantise and x.ndim == 2:
                writer.add_tensor(name, gguf.quants.quantize(x, quantise), raw_dtype=quantise)
            else:
                writer.add_tensor(name, x)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path("model.gguf")

    def byte_level_tokenizer(self, writer, pre="smollm"):
        model = fixture_tokenizer("digits")["tokenizer"]["model"]
        vocab = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocab)
        writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in vocab])
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ messages }}")

    def sentencepiece_tokenizer(self, writer):
        model = fixture_tokenizer("llama2")["tokenizer"]["model"]
        vocab = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocab)
        writer.add_token_scores([float(-i) for i in range(len(vocab))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(vocab) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    def test_weights_and_config(self):
        self.imported("import_gguf.py", self.write(), self.path("out"))
        self.assert_same(self.path("out"), self.weights)
        config = self.assert_same_shape(self.path("out"))
        self.assertEqual((config["rope_theta"], config["rope_scaling"], config["tie_word_embeddings"], config["eos_token_id"]),
                         (10000.0, None, False, 0))
        self.assertEqual(read_json(self.path("out"), "tokenizer_config.json")["eos_token"], "<|endoftext|>")
        with open(self.path("out/chat_template.jinja"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "{{ messages }}")
        self.imported("import_gguf.py", self.path("model.gguf"), self.path("half"), "--dtype", "fp16")
        self.assert_same(self.path("half"), {name: x.astype("<f2") for name, x in self.weights.items()})
        self.refused(["out", "exists"], "import_gguf.py", self.path("model.gguf"), self.path("out"))

    def test_tied(self):
        def drop(w):
            return {name: x for name, x in w.items() if name != "output.weight"}
        self.imported("import_gguf.py", self.write(tensors=drop), self.path("out"))
        self.assertTrue(read_json(self.path("out"), "config.json")["tie_word_embeddings"])
        self.assert_same(self.path("out"), {name: x for name, x in self.weights.items() if name != "lm_head.weight"})

    def test_quantised(self):
        # Blocks of 32: widths that they divide.
        import gguf

        rng = np.random.default_rng(1)
        self.config.update(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (96, 64), "up_proj": (96, 64),
                  "down_proj": (64, 96), "embed_tokens": (101, 64), "lm_head": (101, 64), "norm": (64,), "layernorm": (64,)}
        self.weights = {name: rng.standard_normal(next(s for part, s in shapes.items() if part in name), np.float32)
                        for name in self.weights if "layers.0" in name or "layers" not in name}
        for kind, limit in (("Q8_0", 0.02), ("Q4_1", 0.25)):
            quantise = gguf.GGMLQuantizationType[kind]
            self.imported("import_gguf.py", self.write(quantise), self.path(kind))
            got = read_safetensors(os.path.join(self.path(kind), "model.safetensors"))
            for name, x in self.weights.items():
                error = np.abs(got[name] - x).max()
                self.assertLess(error, limit if x.ndim == 2 else 1e-9, name)
                self.assertEqual(error > 0, x.ndim == 2)

    def test_rope_scaling(self):
        import gguf

        def scaled(kind, factor, old_factor):
            def change(writer):
                if kind:
                    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
                if factor is not None:
                    writer.add_rope_scaling_factor(factor)
                if old_factor is not None:
                    writer.add_float32("llama.rope.scale_linear", old_factor)
            return change
        # As llama.cpp: without a type a factor means linear, the old key counts where the new one is missing, 0 is 1.
        cases = (("linear", 4.0, None, 4.0), (None, 2.5, None, 2.5), (None, None, 8.0, 8.0), (None, 2.0, 8.0, 2.0),
                 ("none", 4.0, None, None), ("linear", None, None, None), (None, 0.0, None, None), (None, 1.0, None, None))
        for i, (kind, factor, old, expected) in enumerate(cases):
            self.imported("import_gguf.py", self.write(change=scaled(kind, factor, old)), self.path(f"scaled{i}"))
            expected = expected and {"rope_type": "linear", "factor": expected}
            self.assertEqual(read_json(self.path(f"scaled{i}"), "config.json")["rope_scaling"], expected, (kind, factor, old))
        for factor in (-2.0, float("nan"), float("inf")):
            self.refused(["factor", "positive"], "import_gguf.py", self.write(change=scaled(None, factor, None)), self.path("x"))
        self.refused(["type is yarn"], "import_gguf.py", self.write(change=scaled("yarn", 4.0, None)), self.path("x"))
        # LLaMA 3.1's factors, written out: wavelengths to 2048 stay, from 8192 on they grow 8 times.
        head_size = self.config["hidden_size"] // self.config["num_attention_heads"]
        factors = []
        for i in range(0, head_size, 2):
            wavelength = 2 * np.pi * 10000.0 ** (i / head_size)
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 if wavelength < 2048 else 8 if wavelength > 8192 else 1 / ((1 - smooth) / 8 + smooth))
        self.assertGreater(max(factors), 1)  # else the file would not say how far
        factors[-1] = 8.0
        add = lambda w: {**w, "rope_freqs.weight": np.array(factors, np.float32)}
        wavelength = 2 * np.pi * 10000.0 ** ((head_size - 2) / head_size)
        if wavelength > 8192:
            self.imported("import_gguf.py", self.write(tensors=add), self.path("llama3"))
            self.assertEqual(read_json(self.path("llama3"), "config.json")["rope_scaling"]["factor"], 8.0)
        self.refused(["rope_freqs", "linear with factor 2"], "import_gguf.py", self.write(change=scaled(None, 2.0, None), tensors=add),
                     self.path("x"))
        factors[0] = 3.0
        self.refused(["rope_freqs"], "import_gguf.py", self.write(tensors=add), self.path("x"))

    def test_tokenizers(self):
        texts = read_json(ROOT, "dev/fixtures/tokenizer/tokenizers.json")["texts"]
        import tokenizers

        self.imported("import_gguf.py", self.write(), self.path("bytes"))
        case = fixture_tokenizer("digits")
        got = tokenizers.Tokenizer.from_file(self.path("bytes/tokenizer.json"))
        self.assertEqual([got.encode(text, add_special_tokens=False).ids for text in texts], case["special"])

        self.imported("import_gguf.py", self.write(tokenizer=self.sentencepiece_tokenizer), self.path("pieces"))
        written = read_json(self.path("pieces"), "tokenizer.json")
        theirs = fixture_tokenizer("llama2")["tokenizer"]
        self.assertEqual(written["model"]["vocab"], theirs["model"]["vocab"])
        self.assertEqual(written["normalizer"], theirs["normalizer"])
        self.assertEqual(written["decoder"], theirs["decoder"])
        got = tokenizers.Tokenizer.from_file(self.path("pieces/tokenizer.json"))
        self.assertEqual(got.encode("it was").ids[0], 1)
        self.assertEqual(got.decode(got.encode("it was the best\n\U0001F600").ids), "it was the best\n\U0001F600")

    def test_words_of_llama_cpp(self):
        """Without a pre-tokenizer's name llama.cpp splits words as it did before there were names."""
        import tokenizers

        def without_pre(writer):
            self.byte_level_tokenizer(writer)
            del writer.kv_data[0]["tokenizer.ggml.pre"]
        def default_pre(writer):
            self.byte_level_tokenizer(writer, "default")
        for name, tokenizer in (("missing", without_pre), ("default", default_pre)):
            self.imported("import_gguf.py", self.write(tokenizer=tokenizer), self.path(name))
            got = tokenizers.Tokenizer.from_file(self.path(f"{name}/tokenizer.json"))
            for text, words in (("I'm 12345, (he said): a<=b  x", "I|'|m| |123|45|,| |(|he| said|):| a|<=|b| | x"),
                                ("y\n\nz", "y|\n|\n|z")):
                split = [word.replace("\u0120", " ").replace("\u010a", "\n")
                         for word, _ in got.pre_tokenizer.pre_tokenize_str(text)]
                self.assertEqual("|".join(split), words)

    def test_invalid_input_is_rejected(self):
        for words, options in (
            (["remove_extra_whitespaces"], {"change": lambda writer: writer.add_remove_extra_whitespaces(True)}),
            (["architecture gemma", "supported: llama, qwen2"], {"architecture": "gemma"}),
            (["blk.0.attn_q.bias is missing"], {"architecture": "qwen2"}),
            (["blk.1.ffn_up.weight is missing"],
             {"tensors": lambda w: {name: x for name, x in w.items() if name != "blk.1.ffn_up.weight"}}),
            (["mixture of experts"], {"change": lambda writer: writer.add_expert_count(8)}),
            (["value_length"], {"change": lambda writer: writer.add_value_length(4)}),
            (["blk.0.attn_q_norm.weight"], {"tensors": lambda w: {**w, "blk.0.attn_q_norm.weight": np.ones(8, np.float32)}}),
            (["token_embd"], {"tensors": lambda w: {name: x for name, x in w.items() if name != "token_embd.weight"}}),
            (["gpt-4o"], {"tokenizer": lambda writer: self.byte_level_tokenizer(writer, "gpt-4o")}),
        ):
            self.refused(words, "import_gguf.py", self.write(**options), self.path("x"))
        with open(self.path("bad.gguf"), "wb") as file:
            file.write(b"GGUF" + b"\xff" * 100)
        self.refused(["bad.gguf"], "import_gguf.py", self.path("bad.gguf"), self.path("x"))
        self.refused(["none.gguf"], "import_gguf.py", self.path("none.gguf"), self.path("x"))
        self.assertEqual(sorted(os.listdir(self.top)), ["bad.gguf", "model.gguf"])

    def test_every_key_is_used_refused_or_named(self):
        for words, change in (
            (["llama.attention.clamp_kqv is 8.0; supported: 0"], lambda writer: writer.add_clamp_kqv(8.0)),
            (["llama.attention.causal is false; supported: true"], lambda writer: writer.add_causal_attention(False)),
            (["llama.rope.dimension_sections", "a file without it"], lambda writer: writer.add_rope_dimension_sections([1, 1])),
            (["tokenizer.ggml.add_eos_token is true"], lambda writer: writer.add_add_eos_token(True)),
            (['general.type is "adapter"'], lambda writer: writer.add_type("adapter")),
            (["split.count is 3"], lambda writer: writer.add_uint16("split.count", 3)),
            (['llama.rope.freq_base is "x"', "a number"], lambda writer: writer.add_string("llama.rope.freq_base", "x")),
            (["llama.expert_count is [0,0]", "a whole number"], lambda writer: writer.add_array("llama.expert_count", [0, 0])),
            (["general.architecture is 5; it must be text"], lambda writer: writer.add_uint32("general.architecture", 5)),
            (["tokenizer.ggml.scores has 2 values"], lambda writer: writer.add_token_scores([0.0, 1.0])),
            (['tokenizer.ggml.merges: entry 0 is "a b c"'], lambda writer: writer.add_token_merges(["a b c"])),
        ):
            def replace(writer, change=change, key=words[0].split(" ")[0].rstrip(":")):
                writer.kv_data[0].pop(key, None)
                change(writer)
            self.refused(words, "import_gguf.py", self.write(change=replace), self.path("x"))
        neutral = lambda writer: (writer.add_clamp_kqv(0.0), writer.add_causal_attention(True), writer.add_name("n"))  # noqa: E731
        self.imported("import_gguf.py", self.write(change=neutral), self.path("neutral"))
        unknown = lambda writer: (writer.add_uint32("llama.new_norm", 7), writer.add_string("tokenizer.x", "y"))  # noqa: E731
        done = self.script("import_gguf.py", self.write(change=unknown), self.path("unknown"))
        self.assertEqual((done.returncode, done.stderr.count("\n")), (0, 1), done.stderr)
        self.assertIn("unknown keys are ignored: llama.new_norm, tokenizer.x", done.stderr)

    def test_every_end_token_ends_a_text(self):
        def ends(writer):
            writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
            writer.add_uint32("tokenizer.ggml.eom_token_id", 0)
        self.imported("import_gguf.py", self.write(change=ends), self.path("out"))
        self.assertEqual(read_json(self.path("out"), "generation_config.json"), {"eos_token_id": [0, 7]})

    def test_sampling_that_the_file_declares(self):
        def declare(writer):
            for key, value in ("temp", 0.6), ("top_p", 0.95), ("penalty_repeat", 1.05), ("xtc_probability", 0.1):
                writer.add_float32(f"general.sampling.{key}", value)
            writer.add_int32("general.sampling.top_k", -1)
        self.imported("import_gguf.py", self.write(change=declare), self.path("out"))
        found = read_json(self.path("out"), "generation_config.json")
        found.pop("eos_token_id", None)
        self.assertEqual(found, {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05, "top_k": 0})

    def test_type_that_is_not_widened(self):
        f64 = lambda w: {**w, "output_norm.weight": w["output_norm.weight"].astype(np.float64)}  # noqa: E731
        self.refused(["output_norm.weight is F64", "supported: F32"], "import_gguf.py", self.write(tensors=f64), self.path("x"))
        self.assertEqual(os.listdir(self.top), ["model.gguf"])

    def test_damaged_headers_end_at_once(self):
        key = lambda name, kind, value: struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value  # noqa: E731
        file = lambda tensors, keys, rest, version=3: b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest  # noqa: E731
        uint8, uint32, string, array = 0, 4, 8, 9
        tensor = lambda *sizes: key(b"t", len(sizes), struct.pack(f"<{len(sizes)}Q", *sizes) + bytes(12))  # noqa: E731
        cases = (
            (b"", "does not start with GGUF"), (b"GGML" + bytes(40), "does not start with GGUF"), (b"GGUF\3\0", "the version"),
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian; convert it"), (file(0, 0, b"", 1), "version 1"),
            (file(0, 1 << 60, b""), "keys takes"), (file(1 << 60, 0, b""), "tensors takes"),
            (file(0, 1, struct.pack("<Q", 1 << 62)), "header with 1 keys"),
            (file(0, 1, struct.pack("<Q", 1 << 62) + bytes(5)), "the name of a key takes"),
            (file(0, 1, key(b"a", array, struct.pack("<IQ", uint8, 1 << 61))), "key a takes 2305843009213693952 times 1 bytes"),
            (file(0, 1, key(b"a", array, struct.pack("<IQ", string, 1 << 61))), "key a takes"),
            (file(0, 1, key(b"a", array, struct.pack("<IQ", array, 1))), "list of type 9"),
            (file(0, 1, key(b"a", string, struct.pack("<Q", 1 << 63))), "key a takes"),
            (file(0, 1, key(b"a", 13, bytes(8))), "unknown type 13"),
            (file(0, 2, key(b"a", uint8, b"x") * 2), "key a occurs twice"),
            (file(0, 1, key(b"general.alignment", uint32, bytes(4))), "not a power of two"),
            (file(1, 0, key(b"t", 1 << 30, bytes(12))), "1073741824 dimensions"),
            (file(1, 0, tensor(1 << 32, 1 << 32)), "tensor t has a dimension of 4294967296"),
            (file(1, 0, tensor(1 << 32)), "tensor t takes 17179869184 bytes"),
        )
        for content, words in cases:
            with open(self.path("bad.gguf"), "wb") as out:
                out.write(content)
            begin = time.monotonic()
            self.refused(["bad.gguf", words], "import_gguf.py", self.path("bad.gguf"), self.path("x"))
            self.assertLess(time.monotonic() - begin, 30)


@unittest.skipIf(missing("torch"), missing("torch"))
class PytorchTest(ImportTest):
    def test_hugging_face(self):
        import torch

        source = self.path("source")
        os.mkdir(source)
        shutil.copy(os.path.join(MODELS, "llama-gqa", "config.json"), source)
        with open(os.path.join(source, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(fixture_tokenizer("digits")["tokenizer"], file)
        tensors = {name: torch.from_numpy(x.copy()) for name, x in self.weights.items()}
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        torch.save(tensors, os.path.join(source, "pytorch_model.bin"))
        self.imported("import_pytorch.py", source, self.path("out"))
        self.assert_same(self.path("out"), self.weights)
        self.assertIn("tokenizer.json", os.listdir(self.path("out")))
        # Shards with an index, bf16, the format before 2020.
        os.remove(os.path.join(source, "pytorch_model.bin"))
        names, where = list(self.weights), {}
        for i, part in enumerate((names[::2], names[1::2]), 1):
            shard = f"pytorch_model-0000{i}-of-00002.bin"
            torch.save({name: tensors[name].bfloat16() for name in part}, os.path.join(source, shard), _use_new_zipfile_serialization=i == 1)
            where.update({name: shard for name in part})
        with open(os.path.join(source, "pytorch_model.bin.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": where}, file)
        self.imported("import_pytorch.py", source, self.path("bf16"))
        self.assert_same(self.path("bf16"), {name: tensors[name].bfloat16().view(torch.int16).numpy().view("<u2") for name in names})

    def meta(self, shards, columns_embedding, params=None):
        """Writes a directory in Meta's format, with every tensor split over the shards of model parallelism."""
        import torch

        c, source = self.config, self.path(f"meta{shards}{columns_embedding}{bool(params)}")
        os.mkdir(source)
        parts = [{} for _ in range(shards)]
        def add(name, x, dimension):
            pieces = np.split(x, shards, dimension) if dimension is not None else [x] * shards
            for part, piece in zip(parts, pieces):
                part[name] = torch.from_numpy(piece.copy())
        embedding = self.weights["model.embed_tokens.weight"][:100]
        add("tok_embeddings.weight", embedding, 1 if columns_embedding else 0)
        add("output.weight", self.weights["lm_head.weight"][:100], 0)
        add("norm.weight", self.weights["model.norm.weight"], None)
        add("rope.freqs", np.ones(4, np.float32), None)
        for layer in range(c["num_hidden_layers"]):
            ours, theirs = f"model.layers.{layer}.", f"layers.{layer}."
            add(theirs + "attention_norm.weight", self.weights[ours + "input_layernorm.weight"], None)
            add(theirs + "ffn_norm.weight", self.weights[ours + "post_attention_layernorm.weight"], None)
            for name, part in META.items():
                x = self.weights[f"{ours}{part}.weight"]
                heads = {"attention.wq": c["num_attention_heads"], "attention.wk": c["num_key_value_heads"]}.get(name)
                add(f"{theirs}{name}.weight", interleaved(x, heads) if heads else x, 1 if name in ("attention.wo", "feed_forward.w2") else 0)
        for i, part in enumerate(parts):
            torch.save(part, os.path.join(source, f"consolidated.{i:02}.pth"))
        with open(os.path.join(source, "params.json"), "w", encoding="utf-8") as file:
            json.dump({"dim": c["hidden_size"], "n_layers": c["num_hidden_layers"], "n_heads": c["num_attention_heads"],
                       "n_kv_heads": c["num_key_value_heads"], "norm_eps": c["rms_norm_eps"], "vocab_size": -1, **(params or {})}, file)
        return source

    def test_meta(self):
        expected = {name: x[:100] if x.shape[0] == 101 else x for name, x in self.weights.items()}
        for shards, columns in ((1, True), (2, True), (2, False)):
            out = self.path(f"out{shards}{columns}")
            self.imported("import_pytorch.py", self.meta(shards, columns), out)
            self.assert_same(out, expected)
            self.assert_same_shape(out, vocab_size=100)
        scaled = {"rope_theta": 500000.0, "use_scaled_rope": True}
        source = self.meta(1, False, scaled)
        self.refused(["--rope-factor"], "import_pytorch.py", source, self.path("x"))
        self.imported("import_pytorch.py", source, self.path("scaled"), "--rope-factor", 32)
        config = read_json(self.path("scaled"), "config.json")
        self.assertEqual((config["rope_theta"], config["rope_scaling"]["factor"], config["bos_token_id"]), (500000.0, 32.0, 128000))

    def test_invalid_input_is_rejected(self):
        os.mkdir(self.path("empty"))
        self.refused(["neither"], "import_pytorch.py", self.path("empty"), self.path("x"))
        with open(self.path("empty/params.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        self.refused(["consolidated.00.pth"], "import_pytorch.py", self.path("empty"), self.path("x"))
        with open(self.path("empty/consolidated.00.pth"), "wb") as file:
            file.write(b"no checkpoint")
        self.refused(["params.json", "'dim'"], "import_pytorch.py", self.path("empty"), self.path("x"))
        with open(self.path("empty/params.json"), "w", encoding="utf-8") as file:
            json.dump({"dim": 8, "n_layers": 1, "n_heads": 1, "norm_eps": 1e-5}, file)
        self.refused(["consolidated.00.pth"], "import_pytorch.py", self.path("empty"), self.path("x"))
        import torch

        torch.save({"x": PytorchTest}, self.path("empty/consolidated.00.pth"))  # no tensors: running it would be needed
        self.refused(["consolidated.00.pth"], "import_pytorch.py", self.path("empty"), self.path("x"))


class PytorchErrorsTest(ImportTest):
    """Errors that come before torch is needed, or from a torch.load that fails as torch's does."""

    def test_an_index_names_files_of_its_directory(self):
        source = self.path("source")
        os.mkdir(source)
        shutil.copy(os.path.join(MODELS, "llama-gqa", "config.json"), source)
        index = os.path.join(source, "pytorch_model.bin.index.json")
        cases = [({"weight_map": {"a": name}}, f"no file name for a: {shown}")
                 for name, shown in (("../other/pytorch_model.bin", '"../other'), ("/etc/passwd", '"/etc'),
                                     ("x\0y", '"x\\u0000y"'), (5, "5"))]
        cases += [({"weight_map": []}, "'weight_map'"), ({}, "'weight_map'"), ([], "not an object")]
        for content, words in cases:
            with open(index, "w", encoding="utf-8") as file:
                json.dump(content, file)
            self.refused([index, words], "import_pytorch.py", source, self.path("x"))

    def test_json_that_is_no_object(self):
        os.mkdir(self.path("source"))
        for files in ("pytorch_model.bin", "config.json"), ("consolidated.00.pth", "params.json"):
            for name in files:
                with open(self.path(os.path.join("source", name)), "w", encoding="utf-8") as file:
                    file.write("[]")
            self.refused([files[1], "not an object"], "import_pytorch.py", self.path("source"), self.path("x"))

    def test_errors_of_torch_load_are_one_line(self):
        import pickle
        import types
        from unittest import mock

        for error, reason in ((pickle.UnpicklingError("Weights only load failed. Try weights_only=False.\n\nmore"),
                               "(Weights only load failed)"),
                              (EOFError(), "(EOFError)"), (IndexError("list index out of range"), "list index out of")):
            def fail(*_, **__):
                raise error
            with mock.patch.dict(sys.modules, torch=types.SimpleNamespace(load=fail)):
                with self.assertRaises(import_pytorch.ModelError) as caught:
                    import_pytorch.load("a.bin")
            self.assertIn("a.bin: not tensors that torch.load(weights_only=True) can read", str(caught.exception))
            self.assertIn(reason, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class StandInTensor:
    """Of torch's tensor what the importer uses."""

    dtype = "torch.float32"

    def __init__(self, values):
        self.values, self.shape = values, values.shape
        self.detach = self.float = lambda: self

    def numpy(self):
        return self.values


class PytorchNamesTest(ImportTest):
    """Names of tensors, and tokenizer.model, without torch."""

    def import_tensors(self, weights, out="out", files=()):
        from unittest import mock

        source = self.path("source")
        os.makedirs(source, exist_ok=True)
        shutil.copy(os.path.join(MODELS, "llama-gqa", "config.json"), source)
        for name in ("pytorch_model.bin", *files):
            with open(os.path.join(source, name), "a", encoding="utf-8"):
                pass
        tensors = {name: StandInTensor(x) for name, x in weights.items()}
        with mock.patch.object(import_pytorch, "load", lambda path: tensors):
            import_pytorch.import_pytorch(source, self.path(out))
        return self.path(out)

    def refused_names(self, words, weights):
        with self.assertRaises(import_pytorch.ModelError) as caught:
            self.import_tensors(weights)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertEqual(os.listdir(self.top), ["source"])

    def test_wrappers_are_stripped(self):
        wrapped = lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.")  # noqa: E731
        for i, change in enumerate((lambda name: "_orig_mod." + name, lambda name: "module." + name,
                                    lambda name: "module._orig_mod." + name, lambda name: "_orig_mod.module." + name,
                                    lambda name: "_fsdp_wrapped_module." + wrapped(name))):
            weights = {change(name): x for name, x in self.weights.items()}
            weights[change("model.layers.0.self_attn.rotary_emb.inv_freq")] = np.ones(4, np.float32)
            self.assert_same(self.import_tensors(weights, f"out{i}"), self.weights)

    def test_unknown_and_missing_names(self):
        x, name = np.ones((2, 2), np.float32), "model.layers.1.mlp.up_proj.weight"
        self.refused_names(["model.layers.0.self_attn.q_proj.lora_A", "no such tensor"],
                           {**self.weights, "model.layers.0.self_attn.q_proj.lora_A": x})
        self.refused_names([name, "missing"], {key: x for key, x in self.weights.items() if key != name})
        self.refused_names([name, "shape [2, 2]"], {**self.weights, name: x})
        self.refused_names([name, "twice", "module." + name], {**self.weights, "module." + name: x})

    @unittest.skipIf(missing("sentencepiece"), missing("sentencepiece"))
    @unittest.skipIf(missing("tokenizers"), missing("tokenizers"))
    def test_tokenizer_model(self):
        import sentencepiece as spm
        import tokenizers

        source, texts = self.path("source"), ["it was the best of times", "it was the worst of times", " a  b"]
        self.import_tensors(self.weights, "none")
        self.assertNotIn("tokenizer.json", os.listdir(self.path("none")))
        model = os.path.join(source, "tokenizer.model")
        spm.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_prefix=model.removesuffix(".model"), vocab_size=300,
                                       byte_fallback=True, hard_vocab_limit=False, minloglevel=2, model_type="bpe",
                                       normalization_rule_name="identity", remove_extra_whitespaces=False)
        reference = spm.SentencePieceProcessor(model_file=model)
        it, was = reference.encode("it"), reference.encode("was", add_bos=False)

        def imported(name, settings):
            with open(os.path.join(source, "tokenizer_config.json"), "w", encoding="utf-8") as file:
                json.dump(settings, file)
            out = self.import_tensors(self.weights, name)
            self.assertEqual(read_json(out, "tokenizer_config.json"), settings)
            return tokenizers.Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
        got = imported("plain", {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages }}"})
        for text in texts:
            self.assertEqual(got.encode(text).ids, [1, *reference.encode(text)])
        self.assertEqual(got.encode("it</s>was").ids, [1, *it, 2, *was])  # a space in front of each part
        self.assertEqual(imported("bare", {"add_bos_token": False}).encode("it").ids, it)
        got = imported("first", {"legacy": False})  # in front of the first only
        self.assertEqual(got.encode("it").ids, [1, *it])
        self.assertNotEqual(got.encode("it</s>was").ids, [1, *it, 2, *was])
        self.assertEqual(got.decode(got.encode("it</s>was").ids, skip_special_tokens=False), "<s> it</s>was")
        for settings, words in (({"tokenizer_class": "GemmaTokenizer"}, '"GemmaTokenizer"'),
                                ({"add_eos_token": True}, "'add_eos_token' is true")):
            with self.assertRaisesRegex(import_pytorch.ModelError, words):
                imported("x", settings)
        # A tokenizer.json that is there stays.
        with open(os.path.join(source, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(fixture_tokenizer("digits")["tokenizer"], file)
        imported("stays", {})
        self.assertEqual(read_json(self.path("stays"), "tokenizer.json"), fixture_tokenizer("digits")["tokenizer"])


class TokenizerModelTest(unittest.TestCase):
    @unittest.skipIf(missing("tokenizers"), missing("tokenizers"))
    def test_tiktoken(self):
        import base64

        import tokenizers

        case = fixture_tokenizer("llama3")
        model = fixture_tokenizer("gpt2")["tokenizer"]["model"]  # whose ids follow the merges
        alphabet = {character: byte for byte, character in enumerate(tokenizer_json.byte_alphabet())}
        tokens = [bytes(alphabet[c] for c in token) for token in sorted(model["vocab"], key=model["vocab"].get) if token != "<|endoftext|>"]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokenizer.model")
            with open(path, "wb") as file:
                for rank, token in enumerate(tokens):
                    file.write(base64.b64encode(token) + b" %d\n" % rank)
            tokenizer = tokenizer_json.tiktoken_model(path, ["<|begin_of_text|>", "<|end_of_text|>"])
            for content, words in ((b"YQ== 0\nYg== 2\n", "ranks are not"), (b"YQ== 0\nYg==\n", "not enough values"),
                                   (b"YQ== 0\nYmI= x\n", "invalid literal"), (b"Y 0\n", "base64"),
                                   (b"YQ== 0\nYg== 1\nYWJhYg== 2\n", "token 2 is not a merge of two earlier tokens")):
                with open(path, "wb") as file:
                    file.write(content)
                with self.assertRaises(tokenizer_json.TokenizerError) as caught:
                    tokenizer_json.tiktoken_model(path, [])
                self.assertIn(f"{path}: not a tiktoken vocabulary", str(caught.exception))
                self.assertIn(words, str(caught.exception))
        merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        self.assertEqual(tokenizer["model"]["merges"], merges)
        self.assertEqual(tokenizer["pre_tokenizer"], case["tokenizer"]["pre_tokenizer"])
        got = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        self.assertEqual(got.encode("it was").ids[0], len(tokens))

    @unittest.skipIf(missing("sentencepiece"), missing("sentencepiece"))
    @unittest.skipIf(missing("tokenizers"), missing("tokenizers"))
    def test_sentencepiece(self):
        import sentencepiece as spm
        import tokenizers

        texts = [text for text in read_json(ROOT, "dev/fixtures/tokenizer/tokenizers.json")["texts"] if "\u2581" not in text and "\0" not in text]
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "tokenizer")
            spm.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_prefix=prefix, model_type="bpe", vocab_size=600,
                                           byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                                           split_digits=True, allow_whitespace_only_pieces=True, hard_vocab_limit=False, minloglevel=2)
            tokenizer, special = tokenizer_json.sentencepiece_model(prefix + ".model")
            reference = spm.SentencePieceProcessor(model_file=prefix + ".model")
            expected = [reference.encode(text) for text in texts]
        self.assertEqual(special, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
        got = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        got.encode_special_tokens = True
        for text, ids in zip(texts, expected):
            self.assertEqual(got.encode(text, add_special_tokens=False).ids, ids, text)


    @unittest.skipIf(missing("sentencepiece"), missing("sentencepiece"))
    @unittest.skipIf(missing("tokenizers"), missing("tokenizers"))
    def test_settings_of_sentencepiece(self):
        import sentencepiece as spm
        import tokenizers

        texts = ["it was the best of times", "it was the worst of times", " a  b"]
        identity = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        with tempfile.TemporaryDirectory() as folder:
            def train(**settings):
                prefix = os.path.join(folder, "tokenizer")
                spm.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_prefix=prefix, vocab_size=300,
                                               byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
                                               **{**identity, **settings})
                return prefix + ".model"
            for settings, words in (({"model_type": "unigram"}, "model_type unigram"),
                                    ({"normalization_rule_name": "nmt_nfkc"}, "normalization nmt_nfkc"),
                                    ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces true"),
                                    ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix true"),
                                    ({"user_defined_symbols": ["<sep>"]}, "user-defined symbols (<sep>)")):
                path = train(**settings)
                with self.assertRaises(tokenizer_json.TokenizerError) as caught:
                    tokenizer_json.sentencepiece_model(path)
                self.assertIn(f"{path}: SentencePiece with {words} is not supported", str(caught.exception))
            for prefix in (True, False):
                path = train(add_dummy_prefix=prefix)
                tokenizer, _ = tokenizer_json.sentencepiece_model(path)
                reference = spm.SentencePieceProcessor(model_file=path)
                got = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
                for text in texts:
                    ids = got.encode(text, add_special_tokens=False).ids
                    self.assertEqual(ids, reference.encode(text), (prefix, text))
                    self.assertEqual(got.decode(ids), text)
            with open(path, "wb") as file:
                file.write(b"no model")
            with self.assertRaisesRegex(tokenizer_json.TokenizerError, "not a SentencePiece model"):
                tokenizer_json.sentencepiece_model(path)


if __name__ == "__main__":
    unittest.main()
