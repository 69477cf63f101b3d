#!/usr/bin/env python3
"""Finetunes one checkpoint on the same batches in this project and in PyTorch, both in fp32, and compares the losses.

    make smollm2
    make data TEXT=questions.jsonl NAME=qa TOKENIZER=checkpoints/SmolLM2-135M-Instruct
    dev/peers/compare_finetune.py --model checkpoints/SmolLM2-135M-Instruct --data data/tokens/qa --out runs/finetune

With --lora-rank it trains adapters, on PyTorch's side with peft from our initial ones, and compares the final adapters
too; with --qlora on a base that bitsandbytes has quantised. --fixture FILE writes PyTorch's losses and adapters
(dev/fixtures/lora_training).

Needs torch and transformers (4 or 5). Both sides use the AdamW, clipping, learning rates, order of samples and loss
mask that `train_gpt train` documents. If the data holds conversations, this script packs them itself (best-fit
decreasing, as data/packing.h says), and PyTorch computes each example as a row of its own, padded at its end. It checks
that every step's loss is within --bar while PyTorch's falls by --fall or more, that the result loads in transformers
with our logits (to 1e-5 of their maximum in float64), that tokenizer and chat template are unchanged, and that the
validation loss has dropped. Exit status 1 if a check fails.

It also prints the median tokens/s of the steps on both sides. Text (no padding) and an idle machine make them
comparable; call it several times for interleaved pairs.
"""
import from_scripts  # noqa: F401
import argparse
import bisect
import filecmp
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from compare_curves import BETAS, EPS, FINAL_LR, CurvesError, learning_rate, losses_of, read_tokens, window_of_sample
from peer_main import peer_main
from run_log import read_log

CARRIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


LOSS, EXAMPLE_START = 1, 2  # flags of a token (docs/use/data.md)


def read_flags(folder, split):
    parts = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), split + "_*.bin"))):
        mask = path[:-4] + ".mask"
        count = int(np.fromfile(path, "<u4", 4)[2])
        parts.append(np.fromfile(mask, np.uint8, offset=1024) if os.path.exists(mask) else np.ones(count, np.uint8))
    return np.concatenate(parts)


def pack(units, T):
    """The training sequences as lists of units, by best-fit decreasing. A unit, which stays whole, is a tuple of
    examples: one, or both of a pair. An example is the range of its tokens."""
    def positions(unit):
        return sum(end - begin - 1 for begin, end in unit)

    sequences, rooms, by_room = [], [], {}  # rooms: in ascending order
    for unit in sorted(units, key=positions, reverse=True):
        needed, room = positions(unit), T
        if needed > T:
            raise CurvesError(f"an example or a pair takes {needed} positions, too long for --seq-len {T}; raise it")
        fits = bisect.bisect_left(rooms, needed)
        if fits < len(rooms):
            room = rooms[fits]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[fits]
        else:
            sequence = []
            sequences.append(sequence)
        sequence.append(unit)
        left = room - needed
        if left:
            if left not in by_room:
                bisect.insort(rooms, left)
            by_room.setdefault(left, []).append(sequence)
    return sequences


def batches(args):
    """The batch of every step: inputs and targets, int64 [rows, longest row]. A row is an example, or a training sequence
    of text. Targets without a loss are -100; causal attention keeps the padding at a row's end from its tokens."""
    tokens, flags = read_tokens(args.data, "train").astype(np.int64), read_flags(args.data, "train")
    B, T = args.batch_size, args.seq_len
    if (flags & EXAMPLE_START).any():
        starts = [*np.flatnonzero(flags & EXAMPLE_START), len(flags)]
        units = [(example,) for example in zip(starts, starts[1:])]
        sequences = [[example for unit in sequence for example in unit] for sequence in pack(units, T)]
    else:
        sequences = [[(begin, begin + T + 1)] for begin in range(0, len(tokens) - T, T)]
    for step in range(args.steps):
        chosen = [sequences[window_of_sample(args.seed, step * B + b, len(sequences))] for b in range(B)]
        rows = [row for sequence in chosen for row in sequence]
        longest = max(end - begin - 1 for begin, end in rows)
        x, y = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100)
        for row, (begin, end) in enumerate(rows):
            x[row, :end - begin - 1] = tokens[begin:end - 1]
            y[row, :end - begin - 1] = np.where(flags[begin + 1:end] & LOSS, tokens[begin + 1:end], -100)
        yield x, y


