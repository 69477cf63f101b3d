"""Writes dev/fixtures/tokenizer/tokenizers.json: a small tokenizer of each type that data/tokenizer.cpp reads, difficult
strings, and the ids that the `tokenizers` package gives for them. dev/test_tokenizer.cpp compares ours with these.

    python scripts/make_tokenizer_fixture.py      (needs the package tokenizers)
"""

import json
import os
import random
import sys
from array import array

from tokenizer_json import byte_alphabet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "data"))
from make_data import PackageEncoder  # noqa: E402

OUT = os.path.join(os.path.dirname(__file__), "..", "dev", "fixtures", "tokenizer", "tokenizers.json")

LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")

TRAIN = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.
She said: "I'm sure they'll come; we've waited since 1789, and he'd never let us down -- wouldn't he?"
for (int i = 0; i < n; i++) {\r\n        sum += x[i] * x[i];\r\n    }  // 2 * n FLOP
    def forward(self, x):\n        return self.norm(x + self.attention(x))\n\n\n
Der Fluß fließt über die Brücke; l'été à la plage, señor. 日本語のテキストと中文文本。 Привет, мир! Γειά σου Κόσμε.
\U0001F600\U0001F600\U0001F680 1234567890 3.14159 1,000,000 2024-01-31 $9.99 50% a_b c-d e/f \\ ~`^ aaaa aaaaaaaa    end
"""

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "  a  b   c    ", "\n", "\r\n", "\r\n\r\n  x", "\t\tx\t y\n \n  \n   z", "Hello, world!",
    "I'm you're he's WE'LL I'D don't 'tis o''s '''ll", "it's 'S 'LL '\u017f", "1234567 89 12a34 \u00bd \u2167 \u0661\u0662",
    "x" * 100, "the " * 40, " " * 70 + "x", "a" * 300, "\n" * 50, "abcabcabc" * 30,
    "caf\u00e9 cafe\u0301 \u0301 \u0915\u094d\u0937\u093f n\u0303a", "\U0001F600 \U0001F468\u200d\U0001F469\u200d\U0001F467 \U0001F1E9\U0001F1EA\ufe0f",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002\u4e2d\u6587", "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "a\u00a0b\u2003c\u3000d\u202fe\u0085f\u2028g\u1680h\u180ei\u200bj\ufeffk", "a\u00a0\u00a0 b", "\x00\x01\x1f\x7f\x80\xad\xff",
    "int main() {\r\n\treturn x->y[i] != 0 ? 1 : -1;\r\n}\r\n", "    def f(self):\n        return {'a': [1, 2, 3]}\n",
    "https://example.org/a_b?c=d&e=%20f#g", "2024-01-31T12:34:56.789Z $1,000.00 50%", "\\u0041 \\n ~`^|<>[]{}()",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b<|endoftext|><|endoftext|>", "<|endoftext", "<|begin_of_text|>x<|end_of_text|>",
    "<think>hm</think> <think>", "<<|endoftext|>>", "\u0120\u010a \u0120the", "\ue000\U0010ffff\U000e0001\u0378",
]


# Not UTF-8, in hexadecimal: data/make_data.py encodes them as data/tokenizer.cpp does.
BYTES = [text.hex() for text in (
    b"ma\xf1ana", b"the \xf1\xff\xfe the\xf1 the\xf1 the", b"caf\xe9 \xff\xfe ok\n", b"a\xe2\x82 b\xe2\x82\xac",
    b"x\xc0\x80y\xed\xa0\x80z",
    b"it was\xf4\x90\x80\x80\xf5 the best\x80\xbf of", "日本\x1f\x00語 \x7f".encode() + b"\xf0\x9f\x98")]


