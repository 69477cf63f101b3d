"""For scripts that measure training: random tokens, commands with a time limit, runs that end after some steps."""
import array
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time

WARMUP = 3  # steps that do not count


def write_tokens(folder, vocabulary):
    """A data directory of random tokens in the project's token format (docs/use/data.md), as frequent as words are:
    token k in proportion to 1/(k + 1) (Zipf's law). An embedding's gradient depends on how often tokens repeat."""
    os.makedirs(folder, exist_ok=True)
    count = 1_000_000
    weights = list(itertools.accumulate(1 / (k + 1) for k in range(vocabulary)))
    tokens = random.Random(0).choices(range(vocabulary), cum_weights=weights, k=count)
    magic, version, width = (20240520, 1, "H") if vocabulary <= 65536 else (20240801, 7, "I")
    with open(os.path.join(folder, "train_000000.bin"), "wb") as out:
        array.array("i", [magic, version, count] + [0] * 253).tofile(out)
        array.array(width, tokens).tofile(out)
    return folder


def run_command(command, limit=float("inf"), finished=lambda: False):
    """(output, ending): what it printed, and how it ended if not well. After `limit` seconds, when finished() is true,
    and when this program is interrupted, it and what it started are killed. After finished() the ending is ""."""
    end, ending = time.monotonic() + limit, ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        except OSError as error:
            return "", f"{error.strerror}: {os.path.basename(command[0])}"
        try:
            while process.poll() is None and not finished():
                if time.monotonic() >= end:
                    ending = f"no end after {round(limit, 1):g} s"
                    break
                time.sleep(0.02)
            code = process.returncode
            if code:
                ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a process that hangs in a driver does not end
        output.seek(0)
        return output.read(), ending


def read_steps(run):
    """The training steps in a run's log.jsonl so far; a line that is still being written is left out."""
    try:
        with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as log:
            return [entry for entry in (json.loads(line) for line in log if line.endswith("\n")) if "ms" in entry]
    except FileNotFoundError:
        return []


def train_steps(command, steps, limit=float("inf")):
    """(entries of log.jsonl, output, ending) of a `train` command, which is ended once it has logged WARMUP + steps, so
    that it writes no checkpoint of many gigabytes."""
    out = command[command.index("--out") + 1]
    shutil.rmtree(out, ignore_errors=True)
    output, ending = run_command(command, limit, lambda: len(read_steps(out)) >= WARMUP + steps)
    return read_steps(out), output, ending
