#!/usr/bin/env python3
"""`serve` under load, with clients that misbehave or go away, and its end (TRAIN_GPT names the driver)."""
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import time
import unittest

from harness import DRIVER, SHIM, TrainingTest, run, sanitized
from serving import Load, LoadedServer, checkpoint, needs_serve

SECONDS = float(os.environ.get("SERVE_SECONDS", 6))  # of the random load


def rest(s):
    """What comes on a stream until it ends, or has an error."""
    got = b""
    while part := s.recv(65536):
        got += part
        if b"[DONE]" in got or b"\n" in got.partition(b'"error"')[2]:
            break
    return got


class ServeLoad(TrainingTest):
    @classmethod
    def setUpClass(cls):
        needs_serve()
        super().setUpClass()
        trained = cls.train("m-run", "--model", "llama-tiny", "--layers", 1, "--channels", 32,
                            "--heads", 2, "--ffn", 64, "--steps", 1, "--vocab-size", 257, "--lr", "1e-20",
                            "--max-positions", 16384)
        cls.model = checkpoint(trained)

    def server(self, *args, env=None):
        return LoadedServer("--model", self.model, "--name", "m", "--dtype", "fp32", *args, env=env)

    def eventually(self, what, seconds=20):
        end = time.time() + seconds
        while not what():
            self.assertLess(time.time(), end, "it does not happen")
            time.sleep(0.02)

    def test_random_load(self):
        """Every answer equals that of `sample`; nothing is left afterwards."""
        load, resident = Load(self.model, 1200, "--dtype", "fp32"), []
        with self.server("--slots", 6, "--context", 1200, "--max-queue", 40) as server:
            for seconds in (SECONDS / 3, SECONDS):
                load.start(server, 32, seconds)
                self.assertEqual(load.join()[:3], [])
                self.eventually(lambda: server.count("sequences_running") + server.count("pages_in_use") == 0)
                resident.append(server.rss())
            self.assertEqual(server.count("sequences_waiting"), 0)
            self.assertGreater(server.count("cancelled_total"), 0)
            self.assertGreater(load.answers, 30)
            if not sanitized():  # which keeps freed memory for a while, and looks for leaks itself
                self.assertLess(resident[1], 1.05 * resident[0] + 4000, "resident memory in KiB")

    def test_hostile_clients(self):
        """Idle and slow connections, large, deep and broken bodies: others are served meanwhile."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        many = min(1000, hard - 100)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 100), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with self.server("--slots", 2, "--context", 100) as server, contextlib.ExitStack() as stack:
            def connect(sent=b""):
                s = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
                if sent:
                    s.sendall(sent)
                return s

            def served():
                status, answer = server.complete(prompt="The cat", max_tokens=3, seed=1)
                self.assertEqual(status, 200, answer)

            for _ in range(many):
                connect()
            served()
            slow = [connect(b"POST /v1/completions HTTP/1.1\r\nHo"),
                    connect(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")]
            for byte in (b"s", b"t"):
                for s in slow:
                    s.sendall(byte)
                served()
            half = connect(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            half.shutdown(socket.SHUT_WR)
            large = connect(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n")
            self.assertIn(b" 413 ", large.recv(4096).split(b"\r\n")[0])
            connect(b"\x00\x01\x02 nonsense\r\n\r\n")
            connect(b"GET /" + b"a" * 100000)
            served()
            for body in (b"[" * 100000, b'{"model": "m", "prompt": "\xc3\x28"}', b'{"a":' * 5000, b"", b"null",
                         b'{"model": "m", "prompt": "a", "prompt": "b", "temperature": 1e999}'):
                status, _, answer = server.ask("POST", "/v1/completions", body)
                self.assertEqual(status, 400, answer)
                self.assertIn("message", json.loads(answer)["error"])
            chunked = connect(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                              b"10\r\n{\"prompt\": \"abc\"\r\n1\r\n}\r\n0\r\n\r\n")
            self.assertIn(b" 200 ", chunked.recv(4096).split(b"\r\n")[0])
            served()
            self.eventually(lambda: server.count("pages_in_use") == 0)

    def test_a_client_that_goes_away(self):
        with self.server("--slots", 2, "--context", 16000) as server:
            def running():
                return server.count("sequences_running")
            streams = [server.stream(prompt=text, max_tokens=15900, ignore_eos=True) for text in "abc"]
            self.eventually(lambda: running() == 2 and server.count("sequences_waiting") == 1)
            for s in streams[::-1]:  # first the one that waits
                s.close()
            self.eventually(lambda: running() == 0 and server.count("pages_in_use") == 0)
            body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 15900, "ignore_eos": True}).encode()
            s = socket.create_connection(("127.0.0.1", server.port))
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                      % len(body) + body)
            self.eventually(lambda: running() == 1)
            s.close()
            self.eventually(lambda: running() == 0)
            self.assertEqual(server.count("cancelled_total"), 4)

    def test_a_slot_is_free_at_once(self):
        """Where a client that waits for a whole answer goes away, the next request starts with the next step."""
        body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 15900, "ignore_eos": True}).encode()
        at_once = 0
        with self.server("--slots", 1, "--context", 16000) as server:
            alone = []  # seconds of the next request in a free slot
            for _ in range(5):
                begin = time.monotonic()
                with contextlib.closing(server.stream(prompt="b", max_tokens=1)) as s:
                    self.assertIn(b"[DONE]", rest(s))
                alone.append(time.monotonic() - begin)
            limit = 2 * statistics.median(alone) + 0.01
            for i in range(11):
                leaves = socket.create_connection(("127.0.0.1", server.port))
                leaves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                               % len(body) + body)
                self.eventually(lambda: server.count("sequences_running") == 1)
                with contextlib.closing(server.stream(prompt="b", max_tokens=1)) as waits:
                    self.eventually(lambda: server.count("sequences_waiting") == 1)
                    time.sleep(0.005 * i)
                    begin = time.monotonic()
                    leaves.close()
                    self.assertIn(b"[DONE]", rest(waits))
                    at_once += time.monotonic() - begin < limit
                self.eventually(lambda: server.count("sequences_running") == 0)
        self.assertGreaterEqual(at_once, 7)  # on a busy machine some come late

    def test_chunks_of_prompts(self):
        """--prefill-chunk: the tokens that one sequence gets while a long prompt of the same request is computed."""
        def tokens_before(*args):
            with self.server("--slots", 2, "--context", 2000, *args) as server:
                with contextlib.closing(server.stream(prompt=["a", "b" * 1280], logprobs=0, max_tokens=40,
                                                      ignore_eos=True)) as s:
                    events = re.findall(rb"^data: (\{.*\})", rest(s), re.M)
                    return [json.loads(event)["choices"][0]["index"] for event in events].index(1)
        self.assertGreaterEqual(tokens_before("--prefill-chunk", 128), 9)
        self.assertLessEqual(tokens_before("--prefill-chunk", 1280), 4)
        for chunk, words in ((100, "100 is not a multiple of 128"), (0, "0 is not a whole number of at least 1")):
            self.refused(2, [f"--prefill-chunk: {words}"], "serve", "--model", self.model, "--prefill-chunk", chunk)

    def test_a_full_queue(self):
        with self.server("--slots", 1, "--context", 16000, "--max-queue", 1) as server:
            streams = [server.stream(prompt="a", max_tokens=15900, ignore_eos=True) for _ in range(2)]
            self.eventually(lambda: server.count("sequences_waiting") == 1)
            status, headers, body = server.ask("POST", "/v1/completions", {"model": "m", "prompt": "a"})
            self.assertEqual((status, headers["Retry-After"]), (503, "1"), body)
            for s in streams:
                s.close()
            self.eventually(lambda: server.complete(prompt="a", max_tokens=2)[0] == 200)

    def test_who_may_ask(self):
        keys = os.path.join(self.top, "keys")
        with open(keys, "w") as file:
            file.write("alpha\n\nbeta \n")
        with self.server("--context", 100, "--api-key-file", keys, "--cors-origin", "https://a.example") as server:
            def status(path="/v1/models", method="GET", **headers):
                return server.ask(method, path, **headers)[0]
            self.assertEqual((status("/"), status("/health"), status(), status("/metrics")), (200, 200, 401, 401))
            for key, expected in (("alpha", 200), ("beta", 200), ("alph", 401), ("alphaa", 401), ("", 401)):
                self.assertEqual(status(Authorization=f"Bearer {key}"), expected, key)
            self.assertEqual(server.post("/tokenize", {})[1]["error"]["type"], "authentication_error")
            self.assertEqual(status(Authorization="alpha"), 401)
            good = {"Authorization": "Bearer beta"}
            self.assertEqual(status(Origin="https://a.example", **good), 200)
            self.assertEqual(status(Origin="https://b.example", **good), 403)
            answer = server.ask("OPTIONS", "/v1/models", Origin="https://a.example")
            self.assertEqual((answer[0], answer[1]["Access-Control-Allow-Origin"]), (204, "https://a.example"))
            server.process.send_signal(signal.SIGTERM)
            printed = server.printed()
            self.assertNotIn("alpha", printed)
            self.assertNotIn("beta", printed)
            self.assertNotIn("without --api-key-file", printed)
        with self.server("--context", 100) as server:
            for path in "/v1/models", "/", "/metrics":
                self.assertEqual(server.ask("GET", path, Host="evil.example:80")[0], 403, path)
                self.assertEqual(server.ask("GET", path, Origin="null")[0], 403, path)
            own = server.ask("GET", "/v1/models", Origin=server.url)
            self.assertEqual((own[0], own[1]["Access-Control-Allow-Origin"]), (200, None))
            for host in ("localhost", "127.0.0.1:80", "[::1]:8080", "10.1.2.3"):
                self.assertEqual(server.ask("GET", "/v1/models", Host=host)[0], 200, host)
            taken = subprocess.run([DRIVER, "serve", "--model", self.model, "--dtype", "fp32", "--context", "100",
                                    "--port", str(server.port)], capture_output=True, text=True)
            self.assertEqual((taken.returncode, taken.stderr.count("\n")), (1, 1), taken.stderr)
            self.assertIn(f"port {server.port} of 127.0.0.1: Address already in use", taken.stderr)

    def test_all_addresses(self):
        """--host 0.0.0.0 without keys: a warning."""
        with self.server("--context", 100, "--host", "0.0.0.0") as server:
            self.assertEqual(server.complete(prompt="a", max_tokens=1)[0], 200)
            self.assertIn("train_gpt: --host 0.0.0.0 without --api-key-file: everybody who reaches this machine may use "
                          "the model\n", server.lines)

    def test_prefixes_of_keys(self):
        """A prompt that the same key has sent before is found in the cache, and not that of another key."""
        keys = os.path.join(self.top, "keys_of_prefixes")
        with open(keys, "w") as file:
            file.write("alpha\nbeta\n")
        with self.server("--context", 2000, "--slots", 2, "--host", "0.0.0.0", "--api-key-file", keys) as server:
            self.assertNotIn("without --api-key-file", "".join(server.lines))

            def computed(key):
                def counts():
                    text = server.ask("GET", "/metrics", Authorization=f"Bearer {key}")[2]
                    return [int(re.search(rf"(?m)^train_gpt_{name} (\d+)", text)[1])
                            for name in ("prefill_tokens_total", "sequences_running")]
                before = counts()[0]
                fields = {"model": "m", "prompt": "The cat " * 100, "max_tokens": 2}
                status, answer = server.post("/v1/completions", fields, Authorization=f"Bearer {key}")
                self.assertEqual(status, 200, answer)
                self.eventually(lambda: counts()[1] == 0)
                return counts()[0] - before
            first = computed("alpha")
            self.assertGreaterEqual(first, 800)
            self.assertLessEqual(computed("alpha"), 128)
            self.assertEqual(computed("beta"), first)
            self.assertLessEqual(computed("beta"), 128)

    def test_sizes_that_memory_holds(self):
        with self.server() as server:
            slots, context, pages = map(int, re.search(
                r": (\d+) slots, a context of (\d+) tokens, (\d+) pages of 128 tokens\n", "".join(server.lines)).groups())
            self.assertGreater(slots, 0)
            self.assertGreaterEqual(context, 512)
            self.assertLessEqual(context, 16384)
            self.assertGreaterEqual(pages * 128, context)
            self.assertEqual(server.count("pages"), pages)
            (model,) = json.loads(server.ask("GET", "/v1/models")[2])["data"]
            self.assertEqual(model["max_model_len"], context)

    def test_a_body_of_unknown_length(self):
        """A chunked body beyond 16 MiB gets 413, and others are served meanwhile. One that does not end is cut."""
        def body(mebibytes):
            yield b'{"model": "m", "prompt": "'
            for _ in range(mebibytes):
                yield b"a" * (1 << 20)
                self.assertEqual(server.complete(prompt="a", max_tokens=1)[0], 200)
            yield b'"}'
        with self.server("--slots", 1, "--context", 100) as server:
            for mebibytes, expected, words in ((15, 400, "exceeds the context"), (17, 413, "too large")):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                with contextlib.closing(connection):
                    connection.request("POST", "/v1/completions", body(mebibytes))
                    response = connection.getresponse()
                    self.assertEqual(response.status, expected)
                    self.assertIn(words, json.loads(response.read())["error"]["message"])
            with self.assertRaises(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                with contextlib.closing(connection):
                    connection.request("POST", "/v1/completions", body(200))

    def test_the_end(self):
        """SIGTERM: the running request ends, new ones are refused; with no time left its stream has an error."""
        with self.server("--context", 16000) as server:
            s = server.stream(prompt="a", max_tokens=1500 if sanitized() else 6000, ignore_eos=True)
            self.eventually(lambda: server.count("sequences_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            self.eventually(lambda: server.complete(prompt="a", max_tokens=1)[0] == 503)
            self.assertIn(b"[DONE]", rest(s))
            self.assertEqual(server.process.wait(20), 0)
        with self.server("--context", 16000, "--drain-timeout", 0.1) as server:
            s = server.stream(prompt="a", max_tokens=15900, ignore_eos=True)
            self.eventually(lambda: server.count("sequences_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            got = rest(s)
            self.assertIn(b"the server is stopping", got)
            self.assertEqual(server.process.wait(20), 0)
        # A second SIGTERM does not wait.
        with self.server("--context", 16000, "--drain-timeout", 3600) as server:
            with contextlib.closing(server.stream(prompt="a", max_tokens=15900, ignore_eos=True)):
                self.eventually(lambda: server.count("sequences_running") == 1)
                server.process.send_signal(signal.SIGTERM)
                self.eventually(lambda: server.complete(prompt="a", max_tokens=1)[0] == 503)
                self.assertEqual(server.count("sequences_running"), 1)
                server.process.send_signal(signal.SIGTERM)
                self.assertEqual(server.process.wait(20), -signal.SIGTERM)

    def test_a_fault(self):
        """The engine fails in a step: every open stream gets all that was sent and an error, also where its client reads
        late; what waits gets status 500; the server ends with one line."""
        if sanitized():
            self.skipTest("AddressSanitizer must be the first library, so no other can be preloaded")
        out_of_memory = os.path.join(self.top, "out_of_memory")
        env = {"LD_PRELOAD": SHIM, "CRASH_SHIM_MEMORY": out_of_memory}
        with self.server("--context", 16000, "--slots", 2, env=env) as server, contextlib.ExitStack() as stack:
            def stream(prompt, **fields):
                fields = {"max_tokens": 15900, "ignore_eos": True, **fields}
                return stack.enter_context(contextlib.closing(server.stream(prompt=prompt, **fields)))
            started = len(server.lines)
            late, read = stream("a", logprobs=20), stream("b")
            self.eventually(lambda: server.count("sequences_running") == 2)
            waiting = stream("c")
            self.eventually(lambda: server.count("sequences_waiting") == 1)
            # What the client has not read takes twice the memory now and then, from 1 MiB to 32.
            open(out_of_memory, "w").close()
            fault = b"std::bad_alloc"
            self.assertIn(fault, rest(read))
            got = rest(late)
            self.assertGreater(len(got), 1 << 19)
            self.assertIn(fault, got)
            self.assertRegex(rest(waiting), b"^HTTP/1.1 500 (?s:.)*" + fault)
            self.assertEqual(server.process.wait(20), 1)
            self.assertEqual(server.printed().splitlines()[started:],
                             ["train_gpt: serve: out of memory; see what a run needs with 'train_gpt plan'"])


if __name__ == "__main__":
    unittest.main()
