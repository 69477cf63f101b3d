#!/usr/bin/env python3
"""Trains modern-124M from the same weights on the same batches in this project and by the script of modded-nanogpt's
track 3 (records/track_3_optimization/train_gpt_simple.py), and compares losses and speed.

    dev/peers/compare_track3.py losses --script train_gpt_simple.py --driver build/cuda/train_gpt \\
        --data data/tokens/linux --out runs/track3 --dtype fp32 --steps 20 --step-tokens 16384 --bar 1e-3
    dev/peers/compare_track3.py speed --script train_gpt_simple.py --driver build/cuda/train_gpt \\
        --data data/tokens/linux --out runs/track3-speed --step-tokens 524288 --batch-size 64

Needs torch in addition to scripts/requirements.txt. The script is read, never changed or copied: its classes and
functions are executed, its training loop is not. This file repeats the loop's settings: initial learning rates, betas,
weight decays, no clipping, no warm-up.

What differs from the script as it is:
- The initial weights are this project's (--seed); halves of each head of q and k are exchanged on the way, because the
  script rotates in the other direction.
- Its embedding has fp32 weights, as all its other parameters have; its output is cast to bf16 in bf16.
- --dtype fp32: the cast to bf16 in its Newton-Schulz iteration is removed.

losses: the runs are `ours` and `script`. Prints the largest difference of a step's loss, the difference of the means of
--mean-steps, and the difference of the validation losses. Exit status 1 if the largest difference (fp32) or one of the
other two (bf16) exceeds --bar. In bf16 a third run follows if one does: `script-half`, the script with half the
micro-batch. Its difference from `script` shows what rounding alone does, and if it is larger, it is the bar.
Results are kept in --out: the same command does only the runs that are not finished.
speed: prints the median time of a step of each side; sides take turns.
"""
import from_scripts  # noqa: F401
import argparse
import ast
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from compare_curves import CurvesError, batches, read_tokens
from peer_main import peer_main, write_json
from run_log import LogError, read_log, values

RATES = {"hidden": 0.025, "embedding": 0.7, "head": 0.004, "vector": 0.015}
BETAS, EPS, MUON_DECAY, ADAM_DECAY = (0.8, 0.95), 1e-10, 0.05, 0.001
HEAD_SIZE = 128


class TrackError(Exception):
    """One line: what failed and the remedy."""


# ---- The script's side ----------------------------------------------------------------------------------------------

def script_definitions(path, fp32):
    """The script's imports, classes and functions as a namespace."""
    with open(path, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    code = ast.unparse(tree)
    if fp32:
        if "G.bfloat16()" not in code:
            raise TrackError(f"{path}: no cast G.bfloat16() in its Newton-Schulz iteration; is it train_gpt_simple.py?")
        code = code.replace("G.bfloat16()", "G.float()")
    names = {"__name__": "track3"}
    exec(compile(code, path, "exec"), names)
    return names


def swapped_halves(rows):
    """q or k with the halves of each head exchanged. rows: [heads * HEAD_SIZE, ...]."""
    heads = rows.reshape(-1, 2, HEAD_SIZE // 2, *rows.shape[1:])
    return heads.flip(1).reshape(rows.shape)


def script_weights(model_file):
    """This project's weights by the names of the script's model."""
    from safetensors.torch import load_file
    ours = load_file(model_file)
    theirs = {"embed.weight": ours["wte.weight"], "norm1.gains": ours["embednorm.weight"],
              "norm2.gains": ours["normf.weight"], "proj.weight": ours["head.weight"], "proj.bias": ours["head.bias"]}
    layers = 1 + max(int(name.split(".")[1]) for name in ours if name.startswith("layers."))
    for layer in range(layers):
        a, b = f"layers.{layer}.", f"blocks.{layer}."
        for kind in "weight", "bias":
            q, k, v = ours[f"{a}qkv.{kind}"].chunk(3)
            theirs |= {f"{b}attn.q.{kind}": swapped_halves(q), f"{b}attn.k.{kind}": swapped_halves(k),
                       f"{b}attn.v.{kind}": v, f"{b}attn.proj.{kind}": ours[f"{a}proj.{kind}"],
                       f"{b}mlp.fc.{kind}": ours[f"{a}fc.{kind}"], f"{b}mlp.proj.{kind}": ours[f"{a}fcproj.{kind}"]}
        theirs |= {f"{b}norm1.gains": ours[f"{a}norm1.weight"], f"{b}norm2.gains": ours[f"{a}norm2.weight"]}
    return layers, theirs


class ScriptRun:
    """The script's model and optimizers on this machine's first GPU, or on the CPU."""

    def __init__(self, args, initial):
        import torch
        import torch.distributed as dist
        self.torch, self.args = torch, args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.store = tempfile.NamedTemporaryFile()
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo", rank=0, world_size=1,
                                init_method=f"file://{self.store.name}-store")
        names = script_definitions(args.script, args.dtype == "fp32")
        layers, weights = script_weights(initial)
        vocabulary, channels = weights["embed.weight"].shape
        model = names["GPT"](vocabulary, layers, channels)
        dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16

        class Embedding(torch.nn.Embedding):
            def forward(self, tokens):
                return super().forward(tokens).to(dtype)

        model.embed = Embedding(vocabulary, channels)
        model.load_state_dict(weights, strict=False)
        missing = set(dict(model.named_parameters())) - set(weights)
        if missing:
            raise TrackError(f"{args.script}: no weights for {', '.join(sorted(missing))}; is it train_gpt_simple.py?")
        self.model = model.to(self.device)
        vectors = [p for p in model.parameters() if p.ndim < 2]
        adamw = torch.optim.AdamW([dict(params=[model.embed.weight], lr=RATES["embedding"]),
                                   dict(params=[model.proj.weight], lr=RATES["head"]),
                                   dict(params=vectors, lr=RATES["vector"])],
                                  betas=BETAS, eps=EPS, weight_decay=ADAM_DECAY, fused=self.device == "cuda")
        muon = names["Muon"]([p for p in model.blocks.parameters() if p.ndim >= 2], lr=RATES["hidden"],
                             weight_decay=MUON_DECAY)
        self.optimizers = [adamw, muon]
        if self.device == "cuda":
            self.model.compile(dynamic=False)

    def tensor(self, rows):
        return self.torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)

    def step(self, inputs, targets, micro_batch):
        """One step over [B, T] tokens; returns the mean loss before the update."""
        total = 0
        for begin in range(0, len(inputs), micro_batch):
            rows = slice(begin, begin + micro_batch)
            loss = self.model(self.tensor(inputs[rows]), self.tensor(targets[rows]))
            loss.backward()
            total += loss.detach().double()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return total / inputs.size

    def validation_loss(self, tokens, end_of_text):
        """Of the first tokens, as many as whole micro-batches hold (validation_tokens())."""
        T, B = self.args.seq_len, self.args.batch_size
        text = np.concatenate([[end_of_text], tokens]).astype(np.int64)
        rows = validation_tokens(self.args, tokens) // T
        total = 0
        with self.torch.no_grad():
            for begin in range(0, rows, B):
                part = text[begin * T:(begin + B) * T + 1]
                total += self.model(self.tensor(part[:-1].reshape(B, T)), self.tensor(part[1:].reshape(B, T))).double()
        return float(total) / (rows * T)

    def close(self):
        self.torch.distributed.destroy_process_group()


