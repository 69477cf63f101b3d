"""Any bytes through the package tokenizers, which takes text: the reference for data/tokenizer.cpp
(make_tokenizer_fixture.py)."""

import from_scripts  # noqa: F401
import contextlib
import json
import re

from tokenizer_json import byte_alphabet
from tokenizers import Tokenizer

# Well-formed UTF-8 (Unicode 15, table 3-7).
UTF8 = re.compile(rb"(?:[\x00-\x7F]|[\xC2-\xDF][\x80-\xBF]|\xE0[\xA0-\xBF][\x80-\xBF]|"
                  rb"[\xE1-\xEC\xEE\xEF][\x80-\xBF]{2}|\xED[\x80-\x9F][\x80-\xBF]|"
                  rb"\xF0[\x90-\xBF][\x80-\xBF]{2}|[\xF1-\xF3][\x80-\xBF]{3}|\xF4[\x80-\x8F][\x80-\xBF]{2})+")


def utf8_runs(data):
    """Yields (part, whether it is UTF-8) of the longest parts that are UTF-8, and those between them that are not."""
    begin = 0
    for match in UTF8.finditer(data):
        if match.start() > begin:
            yield data[begin:match.start()], False
        yield match.group(), True
        begin = match.end()
    if begin < len(data):
        yield data[begin:], False


class VocabularyBytes:
    """The bytes that a vocabulary has. Encodes those that are not UTF-8, which the tokenizers package cannot, as
    data/tokenizer.cpp does: as a word of byte-level BPE, or as SentencePiece's fallback bytes."""

    def __init__(self, tokenizer, root):
        model, self.tokenizer = root["model"], tokenizer
        vocab, self.alphabet = model["vocab"], byte_alphabet()
        byte_level = isinstance(root.get("decoder"), dict) and root["decoder"].get("type") == "ByteLevel"
        fallback = [vocab.get(f"<0x{b:02X}>") for b in range(256)] if model.get("byte_fallback") else []
        self.fallback = fallback if fallback and None not in fallback else None
        self.missing = bytes(b for b in range(256) if byte_level and self.alphabet[b] not in vocab)
        self.characters = None if byte_level or self.fallback else dict.fromkeys([32, *map(ord, filter(
            lambda token: len(token) == 1, vocab))])
        self.can_encode = byte_level or self.fallback
        self.normalizer = tokenizer.normalizer if self.missing else None

    def lost(self, data):
        """The bytes of UTF-8 text that the vocabulary lacks: the package leaves them out or writes <unk>."""
        if self.normalizer:
            with contextlib.suppress(UnicodeDecodeError):  # bytes that are not UTF-8 stay as they are
                data = self.normalizer.normalize_str(data.decode("utf-8")).encode("utf-8")
        if self.characters is not None:
            return len(data.decode("utf-8").translate(self.characters).encode("utf-8"))
        return len(data) - len(data.translate(None, self.missing)) if self.missing else 0

    def ids(self, data):
        if self.fallback:
            return [self.fallback[b] for b in data]
        return [token.id for token in self.tokenizer.model.tokenize("".join(self.alphabet[b] for b in data))]


def without_prefix(description):
    """A tokenizer.json that puts no space in front of a text, for the rest of one."""
    root = json.loads(description)
    for part, steps in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = root.get(part) or {}
        if step.get("type") == "Prepend":
            root[part] = None
        for one in (step, *step.get(steps, [])):
            one.update({"add_prefix_space": False} if "add_prefix_space" in one else {},
                       **({"prepend_scheme": "never"} if "prepend_scheme" in one else {}))
        if steps in step:
            step[steps] = [one for one in step[steps] if one.get("type") != "Prepend"]
    return json.dumps(root)


class PackageEncoder:
    """Any tokenizer.json, through the tokenizers package. Special tokens written out in the text stay text."""

    def __init__(self, description):
        self.tokenizer = Tokenizer.from_str(description)
        self.rest = Tokenizer.from_str(without_prefix(description))
        self.tokenizer.encode_special_tokens = self.rest.encode_special_tokens = True
        self.bytes = VocabularyBytes(self.tokenizer, json.loads(description))
        self.lost = self.bytes.lost
        # The tokens that the tokenizer's post-processor prepends to a text: <s> for LLaMA.
        whole, text = self.tokenizer.encode("a").ids, self.tokenizer.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(whole)) if whole[i:i + len(text)] == text]
        self.start = whole[:starts[0]] if starts else []

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, data):
        """(ids, bytes that the vocabulary lacks)"""
        try:
            return self.ids(data.decode("utf-8")), self.lost(data)
        except UnicodeDecodeError:
            return self.encode_invalid(data)

    def encode_invalid(self, data):
        """(ids, bytes that the vocabulary lacks) of data that is not all UTF-8."""
        if not self.bytes.can_encode:
            text = data.decode("utf-8", "ignore").encode("utf-8")
            return self.ids(data.decode("utf-8", "replace")), len(data) - len(text) + self.lost(text)
        ids, lost, tokenizer = [], 0, self.tokenizer
        for run, valid in utf8_runs(data):
            if valid:
                ids += tokenizer.encode(run.decode("utf-8"), add_special_tokens=False).ids
            else:
                ids += self.bytes.ids(run)
            lost += self.lost(run)
            tokenizer = self.rest
        return ids, lost
