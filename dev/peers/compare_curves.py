#!/usr/bin/env python3
"""Trains one model from the same weights on the same batches in this project and in PyTorch and compares the losses.

    dev/peers/compare_curves.py --driver build/cuda/train_gpt --data data/tokens/gpt2 --out runs/curves

Needs torch and transformers (4 or 5) in addition to scripts/requirements.txt. The default is GPT-2 124M with 2,000 steps
of 4 x 512 tokens in these runs:

    ours-fp32     ours-bf16     this project
    torch-fp32                  PyTorch in float32, TF32 off
    torch-bf16                  PyTorch under autocast to bfloat16, weights and optimizer in float32
    ours-bf16-nudged            ours-bf16 from weights perturbed by one part in a thousand, about bf16's rounding

Training amplifies perturbations, so correct runs diverge too. The nudged run measures by how much (any run has one): a
difference between two other runs below that says nothing about bf16. The divergence grows steeply with the learning
rate: at 3e-4 PyTorch's own bf16 differs from its fp32 by 0.035 after 300 steps of this small batch, hence the default of
1e-4.

PyTorch creates the initial weights (--out/initial) and trains transformers' GPT-2. Both sides use the learning rates,
AdamW, the clipping and the order of samples that `train_gpt train` documents; this script computes the order itself from
its definition in data/loader.h. A loss is the mean over a step's tokens before its update, so the first loss compares
weights and batches, and the next ones compare the updates.

Each run's losses are in --out/<run>/log.jsonl; a run with a complete log is not repeated. Prints the means of the last
losses and their differences and draws --out/curves.png. Exit status 1 if a difference that involves bf16 is above --bar
(nudged runs are shown only).
"""
import from_scripts  # noqa: F401
import argparse
import glob
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time

import numpy as np

from peer_main import peer_main, write_json
from run_log import LogError, read_log, smoothed, values

RUNS = ["ours-fp32", "ours-bf16", "torch-fp32", "torch-bf16"]
NUDGED = "-nudged"
BETAS, EPS, FINAL_LR = (0.9, 0.95), 1e-8, 0.1
# The options that all runs must have in common.
SETTINGS = ["data", "layers", "channels", "heads", "steps", "batch_size", "seq_len", "lr", "warmup", "weight_decay", "grad_clip",
            "seed"]


class CurvesError(Exception):
    """One line: what failed and the remedy."""


# ---- The order of samples (data/loader.h, runtime/rng.h) ----------------------------------------------------------------

