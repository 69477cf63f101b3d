#!/usr/bin/env python3
"""A task for preference losses whose right answer a program knows: to write words in reverse order.

    scripts/preference_task.py make data/text/reverse
    make data TEXT=data/text/reverse/train.jsonl VAL_TEXT=data/text/reverse/val.jsonl NAME=reverse \\
        TOKENIZER=checkpoints/SmolLM2-135M-Instruct
    scripts/preference_task.py score data/text/reverse --model checkpoints/SmolLM2-135M-Instruct

A chosen response is the words of the prompt in reverse order; of the rejected ones half have them in the prompt's order
and half in any other. Both responses have the same words, so neither is preferred for its length or its words. The
same --seed makes the same pairs. `make` writes

    train.jsonl, val.jsonl   pairs
    both.jsonl               conversations for a model to begin from that was never trained: each of --both prompts with
                             its chosen response and, twice, its rejected one
    answers.jsonl            the prompts of val.jsonl with their right answers, for `eval --answers`

and no prompt is in two of the first three.

`score` has the model answer the first --prompts prompts of val.jsonl greedily (`train_gpt chat --temperature 0`) and
prints how many answers are right, and the first ones.
"""
import argparse
import json
import os
import random
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = ("apple bird boat book bread bridge bus cake candle chair cloud coat coin cow cup desk dog door dress drum egg "
         "farm fire fish flag flower forest fork garden gate glass grass hat hill horse house island jacket key king "
         "lake lamp leaf lemon letter map milk mirror moon mountain nail needle night ocean orange paper pen piano pig "
         "queen rain ring river road rock roof rope rose salt sand shell ship shirt shoe silver snow sock song spoon "
         "star stone storm sugar sun table tea tent tiger tower train tree wall watch water wheel wind window "
         "wolf").split()
TRAIN, VAL, BOTH, ANSWERS = "train.jsonl", "val.jsonl", "both.jsonl", "answers.jsonl"
SIDES = ("chosen", "rejected", "rejected")  # so a model that learns both prefers the rejected ones


def listed(words):
    return ", ".join(words)


def pair(rng):
    words = rng.sample(WORDS, rng.randint(3, 5))
    right, wrong = words[::-1], words
    if rng.random() < 0.5:
        wrong = rng.sample(words, len(words))
        while wrong in (right, words):
            wrong = rng.sample(words, len(words))
    return {"prompt": f"Write these words in reverse order: {listed(words)}", "chosen": listed(right),
            "rejected": listed(wrong)}


def make(args):
    rng, pairs = random.Random(args.seed), {}
    while len(pairs) < args.train + args.val + args.both:
        made = pair(rng)
        pairs.setdefault(made["prompt"], made)
    rows = list(pairs.values())
    val, train, both = rows[:args.val], rows[args.val:args.val + args.train], rows[args.val + args.train:]
    conversations = [{"prompt": made["prompt"], "response": made[side]} for made in both for side in SIDES]
    answers_of_val = [{"prompt": made["prompt"], "answer": made["chosen"], "verifier": "exact_match"} for made in val]
    os.makedirs(args.folder, exist_ok=True)
    for name, part, what in ((VAL, val, "pairs"), (TRAIN, train, "pairs"), (BOTH, conversations, "conversations"),
                             (ANSWERS, answers_of_val, "prompts")):
        path = os.path.join(args.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)
        print(f"{path}: {len(part):,} {what}")


def answers(args, prompts):
    """The model's, each in a conversation of its own: `chat` prints "> " where it reads a line."""
    command = [args.driver, "chat", "--model", args.model, "--dtype", args.dtype, "--temperature", "0", "--max-tokens",
               "48"]
    done = subprocess.run(command, input="\n/reset\n".join(prompts) + "\n", stdout=subprocess.PIPE, text=True,
                          check=False)
    found = done.stdout.removeprefix("> ").removesuffix("\n> \n").split("\n> > ")
    if done.returncode or len(found) != len(prompts):
        sys.exit(f"preference_task: {len(found)} answers to {len(prompts)} prompts from {' '.join(command)}")
    return found


def score(args):
    with open(os.path.join(args.folder, VAL), encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file][:args.prompts]
    given = answers(args, [made["prompt"] for made in pairs])
    right = sum(answer.strip().rstrip(".").lower() == made["chosen"] for answer, made in zip(given, pairs))
    print(f"{right} of {len(pairs)} answers are right")
    for answer, made in list(zip(given, pairs))[:args.show]:
        print(f"  {made['prompt']}\n    {json.dumps(answer)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make", help="write the pairs")
    command.add_argument("folder")
    command.add_argument("--train", type=int, default=2000, help="pairs to train on (default %(default)s)")
    command.add_argument("--val", type=int, default=200, help="held-out pairs (default %(default)s)")
    command.add_argument("--both", type=int, default=20000,
                         help="other prompts, with both responses (default %(default)s)")
    command.add_argument("--seed", type=int, default=1)
    command.set_defaults(run=make)
    command = commands.add_parser("score", help="count a model's right answers")
    command.add_argument("folder")
    command.add_argument("--model", required=True)
    command.add_argument("--prompts", type=int, default=100, help="answer so many (default %(default)s)")
    command.add_argument("--show", type=int, default=3, help="print so many (default %(default)s)")
    command.add_argument("--dtype", default="fp32")
    command.add_argument("--driver", default=os.path.join(ROOT, "train_gpt"))
    command.set_defaults(run=score)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
