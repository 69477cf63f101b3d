"""The timing part of dev/peers/bench_cpu.sh, which sets the number of threads and documents the usage.

Contenders are interleaved, so that a change of clocks affects all of them. Figures are medians over all steps of all
turns without the warm-up steps. tokens/s counts whole optimizer steps: forward, backward, gradient clipping and AdamW
(llm.c's program does not clip).
"""
import argparse
import json
import os
import platform
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass

import from_scripts  # noqa: F401
from measured_runs import WARMUP, write_tokens

WORK = os.path.join("build", "bench_cpu")  # random tokens and runs, removed at the end


@dataclass
class Setting:
    name: str
    options: list  # of our driver
    B: int
    T: int
    vocabulary: int
    steps: int
    torch_job: str  # of the PyTorch bench
    has_llmc: bool  # llm.c's CPU program knows this one setting only


SETTINGS = [
    Setting("GPT-2 124M, B4 T64", ["--model", "gpt2-124M"], 4, 64, 50257, 15, "cpu-gpt2-124M", True),
    Setting("4 layers x 128, B12 T64, V65", ["--model", "gpt2-tiny", "--max-positions", "64"], 12, 64, 65, 100,
            "cpu-char-128", False),
    Setting("6 layers x 384, B16 T256, V65", ["--model", "gpt2-mini", "--max-positions", "256"], 16, 256, 65, 15,
            "cpu-char-384", False),
]


def median_rate(setting, milliseconds):
    return setting.B * setting.T / (statistics.median(milliseconds) / 1e3)


def train_command(driver, setting, out):
    return [driver, "train", *setting.options, "--vocab-size", str(setting.vocabulary), "--data",
            os.path.join(WORK, f"tokens_{setting.vocabulary}"), "--out", out, "--batch-size", str(setting.B), "--seq-len",
            str(setting.T), "--steps", str(setting.steps), "--lr", "1e-4"]


def run_ours(driver, setting):
    """Milliseconds of each step after the warm-up."""
    out = os.path.join(WORK, "run")
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(train_command(driver, setting, out), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bench_cpu: {shlex.join(done.args)}\n{done.stderr}")
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
        return [entry["ms"] for entry in map(json.loads, log) if "ms" in entry][WARMUP:]


def run_llmc(program):
    """Milliseconds of each step after the warm-up. The program trains 40 steps; it is stopped before it samples text."""
    folder = os.path.dirname(os.path.abspath(program))
    process = subprocess.Popen(["stdbuf", "-oL", os.path.abspath(program)], cwd=folder, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    milliseconds, output = [], []
    for line in process.stdout:
        output.append(line)
        step = re.match(r"step \d+: train loss \S+ \(took (\S+) ms\)", line)
        if step:
            milliseconds.append(float(step.group(1)))
        if len(milliseconds) == WARMUP + 5:
            break
    process.kill()
    process.wait()
    if len(milliseconds) <= WARMUP:
        sys.exit(f"bench_cpu: {program} printed no steps (it needs its gpt2_124M.bin and tokens in {folder}):\n" + "".join(output))
    return milliseconds[WARMUP:]


def run_torch(command, setting):
    """The bench prints the median of its own steps: one figure."""
    done = subprocess.run([*command, setting.torch_job], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    found = re.search(r"([\d.]+) ms/step", done.stdout)
    if done.returncode or not found:
        sys.exit(f"bench_cpu: {shlex.join(done.args)} gave no ms/step:\n{done.stdout}")
    return [float(found.group(1))]


def compare_speed(driver, llmc, torch, repeats):
    print("\n| setting | this project, tokens/s | llm.c | ratio | PyTorch fp32 | ratio |")
    print("|---|---|---|---|---|---|")
    for setting in SETTINGS:
        contenders = {"ours": lambda: run_ours(driver, setting)}
        if llmc and setting.has_llmc:
            contenders["llmc"] = lambda: run_llmc(llmc)
        if torch:
            contenders["torch"] = lambda: run_torch(torch, setting)
        times = {name: [] for name in contenders}
        for _ in range(repeats):
            for name, contender in contenders.items():
                times[name] += contender()
        rates = {name: median_rate(setting, milliseconds) for name, milliseconds in times.items()}
        row = [setting.name, f"{rates['ours']:,.0f}"]
        for peer in ("llmc", "torch"):
            row += [f"{rates[peer]:,.0f}", f"{rates['ours'] / rates[peer]:.2f}"] if peer in rates else ["", ""]
        print("| " + " | ".join(row) + " |", flush=True)


def compare_memory(driver):
    """Plan against peak resident size (VmHWM), the mapped token files left out."""
    setting = Setting("GPT-2 124M, B4 T1024", ["--model", "gpt2-124M"], 4, 1024, 50257, 3, "", False)
    planned = subprocess.run([driver, "plan", *setting.options, "--vocab-size", str(setting.vocabulary), "--batch-size",
                              str(setting.B), "--seq-len", str(setting.T), "--json"], check=True, stdout=subprocess.PIPE)
    plan = json.loads(planned.stdout)["total_bytes"]
    # A child of its own, whose children's peak is this one run's.
    child = os.fork()
    if child == 0:
        run_ours(driver, setting)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        with open(os.path.join(WORK, "peak"), "w", encoding="ascii") as out:
            out.write(str(peak))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
    with open(os.path.join(WORK, "peak"), encoding="ascii") as written:
        peak = int(written.read())
    tokens = os.path.getsize(os.path.join(WORK, f"tokens_{setting.vocabulary}", "train_000000.bin"))
    print(f"\nmemory, {setting.name}: plan {plan / 2**30:.3f} GiB, peak resident less mapped tokens "
          f"{(peak - tokens) / 2**30:.3f} GiB, plan / peak {plan / (peak - tokens):.4f}")


def machine():
    cpu = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            cpu = re.search(r"model name\s*: (.*)", info.read()).group(1)
    except (OSError, AttributeError):
        pass
    return f"{cpu}, {os.cpu_count()} CPUs, {os.environ.get('OMP_NUM_THREADS', 'all')} threads used"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contender (default %(default)s)")
    args = parser.parse_args()
    llmc, torch = os.environ.get("LLMC"), shlex.split(os.environ.get("TORCH", ""))

    print(machine())
    print(subprocess.run([os.environ.get("CXX", "g++"), "--version"], stdout=subprocess.PIPE, text=True).stdout.splitlines()[0])
    print(subprocess.run([args.driver, "info"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    for setting in SETTINGS:
        write_tokens(os.path.join(WORK, f"tokens_{setting.vocabulary}"), setting.vocabulary)
        print("$", shlex.join(train_command(args.driver, setting, os.path.join(WORK, "run"))))
    if llmc:
        print("$", llmc)
    if torch:
        print("$", shlex.join(torch), " ".join(s.torch_job for s in SETTINGS))
    try:
        compare_speed(args.driver, llmc, torch, args.repeats)
        compare_memory(args.driver)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    main()
