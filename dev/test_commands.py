#!/usr/bin/env python3
"""End-to-end tests of the commands: real data, real files, the driver as users start it (TRAIN_GPT names it)."""
import hashlib
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "train_gpt")))
SHIM = os.path.join(os.path.dirname(DRIVER), "dev", "crash_shim.so")
CHAT_TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
MODEL = ["--model", "gpt2-tiny", "--layers", "2", "--channels", "32", "--heads", "2", "--max-positions", "64"]


CACHE = tempfile.TemporaryDirectory(prefix="train_gpt_cache_")  # not the user's


def run(*args, env=None, timeout=120):
    return subprocess.run([DRIVER, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**os.environ, "XDG_CACHE_HOME": CACHE.name, **(env or {})}, timeout=timeout, text=True, errors="replace")


def cuda():
    return "backend cuda" in run("info").stdout


def sanitized():
    return os.path.basename(os.path.dirname(DRIVER)).endswith(("-address", "-undefined"))


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def digests(checkpoint):
    return {name: digest(os.path.join(checkpoint, name)) for name in ("model.safetensors", "state.safetensors", "trainer.json")}


def text_of(path):
    with open(path) as file:
        return file.read()


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


def make_data(top):
    """Tokenizes documents of a small grammar that a model can learn. Returns the data directory."""
    text, data = os.path.join(top, "text"), os.path.join(top, "data")
    os.mkdir(text)
    for i in range(40):
        with open(os.path.join(text, f"{i:02}.txt"), "w") as file:
            for j in range(12):
                file.write(f"The {('cat', 'dog', 'owl')[(i + j) % 3]} sees {(i * 7 + j) % 10} of the {('red', 'blue')[j % 2]} stones.\n")
    subprocess.run([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", text, "--tokenizer", "byte", "--val", "0.1",
                    "--out", data], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return data


class CommandsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        cls.data = make_data(cls.top)
        cls.other_data = os.path.join(cls.top, "other_data")  # a tokenizer.json of other bytes is another tokenizer
        shutil.copytree(cls.data, cls.other_data)
        with open(os.path.join(cls.other_data, "tokenizer.json"), "a") as file:
            file.write("\n")
        # The run that others are compared with: 8 steps, checkpoints at 4 and 8.
        cls.base = cls.train("base", "--steps", 8, "--save-every", 4)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    @classmethod
    def train_args(cls, name, *args):
        # Later options win, so that a test can change any of these.
        given = {args[i]: None for i in range(len(args))}
        defaults = ["--batch-size", 4, "--seq-len", 32, "--lr", 3e-3, "--warmup", 2, "--eval-every", 4, "--dtype", "fp32"]
        kept = [x for k, v in zip(defaults[::2], defaults[1::2]) if k not in given for x in (k, v)]
        model = [] if "--model" in given else MODEL
        data = [] if "--data" in given else ["--data", cls.data]
        return ["train", *model, *data, "--out", os.path.join(cls.top, name), *kept, *args]

    @classmethod
    def train(cls, name, *args, env=None):
        done = run(*cls.train_args(name, *args), env=env)
        if done.returncode:
            raise AssertionError(f"training {name} failed: {done.stderr}")
        return os.path.join(cls.top, name)

    def copy_with_checkpoint(self, name, step):
        """The base run as it was after its checkpoint of that step."""
        target = os.path.join(self.top, name)
        shutil.copytree(self.base, target)
        for other in checkpoints(target):
            if other != f"step_{step:08}":
                shutil.rmtree(os.path.join(target, other))
        return target

    # ---- the main job --------------------------------------------------------------------------------------------------

    def test_run_directory(self):
        self.assertEqual(checkpoints(self.base), ["step_00000004", "step_00000008"])
        lines = log(self.base)
        steps = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in steps], list(range(1, 9)))
        self.assertEqual(set(steps[0]), {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "memory"})
        evals = [line for line in lines if "val_loss" in line]
        self.assertEqual([line["step"] for line in evals], [4, 8])
        self.assertEqual(set(evals[0]), {"step", "val_loss", "bits_per_byte"})
        self.assertLess(steps[-1]["loss"], steps[0]["loss"])
        self.assertAlmostEqual(steps[0]["loss"], math.log(257), delta=0.2)  # an untrained model predicts a uniform distribution
        self.assertAlmostEqual(steps[0]["lr"], 1.5e-3, delta=1e-8)          # halfway through the warmup
        self.assertAlmostEqual(steps[-1]["lr"], 3e-4, delta=1e-8)           # a tenth, at the last step of the cosine

    def test_eval(self):
        result = json.loads(run("eval", "--model", self.base, "--data", self.data, "--json").stdout)
        with open(os.path.join(self.data, "meta.json")) as file:
            meta = json.load(file)
        self.assertEqual(result["tokens"], meta["val"]["tokens"])
        self.assertEqual(result["bytes"], meta["val"]["bytes"])
        self.assertAlmostEqual(result["perplexity"], math.exp(result["val_loss"]), places=6)
        self.assertAlmostEqual(result["bits_per_byte"], result["val_loss"] * result["tokens"] / math.log(2) / result["bytes"], places=9)
        logged = [line["val_loss"] for line in log(self.base) if "val_loss" in line][-1]
        self.assertAlmostEqual(result["val_loss"], logged, places=5)
        plain = run("eval", "--model", self.base, "--data", self.data, "--batch-size", 3).stdout.split()
        self.assertEqual(plain[::2], ["tokens", "bytes", "val_loss", "perplexity", "bits_per_byte"])
        self.assertAlmostEqual(float(plain[5]), result["val_loss"], places=5)

    def test_commands_of_one_process_refuse_a_launcher(self):
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": "29500"}
        for command in ("eval", "sample", "chat", "logits", "convert"):
            with self.subTest(command):
                done = run(command, env=ranks)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertEqual(done.stderr, f"train_gpt: {command}: torchrun started 2 processes, but only train divides its "
                                 "work among processes; start one process of this command\n")
        self.assertEqual(run("info", env=ranks).returncode, 0)

    def test_sample(self):
        args = ["sample", "--model", self.base, "--prompt", "The ", "--max-tokens", 20, "--ignore-eos", "--num-samples", 2]
        first, again, other = run(*args), run(*args), run(*args, "--seed", 7)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(first.stdout, again.stdout)
        self.assertNotEqual(first.stdout, other.stdout)
        texts = first.stdout.split("\n---\n")
        self.assertEqual(len(texts), 2)
        self.assertNotEqual(texts[0], texts[1].rstrip("\n"))
        self.assertTrue(all(text.startswith("The ") for text in texts))
        greedy = json.loads(run(*args[:-2], "--temperature", 0, "--json").stdout)["samples"][0]
        self.assertEqual(len(greedy["tokens"]), 20)
        self.assertEqual(greedy["finish"], "length")
        stop = greedy["text"][5:7]
        stopped = json.loads(run(*args[:-2], "--temperature", 0, "--json", "--stop", stop).stdout)["samples"][0]
        self.assertEqual(stopped["text"], greedy["text"][:greedy["text"].index(stop)])
        self.assertEqual(stopped["finish"], "stop")
        beyond = run("sample", "--model", self.base, "--max-tokens", 80, "--ignore-eos")  # past the position table: slides
        self.assertEqual(beyond.returncode, 0, beyond.stderr)

    def test_sample_a_batch(self):
        """Prompts of a file run as a batch and give the same completions as each alone."""
        prompts = ["The ", "It was a", "x", "And then he"]
        path = os.path.join(self.top, "prompts.txt")
        with open(path, "w") as file:
            file.write("\n---\n".join(prompts) + "\n")
        args = ["sample", "--model", self.base, "--max-tokens", 12, "--ignore-eos", "--temperature", 0]
        together = run(*args, "--prompt-file", path).stdout
        alone = "---\n".join(run(*args, "--prompt", prompt).stdout for prompt in prompts)
        self.assertEqual(together, alone)
        two_at_a_time = run(*args, "--prompt-file", path, "--batch-size", 2)
        self.assertEqual(two_at_a_time.stdout, alone)
        self.assertIn("tokens/s", two_at_a_time.stderr)

    def test_sample_filters(self):
        args = ["sample", "--model", self.base, "--prompt", "The ", "--max-tokens", 16, "--ignore-eos"]
        greedy = run(*args, "--temperature", 0).stdout
        for one in (["--top-k", 1], ["--top-p", "0.000001"], ["--min-p", 1]):
            self.assertEqual(run(*args, *one).stdout, greedy, one)
        self.assertNotEqual(run(*args, "--temperature", 0, "--repeat-penalty", 50).stdout, greedy)
        sample = json.loads(run(*args, "--top-p", "0.9", "--logprobs", "--json").stdout)["samples"][0]
        self.assertEqual(len(sample["logprobs"]), 16)
        self.assertTrue(all(p < 0 for p in sample["logprobs"]))
        lines = run(*args, "--logprobs", "--temperature", 0).stdout.splitlines()
        self.assertEqual(len(lines[-1].split(" ", 2)), 3)
        stopped = json.loads(run(*args, "--context", 8, "--context-full", "stop", "--json").stdout)["samples"][0]
        self.assertEqual((stopped["finish"], len(stopped["tokens"])), ("context", 5))
        slid = json.loads(run(*args, "--context", 8, "--keep-tokens", 2, "--json").stdout)["samples"][0]
        self.assertEqual((slid["finish"], len(slid["tokens"])), ("length", 16))

    def test_chat(self):
        """A conversation with an untrained model: each user turn gets a response, also after /reset."""
        # Practically the initial weights, so that no GEMM's rounding decides whether a response ends by itself.
        model = self.train("chat", "--steps", 1, "--vocab-size", 300, "--dtype", "fp32", "--lr", "1e-20")
        model = os.path.join(model, checkpoints(model)[-1])
        refused = run("chat", "--model", model)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("no chat template", refused.stderr)
        path = os.path.join(model, "tokenizer.json")
        with open(path) as file:
            tokenizer = json.load(file)
        for number, mark in enumerate(("<|im_start|>", "<|im_end|>")):
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 257 + number, "content": mark})
        with open(path, "w") as file:
            json.dump(tokenizer, file)
        with open(os.path.join(model, "tokenizer_config.json"), "w") as file:
            json.dump({"chat_template": CHAT_TEMPLATE}, file)

        def chat(text, *args, context=60):
            return subprocess.run([DRIVER, "chat", "--model", model, "--dtype", "fp32", "--max-tokens", "6",
                                   "--temperature", "0", "--context", str(context), *args],
                                  input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=120)

        first = chat("Hi\n")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(chat("Hi\r\n/exit\r\nnever read\r\n").stdout, first.stdout[:-1])
        small = chat("Hi\n", context=7)
        self.assertEqual((small.returncode, small.stdout), (1, ""))
        self.assertIn("a context of 7 tokens has no room for the 6 that start every conversation; raise --context to at least 8",
                      small.stderr)
        self.assertIn("tokenizer_config.json: chat_template", first.stderr)
        self.assertIn("completion: 5 tokens", first.stderr)
        twice = chat("Hi\n/reset\n\nHi\n/exit\nnever read\n")
        responses = twice.stdout.split("> ")
        self.assertEqual(len(responses), 6, twice.stdout)
        self.assertEqual(responses[1], responses[4])  # after /reset the same user turn has the same response
        self.assertEqual(chat("Hi\n" * 12).returncode, 0)  # drops old turns

        # The cache keeps what the conversation begins with: of the second prompt only the last token of the response
        # and what follows it are computed. A GPU decodes a step ahead, so there only what follows it is computed. A
        # template that rewrites earlier responses cuts the cache back to the first.
        def prompt_tokens(text, *args):
            result = chat(text, *args)
            self.assertEqual(result.returncode, 0, result.stderr)
            return int(re.search(r"prompt: (\d+) tokens", result.stderr).group(1)), result

        def write_template(source):
            with open(os.path.join(model, "chat_template.jinja"), "w") as file:
                file.write(source)

        turn = len("_user\nHi_\n_assistant\n")
        left = len("_\n" if cuda() else "x_\n")
        self.assertEqual(prompt_tokens("Hi\n")[0], turn)
        self.assertEqual(prompt_tokens("Hi\nHi\n")[0], turn + left + turn)
        write_template(CHAT_TEMPLATE.replace("m.content +", "('X' if m.role == 'assistant' else m.content) +"))
        self.assertEqual(prompt_tokens("Hi\nHi\n")[0], turn + len("X_\n") + turn)
        write_template(CHAT_TEMPLATE.replace("for m in messages", "for m in messages[-1:]"))
        self.assertEqual(prompt_tokens("Hi\nHi\n")[0], turn + 1)
        # Special tokens that are typed stay text; a system message, and a template that refuses it or a turn.
        write_template(CHAT_TEMPLATE)
        typed = prompt_tokens("<|im_end|>\n")[0]
        self.assertEqual(typed, turn - len("Hi") + len("<|im_end|>"))
        self.assertEqual(prompt_tokens("Hi\n", "--system", "Be")[0], turn + len("_system\nBe_\n"))
        self.assertEqual(prompt_tokens("Hi\n", "--system", "")[0], turn + len("_system\n_\n"))
        write_template("{% if messages[0].role == 'system' or messages[-1].content == 'no' %}"
                       "{{ raise_exception('Not this') }}{% endif %}" + CHAT_TEMPLATE)
        refused = chat("Hi\n", "--system", "Be")
        self.assertEqual((refused.returncode, refused.stdout), (1, ""))
        self.assertIn("chat_template.jinja refuses the conversation: Not this", refused.stderr)
        tokens, result = prompt_tokens("Hi\nno\nHi\n")
        self.assertIn("refuses the conversation: Not this)", result.stdout)
        self.assertEqual(tokens, turn + left + turn)  # the conversation goes on without the refused turn
        write_template("{{ messages | sort }}")
        unsupported = chat("Hi\n")
        self.assertEqual((unsupported.returncode, unsupported.stdout), (1, ""))
        self.assertIn("chat_template.jinja:1: the filter 'sort' is not supported", unsupported.stderr)
        os.remove(os.path.join(model, "chat_template.jinja"))
        with subprocess.Popen([DRIVER, "chat", "--model", model, "--max-tokens", "1000000", "--temperature", "0"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            process.stdin.write(b"Hi\n")
            process.stdin.flush()
            process.stdout.read(8)
            process.send_signal(signal.SIGINT)  # stops the response; the next line is read
            rest, _ = process.communicate(b"/exit\n", timeout=120)
            self.assertEqual(process.returncode, 0)
            self.assertIn(b"\n> ", rest)
        for character in ("\u0104", "\u00f1"):  # bytes 04 and F1: then the vocabulary lacks them
            del tokenizer["model"]["vocab"][character]
        with open(path, "w") as file:
            json.dump(tokenizer, file)
        text = b"ma\xf1ana\x04"
        missing = subprocess.run([DRIVER, "chat", "--model", model, "--max-tokens", "3"], input=text + b"\nHi\n",
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        self.assertEqual(missing.returncode, 0, missing.stderr)
        self.assertEqual((missing.stdout.count(b"(2 bytes are not in the tokenizer's vocabulary"),
                          missing.stdout.count(b"> ")), (1, 3))
        missing = subprocess.run([DRIVER, "sample", "--model", model, "--max-tokens", "3", "--prompt", text],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        self.assertEqual(missing.returncode, 0, missing.stderr)
        self.assertIn(b"sample: prompt 1: 2 bytes are not in the tokenizer's vocabulary", missing.stderr)
        full = chat("Hi\n" * 4, "--context-full", "stop")
        self.assertIn("the context is full", full.stdout)

    def test_weights_that_are_not_finite(self):
        """They are named wherever they are read; a loss that is not a number is an error."""
        model, copy = os.path.join(self.top, "not_finite"), os.path.join(self.top, "not_finite_copy")
        shutil.copytree(os.path.join(self.base, "step_00000008"), model)
        path = os.path.join(model, "model.safetensors")
        with open(path, "r+b") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(size))
            for name, value in (("h.1.mlp.c_fc.weight", math.inf), ("h.0.ln_1.bias", math.nan)):
                full = next(tensor for tensor in header if tensor.endswith(name))
                file.seek(8 + size + header[full]["data_offsets"][1] - 4)
                file.write(struct.pack("<f", value))
        questions = os.path.join(self.top, "one_question.jsonl")
        with open(questions, "w") as file:
            file.write(json.dumps({"ctx": "The cat", "endings": ["sat", "ran"], "label": 0}) + "\n")
        for status, args in (
            (0, ["logits", "--model", model, "--tokens", "1 2", "--output", os.path.join(self.top, "not_finite.npy")]),
            (0, ["convert", model, copy]),
            (0, ["convert", model, copy + ".bin"]),
            (0, ["convert", copy + ".bin", copy + "2"]),
            (1, ["sample", "--model", model, "--max-tokens", 2]),
            (1, ["eval", "--model", model, "--data", self.data]),
            (1, ["eval", "--model", model, "--multiple-choice", questions]),
            (1, self.train_args("not_finite_run", "--model", model, "--steps", 3, "--max-skips", 2)),
        ):
            done = run(*args)
            self.assertEqual(done.returncode, status, (args, done.stderr))
            self.assertRegex(done.stderr, r"warning: .*: NaN or infinite values in .*h\.0\.ln_1\.bias", args)
            self.assertRegex(done.stderr, r"NaN or infinite values in .*h\.1\.mlp\.c_fc\.weight", args)
            if args[0] == "eval":
                self.assertIn("the loss", done.stderr)
                self.assertEqual(done.stdout, "")
        self.assertNotIn("warning", run("eval", "--model", self.base, "--data", self.data).stderr)

    def test_multiple_choice(self):
        path = os.path.join(self.top, "questions.jsonl")
        questions = [{"ctx": "The cat", "endings": ["sat on the mat", "zzz zzz zzz zz", "qqqqqqqqqqqqqq"], "label": i % 3} for i in range(6)]
        with open(path, "w") as file:
            file.writelines(json.dumps(question) + "\n" for question in questions)
        result = json.loads(run("eval", "--model", self.base, "--multiple-choice", path, "--json").stdout)
        self.assertEqual(result["count"], 6)
        self.assertAlmostEqual(result["accuracy"], 1 / 3)  # the same ending each time, which is right for two of six
        self.assertAlmostEqual(result["accuracy_norm"], 1 / 3)
        small = json.loads(run("eval", "--model", self.base, "--multiple-choice", path, "--json", "--batch-size", 1).stdout)
        self.assertEqual(small, result)
        both = run("eval", "--model", self.base, "--multiple-choice", path, "--data", self.data)
        self.assertEqual(both.returncode, 2)
        # During training: at each evaluation, with the result of the command.
        trained = self.train("questions", "--steps", 8, "--eval-multiple-choice", path)
        lines = [line for line in log(trained) if "accuracy" in line]
        self.assertEqual([(line["step"], "val_loss" in line) for line in lines], [(4, True), (8, True)])
        alone = json.loads(run("eval", "--model", trained, "--multiple-choice", path, "--json").stdout)
        for score in ("accuracy", "accuracy_norm"):
            self.assertEqual(lines[-1][score], alone[score])
        self.assertEqual(losses(trained), losses(self.base))  # questions change nothing
        missing = os.path.join(self.top, "no_questions")
        self.refused(1, ["no_questions: "], *self.train_args("refused", "--eval-multiple-choice", missing))
        with open(path, "a") as file:
            file.write("{}\n")
        broken = run("eval", "--model", self.base, "--multiple-choice", path)
        self.assertEqual((broken.returncode, broken.stderr.count("\n")), (1, 1))
        self.assertIn("line 7", broken.stderr)

    def test_last_words(self):
        """Texts with one ending, against the logits: the tokenizer's tokens are bytes."""
        path = os.path.join(self.top, "last_words.jsonl")
        texts = [("The cat sat on the", "mat"), ("To be or not to", "be"), ("Thou art a", "man")]
        with open(path, "w") as file:
            file.writelines(json.dumps({"ctx": context, "endings": [word]}) + "\n" for context, word in texts)
        result = json.loads(run("eval", "--model", self.base, "--multiple-choice", path, "--json").stdout)
        nats, right = 0, 0
        for context, word in texts:
            ids = list(f"{context} {word}".encode())
            out = os.path.join(self.top, "last_word.npy")
            run("logits", "--model", self.base, "--tokens", " ".join(map(str, ids)), "--output", out)
            logits = np.load(out).reshape(len(ids), -1).astype(float)
            scored = range(len(context), len(ids))
            nats += sum(np.log(np.exp(logits[i - 1]).sum()) - logits[i - 1, ids[i]] for i in scored)
            right += all(logits[i - 1].argmax() == ids[i] for i in scored)
        self.assertEqual(set(result), {"accuracy", "perplexity", "count"})
        self.assertEqual((result["accuracy"], result["count"]), (right / len(texts), len(texts)))
        self.assertAlmostEqual(result["perplexity"] / math.exp(nats / len(texts)), 1, delta=1e-4)
        trained = self.train("last_words", "--eval-multiple-choice", path)
        last = [line for line in log(trained) if "accuracy" in line][-1]
        alone = json.loads(run("eval", "--model", trained, "--multiple-choice", path, "--json").stdout)
        self.assertEqual([last["accuracy"], last["perplexity"]], [alone["accuracy"], alone["perplexity"]])

    def test_random_weights(self):
        done = run("sample", "--model", "gpt2-tiny", "--random-weights", "--max-tokens", 4)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.split()), 4)

    def test_attention_types(self):
        def described(*args):
            done = run("plan", "--model", "gpt2-tiny", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout.split("\n")[0]
        for written, letters in (("linear", "LLLL"), ("G", "GGGG"), ("GGGS", "GGGS"), ("linear,gated_linear,softmax,softmax", "LGSS"), ("SS,linear,G", "SSLG")):
            self.assertIn(f"attention {letters},", described("--attention", written))
        self.assertEqual(described("--attention", "softmax"), described())
        # In a configuration file too.
        path, out = os.path.join(self.top, "attention.toml"), os.path.join(self.top, "attention")
        for written in '"linear,softmax"', '"LS"':
            with open(path, "w") as file:
                file.write(f"attention={written}\n")
            done = run(*self.train_args("attention", "--steps", 1, "--config", path))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn('attention="LS"', text_of(os.path.join(out, "run.toml")))
            shutil.rmtree(out)
        with open(path, "w") as file:
            file.write("atention=\"L\"\n")
        self.refused(2, ["--config: unknown option atention, did you mean attention?"], *self.train_args("attention", "--config", path))

    def test_logits(self):
        out, dump = os.path.join(self.top, "logits.npy"), os.path.join(self.top, "dump")
        done = run("logits", "--model", self.base, "--tokens", "84 104 101", "--output", out, "--dump", dump)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(out, "rb") as file:
            blob = file.read()
        size = struct.unpack("<H", blob[8:10])[0]
        self.assertIn(b"'shape': (3, 257)", blob[:10 + size])
        values = struct.unpack("<771f", blob[10 + size:])
        self.assertTrue(all(math.isfinite(v) for v in values))
        names = set(os.listdir(dump))
        self.assertLessEqual({"layers.0.res1.npy", "layers.1.qkv.npy", "layers.1.act.npy", "normf.npy"}, names)
        greedy = json.loads(run("sample", "--model", self.base, "--prompt", "The", "--temperature", 0, "--max-tokens", 1, "--ignore-eos",
                                "--json").stdout)["samples"][0]["tokens"][0]
        last = values[-257:]
        self.assertEqual(last.index(max(last)), greedy)

    def test_plan_and_info(self):
        plan = json.loads(run("plan", *MODEL, "--batch-size", 4, "--seq-len", 32, "--json").stdout)
        self.assertEqual(plan["total_bytes"], sum(plan["bytes"].values()))
        less = json.loads(run("plan", *MODEL, "--batch-size", 4, "--seq-len", 32, "--recompute", "block", "--json").stdout)
        self.assertLess(less["bytes"]["activations"], plan["bytes"]["activations"])
        generate = json.loads(run("plan", *MODEL, "--batch-size", 4, "--seq-len", 64, "--generate", "--json").stdout)
        self.assertEqual(generate["bytes"]["KV cache"], 2 * 2 * 4 * 64 * 32 * 4)  # k and v, layers, sequences, tokens, channels, bytes
        self.assertEqual(generate["total_bytes"], sum(generate["bytes"].values()))
        plain, verbose = (run("plan", *MODEL, "--seq-len", 32, *args).stdout for args in ([], ["--verbose"]))
        self.assertIn("largest activations", plain)
        self.assertNotIn("phases", plain)
        self.assertRegex(verbose, r"layers\.0\.fc .* phases \d+ to \d+\n")
        self.assertRegex(verbose, r"scalars .* phases 0 to \d+\n")
        big = run("plan", "--model", "llama-8B", "--batch-size", 64, "--seq-len", 8192)  # nothing is allocated
        self.assertEqual(big.returncode, 0, big.stderr)
        build = json.loads(run("info", "--json").stdout)
        self.assertIn(build["backend"], ("cpu", "cuda"))
        self.assertEqual(build.get("gpus", 0) > 0, build["backend"] == "cuda")
        self.assertRegex(build["regex"], r"^PCRE2 10\.\d+, Unicode \d")
        self.assertRegex(build["unicode"], r"^utf8proc \d+\.\d+\.\d+, Unicode \d")
        info = json.loads(run("info", self.base, "--json").stdout)
        self.assertEqual(info["trainer"]["step"], 8)
        self.assertEqual(info["config"]["n_layer"], 2)
        tokens = json.loads(run("info", os.path.join(self.data, "val_000000.bin"), "--json").stdout)
        self.assertLess(tokens["largest_token"], 257)
        only_val = os.path.join(self.top, "val [only]")
        shutil.copytree(self.data, only_val, ignore=shutil.ignore_patterns("train_*"))
        info = json.loads(run("info", only_val, "--json").stdout)
        self.assertEqual((info["kind"], "train" in info, info["val"]["tokens"]), ("data", False, tokens["tokens"]))

    def test_rate_groups(self):
        """A group with a learning rate of 0 keeps its weights; the others change. A resumed run uses the same rates."""
        def tensors(run_dir, step):
            return tensor_bytes(os.path.join(run_dir, f"step_{step:08}", "model.safetensors"))
        args = ["--steps", 4, "--save-every", 2, "--model", "llama-tiny", "--layers", 2, "--channels", 32, "--heads", 2, "--kv-heads", 1,
                "--tied", "no"]
        groups = {"--embedding-lr": "model.embed_tokens.weight", "--head-lr": "lm_head.weight", "--vector-lr": "model.norm.weight"}
        for option, frozen in groups.items():
            run_dir = self.train("frozen" + option, *args, option, 0)
            self.assertIn(f"{option[2:]}=0", text_of(os.path.join(run_dir, "run.toml")))
            before, after = tensors(run_dir, 2), tensors(run_dir, 4)
            for name in (*groups.values(), "model.layers.1.mlp.up_proj.weight"):
                self.assertEqual(before[name] == after[name], name == frozen, f"{option}: {name}")
        shutil.rmtree(os.path.join(run_dir, "step_00000004"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertTrue(tensors(run_dir, 4) == after)
        same = self.train("same_rates", *args[:4], *(x for option in ("--embedding-lr", "--vector-lr") for x in (option, 3e-3)))
        plain = self.train("one_rate", *args[:4])
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000004"))["state.safetensors"] for run_dir in (same, plain)))
        coarse = self.train("large_epsilon", *args[:4], "--adam-eps", 1)  # steps of about the gradient
        self.assertGreater(losses(coarse)[4], losses(plain)[4])

    def test_muon(self):
        """The state has no second moment of Muon's matrices, a resumed run goes on to the same bits, and the loss falls."""
        for name, extra in (("gpt2", []), ("llama", ["--model", "llama-tiny", "--layers", 2, "--channels", 32, "--heads", 2, "--kv-heads", 1]),
                            ("masked", ["--document-mask", "--recompute", "block"])):
            args = ["--steps", 8, "--save-every", 4, "--optimizer", "muon", "--lr", 0.02, "--momentum-warmup", 6, "--muon-coefficients", "quintic", *extra]
            run_dir = self.train("muon_" + name, *args)
            toml, trainer = (text_of(os.path.join(run_dir, file)) for file in ("run.toml", "step_00000008/trainer.json"))
            for line in ('optimizer="muon"', "lr=0.02", "momentum-warmup=6", 'muon-coefficients="quintic"'):
                self.assertIn(line, toml)
            self.assertEqual(json.loads(trainer)["optimizer"], "muon")
            self.assertEqual(json.loads(trainer)["learning_rates"],
                             {"hidden_matrices": 0.02, "embeddings": 0.005, "head": 0.005, "vectors": 0.01})
            self.assertIn("trainer.optimizer muon", run("info", run_dir).stdout)
            state = tensor_bytes(os.path.join(run_dir, "step_00000008", "state.safetensors"))
            hidden = {f"layers.{i}.{matrix}.weight" for i in range(2) for matrix in ("qkv", "proj", "fc", "fcproj")}
            self.assertEqual({name[2:] for name in state if name.startswith("m/")} - hidden,
                             {name[2:] for name in state if name.startswith("v/")})
            self.assertLess(losses(run_dir)[8], losses(run_dir)[1])
            whole = digests(os.path.join(run_dir, "step_00000008"))
            shutil.rmtree(os.path.join(run_dir, "step_00000008"))
            done = run("train", "--resume", "--out", run_dir)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), whole)
        self.refused(1, ["--optimizer was", "muon", "cannot change"], "train", "--resume", "--out", run_dir, "--optimizer", "adamw",
                     "--config", os.path.join(self.base, "run.toml"), "--steps", 9)
        self.refused(1, ["--optimizer was", "adamw", "cannot change"], "train", "--resume", "--out", self.base, "--optimizer", "muon",
                     "--steps", 9)

    def test_runs_from_before_muon_resume_to_the_same_bits(self):
        """Older runs have neither the options nor the keys of rate groups and optimizers."""
        run_dir = self.copy_with_checkpoint("before_muon", 4)
        path = os.path.join(run_dir, "step_00000004", "trainer.json")
        with open(path) as file:
            trainer = json.load(file)
        del trainer["optimizer"], trainer["learning_rates"]
        with open(path, "w") as file:
            json.dump(trainer, file)
        toml = os.path.join(run_dir, "run.toml")
        lines = [line for line in text_of(toml).splitlines() if line.split("=")[0] not in ("optimizer", "adam-eps")]
        with open(toml, "w") as file:
            file.write("\n".join(lines) + "\n")
        done = run("train", "--resume", "--out", run_dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("model.safetensors", "state.safetensors"):
            self.assertEqual(*(digest(os.path.join(at, "step_00000008", name)) for at in (run_dir, self.base)))

    def test_muon_options_have_an_effect(self):
        args = ["--steps", 3, "--optimizer", "muon", "--lr", 0.02]
        runs = {name: losses(self.train("muon_" + name, *args, *extra))[3] for name, extra in (
            ("plain", ()), ("momentum", ("--momentum", 0.5)), ("warmed", ("--momentum-warmup", 3)),
            ("quintic", ("--muon-coefficients", "quintic")), ("two", ("--muon-iterations", 2)), ("rms", ("--muon-scale", "rms")),
            ("decay", ("--weight-decay", 2)), ("adam_decay", ("--adam-weight-decay", 2)))}
        self.assertEqual(len(set(runs.values())), len(runs), runs)
        same = losses(self.train("muon_as_by_default", *args, "--momentum", 0.95, "--momentum-warmup", 0, "--muon-coefficients",
                                 "polar-express", "--muon-iterations", 5, "--muon-scale", "spectral", "--adam-weight-decay", 0.1))
        self.assertEqual(same[3], runs["plain"])
        groups = ("hidden_matrices", "embeddings", "head", "vectors")
        for scale, rates in (("spectral", [0.02, 5e-3, 5e-3, 1e-2]), ("rms", [6e-4] * 4)):
            command = self.train_args("muon_rates_" + scale, *args[:4], "--muon-scale", scale)
            at = command.index("--lr")
            done = run(*command[:at], *command[at + 2:])
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(self.top, "muon_rates_" + scale, "step_00000003", "trainer.json")) as file:
                self.assertEqual(json.load(file)["learning_rates"], dict(zip(groups, rates)))

    def test_optimizer_state_in_bf16(self):
        """Resumed runs repeat the bits of the run that was not stopped; another dtype can be chosen on resume."""
        def state(name, step):
            with open(os.path.join(self.top, name, f"step_{step:08}", "state.safetensors"), "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            return {key: value["dtype"] for key, value in header.items() if key != "__metadata__"}
        weights = json.loads(run("plan", *MODEL, "--seq-len", 32, "--vocab-size", 257, "--dtype", "fp32", "--json").stdout)["bytes"]["weights"]
        for optimizer in ("adamw", "muon"):
            name, args = f"bf16_{optimizer}", ["--optimizer", optimizer, "--optimizer-dtype", "bf16", "--save-every", 4, "--total-batch-tokens", 256]
            whole = self.train(name, "--steps", 8, *args)
            self.assertEqual(set(state(name, 8).values()), {"BF16"})
            self.assertNotEqual(losses(whole), losses(self.train(f"fp32_{optimizer}", "--steps", 8, *args[:2], *args[4:])))
            files = {file: digest(os.path.join(whole, "step_00000008", file)) for file in ("model.safetensors", "state.safetensors")}
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual({file: digest(os.path.join(whole, "step_00000008", file)) for file in files}, files)
            done = run("train", "--resume", "--out", whole, "--steps", 10, "--optimizer-dtype", "fp32")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(set(state(name, 10).values()), {"F32"})
            plans = [json.loads(run("plan", *MODEL, "--seq-len", 32, "--vocab-size", 257, "--optimizer", optimizer, "--optimizer-dtype", dtype, "--json").stdout)["bytes"]
                     ["optimizer (m, v)"] for dtype in ("fp32", "bf16")]
            self.assertEqual(plans[0], 2 * plans[1])
            if optimizer == "adamw":
                self.assertEqual(plans[1], weights)

    def test_gradients_in_bf16(self):
        """Resumed runs repeat the bits of the run that was not stopped: the rounding is keyed by the number of the micro-step."""
        for optimizer in ("adamw", "muon"):
            args = ["--optimizer", optimizer, "--grad-dtype", "bf16", "--save-every", 4, "--total-batch-tokens", 256]
            whole = self.train(f"bf16_gradients_{optimizer}", "--steps", 8, *args)
            exact = self.train(f"fp32_gradients_{optimizer}", "--steps", 8, *args[:2], *args[4:])
            self.assertNotEqual(losses(whole), losses(exact))
            for got, expected in zip(losses(whole), losses(exact)):
                self.assertAlmostEqual(got, expected, delta=1e-2)
            files = {file: digest(os.path.join(whole, "step_00000008", file)) for file in ("model.safetensors", "state.safetensors")}
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual({file: digest(os.path.join(whole, "step_00000008", file)) for file in files}, files)
            done = run("train", "--resume", "--out", whole, "--steps", 10, "--grad-dtype", "fp32")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_gradients_added_in_matmuls(self):
        """They are close to sums in fp32, a resumed run repeats the bits, and what is not possible is refused."""
        args = ["--grad-dtype", "bf16", "--grad-rounding", "nearest", "--save-every", 4, "--total-batch-tokens", 256, *(["--dtype", "bf16"] if cuda() else [])]
        for optimizer in ("adamw", "muon"):
            whole = self.train(f"in_matmuls_{optimizer}", "--steps", 8, "--optimizer", optimizer, *args)
            exact = self.train(f"not_in_matmuls_{optimizer}", "--steps", 8, "--optimizer", optimizer, *args[4:])
            self.assertNotEqual(losses(whole), losses(exact))
            for got, expected in zip(losses(whole), losses(exact)):
                self.assertAlmostEqual(got, expected, delta=1e-2)
            self.assertIn('grad-rounding="nearest"', text_of(os.path.join(whole, "run.toml")))
            before = digests(os.path.join(whole, "step_00000008"))
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(digests(os.path.join(whole, "step_00000008")), before)
        refused = run(*self.train_args("in_matmuls_refused", "--grad-rounding", "nearest"))
        self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1), refused.stderr)
        self.assertIn("--grad-rounding nearest: gradients in fp32 are not rounded; add --grad-dtype bf16", refused.stderr)

    def test_offload(self):
        """Where the state lies changes no bit, neither of a run nor of one that goes on elsewhere."""
        dtype, everything = ("bf16", "optimizer,master,activations") if cuda() else ("fp32", "optimizer,activations")  # the CPU has no master weights
        for optimizer in ("adamw", "muon"):
            args = ["--optimizer", optimizer, "--dtype", dtype, "--save-every", 4, "--total-batch-tokens", 256, "--steps", 8,
                    "--recompute", "block", "--gemm-tune", "off"]  # two runs are compared
            found = [digests(os.path.join(self.train(f"offload_{what}_{optimizer}", *args, "--offload", what), "step_00000008"))
                     for what in ("none", everything)]
            self.assertEqual(*found)
            out = os.path.join(self.top, f"offload_{everything}_{optimizer}")
            for what in (everything, "optimizer", "activations", "none"):
                shutil.rmtree(os.path.join(out, "step_00000008"))
                done = run("train", "--resume", "--out", out, "--offload", what)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(digests(os.path.join(out, "step_00000008")), found[0])
        refused = run(*self.train_args("offload_fp32", "--offload", "master"))
        self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1))
        self.assertIn("--offload master: there are no master weights with --dtype fp32; leave master out", refused.stderr)

    def test_dtype_auto(self):
        chosen = "bf16" if cuda() else "fp32"  # tests run on GPUs from sm_80 on
        out = os.path.join(self.top, "auto")
        command = ["train", *MODEL, "--data", self.data, "--out", out, "--seq-len", 32, "--steps", 2]
        done = run(*command)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stderr.split("\n")[0].endswith(f", {chosen} (--dtype auto)"), done.stderr)
        self.assertIn(f'dtype="{chosen}"', text_of(os.path.join(out, "run.toml")))
        self.assertEqual(run(*command).returncode, 1)  # --out holds a checkpoint
        again = run("train", "--out", out, "--resume", "--steps", 3)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertTrue(again.stderr.split("\n")[0].endswith(f", {chosen}"), again.stderr)  # read from run.toml

    def test_resumed_muon_keeps_its_learning_rates(self):
        """Also those of a run whose run.toml does not name them, because its version had other defaults."""
        run_dir = self.train("rates_of_before", "--optimizer", "muon", "--steps", 2, "--save-every", 1, "--keep", 2)
        def trainer(step):
            return os.path.join(run_dir, f"step_{step:08}", "trainer.json")
        shutil.rmtree(os.path.dirname(trainer(2)))
        with open(trainer(1)) as file:
            stored = json.load(file)
        stored["learning_rates"] = {"hidden_matrices": 0.03, "embeddings": 0.004, "head": 0.005, "vectors": 0.006}
        with open(trainer(1), "w") as file:
            json.dump(stored, file)
        toml = os.path.join(run_dir, "run.toml")
        lines = [line for line in text_of(toml).splitlines() if not line.startswith(("lr=", "embedding-lr=", "vector-lr="))]
        with open(toml, "w") as file:
            file.write("\n".join(lines) + "\n")
        done = run("train", "--resume", "--out", run_dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(trainer(2)) as file:
            self.assertEqual(json.load(file)["learning_rates"], stored["learning_rates"])
        stored["learning_rates"]["head"] = -1
        with open(trainer(2), "w") as file:
            json.dump({**stored, "step": 2, "adam_steps": 2}, file)
        done = run("train", "--resume", "--out", run_dir, "--steps", 3)
        self.assertEqual(done.returncode, 1)
        self.assertIn("learning_rates.head", done.stderr)

    def test_plan_of_muon(self):
        adamw, muon = (json.loads(run("plan", *MODEL, "--seq-len", 32, "--optimizer", name, "--json").stdout) for name in ("adamw", "muon"))
        groups = muon["parameters"]
        self.assertEqual({name: group["optimizer"] for name, group in groups.items()},
                         {"hidden_matrices": "muon", "embeddings": "adamw", "vectors": "adamw"})
        self.assertEqual(sum(group["weights"] for group in groups.values()), muon["weights"])
        saved = adamw["bytes"]["optimizer (m, v)"] - muon["bytes"]["optimizer (m, v)"]
        self.assertGreaterEqual(saved, 4 * groups["hidden_matrices"]["weights"])  # and the padding of groups
        self.assertLess(saved, 4 * groups["hidden_matrices"]["weights"] + 4 * 4096)
        self.assertRegex(run("plan", *MODEL, "--seq-len", 32, "--optimizer", "muon").stdout, r"hidden matrices +24,576 \(muon\)\n  embeddings +\S+ \(adamw\)")

    def test_help_lists_every_option(self):
        overview = run("--help").stdout
        for command in ("train", "eval", "sample", "chat", "logits", "plan", "convert", "info"):
            self.assertIn(command, overview)
            done = run(command, "--help")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        text = run("train", "--help").stdout
        with open(os.path.join(self.base, "run.toml")) as file:
            options = [line.split("=")[0] for line in file if "=" in line]
        self.assertGreater(len(options), 20)
        for option in options:
            self.assertIn("--" + option, text)

    def test_config_file_gives_the_same_run(self):
        other = os.path.join(self.top, "from_config")
        done = run("train", "--config", os.path.join(self.base, "run.toml"), "--out", other)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(digests(os.path.join(other, "step_00000008")), digests(os.path.join(self.base, "step_00000008")))

    # ---- same numbers, another way ---------------------------------------------------------------------------------------

    def test_recompute_is_bitwise_identical(self):
        expected = digests(os.path.join(self.base, "step_00000008"))
        for level in ("activation", "norms", "block"):
            other = self.train("recompute_" + level, "--steps", 8, "--save-every", 4, "--recompute", level)
            self.assertEqual(digests(os.path.join(other, "step_00000008")), expected, level)

    def test_profile(self):
        args = self.train_args("profile", "--steps", 3, "--profile", 2)
        done = run(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        table = done.stderr[done.stderr.index("profile of step 2"):]
        for part in ("forward", "backward", "update", "attention", "norm", "qkv", "fcproj", "head and loss", "total"):
            self.assertRegex(table, rf"\n *{part} +\d+ +\d+\.\d+ +\d+\.\d%")
        plain = self.train("not_profiled", "--steps", 3)
        self.assertEqual(losses(os.path.join(self.top, "profile")), losses(plain))

    def test_gradient_accumulation(self):
        other = self.train("accumulate", "--steps", 8, "--save-every", 4, "--batch-size", 1, "--total-batch-tokens", 128)
        for step, loss in losses(self.base).items():
            self.assertAlmostEqual(losses(other)[step], loss, delta=2e-5)

    def test_document_mask(self):
        args = ["--steps", 2, "--batch-size", 16, "--seq-len", 64]
        masked, plain = self.train("documents", *args, "--document-mask"), self.train("no_documents", *args)
        self.assertTrue(all(math.isfinite(x) for x in losses(masked).values()))
        # Some training sequences contain the end of a document; the next document must not see the previous one.
        self.assertNotEqual(losses(masked)[1], losses(plain)[1])

    def test_nondeterministic_changes_nothing_in_fp32(self):
        args = ["--steps", 3]
        self.assertEqual(losses(self.train("any_order", *args, "--nondeterministic")), losses(self.train("one_order", *args)))
        with open(os.path.join(self.top, "any_order", "run.toml"), encoding="utf-8") as file:
            self.assertIn("nondeterministic=true", file.read())

    def test_schedules(self):
        def rates(schedule):
            run_dir = self.train("schedule_" + schedule, "--steps", 10, "--warmup", 0, "--lr", 1e-3, "--schedule", schedule)
            return [line["lr"] / 1e-3 for line in log(run_dir) if "lr" in line]
        for expected, got in ((lambda p: 1, rates("constant")), (lambda p: 1 - 0.9 * p, rates("linear")),
                              (lambda p: 0.1 + 0.45 * (1 + math.cos(math.pi * p)), rates("cosine")),
                              (lambda p: 1 - 0.9 * max(0, (p - 0.8) / 0.2), rates("wsd"))):
            for i, rate in enumerate(got):
                self.assertAlmostEqual(rate, expected(i / 9), places=5)

    def test_overfits_one_batch(self):
        other = self.train("overfit", "--steps", 150, "--lr", 1e-2, "--overfit-one-batch", "--weight-decay", 0, "--batch-size", 1,
                           "--eval-every", 0)
        self.assertLess(losses(other)[150], 0.01)

    def test_resumed_overfitting_uses_the_same_batch(self):
        whole = self.train("overfit_whole", "--steps", 4, "--save-every", 2, "--schedule", "constant", "--overfit-one-batch")
        other = os.path.join(self.top, "overfit_resumed")
        shutil.copytree(whole, other)
        shutil.rmtree(os.path.join(other, "step_00000004"))
        done = run("train", "--out", other, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(other), losses(whole))

    def test_vocabulary_larger_than_the_tokenizer_s(self):
        # An untrained model mostly samples ids that the tokenizer does not have: they have no text.
        other = self.train("padded", "--steps", 2, "--vocab-size", 8000, "--sample-every", 1)
        done = run("sample", "--model", other, "--max-tokens", 20, "--ignore-eos", "--temperature", 10)
        self.assertEqual(done.returncode, 0, done.stderr)

    # ---- resume ------------------------------------------------------------------------------------------------------------

    def test_resume_is_bit_exact(self):
        other = self.copy_with_checkpoint("resumed", 4)
        done = run("train", "--out", other, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        for step in range(1, 5):
            self.assertNotIn(f"step {step}/8", done.stderr)  # really from the checkpoint
        self.assertEqual(losses(other), losses(self.base))
        self.assertEqual([line["step"] for line in log(other)], [line["step"] for line in log(self.base)])
        self.assertEqual(digests(os.path.join(other, "step_00000008")), digests(os.path.join(self.base, "step_00000008")))

    def make_text_data(self, name, line, files=12):
        """A data directory of another text, with byte tokens."""
        text, data = os.path.join(self.top, name + "_text"), os.path.join(self.top, name)
        os.mkdir(text)
        for i in range(files):
            with open(os.path.join(text, f"{i:02}.txt"), "w") as file:
                file.writelines(line.format(i * 7 + j) for j in range(20))
        subprocess.run([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", text, "--tokenizer", "byte", "--val", "0.2",
                        "--out", data], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return data

    def test_mixed_data(self):
        numbers = self.make_text_data("numbers", "{0} is a number.\n")
        mixed = f"{self.data}:0.75,{numbers}:0.25"
        args = ["--data", mixed, "--steps", 8, "--save-every", 4]
        done = run(*self.train_args("mixed_data", *args))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, rf"{self.data}: 75% of the samples, [\d.]+ epochs: [\d,]+ training tokens in \d+ training seq")
        self.assertRegex(done.stderr, rf"{numbers}: 25% of the samples, ")
        whole = os.path.join(self.top, "mixed_data")
        self.assertIn(f'data="{mixed}"', text_of(os.path.join(whole, "run.toml")))
        last = [line for line in log(whole) if "val_loss" in line][-1]
        self.assertEqual(set(last), {"step", "val_loss", "val"})
        self.assertEqual(set(last["val"]), {self.data, numbers})
        for directory, score in last["val"].items():  # as the command scores each
            alone = json.loads(run("eval", "--model", whole, "--data", directory, "--json").stdout)
            self.assertAlmostEqual(alone["val_loss"], score["val_loss"], places=5)
            self.assertAlmostEqual(alone["bits_per_byte"], score["bits_per_byte"], places=5)
        mean = 0.75 * last["val"][self.data]["val_loss"] + 0.25 * last["val"][numbers]["val_loss"]
        self.assertAlmostEqual(last["val_loss"], mean, places=9)
        # Resumed to the same bits, with the options of run.toml; and in micro-steps of one sequence the same losses.
        expected, expected_losses = digests(os.path.join(whole, "step_00000008")), losses(whole)
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", whole).returncode, 0)
        self.assertEqual((digests(os.path.join(whole, "step_00000008")), losses(whole)), (expected, expected_losses))
        micro = self.train("mixed_micro", *args, "--batch-size", 1, "--total-batch-tokens", 128)
        for step, loss in expected_losses.items():
            self.assertAlmostEqual(losses(micro)[step] / loss, 1, delta=2e-5)
        # Other weights are other data. Weights that mean the same are not.
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        self.refused(1, ["--resume: ", "is not the data that", "by --new-data"], "train", "--resume", "--out", whole,
                     "--data", f"{self.data}:1,{numbers}:1")
        same = run("train", "--resume", "--out", whole, "--data", f"{self.data}:3,{numbers}:1")
        self.assertEqual((same.returncode, losses(whole)), (0, expected_losses), same.stderr)
        for words, data in ((["was made with another tokenizer than"], f"{self.data}:1,{self.other_data}:1"),
                            (["'" + numbers + "' is not a directory with its weight"], f"{self.data}:1,{numbers}")):
            self.refused(2 if "weight" in words[0] else 1, words, *self.train_args("refused", "--data", data))

    def test_new_data(self):
        """A resumed run goes on with other data from its first sample on, and says so."""
        other = self.make_text_data("letters", "letter {0}\n")
        run_dir = self.copy_with_checkpoint("new_data", 4)
        history = lambda step: json.loads(text_of(os.path.join(run_dir, f"step_{step:08}", "trainer.json")))["data_history"]
        self.refused(1, ["is not the data that"], "train", "--resume", "--out", run_dir, "--data", other)
        self.refused(1, ["--new-data: ", "is the data that", "leave the option out"], "train", "--resume", "--out", run_dir,
                     "--new-data", self.data)
        foreign = os.path.join(self.top, "foreign_letters")
        shutil.copytree(other, foreign)
        with open(os.path.join(foreign, "tokenizer.json"), "a") as file:
            file.write("\n")
        self.refused(1, ["was made with another tokenizer"], "train", "--resume", "--out", run_dir, "--new-data", foreign)
        self.refused(2, ["--new-data is for --resume"], *self.train_args("nothing", "--new-data", other))
        self.refused(2, ["--new-data takes the place of --data"], "train", "--resume", "--out", run_dir, "--data", other,
                     "--new-data", other)
        done = run("train", "--resume", "--out", run_dir, "--new-data", other, "--steps", 8, "--save-every", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("with new data", done.stderr)
        self.assertIn(f'data="{other}"', text_of(os.path.join(run_dir, "run.toml")))
        self.assertNotIn("new-data", text_of(os.path.join(run_dir, "run.toml")))
        self.assertEqual([(use["first_step"], use["data"]) for use in history(8)], [(0, self.data), (4, other)])
        self.assertNotEqual(losses(run_dir)[8], losses(self.base)[8])
        # It resumes to the same bits without consent to anything, and a second change is noted, too.
        expected, expected_losses = digests(os.path.join(run_dir, "step_00000008")), losses(run_dir)
        shutil.rmtree(os.path.join(run_dir, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertEqual((digests(os.path.join(run_dir, "step_00000008")), losses(run_dir)), (expected, expected_losses))
        back = run("train", "--resume", "--out", run_dir, "--new-data", self.data, "--steps", 9)
        self.assertEqual(back.returncode, 0, back.stderr)
        self.assertEqual([use["first_step"] for use in history(9)], [0, 4, 8])
        # The steps on new data read what a new run from that checkpoint's weights reads.
        fresh = self.train("fresh_data", "--model", os.path.join(self.base, "step_00000004"), "--data", other, "--steps", 1)
        self.assertEqual(losses(fresh)[1], expected_losses[5])

    def test_resume_is_bit_exact_in_16_bits(self):
        if not cuda():
            self.skipTest("this backend computes in fp32")
        for name, extra in ("bf16", []), ("bf16_off", ["--master-weights", "off"]), ("bf16_block", ["--recompute", "block"]):
            whole = self.train(name, "--steps", 8, "--save-every", 4, "--dtype", "bf16", *extra)
            expected = digests(os.path.join(whole, "step_00000008"))
            expected_losses = losses(whole)
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--out", whole, "--resume")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(losses(whole), expected_losses, name)
            self.assertEqual(digests(os.path.join(whole, "step_00000008")), expected, name)

    def repeats_after_resume(self, run_dir, end):
        """Without its last checkpoint the run resumes from the one before, to the same losses and files. Returns its stderr."""
        expected, expected_losses = digests(end), losses(run_dir)
        shutil.rmtree(end)
        done = run("train", "--out", run_dir, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(run_dir), expected_losses)
        self.assertEqual(digests(end), expected)
        return done.stderr

    # ---- fp8 -----------------------------------------------------------------------------------------------------

    FP8 = ["--matmul-dtype", "fp8"]

    def fp8_unavailable(self):
        done = run(*self.train_args("fp8_probe", "--steps", 1, *self.FP8, *self.fp8_dtype()))
        return "compute capability 8.9" in done.stderr

    @staticmethod
    def fp8_dtype():
        """That operands are quantised from."""
        return ["--dtype", "bf16"] if cuda() else []

    def test_fp8_resumes_to_the_same_bits(self):
        """Before its history of 16 steps is full and after that, with each method of scaling."""
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        plain = self.train("fp8_plain", "--steps", 8, *self.fp8_dtype())
        muon = ["--optimizer", "muon", "--lr", 0.02, "--recompute", "block", "--fp8-weights", "use"]
        last = ["--fp8-skip-first", 1, "--fp8-gradients", "e4m3", "--document-mask"]
        for name, steps, every, extra in (("early", 8, 4, []), ("late", 20, 18, []), ("muon", 8, 4, muon),
                                          ("current", 8, 4, ["--fp8-scaling", "current"]), ("last", 8, 4, last)):
            args = ["--steps", steps, "--save-every", every, *self.FP8, *self.fp8_dtype(), *extra]
            whole = self.train("fp8_" + name, *args)
            end = os.path.join(whole, f"step_{steps:08}")
            with open(os.path.join(end, "trainer.json")) as file:
                history = json.load(file)["fp8"]
            self.assertEqual(history["steps"], 0 if name == "current" else steps)
            self.repeats_after_resume(whole, end)
            self.assertLess(losses(whole)[steps], losses(whole)[1])
            if name == "early":
                self.assertNotEqual(losses(whole)[8], losses(plain)[8])
                self.assertAlmostEqual(losses(whole)[8] / losses(plain)[8], 1, delta=0.02)
            for line in log(whole):
                if "loss" in line:
                    self.assertTrue(0 <= line["fp8_saturated"] < 0.01 and 0 <= line["fp8_underflowed"] < 0.5, line)
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8], ["info"]):
            done = run(*args, whole) if args == ["info"] else run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("trainer.fp8.steps 8\n", done.stdout)
        self.assertNotIn("fp8.history", done.stdout)

    def test_fp8_continues_a_run_of_the_model_s_dtype(self):
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        whole = self.train("fp8_from_model", "--steps", 8, "--save-every", 4, *self.fp8_dtype())
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        before = losses(whole)
        done = run("train", "--out", whole, "--resume", *self.FP8)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([losses(whole)[step] == before[step] for step in range(1, 9)], [True] * 4 + [False] * 4)
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        done = run("train", "--out", whole, "--resume", "--matmul-dtype", "model")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(whole), before)

    def test_damaged_history_of_fp8(self):
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        whole = self.train("fp8_damaged", "--steps", 2, *self.FP8, *self.fp8_dtype())
        path = os.path.join(whole, "step_00000002", "trainer.json")
        with open(path) as file:
            trainer = json.load(file)
        for history, message in ((trainer["fp8"]["history"][1:], "has 255 numbers, expected 256; the file is damaged"),
                                 ([-1.0], "is [-1.0], expected an array of numbers of at least 0")):
            with open(path, "w") as file:
                json.dump({**trainer, "fp8": {"steps": 2, "history": history}}, file)
            self.refused(1, ["key 'fp8.history' " + message], "train", "--out", whole, "--resume", "--steps", 4)

    def test_fp8_is_refused_or_planned(self):
        dtype = self.fp8_dtype()
        model = {"--model": "gpt2-tiny", "--layers": 2, "--channels": 32, "--heads": 2}
        for args, message in (({"--channels": 40}, "--matmul-dtype fp8: --channels is 40, which is not a multiple of 16"),
                              ({"--ffn": 100}, "--matmul-dtype fp8: --ffn is 100, which is not a multiple of 16"),
                              ({"--batch-size": 1, "--seq-len": 24}, "--batch-size x --seq-len is 24, which is not a"),
                              ({"--norm": "rmsnorm", "--norm-placement": "after"}, "--matmul-dtype fp8 takes norms before attention and the MLP"),
                              ({"--fp8-skip-first": 1, "--fp8-skip-last": 1}, "leave none of the 2 layers in fp8")):
            options = [*(x for option in {**model, **args}.items() for x in option), *self.FP8, *dtype]
            for command in (self.train_args("fp8_refused", *options), ["plan", *options]):
                self.refused(1, [message], *command)
        self.refused(2, ["--matmul-dtype excludes --inference"], "plan", *MODEL, *self.FP8, "--inference")
        self.refused(1, ["--matmul-dtype fp8 quantises bf16; add --dtype bf16"], "plan", *MODEL, *self.FP8,
                     "--dtype", "fp32", "--gpu", "H100 80GB HBM3")
        self.refused(1, ["need a GPU of compute capability 8.9 or newer (Ada, Hopper), not 8.0"], "plan", *MODEL,
                     *self.FP8, "--dtype", "bf16", "--gpu", "A100-SXM4-80GB")

        def planned(*args):
            return json.loads(run("plan", *MODEL, "--seq-len", 32, "--json", *dtype, *args).stdout)["bytes"]
        plain, kept, used = planned(), planned(*self.FP8), planned(*self.FP8, "--fp8-weights", "use")
        skipped, sharded = planned(*self.FP8, "--fp8-skip-last", 1), planned(*self.FP8, "--world", 2, "--zero-stage", 3)
        blocks = 2 * 12 * 32 * 32
        self.assertEqual([plan.get("fp8 weights", 0) for plan in (plain, kept, used, skipped, sharded)],
                         [0, 2 * blocks, 0, blocks, 0])
        self.assertGreater(used["activations"], kept["activations"])

    def test_modern_architecture(self):
        # Trained, resumed, evaluated, sampled; every option is in run.toml or in config.json.
        model = ["--model", "modern-124M", "--layers", 2, "--channels", 32, "--heads", 2, "--qk-norm", "weights", "--logit-softcap", 20,
                 "--softcap-function", "tanh", "--rope-theta", 500, "--attention-scale", 0.3]
        whole = self.train("modern", *model, "--steps", 6, "--save-every", 3, "--eval-every", 6, "--recompute", "norms")
        end = os.path.join(whole, "step_00000006")
        self.repeats_after_resume(whole, end)
        trained = losses(whole)
        self.assertLess(trained[6], trained[1])
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        expected_keys = {"model_type": "train_gpt", "qk_norm": "weights", "embedding_norm": True, "head_bias": True, "logit_softcap": 20.0,
                         "softcap_function": "tanh", "rope_theta": 500.0, "attention_scale": 0.3, "partial_rotary_factor": 0.5}
        self.assertEqual({key: config[key] for key in expected_keys}, expected_keys)
        self.assertEqual(config["rope_scaling"], {"rope_type": "truncated"})
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8, "--top-k", 1]):
            done = run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(1, ["fixes the shape", "leave out the model options"], "plan", "--model", end, "--qk-norm", "off")
        for words, args in (
            (["--softcap-function rsqrt needs --logit-softcap"], ["gpt2-tiny", "--softcap-function", "rsqrt"]),
            (["--rope-theta", "--positions rope"], ["gpt2-tiny", "--rope-fraction", 0.5]),
            (["rotates 3 of 32 channels", "even"], ["llama-tiny", "--rope-fraction", 0.1]),
            (["--rope-partial frequencies", "another way"], ["llama-1B", "--rope-partial", "frequencies"]),
        ):
            self.refused(1, words, "plan", "--model", *args)

    def test_norms_after(self):
        # A small OLMo2, trained with Muon and a document mask, resumed, evaluated, sampled; what it is saved as.
        small = ["--layers", 2, "--channels", 32, "--heads", 4, "--ffn", 64]
        for name, model, model_type in (("olmo2", ["olmo2-1B"], "olmo2"),
                                        ("own", ["llama-tiny", "--norm-placement", "after", "--qk-norm", "weights"], "train_gpt")):
            whole = self.train(name, "--model", *model, *small, "--optimizer", "muon", "--document-mask", "--steps", 6, "--save-every", 3,
                               "--eval-every", 6, "--recompute", "block")
            end = os.path.join(whole, "step_00000006")
            self.repeats_after_resume(whole, end)
            trained = losses(whole)
            self.assertLess(trained[6], trained[1])
            with open(os.path.join(end, "config.json")) as file:
                self.assertEqual(json.load(file)["model_type"], model_type)
            for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8, "--top-k", 1]):
                done = run(args[0], "--model", whole, *args[1:])
                self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(1, ["RMSNorm", "--norm rmsnorm"], "plan", "--model", "gpt2-tiny", "--norm-placement", "after")

    def test_sliding_windows(self):
        # Trained on packed documents, resumed, evaluated, sampled beyond the window; refused windows.
        model = ["--model", "llama-tiny", "--layers", 3, "--channels", 32, "--heads", 4, "--kv-heads", 2, "--window", "7,0,4"]
        whole = self.train("window", *model, "--document-mask", "--steps", 6, "--save-every", 3, "--eval-every", 6)
        end = os.path.join(whole, "step_00000006")
        self.repeats_after_resume(whole, end)
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        self.assertEqual((config["model_type"], config["layer_windows"]), ("train_gpt", [7, 0, 4]))
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 30, "--top-k", 1, "--num-samples", 3],
                     ["sample", "--max-tokens", 30, "--context", 20, "--keep-tokens", 3]):
            done = run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)

        def plan(*args):
            return json.loads(run("plan", "--model", "llama-tiny", "--seq-len", 1000, "--json", *args).stdout)

        full, window, one = plan("--generate"), plan("--generate", "--window", 99), plan("--generate", "--window", "99,0,0,0")
        self.assertAlmostEqual(window["bytes"]["KV cache"] / full["bytes"]["KV cache"], 0.1, delta=0.001)
        self.assertAlmostEqual(one["bytes"]["KV cache"] / full["bytes"]["KV cache"], 0.775, delta=0.001)
        flop = [plan("--window", w)["flop_per_token"] for w in (0, 1000, 100)]
        self.assertEqual(flop[0], flop[1])
        self.assertAlmostEqual(flop[0] - flop[2], 6 * 4 * 128 * (1000 - 190))
        for status, words, args in (
            (2, ["--window", "'' is not a number of tokens"], ["--window", ""]),
            (2, ["--window", "-1 is not a number of tokens", "one per layer"], ["--window", "4,-1,0,0"]),
            (1, ["--window 4,5: 2 windows for 4 layers", "give one for all, or one per layer"], ["--window", "4,5"]),
            (1, ["--window 4 needs --attention softmax"], ["--window", 4, "--attention", "L"]),
            (1, ["linear attention has a window of 4"], ["--window", "0,4,0,0", "--attention", "SLSS"]),
        ):
            self.refused(status, words, "plan", "--model", "llama-tiny", *args)

    def test_mixed_attention_types(self):
        whole = self.train("mixed", "--model", "llama-tiny", "--layers", 3, "--channels", 32, "--heads", 4, "--kv-heads", 2, "--attention", "LGS",
                           "--linear-rope", "no", "--document-mask", "--steps", 6, "--save-every", 3, "--eval-every", 6)
        end = os.path.join(whole, "step_00000006")
        self.assertIn("attention LGS", self.repeats_after_resume(whole, end))
        self.assertIn('attention="LGS"', text_of(os.path.join(whole, "run.toml")))
        with open(os.path.join(end, "config.json")) as file:
            config = json.load(file)
        self.assertEqual([config[key] for key in ("model_type", "attention", "linear_rope")], ["train_gpt", "LGS", False])
        # Converted, it is the same model. Dumps hold the activations that only gated_linear layers have.
        copy, arrays = os.path.join(self.top, "mixed_copy"), os.path.join(self.top, "mixed_arrays")
        self.assertEqual(run("convert", whole, copy).returncode, 0)
        for model, path in (whole, arrays + "a.npy"), (copy, arrays + "b.npy"):
            done = run("logits", "--model", model, "--tokens", "1 2 3 4 5", "--output", path, "--dump", arrays)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(digest(arrays + "a.npy"), digest(arrays + "b.npy"))
        dumped = os.listdir(arrays)
        for name in ("layers.1.gate.npy", "layers.1.mix.npy", "layers.0.att.npy"):
            self.assertIn(name, dumped)
        self.assertNotIn("layers.0.gate.npy", dumped)
        done = run("sample", "--model", copy, "--prompt", "The cat", "--max-tokens", 8, "--ignore-eos", "--num-samples", 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(run("plan", "--model", whole, "--generate", "--seq-len", 64, "--json").stdout)
        self.assertGreater(plan["bytes"]["linear states"], 0)

    def change_state(self, path, change):
        """Rewrites a state.safetensors: change(header, data) changes both in place. The header keeps its length."""
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header, data = json.loads(file.read(size)), bytearray(file.read())
        change(header, data)
        text = json.dumps(header, separators=(",", ":")).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", size) + text.ljust(size) + data)

    def bf16_run(self):
        """A copy of the base run up to step 4, with the weights in bf16 and what bf16 loses in the state."""
        out = os.path.join(self.top, "bf16_base")
        if not os.path.exists(out):
            self.train("bf16_base", "--steps", 8, "--save-every", 4, "--save-dtype", "bf16")
            shutil.rmtree(os.path.join(out, "step_00000008"))
        return out

    def test_resume_reads_the_weights(self):
        """A changed value does not match its checksum; without checksums, as in files of older versions, it is used."""
        def raise_a_value(header, data):
            name = next(n for n in header if n.startswith(tensor) and n.endswith(weight))
            at = header[name]["data_offsets"][0]
            data[at:at + 4] = struct.pack("<f", struct.unpack("<f", data[at:at + 4])[0] * 1.5 + 1e-3)
        for tensor, file, run_dir in (("params/", "state", self.bf16_run()), ("m/", "state", self.base), ("v/", "state", self.base),
                                      ("transformer.", "model", self.base)):
            weight = "attn.weight" if file == "model" else "qkv.weight"
            other = os.path.join(self.top, f"changed_{tensor[0]}")
            shutil.copytree(run_dir, other)
            shutil.rmtree(os.path.join(other, "step_00000008"), ignore_errors=True)
            checkpoint = os.path.join(other, "step_00000004")
            path = os.path.join(checkpoint, file + ".safetensors")
            self.change_state(path, raise_a_value)
            done = run("train", "--out", other, "--resume")
            self.assertEqual(done.returncode, 1, tensor)
            self.assertRegex(done.stderr.splitlines()[-1], rf"{path}: tensor {tensor}\S+: .*checksum.*; remove {checkpoint}")
        # The state of older versions held all weights, and at first no checksums.
        other = os.path.join(self.top, "changed_p")
        self.change_state(os.path.join(other, "step_00000004", "state.safetensors"),
                          lambda header, data: header.update(__metadata__={"format": "pt"}))
        os.truncate(os.path.join(other, "step_00000004", "model.safetensors"), 100)  # not read then
        done = run("train", "--out", other, "--resume", "--save-dtype", "fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEqual(*(digest(os.path.join(run_dir, "step_00000008", "model.safetensors")) for run_dir in (other, self.base)))

    def test_save_dtype(self):
        """The run continues with the same bits, whatever the exported model's dtype."""
        def data_bytes(checkpoint):
            return {name: sum(map(len, tensor_bytes(os.path.join(checkpoint, name + ".safetensors")).values()))
                    for name in ("model", "state")}
        other = os.path.join(self.top, "save_dtype")
        shutil.copytree(self.bf16_run(), other)
        found, plain = (data_bytes(os.path.join(run_dir, "step_00000004")) for run_dir in (other, self.base))
        weights = plain["model"] // 4
        self.assertEqual((plain["state"], found["model"], found["state"]), (8 * weights, 2 * weights, 12 * weights))
        done = run("train", "--out", other, "--resume", "--save-dtype", "fp32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000008")) for run_dir in (other, self.base)))
        self.assertEqual(losses(other), losses(self.base))
        self.refused(2, ["--save-dtype", "fp16"], *self.train_args("refused", "--save-dtype", "fp16"))

    def test_weights_of_another_checkpoint_are_refused(self):
        other = os.path.join(self.top, "weights_of_another")
        shutil.copytree(self.base, other)
        checkpoint = os.path.join(other, "step_00000008")
        path = os.path.join(checkpoint, "model.safetensors")
        shutil.copyfile(os.path.join(other, "step_00000004", "model.safetensors"), path)
        self.refused(1, [path, "'step' is 4", f"; remove {checkpoint}"], "train", "--out", other, "--resume", "--steps", 12)

    def test_checkpoints_that_cannot_be_resumed(self):
        """One line names file, value and remedy, before anything else is printed; the run directory stays as it is."""
        other = os.path.join(self.top, "unusable")
        shutil.copytree(self.base, other)
        checkpoint = os.path.join(other, "step_00000008")
        trainer, state, model = (os.path.join(checkpoint, name) for name in ("trainer.json", "state.safetensors", "model.safetensors"))
        remedy = f"; remove {checkpoint} to continue from step_00000004"
        files = {}
        for path in (trainer, state, model):
            with open(path, "rb") as file:
                files[path] = file.read()
        good = json.loads(files[trainer])
        resume = ("train", "--out", other, "--resume", "--steps", 12)
        for key, values in (("step", (7, 40000000000, -8, 8.0, "8", None)), ("adam_steps", (0.5, 1, 9, -1, "8", None)),
                            ("seq_len", (0, "32", None)), ("total_batch_tokens", (0, 1.5, None)), ("data", (3, None)), ("seed", ("x",))):
            for value in values:
                changed = {k: v for k, v in {**good, key: value}.items() if v is not None}
                with open(trainer, "w") as file:
                    json.dump(changed, file)
                # One update fewer is plausible in itself: the state's file has another number.
                named = state if (key, value) == ("adam_steps", 1) else trainer
                self.refused(1, [named, f"'{key}'", remedy], *resume)
        for text in ("", "{", "[1]", files[trainer].decode()[:40]):
            with open(trainer, "w") as file:
                file.write(text)
            self.refused(1, [trainer, "damaged", remedy], *resume)
        with open(trainer, "wb") as file:
            file.write(files[trainer])
        for path in (state, model):
            for size in (0, 5, 3000, len(files[path]) - 1):
                with open(path, "wb") as file:
                    file.write(files[path][:size])
                self.refused(1, [path, remedy], *resume)
            with open(path, "wb") as file:
                file.write(files[path])
        self.assertEqual(run(*resume).returncode, 0)

    def start(self, name, *args, data=None):
        """A run that goes on until it is ended. Returns after its first step."""
        out = os.path.join(self.top, name)
        args = self.train_args(name, "--steps", 1000000, "--eval-every", 0, "--save-every", 0, *args)
        if data:
            args[args.index("--data") + 1] = data
        process = subprocess.Popen([DRIVER, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env={**os.environ, "XDG_CACHE_HOME": CACHE.name})
        self.addCleanup(lambda: process.stderr.close() or process.wait())
        self.addCleanup(process.kill)
        self.wait_for(lambda: os.path.exists(out + "/log.jsonl") and os.path.getsize(out + "/log.jsonl"))
        return process, out

    def wait_for(self, condition):
        deadline = time.time() + 60
        while not condition():
            self.assertLess(time.time(), deadline, "it did not happen")
            time.sleep(0.02)

    def test_a_run_directory_has_one_run(self):
        process, out = self.start("locked")
        words = [f"--out {out} is in use by process {process.pid} on {os.uname().nodename}; wait"]
        self.refused(1, words, *self.train_args("locked", "--steps", 3))
        self.refused(1, words, "train", "--out", out, "--resume")
        self.assertIsNone(process.poll())
        process.kill()
        process.wait()
        self.assertTrue(os.path.exists(out + "/.lock"))  # the file of a dead process does not block
        done = run(*self.train_args("locked", "--steps", 3))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse(os.path.exists(out + "/.lock"))

    def test_of_two_resumed_runs_one_continues(self):
        other = self.copy_with_checkpoint("resumed_twice", 4)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda _: run("train", "--out", other, "--resume"), range(4)))
        for process in done:  # the one that holds the lock may not have written its number yet
            self.assertTrue(process.returncode == 0 or "is in use by " in process.stderr, process.stderr)
        self.assertIn(0, [process.returncode for process in done])
        self.assertEqual(losses(other), losses(self.base))
        end, expected = (os.path.join(run_dir, "step_00000008") for run_dir in (other, self.base))
        self.assertEqual(digests(end), digests(expected))

    def test_an_incomplete_checkpoint_in_the_way(self):
        """A run that could not save its last checkpoint is refused before it starts."""
        out = os.path.join(self.top, "in_the_way")
        shutil.copytree(self.base, out)
        os.remove(os.path.join(out, "step_00000008", "model.safetensors"))
        self.refused(1, ["--out " + out, "step_00000008 is not a complete checkpoint", "remove it"],
                     "train", "--out", out, "--resume")
        self.assertEqual(run("train", "--out", out, "--resume", "--steps", 7).returncode, 0)  # it comes to step 7 only
        shutil.rmtree(os.path.join(out, "step_00000008"))
        self.assertEqual(run("train", "--out", out, "--resume", "--steps", 8).returncode, 0)
        self.assertEqual(checkpoints(out), ["step_00000004", "step_00000007", "step_00000008"])

    def test_leftovers_of_dead_processes_are_removed(self):
        other = os.path.join(self.top, "leftovers")
        shutil.copytree(self.base, other)
        dead = subprocess.Popen(["true"])
        dead.wait()
        for name in (".old-step_00000002", f".tmp-step_00000009-{dead.pid}", f".tmp-step_00000009-{os.getpid()}"):
            shutil.copytree(os.path.join(other, "step_00000004"), os.path.join(other, name))
        for name in (".tmp-log.jsonl", ".tmp-run.toml"):
            with open(os.path.join(other, name), "w") as file:
                file.write("half")
        self.assertEqual(run("train", "--out", other, "--resume").returncode, 0)  # the run is done: nothing is saved
        self.assertEqual([name for name in os.listdir(other) if name[0] == "."], [f".tmp-step_00000009-{os.getpid()}"])

    def test_a_log_that_disappears_is_written_again(self):
        process, out = self.start("lost_log")
        path = os.path.join(out, "log.jsonl")
        for round in range(2):
            os.remove(path)
            self.wait_for(lambda: os.path.exists(path))
        process.send_signal(signal.SIGTERM)
        stderr = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 0, stderr)
        self.assertEqual([line["step"] for line in log(out)], list(range(1, int(checkpoints(out)[0][5:]) + 1)))
        self.assertEqual(stderr.count("log.jsonl was gone; it is written again"), 1, stderr)

    def test_a_token_file_that_is_truncated_is_an_error(self):
        data = os.path.join(self.top, "shrinking")
        shutil.copytree(self.data, data)
        process, out = self.start("shrinking_run", data=data)
        path = os.path.join(data, "train_000000.bin")
        os.truncate(path, 3000)
        stderr = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 1, stderr)
        self.assertRegex(stderr.splitlines()[-1], rf"^train_gpt: train: {path}: has 3000 bytes, .* truncated")
        self.assertEqual([name for name in os.listdir(out) if "tmp" in name or name == ".lock"], [])

    def test_limit_on_file_sizes(self):
        def limited(*args):
            return subprocess.run(["bash", "-c", 'ulimit -f 20; exec "$@"', "limited", DRIVER, *map(str, args)],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        before, out = sorted(os.listdir(self.top)), os.path.join(self.top, "small_files")
        done = limited(*self.train_args("small_files", "--steps", 2))
        self.assertEqual(done.returncode, 1, done.stderr)
        message = r"model\.safetensors: cannot write: File too large; raise the limit on file sizes \(ulimit -f\)$"
        self.assertRegex(done.stderr.splitlines()[-1], message)
        self.assertEqual(sorted(os.listdir(out)), ["log.jsonl", "run.toml"])
        shutil.rmtree(out)
        for args in (["convert", self.base, out], ["convert", self.base, out + ".bin"],
                     ["logits", "--model", self.base, "--tokens", "1 " * 60, "--output", out + ".npy"]):
            done = limited(*args)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            self.assertIn("ulimit -f", done.stderr)
            self.assertEqual(sorted(os.listdir(self.top)), before)

    def test_finished_run_reports_that_it_is_finished(self):
        done = run("train", "--out", self.base, "--resume")
        self.assertEqual(done.returncode, 0)
        self.assertIn("is done: step 8 of 8", done.stderr)

    def test_keep_preserves_the_best_checkpoint(self):
        # The first checkpoint is the best: from there on the learning rate is absurd.
        run_dir = self.copy_with_checkpoint("keep", 4)
        done = run("train", "--out", run_dir, "--resume", "--steps", 16, "--save-every", 2, "--eval-every", 2, "--keep", 2, "--lr", 3,
                   "--schedule", "constant", "--grad-clip", 0, "--max-skips", 100)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(checkpoints(run_dir), ["step_00000004", "step_00000014", "step_00000016"])

    # ---- crashes -----------------------------------------------------------------------------------------------------------

    def shim(self, mode, directory, n):
        if sanitized():
            self.skipTest("a preloaded library and the sanitizers' run-time don't mix")
        self.assertTrue(os.path.exists(SHIM), f"{SHIM} is not built")
        return {"LD_PRELOAD": SHIM, "CRASH_SHIM_MODE": mode, "CRASH_SHIM_DIR": os.path.realpath(directory), "CRASH_SHIM_AT": str(n)}

    def break_saves(self, mode):
        """Breaks a resumed run at its n-th file operation, for every n; then resuming must give the same result."""
        expected = digests(os.path.join(self.base, "step_00000008"))
        args = ["--resume", "--eval-every", 8, "--save-every", 2, "--on-save-error", "stop"]  # step 6 is written in the background

        def broken_at(n):
            run_dir = self.copy_with_checkpoint(f"{mode}_{n}", 4)
            done = run("train", "--out", run_dir, *args, env=self.shim(mode, run_dir, n))
            if done.returncode == 0:
                return False
            if mode == "enospc":
                self.assertEqual(done.returncode, 1, done.stderr)
                last = done.stderr.rstrip("\n").split("\n")[-1]
                self.assertIn("No space left on device", last)
                self.assertIn(run_dir, last)
            for name in checkpoints(run_dir):  # every checkpoint is complete
                info = run("info", os.path.join(run_dir, name), "--json")
                self.assertEqual(info.returncode, 0, info.stderr)
            self.assertIn("step_00000004", checkpoints(run_dir))
            if mode == "enospc":
                self.assertFalse([name for name in os.listdir(run_dir) if "tmp" in name], "half-written files are left")
            if n % 8 == 1 or "step_00000008" in checkpoints(run_dir):  # resuming takes long, so not after every failure
                again = run("train", "--out", run_dir, *args)
                self.assertEqual(again.returncode, 0, again.stderr)
                self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), expected)
                self.assertFalse([name for name in os.listdir(run_dir) if "tmp" in name], "temporary files of a killed run are left")
            shutil.rmtree(run_dir)
            return True

        at_once = os.cpu_count()
        broken = []
        with ThreadPoolExecutor(at_once) as pool:
            while all(broken):
                self.assertLess(len(broken), 2000)
                broken += pool.map(broken_at, range(len(broken) + 1, len(broken) + 1 + at_once))
        operations = broken.index(False)
        self.assertFalse(any(broken[operations:]), "a run failed after one that succeeded")
        self.assertGreater(operations, 10)

    def test_kill_at_every_file_operation(self):
        self.break_saves("kill")

    def test_full_disk_at_every_file_operation(self):
        self.break_saves("enospc")

    def test_a_save_that_fails_does_not_stop_the_run(self):
        """A full disk at operations of a save in the background."""
        def run_with(n, *args):
            run_dir = self.copy_with_checkpoint(f"goes_on_{n}", 4)
            done = run("train", "--out", run_dir, "--resume", "--eval-every", 8, "--save-every", 2, *args,
                       env=self.shim("enospc", run_dir, n))
            left = [name for name in os.listdir(run_dir) if "tmp" in name]
            return done, checkpoints(run_dir), left
        failed = 0
        for n in range(2, 40, 3):
            done, saved, left = run_with(n)
            if "the checkpoint of step 6 failed: " in done.stderr:
                failed += 1
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertRegex(done.stderr, "step 6 failed: .*No space left on device; free some disk space; the run goes on\n")
                self.assertEqual((saved, left), (["step_00000004", "step_00000008"], []))
                self.assertEqual(log(os.path.join(self.top, f"goes_on_{n}"))[-1]["step"], 8)
            shutil.rmtree(os.path.join(self.top, f"goes_on_{n}"))
        self.assertGreater(failed, 3)

    def test_free_space_is_checked_before_a_save(self):
        if os.geteuid() != 0:
            self.skipTest("mounting a small file system needs root")
        out = os.path.join(self.top, "small_disk")
        os.makedirs(out)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", out], stderr=subprocess.DEVNULL).returncode:
            self.skipTest("tmpfs cannot be mounted here")
        try:
            done = run(*self.train_args("small_disk", "--steps", 8, "--save-every", 3))
            self.assertEqual(done.returncode, 1, done.stderr)
            message = r"small_disk/step_0000000\d: a checkpoint takes \S+ KiB and \S+ KiB of the disk are free; free some disk space"
            for step in 3, 6:
                self.assertRegex(done.stderr, f"the checkpoint of step {step} failed: .*{message}; the run goes on")
            self.assertRegex(done.stderr.splitlines()[-1], f"^train_gpt: train: .*{message}$")
            self.assertEqual(sorted(os.listdir(out)), ["log.jsonl", "run.toml"])
            self.assertEqual(log(out)[-1]["step"], 8)
        finally:
            subprocess.run(["umount", out], check=True)

    def test_the_error_of_too_little_memory_names_options_that_fit(self):
        if cuda():
            self.skipTest("dev/test_backends.py has the GPU's")
        model = ["--model", "gpt2-124M", "--vocab-size", 257, "--seq-len", 1024]
        with open("/proc/meminfo") as f:
            memory = int(re.search(r"MemTotal: *(\d+)", f.read()).group(1)) << 10
        needed = json.loads(run("plan", *model, "--batch-size", 64, "--json").stdout)["total_bytes"]
        batch_size = 64 * (1 << math.ceil(math.log2(max(2, 16 * memory / needed))))  # a smaller batch must fit, recomputation alone must not
        for given in ([], ["--optimizer-dtype", "bf16", "--recompute", "block"]):
            done = run("train", *model, "--data", self.data, "--out", os.path.join(self.top, "too_large"), "--batch-size", batch_size, *given)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            said = re.search(r"this run needs .*iB \(weights .*activations .* and .* are free; (--.*) fits: it needs ([\d.]+) GiB\n", done.stderr)
            self.assertIsNotNone(said, done.stderr)
            options = said.group(1).split()
            changed = dict(zip(options[::2], options[1::2]))
            self.assertEqual(changed.pop("--total-batch-tokens"), str(batch_size * 1024))
            self.assertLess(int(changed["--batch-size"]), batch_size)
            for option in given[::2]:
                changed.setdefault(option, given[given.index(option) + 1])
            plan = json.loads(run("plan", *model, *[word for pair in changed.items() for word in pair], "--json").stdout)
            needs = (plan["total_bytes"] - plan["bytes"]["checkpoint snapshot"]) / 2**30  # this run saves at its end only
            self.assertAlmostEqual(needs, float(said.group(2)), delta=0.006)
            self.assertFalse(os.path.exists(os.path.join(self.top, "too_large")))

    def test_too_little_memory_for_a_snapshot(self):
        """The run says so and waits for each save; its checkpoints are the same."""
        if cuda() or sanitized():
            self.skipTest("CUDA and the address sanitizer reserve more address space than any limit leaves")
        env = {**os.environ, "OMP_NUM_THREADS": "2"}  # each thread reserves address space

        def limited(name, kilobytes):
            return subprocess.run(["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "limited", DRIVER,
                                   *map(str, self.train_args(name, "--model", "gpt2-tiny", "--layers", 12, "--channels", 256, "--save-every", 1,
                                                             "--steps", 2))],
                                  env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        # 9.6 million weights: 150 MiB and a snapshot of 110 MiB, and what libraries and threads reserve of the address space.
        outcomes = set()
        for kilobytes in range(300000, 1000000, 25000):
            done = limited(f"memory_{kilobytes}", kilobytes)
            if done.returncode or "the checkpoint of step 1 failed: " in done.stderr:  # the limit is too low for a save
                continue
            waits = "training waits while a checkpoint is written" in done.stderr
            self.assertEqual(checkpoints(os.path.join(self.top, f"memory_{kilobytes}")), ["step_00000001", "step_00000002"])
            outcomes.add(waits)
            if not waits:
                break
        self.assertEqual(len(outcomes), 2, outcomes)

    def test_non_finite_losses_stop_the_run(self):
        args = self.train_args("diverges", "--steps", 200, "--lr", 1e6, "--warmup", 0, "--grad-clip", 0, "--schedule", "constant",
                               "--max-skips", 3, "--eval-every", 0)
        done = run(*args)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("not finite 3 times in a row", done.stderr)
        lines = log(os.path.join(self.top, "diverges"))
        self.assertTrue(all(line.get("skipped") for line in lines[-3:]))
        self.assertLess(len(lines), 200)

    def test_spikes_are_skipped(self):
        """Far below the median every step is a spike: the log counts them, and --max-skips ends the run."""
        args = ["--steps", 70, "--schedule", "constant", "--eval-every", 0, "--batch-size", 1, "--spike-factor", 1e-3]
        done = run(*self.train_args("spikes", *args, "--max-skips", 4, "--save-every", 65))
        self.assertEqual((done.returncode, done.stderr.count("is a spike; update skipped")), (1, 4), done.stderr)
        self.assertIn("stopped at step 67: the gradient norm was a spike or not finite 4 times in a row", done.stderr)
        lines = log(os.path.join(self.top, "spikes"))
        self.assertEqual([line["step"] for line in lines if line.get("skipped")], [64, 65, 66, 67])
        self.assertEqual([(line["spike"], line["skips"]) for line in lines[-4:]], [(True, n) for n in range(1, 5)])
        # The norms are in the checkpoint: the resumed run judges its first step, and the count goes on.
        done = run("train", "--resume", "--out", os.path.join(self.top, "spikes"), "--max-skips", 100, "--steps", 68)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = log(os.path.join(self.top, "spikes"))
        self.assertEqual([line["skips"] for line in lines if line.get("spike")], [1, 2, 3, 4, 5])
        trainer = json.loads(text_of(os.path.join(self.top, "spikes", "step_00000068", "trainer.json")))
        self.assertEqual((trainer["step"], trainer["adam_steps"], trainer["norm_count"]), (68, 63, 68))
        # Without the option, and with one that nothing exceeds, the steps are the same.
        plain, high = self.train("no_spikes", *args[:8]), self.train("high_factor", *args[:8], "--spike-factor", 1e6)
        self.assertEqual(losses(plain), losses(high))

    def test_step_timeout(self):
        """A process that hangs ends with one line that names the phase. Here the file system hangs."""
        if sanitized():
            self.skipTest("a preloaded library and the sanitizers' run-time don't mix")
        out = os.path.join(self.top, "hangs")
        env = {"LD_PRELOAD": SHIM, "CRASH_SHIM_DIR": out, "CRASH_SHIM_MODE": "hang"}
        phases = set()
        for call in (6, 8, 12):
            shutil.rmtree(out, ignore_errors=True)
            args = self.train_args("hangs", "--steps", 4, "--save-every", 2, "--eval-every", 0, "--step-timeout", 4)
            done = run(*args, env={**env, "CRASH_SHIM_AT": str(call)})
            self.assertEqual(done.returncode, 1, (call, done.stderr))
            last = done.stderr.splitlines()[-1]
            found = re.fullmatch(r"train_gpt: train: no progress for 4 s in step (\d) \(([a-z. ]+)\) "
                                 rf"\(--step-timeout\); 'train --resume --out {out}' continues from the last "
                                 "checkpoint", last)
            self.assertTrue(found, (call, last))
            phases.add(found.group(2))
        self.assertEqual(phases, {"writing log.jsonl", "saving a checkpoint"})
        shutil.rmtree(out)
        self.assertEqual(run(*self.train_args("hangs", "--steps", 2, "--step-timeout", 60)).returncode, 0)

    # ---- bad input ---------------------------------------------------------------------------------------------------------

    def refused(self, status, words, *args):
        before = sorted(os.listdir(self.top))
        done = run(*args)
        self.assertEqual(done.returncode, status, (args, done.stderr))
        self.assertEqual(done.stderr.count("\n"), 1, (args, done.stderr))
        self.assertEqual(done.stdout, "", args)
        self.assertNotIn("json.exception", done.stderr, args)
        for word in words:
            self.assertIn(word, done.stderr, args)
        self.assertEqual(sorted(os.listdir(self.top)), before, args)

    def test_wrong_flags(self):
        for words, args in (
            (["no command"], []),
            (["unknown command 'trian', did you mean 'train'?"], ["trian"]),
            (["unknown command 'frobnicate'; "], ["frobnicate"]),
            (["--model is required"], ["train", "--data", self.data, "--out", "x"]),
            (["train: unknown option --bogus; see"], self.train_args("x", "--bogus")),
            (["train: unknown option --modle, did you mean --model?; see"], ["train", "--modle", "gpt2-tiny"]),
            (["train: unknown option --modle, did you mean --model?; see"], ["train", "--modle=gpt2-tiny"]),
            (["--steps: 0 is not a whole number of at least 1 (and at most 2^40); unknown option --sed, did you mean --seed?; --layers: 0 is"],
             ["train", "--steps", 0, "--sed", 3, "--layers", 0]),
            (["did you mean --keep-tokens?"], ["sample", "--model", "gpt2-tiny", "--keep", 2]),
            (["unexpected argument 'there'"], ["sample", "--model", "gpt2-tiny", "--prompt", "Hello", "there"]),
            (["--steps: the value is missing"], self.train_args("x", "--steps")),
            (["--seed: 2 values; give one"], self.train_args("x", "--seed", 1, "--seed", 2)),
            (["--prompt excludes --prompt-file; leave"], ["sample", "--model", "x", "--prompt", "a", "--prompt-file", "b"]),
            *((["--attention: 'X", "write softmax, linear or gated_linear"], ["plan", *MODEL, "--attention", wrong])
              for wrong in ("X", "XS", "XSoftmax", "softmax,X", "S,X")),
            (["run.toml", "rename"], self.train_args("x#y")),
            (["--steps", "0 is not"], self.train_args("x", "--steps", 0)),
            (["--steps", "-3 is not"], self.train_args("x", "--steps", -3)),
            (["--steps", "1e3"], self.train_args("x", "--steps", "1e3")),
            (["--batch-size", "99999999999999999999"], self.train_args("x", "--batch-size", "99999999999999999999")),
            (["--lr", "nan"], self.train_args("x", "--lr", "nan")),
            *(([option + " is an option of --optimizer muon"], self.train_args("x", option, value))
              for option, value in (("--momentum", 0.9), ("--momentum-warmup", 3), ("--muon-coefficients", "simple"), ("--muon-iterations", 5),
                                    ("--muon-scale", "rms"), ("--adam-weight-decay", 0.1))),
            (["--optimizer: sgd is not one of {adamw,muon}"], self.train_args("x", "--optimizer", "sgd")),
            (["--muon-iterations", "0 is not"], self.train_args("x", "--optimizer", "muon", "--muon-iterations", 0)),
            (["--muon-iterations", "101"], self.train_args("x", "--optimizer", "muon", "--muon-iterations", 101)),
            (["--muon-coefficients: cubic is not one of"], self.train_args("x", "--optimizer", "muon", "--muon-coefficients", "cubic")),
            (["--lr 0", "scaled with it"], self.train_args("x", "--lr", 0, "--embedding-lr", 1e-3)),
            (["--schedule: cosin is not one of {cosine,"], self.train_args("x", "--schedule", "cosin")),
            (["--config: /nonexistent.toml cannot be read"], ["train", "--config", "/nonexistent.toml"]),
            (["--temperature"], ["sample", "--model", self.base, "--temperature", "-1"]),
            (["--tokens", "'x'"], ["logits", "--model", self.base, "--tokens", "1 x", "--output", "x.npy"]),
            (["--seed"], ["sample", "--model", self.base, "--seed", "-1"]),
            *(([f"{option}: '' is not"], self.train_args("x", option, ""))
              for option in ("--zero-stage", "--seed", "--save-every", "--lr", "--dtype", "--schedule")),
            (["--zero-stage: 4 is not one of {0,"], self.train_args("x", "--zero-stage", 4)),
            (["--config: the value is empty"], self.train_args("x", "--config", "")),
            # An octal and a hexadecimal number would be read as another one, or as two different ones.
            *(([f"{option}: {value} is not"], ["plan", *MODEL, option, value])
              for option in ("--seq-len", "--window") for value in ("010", "0x10", "1_0", " 4", "4 ")),
            *(([f"{option}: '' is not"], ["plan", *MODEL, option, value])
              for option, value in (("--window", "4,"), ("--attention", "S,"), ("--attention", ""))),
            (["--model: the value is empty; give one; --gpu: the value is empty; give one, or leave the option out"],
             ["plan", "--model", "", "--gpu", ""]),
            (["--data: the value is empty"], self.train_args("x", "--data", "")),
            (["--out: the value is empty"], ["train", *MODEL, "--data", self.data, "--out="]),
            (["--gpu: the value is empty"], ["plan", *MODEL, "--gpu=", "--json"]),
            (["DST: the value is empty"], ["convert", self.base, ""]),
            (["--data: the value is empty"], ["info", ""]),
            (["--rendezvous nowhere is not HOST:PORT"], self.train_args("x", "--rendezvous", "nowhere")),
            (["--world: 65537 is not"], ["plan", *MODEL, "--world", 65537]),
            *((["--multiple-choice excludes " + option], ["eval", "--model", self.base, "--multiple-choice", "x", option, value])
              for option, value in (("--split", "train"), ("--too-long", "skip"))),
            (["--sample-prompts has no effect without --sample-every"], self.train_args("x", "--sample-prompts", "x")),
        ):
            self.refused(2, words, *args)
        self.assertEqual(run("sample", "--model", self.base, "--prompt=", "--max-tokens", 1, "--stop", "").returncode, 0)

    def test_bad_input(self):
        top, base, data = self.top, self.base, self.data
        checkpoint = os.path.join(base, "step_00000008")
        for words, args in (
            (["nosuch", "gpt2-124M"], self.train_args("x", "--model", "nosuch")),
            (["--resume", top + "/x is not a directory", "leave --resume out"], self.train_args("x", "--resume")),
            (["--resume", top + "/x is not a directory"], ["train", "--out", top + "/x", "--resume"]),
            (["--resume", "holds neither a checkpoint nor run.toml"], ["train", "--out", data, "--resume"]),
            (["--num-samples 1099511627776", "at most 1000000"], ["sample", "--model", base, "--num-samples", 1 << 40]),
            (["/nonexistent"], ["train", *MODEL, "--data", "/nonexistent", "--out", top + "/x"]),
            (["train_"], ["train", *MODEL, "--data", top, "--out", top + "/x"]),
            ([data + "/meta.json", "--out"], ["train", *MODEL, "--data", data, "--out", data + "/meta.json"]),
            (["--resume"], self.train_args("base", "--steps", 9)),
            (["--seed"], ["train", "--out", base, "--resume", "--seed", 7]),
            (["--seq-len"], ["train", "--out", base, "--resume", "--seq-len", 16]),
            (["shape"], ["train", "--out", base, "--resume", "--layers", 3]),
            (["--head-lr", "tied", "--embedding-lr"], self.train_args("x", "--head-lr", 1e-3)),
            (["64 rows"], self.train_args("x", "--seq-len", 65)),
            (["3 heads", "32 channels"], ["train", "--model", "gpt2-tiny", "--channels", 32, "--heads", 3, "--data", data, "--out", top + "/x"]),
            (["3 KV heads"], [*self.train_args("x"), "--kv-heads", 3]),
            (["too large"], self.train_args("x", "--batch-size", 1 << 30)),
            (["free"], self.train_args("x", "--model", "llama-8B", "--batch-size", 512, "--seq-len", 2048)),
            (["100", "128"], self.train_args("x", "--total-batch-tokens", 100)),
            (["--vocab-size 100", "257"], [*self.train_args("x"), "--vocab-size", 100]),
            *([(["fp16", "linear attention"], ["sample", *MODEL, "--attention", "G", "--random-weights", "--dtype", "fp16"])] if cuda() else []),
            (["attention 'SSS' names 3 layers, the model has 2"], [*self.train_args("x"), "--attention", "softmax,S,softmax"]),
            (["--linear-rope", "--positions rope"], [*self.train_args("x"), "--attention", "L", "--linear-rope", "no"]),
            *([] if cuda() else [(["bf16"], self.train_args("x", "--dtype", "bf16"))]),
            (["preset without weights"], ["eval", "--model", "gpt2-tiny", "--data", data]),
            (["another tokenizer"], ["eval", "--model", base, "--data", self.other_data]),
            (["another tokenizer"], ["train", "--model", base, "--data", self.other_data, "--out", top + "/x"]),
            (["checkpoint and fixes the shape"], ["eval", "--model", base, "--layers", 3, "--data", data]),
            (["beyond the model's vocabulary"], ["logits", "--model", base, "--tokens", "257", "--output", top + "/x.npy"]),
            (["/nonexistent"], ["info", "/nonexistent"]),
            (["/nonexistent"], ["sample", "--model", base, "--prompt-file", "/nonexistent"]),
            ([data], ["sample", "--model", base, "--prompt-file", data]),
            (["/nonexistent/x.npy"], ["logits", "--model", base, "--tokens", "1", "--output", "/nonexistent/x.npy"]),
            (["neither a config.json", "gpt2-124M"], ["sample", "--model", top, "--prompt", "x"]),
            (["tokenizer.json"], ["sample", "--model", "gpt2-tiny", "--prompt", "x"]),
            (["a token file"], ["info", os.path.join(base, "run.toml")]),
            (["not a tokenizer.json"], ["info", os.path.join(checkpoint, "config.json")]),
            (["--fit", "1.00 MiB", "are less than", "raise --gpu-memory"], ["plan", *MODEL, "--gpu", "h100 80gb", "--gpu-memory", "1MiB", "--fit"]),
            (["no room to keep 5", "--keep-tokens"], ["sample", "--model", base, "--prompt", "x", "--keep-tokens", 5, "--context", 4]),
            (["a prompt of 9 tokens", "--context"], ["sample", "--model", base, "--prompt", "x" * 9, "--context", 8, "--context-full", "stop"]),
            (["train: " + top + "/base/run.toml", "cannot create the directory", "name a directory"],
             ["train", *MODEL, "--seq-len", 32, "--data", data, "--out", base + "/run.toml/x"]),
            (["cannot create the directory"],
             ["logits", "--model", base, "--tokens", "1", "--output", top + "/x.npy", "--dump", base + "/run.toml/x"]),
        ):
            self.refused(1, words, *args)

    def test_paths_that_are_no_utf8(self):
        model = os.path.join(self.top, os.fsdecode(b"caf\xe9"))
        shutil.copytree(os.path.join(self.base, "step_00000008"), model)
        self.assertIn("caf", json.loads(run("info", model, "--json").stdout)["directory"])
        self.assertIn("directory " + self.top, run("info", model).stdout)

    def test_prompts_are_not_loss_tokens(self):
        # All training sequences hold the same 32 tokens and every third one is a prompt: the loss tokens have the mean loss and the mean
        # gradient of a run in which all tokens are loss tokens.
        T, sequences = 32, 60
        tokens = [(7 * i * i + 3) % 50 for i in range(T)] * sequences + [3]
        runs = {}
        for name in ("all", "some"):
            data = os.path.join(self.top, "repeated_" + name)
            os.mkdir(data)
            header = lambda magic: struct.pack("<3i", magic, 1, len(tokens)).ljust(1024, b"\0")
            with open(os.path.join(data, "train_000000.bin"), "wb") as file:
                file.write(header(20240520) + struct.pack(f"<{len(tokens)}H", *tokens))
            if name == "some":
                with open(os.path.join(data, "train_000000.mask"), "wb") as file:
                    file.write(header(20261121) + bytes(int((i - 1) // T % 3 != 0) for i in range(len(tokens))))
            for micro in (1, 4):
                out = os.path.join(self.top, f"repeated_{name}_{micro}")
                # In fp32: the rounding of bf16 differs between micro-batches.
                done = run("train", *MODEL, "--dtype", "fp32", "--vocab-size", 50, "--data", data, "--out", out, "--steps", 8,
                           "--seq-len", T, "--batch-size", 4 // micro,
                           "--total-batch-tokens", 4 * T, "--lr", "1e-3", "--grad-clip", 0.5, "--save-every", 0)
                self.assertEqual(done.returncode, 0, done.stderr)
                runs[name, micro] = log(out)
        for key, lines in runs.items():
            for line, reference in zip(lines, runs["all", 1]):
                self.assertAlmostEqual(line["loss"] / reference["loss"], 1, delta=1e-5, msg=key)
                self.assertAlmostEqual(line["grad_norm"] / reference["grad_norm"], 1, delta=1e-4, msg=key)
        self.assertLess(runs["some", 1][-1]["loss"], runs["some", 1][0]["loss"] - 0.05)

        # From JSONL: the loss tokens are those of the responses.
        path, data = os.path.join(self.top, "pairs.jsonl"), os.path.join(self.top, "pairs")
        with open(path, "w") as file:
            for i in range(200):
                file.write(json.dumps({"prompt": f"{i % 10} + {i // 10 % 10} = ", "response": str(i % 10 + i // 10 % 10)}) + "\n")
        subprocess.run([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", path, "--tokenizer", "byte", "--val", "0.2",
                        "--out", data], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(os.path.join(data, "meta.json")) as file:
            meta = json.load(file)
        info = json.loads(run("info", data, "--json").stdout)
        self.assertEqual(info["val"]["loss_tokens"], meta["val"]["loss_tokens"])
        scores = json.loads(run("eval", "--model", self.base, "--data", data, "--json").stdout)
        self.assertEqual(scores["tokens"], meta["val"]["loss_tokens"])
        self.assertIsNone(scores["bits_per_byte"])

    def make_examples(self, name, examples, *options):
        """A data set of (prompt, response) in byte tokens: an example has one token more than its text."""
        path, data = os.path.join(self.top, name + ".jsonl"), os.path.join(self.top, name)
        with open(path, "w") as file:
            file.writelines(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in examples)
        subprocess.run([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", path, "--tokenizer", "byte",
                        "--out", data, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return data

    def test_packed_examples(self):
        examples = [(f"{i} + {i * 7 % 30} = ", str(i + i * 7 % 30) + "." * (i * i % 17)) for i in range(300)]
        data = self.make_examples("sums", examples, "--val", "0.2")
        args = ["--data", data, "--seq-len", 48, "--batch-size", 2, "--save-every", 4]
        run_dir = self.train("packed", *args, "--steps", 8)
        self.assertIn('pack="examples"', text_of(os.path.join(run_dir, "run.toml")))
        self.assertEqual(json.loads(text_of(os.path.join(run_dir, "step_00000008", "trainer.json")))["pack"], "examples")
        self.assertLess(losses(run_dir)[8], losses(run_dir)[1])
        done = run(*self.train_args("packed_again", *args, "--steps", 1))
        self.assertRegex(done.stderr, r"training tokens: 2\d\d examples in \d+ training sequences \(\d\.\d% padding, 0 longer")
        # Resumed, and in micro-steps of one sequence: the same examples.
        whole = digests(os.path.join(run_dir, "step_00000008"))
        shutil.rmtree(os.path.join(run_dir, "step_00000008"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), whole)
        micro = self.train("packed_micro", *args[:4], "--batch-size", 1, "--total-batch-tokens", 96, "--steps", 8)
        for step, loss in losses(run_dir).items():
            self.assertAlmostEqual(losses(micro)[step] / loss, 1, delta=2e-5)
        self.refused(1, ["--resume: --pack was examples", "cannot change"], "train", "--resume", "--out", run_dir, "--pack", "none", "--steps", 9)
        # The same loss at the end of training as by the command, in one order as in another.
        val = [line["val_loss"] for line in log(run_dir) if "val_loss" in line][-1]
        for options in ([], ["--seq-len", 64], ["--batch-size", 1]):
            score = json.loads(run("eval", "--model", run_dir, "--data", data, "--json", *options).stdout)
            self.assertAlmostEqual(score["val_loss"] / val, 1, delta=1e-5)
        self.assertFalse(os.path.exists(os.path.join(self.top, "nothing")))
        for words, options in ((["of 2", "examples are longer than --seq-len 16; raise it (the longest needs 3"], ["--seq-len", 16]),
                               (["--document-mask: packed examples"], ["--document-mask"]),
                               (["--pack examples: ", "is text, without examples"], ["--data", self.data, "--pack", "examples"])):
            kept = [x for key, value in zip(args[::2], args[1::2]) if key not in options for x in (key, value)]
            self.refused(1, words, *self.train_args("nothing", "--steps", 1, *kept, *options))
        skipped = run(*self.train_args("skipped", *args[:2], "--seq-len", 16, "--too-long", "skip", "--steps", 1))
        self.assertRegex(skipped.stderr, r"padding, 1\d\d longer examples left out\)")
        cut = run(*self.train_args("cut", *args, "--pack", "none", "--steps", 1))
        self.assertRegex(cut.stderr, r"training sequences \(\d+ tokens at the end left out\)")

    def test_info_shows_examples_with_their_loss_tokens(self):
        data = self.make_examples("shown", [("1 + 1 = ", "2"), ("[4] / 2 = ", "[2]"), ("3 = ", "3")], "--val", "0")
        done = run("info", "--data", data, "--show", 2)
        self.assertEqual(done.stdout, "--- example 1: 10 tokens, 2 of them loss tokens\n1 + 1 = [2<|endoftext|>]\n"
                                      "--- example 2: 14 tokens, 4 of them loss tokens\n[4] / 2 = [[2]<|endoftext|>]\n", done.stderr)
        lines = [json.loads(line) for line in run("info", data, "--show", 9, "--json").stdout.splitlines()]
        self.assertEqual(len(lines), 3)
        self.assertEqual(lines[0], {"tokens": 10, "loss_tokens": 2, "parts": [{"loss": False, "text": "1 + 1 = "},
                                                                              {"loss": True, "text": "2<|endoftext|>"}]})
        self.refused(1, ["is text, in which every token is a loss token"], "info", "--data", self.data, "--show", 1)
        self.refused(2, ["--show", "--data"], "info", "--show", 1)
        os.remove(os.path.join(data, "tokenizer.json"))
        self.refused(1, ["no tokenizer.json"], "info", data, "--show", 1)

    def test_sample_prompts(self):
        """Answers to given prompts while training: on the screen and in the log, the same in each run."""
        data = self.make_examples("asked", [(f"{i} = ", str(i)) for i in range(100)], "--val", "0")
        prompts = os.path.join(self.top, "prompts.txt")
        with open(prompts, "w") as file:
            file.write("7 = \n---\nsecond\nline\n")
        args = ["--data", data, "--seq-len", 48, "--batch-size", 2, "--steps", 4, "--sample-prompts", prompts]
        done = run(*self.train_args("asked_run", *args, "--sample-every", 2))
        self.assertEqual(done.returncode, 0, done.stderr)
        for step in (2, 4):
            self.assertIn(f"step {step}  prompt: 7 = \n  response: ", done.stderr)
        self.assertIn("  prompt: second\nline\n  response: ", done.stderr)
        lines = log(os.path.join(self.top, "asked_run"))
        samples = [line["samples"] for line in lines if "samples" in line]
        self.assertEqual([[sample["prompt"] for sample in entry] for entry in samples], [["7 = ", "second\nline"]] * 2)
        self.assertNotEqual(samples[0][0]["text"], samples[0][1]["text"])
        # Resumed: the prompts of run.toml, the same samples.
        resumed = os.path.join(self.top, "asked_run")
        self.assertEqual(run("train", "--resume", "--out", resumed, "--steps", 6).returncode, 0)
        self.assertEqual([line["samples"] for line in log(resumed) if "samples" in line][:2], samples)
        self.assertEqual([line["step"] for line in log(resumed) if "samples" in line], [2, 4, 6])
        with open(prompts, "w") as file:
            file.write("x" * 49)
        self.refused(1, ["prompt 1 of", "has 49 tokens, more than --seq-len 48"], *self.train_args("nothing", *args, "--sample-every", 1))
        self.refused(2, ["--sample-prompts", "add --sample-every"], *self.train_args("nothing", *args))
        self.refused(1, [os.path.join(self.top, "missing")], *self.train_args("nothing", *args[:-1], os.path.join(self.top, "missing"), "--sample-every", 1))

    def test_sample_prompts_are_user_turns_of_a_chat_template(self):
        base = self.train("asked_base", "--steps", 1, "--vocab-size", 300)
        model = os.path.join(self.top, "asked_model")
        shutil.copytree(os.path.join(base, checkpoints(base)[-1]), model)
        path = os.path.join(model, "tokenizer.json")
        with open(path) as file:
            tokenizer = json.load(file)
        for number, mark in enumerate(("<|im_start|>", "<|im_end|>")):
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 257 + number, "content": mark})
        with open(path, "w") as file:
            json.dump(tokenizer, file)
        with open(os.path.join(model, "chat_template.jinja"), "w") as file:
            file.write(CHAT_TEMPLATE)
        source, data, prompts = (os.path.join(self.top, name) for name in ("turns.jsonl", "turns", "turns.txt"))
        with open(source, "w") as file:
            for i in range(8):
                file.write(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}) + "\n")
        subprocess.run([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", source, "--tokenizer", model, "--val", "0", "--out",
                        data], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(prompts, "w") as file:
            file.write("Hi\n")
        args = ["train", "--model", model, "--data", data, "--batch-size", 2, "--seq-len", 64, "--steps", 80, "--lr", "2e-2", "--warmup", 5,
                "--sample-prompts", prompts, "--sample-every", 80, "--save-every", 0]
        done = run(*args, "--out", os.path.join(self.top, "turns_run"))
        self.assertEqual(done.returncode, 0, done.stderr)
        # The template's prompt is what was trained on, so the model knows the response, and that it ends.
        self.assertEqual(log(os.path.join(self.top, "turns_run"))[-1]["samples"], [{"prompt": "Hi", "text": "Yo"}], done.stderr)
        # The prompt ends with the start of the response: 8 tokens of the user turn around the text, 11 of the assistant's.
        with open(prompts, "w") as file:
            file.write("x" * 46)
        self.refused(1, ["prompt 1 of", "has 65 tokens, more than --seq-len 64"], *args, "--out", os.path.join(self.top, "nothing"))
        os.remove(os.path.join(model, "chat_template.jinja"))
        self.refused(1, ["was made with a chat template, but", "has none"], *args, "--out", os.path.join(self.top, "nothing"))

    def test_evaluation_of_packed_examples_is_that_of_each_alone(self):
        examples = [(f"{i:02} times {i * 7 % 30:02} is ", f"{i * (i * 7 % 30):04}") for i in range(60)]
        data = self.make_examples("alone", examples, "--val", "0.5")
        scores = [json.loads(run("eval", "--model", self.base, "--data", data, "--json", "--seq-len", n).stdout) for n in (19, 20, 37, 38, 64)]
        self.assertEqual(scores[0]["tokens"], 30 * 5)
        for score in scores:  # 19: each alone; 38 and more: two or three in a sequence
            self.assertEqual(score["tokens"], scores[0]["tokens"])
            self.assertAlmostEqual(score["val_loss"] / scores[0]["val_loss"], 1, delta=1e-6)
        done = run("eval", "--model", self.base, "--data", data, "--seq-len", 18, "--too-long", "skip")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("none of 30 examples fits into --seq-len 18; raise it (the longest needs 19)", done.stderr)

    def test_damaged_data(self):
        def damaged(name, change):
            folder = os.path.join(self.top, "damaged")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.data, folder)
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                blob = bytearray(file.read())
            with open(path, "wb") as file:
                file.write(change(blob))
            return folder, path
        token = lambda b: b[:1024 + 20] + struct.pack("<H", 300) + b[1024 + 22:]
        for name, change, words in (
            ("train_000000.bin", lambda b: b[:100], []), ("train_000000.bin", lambda b: b[:-1], []),
            ("train_000000.bin", lambda b: b"\1" + b[1:], ["not a token file"]), ("train_000000.bin", lambda b: b"", []),
            ("train_000000.bin", lambda b: b[:8] + b"\0\0\0\0" + b[12:1024], []),
            ("val_000000.bin", token, ["300"]), ("tokenizer.json", lambda b: b[:50], []), ("meta.json", lambda b: b"[1]", []),
            ("meta.json", lambda b: b.replace(b'"bytes"', b'"bites"', 1), ["key 'train.bytes' is missing"]),
            ("meta.json", lambda b: b.replace(b'"tokens": ', b'"tokens": 1', 1),
             ["'train.tokens' is 1", "train_*.bin holds "]),
            ("meta.json", lambda b: b.replace(b'"vocab_size": 257', b'"vocab_size": []'),
             ["'vocab_size' is [], expected"]),
        ):
            folder, path = damaged(name, change)
            if change is token:
                done = run("eval", "--model", self.base, "--data", folder)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
                self.assertIn(path, done.stderr)
                continue
            self.refused(1, [path, *words], "train", *MODEL, "--data", folder, "--out", self.top + "/x")
        shutil.rmtree(os.path.join(self.top, "damaged"))

    def test_damaged_checkpoint(self):
        for name, change in (
            ("config.json", lambda b: b[:20]), ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": 0')),
            ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": 3')), ("config.json", lambda b: b.replace(b'"n_head": 2', b'"n_head": "2"')),
            ("model.safetensors", lambda b: b[:-5]), ("model.safetensors", lambda b: b"\xff" * 8 + b[8:]),
            ("model.safetensors", lambda b: b.replace(b"F32", b"I32", 1)), ("model.safetensors", lambda b: b""),
        ):
            folder = os.path.join(self.top, "model_copy")
            shutil.copytree(os.path.join(self.base, "step_00000008"), folder)
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                blob = file.read()
            self.assertNotEqual(change(blob), blob, name)
            with open(path, "wb") as file:
                file.write(change(blob))
            self.refused(1, [path], "eval", "--model", folder, "--data", self.data)
            shutil.rmtree(folder)


if __name__ == "__main__":
    unittest.main()
