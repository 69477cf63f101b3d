"""scripts/import_gguf.py on a file of each family as llama.cpp writes them: names of tensors by the package gguf, q and k
permuted for the architectures whose RoPE there is on neighbouring channels, tokenizers of the fixtures."""

import json
import os
import shutil
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from test_import import ROOT, ImportTest, interleaved, missing, read_json, write_sizes  # noqa: E402


def family_model(family, rng):
    """A tiny model of a family: (config.json, tensors)."""
    channels, heads, kv_heads, head_size, ffn, layers, vocab = 24, 4, 2, 6, 40, 5, 61
    head_size = 8 if family in ("mistral", "qwen3") else head_size
    q, kv = heads * head_size, kv_heads * head_size
    config = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": channels,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": ffn,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": family in ("qwen3", "smollm3"),
        "initializer_range": 0.02,
        "pad_token_id": None,
    }
    shapes = {
        "self_attn.q_proj": (q, channels),
        "self_attn.k_proj": (kv, channels),
        "self_attn.v_proj": (kv, channels),
        "self_attn.o_proj": (channels, q),
        "mlp.gate_proj": (ffn, channels),
        "mlp.up_proj": (ffn, channels),
        "mlp.down_proj": (channels, ffn),
        "input_layernorm": (channels,),
        "post_attention_layernorm": (channels,),
    }
    biased = []
    if family == "mistral":
        config.update(architectures=["MistralForCausalLM"], sliding_window=16, attention_bias=False, mlp_bias=False)
    elif family == "qwen2":
        config.update(architectures=["Qwen2ForCausalLM"], use_sliding_window=False)
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    elif family == "qwen3":
        config.update(architectures=["Qwen3ForCausalLM"], use_sliding_window=False, attention_bias=False)
        shapes.update({"self_attn.q_norm": (head_size,), "self_attn.k_norm": (head_size,)})
    elif family == "smollm3":
        config.update(
            architectures=["SmolLM3ForCausalLM"],
            use_sliding_window=False,
            attention_bias=False,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0, 1],
        )
    elif family == "olmo2":
        config.update(architectures=["Olmo2ForCausalLM"], attention_bias=False)
        shapes.update({"self_attn.q_norm": (q,), "self_attn.k_norm": (kv,), "post_feedforward_layernorm": (channels,)})
        del shapes["input_layernorm"]
    else:
        config.update(
            architectures=["Phi3ForCausalLM"],
            sliding_window=16,
            partial_rotary_factor=4 / 6,
            original_max_position_embeddings=32,
        )
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            del shapes[part]
        shapes.update({"self_attn.qkv_proj": (q + 2 * kv, channels), "mlp.gate_up_proj": (2 * ffn, channels)})
    names = {"model.embed_tokens.weight": (vocab, channels), "model.norm.weight": (channels,)}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = (vocab, channels)
    for layer in range(layers):
        names.update({f"model.layers.{layer}.{part}.weight": shape for part, shape in shapes.items()})
        names.update({f"model.layers.{layer}.{part}.bias": shapes[part][:1] for part in biased})
    return config, {name: rng.standard_normal(shape, np.float32) for name, shape in names.items()}


