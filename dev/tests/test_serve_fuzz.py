#!/usr/bin/env python3
"""Damaged bodies of requests to `serve`: each is answered, in OpenAI's form, and the server goes on (TRAIN_GPT names the
driver). CI runs it for a minute with the sanitizers; FUZZ_SECONDS sets the time, FUZZ_SEED other bodies."""
import copy
import http.client
import json
import os
import random
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

from harness import sanitized
from serving import ChatModelTest, Server

SECONDS = float(os.environ.get("FUZZ_SECONDS", 60 if sanitized() else 3))
SEED = int(os.environ.get("FUZZ_SEED", 1))
HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
COMMON = {"model": "tiny", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 3,
          "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["x", "yz"], "n": 2,
          "stream": False, "ignore_eos": True}
BODIES = [("/v1/completions", {**COMMON, "prompt": ["The h", "Hi"], "echo": True, "logprobs": 2}),
          ("/v1/completions", {**COMMON, "prompt": [[84, 104], [72]], "stream": True,
                               "stream_options": {"include_usage": True}}),
          ("/v1/chat/completions", {**COMMON, "messages": HI, "logprobs": True, "top_logprobs": 3}),
          ("/v1/chat/completions", {**COMMON, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                                    "stream": True, "max_completion_tokens": 3}),
          ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}), ("/tokenize", {"messages": HI}),
          ("/detokenize", {"tokens": [72, 105]})]
VALUES = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, -2**63, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308, "", "x", "\0", "\ud800",
          "\U0010ffff", "<|im_end|>", "é" * 50, "a" * 5000, [], {}, [[]], [None], {"": {}}, [1, "a"], ["a"] * 300, HI]
BYTES = [b"\0", b"\xff", b"\xc3", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"e", b"-", b"\\u0000", b"\\ud800", b"NaN", b"1e999"]


def places(value):
    """(container, key) of everything in it."""
    for key in list(value if isinstance(value, dict) else range(len(value))):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def damaged(rng, body):
    """The bytes of a body with one to three mistakes."""
    tree = copy.deepcopy(body)
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        # A body that has lost everything can only get something.
        container, key = rng.choice(list(places(tree)) or [(None, None)])
        what = 1 if container is None else rng.random()
        if what < 0.75:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif what < 0.85:
            del container[key]
        else:
            tree[rng.choice(["", "prompt", "messages", "stop", "tools", "suffix", "best_of", "response_format", "ü"])] = \
                copy.deepcopy(rng.choice(VALUES))
    raw = bytearray(json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.3:
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice([0, 0, 1, 1, 20]))
        raw[at:end] = b"" if rng.random() < 0.2 else rng.choice(BYTES) * rng.choice([1, 1, 1, 2, 3000])
    return bytes(raw)


class ServeFuzz(ChatModelTest):
    def client(self, server, seed, end, wrong, statuses):
        rng = random.Random(seed)
        while time.time() < end and not wrong:
            path, body = rng.choice(BODIES)
            raw = damaged(rng, body)
            try:
                status, headers, answer = server.ask("POST", path, raw)
                statuses[status] = statuses.get(status, 0) + 1
                if headers["Content-Type"].startswith("text/event-stream"):
                    events = [event for event in answer.split("\n\n") if event]
                    parsed = [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]
                    right = status == 200 and (events[-1] == "data: [DONE]" or "error" in parsed[-1])
                else:
                    value = json.loads(answer)
                    right = status == 200 or (status in (400, 404, 503) and "\n" not in value["error"]["message"] and
                                              set(value["error"]) == {"message", "type", "param", "code"})
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                right, answer, status = False, repr(error), 0
            if not right:
                wrong.append(f"{path} {raw[:2000]!r}: {status} {answer[:2000]}")

    def test_damaged_bodies(self):
        with Server("--model", self.model, "--context", 60, "--slots", 4) as server:
            valid = {**COMMON, "prompt": "The h", "temperature": 0}
            before = server.post("/v1/completions", valid)[1]["choices"]
            wrong, statuses, end = [], {}, time.time() + SECONDS
            with ThreadPoolExecutor(4) as pool:
                clients = [pool.submit(self.client, server, f"{SEED} {i}", end, wrong, statuses) for i in range(4)]
            for client in clients:
                client.result()  # raises what ended it
            self.assertEqual(wrong[:2], [])
            self.assertGreater(min(statuses[200], statuses[400]), 20, statuses)
            self.assertEqual(server.post("/v1/completions", valid)[1]["choices"], before)
            server.process.terminate()
            said = server.printed()
            self.assertEqual(server.process.returncode, 0, said)
            self.assertNotIn("Sanitizer", said)


if __name__ == "__main__":
    unittest.main()
