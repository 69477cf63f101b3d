"""Small tokenizers for tests, of the kinds that today's model families have: each with its family's normalizer,
pre-tokenizer, post-processor and kinds of added tokens, and with a vocabulary trained here (the families' own are not
part of the project)."""

import from_scripts  # noqa: F401
import json
import random
import unicodedata

from tokenizer_json import LLAMA3_WORDS, QWEN2_WORDS, TEKKEN_WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TRAIN = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.
She said: "I'm sure they'll come; we've waited since 1789, and he'd never let us down -- wouldn't he?"
for (int i = 0; i < n; i++) {\r\n        sum += x[i] * x[i];\r\n    }  // 2 * n FLOP
    def forward(self, x):\n        return self.norm(x + self.attention(x))\n\n\n
Der Fluß fließt über die Brücke; l'été à la plage, señor. 日本語のテキストと中文文本。 Привет, мир! Γειά σου Κόσμε.
\U0001f600\U0001f600\U0001f680 1234567890 3.14159 1,000,000 2024-01-31 $9.99 50% a_b c-d e/f \\ ~`^ aaaa aaaaaaaa    end
"""

# Parts of random strings: what splits words, what normalization changes, white space, text of several scripts.
PARTS = [
    "the", "The", "THE", "it was", " ", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "'LL", "a", "b", "ab", "ing", "aB",
    "Ab", "1", "23", "4567", ".", ",", "!?", "--", "/", "//\n", "\u00e9", "e\u0301", "\u0301", "\u0323\u0301",
    "\u0301\u0323", "e\u0302\u0323", "caf\u1ec7", "A\u030a", "\u212b", "\u1e9b\u0323", "\u1100\u1161\u11a8",
    "\uac00\u11a8", "\u0958", "\u4e2d", "\u306e", "\u304b\u3099", "\U0001f600", "\u200d", "\ufe0f", "\u00a0", "\u2003",
    "\u3000", "\u0085", "\u2028", "\u180e", "\u200b", "\u00df", "\u0130", "\u00b2", "\u0660", "\u2160", "\u01c5",
    "\u02b0", "_", "\\", "\"", "<", ">", "<|", "|>", "[", "]", "\u2581", "\u0120",
]


def byte_level(
    words, normalizer=None, special=(), added=(), start=None, behavior="isolated", invert=False, **model_options
):
    """A tokenizer with byte-level BPE of 480 tokens and the added tokens, special ones first. start: the special token
    that the post-processor puts in front of a text."""
    tokenizer = Tokenizer(models.BPE(**model_options))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior, invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(special)[:1],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TRAIN] * 2, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    steps = [processors.ByteLevel(trim_offsets=False)]
    if start:
        steps.append(template(tokenizer, start))
    tokenizer.post_processor = processors.Sequence(steps) if len(steps) > 1 else steps[0]
    return tokenizer


def template(tokenizer, start):
    return processors.TemplateProcessing(
        single=[start, "$A"],
        pair=[start, "$A", f"{start}:1", "$B:1"],
        special_tokens=[(start, tokenizer.token_to_id(start))],
    )


def without_half_of_merges(tokenizer):
    """Words whose merges are gone: with ignore_merges they are tokens still."""
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    model["merges"] = model["merges"][::2]
    made = {left + right for left, right in model["merges"]}
    model["merges"] = [[a, b] for a, b in model["merges"] if all(len(token) == 1 or token in made for token in (a, b))]
    return Tokenizer.from_str(json.dumps(description))


def sentencepiece(
    vocab_size, normalizer=None, pre_tokenizer=None, byte_fallback=True, strip=True, cut=True, special=(), added=()
):
    """LLaMA-2's kind: <unk>, <s>, </s>, then the bytes, then what merges make, then characters."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(split=cut)
    words.train_from_iterator([TRAIN] * 2, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    learnt = json.loads(words.to_str())["model"]
    merges = learnt["merges"]
    made = {left + right for left, right in merges}
    characters = sorted(
        (t for t in learnt["vocab"] if t not in made and t not in "\n\r日ß"), key=lambda t: learnt["vocab"][t]
    )
    merges = [m for m in merges if not any(c in "\n\r日ß" for c in m[0] + m[1])]
    order = (
        ["<unk>", "<s>", "</s>"]
        + [f"<0x{b:02X}>" for b in range(256) if byte_fallback]
        + [a + b for a, b in merges]
        + characters
    )
    vocab = {token: i for i, token in enumerate(dict.fromkeys(order))}
    tokenizer = Tokenizer(
        models.BPE(vocab, [tuple(m) for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    )
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("\u2581", " ")] + [decoders.ByteFallback()] * byte_fallback + [decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([*map(AddedToken, ("<unk>", "<s>", "</s>")), *special])
    tokenizer.add_tokens(list(added))
    return tokenizer


def marks_spaces():
    """LLaMA-2's normalizer."""
    return normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def text_token(content, **rules):
    return AddedToken(content, special=False, normalized=rules.pop("normalized", False), **rules)


def special_token(content, **rules):
    return AddedToken(content, special=True, normalized=rules.pop("normalized", False), **rules)


def mistral_v1():
    tokenizer = sentencepiece(300, normalizer=marks_spaces())
    tokenizer.post_processor = template(tokenizer, "<s>")
    return tokenizer


def mistral_v3():
    tokenizer = sentencepiece(
        300,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        special=map(special_token, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
    )
    tokenizer.post_processor = template(tokenizer, "<s>")
    return tokenizer


def tekken():
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(20, 60))]
    return without_half_of_merges(byte_level(TEKKEN_WORDS, special=special, start="<s>", ignore_merges=True))


def qwen():
    added = map(text_token, ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    return byte_level(
        QWEN2_WORDS, normalizer=normalizers.NFC(), special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], added=added
    )


def smollm3():
    added = map(text_token, ("<think>", "</think>", "<code>", "</code>"))
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    return without_half_of_merges(byte_level(LLAMA3_WORDS, special=special, added=added, ignore_merges=True))


def olmo2():
    added = [text_token("|||IP_ADDRESS|||", normalized=True), text_token("|||EMAIL_ADDRESS|||", normalized=True)]
    return byte_level(LLAMA3_WORDS, special=["<|endoftext|>", "<|pad|>"], added=added, behavior="removed", invert=True)


def phi3():
    special = [
        special_token("<|endoftext|>"),
        *(
            special_token(token, rstrip=True)
            for token in ("<|assistant|>", "<|user|>", "<|end|>", "<|system|>", "<|placeholder1|>")
        ),
    ]
    tokenizer = sentencepiece(300, normalizer=marks_spaces(), special=special)
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:  # which is no special token in that family
        token.update({"special": False, "rstrip": True} if token["content"] == "</s>" else {})
    return Tokenizer.from_str(json.dumps(description))


def rules():
    """No family's: every rule of added tokens, in text that is normalized before or after they are found."""

    def tokens(make, name):
        return [
            make(
                f"<{name}{i}>" if i % 2 else f"{name}{i}",
                single_word=bool(i & 1),
                lstrip=bool(i & 2),
                rstrip=bool(i & 4),
                normalized=bool(i & 8),
            )
            for i in range(16)
        ]

    # No characters of GPT-2's byte alphabet (which é is part of): decoding reads these as bytes.
    contents = (
        "e\u0323\u0302",
        "caf\u1ec7",
        "\u1ec7 \u1ec7",
        "  ",
        "the",
        "the b",
        "<|endoftext|>>",
        "\u1100\u1161",
        "the t",
    )
    added = [
        *tokens(text_token, "t"),
        *(text_token(content, normalized=i % 2 == 0) for i, content in enumerate(contents)),
    ]
    return byte_level(
        QWEN2_WORDS,
        normalizer=normalizers.Sequence([normalizers.NFC()]),
        special=["<|endoftext|>", *tokens(special_token, "s")],
        added=added,
        start="<|endoftext|>",
    )


FAMILIES = {
    "mistral-v0.1": mistral_v1,
    "mistral-v0.3": mistral_v3,
    "tekken": tekken,
    "qwen": qwen,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "phi3": phi3,
    "rules": rules,
}


def random_texts(tokenizer, count, seed):
    """Strings of parts that split words or that normalization changes, of added tokens, and of any characters (of
    Unicode 3.2, which every library knows)."""
    rng = random.Random(seed)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    known = [c for c in map(chr, range(0x110000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]

    def part():
        kind = rng.random()
        return rng.choice(PARTS if kind < 0.75 else added if kind < 0.87 else known)

    return ["".join(part() for _ in range(rng.randint(1, 24))) for _ in range(count)]
