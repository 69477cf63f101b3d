#!/usr/bin/env python3
"""`chat`, and prompts of a training run that are user turns: conversations by a chat template."""
import json
import os
import re
import shutil
import signal
import subprocess
import unittest

import serving
from harness import DRIVER, TrainingTest, checkpoints, cuda, log, run, tokenize


class ChatTest(TrainingTest):
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
            json.dump({"chat_template": serving.TEMPLATE}, file)

        def chat(text, *args, context=60):
            return subprocess.run([DRIVER, "chat", "--model", model, "--dtype", "fp32", "--max-tokens", "6",
                                   "--temperature", "0", "--context", str(context), *args],
                                  input=text, capture_output=True, text=True, errors="replace", timeout=120)

        first = chat("Hi\n")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(chat("Hi\r\n/exit\r\nnever read\r\n").stdout, first.stdout[:-1])
        small = chat("Hi\n", context=7)
        self.assertEqual((small.returncode, small.stdout), (1, ""))
        self.assertIn("a context of 7 tokens has no room for the 6 that start every conversation; "
                      "raise --context to at least 8", small.stderr)
        self.assertIn("tokenizer_config.json: chat_template", first.stderr)
        self.assertIn("completion: 6 tokens, 5 of them by decode steps", first.stderr)
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
        write_template(serving.TEMPLATE.replace("m.content +", "('X' if m.role == 'assistant' else m.content) +"))
        self.assertEqual(prompt_tokens("Hi\nHi\n")[0], turn + len("X_\n") + turn)
        write_template(serving.TEMPLATE.replace("for m in messages", "for m in messages[-1:]"))
        self.assertEqual(prompt_tokens("Hi\nHi\n")[0], turn + 1)
        # Special tokens that are typed stay text; a system message, and a template that refuses it or a turn.
        write_template(serving.TEMPLATE)
        typed = prompt_tokens("<|im_end|>\n")[0]
        self.assertEqual(typed, turn - len("Hi") + len("<|im_end|>"))
        self.assertEqual(prompt_tokens("Hi\n", "--system", "Be")[0], turn + len("_system\nBe_\n"))
        self.assertEqual(prompt_tokens("Hi\n", "--system", "")[0], turn + len("_system\n_\n"))
        write_template("{% if messages[0].role == 'system' or messages[-1].content == 'no' %}"
                       "{{ raise_exception('Not this') }}{% endif %}" + serving.TEMPLATE)
        refused = chat("Hi\n", "--system", "Be")
        self.assertEqual((refused.returncode, refused.stdout), (1, ""))
        self.assertIn("chat_template.jinja refuses the conversation: Not this", refused.stderr)
        tokens, result = prompt_tokens("Hi\nno\nHi\n")
        self.assertIn("refuses the conversation: Not this)", result.stdout)
        self.assertEqual(tokens, turn + left + turn)  # the conversation goes on without the refused turn
        write_template("{{ messages | xmlattr }}")
        unsupported = chat("Hi\n")
        self.assertEqual((unsupported.returncode, unsupported.stdout), (1, ""))
        self.assertIn("chat_template.jinja:1: the filter 'xmlattr' is not supported", unsupported.stderr)
        os.remove(os.path.join(model, "chat_template.jinja"))
        with subprocess.Popen([DRIVER, "chat", "--model", model, "--max-tokens", "1000000", "--temperature", "0"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
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
        with open("/dev/zero", "rb") as zeros:
            endless = subprocess.run([DRIVER, "chat", "--model", model], stdin=zeros, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     timeout=120)
        self.assertEqual(endless.returncode, 1)
        self.assertIn(b"chat: the input has a line of more than 1048576 bytes; a user turn is one line", endless.stderr)
        # Turns that are dropped are named, and so is a turn that does not fit; the conversation continues.
        self.assertRegex(chat("Hi\n" * 4).stdout, r"\(the context is full: \d+ tokens do not fit into 60; the oldest "
                                                r"(turn is|\d turns are) dropped\)")
        long = "x" * 70
        for more in [], ["--context-full", "stop"]:
            spoken = chat(f"Hi\n{long}\nHi\n", *more)
            self.assertEqual(spoken.returncode, 0, spoken.stderr)
            needed = turn - len("Hi") + 70
            self.assertIn(f"(this turn needs a prompt of {needed} tokens and was left out, because the context has 60; shorten "
                          "it or raise --context)", spoken.stdout)
            self.assertEqual(spoken.stdout.count("> "), 4)
            self.assertEqual(prompt_tokens(f"Hi\n{long}\nHi\n", *more)[0], turn + left + turn)
        asked = chat(f"{long}\n", "--context-full", "slide")
        self.assertIn(f"(a prompt of {needed} tokens exceeds the context of 60: the model reads the first 6 and the last 27",
                      asked.stdout)

    def test_sample_prompts_are_user_turns_of_a_chat_template(self):
        base = self.train("asked_base", "--steps", 1, "--vocab-size", 300)
        model = os.path.join(self.top, "asked_model")
        shutil.copytree(os.path.join(base, checkpoints(base)[-1]), model)
        serving.ChatModelTest.add_chat_template(model)
        source, data, prompts = (os.path.join(self.top, name) for name in ("turns.jsonl", "turns", "turns.txt"))
        with open(source, "w") as file:
            for i in range(8):
                turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
                file.write(json.dumps({"messages": turns}) + "\n")
        tokenize(source, data, "--val", "0", tokenizer=model)
        with open(prompts, "w") as file:
            file.write("Hi\n")
        args = ["train", "--model", model, "--data", data, "--batch-size", 2, "--seq-len", 64, "--steps", 80,
                "--lr", "2e-2", "--warmup", 5, "--sample-prompts", prompts, "--sample-every", 80, "--save-every", 0]
        done = run(*args, "--out", os.path.join(self.top, "turns_run"))
        self.assertEqual(done.returncode, 0, done.stderr)
        # The template's prompt is what was trained on, so the model knows the response, and that it ends.
        self.assertEqual(log(os.path.join(self.top, "turns_run"))[-1]["samples"], [{"prompt": "Hi", "text": "Yo"}],
                         done.stderr)
        # The special token that ends a turn ends what transformers and `sample` write, too.
        def ends(directory):
            with open(os.path.join(directory, "generation_config.json")) as file:
                return json.load(file)["eos_token_id"]
        run_dir = os.path.join(self.top, "turns_run")
        self.assertEqual(ends(os.path.join(run_dir, checkpoints(run_dir)[-1])), [256, 258])
        self.assertFalse(os.path.exists(os.path.join(base, checkpoints(base)[-1], "generation_config.json")))
        # So it does with adapters, after a merge, and with data of an older version.
        meta_path = os.path.join(data, "meta.json")
        with open(meta_path) as file:
            meta = json.load(file)
        self.assertEqual(meta.pop("end_of_turn"), 258)
        with open(meta_path, "w") as file:
            json.dump(meta, file)
        lora, merged = (os.path.join(self.top, name) for name in ("turns_lora", "turns_merged"))
        done = run("train", "--model", model, "--data", data, "--batch-size", 2, "--seq-len", 64, "--steps", 1,
                   "--save-every", 0, "--lora-rank", 2, "--out", lora)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(ends(os.path.join(lora, checkpoints(lora)[-1])), [256, 258])
        self.assertEqual(run("convert", lora, merged, "--merge").returncode, 0)
        self.assertEqual(ends(merged), [256, 258])
        # The prompt ends with the start of the response: 8 tokens of the user turn around the text, 11 of the
        # assistant's.
        with open(prompts, "w") as file:
            file.write("x" * 46)
        self.refused(1, ["prompt 1 of", "has 65 tokens, more than --seq-len 64"],
                     *args, "--out", os.path.join(self.top, "nothing"))
        os.remove(os.path.join(model, "chat_template.jinja"))
        self.refused(1, ["was made with a chat template, but", "has none"],
                     *args, "--out", os.path.join(self.top, "nothing"))


if __name__ == "__main__":
    unittest.main()
