"""tokenizer.json (docs/use/formats.md) from the vocabularies that other formats carry."""

SPACE_MARK = "\u2581"  # what SentencePiece writes for a space
LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# How llama.cpp splits text where a GGUF file has no tokenizer.ggml.pre, or "default": one expression after the other.
LLAMACPP_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+",
                          r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", r"\p{N}+",
                          r"[0-9][0-9][0-9]")


class TokenizerError(ValueError):
    """A tokenizer with a setting that is not supported: one line that names it."""


def byte_alphabet():
    """GPT-2's printable characters for the 256 bytes (data/token_text.h)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def added_token(token_id, content, special=True, rstrip=False):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": rstrip,
            "normalized": False, "special": special}


def start_template(token, token_id):
    """A post-processor that puts a token in front of a text."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {"type": "TemplateProcessing", "single": [start, text[0]], "pair": [start, *text],
            "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}}}


def assemble(model, added, normalizer=None, pre_tokenizer=None, decoder=None, start=None):
    """start: (token, id) that goes in front of a text."""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": start_template(*start) if start else None, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **model}}


def byte_level(vocab, merges, added, words="gpt2", start=None):
    """words: how text is cut: gpt2, smollm (digits one by one, then as gpt2), llama3, olmo2 (as llama3, but the merges
    decide), qwen2 (with NFC), tekken, or llamacpp-default."""
    def split(pattern):
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    def level(use_regex):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}

    steps = {
        "gpt2": [level(True)],
        "smollm": [{"type": "Digits", "individual_digits": True}, level(True)],
        "llama3": [split(LLAMA3_WORDS), level(False)],
        "olmo2": [split(LLAMA3_WORDS), level(False)],
        "qwen2": [split(QWEN2_WORDS), level(False)],
        "tekken": [split(TEKKEN_WORDS), level(False)],
        "llamacpp-default": [*map(split, LLAMACPP_DEFAULT_WORDS), level(False)],
    }[words]
    return assemble({"vocab": vocab, "merges": merges, "ignore_merges": words in ("llama3", "tekken")}, added,
                    normalizer={"type": "NFC"} if words == "qwen2" else None,
                    pre_tokenizer={"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
                    decoder=level(True), start=start)


def sentencepiece(pieces, scores, added, unknown=None, space_in_front=True, start=None, legacy=True):
    """pieces in the order of ids, None for an id without a piece. A pair merges where its text is a piece, the best
    score first; of one piece's pairs the one with the longer left part first. legacy: text behind a special token gets
    a space in front, too."""
    vocab = {piece: i for i, piece in enumerate(pieces) if piece is not None}
    special = {token["content"] for token in added}
    byte_fallback = all(f"<0x{b:02X}>" in vocab for b in range(256))
    merges = []
    for i in sorted(range(len(pieces)), key=lambda i: -scores[i]):  # stable: equal scores in the order of ids
        piece = pieces[i]
        if piece is None or piece in special or (len(piece) == 6 and piece.startswith("<0x")):
            continue
        merges += [[piece[:cut], piece[cut:]] for cut in range(len(piece) - 1, 0, -1) if piece[:cut] in vocab and piece[cut:] in vocab]
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}] * space_in_front + [mark]
    decoders = [{"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}] + [{"type": "ByteFallback"}] * byte_fallback
    decoders += [{"type": "Fuse"}] + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * space_in_front
    model = {"vocab": vocab, "merges": merges, "unk_token": unknown, "fuse_unk": unknown is not None, "byte_fallback": byte_fallback}
    words = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    if not legacy:
        words = {"pre_tokenizer": {"type": "Metaspace", "replacement": SPACE_MARK, "split": False,
                                   "prepend_scheme": "first" if space_in_front else "never"}}
    return assemble(model, added, **words, decoder={"type": "Sequence", "decoders": decoders}, start=start)


def merges_of_ranks(tokens):
    """The merges behind tiktoken's tokens, which are bytes in the order of ranks: the last step of merging a token's bytes
    by the merges before it."""
    rank = {token: i for i, token in enumerate(tokens)}
    alphabet = byte_alphabet()
    written = lambda token: "".join(alphabet[b] for b in token)
    merges = []
    for limit, token in enumerate(tokens):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], limit))
            if rank.get(parts[best] + parts[best + 1], limit) >= limit:
                raise ValueError(f"token {limit} is not a merge of two earlier tokens")
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append([written(part) for part in parts])
    return {written(token): i for i, token in enumerate(tokens)}, merges


def check_sentencepiece(path):
    """Throws for a setting that would give other ids. Returns whether a space is put in front of a text."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        with open(path, "rb") as file:
            model.ParseFromString(file.read())
    except DecodeError:
        raise TokenizerError(f"{path}: not a SentencePiece model") from None
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    kinds = {number: name for name, number in trainer.ModelType.items()}
    defined = [piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED]
    for found, setting in ((trainer.model_type != trainer.BPE, f"model_type {kinds[trainer.model_type].lower()}"),
                           (normalizer.precompiled_charsmap, f"normalization {normalizer.name}"),
                           (normalizer.remove_extra_whitespaces, "remove_extra_whitespaces true"),
                           (not normalizer.escape_whitespaces, "escape_whitespaces false"),
                           (trainer.treat_whitespace_as_suffix, "treat_whitespace_as_suffix true"),
                           (model.denormalizer_spec.precompiled_charsmap, "a denormalizer"),
                           (defined, f"user-defined symbols ({', '.join(defined[:3])})")):
        if found:
            raise TokenizerError(f"{path}: SentencePiece with {setting} is not supported; use the model's "
                                 "tokenizer.json")
    return normalizer.add_dummy_prefix


def sentencepiece_model(path, settings=None):
    """From SentencePiece's own tokenizer.model, through its package. settings: of tokenizer_config.json."""
    import sentencepiece as spm

    settings = settings or {}
    space_in_front = check_sentencepiece(path) and settings.get("add_prefix_space", True)
    model = spm.SentencePieceProcessor(model_file=path)
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    scores = [model.get_score(i) for i in range(len(pieces))]
    added = [added_token(i, piece) for i, piece in enumerate(pieces) if model.is_control(i) or model.is_unknown(i)]
    bos = model.bos_id() if settings.get("add_bos_token", True) else -1
    unknown = pieces[model.unk_id()] if model.unk_id() >= 0 else None
    tokenizer = sentencepiece(pieces, scores, added, unknown, space_in_front,
                              start=(pieces[bos], bos) if bos >= 0 else None, legacy=settings.get("legacy", True))
    return tokenizer, {"bos_token": pieces[model.bos_id()] if model.bos_id() >= 0 else None,
                       "eos_token": pieces[model.eos_id()] if model.eos_id() >= 0 else None, "unk_token": unknown}


def tiktoken_model(path, special):
    """From tiktoken's file of LLaMA-3: a line `base64 rank` a token. special: the tokens behind them."""
    import base64

    try:
        with open(path, "rb") as file:
            ranked = sorted((int(rank), base64.b64decode(token)) for token, rank in (line.split() for line in file if line.strip()))
        if [rank for rank, _ in ranked] != list(range(len(ranked))):
            raise ValueError("ranks are not 0, 1, 2 ...")
        vocab, merges = merges_of_ranks([token for _, token in ranked])
    except ValueError as error:
        raise TokenizerError(f"{path}: not a tiktoken vocabulary ({error}); the file is damaged") from None
    added = [added_token(len(vocab) + i, token) for i, token in enumerate(special)]
    return byte_level(vocab, merges, added, "llama3", start=(special[0], len(vocab)))