def run(*command, capture=False):
    command = [str(word) for word in command]
    print("$", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        raise CurvesError(f"{command[0]} {command[1]} failed; its own message is above")
    return done.stdout


def lora_options(args):
    if not args.lora_rank:
        return []
    options = ["--lora-rank", args.lora_rank, "--lora-alpha", args.lora_alpha, "--lora-targets", args.lora_targets]
    return options + ["--rslora"] * args.rslora + ["--qlora"] * args.qlora


def train_ours(args):
    run(args.driver, "train", "--model", args.model, "--data", args.data, "--out", args.out, "--steps", args.steps,
        "--batch-size", args.batch_size, "--seq-len", args.seq_len, "--lr", args.lr, "--final-lr", FINAL_LR,
        "--warmup", args.warmup, "--weight-decay", args.weight_decay, "--grad-clip", 1, "--beta1", BETAS[0],
        "--beta2", BETAS[1], "--seed", args.seed, "--eval-every", 0, "--save-every", 0, *lora_options(args))


def newest_checkpoint(folder):
    return sorted(glob.glob(os.path.join(folder, "step_*")))[-1]


def with_adapters(args, model):
    """peft's model with the adapters that our run starts from: those of a step with a learning rate of 0."""
    import peft
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        run(args.driver, "train", "--model", args.model, "--data", args.data, "--out", out, "--steps", 1,
            "--batch-size", 1, "--seq-len", args.seq_len, "--lr", 0, "--seed", args.seed, *lora_options(args))
        return peft.PeftModel.from_pretrained(model, newest_checkpoint(out), is_trainable=True)


def nf4_model(args, options):
    """transformers' model with the matrices of the blocks in NF4. On the CPU bitsandbytes misses the nearest 8-bit code
    of some blocks' maxima; they are corrected unless --missed-codes asks for them as they are."""
    import bitsandbytes
    import torch
    import transformers
    from make_nf4_fixture import nearest_absmax_codes
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                          bnb_4bit_compute_dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, quantization_config=nf4, **options)
    weights = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options).state_dict()
    missed = blocks = 0
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            nearest = nearest_absmax_codes(weights[name + ".weight"], state)
            missed += int((nearest != state.absmax).sum())
            blocks += len(nearest)
            if not args.missed_codes:
                state.absmax = nearest
    print(f"bitsandbytes misses the nearest 8-bit code of {missed:,} of {blocks:,} blocks; "
          f"{'kept' if args.missed_codes else 'corrected'}")
    return model


