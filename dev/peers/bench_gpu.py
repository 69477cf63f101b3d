#!/usr/bin/env python3
"""Benchmarks whole training steps on one GPU, side by side with other programs in one run on one machine.

    dev/peers/bench_gpu.py --driver build/cuda/train_gpt --llmc train_gpt2cu --torch-bench torch_bench.py

Each of the three is optional. docs/log/performance.md says how to build the peers; this script fetches and builds nothing.

Contenders are interleaved, so that a change of clocks affects all of them. Figures are medians over all steps of all
turns, without the first steps of each turn (warm-up and GEMM tuning). tokens/s counts whole optimizer steps: forward,
backward, gradient clipping and AdamW with fp32 master weights. Memory is the device's peak while the program ran minus
its use before, in GB of 10^9 bytes, so it includes the CUDA context and allocator caches; the peak of PyTorch's tensors
is shown separately. MFU uses this project's FLOP count and peak for all contenders (docs/log/performance.md).
"""
import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass

import from_scripts  # noqa: F401
from measured_runs import WARMUP, train_steps, write_tokens

SAMPLE_MS = 50  # between two looks at the memory in use


@dataclass
class Setting:
    name: str
    options: list  # of our driver, the shape of a step left out
    B: int
    T: int
    step_tokens: int
    vocabulary: int
    llmc: list  # options that make llm.c's program do the same; None: it cannot
    torch_job: str  # of the PyTorch bench; None: it has none


SETTINGS = {
    "124M": Setting("GPT-2 124M", ["--model", "gpt2-124M"], 64, 1024, 524288, 50257, ["-e", "d12", "-r", "0"], "gpt2-124M"),
    "124M-recompute": Setting("GPT-2 124M, activations recomputed", ["--model", "gpt2-124M", "--recompute", "activation"],
                              64, 1024, 524288, 50257, ["-e", "d12", "-r", "1"], None),
    "350M": Setting("GPT-2 350M", ["--model", "gpt2-350M"], 32, 1024, 131072, 50257, ["-e", "d24", "-r", "0"], "gpt2-350M"),
    "1558M": Setting("GPT-2 1558M", ["--model", "gpt2-1558M"], 8, 1024, 16384, 50257, ["-e", "d48", "-r", "0"], "gpt2-1558M"),
    "llama-1B": Setting("LLaMA 1B shape", ["--model", "llama-1B"], 4, 2048, 32768, 128256, None, "llama-1B"),
}


class Failed(Exception):
    """A contender gave no figures: what was run, and what it said last."""

    def __init__(self, command, output):
        lines = [line for line in output.splitlines() if line.strip()]
        super().__init__("$ " + shlex.join(command) + "\n  " + "\n  ".join(lines[-8:] or ["(no output)"]))


@dataclass
class Result:
    milliseconds: list
    log: dict = None  # our driver's last log line
    allocated: float = 0  # PyTorch's own figure: bytes of tensors at the most


