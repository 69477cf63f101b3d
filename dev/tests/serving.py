"""What tests of the server share: a model with a chat template, and `train_gpt serve` as a process."""
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading

from harness import DRIVER, ENVIRONMENT, checkpoints

TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def checkpoint(run_dir):
    return os.path.join(run_dir, checkpoints(run_dir)[-1])


def add_chat_template(model, copy):
    """A copy of a model with byte tokens and a vocabulary of 259 or more that has a chat template; its turns end with
    token 258."""
    shutil.copytree(model, copy)
    path = os.path.join(copy, "tokenizer.json")
    with open(path) as file:
        tokenizer = json.load(file)
    for number, mark in enumerate(("<|im_start|>", "<|im_end|>")):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 257 + number, "content": mark})
    with open(path, "w") as file:
        json.dump(tokenizer, file)
    with open(os.path.join(copy, "chat_template.jinja"), "w") as file:
        file.write(TEMPLATE)
    return copy


class Server:
    """The server as a process, once it says where it listens."""

    def __init__(self, *args):
        command = [DRIVER, "serve", "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env={**ENVIRONMENT, "OMP_WAIT_POLICY": "passive"}, text=True)
        self.lines = []
        self.port = 0
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"^serving .* at http://\S+:(\d+)", line)
            if found:
                self.port = int(found[1])
                break
        if not self.port:
            raise AssertionError(f"{command} ended: {''.join(self.lines)}")
        self.url = f"http://127.0.0.1:{self.port}"
        # A pipe that nobody reads would stop the server.
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def stop(self, how=signal.SIGTERM):
        """Ends it. Returns its status and what it printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
        self.reader.join()
        self.process.stdout.close()
        return status, "".join(self.lines)

    def request(self, method, path, body=None, **headers):
        """(status, headers, body) of a request whose body may be wrong."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def get(self, path, **headers):
        return self.request("GET", path, **headers)

    def post(self, path, value, **headers):
        """(status, JSON) of a request with a value as JSON."""
        status, _, body = self.request("POST", path, json.dumps(value), **{"Content-Type": "application/json", **headers})
        return status, json.loads(body)

    def metrics(self):
        """{name with labels: value}"""
        lines = self.get("/metrics")[2].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
