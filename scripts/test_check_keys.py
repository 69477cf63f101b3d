#!/usr/bin/env python3
"""check_keys.py: every key that transformers and llama.cpp declare is used, refused or listed; others are named."""

import ast
import types
import unittest

import check_keys

OLD = """
class Config(Base):
    attribute_map = {"hidden_size": "n_embd"}
    def __init__(self, n_embd=1, *, rate=0.1, **kwargs):
        self.x = kwargs.pop("torch_dtype", None) or kwargs.get("dtype") or kwargs["third"]
    def save(self, path, **kwargs):
        kwargs.pop("token")
"""
NEW = """
@dataclass
class Config(Base):
    model_type: ClassVar[str] = ""
    plan = {}
    n_embd: int = 1
    rate: float | None = None
    SPECIAL_TOKENS_ATTRIBUTES = ["bos_token", "eos_token"]
    def __post_init__(self, **kwargs):
        other.pop("no")
        self.layers = kwargs.pop("layers", None)
"""


def keys_of(source):
    return check_keys.keys_of_class(
        next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    )


class KeysTest(unittest.TestCase):
    def test_the_packages(self):
        try:
            for requirement in (*check_keys.TRANSFORMERS, check_keys.GGUF):
                check_keys.Package(requirement)
        except OSError as error:
            self.skipTest(f"a package cannot be downloaded: {error}")
        self.assertEqual(list(check_keys.faults()), [])
        # The lists are not empty: what each package is known for.
        for requirement in check_keys.TRANSFORMERS:
            package = check_keys.Package(requirement)
            self.assertLessEqual(
                {"sliding_window", "use_cache", "torch_dtype", "is_encoder_decoder", "max_window_layers"},
                check_keys.config_keys(package, "qwen2"),
            )
        self.assertIn("is_causal", check_keys.config_keys(package, "gpt2"))
        self.assertLessEqual(
            {"{arch}.rope.scaling.factor", "tokenizer.chat_template.x", "{arch}.attention.indexer.top_k"},
            check_keys.gguf_constants(check_keys.Package(check_keys.GGUF)),
        )

    def test_keys_of_a_class(self):
        self.assertEqual(keys_of(OLD), {"hidden_size", "n_embd", "rate", "torch_dtype", "dtype", "third"})
        self.assertEqual(keys_of(NEW), {"n_embd", "rate", "layers", "bos_token", "eos_token"})
        self.assertEqual(check_keys.keys_of_class(None), set())
        source = 'self.config.n_head + config.to_dict() + getattr(layer_config, "window", 0) + hasattr(config, "chunks")'
        self.assertEqual(check_keys.attributes_of_config(source), {"n_head", "window", "chunks"})

    def test_the_program_is_asked(self):
        for family, key, used in (
            ("llama", "rms_norm_eps", True),
            ("llama", "use_cache", False),
            ("llama", "new_norm", False),
            ("llama", "rope_scaling.low_freq_factor", True),
            ("llama", "rope_scaling.mscale", False),
            ("gpt2", "hidden_size", True),
            ("qwen2", "max_window_layers", True),
            ("llama", "is_causal", True),
        ):
            self.assertEqual(check_keys.uses_config_key(family, key), used, key)

    def test_faults(self):
        decisions = [(("a",), True), (("b", "llama.b"), False), (("new", "llama.new"), False)]
        faults = lambda table: list(
            check_keys.faults_of("config.json", decisions, check_keys.Reasons(table))
        )  # noqa: E731
        self.assertEqual(faults({"why": ["llama.b", "n*"]}), [])
        [fault] = faults({"why": ["b"]})
        self.assertIn("config.json: key llama.new: neither used nor refused", fault)
        [fault] = faults({"why": ["b", "new", "a"]})  # it is used
        self.assertIn("scripts/ignored_keys.py: a: no key is ignored for this; remove it", fault)

    def test_attributes_of_keys_are_texts(self):
        keys = "class Keys:\n    class LLM:\n        A = '{arch}.a'\n    B = 'b.{id}.c'\n"
        package = types.SimpleNamespace(class_of=lambda *_: ast.parse(keys).body[0])
        self.assertEqual(check_keys.gguf_constants(package), {"{arch}.a", "b.x.c"})


if __name__ == "__main__":
    unittest.main()
