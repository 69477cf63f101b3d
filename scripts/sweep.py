#!/usr/bin/env python3
"""Trains every combination of the options in a file, several runs at once, and tabulates the last validation losses.

    scripts/sweep.py FILE.toml --out runs/sweep [--jobs 2] [--minutes 9]

FILE.toml has a table [common] and a table [arms.NAME] for each arm, with options of `train_gpt train` by their names
without dashes in front. true gives an option without a value, false leaves it out. A list is a sweep: an arm takes every
combination of its lists. `tokens` stands for steps: tokens / total-batch-tokens, so that batch sizes are compared after
equally many tokens. `seeds` in [common] are the seeds: the first for every combination, the others for the best combination
of each arm. scripts/tokens_to_loss.toml is an example.

    [common]
    data = "data/tokens/linux"
    steps = 1000
    seeds = [1, 2, 3]
    [arms.adamw]
    model = "gpt2-124M"
    lr = [6e-4, 1.2e-3, 2.4e-3]
    [arms.muon]
    model = "modern-124M"
    optimizer = "muon"
    lr = [0.01, 0.02, 0.04]

With --jobs N run i of N goes to GPU i; on a CPU all runs share the cores. After --minutes unfinished runs are asked to save a
checkpoint, and the same command goes on from there. Finished runs are not repeated; their checkpoints are removed unless
--keep-checkpoints. A best value at the end of its list is marked: the optimum may lie outside. Runs are compared by the
validation loss, those with another tokenizer's data by bits_per_byte (--by).
"""
import argparse
import glob
import itertools
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib

from peer_main import peer_main
from run_log import LogError, read_log

GRACE_S = 60  # for a checkpoint, before a run that was asked to stop is killed


class SweepError(Exception):
    """One line: what failed and the remedy."""