class DeviceMemory:
    """with DeviceMemory(gpu) as memory: ...; memory.peak() is in bytes, less what was in use before."""

    def __init__(self, gpu):
        self.gpu, self.used = gpu, []

    def __enter__(self):
        self.process = subprocess.Popen(
            ["nvidia-smi", "-i", self.gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(SAMPLE_MS)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.used.append(int(self.process.stdout.readline()))  # before the contender starts
        self.reader = threading.Thread(target=lambda: self.used.extend(map(int, self.process.stdout)))
        self.reader.start()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def peak(self):
        return (max(self.used) - self.used[0]) * 2**20


def ours_command(args, setting, data, out):
    return [args.driver, "train", *setting.options, "--vocab-size", str(setting.vocabulary), "--dtype", "bf16", "--data", data,
            "--out", out, "--batch-size", str(setting.B), "--seq-len", str(setting.T), "--total-batch-tokens",
            str(setting.step_tokens), "--steps", "1000", "--lr", "1e-4", "--eval-every", "0", "--save-every", "0",
            *args.train_options]


def run_ours(command, steps):
    entries, said, _ = train_steps(command, steps)
    if len(entries) < WARMUP + steps:
        raise Failed(command, said)
    return Result([entry["ms"] for entry in entries[WARMUP:]], entries[-1])


def llmc_command(program, setting, fusion, steps, data):
    return [program, *setting.llmc, "-ge", str(fusion), "-i", os.path.join(data, "train_*.bin"), "-j",
            os.path.join(data, "train_*.bin"), "-b", str(setting.B), "-t", str(setting.T), "-d", str(setting.step_tokens), "-x",
            str(WARMUP + steps), "-l", "1e-4", "-c", "0.1", "-v", "1000", "-m", "1", "-s", "0", "-h", "0"]


def run_llmc(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    milliseconds = [float(ms) for ms in re.findall(r"^step .*\| ([\d.]+) ms \|", done.stdout, re.MULTILINE)]
    if done.returncode or len(milliseconds) <= WARMUP:
        raise Failed(command, done.stdout)
    return Result(milliseconds[WARMUP:])


def run_torch(command):
    """The bench prints the median of its own steps: one figure."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"([\d.]+) ms/step", done.stdout)
    if done.returncode or not found:
        raise Failed(command, done.stdout)
    allocated = re.search(r"peak ([\d.]+) GiB", done.stdout)
    return Result([float(found.group(1))], allocated=float(allocated.group(1)) * 2**30 if allocated else 0)


def contenders(args, setting, data, out):
    """[(name, command, how to run it)]"""
    result = []
    if args.driver:
        command = ours_command(args, setting, data, out)
        result.append(("this project", command, lambda: run_ours(command, args.steps)))
    if args.llmc and setting.llmc:
        for fusion in args.llmc_fusion:
            peer = llmc_command(args.llmc, setting, fusion, args.steps, data)
            name = "llm.c" + ("", ", GELU fused forward", ", GELU fused")[fusion]
            result.append((name, peer, lambda peer=peer: run_llmc(peer)))
    if args.torch_bench and setting.torch_job:
        for attention in args.torch_attention:
            peer = [args.python, args.torch_bench, setting.torch_job] + (["--cudnn"] if attention == "cudnn" else [])
            name = "PyTorch compile" + (", cuDNN attention" if attention == "cudnn" else "")
            result.append((name, peer, lambda peer=peer: run_torch(peer)))
    return result


def compare(args, setting, data, out):
    """Runs one setting and prints its rows; the commands and failures go to stderr."""
    field = contenders(args, setting, data, out)
    times, peaks, allocated, mfu_per_rate = {name: [] for name, _, _ in field}, {}, {}, None
    for turn in range(args.repeats):
        for name, command, run in field:
            if turn == 0:
                print("$", shlex.join(command), file=sys.stderr, flush=True)
            elif not times[name]:
                continue  # it failed already
            try:
                with DeviceMemory(args.gpu) as memory:
                    result = run()
            except Failed as failure:
                print(f"bench_gpu: {setting.name}, {name}: failed\n{failure}", file=sys.stderr, flush=True)
                times[name] = []
                continue
            times[name] += result.milliseconds
            peaks[name] = max(memory.peak(), peaks.get(name, 0))
            allocated[name] = result.allocated
            if result.log:
                mfu_per_rate = result.log["mfu"] / result.log["tokens_per_s"]
    rates = {name: setting.step_tokens / (statistics.median(ms) / 1e3) for name, ms in times.items() if ms}
    for name in times:
        row = [setting.name, f"B{setting.B} T{setting.T}, {setting.step_tokens:,} a step", name]
        if name not in rates:
            row += ["failed", "", "", ""]
        else:
            ours = rates.get("this project")
            row += [f"{rates[name]:,.0f}", f"{ours / rates[name]:.3f}" if ours and name != "this project" else "",
                    f"{100 * mfu_per_rate * rates[name]:.1f}%" if mfu_per_rate else "",
                    f"{peaks[name] / 1e9:.1f} GB" + (f", tensors {allocated[name] / 1e9:.1f}" if allocated[name] else "")]
        print("| " + " | ".join(row) + " |", flush=True)
    return len(rates) == len(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", help="this project's train_gpt, built for CUDA")
    parser.add_argument("--train-options", type=shlex.split, default=[], metavar="'--option value ...'",
                        help="more options for its train command")
    parser.add_argument("--llmc", help="llm.c's train_gpt2cu")
    parser.add_argument("--llmc-fusion", type=int, nargs="+", choices=[0, 1, 2], default=[2],
                        help="its -ge: GELU fused into the GEMMs not at all, forward, or forward and backward (default 2, its "
                        "fastest on an H100)")
    parser.add_argument("--torch-bench", help="the PyTorch bench")
    parser.add_argument("--torch-attention", nargs="+", choices=["default", "cudnn"], default=["cudnn"],
                        help="what serves its attention: what it picks itself, or cuDNN alone (default cudnn, the faster)")
    parser.add_argument("--python", default=sys.executable, help="the Python that has PyTorch (default: this one)")
    parser.add_argument("--data", help="a folder with train_*.bin of GPT-2's vocabulary (default: random tokens)")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING",
                        help="some of: " + ", ".join(SETTINGS))
    parser.add_argument("--steps", type=int, default=10, help="steps that count, in each turn (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="turns of each contender (default %(default)s)")
    parser.add_argument("--gpu", default="0", help="which GPU (default %(default)s)")
    args = parser.parse_args()
    if not (args.driver or args.llmc or args.torch_bench):
        parser.error("nothing to run: give --driver, --llmc or --torch-bench")
    if args.steps < 1 or args.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=args.gpu)  # numbered as nvidia-smi does

    gpu = subprocess.run(["nvidia-smi", "-i", args.gpu, "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
                          "--format=csv,noheader"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    print(f"{gpu}; medians of {args.repeats} x {args.steps} steps\n")
    print("| model | step | program | tokens/s | ours / this | MFU | peak memory |\n|---|---|---|---|---|---|---|")
    complete, data = True, {}
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as work:
        for setting in map(SETTINGS.get, args.only):
            if args.data:
                data[setting.vocabulary] = args.data
            elif setting.vocabulary not in data:
                data[setting.vocabulary] = write_tokens(os.path.join(work, f"tokens_{setting.vocabulary}"), setting.vocabulary)
            complete &= compare(args, setting, data[setting.vocabulary], os.path.join(work, "run"))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
