#!/usr/bin/env python3
"""Trains one model with each attention type on the same tokens and compares loss and speed.

    dev/peers/compare_attention_kinds.py --data data/tokens/quickstart --out runs/kinds                (a GPU: minutes)
    dev/peers/compare_attention_kinds.py --data data/tokens/quickstart --out runs/kinds --model gpt2-tiny --layers 4 \\
        --dtype fp32 --seq-len 256 --batch-size 8 --steps 1200 --lengths                             (a CPU: longer)

The types are those of --attention: S softmax, L linear, G gated linear, and patterns that repeat over the layers: GGGS is
three gated linear layers and one softmax layer. All runs have the same shape, seed and order of samples. Then the script
times steps of --speed-tokens tokens at each of --lengths. It prints two tables and writes OUT/kinds.json and OUT/kinds.png.
Complete runs in OUT with the same options are not repeated.
"""
import from_scripts  # noqa: F401
import argparse
import glob
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys

from peer_main import peer_main, write_json

SPEED_STEPS, SPEED_WARM_UP = 12, 4  # of the timed runs, whose first steps don't count


class KindsError(Exception):
    """One line: what kept the comparison from being made."""


def pattern(kind, layers):
    """One letter for each layer."""
    return (kind * layers)[:layers]


def train(args, out, options):
    command = [args.driver, "train", "--model", args.model, "--layers", args.layers, "--dtype", args.dtype, "--data", args.data, "--out",
               out, "--seed", args.seed, *options]
    command = [str(word) for word in command]
    settings = os.path.join(out, "command.json")
    if os.path.exists(settings):  # written when the run was done
        with open(settings, encoding="utf-8") as file:
            if json.load(file) == command:
                return
    shutil.rmtree(out, ignore_errors=True)
    print("$", shlex.join(command), file=sys.stderr, flush=True)
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise KindsError(f"{args.driver} failed; its own message is above")
    for checkpoint in glob.glob(os.path.join(glob.escape(out), "step_*")):  # which nothing here reads
        shutil.rmtree(checkpoint)
    write_json(settings, command)


def log_lines(out):
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
        return [json.loads(line) for line in log]


def learn(args, kind):
    """A whole run: its curve of (step, bits per byte), and the median tokens/s of its steps."""
    out = os.path.join(args.out, kind)
    train(args, out, ["--attention", pattern(kind, args.layers), "--steps", args.steps, "--batch-size", args.batch_size, "--seq-len",
                      args.seq_len, "--lr", args.lr, "--eval-every", args.eval_every, "--save-every", 0])
    lines = log_lines(out)
    curve = [(line["step"], line["bits_per_byte"]) for line in lines if "bits_per_byte" in line]
    steps = [line for line in lines if "loss" in line]
    if len(steps) != args.steps or not curve:
        raise KindsError(f"{out}/log.jsonl does not hold {args.steps} steps and an evaluation")
    return {"curve": curve, "loss": [line["loss"] for line in steps],
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steps[args.steps // 10:])}


def speed(args, kind, length):
    """Median tokens/s of steps of speed_tokens tokens in sequences of this length."""
    out = os.path.join(args.out, f"speed_{kind}_{length}")
    train(args, out, ["--attention", pattern(kind, args.layers), "--steps", SPEED_STEPS, "--batch-size", args.speed_tokens // length,
                      "--seq-len", length, "--max-positions", max(length, args.seq_len), "--eval-every", 0, "--save-every", 0])
    return statistics.median([line["tokens_per_s"] for line in log_lines(out) if "loss" in line][SPEED_WARM_UP:])


def tables(results):
    """The two tables, as Markdown."""
    lines = ["| attention | bits per byte | last losses | tokens/s |", "|---|---|---|---|"]
    for kind, run in results["runs"].items():
        tail = run["loss"][-max(1, len(run["loss"]) // 20):]
        lines.append(f"| {kind} | {run['curve'][-1][1]:.4f} | {sum(tail) / len(tail):.4f} | {run['tokens_per_s']:,.0f} |")
    speeds = results["speeds"]
    if any(speeds.values()):
        lengths = list(next(iter(speeds.values())))
        lines += ["", "| tokens/s at a length of | " + " | ".join(lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
        lines += [f"| {kind} | " + " | ".join(f"{row[n]:,.0f}" for n in lengths) + " |" for kind, row in speeds.items()]
    return "\n".join(lines)


def draw(results, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speeds = {kind: row for kind, row in results["speeds"].items() if row}
    figure, plots = plt.subplots(1, 2 if speeds else 1, squeeze=False, figsize=(11 if speeds else 6, 4.5), constrained_layout=True)
    left = plots[0, 0]
    for kind, run in results["runs"].items():
        left.plot(*zip(*run["curve"]), label=kind, linewidth=1)
    left.set_xlabel("step")
    left.set_ylabel("bits per byte of the held-out text")
    for kind, row in speeds.items():
        plots[0, 1].plot([int(n) for n in row], list(row.values()), "o-", label=kind, linewidth=1)
    if speeds:
        plots[0, 1].set_xscale("log", base=2)
        plots[0, 1].set_xlabel("length of a sequence")
        plots[0, 1].set_ylabel("training tokens/s")
        plots[0, 1].set_ylim(bottom=0)
    for axes in plots[0]:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output, dpi=80)
    print(output)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--data", required=True, help="a folder that `make data` wrote")
    parser.add_argument("--out", required=True, help="the folder for runs, table and picture")
    parser.add_argument("--kinds", nargs="+", default=["S", "L", "G", "GGGS"], metavar="KIND")
    parser.add_argument("--model", default="gpt2-mini", help="a preset (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024, 4096, 16384], help="of sequences whose steps are timed; none: nothing is")
    parser.add_argument("--speed-tokens", type=int, default=32768, help="in each timed step (default %(default)s)")
    args = parser.parse_args(words)
    for length in args.lengths:
        if length < 1 or args.speed_tokens % length:
            parser.error(f"--lengths {length} does not divide --speed-tokens {args.speed_tokens}")
    for kind in args.kinds:
        if not kind or set(kind) - set("SLG"):
            parser.error(f"--kinds {kind}: letters are S, L and G")
    return args


def compare(args):
    results = {"settings": vars(args), "runs": {}, "speeds": {}}
    os.makedirs(args.out, exist_ok=True)
    for kind in args.kinds:
        results["runs"][kind] = learn(args, kind)
    for kind in args.kinds:
        results["speeds"][kind] = {str(length): speed(args, kind, length) for length in args.lengths}
    write_json(os.path.join(args.out, "kinds.json"), results, indent=1)
    print(tables(results))
    try:
        draw(results, os.path.join(args.out, "kinds.png"))
    except ImportError:
        print("compare_attention_kinds: no picture drawn, because matplotlib is not here (make venv installs it).", file=sys.stderr)
    return 0


def main():
    args = parse()
    return peer_main("compare_attention_kinds", lambda: compare(args), KindsError, "a package is missing")


if __name__ == "__main__":
    sys.exit(main())
