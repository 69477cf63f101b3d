"""Walks through the header of a GGUF file, before a package does that believes every count in it.

A header is: "GGUF", version, number of tensors, number of keys; each key's name, type and value; each tensor's name,
sizes, type and offset. A count that the file is too short for is an error at once.
"""
import os
import struct

from hf_directory import ModelError

SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type
UINT32, STRING, ARRAY = 4, 8, 9
MAX_DIMENSIONS = 4


class Header:
    def __init__(self, path, file):
        self.path, self.file, self.left = path, file, os.fstat(file.fileno()).st_size

    def wrong(self, what):
        return ModelError(f"{self.path}: {what}; the file is damaged or incomplete")

    def expect(self, count, size, what):
        if count * size > self.left:
            raise self.wrong(f"{what} takes {count * size} bytes or more, and the file has {self.left} left")

    def take(self, size, what):
        self.expect(1, size, what)
        self.left -= size
        return self.file.read(size)

    def number(self, form, what):
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what):
        return self.take(self.number("<Q", what), what)

    def skip(self, count, size, what):
        self.expect(count, size, what)
        self.left -= count * size
        self.file.seek(count * size, os.SEEK_CUR)

    def value(self, kind, what):
        """Returns a number of type uint32, and nothing else."""
        if kind == UINT32:
            return self.number("<I", what)
        if kind in SCALARS:
            self.skip(1, SCALARS[kind], what)
        elif kind == STRING:
            self.text(what)
        elif kind == ARRAY:
            self.array(what)
        else:
            raise self.wrong(f"{what} has the unknown type {kind}")
        return None

    def array(self, what):
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind in SCALARS:
            self.skip(count, SCALARS[kind], what)
        elif kind == STRING:
            self.expect(count, 8, what)
            for _ in range(count):
                self.text(what)
        else:
            raise self.wrong(f"{what} is a list of type {kind}")

    def key(self, names):
        name = self.text("the name of a key").decode("utf-8", "backslashreplace")
        what = f"key {name!r}"
        if name in names:
            raise self.wrong(f"{what} occurs twice")
        names.add(name)
        value = self.value(self.number("<I", what), what)
        if name == "general.alignment" and (not value or value & (value - 1)):
            raise self.wrong(f"{what} is {value}, not a power of two")

    def tensor(self):
        what = f"tensor {self.text('the name of a tensor').decode('utf-8', 'backslashreplace')!r}"
        dimensions = self.number("<I", what)
        if dimensions > MAX_DIMENSIONS:
            raise self.wrong(f"{what} has {dimensions} dimensions, more than {MAX_DIMENSIONS}")
        elements = 1
        for _ in range(dimensions):
            elements *= self.number("<Q", what)
        if elements >= 1 << 63:
            raise self.wrong(f"{what} has {elements} elements")
        self.skip(1, 12, what)  # type and offset


def check(path):
    with open(path, "rb") as file:
        header = Header(path, file)
        if header.take(4, "the magic number") != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file: it does not start with GGUF")
        version = header.number("<I", "the version")
        if version & 0xFFFF == 0:
            command = f"gguf-convert-endian {os.path.basename(path)} little"
            raise ModelError(f"{path}: is big-endian; convert it with `{command}`")
        if version not in (2, 3):
            raise ModelError(f"{path}: is GGUF version {version}; supported: 2, 3")
        tensors, keys = header.number("<Q", "the number of tensors"), header.number("<Q", "the number of keys")
        header.expect(keys, 13, f"a header with {keys} keys")
        names = set()
        for _ in range(keys):
            header.key(names)
        header.expect(tensors, 24, f"a header with {tensors} tensors")
        for _ in range(tensors):
            header.tensor()