def philox(key, counter_low, counter_high):
    """The first word of Philox4x32-10."""
    low = 0xFFFFFFFF
    c = [counter_low & low, counter_low >> 32, counter_high & low, counter_high >> 32]
    k = [key & low, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & low, p0 >> 32 ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[0]


def permute(key, epoch, i, n):
    """Where sample i of an epoch is among n windows: a four-round Feistel network, walked until it is inside [0, n)."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for feistel_round in range(4):
            left, right = right, left ^ philox(key, feistel_round << 32 | right, epoch) & mask
        i = left << half | right
        if i < n:
            return i


def window_of_sample(seed, i, windows):
    return permute(seed, i // windows, i % windows, windows)


def read_tokens(folder, split):
    shards, dtypes = [], {20240520: "<u2", 20240801: "<u4"}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), split + "_*.bin"))):
        magic = np.fromfile(path, "<i4", 1)
        if not len(magic) or int(magic[0]) not in dtypes or os.path.getsize(path) <= 1024:
            raise CurvesError(f"{path}: not a token file, or without tokens; make it again with `make data`")
        shards.append(np.memmap(path, dtypes[int(magic[0])], "r", offset=1024))
    if not shards:
        raise CurvesError(f"{folder}: no {split}_*.bin; make some with `make data`")
    return np.concatenate(shards)


def batches(tokens, args):
    """(inputs, targets), each int64 [B, T], of every step."""
    B, T = args.batch_size, args.seq_len
    windows = (len(tokens) - 1) // T
    for step in range(args.steps):
        begins = [window_of_sample(args.seed, step * B + b, windows) * T for b in range(B)]
        rows = np.stack([tokens[begin:begin + T + 1] for begin in begins]).astype(np.int64)
        yield rows[:, :-1], rows[:, 1:]


def learning_rate(args, step):
    """Linear warmup, then a cosine down to FINAL_LR of the peak at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = min(1, (step - args.warmup) / max(args.steps - 1 - args.warmup, 1))
    return args.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


# ---- The runs -----------------------------------------------------------------------------------------------------------

def make_initial(args, folder, nudged):
    """Random weights as a Hugging Face directory, the same for every run but the nudged ones."""
    import torch
    import transformers

    with open(os.path.join(args.data, "meta.json"), encoding="utf-8") as file:
        meta = json.load(file)
    torch.manual_seed(args.seed)
    config = transformers.GPT2Config(
        vocab_size=meta["vocab_size"], n_positions=max(args.seq_len, 1024), n_embd=args.channels, n_layer=args.layers,
        n_head=args.heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=meta["end_of_text"],
        eos_token_id=meta["end_of_text"])
    model = transformers.GPT2LMHeadModel(config)
    # GPT-2 starts its biases at zero, where a bias that is not applied would not show in the first loss.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        if nudged:
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def train_ours(args, dtype, initial, out):
    command = [args.driver, "train", "--model", initial, "--dtype", dtype, "--data", args.data, "--out", out,
               "--steps", args.steps, "--batch-size", args.batch_size, "--seq-len", args.seq_len, "--lr", args.lr,
               "--schedule", "cosine", "--final-lr", FINAL_LR, "--warmup", args.warmup, "--weight-decay", args.weight_decay,
               "--grad-clip", args.grad_clip, "--beta1", BETAS[0], "--beta2", BETAS[1], "--seed", args.seed,
               "--eval-every", 0, "--save-every", 0, *args.train_options]
    command = [str(word) for word in command]
    print("$", shlex.join(command), file=sys.stderr, flush=True)
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise CurvesError(f"{args.driver} failed; its own message is above")
    for checkpoint in glob.glob(os.path.join(out, "step_*")):  # gigabytes that nothing here reads
        shutil.rmtree(checkpoint)


def train_torch(args, dtype, initial, out):
    import torch
    import torch.nn.functional as F
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    model = transformers.GPT2LMHeadModel.from_pretrained(initial, attn_implementation="sdpa").float().to(device)
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": args.weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=args.lr, betas=BETAS, eps=EPS, fused=device.type == "cuda")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}: {dtype} on {device}", file=sys.stderr, flush=True)
    losses, norms, rates = [], [], []
    begin = time.monotonic()
    for step, (x, y) in enumerate(batches(read_tokens(args.data, "train"), args)):
        x, y = (torch.from_numpy(a).to(device) for a in (x, y))
        rates.append(learning_rate(args, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 100 == 99:
            print(f"step {step + 1}/{args.steps}  loss {losses[-1].item():.4f}", file=sys.stderr, flush=True)
    lines = [{"loss": loss.item(), "lr": rate, "grad_norm": norm.item()}
             for loss, norm, rate in zip(losses, norms, rates)]
    write_log(out, lines, (time.monotonic() - begin) / args.steps)


def write_log(out, lines, seconds):
    """Writes the training lines of a run to log.jsonl. seconds: that a step took, on average."""
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "log.jsonl"), "w", encoding="utf-8") as log:
        for step, line in enumerate(lines, 1):  # "ms" is what tells a training line from an evaluation (run_log.py)
            log.write(json.dumps({"step": step, **line, "ms": 1000 * seconds}) + "\n")


def losses_of(out, steps):
    """The losses of a complete run as an array; None if it is not complete."""
    try:
        training, _ = read_log(out)
    except LogError:
        return None
    taken, losses = values(training, "loss")
    return np.array(losses) if taken == list(range(1, steps + 1)) else None


# ---- The comparison -----------------------------------------------------------------------------------------------------