def train_torch(args):
    import torch
    import torch.nn.functional as F
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if args.qlora:
        model = nf4_model(args, options)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
    if args.lora_rank:
        model = with_adapters(args, model)
    if args.torch_float64:
        model.double()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.weight_decay},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=args.lr, betas=BETAS, eps=EPS)
    losses, seconds = [], []
    for step, (x, y) in enumerate(batches(args)):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        logits = model(torch.from_numpy(x), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        print(f"torch step {step + 1}  loss {losses[-1]:.6f}", file=sys.stderr, flush=True)
    adapters = {name: x.float().numpy() for name, x in peft_state(model).items()} if args.lora_rank else {}
    return np.array(losses), adapters, seconds


def peft_state(model):
    import peft
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


def val_loss(args, model):
    return json.loads(run(args.driver, "eval", "--model", model, "--data", args.data, "--seq-len", args.seq_len, "--json", capture=True))["val_loss"]


def check(what, good):
    print(f"{what}: {'yes' if good else 'NO'}")
    return good


def compare_adapters(args, checkpoint, losses, theirs):
    from safetensors.numpy import load_file, save_file
    if args.fixture:
        save_file({"losses": losses, **theirs}, args.fixture)
    ours = load_file(os.path.join(checkpoint, "adapter_model.safetensors"))
    good = check("the adapters have peft's names", set(ours) == set(theirs))
    rms = [np.sqrt(np.mean((ours[name] - x) ** 2) / np.mean(x ** 2)) for name, x in theirs.items()]
    good &= check(f"final adapters within {args.adapter_bar} (RMS of a difference: median {np.median(rms):.1e}, "
                  f"largest {max(rms):.1e})", max(rms) <= args.adapter_bar)
    before, after = val_loss(args, args.model), val_loss(args, args.out)
    return good & check(f"validation loss falls ({before:.4f} to {after:.4f})", after < before)


def compare(args):
    train_ours(args)
    ours, (theirs, adapters, seconds) = losses_of(args.out, args.steps), train_torch(args)
    if ours is None:
        raise CurvesError(f"{args.out}/log.jsonl does not hold the losses of steps 1 to {args.steps}; name an --out of its own")
    print(f"\n{'step':>4} {'ours':>11} {'PyTorch':>11} {'difference':>11}")
    for step, (a, b) in enumerate(zip(ours, theirs), 1):
        print(f"{step:4} {a:11.6f} {b:11.6f} {a - b:+11.1e}")
    our_seconds = [entry["ms"] / 1e3 for entry in read_log(args.out)[0]]
    rates = [args.batch_size * args.seq_len / statistics.median(s) for s in (our_seconds, seconds)]
    print(f"tokens/s (medians): ours {rates[0]:.1f}, PyTorch {rates[1]:.1f}, ratio {rates[0] / rates[1]:.2f}")
    worst = float(np.abs(ours - theirs).max())
    good = check(f"losses within {args.bar} (largest difference {worst:.1e})", worst <= args.bar)
    fall = float(theirs[0] - theirs[-1])
    good &= check(f"PyTorch's loss falls by at least {args.fall} ({fall:.2f})", fall >= args.fall)

    checkpoint = newest_checkpoint(args.out)
    if args.lora_rank:
        return good & compare_adapters(args, checkpoint, theirs, adapters)
    compared = subprocess.run([sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_hf.py"), checkpoint, "--driver",
                               args.driver], stdout=subprocess.PIPE, text=True)
    good &= check("transformers loads the result and computes the same", compared.returncode == 0)
    carried = [name for name in CARRIED if os.path.exists(os.path.join(args.model, name))]
    good &= check(", ".join(carried) + " carried over",
                  all(filecmp.cmp(os.path.join(args.model, name), os.path.join(checkpoint, name), False) for name in carried))
    before, after = val_loss(args, args.model), val_loss(args, checkpoint)
    return good & check(f"validation loss falls ({before:.4f} to {after:.4f})", after < before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--data", required=True, help="a folder that `make data TOKENIZER=MODEL` wrote")
    parser.add_argument("--out", required=True, help="the run directory to write")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bar", type=float, default=1e-4, help="largest difference of a step's loss (default %(default)s)")
    parser.add_argument("--fall", type=float, default=0, help="how far PyTorch's loss must fall (default %(default)s)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train LoRA adapters; needs peft")
    parser.add_argument("--lora-alpha", type=float, default=16)
    parser.add_argument("--lora-targets", default="all-linear")
    parser.add_argument("--rslora", action="store_true")
    parser.add_argument("--qlora", action="store_true", help="keep the base in NF4; needs bitsandbytes")
    parser.add_argument("--torch-float64", action="store_true",
                        help="PyTorch's side in float64: says whose rounding a difference is")
    parser.add_argument("--missed-codes", action="store_true",
                        help="with --qlora: bitsandbytes' 8-bit codes as they are")
    parser.add_argument("--adapter-bar", type=float, default=1e-4,
                        help="largest RMS of the difference of a final adapter, of its own RMS (default %(default)s)")
    parser.add_argument("--fixture", help="with --lora-rank: a .safetensors file to write")
    args = parser.parse_args()
    return peer_main("compare_finetune", lambda: 0 if compare(args) else 1, CurvesError, "it needs torch and transformers")


if __name__ == "__main__":
    sys.exit(main())
