"""What Python tests of the driver (TRAIN_GPT) share: they start its commands, make data for it, train small models with
it, and read what a run wrote."""
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT") or os.path.join(ROOT, "train_gpt"))
SHIM = os.path.join(os.path.dirname(os.path.realpath(DRIVER)), "dev", "crash_shim.so")
MODEL = ["--model", "gpt2-tiny", "--layers", "2", "--channels", "32", "--heads", "2", "--max-positions", "64"]

CACHE = tempfile.TemporaryDirectory(prefix="train_gpt_cache_")  # not the user's
ENVIRONMENT = {**os.environ, "XDG_CACHE_HOME": CACHE.name}


def run(*args, driver=DRIVER, env=None, cwd=None, timeout=120, preexec_fn=None):
    """A command, once it has ended; env is added to the environment. Under sanitizers it may take three times as long."""
    return subprocess.run([driver, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, cwd=cwd,
                          env={**ENVIRONMENT, **(env or {})}, timeout=timeout * (3 if sanitized() else 1),
                          preexec_fn=preexec_fn, text=True, errors="replace")


def cuda():
    return "backend cuda" in run("info").stdout


def sanitized():
    return os.path.basename(os.path.dirname(DRIVER)).endswith(("-address", "-undefined"))


def text_of(path):
    with open(path) as file:
        return file.read()


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def digests(checkpoint):
    return {name: digest(os.path.join(checkpoint, name))
            for name in ("model.safetensors", "state.safetensors", "trainer.json")}


def tensor_bytes(path):
    """The tensors of a safetensors file as bytes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    return {name: data[slice(*tensor["data_offsets"])] for name, tensor in header.items() if name != "__metadata__"}


def log(run_dir):
    with open(os.path.join(run_dir, "log.jsonl")) as file:
        return [json.loads(line) for line in file]


def losses(run_dir):
    return {line["step"]: line["loss"] for line in log(run_dir) if "loss" in line}


def checkpoints(run_dir):
    return sorted(name for name in os.listdir(run_dir) if name.startswith("step_"))


def tokenize(source, data, *options, tokenizer="byte"):
    """Makes a data directory of a file or a directory of text. Returns it."""
    command = [sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", source, "--out", data]
    subprocess.run([*command, "--tokenizer", tokenizer, *options], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    return data


def sentence(i, j):
    """Of a small grammar that a model can learn."""
    animal, colour = ("cat", "dog", "owl")[(i + j) % 3], ("red", "blue")[j % 2]
    return f"The {animal} sees {(i * 7 + j) % 10} of the {colour} stones.\n"


def make_data(top):
    """Tokenizes documents of such sentences. Returns the data directory."""
    text = os.path.join(top, "text")
    os.mkdir(text)
    for i in range(40):
        with open(os.path.join(text, f"{i:02}.txt"), "w") as file:
            file.writelines(sentence(i, j) for j in range(12))
    return tokenize(text, os.path.join(top, "data"), "--val", "0.1")


def write_tokens(data, tokens, mask=None, mask_version=1, split="train"):
    """Makes a split of a data directory of 16-bit tokens. mask: of each whether it is a loss token, or its flags."""
    os.makedirs(data, exist_ok=True)

    def header(magic, version):
        return struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    with open(os.path.join(data, split + "_000000.bin"), "wb") as file:
        file.write(header(20240520, 1) + struct.pack(f"<{len(tokens)}H", *tokens))
    if mask:
        with open(os.path.join(data, split + "_000000.mask"), "wb") as file:
            file.write(header(20261121, mask_version) + bytes(map(int, mask)))
    return data


class CommandsTest(unittest.TestCase):
    """Tests of commands with files in the directory top."""

    def refused(self, status, words, *args):
        """Expects a command to end with one line, which has these words, and to make no file."""
        before = sorted(os.listdir(self.top))
        done = run(*args)
        self.assertEqual(done.returncode, status, (args, done.stderr))
        self.assertEqual(done.stderr.count("\n"), 1, (args, done.stderr))
        self.assertEqual(done.stdout, "", args)
        self.assertNotIn("json.exception", done.stderr, args)
        for word in words:
            self.assertIn(word, done.stderr, args)
        self.assertEqual(sorted(os.listdir(self.top)), before, args)


class TrainingTest(CommandsTest):
    """Trains small models on data that the tests of a class share."""

    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        cls.addClassCleanup(shutil.rmtree, cls.top)
        cls.data = make_data(cls.top)

    @classmethod
    def train_args(cls, name, *args):
        # Later options win, so that a test can change any of these.
        given = {args[i]: None for i in range(len(args))}
        defaults = ["--batch-size", 4, "--seq-len", 32, "--lr", 3e-3, "--warmup", 2, "--eval-every", 4,
                    "--dtype", "fp32"]
        kept = [x for k, v in zip(defaults[::2], defaults[1::2]) if k not in given for x in (k, v)]
        model = [] if "--model" in given else MODEL
        data = [] if "--data" in given else ["--data", cls.data]
        return ["train", *model, *data, "--out", os.path.join(cls.top, name), *kept, *args]

    @classmethod
    def train(cls, name, *args):
        """The directory of such a run."""
        done = run(*cls.train_args(name, *args))
        if done.returncode:
            raise AssertionError(f"training {name} failed: {done.stderr}")
        return os.path.join(cls.top, name)

    @staticmethod
    def with_another_tokenizer(data):
        """A copy of a data directory: a tokenizer.json of other bytes is another tokenizer."""
        copy = data + "_of_another_tokenizer"
        shutil.copytree(data, copy)
        with open(os.path.join(copy, "tokenizer.json"), "a") as file:
            file.write("\n")
        return copy

    @staticmethod
    def with_another_name(data):
        copy = data + "_of_another_name"
        shutil.copytree(data, copy)
        return copy

    def repeats_after_resume(self, run_dir, end):
        """Without its last checkpoint the run resumes from the one before, to the same losses and files. Returns its
        stderr."""
        expected, expected_losses = digests(end), losses(run_dir)
        shutil.rmtree(end)
        done = run("train", "--out", run_dir, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(run_dir), expected_losses)
        self.assertEqual(digests(end), expected)
        return done.stderr


class BaseRunTest(TrainingTest):
    """Compares with a run of 8 steps, with checkpoints at 4 and 8."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.base = cls.train("base", "--steps", 8, "--save-every", 4)

    def copy_with_checkpoint(self, name, step):
        """The base run as it was after its checkpoint of that step."""
        target = os.path.join(self.top, name)
        shutil.copytree(self.base, target)
        for other in checkpoints(target):
            if other != f"step_{step:08}":
                shutil.rmtree(os.path.join(target, other))
        return target