def report(losses, steps, bar):
    """Prints the tables; True if no difference is beyond the bar."""
    tails = [max(1, steps // 4), max(1, steps // 20)]
    heads = " | ".join(f"mean of the last {n}" for n in tails)
    print(f"\n| run | step 1 | step {min(10, steps)} | {heads} |\n|---|---|---|---|---|")
    for name, values in losses.items():
        means = " | ".join(f"{values[-n:].mean():.4f}" for n in tails)
        print(f"| {name} | {values[0]:.6f} | {values[min(10, steps) - 1]:.6f} | {means} |")
    print(f"\n| difference | step 1 | largest of steps 1 to {min(10, steps)} | {heads} | bar |\n|---|---|---|---|---|---|")
    good = True
    names = list(losses)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            difference = losses[b] - losses[a]
            judged = "bf16" in a + b and NUDGED not in a + b
            tail = [difference[-n:].mean() for n in tails]
            within = all(abs(d) <= bar for d in tail)
            good &= within or not judged
            means = " | ".join(f"{d:+.5f}" for d in tail)
            verdict = (f"{bar}: " + ("met" if within else "MISSED")) if judged else ""
            print(f"| {b} - {a} | {difference[0]:+.1e} | {np.abs(difference[:10]).max():.1e} | {means} | {verdict} |")
    return good


def draw(losses, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, constrained_layout=True)
    first, reference = next(iter(losses.items()))
    steps = np.arange(1, len(reference) + 1)
    width = max(1, len(steps) // 20)
    for name, curve in losses.items():
        top.plot(steps, smoothed(curve), label=name, linewidth=1)
        mean = np.convolve(curve - reference, np.ones(width) / width, "valid")
        bottom.plot(steps[width - 1:], mean, label=name, linewidth=1)
    top.set_ylabel("training loss, smoothed (nats per token)")
    bottom.set_ylabel(f"difference to {first}, mean of {width} steps")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output, dpi=120)
    print(output)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--train-options", type=shlex.split, default=[], metavar="'--option value ...'",
                        help="more options for its train command")
    parser.add_argument("--data", required=True, help="a folder that `make data` wrote (TOKENIZER=gpt2 for GPT-2's vocabulary)")
    parser.add_argument("--out", required=True, help="the folder for weights, logs and the picture")
    parser.add_argument("--runs", nargs="+", choices=RUNS + [run + NUDGED for run in RUNS], default=RUNS + ["ours-bf16" + NUDGED],
                        metavar="RUN", help=f"which to run and compare: {', '.join(RUNS)}, each with or without {NUDGED}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where PyTorch runs (default %(default)s)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--channels", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bar", type=float, default=0.01, help="largest difference of means (default %(default)s)")
    return parser.parse_args()


def check_settings(args):
    """Runs of an earlier call are compared only if they were made alike."""
    path = os.path.join(args.out, "settings.json")
    settings = {name: getattr(args, name) for name in SETTINGS}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            stored = json.load(file)
        for name, value in settings.items():
            if stored.get(name) != value:
                raise CurvesError(f"{args.out} holds runs with --{name.replace('_', '-')} {stored.get(name)}, not {value}; "
                                  "name another --out")
    os.makedirs(args.out, exist_ok=True)
    write_json(path, settings, indent=1)


def compare(args):
    check_settings(args)
    losses = {}
    for name in args.runs:
        out = os.path.join(args.out, name)
        losses[name] = losses_of(out, args.steps)
        if losses[name] is not None:
            continue
        nudged = name.endswith(NUDGED)
        initial = os.path.join(args.out, "initial" + (NUDGED if nudged else ""))
        if not os.path.exists(os.path.join(initial, "config.json")):
            make_initial(args, initial, nudged)
        shutil.rmtree(out, ignore_errors=True)  # an unfinished run
        side, dtype = name.split("-")[:2]
        begin = time.monotonic()
        (train_ours if side == "ours" else train_torch)(args, dtype, initial, out)
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        losses[name] = losses_of(out, args.steps)
        if losses[name] is None:
            raise CurvesError(f"{out}/log.jsonl does not hold the losses of steps 1 to {args.steps}")
    good = report(losses, args.steps, args.bar)
    try:
        draw(losses, os.path.join(args.out, "curves.png"))
    except ImportError:
        print("compare_curves: no picture drawn, because matplotlib is not here (make venv installs it).", file=sys.stderr)
    return 0 if good else 1


def main():
    args = parse()
    return peer_main("compare_curves", lambda: compare(args), CurvesError, "PyTorch's runs need torch and transformers")


if __name__ == "__main__":
    sys.exit(main())
