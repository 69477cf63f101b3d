#!/usr/bin/env python3
"""`serve`: what clients of OpenAI's API send and get. Texts are those of `sample` with the same seed and options."""
import concurrent.futures
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
import unittest

from harness import ROOT, cuda, run, text_of
from serving import ChatModelTest, Server, checkpoint

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import check_docs  # noqa: E402

try:
    import openai
except ImportError:
    openai = None

OPTIONS = ["--dtype", "fp32", *(["--batch-invariant"] if cuda() else [])]
HI = [{"role": "user", "content": "Hi"}]
GAUGES = ["sequences_running", "sequences_waiting", "pages_in_use"]
NEEDS_OPENAI = unittest.skipUnless(openai, "needs Python's openai (make venv)")


class ServeTest(ChatModelTest):
    """One server for all tests, with an adapter of the model."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.adapter = checkpoint(cls.train("adapter", "--model", cls.model, *cls.common, "--steps", 6, "--lora-rank", 4,
                                           "--lr", "0.3"))
        cls.server = Server("--model", cls.model, "--adapter", f"tuned={cls.adapter}", "--slots", 3, "--context", 200,
                            *OPTIONS)
        cls.addClassCleanup(cls.server.__exit__)

    def samples(self, *args):
        done = run("sample", "--model", self.model, "--json", *OPTIONS, *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["samples"]

    def ask(self, path="completions", **fields):
        """The response to a request that has no fault."""
        chat = {"messages": HI} if path.startswith("chat") else {}
        status, response = self.server.post(f"/v1/{path}", {"model": "tiny", **chat, **fields})
        self.assertEqual(status, 200, response)
        return response

    def client(self, **options):
        return openai.OpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0, timeout=60, **options)

    def assert_samples(self, response, samples):
        self.assertEqual([choice["index"] for choice in response["choices"]], list(range(len(samples))))
        for choice, sample in zip(response["choices"], samples):
            self.assertEqual(choice["text"], sample["text"])
            self.assertEqual(choice["finish_reason"], "length" if sample["finish"] == "length" else "stop")

    def test_completions_are_those_of_sample(self):
        cases = [
            ({}, []),
            ({"seed": 7, "n": 3}, ["--seed", 7, "--num-samples", 3]),
            ({"temperature": 0, "max_tokens": 3}, ["--temperature", 0, "--max-tokens", 3]),
            ({"temperature": 1.7, "top_k": 9}, ["--temperature", 1.7, "--top-k", 9]),
            ({"temperature": 2, "top_p": 0.8}, ["--temperature", 2, "--top-p", 0.8]),
            ({"temperature": 2, "min_p": 0.02}, ["--temperature", 2, "--min-p", 0.02]),
            ({"temperature": 1.5, "repetition_penalty": 1.3}, ["--temperature", 1.5, "--repeat-penalty", 1.3]),
            ({"temperature": 1.5, "presence_penalty": 1.25}, ["--temperature", 1.5, "--presence-penalty", 1.25]),
            ({"temperature": 1.5, "frequency_penalty": -0.5}, ["--temperature", 1.5, "--frequency-penalty", -0.5]),
            ({"temperature": 1.5, "ignore_eos": True}, ["--temperature", 1.5, "--ignore-eos"]),
            ({"temperature": 2, "stop": ["e", "o"]}, ["--temperature", 2, "--stop", "e", "--stop", "o"]),
            ({"temperature": 2, "stop": "a", "ignore_eos": True}, ["--temperature", 2, "--stop", "a", "--ignore-eos"]),
            ({"model": "tuned", "n": 2}, ["--adapter", self.adapter, "--num-samples", 2]),
        ]
        # All at once, twice and in another order: a response does not depend on its neighbours.
        again = cases + cases
        random.Random(1).shuffle(again)
        defaults = {"prompt": "The h", "seed": 42, "max_tokens": 40}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(lambda case: self.ask(**{**defaults, **case[0]}), again))
        expected = {}
        for fields, options in cases:
            options = options if "--max-tokens" in options else [*options, "--max-tokens", 40]
            expected[json.dumps(fields)] = self.samples("--prompt", "The h", *options)
        for (fields, _), response in zip(again, responses):
            with self.subTest(fields):
                self.assert_samples(response, expected[json.dumps(fields)])
                usage = response["usage"]
                self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
                # At its end a completion has a token that is no part of its text.
                lengths = [len(sample["tokens"]) for sample in expected[json.dumps(fields)]]
                self.assertEqual(usage["completion_tokens"], sum(lengths))
        free = {"prompt": "", "temperature": 2, "max_tokens": 190, "ignore_eos": True}
        self.assertNotEqual(self.ask(**free)["choices"], self.ask(**free)["choices"])  # each its own seed

    def test_prompts(self):
        """Lists of prompts, token ids, and the empty prompt."""
        prompts = ["The h", "Hi", "<|im_end|>", "\u00fc \U0001f600"]
        path = os.path.join(self.top, "prompts.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n---\n".join(prompts) + "\n")
        options = {"seed": 3, "max_tokens": 20, "temperature": 1.5}
        args = ["--seed", 3, "--max-tokens", 20, "--temperature", 1.5]
        samples = self.samples("--prompt-file", path, "--num-samples", 2, *args)
        self.assert_samples(self.ask(prompt=prompts, n=2, **options), samples)
        ids = [self.server.post("/tokenize", {"model": "tiny", "prompt": prompt})[1]["tokens"] for prompt in prompts]
        self.assertLess(max(map(max, ids)), 256)  # what is typed is no special token
        self.assert_samples(self.ask(prompt=ids, n=2, **options), samples)
        self.assert_samples(self.ask(prompt=ids[1], **options), self.samples("--prompt", "Hi", *args))
        self.assert_samples(self.ask(prompt="", **options), self.samples("--prompt", "", *args))

    def test_chat(self):
        response = self.ask("chat/completions", messages=HI, temperature=0)
        (choice,) = response["choices"]
        self.assertEqual((choice["message"]["role"], choice["message"]["content"], choice["finish_reason"]),
                         ("assistant", "Yo", "stop"))
        rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        status, tokenized = self.server.post("/tokenize", {"messages": HI})
        self.assertEqual((status, tokenized["count"]), (200, len("_user\nHi_\n_assistant\n")))
        self.assertEqual(response["usage"]["prompt_tokens"], tokenized["count"])
        self.assertEqual(self.server.post("/detokenize", {"tokens": tokenized["tokens"]}), (200, {"prompt": rendered}))
        # The same tokens as a prompt; content in parts; what a user types stays text.
        options = {"seed": 5, "temperature": 2, "max_tokens": 30, "ignore_eos": True}
        text = self.ask(prompt=tokenized["tokens"], **options)["choices"][0]["text"]
        for content in "Hi", [{"type": "text", "text": "Hi"}]:
            chat = self.ask("chat/completions", messages=[{"role": "user", "content": content}], **options)
            self.assertEqual(chat["choices"][0]["message"]["content"], text)
        typed = [{"role": "system", "content": ""}, {"role": "user", "content": "<|im_end|>"}]
        tokens = self.server.post("/tokenize", {"messages": typed})[1]["tokens"]
        self.assertEqual(len(tokens), len("_system\n_\n_user\n<|im_end|>_\n_assistant\n"))
        most = self.ask("chat/completions", temperature=0, max_completion_tokens=1)["choices"][0]
        self.assertEqual((most["message"]["content"], most["finish_reason"]), ("Y", "length"))
        # Without a limit a response may fill the context.
        full = self.ask("chat/completions", temperature=0, ignore_eos=True)
        self.assertEqual((full["usage"]["total_tokens"], full["choices"][0]["finish_reason"]), (200, "length"))

    def test_tokenize(self):
        for text in "", "abc", "Tsch\u00fc\u00df \U0001f600":
            status, response = self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
            ids = list(text.encode())
            self.assertEqual((status, response), (200, {"tokens": ids, "count": len(ids), "max_model_len": 200}))
            self.assertEqual(self.server.post("/detokenize", {"tokens": response["tokens"]}), (200, {"prompt": text}))
        for path, body, words in [
            ("/tokenize", {}, "'prompt' is missing"),
            ("/tokenize", {"prompt": 5}, "'prompt' is 5; expected a string"),
            ("/tokenize", {"prompt": "x", "other": 1}, "'other' is not supported"),
            ("/detokenize", {}, "'tokens' is missing"),
            ("/detokenize", {"tokens": [1, 300]}, "token ids from 0 to 299"),
            ("/detokenize", {"tokens": [-1]}, "token ids from 0 to 299"),
            ("/detokenize", {"tokens": ["a"]}, "token ids from 0 to 299"),
        ]:
            status, response = self.server.post(path, body)
            self.assertEqual(status, 400, response)
            self.assertIn(words, response["error"]["message"])

    def test_logprobs(self):
        args = ["--prompt", "The h", "--max-tokens", 12, "--temperature", 1.5, "--ignore-eos", "--top-logprobs", 3]
        (sample,) = self.samples(*args)
        asked = {"prompt": "The h", "max_tokens": 12, "temperature": 1.5, "ignore_eos": True, "seed": 42}
        response = self.ask(**asked, logprobs=3)["choices"][0]
        self.assertEqual(response["text"], sample["text"])
        logprobs = response["logprobs"]
        for name in "tokens", "token_logprobs", "top_logprobs", "text_offset":
            self.assertEqual(len(logprobs[name]), 12, name)
        # On a GPU the server's engine, which has an adapter, has other kernels than that of sample: sums in another order.
        # With all sums of this model in random order, by an emulation in fp32, the largest standard deviation of a
        # log-probability is 2.5e-6, sqrt(2) times as much between two orders; six of those.
        delta = 2.2e-5 if cuda() else 1e-6
        for i, (got, expected) in enumerate(zip(logprobs["token_logprobs"], sample["logprobs"])):
            self.assertAlmostEqual(got, expected, delta=delta)
            most_likely = sample["top_logprobs"][i]
            for one in most_likely:
                # Of tokens with the same text (bytes that are no character) a JSON object has one.
                if [other["text"] for other in most_likely].count(one["text"]) == 1:
                    self.assertAlmostEqual(logprobs["top_logprobs"][i][one["text"]], one["logprob"], delta=delta)
        whole = self.ask(**asked, logprobs=0)["choices"][0]["logprobs"]
        self.assertEqual(whole["token_logprobs"], logprobs["token_logprobs"])
        # The same ones of a prompt that ends with these tokens.
        ids = self.server.post("/tokenize", {"prompt": "The h"})[1]["tokens"]
        echo = self.ask(prompt=ids + sample["tokens"], echo=True, logprobs=3, max_tokens=0)
        self.assertEqual(echo["usage"]["completion_tokens"], 0)
        (choice,) = echo["choices"]
        self.assertEqual(choice["finish_reason"], "length")
        read = choice["logprobs"]
        self.assertEqual((read["token_logprobs"][0], read["top_logprobs"][0]), (None, None))
        for got, expected in zip(read["token_logprobs"][len(ids):], sample["logprobs"], strict=True):
            self.assertAlmostEqual(got, expected, delta=1e-4)
        self.assertEqual(read["tokens"][:len(ids)], list("The h")[-len(ids):])
        text = self.ask(prompt="The h", echo=True, max_tokens=5, logprobs=1, ignore_eos=True)["choices"][0]
        self.assertTrue(text["text"].startswith("The h"))
        self.assertEqual(len(text["logprobs"]["tokens"]), len(ids) + 5)
        self.assertEqual(text["logprobs"]["text_offset"][:5], list(range(5)))
        for offset, token in zip(text["logprobs"]["text_offset"], text["logprobs"]["tokens"]):
            self.assertTrue(text["text"][offset:].startswith(token) or "\ufffd" in token)
        # An end token is no text, but has an entry.
        turn = self.server.post("/tokenize", {"messages": HI})[1]["tokens"]
        ended = self.ask(prompt=turn, temperature=0, logprobs=1)["choices"][0]
        self.assertEqual((ended["text"], ended["logprobs"]["tokens"]), ("Yo", ["Y", "o", "<|im_end|>"]))
        echo = self.ask(prompt=[*turn, *b"Yo", 258], echo=True, logprobs=1, max_tokens=0)["choices"][0]
        for i, logprob in enumerate(ended["logprobs"]["token_logprobs"]):
            self.assertAlmostEqual(logprob, echo["logprobs"]["token_logprobs"][i - 3], delta=1e-4)
        plain = self.ask(prompt=["The h", "Hi"], echo=True, max_tokens=0)
        self.assertEqual([choice["text"] for choice in plain["choices"]], ["The h", "Hi"])

    def test_streams(self):
        """The events of a stream hold what the whole response has."""
        for fields in [
            {}, {"n": 2, "prompt": ["The h", "Hi", ""]}, {"logprobs": 0}, {"logprobs": 4, "n": 2}, {"echo": True},
            {"echo": True, "logprobs": 2, "prompt": ["The h", "\u00fc"]}, {"max_tokens": 1, "logprobs": 1},
            {"echo": True, "logprobs": 1, "max_tokens": 0}, {"echo": True, "max_tokens": 0},
            {"stop": ["e"], "logprobs": 1, "echo": True}, {"temperature": 0, "logprobs": 3},
            {"ignore_eos": True, "max_tokens": 100, "logprobs": 1, "n": 3},
        ]:
            fields = {"prompt": "The h", "seed": 11, "temperature": 2, "max_tokens": 30, **fields}
            with self.subTest(fields):
                whole = self.ask(**fields)["choices"]
                status, headers, body = self.server.ask("POST", "/v1/completions",
                                                        {"model": "tiny", "stream": True, **fields})
                self.assertEqual((status, headers["Content-Type"]), (200, "text/event-stream; charset=utf-8"))
                *events, done, rest = body.split("\n\n")
                self.assertEqual((done, rest), ("data: [DONE]", ""))
                self.assertEqual(self.joined(events), whole)

    @staticmethod
    def joined(events):
        """The choices that the events of a stream are parts of."""
        choices = {}
        for event in events:
            (part,) = json.loads(event.removeprefix("data: "))["choices"]
            whole = choices.setdefault(part["index"], part)
            if whole is part:
                continue
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            whole["logprobs"] = whole["logprobs"] or part["logprobs"]
            if part["logprobs"] and whole["logprobs"] is not part["logprobs"]:
                for name, values in part["logprobs"].items():
                    whole["logprobs"][name] = values and whole["logprobs"][name] + values
        return [choice for _, choice in sorted(choices.items())]

    def test_scores_of_eval(self):
        """What lm-evaluation-harness sends (local-completions) and reads gives the scores of eval."""
        passages = [("Hi", "there"), ("The cat sees 3 of the", "red stones."), ("<|im_end|>", "\u00fc"), ("Y", "o")]
        path = os.path.join(self.top, "passages.jsonl")
        with open(path, "w") as file:
            for context, ending in passages:
                file.write(json.dumps({"ctx": context, "endings": [ending], "label": 0}) + "\n")
        done = run("eval", "--model", self.model, "--dtype", "fp32", "--multiple-choice", path, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)

        def ids(text):
            return self.server.post("/tokenize", {"prompt": text})[1]["tokens"]

        response = self.ask(prompt=[ids(f"{context} {ending}") for context, ending in passages], temperature=0,
                            max_tokens=1, logprobs=1, seed=1234, echo=True)
        nats, right = 0, 0
        for (context, _), choice in zip(passages, response["choices"], strict=True):
            begin, logprobs = len(ids(context)), choice["logprobs"]
            values, most = logprobs["token_logprobs"][begin:-1], logprobs["top_logprobs"][begin:-1]
            nats -= sum(values)
            right += all(value == max(top.values()) for value, top in zip(values, most))
        expected = json.loads(done.stdout)
        self.assertAlmostEqual(right / len(passages), expected["accuracy"], delta=1e-6)
        self.assertAlmostEqual(nats / len(passages), math.log(expected["perplexity"]), delta=1e-4)

    def streamed(self, stream):
        """The texts of a stream by index, the finish reasons, and the usage of its last event."""
        texts, reasons, usage = {}, {}, None
        for event in stream:
            self.assertIsNone(usage, "an event follows the usage")
            usage = event.usage
            for choice in event.choices:
                self.assertNotIn(choice.index, reasons, "an event follows the last one")
                piece = choice.delta.content if hasattr(choice, "delta") else choice.text
                texts[choice.index] = texts.get(choice.index, "") + (piece or "")
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        return texts, reasons, usage

    @NEEDS_OPENAI
    def test_openai_streams(self):
        """A stream has the text of the whole response: also where a stop string or a character takes several tokens."""
        client = self.client()
        usual = {"seed": 9, "temperature": 2, "max_tokens": 60, "n": 3, "extra_body": {"ignore_eos": True}}
        usage_too = {"stream": True, "stream_options": {"include_usage": True}}
        for model in "tiny", "tuned":
            asked = {"model": model, "prompt": "The h", **usual}
            text = client.completions.create(**asked).choices[1].text
            for stop in None, [text[30:33], "never there"]:
                whole = client.completions.create(**asked, stop=stop)
                if stop:
                    self.assertEqual((whole.choices[1].text, whole.choices[1].finish_reason),
                                     (text[:text.index(stop[0])], "stop"))
                texts = {choice.index: choice.text for choice in whole.choices}
                reasons = {choice.index: choice.finish_reason for choice in whole.choices}
                stream = client.completions.create(**asked, stop=stop, stream=True)
                self.assertEqual(self.streamed(stream), (texts, reasons, None))
                stream = client.completions.create(**asked, stop=stop, **usage_too)
                self.assertEqual(self.streamed(stream), (texts, reasons, whole.usage))
            asked = {"model": model, "messages": HI, **usual}
            whole = client.chat.completions.create(**asked)
            stream = client.chat.completions.create(**asked, **usage_too)
            self.assertEqual(self.streamed(stream),
                             ({choice.index: choice.message.content for choice in whole.choices},
                              {choice.index: choice.finish_reason for choice in whole.choices}, whole.usage))

    @NEEDS_OPENAI
    def test_openai_chat_logprobs(self):
        client = self.client()
        asked = {"model": "tiny", "messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**asked).choices[0].logprobs.content
        self.assertEqual("".join(entry.token for entry in whole)[:2], "Yo")
        for entry in whole:
            self.assertEqual(len(entry.top_logprobs), 2)
            self.assertEqual(entry.top_logprobs[0].token, entry.token)
            self.assertAlmostEqual(entry.top_logprobs[0].logprob, entry.logprob, delta=1e-5)
            self.assertLessEqual(entry.logprob, 0)
            self.assertEqual(bytes(entry.bytes).decode(), entry.token)
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [entry for event in stream if event.choices[0].logprobs for entry in event.choices[0].logprobs.content]
        self.assertEqual(pieces, whole)

    @NEEDS_OPENAI
    def test_openai_models_and_errors(self):
        client = self.client()
        self.assertEqual([model.id for model in client.models.list()], ["tiny", "tuned"])
        self.assertTrue(all(model.chat for model in client.models.list()))
        with self.assertRaises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="x")
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))
        self.assertIn("there is no model 'other'", caught.exception.message)
        with self.assertRaises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * 190, max_tokens=20)
        self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "prompt"))
        self.assertIn("a prompt of 19", caught.exception.message)
        for stream in False, True:
            with self.assertRaises(openai.BadRequestError) as caught:
                long = [{"role": "user", "content": "x" * 200}]
                client.chat.completions.create(model="tiny", messages=long, stream=stream)
            self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "messages"))
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HI, tools=[tool])
        self.assertEqual((caught.exception.param, caught.exception.type), ("tools", "invalid_request_error"))

    def test_fields(self):
        """A field with a wrong value, one that is unknown, and one that is not supported are each named."""
        wrong = {
            "model": [5, [], None], "temperature": [-1, 3, "hot", True], "top_p": [0, 1.1, "x", 1e-320],
            "top_k": [1.5, "x", 2**40], "min_p": [-0.1, 2], "repetition_penalty": [0, -1, "x", 1e-320],
            "presence_penalty": [2.5], "frequency_penalty": [-3], "seed": ["x", 1.5],
            "stop": [5, "", ["a", 5], ["x"] * 99], "stream": ["yes", 1], "n": [0, -1, 1000, 1.5],
            "max_tokens": [-1, 1.5, "x", 2**70], "max_completion_tokens": [0, "x"], "ignore_eos": ["no"], "logit_bias": [{"5": 1}],
            "response_format": [{"type": "json_object"}], "user": [5], "stream_options": [{"include_usage": True}, 5],
            "an_unknown_field": [1], "<b>": [1],
        }
        ways = {
            "completions": ({"prompt": "x"}, {
                "prompt": [5, {}, [], [[]], ["a", 5], [1, 300], [1, -1], [1, "a"], [[1], "a", None]], "echo": [1],
                "logprobs": [-1, 21, True], "best_of": [2], "suffix": ["x"], "messages": [[]]}),
            "chat/completions": ({"messages": [{"role": "user", "content": "x"}]}, {
                "messages": ["x", [], [5], [{}], [{"role": "tool", "content": "x"}], [{"role": "user"}],
                             [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}],
                             [{"role": "user", "content": "x", "tool_calls": [1]}]],
                "logprobs": [1, "x"], "top_logprobs": [1, 21], "tools": [[{}]],
                "tool_choice": ["required"], "prompt": ["x"], "echo": [True], "functions": [[]], "audio": [{}]}),
        }
        for path, (valid, more) in ways.items():
            for field, values in {**wrong, **more}.items():
                for value in values:
                    with self.subTest(path=path, field=field, value=value):
                        status, response = self.server.post(f"/v1/{path}", {"model": "tiny", **valid, field: value})
                        self.assertEqual(status, 400, response)
                        error = response["error"]
                        self.assertEqual(set(error), {"message", "type", "param", "code"})
                        self.assertEqual(error["type"], "invalid_request_error")
                        self.assertTrue(error["param"].startswith(field), error)
                        self.assertIn(field, error["message"])
            with self.subTest(path=path):
                both = {"model": "tiny", **valid, "max_tokens": 1, "max_completion_tokens": 1}
                status, response = self.server.post(f"/v1/{path}", both)
                self.assertEqual((status, response["error"]["param"]), (400, "max_tokens"))
                self.assertIn("not both", response["error"]["message"])
        # null is as if the field were not there; so are values that change nothing.
        self.ask(prompt="x", temperature=None, stop=None, stream=None, logprobs=None, logit_bias={}, best_of=1,
                 user="me")
        for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": None}):
            response = self.ask(prompt="x", ignore_eos=True, **fields)
            self.assertEqual(response["usage"]["completion_tokens"], 3, fields)
        self.ask("chat/completions", tools=[], response_format={"type": "text"}, max_completion_tokens=2,
                 top_logprobs=0)

    def test_bodies_and_paths(self):
        valid = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1})
        for body in (b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', valid.encode() + b"x",
                     b"[" * 100000, b'{"a":' * 100000, b'{"prompt": "\\ud800"}', b'{"temperature": NaN}',
                     b'{"temperature": 1e999}'):
            status, headers, answer = self.server.ask("POST", "/v1/completions", body)
            self.assertEqual((status, headers["Content-Type"]), (400, "application/json"), body[:40])
            self.assertLess(len(json.loads(answer)["error"]["message"]), 300, body[:40])
        nested, more = (b'{"model": "tiny", "prompt": "x", "user": ' + b"[" * n + b"]" * n + b"}" for n in (99, 100))
        for body, fault in [(nested, "'user' is"), (more, "nested more than 100 deep"),
                            (valid.encode() + b"\0", "NUL at byte"), (valid.encode()[:-1], "broken JSON at byte")]:
            status, _, answer = self.server.ask("POST", "/v1/completions", body)
            self.assertEqual(status, 400)
            self.assertIn(fault, json.loads(answer)["error"]["message"])
        for text in ("[{" * 60, '"' + "[{" * 60, '\\"' + "[" * 120 + "\\"):  # are no levels
            self.ask(prompt=text, max_tokens=1)
        for method, path, status in [
            ("GET", "/nothing", 404), ("POST", "/v1/models", 405), ("GET", "/v1/completions", 405),
            ("DELETE", "/health", 405), ("GET", "/health", 200), ("HEAD", "/health", 200),
            ("GET", "/v1/../etc/passwd", 404), ("GET", "/v1/models?limit=5", 200),
        ]:
            answered = self.server.ask(method, path)
            self.assertEqual(answered[0], status, (method, path, answered))
            if status == 405:
                self.assertEqual(answered[1]["Allow"], "POST" if method == "GET" else "GET")
        status, headers, page = self.server.ask("GET", "/")
        self.assertEqual((status, page), (200, text_of(os.path.join(ROOT, "serve", "page.html"))))
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])

    def test_metrics(self):
        def change(path, **fields):
            before = self.server.metrics()
            response = self.ask(path, **fields)
            after = self.server.metrics()
            return response, {name: value - before.get(name, 0) for name, value in after.items()}

        response, grown = change("completions", prompt=["The h", "Hi"], n=2, max_tokens=9, ignore_eos=True)
        self.assertEqual(grown['requests_total{path="/v1/completions",status="200"}'], 1)
        self.assertEqual(grown["prompt_tokens_total"], response["usage"]["prompt_tokens"])
        self.assertEqual(grown["completion_tokens_total"], 36)
        self.assertEqual(grown["time_to_first_token_seconds_count"], 4)
        self.assertEqual(grown["time_between_tokens_seconds_count"], 32)
        self.assertEqual(grown['time_between_tokens_seconds_bucket{le="+Inf"}'], 32)
        self.assertGreater(grown["time_between_tokens_seconds_sum"], 0)
        before = self.server.metrics()
        self.server.post("/v1/completions", {"model": "tiny"})
        after = self.server.metrics()
        refused = 'requests_total{path="/v1/completions",status="400"}'
        self.assertEqual(after[refused] - before.get(refused, 0), 1)
        deadline = time.monotonic() + 10  # the step that ended a completion may still run when its client has it
        while any(after[gauge] for gauge in GAUGES) and time.monotonic() < deadline:
            time.sleep(0.01)
            after = self.server.metrics()
        self.assertEqual([after[gauge] for gauge in GAUGES], [0, 0, 0])
        self.assertGreater(after["pages"], 0)

    @unittest.skipUnless(shutil.which("curl"), "curl is not installed")
    def test_the_page_of_the_docs(self):
        """The lines of curl in docs/use/serving.md, as printed but for the port, with a model at the path it names."""
        (block,) = [block for block in check_docs.blocks(text_of(os.path.join(ROOT, "docs", "use", "serving.md")))
                    if block.has_commands()]
        serve = next(words for _, words in check_docs.commands(block.text) if "serve" in words)
        lines = [line for line in block.text.splitlines() if line.startswith("curl ")]
        self.assertTrue(lines)
        model = os.path.join(self.top, serve[serve.index("--model") + 1])
        shutil.copytree(self.model, model)
        with Server("--model", model, "--context", 60) as server:
            for line in lines:
                self.assertIn("http://127.0.0.1:8080/", line)
                done = subprocess.run(["bash", "-c", line.replace("http://127.0.0.1:8080", server.url)],
                                      capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stderr)
                response = json.loads(done.stdout)
                self.assertEqual(len(response.get("choices", [])), 1, response)

    def test_a_model_without_a_chat_template(self):
        base = os.path.join(self.top, "base_model")
        shutil.copytree(self.model, base)
        os.remove(os.path.join(base, "chat_template.jinja"))
        with Server("--model", base, "--context", 60) as server:
            models = json.loads(server.ask("GET", "/v1/models")[2])["data"]
            self.assertEqual([(model["id"], model["chat"]) for model in models], [("base_model", False)])
            for path in "/v1/chat/completions", "/tokenize":
                status, response = server.post(path, {"model": "base_model", "messages": HI})
                self.assertEqual(status, 400)
                self.assertIn("no chat template; use /v1/completions", response["error"]["message"])


if __name__ == "__main__":
    unittest.main()
