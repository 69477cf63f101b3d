"""Writes dev/fixtures/tokenizer/*.json: small tokenizers of each type that data/tokenizer.cpp reads, difficult strings,
and the ids that the `tokenizers` package gives for them. dev/tests/test_tokenizer.cpp compares ours with these. The types one
by one are in tokenizers.json, a family's tokenizer in a file of its name.

    python dev/peers/make_tokenizer_fixture.py [FILE ...]      (needs the package tokenizers)
"""

import from_scripts  # noqa: F401
import json
import os
import random
import sys

from package_encoder import PackageEncoder
from tokenizer_families import FAMILIES, TRAIN, marks_spaces, random_texts, sentencepiece, without_half_of_merges
from tokenizer_json import LLAMA3_WORDS, byte_alphabet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "tokenizer")

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


# Not UTF-8, in hexadecimal: dev/peers/package_encoder.py encodes them as data/tokenizer.cpp does.
BYTES = [text.hex() for text in (
    b"ma\xf1ana", b"the \xf1\xff\xfe the\xf1 the\xf1 the", b"caf\xe9 \xff\xfe ok\n", b"a\xe2\x82 b\xe2\x82\xac",
    b"x\xc0\x80y\xed\xa0\x80z",
    b"it was\xf4\x90\x80\x80\xf5 the best\x80\xbf of", "日本\x1f\x00語 \x7f".encode() + b"\xf0\x9f\x98")]


def plain_texts(count):
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
    yield "lines", train(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"[\p{Z}\n]+$|^[a-z]"), "isolated"),
                                                  byte_level(use_regex=False)]), 400)
    # LLaMA-3's kind: words that are in the vocabulary are taken whole, even if no merges lead to them.
    llama = train(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level(use_regex=False)]),
                  500, ignore_merges=True)
    llama.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    llama.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)])
    yield "llama3", without_half_of_merges(llama)


def sentencepiece_tokenizers():
    added = [AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)]
    llama2 = marks_spaces()
    yield "llama2", sentencepiece(300, added=added, normalizer=llama2)
    # Merges that reach across spaces: the text can't be cut there.
    yield "llama2-across-spaces", sentencepiece(600, added=added, normalizer=llama2, cut=False)
    for scheme, split, strip in (("first", False, True), ("always", True, True), ("never", True, False)):
        metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        yield f"metaspace-{scheme}", sentencepiece(300, added=added, pre_tokenizer=metaspace, strip=strip)
    yield "unknown", sentencepiece(300, added=added, normalizer=llama2, byte_fallback=False)


def missing_bytes(**model_options):
    """SmolLM2's kind: the vocabulary lacks bytes that its training text does not have."""
    description = json.loads(train(byte_level(), 400).to_str())
    description["model"].update(model_options)
    made = "".join(left + right for left, right in description["model"]["merges"])
    alphabet = byte_alphabet()
    for byte in (0x00, 0x01, 0x1F, 0x7F, 0xAD, 0xF1, 0xF3, 0xF4, 0xFF):
        assert alphabet[byte] not in made
        del description["model"]["vocab"][alphabet[byte]]
    return Tokenizer.from_str(json.dumps(description))


def case(name, tokenizer, texts, older_merges):
    """The package's ids: of texts with special tokens as text, of texts with special tokens, of bytes by PackageEncoder."""
    ids = {}
    for key, encode_special in (("plain", True), ("special", False)):
        tokenizer.encode_special_tokens = encode_special  # True: as text
        ids[key] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    encoder = PackageEncoder(tokenizer.to_str())
    ids["start"] = encoder.start
    encoded = [encoder.encode(bytes.fromhex(text)) for text in BYTES]
    ids["bytes"] = [tokens for tokens, _ in encoded]
    ids["lost"] = [lost for _, lost in encoded]
    ids["decoded"] = [tokenizer.decode(i, skip_special_tokens=False) for i in ids["special"]]
    description = json.loads(tokenizer.to_str())
    if older_merges:  # which has no spaces in tokens
        description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
    return {"name": name, "tokenizer": description, **ids}


def write(path, texts, cases):
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"texts": texts, "bytes": BYTES, "cases": cases}, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")
    print(f"{os.path.relpath(path)}: {len(cases)} tokenizers, {len(texts)} texts, {os.path.getsize(path)} bytes")


def write_types(path):
    texts = TEXTS + plain_texts(60)
    tokenizers_of = [*tokenizers(), *sentencepiece_tokenizers(), ("missing-bytes", missing_bytes()),
                     ("missing-bytes-unknown", missing_bytes(unk_token="e", fuse_unk=True))]
    write(path, texts, [case(name, tokenizer, texts, bool(i % 2) and "across" not in name)
                        for i, (name, tokenizer) in enumerate(tokenizers_of)])


def write_family(path, name, count, seed=1):
    tokenizer = FAMILIES[name]()
    texts = TEXTS + random_texts(tokenizer, count, seed)
    write(path, texts, [case(name, tokenizer, texts, False)])


def main():
    for name in sys.argv[1:] or ["tokenizers", *FAMILIES]:
        path = os.path.join(OUT, name + ".json")
        if name in FAMILIES:
            write_family(path, name, 60)
        else:
            write_types(path)


if __name__ == "__main__":
    main()
