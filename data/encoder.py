"""Documents to tokens, by the project's own tokenizer and chat templates: bindings of libtrain_gpt_data.so
(data/data_library.h), which `make data` and `make lib` build.

A document is a text, or a conversation as JSON (Conversation.encoded() of conversations.py), which may be the rejected
side of a preference pair. The library is the one
that TRAIN_GPT_DATA_LIB names, else build/cuda/… or build/cpu/libtrain_gpt_data.so in the directory of this project.
"""
import ctypes
import os
from array import array

LIBRARY, VARIABLE = "libtrain_gpt_data.so", "TRAIN_GPT_DATA_LIB"
TEXT_PART, TEXT, CONVERSATION, REJECTED = range(4)  # data_library.h
LOSS, EXAMPLE_START = 1, 2  # bits of a token's flags


class EncoderError(Exception):
    """document: the number of the document that cannot be encoded, None if none of them can."""

    def __init__(self, message, document=None):
        super().__init__(message)
        self.document = document


def library_path():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    candidates = [os.path.join(root, "build", backend, LIBRARY) for backend in ("cuda", "cpu")]
    candidates = [os.environ[VARIABLE]] if VARIABLE in os.environ else candidates
    for path in candidates:
        if os.path.exists(path):
            return path
    raise EncoderError(f"{candidates[-1]} is missing: run `make lib` to build it")


def load_library():
    try:
        library = ctypes.CDLL(library_path())
    except OSError as e:
        raise EncoderError(f"{e}; run `make lib` to build it again") from None
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
            ("tgd_open", pointer, ctypes.c_char_p, ctypes.c_char_p, i64), ("tgd_close", None, pointer),
            ("tgd_error", ctypes.c_char_p), ("tgd_vocab_size", i64, pointer),
            ("tgd_end_of_text", ctypes.c_int32, pointer), ("tgd_has_chat_template", ctypes.c_int, pointer),
            ("tgd_end_of_turn", ctypes.c_int32, pointer),
            ("tgd_copy", ctypes.c_int, pointer, ctypes.c_int, pointer, pointer),
            ("tgd_encode", ctypes.c_int, pointer, pointer, pointer, pointer, i64, pointer, pointer,
             ctypes.POINTER(i64))):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Encoder:
    """A tokenizer.json, and the chat template of a model directory if it has one. unix_time: the date that the template
    may write."""

    def __init__(self, tokenizer_json, model_directory=None, unix_time=0):
        self.library = load_library()
        directory = os.fsencode(model_directory) if model_directory else None
        self.handle = self.library.tgd_open(os.fsencode(tokenizer_json), directory, unix_time)
        if not self.handle:
            raise EncoderError(self.error())
        self.vocab_size = self.library.tgd_vocab_size(self.handle)
        self.end_of_text = self.library.tgd_end_of_text(self.handle)
        self.has_chat_template = bool(self.library.tgd_has_chat_template(self.handle))
        self.end_of_turn = self.library.tgd_end_of_turn(self.handle)
        self.width = 2 if self.vocab_size < 65536 else 4  # bytes of a token

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.tgd_close(self.handle)

    def error(self):
        return self.library.tgd_error().decode("utf-8", "replace")

    def encode(self, documents):
        """documents: (bytes, TEXT_PART, TEXT, CONVERSATION or REJECTED) each. End-of-text follows a TEXT, the last part
        of a text. Returns (tokens and flags as bytes, the number of tokens of each document, and how many of its bytes
        the vocabulary lacks)."""
        kinds = bytes(kind for _, kind in documents)
        sizes, data = array("q", (len(content) for content, _ in documents)), b"".join(c for c, _ in documents)
        tokens, lost = (array("q", bytes(8 * len(documents))) for _ in range(2))
        failed = ctypes.c_int64()
        if self.library.tgd_encode(self.handle, data, address(sizes), kinds, len(documents), address(tokens),
                                   address(lost), ctypes.byref(failed)):
            raise EncoderError(self.error(), failed.value)
        count = sum(tokens)
        ids, flags = bytearray(count * self.width), bytearray(count)
        if self.library.tgd_copy(self.handle, self.width, address(ids), address(flags)):
            raise EncoderError(self.error())
        return ids, flags, tokens, lost


def address(numbers):
    """The memory of an array or a bytearray; it must outlive the call."""
    return ctypes.byref(ctypes.c_char.from_buffer(numbers)) if len(numbers) else None