def validation_tokens(args, tokens):
    micro_tokens = args.batch_size * args.seq_len
    return min(len(tokens), args.eval_tokens) // micro_tokens * micro_tokens


# ---- This project's side --------------------------------------------------------------------------------------------

def ours(args, out, steps, rates, extra=()):
    micro_tokens = args.batch_size * args.seq_len
    if args.step_tokens % micro_tokens:
        raise TrackError(f"--step-tokens {args.step_tokens} is not a multiple of a micro-step's {micro_tokens} tokens")
    command = [args.driver, "train", "--model", args.model, "--data", args.data, "--out", out, "--dtype", args.dtype,
               "--steps", steps, "--batch-size", args.batch_size, "--seq-len", args.seq_len, "--total-batch-tokens",
               args.step_tokens, "--seed", args.seed, "--optimizer", "muon", "--lr", rates["hidden"], "--embedding-lr",
               rates["embedding"], "--head-lr", rates["head"], "--vector-lr", rates["vector"], "--beta1", BETAS[0],
               "--beta2", BETAS[1],
               # The script adds up the losses of a step, so that its gradients are larger by the tokens of a step.
               "--adam-eps", EPS / args.step_tokens, "--weight-decay", MUON_DECAY, "--adam-weight-decay", ADAM_DECAY,
               "--grad-clip", 0, "--momentum", 0.95, "--momentum-warmup", 0, "--muon-coefficients", "simple",
               "--muon-scale", "spectral", "--schedule", "constant", "--warmup", 0, "--eval-every", steps, *extra]
    if args.layers:
        command += ["--layers", args.layers, "--channels", 64 * args.layers, "--heads", args.layers // 2]
    command = [str(word) for word in command]
    shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise TrackError(f"$ {shlex.join(command)}: {last}")
    return read_log(out)


def initial_weights(args):
    """The model file of this project's initial weights: those after one step at rate 0."""
    out = os.path.join(args.out, f"initial-{args.seed}")
    path = os.path.join(out, "step_00000001", "model.safetensors")
    if not os.path.exists(path):
        ours(args, out, 1, dict.fromkeys(RATES, 0))
    return path


# ---- Comparisons ----------------------------------------------------------------------------------------------------

def finished_runs(path, settings):
    """By name: (the losses of all steps, the validation loss) of runs with these settings."""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
    except OSError:
        return {}
    return saved["runs"] if saved.get("settings") == settings else {}


def losses(args):
    path = os.path.join(args.out, f"losses-{args.dtype}-{args.seed}.json")
    settings = {key: value for key, value in vars(args).items() if key not in ("comparison", "bar", "mean_steps", "out")}
    results = finished_runs(path, settings)

    def keep(name, steps, val_loss):
        results[name] = (steps, val_loss)
        write_json(path, {"settings": settings, "runs": results})

    initial = initial_weights(args)
    tokens, validation = read_tokens(args.data, "train"), read_tokens(args.data, "val")
    if "ours" not in results:
        training, evaluations = ours(args, os.path.join(args.out, f"ours-{args.dtype}-{args.seed}"), args.steps, RATES,
                                     ["--save-every", 0, "--eval-tokens", validation_tokens(args, validation)])
        keep("ours", values(training, "loss")[1], evaluations[-1]["val_loss"])
    with open(os.path.join(args.data, "meta.json"), encoding="utf-8") as file:
        end_of_text = json.load(file)["end_of_text"]
    order = argparse.Namespace(batch_size=args.step_tokens // args.seq_len, seq_len=args.seq_len, steps=args.steps,
                               seed=args.seed)

    def run_script(name, micro_batch):
        if name in results:
            return
        run = ScriptRun(args, initial)
        steps = [float(run.step(*batch, micro_batch)) for batch in batches(tokens, order)]
        keep(name, steps, run.validation_loss(validation, end_of_text))
        run.close()

    run_script("script", args.batch_size)
    span = args.mean_steps or (args.steps // 2 + 1, args.steps)
    if args.dtype == "bf16" and max(differences(results["ours"], results["script"], *span)[1:]) > args.bar:
        run_script("script-half", args.batch_size // 2)
    return agree(results, args.dtype, *span, args.bar)


def differences(a, b, first, last):
    """Of two runs (losses of the steps, validation loss): the largest of a step, that of the means of steps `first` to
    `last`, and that of the validation losses."""
    (x, val_x), (y, val_y) = a, b
    means = [statistics.mean(run[first - 1:last]) for run in (x, y)]
    return max(abs(p - q) for p, q in zip(x, y)), abs(means[0] - means[1]), abs(val_x - val_y)


def agree(results, dtype, first, last, bar):
    """Prints the runs and their differences; whether `ours` and `script` are as near as they must be."""
    for name, (steps, val) in results.items():
        print(f"{name:12} first {steps[0]:.5f}  last {steps[-1]:.5f}  val_loss {val:.5f}")
    step, mean, val = differences(results["ours"], results["script"], first, last)
    print(f"ours - script: largest of a step {step:.6f}, mean of steps {first} to {last} {mean:.6f}, "
          f"validation {val:.6f}")
    if dtype == "fp32":
        return step <= bar
    own_mean = own_val = 0
    if "script-half" in results:
        _, own_mean, own_val = differences(results["script"], results["script-half"], first, last)
        print(f"script - script-half: mean of steps {first} to {last} {own_mean:.6f}, validation {own_val:.6f}")
    return mean <= max(bar, own_mean) and val <= max(bar, own_val)


def speed(args):
    initial = initial_weights(args)
    tokens = read_tokens(args.data, "train")
    order = argparse.Namespace(batch_size=args.step_tokens // args.seq_len, seq_len=args.seq_len, steps=args.steps,
                               seed=args.seed)
    times = {"ours": [], "script": []}
    for turn in range(args.turns):
        training, _ = ours(args, os.path.join(args.out, f"ours-{turn}"), args.steps, RATES,
                           ["--save-every", 0, "--eval-tokens", 65536])
        times["ours"] += values(training, "ms")[1][args.warmup:]
        run = ScriptRun(args, initial)
        for i, batch in enumerate(batches(tokens, order)):
            run.torch.cuda.synchronize()
            begin = time.perf_counter()
            run.step(*batch, args.batch_size)
            run.torch.cuda.synchronize()
            if i >= args.warmup:
                times["script"].append((time.perf_counter() - begin) * 1e3)
        run.close()
        del run
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    for name, ms in medians.items():
        print(f"{name:8} {ms:9.1f} ms a step  {args.step_tokens / ms * 1e3:11,.0f} tokens/s")
    print(f"ours is {medians['script'] / medians['ours']:.3f} times as fast")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=["losses", "speed"])
    parser.add_argument("--script", required=True, help="train_gpt_simple.py")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--data", required=True, help="directory of tokens")
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="modern-124M")
    parser.add_argument("--layers", type=int, help="a smaller model of 64 channels a layer (default: the preset's)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--step-tokens", type=int, default=65536)
    parser.add_argument("--eval-tokens", type=int, default=1 << 20, help="validation tokens, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bar", type=float, default=0.01)
    parser.add_argument("--mean-steps", type=int, nargs=2, metavar=("FIRST", "LAST"),
                        help="losses: the steps whose means are compared (default: the last half)")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=4, help="speed: steps of each turn that are not counted")
    args = parser.parse_args()
    if args.mean_steps and not 1 <= args.mean_steps[0] <= args.mean_steps[1] <= args.steps:
        parser.error("--mean-steps: they must be steps of the run, the first before the last")
    os.makedirs(args.out, exist_ok=True)
    compare = {"losses": losses, "speed": speed}[args.comparison]
    return peer_main("compare_track3", lambda: 0 if compare(args) else 1, (TrackError, CurvesError, LogError),
                     "it needs torch and safetensors")


if __name__ == "__main__":
    sys.exit(main())
