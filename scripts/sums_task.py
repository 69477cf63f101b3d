#!/usr/bin/env python3
"""Sums of two numbers, as data for every way to train a model, and what a server answers to them (scripts/run_pipeline.sh).

    scripts/sums_task.py make runs/pipeline/data --largest 99
    scripts/sums_task.py serve runs/pipeline/data --model model.gguf

`make` writes conversations.jsonl to finetune on, pairs.jsonl of a right and a wrong answer, prompts.jsonl with verifiers
for `rl`, and held_out.jsonl for `eval --answers`, of whose sums no other file has one. The same --seed makes the same
files. `serve` starts `train_gpt serve`, has it answer held_out.jsonl greedily, and prints the share of right answers.
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HELD_OUT = "held_out.jsonl"


def question(a, b):
    return f"What is {a} plus {b}?"


def answer(a, b, total):
    return f"{a} + {b} = {total}."


def wrong_total(rng, a, b):
    """Near the right one, as a model's mistakes are."""
    near = [a + b + step for step in (-10, -2, -1, 1, 2, 10) if a + b + step >= 0]
    return rng.choice(near)


def make(args):
    rng = random.Random(args.seed)
    sums = [(a, b) for a in range(args.largest + 1) for b in range(args.largest + 1)]
    if args.held_out >= len(sums):
        sys.exit(f"sums_task: --held-out {args.held_out} leaves none of the {len(sums)} sums to train on; take fewer, or a "
                 "greater --largest")
    rng.shuffle(sums)
    held_out, rest = sums[:args.held_out], sums[args.held_out:][:args.train]

    def verified(a, b):
        return {"prompt": question(a, b), "answer": a + b, "verifier": "last_number"}
    rows = {
        "conversations.jsonl": [{"prompt": question(a, b), "response": answer(a, b, a + b)} for a, b in rest],
        "pairs.jsonl": [{"prompt": question(a, b), "chosen": answer(a, b, a + b),
                         "rejected": answer(a, b, wrong_total(rng, a, b))} for a, b in rest],
        "prompts.jsonl": [verified(a, b) for a, b in rest],
        HELD_OUT: [verified(a, b) for a, b in held_out]}
    os.makedirs(args.folder, exist_ok=True)
    for name, lines in rows.items():
        with open(os.path.join(args.folder, name), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def last_number(text):
    """As the verifier last_number, for whole numbers."""
    found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


class Server:
    def __init__(self, driver, model):
        command = [driver, "serve", "--model", model, "--port", "0"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            found = re.match(r"serving (\S+).* at (http://\S+?:\d+)", line)
            if found:
                self.url = found[2]
                break
        else:
            sys.exit(f"sums_task: {' '.join(command)} ended with status {self.process.wait()}")
        self.model = self.ask("/v1/models")["data"][0]["id"]

    def ask(self, path, fields=None):
        body = None if fields is None else json.dumps({"model": self.model, **fields}).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def complete(self, prompt, **fields):
        """A user turn of the model's chat template where it has one, as with `eval --answers`."""
        try:
            choice = self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **fields})
            return choice["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
        return self.ask("/v1/completions", {"prompt": prompt, **fields})["choices"][0]["text"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate()


def serve(args):
    with open(os.path.join(args.folder, HELD_OUT), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with Server(args.driver, args.model) as server:
        right = sum(last_number(server.complete(row["prompt"], temperature=0, max_tokens=args.max_tokens)) == row["answer"]
                    for row in rows)
    print(f"accuracy {right / len(rows):.6g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make", help="write the data")
    command.add_argument("folder")
    command.add_argument("--largest", type=int, default=99, help="number to add (default %(default)s)")
    command.add_argument("--train", type=int, default=4000, help="sums to train on, at most (default %(default)s)")
    command.add_argument("--held-out", type=int, default=200, help="sums to evaluate with (default %(default)s)")
    command.add_argument("--seed", type=int, default=1)
    command.set_defaults(run=make)
    command = commands.add_parser("serve", help="the accuracy of a server's answers")
    command.add_argument("folder")
    command.add_argument("--model", required=True)
    command.add_argument("--max-tokens", type=int, default=24, help="of an answer (default %(default)s)")
    command.add_argument("--driver", default=os.path.join(ROOT, "train_gpt"))
    command.set_defaults(run=serve)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
