#!/usr/bin/env python3
"""Trains one model on the same pairs in this project and in trl, and compares losses, rewards and log-probabilities.

    make smollm2
    make data TEXT=pairs.jsonl NAME=pairs TOKENIZER=checkpoints/SmolLM2-135M-Instruct
    dev/peers/compare_preferences.py --model checkpoints/SmolLM2-135M-Instruct --data data/tokens/pairs --loss dpo \\
        --seq-len 160 --out runs/trl

Needs torch, transformers 5 and trl 1.16 (dev/peers/trl_preferences.py says what of trl). --seq-len must be such that a
training sequence holds one pair: trl's steps all have as many pairs. Our side is fp32, trl's float64; AdamW moves a
weight by about --lr even where its gradient is rounding, so differences grow with --lr. Prints the losses of each step
and checks that every value is within --bar of trl's. Exit status 1 if one is not.
"""
import from_scripts  # noqa: F401
import argparse
import sys

import numpy as np

from compare_curves import BETAS, EPS, CurvesError, read_tokens, window_of_sample
from compare_finetune import EXAMPLE_START, LOSS, check, pack, read_flags, run
from peer_main import peer_main
from run_log import read_log


def prompt_and_response(tokens, flags, example):
    """What follows the loss tokens, as a template's last newline, is left out: nothing depends on it."""
    begin, end = example
    loss = begin + np.flatnonzero(flags[begin:end] & LOSS)
    first, last = int(loss[0]), int(loss[-1]) + 1
    if last - first != len(loss):
        raise CurvesError(f"the example at token {begin} has loss tokens in several turns; trl has one response")
    return tokens[begin:first], tokens[first:last]


def steps_of(folder, T, batch_size, seed, steps):
    """The pairs of each step of a run: (prompt, chosen, rejected) as lists of ids."""
    tokens, flags = read_tokens(folder, "train").astype(int).tolist(), read_flags(folder, "train")
    starts = [*np.flatnonzero(flags & EXAMPLE_START).tolist(), len(flags)]
    examples = list(zip(starts, starts[1:]))
    sequences = pack(list(zip(examples[::2], examples[1::2])), T)
    if any(len(sequence) != 1 for sequence in sequences):
        raise CurvesError(f"a training sequence of {T} tokens holds several pairs; lower --seq-len")
    pairs = []
    for [(chosen, rejected)] in sequences:
        prompt, response = prompt_and_response(tokens, flags, chosen)
        pairs.append((prompt, response, prompt_and_response(tokens, flags, rejected)[1]))
    return [[pairs[window_of_sample(seed, step * batch_size + b, len(pairs))] for b in range(batch_size)]
            for step in range(steps)]


def loss_options(args):
    given = {"--label-smoothing": args.label_smoothing, "--simpo-margin": args.loss == "simpo" and args.simpo_margin}
    words = [word for option in given.items() if option[1] for word in option]
    return ["--loss", args.loss, "--beta", args.beta, *words]


def compare(args):
    import trl_preferences
    steps = steps_of(args.data, args.seq_len, args.batch_size, args.seed, args.steps)
    run(args.driver, "train", "--model", args.model, "--data", args.data, "--out", args.out, "--steps", args.steps,
        "--batch-size", args.batch_size, "--seq-len", args.seq_len, "--lr", args.lr, "--schedule", "constant",
        "--warmup", 0, "--weight-decay", 0, "--grad-clip", 0, "--beta1", BETAS[0], "--beta2", BETAS[1], "--adam-eps",
        EPS, "--seed", args.seed, "--dtype", "fp32", "--eval-every", 0, "--save-every", 0, *loss_options(args))
    theirs = trl_preferences.train(args.model, steps, args.lr, loss=args.loss, beta=args.beta,
                                   label_smoothing=args.label_smoothing, simpo_margin=args.simpo_margin)
    ours = read_log(args.out)[0]
    print(f"\n{'step':>4} {'ours':>11} {'trl':>11} {'difference':>11}")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        print(f"{step:4} {a['loss']:11.6f} {b['loss']:11.6f} {a['loss'] - b['loss']:+11.1e}")
    good = True
    for key in theirs[0]:
        # The rewards of a model that is its own reference are equal: which is greater is rounding.
        steps = [(a, b) for a, b in zip(ours, theirs) if key != "rewards_accuracy" or abs(b["rewards_margin"]) > 1e-6]
        worst = max(abs(a[key] - b[key]) for a, b in steps)
        good &= check(f"{key} within {args.bar} (largest difference {worst:.1e})", worst <= args.bar)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--data", required=True, help="a folder with pairs that `make data TOKENIZER=MODEL` wrote")
    parser.add_argument("--out", required=True, help="the run directory to write")
    parser.add_argument("--loss", choices=("dpo", "ipo", "simpo", "orpo"), default="dpo")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--label-smoothing", type=float, default=0)
    parser.add_argument("--simpo-margin", type=float, default=1, help="with --loss simpo (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bar", type=float, default=1e-4, help="largest difference of a value (default %(default)s)")
    args = parser.parse_args()
    return peer_main("compare_preferences", lambda: 0 if compare(args) else 1, CurvesError,
                     "it needs torch, transformers and trl")


if __name__ == "__main__":
    sys.exit(main())
