#!/usr/bin/env python3
"""Writes dev/fixtures/declared_tokens.json: random files beside a tokenizer.json that declare special tokens, and the ids
that transformers gives with them. dev/tests/test_declared_tokens.cpp compares data/declared_tokens.cpp with these.

    python dev/peers/make_declared_tokens_fixture.py [--cases 150] [--seed 1] [--out FILE]     (needs transformers)
"""
import argparse
import json
import os
import random
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from tokenizers import pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "declared_tokens.json")
CONTENTS = ["<a>", "<b>", "<c>", "<d>", "</s>", "<v>"]  # <v> may be in model.vocab
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "image_token", "zz_token", "aa_token"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TEXTS = [*CONTENTS, *(f"x {token} y" for token in CONTENTS), *(f"x{token}y" for token in CONTENTS),
         "<a><b> <c>\n<d></s> <v>", "<v> <a>a<b>"]


def tokenizer_json(in_vocab, added):
    """The bytes, with <v> in model.vocab or not."""
    vocab = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *["<v>"] * in_vocab])}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": []}}


class Case:
    def __init__(self, rng):
        self.rng = rng
        self.in_vocab = self.chance(0.5)
        vocab = tokenizer_json(self.in_vocab, [])["model"]["vocab"]
        self.added, self.files = [], {}
        for content in rng.sample(CONTENTS, rng.randint(0, 3)):
            token_id = vocab.get(content, len(vocab) + sum(token["content"] not in vocab for token in self.added))
            self.added.append({"id": token_id, "content": content, **self.rules()})
        self.ids = {**vocab, **{token["content"]: token["id"] for token in self.added}}
        self.declare()

    def chance(self, p):
        return self.rng.random() < p

    def rules(self):
        return {"lstrip": self.chance(0.2), "rstrip": self.chance(0.2), "single_word": self.chance(0.1),
                "normalized": self.chance(0.3), "special": self.chance(0.7)}

    def token(self, typed):
        """As text, or as an object, which tokenizer_config.json must mark with its type."""
        content = self.rng.choice(CONTENTS)
        if self.chance(0.6):
            return content
        rules = {key: value for key, value in self.rules().items() if self.chance(0.6)}
        if not typed:
            rules.pop("special", None)
        return {**rules, "content": content, **({"__type": "AddedToken"} if typed else {})}

    def with_ids(self, most):
        found, new = {}, len(self.ids)
        for content in self.rng.sample(CONTENTS, self.rng.randint(0, most)):
            found[content] = self.ids.get(content, new)
            new += content not in self.ids
        return found

    def declare(self):
        self.rng.shuffle(names := list(NAMES))
        config = {name: self.token(True) for name in names if self.chance(0.25)}
        if self.chance(0.3):
            config["additional_special_tokens"] = [self.token(True) for _ in range(self.rng.randint(0, 2))]
        if self.chance(0.3):
            config["extra_special_tokens"] = (
                [self.token(True) for _ in range(self.rng.randint(0, 2))] if self.chance(0.5) else
                {name: self.rng.choice(CONTENTS) for name in self.rng.sample(["boi", "image_token", "q_token"], 2)})
        if self.chance(0.4):
            config["added_tokens_decoder"] = {str(token_id): {"content": content, **self.rules()}
                                              for content, token_id in self.with_ids(3).items()}
        if self.chance(0.9):
            self.files["tokenizer_config.json"] = config
        if self.chance(0.4):
            tokens = {name: self.token(False) for name in names if self.chance(0.25)}
            if self.chance(0.3):
                tokens["additional_special_tokens"] = self.rng.sample(CONTENTS, 2)
            self.files["special_tokens_map.json"] = tokens
        if self.chance(0.4):
            self.files["added_tokens.json"] = self.with_ids(3)

    def answer(self):
        with tempfile.TemporaryDirectory() as folder:
            files = {"tokenizer.json": tokenizer_json(self.in_vocab, self.added), **self.files}
            for name, content in files.items():
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    json.dump(content, file)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        # The files as text: the order of their keys decides ids.
        return {"added_tokens": self.added, "in_vocab": self.in_vocab,
                "files": {name: json.dumps(content) for name, content in self.files.items()},
                "ids": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
                "vocab_size": max(tokenizer.get_vocab().values()) + 1, "named": tokenizer.special_tokens_map,
                "eos": tokenizer.eos_token_id if tokenizer.eos_token else -1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=OUT)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    cases = [Case(rng).answer() for _ in range(args.cases)]
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump({"texts": TEXTS, "tokenizers": [tokenizer_json(v, []) for v in (False, True)], "cases": cases}, file, separators=(",", ":"))
        file.write("\n")
    print(f"{args.out}: {len(cases)} cases")


if __name__ == "__main__":
    main()
