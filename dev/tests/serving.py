"""What tests of the server share: a model with a chat template, and `train_gpt serve` as a process."""
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import unittest

from harness import DRIVER, ENVIRONMENT, TrainingTest, checkpoints, run, tokenize

TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def checkpoint(run_dir):
    return os.path.join(run_dir, checkpoints(run_dir)[-1])


class ChatModelTest(TrainingTest):
    """Has a model with byte tokens and a chat template that answers Hi with Yo; its turns end with token 258.
    common: options of training it further."""

    @classmethod
    def setUpClass(cls):
        needs_serve()
        super().setUpClass()
        base = checkpoint(cls.train("base", "--model", "gpt2-tiny", "--layers", 2, "--channels", 32, "--heads", 2,
                                    "--max-positions", 256, "--vocab-size", 300, "--steps", 20))
        cls.add_chat_template(base)
        turns, data = os.path.join(cls.top, "turns.jsonl"), os.path.join(cls.top, "turns")
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
        with open(turns, "w") as file:
            file.write(8 * (json.dumps({"messages": messages}) + "\n"))
        tokenize(turns, data, "--val", "0", tokenizer=base)
        cls.common = ["--data", data, "--batch-size", 2, "--seq-len", 64, "--eval-every", 0, "--save-every", 0]
        trained = checkpoint(cls.train("trained", "--model", base, *cls.common, "--steps", 80, "--lr", "2e-2",
                                       "--warmup", 5))
        cls.model = os.path.join(cls.top, "tiny")
        shutil.copytree(trained, cls.model)

    @staticmethod
    def add_chat_template(model):
        path = os.path.join(model, "tokenizer.json")
        with open(path) as file:
            tokenizer = json.load(file)
        for number, mark in enumerate(("<|im_start|>", "<|im_end|>")):
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 257 + number, "content": mark})
        with open(path, "w") as file:
            json.dump(tokenizer, file)
        with open(os.path.join(model, "chat_template.jinja"), "w") as file:
            file.write(TEMPLATE)


def needs_serve():
    """Skips a test of a build without the HTTP library."""
    if "was built without" in run("serve", "--help").stderr:
        raise unittest.SkipTest("this build has no libmicrohttpd")


class Server:
    """The server as a process, once it says where it listens. `with` ends it."""

    def __init__(self, *args, env=None):
        command = [DRIVER, "serve", "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True,
                                        env={**ENVIRONMENT, "OMP_WAIT_POLICY": "passive", **(env or {})})
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"^serving .* at http://\S+:(\d+)", line)
            if found:
                break
        else:
            self.process.communicate()
            raise AssertionError(f"{command} ended: {''.join(self.lines)}")
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        # A pipe that nobody reads would stop the server.
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.printed()

    def printed(self):
        """What it has printed, once it has ended."""
        self.process.wait(60)
        self.reader.join()
        self.process.stdout.close()
        return "".join(self.lines)

    def ask(self, method, path, body=None, timeout=60, **headers):
        """(status, headers, body) of a request that may be wrong. A body of text or bytes is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()

    def post(self, path, value, **headers):
        """(status, JSON)"""
        status, _, body = self.ask("POST", path, value, **headers)
        return status, json.loads(body)

    def metrics(self):
        """{name and labels: value}, without the prefix train_gpt_."""
        lines = self.ask("GET", "/metrics")[2].splitlines()
        values = (line.removeprefix("train_gpt_").rsplit(" ", 1) for line in lines if line[0] != "#")
        return {name: float(value) for name, value in values}


class LoadedServer(Server):
    def complete(self, **fields):
        return self.post("/v1/completions", {"model": "m", **fields})

    def stream(self, **fields):
        """A socket on which the answer to a request for a stream comes."""
        body = json.dumps({"model": "m", "stream": True, **fields}).encode()
        s = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return s

    def count(self, name):
        return self.metrics()[name]

    def rss(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])


class Load:
    """Clients that ask for completions at random, some of them malformed, some to go away in the middle; each answer is
    compared with that of `sample`. context: of the server, whose name of the model is m; args: of `sample`."""

    def __init__(self, model, context, *args):
        self.kinds = []  # fields of a request, and the texts that answer it
        self.half = context // 2
        for i in range(8):
            prompt, seed, n = (f"The cat {i} sees" * (1 + 3 * (i % 3)))[:self.half - 1], i % 4, 1 + i % 2
            tokens = min(3 + 7 * i, self.half)
            options = {"top_k": 20} if i % 2 else {"temperature": 0.7, "repetition_penalty": 1.2}
            flags = ["--top-k", 20] if i % 2 else ["--temperature", 0.7, "--repeat-penalty", 1.2]
            done = run("sample", "--model", model, *args, "--prompt", prompt, "--seed", seed, "--max-tokens", tokens,
                       "--num-samples", n, "--json", *flags)
            if done.returncode:
                raise AssertionError(done.stderr)
            texts = [sample["text"] for sample in json.loads(done.stdout)["samples"]]
            self.kinds.append(({"prompt": prompt, "seed": seed, "max_tokens": tokens, "n": n, **options}, texts))

    def start(self, server, clients, seconds, server_ends=False):
        """server_ends: it may, so a client may lose its connection; what it has got by then must be right."""
        self.server, self.end, self.server_ends = server, time.time() + seconds, server_ends
        self.wrong, self.answers = [], 0
        self.clients = [threading.Thread(target=self.client, args=(random.Random(i),)) for i in range(clients)]
        for client in self.clients:
            client.start()

    def join(self):
        """What was wrong, once all clients have ended."""
        for client in self.clients:
            client.join()
        return self.wrong

    def client(self, choose):
        while time.time() < self.end and not self.wrong:
            fields, texts = choose.choice(self.kinds)
            what = choose.random()
            try:
                if what < 0.1:
                    body = choose.choice([b"{", b"[]", b"\xff\xfe", b'{"model": "m"}', b'{"model": "m", "prompt": 3}'])
                    status = self.server.ask("POST", "/v1/completions", body)[0]
                    if status != 400:
                        self.wrong.append(f"malformed: {status}")
                elif what < 0.25:  # goes away in the middle
                    with contextlib.closing(self.server.stream(**{**fields, "max_tokens": self.half})) as s:
                        s.recv(choose.choice([1, 200, 4000]))
                elif what < 0.6:
                    self.read_stream(fields, texts)
                else:
                    status, answer = self.server.complete(**fields)
                    if status == 200 and [choice["text"] for choice in answer["choices"]] != texts:
                        self.wrong.append(f"{fields}: {answer}, expected {texts}")
                    self.answers += status == 200
            except (OSError, http.client.HTTPException) as error:
                if not self.server_ends:
                    self.wrong.append(repr(error))
            except Exception as error:  # an answer that cannot be read: a thread that only ends would hide it
                self.wrong.append(f"{fields}: {error!r}")

    def read_stream(self, fields, texts):
        with contextlib.closing(self.server.stream(**fields)) as s:
            got = b""
            while b"[DONE]" not in got and b" 503 " not in got:
                part = s.recv(65536)
                if not part:
                    break
                got += part
        parts = [""] * len(texts)
        for line in re.findall(rb"data: (\{.*\})", got):
            for choice in json.loads(line).get("choices", []):
                parts[choice["index"]] += choice["text"]
        whole = b"[DONE]" in got
        right = parts == texts if whole else self.server_ends and all(map(str.startswith, texts, parts))
        if not right and b" 503 " not in got:
            self.wrong.append(f"{fields}: {parts}, expected {texts}")
        self.answers += whole
