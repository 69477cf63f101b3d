#!/usr/bin/env python3
"""The measuring part of scripts/report.sh, which builds and documents the usage.

The report has the sections of the issue template. It is written anew, whole, after each part, so that it survives
whatever ends this program. It holds no host or user name, no path outside the tree and no serial number.
"""
import argparse
import contextlib
import functools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from measured_runs import WARMUP, run_command, train_steps, write_tokens
from scrub import ROOT, scrub

TEMPLATE = os.path.join(ROOT, ".github", "ISSUE_TEMPLATE", "machine_report.md")
WORK = os.path.join("build", "report")  # random tokens and runs, removed at the end
STEPS = 20  # that a training run is timed over, if there is time for so many
STEP_SECONDS = 3  # that a training step may take, by the machine's limits
MODELS = {"gpt2-124M": 50257, "qwen2.5-0.5B": 151936}  # name → vocabulary
SPEED_HEAD = "| model | what | how | tokens/s | details |\n|---|---|---|---|---|"


class Failed(Exception):
    """Why a part has no result, in one line."""


@dataclass
class Part:
    name: str
    section: str  # heading of the template
    seconds: float  # of 300; what it leaves is for the parts after it
    measure: object  # () → Markdown
    line: str = "{}"  # where it has no result: the place of the reason
    text: str = ""


def last_line(output, ending):
    """For an error: how a command ended and what it said last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = scrub(lines[-1])[:400] if lines else ""
    return ": ".join(filter(None, [ending, said])) or "no output"


def cell(text):
    """Text as Markdown shows it in a table or list: GitHub takes <x> for HTML."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def flops(rate):
    return f"{rate / 1e9:,.1f} GFLOP/s" if rate < 1e13 else f"{rate / 1e12:,.1f} TFLOP/s"