def read_file(path):
    """(arms, seeds): by arm the options of [common] and its own."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SweepError(f"{path}: {error}") from None
    common, arms = content.pop("common", {}), content.pop("arms", {})
    tables = isinstance(arms, dict) and all(isinstance(part, dict) for part in (common, *arms.values()))
    if content or not arms or not tables:
        raise SweepError(f"{path}: it must hold [common] and at least one [arms.NAME], and nothing else")
    seeds = common.pop("seeds", [1])
    if not isinstance(seeds, list) or not seeds:
        raise SweepError(f"{path}: seeds is {seeds}; give a list, as in seeds = [1, 2]")
    return {name: {**common, **options} for name, options in arms.items()}, seeds


class Run:
    """One training run: an arm, the values of its swept options, a seed."""

    def __init__(self, root, arm, options, values, seed):
        self.arm, self.options, self.values, self.seed = arm, options, values, seed
        name = ",".join(f"{key}={value}" for key, value in values.items()) or "only"
        self.out = os.path.join(root, arm, name.replace("/", "_"), f"seed-{seed}")
        self.process = None

    def command(self, driver):
        words = [driver, "train", "--out", self.out, "--seed", str(self.seed)]
        options = {**self.options, **self.values}
        if "tokens" in options:
            options["steps"] = self.steps(options.pop("tokens"), options)
        for key, value in options.items():
            if value is not False:
                words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return words

    def steps(self, tokens, options):
        batch = options.get("total-batch-tokens")
        if "steps" in options or not isinstance(batch, int) or batch < 1 or not isinstance(tokens, (int, float)) or tokens < batch:
            raise SweepError(f"arm {self.arm}: tokens is {tokens}; give at least total-batch-tokens ({batch}), and no steps")
        return round(tokens / batch)

    def checkpoints(self):
        return glob.glob(os.path.join(glob.escape(self.out), "step_*"))

    def state(self, driver):
        """What is known of a run with this command: {}, or {"finished": whether it is}."""
        try:
            with open(self.out + ".json", encoding="utf-8") as file:
                state = json.load(file)
        except OSError:
            return {}
        return {"finished": state["finished"]} if state["command"] == self.command(driver) else {}

    def note(self, driver, finished):
        with open(self.out + ".json", "w", encoding="utf-8") as file:
            json.dump({"command": self.command(driver), "finished": finished}, file)

    def finished(self, driver):
        return self.state(driver).get("finished", False)

    def start(self, driver, gpu):
        words = self.command(driver)
        if self.state(driver) and self.checkpoints():
            words.append("--resume")
        elif os.path.isdir(self.out):
            shutil.rmtree(self.out)
        os.makedirs(os.path.dirname(self.out), exist_ok=True)
        env = dict(os.environ) if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        self.note(driver, False)
        print("$", shlex.join(words), file=sys.stderr, flush=True)
        with open(self.out + ".err", "w", encoding="utf-8") as err:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err, env=env)

    def complete(self, driver, keep_checkpoints):
        """After the process has ended by itself."""
        if self.process.returncode:
            with open(self.out + ".err", encoding="utf-8", errors="replace") as err:
                last = (err.read().strip().splitlines() or ["no message"])[-1]
            raise SweepError(f"$ {shlex.join(self.command(driver))}: {last}")
        if not keep_checkpoints:
            for checkpoint in self.checkpoints():
                shutil.rmtree(checkpoint)
        self.note(driver, True)

    def result(self, by):
        training, evaluations = read_log(self.out)
        if not evaluations:
            raise SweepError(f"{self.out}: its log holds no evaluation; set eval-every")
        if by not in evaluations[-1]:
            raise SweepError(f"{self.out}: its evaluations have no {by}; choose another --by")
        return {"value": evaluations[-1][by], "tokens": training[-1]["tokens"], "minutes": 60 * training[-1]["hours"]}


def combinations(root, arm, options, seed):
    lists = {key: values for key, values in options.items() if isinstance(values, list)}
    rest = {key: value for key, value in options.items() if key not in lists}
    return [Run(root, arm, rest, dict(zip(lists, values)), seed) for values in itertools.product(*lists.values())]


def train(runs, args, gpus, deadline):
    """Trains what is unfinished; returns whether all runs are finished."""
    waiting, active = [run for run in runs if not run.finished(args.driver)], {}
    try:
        while (waiting and time.monotonic() < deadline) or active:
            for slot in range(args.jobs):
                if slot not in active and waiting and time.monotonic() < deadline:
                    active[slot] = waiting.pop(0)
                    active[slot].start(args.driver, slot if gpus else None)
            if time.monotonic() >= deadline:
                stop(active.values())
                return False
            for slot, run in list(active.items()):
                if run.process.poll() is not None:
                    del active[slot]
                    run.complete(args.driver, args.keep_checkpoints)
            time.sleep(0.2)
    except BaseException:
        stop(active.values())
        raise
    return not waiting


def stop(runs):
    """Asks for checkpoints, and waits for them."""
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    for run in runs:
        try:
            run.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            run.process.kill()


def edges(run, options):
    """The swept options whose value is the first or the last of its list."""
    lists = {key: values for key, values in options.items() if isinstance(values, list) and len(values) > 1}
    return [key for key, values in lists.items() if run.values[key] in (values[0], values[-1])]


def table(arms, runs, args):
    """Markdown: a line for each combination, its seeds averaged, the best first; and the same as data."""
    lines = [f"| arm | options | {args.by} | spread (seeds) | tokens | minutes | best at an edge of |", "|---" * 7 + "|"]
    results = []
    for arm, options in arms.items():
        groups = {}
        for run in runs:
            if run.arm == arm and run.finished(args.driver):
                groups.setdefault(json.dumps(run.values), []).append((run, run.result(args.by)))
        ordered = sorted(groups.values(), key=lambda group: statistics.mean(r["value"] for _, r in group))
        for rank, group in enumerate(ordered):
            values = [result["value"] for _, result in group]
            run, result = group[0]
            results.append({"arm": arm, "options": run.values, "values": values, "seeds": [r.seed for r, _ in group], **result})
            lines.append(f"| {arm} | {' '.join(f'{k}={v}' for k, v in run.values.items())} | {statistics.mean(values):.4f} | "
                         f"{max(values) - min(values):.4f} ({len(values)}) | {result['tokens']:,.0f} | {result['minutes']:.1f} | "
                         f"{', '.join(edges(run, options)) if rank == 0 else ''} |")
    return "\n".join(lines), results


def sweep(args):
    arms, seeds = read_file(args.file)
    if args.arms:
        missing = set(args.arms) - set(arms)
        if missing:
            raise SweepError(f"{args.file} has no arm {', '.join(sorted(missing))}; it has {', '.join(arms)}")
        arms = {name: arms[name] for name in args.arms}
    info = subprocess.run([args.driver, "info"], capture_output=True, text=True, check=False)
    if info.returncode:
        raise SweepError(f"{args.driver} info: {(info.stderr.strip().splitlines() or ['failed'])[-1]}")
    gpus = info.stdout.startswith("backend cuda")
    deadline = time.monotonic() + 60 * args.minutes
    runs = [run for arm, options in arms.items() for run in combinations(args.out, arm, options, seeds[0])]
    done = train(runs, args, gpus, deadline)
    if done:
        more = []
        for arm, options in arms.items():
            best = min((run for run in runs if run.arm == arm), key=lambda run: run.result(args.by)["value"])
            more += [Run(args.out, arm, best.options, best.values, seed) for seed in seeds[1:]]
        runs += more
        done = train(more, args, gpus, deadline)
    text, results = table(arms, runs, args)
    print(text)
    with open(os.path.join(args.out, "sweep.json"), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    if not done:
        print("sweep: time is up; the same command goes on", file=sys.stderr)
    return 0 if done else 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE.toml")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time; exit status 3 if runs are left")
    parser.add_argument("--by", choices=["val_loss", "bits_per_byte"], default="val_loss")
    parser.add_argument("--keep-checkpoints", action="store_true")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; it must be at least 1")
    return peer_main("sweep", lambda: sweep(args), (SweepError, LogError), "a package is missing")


if __name__ == "__main__":
    sys.exit(main())
