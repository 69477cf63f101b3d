"""What tests of the server share: a model with a chat template, and `train_gpt serve` as a process."""
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
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

    def __init__(self, *args):
        command = [DRIVER, "serve", "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True,
                                        env={**ENVIRONMENT, "OMP_WAIT_POLICY": "passive"})
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