class Machine:
    """Measures the parts. It knows the build and, once they are measured, the limits."""

    def __init__(self, args):
        self.build = args.build
        self.build_log, self.build_seconds = args.build_log, args.build_seconds
        self.on_gpu = os.path.basename(args.build).startswith("cuda")
        self.dtype = "bf16" if self.on_gpu else "fp32"
        self.limits = {}  # "copy": bytes/s, "fp32", "bf16": FLOP/s
        self.commands = []  # that measured speed
        self.deadline = math.inf  # of the part that runs

    def left(self):
        return max(0.0, self.deadline - time.monotonic())

    def run(self, command, limit=math.inf):
        return run_command(command, min(limit, self.left()))

    def query(self, command):
        """A program's output, or None if it is not there or fails."""
        output, ending = self.run(command, 10)
        return None if ending else output.strip()

    def program(self, name):
        path = os.path.join(self.build, name)
        if not self.build or not os.access(path, os.X_OK):
            raise Failed(f"{os.path.basename(name)} is not built: {self.build_error()}")
        return path

    def build_error(self):
        try:
            with open(self.build_log, encoding="utf-8", errors="replace") as log:
                lines = [line.strip() for line in log if line.strip()]
        except OSError:
            return "there is no log of the build"
        # The line of a compiler or script, not make's after it.
        errors = [line for line in lines if re.search(r"error:|cannot find|^Missing:|^CUDA build:", line)] or lines[-1:]
        return scrub(errors[0])[:400] if errors else "the log of the build is empty"

    def note(self, command):
        self.commands.append(shlex.join(["./train_gpt", *command[1:]]))

    # ---- what it is

    def describe(self):
        try:  # first: queries of a busy GPU may take the part's time
            version, ending = self.run([self.program("train_gpt"), "--version"], 20)
            version = scrub(version.strip()) + (f"\n({ending})" if ending else "")
        except Failed as failed:
            version = str(failed)
        rows = [("system", scrub(self.system())), ("CPU", self.cpu()), *self.gpus(), ("CUDA", self.toolkit()),
                ("busy before", self.load())]
        table = "".join(f"| {name} | {cell(text)} |\n" for name, text in rows if text)
        missing = [] if version.startswith("train_gpt is not built") else self.not_built()
        note = f"\n\nNot built: {', '.join(missing)}: {cell(self.build_error())}" if missing else ""
        return (f"| | |\n|---|---|\n{table}\n`train_gpt --version`, built in {self.build_seconds:.0f} s:\n\n"
                f"```\n{version}\n```{note}")

    def not_built(self):
        programs = ["dev/bench_matmul", *self.test_programs()]
        return [os.path.basename(name) for name in programs if not os.access(os.path.join(self.build, name), os.X_OK)]

    def system(self):
        name = None
        with contextlib.suppress(OSError):
            with open("/etc/os-release", encoding="utf-8") as file:
                name = re.search(r'^PRETTY_NAME="?([^"\n]*)', file.read(), re.M)
        return f"{name[1] if name else 'unknown'}, {platform.system()} {platform.release()}, {platform.machine()}"

    def cpu(self):
        model = re.search(r"^Model name:\s*(.*)", self.query(["lscpu"]) or "", re.M)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return (f"{model[1] if model else 'unknown'}, {cores} of {os.cpu_count()} threads usable, "
                f"{memory / 2**30:.1f} GiB of memory")

    def gpus(self):
        fields = "name,memory.total,driver_version,compute_cap,power.limit,clocks.max.sm"
        listed = self.query(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        if not listed:
            return [("GPU", "none that nvidia-smi lists")]
        lines = listed.splitlines()
        rows = [("GPU", f"{lines.count(line)} × {line}") for line in dict.fromkeys(lines)]
        rows[0] = (f"GPU ({fields.replace(',', ', ')})", rows[0][1])
        if not self.on_gpu:
            rows.append(("build", "for the CPU although there is a GPU: no nvcc was found, or BACKEND=cpu was given"))
        return rows

    def toolkit(self):
        nvcc = self.query(["scripts/find_cuda.sh", "nvcc"]) if self.on_gpu else None
        found = re.search(r"release [\d.]+, V([\d.]+)", self.query([nvcc, "--version"]) or "") if nvcc else None
        supported = re.search(r"CUDA Version: ([\d.]+)", self.query(["nvidia-smi"]) or "")
        facts = [found and f"nvcc {found[1]}", supported and f"the driver supports CUDA {supported[1]}"]
        return ", ".join(filter(None, facts))

    def load(self):
        text = f"load average {os.getloadavg()[0]:.2f}"
        fields = "utilization.gpu,memory.used,temperature.gpu"
        used = self.query(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        return text + (f"; GPU (utilization, memory, °C): {'; '.join(used.splitlines())}" if used else "")

    # ---- tests

    def test_programs(self):
        listed = self.query(["scripts/kernel_tests.sh", "."]) or ""
        return ["test_gpt", *(os.path.normpath(name) for name in listed.split())]

    def test(self):
        programs = [os.path.join(self.build, name) for name in self.test_programs()]
        built = [program for program in programs if os.access(program, os.X_OK)]
        if not built:
            self.program("test_gpt")
        limit = f"{max(0.1, self.left() - 3):.1f}"
        output, ending = self.run([sys.executable, "scripts/run_tests.py", "--limit", limit, *self.test_jobs(), *built])
        return summary_of_tests(output, ending, len(programs))

    def test_jobs(self):
        """Programs that run side by side share the GPU's memory."""
        memory = self.query(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]) or ""
        if not self.on_gpu or not memory[:1].isdigit():
            return []
        return ["--jobs", str(max(1, min(8, os.cpu_count() // 2, int(memory.split()[0]) // 6000)))]

    # ---- limits

    def measure_limits(self):
        rows = "forward/bf16/N:65536/C:(768|3072)/|forward/bf16/N:8192/C:768/" if self.on_gpu else "forward/fp32/N:256/"
        output, ending = self.run([self.program("dev/bench_matmul"), f"--benchmark_filter=^({rows})"])
        found = re.search(r"copy ([\d.]+) GB/s, triad ([\d.]+) GB/s, ([\d.]+) GFLOP/s fp32(?:, ([\d.]+) GFLOP/s bf16)?",
                          output)
        if not found:
            raise Failed(last_line(output, ending))
        copy, triad, fp32, bf16 = (float(number or 0) for number in found.groups())
        self.limits = {"copy": copy * 1e9, "fp32": fp32 * 1e9, "bf16": bf16 * 1e9}
        fp32_is = "a large matmul, fp32" if self.on_gpu else "independent FMAs on all threads, fp32"
        table = [("copy, bytes read + written", f"{copy:,.0f} GB/s"),
                 ("triad a = b + s·c, fp32, bytes of three arrays", f"{triad:,.0f} GB/s"),
                 (fp32_is, flops(self.limits["fp32"]))]
        if bf16:
            table.append(("a large matmul, bf16", flops(self.limits["bf16"])))
        for dtype, n, c, oc, ms, rate, unit in re.findall(
                r"^forward/(\w+)/N:(\d+)/C:(\d+)/OC:(\d+)\s+([\d.]+) ms\s+([\d.]+) ([GT]FLOP/s)", output, re.M):
            table.append((f"linear layer forward, {dtype}, [{n}, {c}] × [{c}, {oc}] + bias",
                          f"{rate} {unit}, {float(ms):.3f} ms"))
        ended = f"\n\nNot all: {cell(last_line(output, ending))}" if ending else ""
        return "| what | measured |\n|---|---|\n" + "\n".join(f"| {what} | {rate} |" for what, rate in table) + ended

    # ---- speed

    def plan(self, *options):
        output, ending = self.run([self.program("train_gpt"), "plan", "--dtype", self.dtype, "--json", *options], 20)
        if ending:
            raise Failed(last_line(output, ending))
        return json.loads(output[output.index("{"):])

    def training_shape(self, model):
        """Sequences, their length, tokens a step: a step of about STEP_SECONDS by the machine's limits, and the largest
        batch that fits without other options."""
        length, most = (1024, 2 ** 19) if self.on_gpu else (64, 256)
        shape = ["--model", model, "--seq-len", str(length)]
        rate = 0.4 * self.limits.get(self.dtype, 0) / self.plan(*shape, "--batch-size", "1")["flop_per_token"]
        tokens = most
        while tokens > length and tokens > rate * STEP_SECONDS:
            tokens //= 2
        batch_size = min(64, tokens // length)
        while batch_size > 1:
            with contextlib.suppress(Failed):
                if not self.plan(*shape, "--batch-size", str(batch_size), "--fit")["fit"]["options"]:
                    break
            batch_size //= 2
        return batch_size, length, tokens

    def train(self, model):
        batch_size, length, tokens = self.training_shape(model)
        vocabulary = MODELS[model]
        data = write_tokens(os.path.join(WORK, f"tokens_{vocabulary}"), vocabulary)
        command = [self.program("train_gpt"), "train", "--model", model, "--vocab-size", str(vocabulary),
                   "--dtype", self.dtype, "--batch-size", str(batch_size), "--seq-len", str(length),
                   "--total-batch-tokens", str(tokens), "--fit", "--steps", "1000", "--eval-every", "0",
                   "--save-every", "0", "--data", data, "--out", os.path.join(WORK, "run")]
        self.note(command)
        how = f"{self.dtype}, B{batch_size} T{length}, {tokens:,} tokens a step, AdamW"
        entries, output, ending = train_steps(command, STEPS, self.left())
        if not entries:
            raise Failed(f"no step: {ending} ({how})" if ending.startswith("no end") else last_line(output, ending))
        # On a slow machine the first step is all that may be left out.
        counted = entries[min(WARMUP, len(entries) // 2):]
        ms = statistics.median(entry["ms"] for entry in counted)
        fit = re.search(r"^--fit: (.*)", output, re.M)
        peak = re.search(r"^MFU is a fraction of ([\d,]+) GFLOP/s(.*)", output, re.M)
        details = [f"median of {len(counted)} steps after {len(entries) - len(counted)} ({ms:,.0f} ms)"]
        if peak and isinstance(counted[-1].get("mfu"), (int, float)):
            mfu = statistics.median(entry["mfu"] for entry in counted)
            details.append(f"MFU {100 * mfu:.1f}% of {flops(float(peak[1].replace(',', '')) * 1e9)}{peak[2]}")
        details.append(f"memory planned by --fit: {fit[1]}" if fit else "")
        if ending and len(entries) < WARMUP + STEPS and not ending.startswith("no end"):
            details.append(f"then it ended: {last_line(output, ending)}")
        return f"| {model} | train | {how} | {tokens / ms * 1e3:,.0f} | {cell('; '.join(filter(None, details)))} |"

    def decode(self, model, sequences):
        """Of 16 tokens, and then of as many as these say that there is time for."""
        command = [self.program("train_gpt"), "sample", "--model", model, "--random-weights", "--ignore-eos",
                   "--dtype", self.dtype, "--temperature", "0", "--num-samples", str(sequences), "--json"]

        def sample(count):
            output, ending = self.run([*command, "--max-tokens", str(count)])
            found = re.search(r'^\{.*"statistics".*', output, re.M)
            if ending or not found:
                raise Failed(last_line(output, ending))
            return json.loads(found[0])["statistics"]

        began, count, most = time.monotonic(), 16, 256
        got = sample(count)
        start_up = time.monotonic() - began - got["decode_seconds"]
        while most > count and start_up + most * got["decode_seconds"] / (count - 1) > 0.6 * self.left():
            most //= 2
        failed = ""
        if most > count:
            try:
                got, count = sample(most), most
            except Failed as failure:
                failed = f"; {most} tokens: {failure}"
        self.note([*command, "--max-tokens", str(count)])
        seconds = got["decode_seconds"]
        details = f"all sequences together, {seconds:.2f} s{cell(failed)}"
        if got.get("decode_bytes"):
            details += f", {got['decode_bytes'] / seconds / 1e9:,.1f} GB/s of weights and cache"
        how = f"{self.dtype}, {sequences} sequence{'s' * (sequences > 1)} of {count} tokens, greedy, no prompt"
        return f"| {model} | decode | {how} | {got['decode_tokens'] / seconds:,.1f} | {details} |"


def summary_of_tests(output, ending, programs):
    """Markdown from what run_tests.py printed, also if it did not come to its closing lines."""
    files = re.findall(r"^(\S+) +(\d+) passed, (\d+) failed, (\d+) skipped  \(", output, re.M)
    failures = re.findall(r"^FAILED  (\S+): (.*)", output, re.M)
    late = [(name, test) for name, test in failures if "(no end after" in test]
    failed = [(os.path.basename(name), test) for name, test in failures if (name, test) not in late]
    # Without closing lines the counts of the files are all there is.
    number = len(failed) if failures else sum(int(file[2]) for file in files)
    passed, skipped = (sum(int(file[i]) for file in files) for i in (1, 3))
    lines = [f"{passed} passed, **{number} failed**, {skipped} skipped in {len(files)} of {programs} programs "
             "(each kernel against a float64 oracle; test_gpt: a model against PyTorch).", ""]
    if ending and not re.search(r"^\d+ passed, \d+ failed", output, re.M):
        lines.append(f"- The tests did not come to their end: {ending}.")
    lines += [f"- FAILED {name}: {cell(scrub(test))}" for name, test in failed]
    running = [(name, test) for name, test in late if not test.startswith("a test that did not run")]
    lines += [f"- not finished: {os.path.basename(name)}, in {cell(test)}, and "
              f"{sum(other == name for other, _ in late) - 1} tests after it" for name, test in running]
    left_out = [os.path.basename(name) for name in re.findall(r"^left out (\S+)", output, re.M)]
    if left_out:
        lines.append(f"- not run, for lack of time: {', '.join(left_out)}")
    reasons = {}
    for name, reason in re.findall(r"^skipped (\S+): \S+: (.*)", output, re.M):
        reasons.setdefault(cell(scrub(reason)), []).append(os.path.basename(name))
    lines += [f"- {len(names)} skipped ({', '.join(dict.fromkeys(names))}): {reason}"
              for reason, names in reasons.items()]
    said = [scrub(body).strip() for name, body in failing_output(output)][:5]
    if said:
        lines += ["", "<details><summary>what the first failed tests printed</summary>", "", "```", *said, "```",
                  "</details>"]
    return "\n".join(lines)


def failing_output(output):
    """(name, the first lines) of tests that GoogleTest marks as failed."""
    for name, body in re.findall(r"^\[ RUN      \] (\S+)\n((?:(?!\[ RUN).*\n)*?)\[  FAILED  \] \1\b", output, re.M):
        yield name, f"{name}\n" + "\n".join(body.splitlines()[:12])


class Report:
    def __init__(self, path, parts, machine):
        self.path, self.parts, self.machine, self.footer = path, parts, machine, ""
        for part in parts:
            part.text = part.line.format("not reached")
        with open(TEMPLATE, encoding="utf-8") as file:
            text = file.read()
        # Without the template's head and its note on how to fill it.
        self.template = re.sub(r"\A---\n.*?\n---\n\s*(<!--.*?-->\s*)?", "", text, flags=re.S)

    def text(self):
        text = self.template
        for section in dict.fromkeys(part.section for part in self.parts):
            body = [part.text for part in self.parts if part.section == section]
            if section == "Tokens per second":
                body.insert(0, SPEED_HEAD)
                where = "One GPU. " if self.machine.on_gpu else ""
                commands = "\n".join(self.machine.commands)
                body.append(f"\nRandom weights and tokens. {where}The commands:\n\n```\n{commands}\n```")
            heading = f"## {section}\n"
            before, after = text.split(heading, 1)
            text = f"{before}{heading}\n" + "\n".join(body) + "\n" + after
        return text.rstrip() + f"\n\n{self.footer}\n"

    def write(self):
        temporary = f"{self.path}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(self.text())
            os.replace(temporary, self.path)
        except OSError as error:
            raise SystemExit(f"report: {self.path} cannot be written: {error.strerror}") from None


def parts_of(machine):
    def row(model, what):
        return f"| {model} | {what} | | | {{}} |"

    def speed(model, train_seconds, decode_seconds):
        yield Part(f"{model} train", "Tokens per second", train_seconds,
                   functools.partial(machine.train, model), row(model, "train"))
        for sequences in (1, 64) if machine.on_gpu else (1,):
            yield Part(f"{model} decode {sequences}", "Tokens per second", decode_seconds,
                       functools.partial(machine.decode, model, sequences), row(model, f"decode, {sequences}"))

    return [Part("machine", "Machine", 10, machine.describe), Part("limits", "Limits", 30, machine.measure_limits),
            *speed("gpt2-124M", 40, 15), Part("tests", "Tests of the kernels", 80, machine.test),
            *speed("qwen2.5-0.5B", 60, 25)]


def measure(report, limit):
    start, took = time.monotonic(), []
    seconds = sum(part.seconds for part in report.parts)
    end = start
    for part in report.parts:
        began = time.monotonic()
        # The last second is for what ends and is written.
        end += part.seconds / seconds * (limit - min(1, limit / 10))
        report.machine.deadline = end
        try:
            part.text = part.measure()
        except Failed as failed:
            part.text = part.line.format(cell(str(failed)))
        except KeyboardInterrupt:
            part.text = part.line.format("interrupted")
            raise
        except Exception as error:  # a part that fails must not cost the others
            part.text = part.line.format(cell(scrub(f"{type(error).__name__}: {error}")))
        finally:
            took.append(f"{part.name} {time.monotonic() - began:.0f} s")
            print(took[-1], flush=True)
            report.footer = f"Time: {', '.join(took)}; {time.monotonic() - start:.0f} s in all, of at most {limit:g}."
            report.write()


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="directory of the build; empty: it failed")
    parser.add_argument("--build-log", required=True)
    parser.add_argument("--build-seconds", type=float, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds for everything (default %(default)s)")
    parser.add_argument("out", help="the report")
    args = parser.parse_args()
    os.chdir(ROOT)
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, interrupt)
    machine = Machine(args)
    report = Report(args.out, parts_of(machine), machine)
    report.write()
    shutil.rmtree(WORK, ignore_errors=True)
    try:
        measure(report, args.limit)
    except KeyboardInterrupt:
        print(f"interrupted; what there is: {args.out}", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    print(f"the report: {args.out}; paste it into an issue ('Report of a machine')")
    return 0


if __name__ == "__main__":
    sys.exit(main())