def random_texts(count):
    rng = random.Random(1)
    pool = ["the", "The", " ", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "'ll", "a", "b", "ab", "ing", "1", "23", "4567", ".", ",", "!?", "--",
            "\u00e9", "e\u0301", "\u4e2d", "\u306e", "\U0001F600", "\u200d", "\u00a0", "\u3000", "\u00df", "\u0130", "\u00b2", "_", "\\", "\"", "<|endoftext|>", "<think>"]
    return ["".join(rng.choice(pool) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def train(pre_tokenizer, vocab_size, **model_options):
    tokenizer = Tokenizer(models.BPE(**model_options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TRAIN] * 2, trainer)
    return tokenizer


def byte_level(use_regex=True, add_prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def tokenizers():
    yield "gpt2", train(byte_level(), 500)
    yield "prefix-space", train(byte_level(add_prefix_space=True), 400)
    yield "no-regex", train(byte_level(use_regex=False), 500)
    yield "bytes", train(byte_level(use_regex=False), 257)
    yield "digits", train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]), 400)
    yield "literal-split", train(pre_tokenizers.Sequence([pre_tokenizers.Split(".", "isolated"), pre_tokenizers.Digits(),
                                                          byte_level()]), 400)
    # LLaMA-3's kind: words that are in the vocabulary are taken whole, even if no merges lead to them.
    llama = train(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level(use_regex=False)]),
                  500, ignore_merges=True)
    llama.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    llama.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)])
    unmerged = json.loads(llama.to_str())
    unmerged["model"]["merges"] = unmerged["model"]["merges"][::2]  # half of the words have lost their way
    made = {left + right for left, right in unmerged["model"]["merges"]}
    unmerged["model"]["merges"] = [
        [a, b] for a, b in unmerged["model"]["merges"] if all(len(t) == 1 or t in made for t in (a, b))]
    yield "llama3", Tokenizer.from_str(json.dumps(unmerged))


def sentencepiece(vocab_size, normalizer=None, pre_tokenizer=None, byte_fallback=True, strip=True, cut=True):
    """LLaMA-2's kind: <unk>, <s>, </s>, then the bytes, then what merges make, then characters."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(split=cut)
    words.train_from_iterator([TRAIN] * 2, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    learnt = json.loads(words.to_str())["model"]
    merges = learnt["merges"]
    made = {left + right for left, right in merges}
    characters = sorted((t for t in learnt["vocab"] if t not in made and t not in "\n\r日ß"), key=lambda t: learnt["vocab"][t])
    merges = [m for m in merges if not any(c in "\n\r日ß" for c in m[0] + m[1])]
    order = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256) if byte_fallback] + [a + b for a, b in merges] + characters
    vocab = {token: i for i, token in enumerate(dict.fromkeys(order))}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m) for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("\u2581", " ")] + [decoders.ByteFallback()] * byte_fallback + [decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)])
    return tokenizer


def sentencepiece_tokenizers():
    llama2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    yield "llama2", sentencepiece(300, normalizer=llama2)
    # Merges that reach across spaces: the text can't be cut there.
    yield "llama2-across-spaces", sentencepiece(600, normalizer=llama2, cut=False)
    yield "metaspace-first", sentencepiece(300, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    yield "metaspace-always", sentencepiece(300, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"))
    yield "metaspace-never", sentencepiece(300, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"), strip=False)
    yield "unknown", sentencepiece(300, normalizer=llama2, byte_fallback=False)


def missing_bytes():
    """SmolLM2's kind: the vocabulary lacks bytes that its training text does not have."""
    tokenizer = train(byte_level(), 400)
    description = json.loads(tokenizer.to_str())
    made = "".join(left + right for left, right in description["model"]["merges"])
    alphabet = byte_alphabet()
    for byte in (0x00, 0x01, 0x1F, 0x7F, 0xAD, 0xF1, 0xF3, 0xF4, 0xFF):
        assert alphabet[byte] not in made
        del description["model"]["vocab"][alphabet[byte]]
    return Tokenizer.from_str(json.dumps(description))


def main():
    texts = TEXTS + random_texts(60)
    cases = []
    cases_of = [*tokenizers(), *sentencepiece_tokenizers(), ("missing-bytes", missing_bytes())]
    for i, (name, tokenizer) in enumerate(cases_of):
        ids = {}
        for key, encode_special in (("plain", True), ("special", False)):
            tokenizer.encode_special_tokens = encode_special  # True: as text
            ids[key] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        encoder = PackageEncoder(tokenizer.to_str(), 0, 4)
        ids["bytes"] = [list(array("I", bytes(encoder.encode(text)[0]))) for text in map(bytes.fromhex, BYTES)]
        ids["lost"] = [encoder.encode(text)[2] for text in map(bytes.fromhex, BYTES)]
        ids["decoded"] = [tokenizer.decode(i, skip_special_tokens=False) for i in ids["special"]]
        description = json.loads(tokenizer.to_str())
        if i % 2 and "across" not in name:  # the older form of merges, which has no spaces in tokens
            description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
        cases.append({"name": name, "tokenizer": description, **ids})
    os.makedirs(os.path.dirname(OUT), exist_ok=True)
    with open(OUT, "w", encoding="utf-8") as f:
        json.dump({"texts": texts, "bytes": BYTES, "cases": cases}, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")
    print(f"{os.path.relpath(OUT)}: {len(cases)} tokenizers, {len(texts)} texts, {os.path.getsize(OUT)} bytes")


if __name__ == "__main__":
    main()