@unittest.skipIf(missing("gguf"), missing("gguf"))
class GgufFamiliesTest(ImportTest):

    FAMILIES = ("mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3")

    def write(self, config, weights, tokenizer, change=lambda writer: None):
        import gguf

        family = config["model_type"]
        architecture = "llama" if family == "mistral" else family
        writer = gguf.GGUFWriter(self.path("model.gguf"), architecture)
        write_sizes(writer, config)
        writer.add_rope_freq_base(config["rope_theta"])
        if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        if config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
        if family == "phi3":
            writer.add_rope_dimension_count(round(config["partial_rotary_factor"] * config["head_dim"]))
            writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        tokenizer(writer)
        change(writer)
        number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
        for name, x in weights.items():
            heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
            heads = heads.get(name.split(".")[-2])
            permuted = heads and architecture in ("llama", "smollm3")
            x = np.ascontiguousarray(interleaved(x, heads) if permuted else x)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), x)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path("model.gguf")

    def fixture(self, name):
        return read_json(ROOT, f"dev/fixtures/tokenizer/{name}.json")["cases"][0]

    def add_tokenizer(self, writer, name, pre=None, padding=0):
        """What llama.cpp's converter writes of a tokenizer.json. pre: of byte-level BPE."""
        description = self.fixture(name)["tokenizer"]
        ids = {
            **description["model"]["vocab"],
            **{token["content"]: token["id"] for token in description["added_tokens"]},
        }
        kinds = {token["content"]: 3 if token["special"] else 4 for token in description["added_tokens"]}
        tokens = sorted(ids, key=ids.get)
        writer.add_tokenizer_model("gpt2" if pre else "llama")
        writer.add_tokenizer_pre(pre or "default")
        types = [
            kinds.get(token, 6 if not pre and len(token) == 6 and token.startswith("<0x") else 1) for token in tokens
        ]
        if not pre:
            types[0] = 2
            made = ["".join(merge) for merge in description["model"]["merges"]]
            scores = [-float(made.index(token)) if token in made else -1e6 for token in tokens]
            writer.add_token_scores(scores + [-1e4] * padding)
            writer.add_unk_token_id(0)
        else:
            writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
        writer.add_token_list(tokens + [f"[PAD{len(tokens) + i}]" for i in range(padding)])
        writer.add_token_types(types + [5] * padding)
        writer.add_eos_token_id(2)

    def import_family(self, family, tokenizer, change=lambda writer: None):
        config, weights = family_model(family, np.random.default_rng(3))
        self.imported("import_gguf.py", self.write(config, weights, tokenizer, change), self.path(family))
        return config, weights

    def test_weights_and_config(self):
        for family in self.FAMILIES:
            with self.subTest(family):
                tokenizer = ("phi3",) if family == "phi3" else ("qwen", "qwen2")
                config, weights = self.import_family(family, lambda writer: self.add_tokenizer(writer, *tokenizer))
                self.assert_same(self.path(family), weights)
                written = read_json(self.path(family), "config.json")
                expected = {"sliding_window": None, "pad_token_id": None, **config, "bos_token_id": None, "eos_token_id": 2}
                # Left out where they follow from the others.
                implied = {"attention_bias", "mlp_bias", "head_dim", "no_rope_layer_interval", "original_max_position_embeddings"}
                for key in expected.keys() | written.keys():
                    found = expected.get(key) if key in implied else written.get(key)
                    self.assertEqual(found, expected.get(key), key)

    def test_tokenizers(self):
        """The imported tokenizer gives the ids that the family's own gives, and has no tokens for rows beyond them."""
        import tokenizers

        def bos(writer):
            writer.add_bos_token_id(1)

        for family, name, pre in (
            ("qwen2", "qwen", "qwen2"),
            ("mistral", "tekken", "tekken"),
            ("smollm3", "smollm3", "llama-bpe"),
            ("olmo2", "olmo2", "dbrx"),
            ("mistral", "mistral-v0.1", None),
            ("phi3", "phi3", None),
        ):
            with self.subTest(name):
                shutil.rmtree(self.path(family), ignore_errors=True)
                add = lambda writer: self.add_tokenizer(writer, name, pre, padding=7)  # noqa: E731
                self.import_family(family, add, bos if name == "tekken" else lambda writer: None)
                fixture, written = self.fixture(name), read_json(self.path(family), "tokenizer.json")
                texts = read_json(ROOT, f"dev/fixtures/tokenizer/{name}.json")["texts"]
                got = tokenizers.Tokenizer.from_str(json.dumps(written))
                original = tokenizers.Tokenizer.from_str(json.dumps(fixture["tokenizer"]))
                self.assertEqual(got.get_vocab(), original.get_vocab())
                for text, ids in zip(texts, fixture["special"]):
                    self.assertEqual(got.encode(text, add_special_tokens=False).ids, ids, text)
                self.assertEqual(got.encode("a").ids[0] == 1, name == "tekken")

    def test_refused(self):
        def longrope(writer):
            import gguf

            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

        for family, words, tokenizer, change in (
            ("phi3", ["phi3.rope.scaling.type is longrope"], ("phi3",), longrope),
            ("phi3", ["the tokenizer is gpt2"], ("olmo2", "dbrx"), lambda writer: None),
            (
                "olmo2",
                ["olmo2.attention.sliding_window is 8"],
                ("olmo2", "dbrx"),
                lambda writer: writer.add_sliding_window(8),
            ),
            ("qwen3", ["mixture of experts"], ("qwen", "qwen2"), lambda writer: writer.add_expert_count(4)),
            ("qwen2", ["words of kind deepseek-r1-qwen"], ("qwen", "deepseek-r1-qwen"), lambda writer: None),
        ):
            with self.subTest(words=words):
                config, weights = family_model(family, np.random.default_rng(3))
                add = lambda writer: self.add_tokenizer(writer, *tokenizer)  # noqa: E731
                file = self.write(config, weights, add, change)
                self.refused(words, "import_gguf.py", file, self.path("x"))
        config, weights = family_model("qwen2", np.random.default_rng(3))
        del weights["model.layers.4.self_attn.v_proj.bias"]
        file = self.write(config, weights, lambda writer: self.add_tokenizer(writer, "qwen", "qwen2"))
        self.refused(["blk.4.attn_v.bias is missing"], "import_gguf.py", file, self.path("x"))


if __name__ == "__main__":
    unittest.main()
