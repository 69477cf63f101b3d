#!/usr/bin/env python3
"""Trains with the options in a file and searches for the best of them, several runs at once, and tabulates the last
validation losses.

    scripts/sweep.py FILE.toml --out runs/sweep [--jobs 2] [--minutes 9]

FILE.toml has a table [common] and a table [arms.NAME] for each arm, with options of `train_gpt train` by their names
without dashes in front. true gives an option without a value, false leaves it out. A list is a sweep. These are not
options of train:

    search          in [common]. "grid", the default, trains every combination of an arm's lists. "climb" starts in the
                    middle of each list, trains what is one place away in one list, moves to the best of these, and ends
                    where no neighbour is better
    seeds           in [common]: the first for every combination, all for the best combination of each arm
    tokens          stands for steps: tokens / total-batch-tokens, so that batch sizes are compared after equally many
    tuning-tokens   as tokens, for the search; the best combination is trained for `tokens` with all seeds
    lr-scale        multiplies lr, embedding-lr, head-lr and vector-lr
    like            the name of another arm, whose options this arm has, too, unless it names them itself

scripts/tokens_to_loss.toml is an example.

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

With --jobs N run i of N goes to GPU i of those that are visible (CUDA_VISIBLE_DEVICES), modulo their number: with more
jobs than GPUs several runs share one, which suits small models. On a CPU all runs share the cores. After --minutes
unfinished runs are asked to save a checkpoint, and the same command goes on from there. Finished runs are not repeated, also when lists have grown;
their checkpoints are removed unless --keep-checkpoints. A best value at the end of its list is marked: the optimum may lie
outside. Runs are compared by the validation loss, those with another tokenizer's data by bits_per_byte (--by).
"""
import argparse
import functools
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

from peer_main import peer_main, write_json
from run_log import LogError, read_log

GRACE_S = 60  # for a checkpoint, before a run that was asked to stop is killed
RATES = ("lr", "embedding-lr", "head-lr", "vector-lr")
SEARCHES = ("grid", "climb")


class SweepError(Exception):
    """One line: what failed and the remedy."""


def read_file(path):
    """(arms, seeds, search): by arm the options of [common] and its own."""
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
    search = common.pop("search", "grid")
    if search not in SEARCHES:
        raise SweepError(f"{path}: search is {search}; choose from {', '.join(SEARCHES)}")

    def options_of(name, below=()):
        own = dict(arms[name])
        like = own.pop("like", None)
        if like is None:
            return {**common, **own}
        if like not in arms or like in (name, *below):
            raise SweepError(f"{path}: like is {like} in [arms.{name}]; name another arm that is not like this one")
        return {**options_of(like, (name, *below)), **own}
    return {name: options_of(name) for name in arms}, seeds, search


class Run:
    """One training run: an arm, the values of its swept options, a seed, and whether it is a shorter one for the search."""

    def __init__(self, root, arm, options, values, seed, tuning):
        self.arm, self.options, self.values, self.seed = arm, dict(options), values, seed
        self.tuning = tuning
        tokens = self.options.pop("tuning-tokens", None)
        if tuning:
            self.options["tokens"] = tokens
        name = ",".join(f"{key}={value}" for key, value in values.items()) or "only"
        self.out = os.path.join(root, arm, name.replace("/", "_"), ("tuning-" if self.tuning else "") + f"seed-{seed}")
        self.process = None

    def command(self, driver):
        words = [driver, "train", "--out", self.out, "--seed", str(self.seed)]
        options = {**self.options, **self.values}
        if "tokens" in options:
            options["steps"] = self.steps(options.pop("tokens"), options)
        if "total-batch-tokens" in options and "batch-size" in options and "seq-len" in options:
            options["batch-size"] = min(options["batch-size"], options["total-batch-tokens"] // options["seq-len"])
        scale = options.pop("lr-scale", None)
        if scale is not None:
            options |= {key: float(f"{options[key] * scale:.6g}") for key in RATES if options.get(key, False) is not False}
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
            same, finished = state["command"] == self.command(driver), state["finished"] is True
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SweepError(f"{self.out}.json cannot be read ({error}); remove it to train this run again") from None
        return {"finished": finished} if same else {}

    def note(self, driver, finished):
        write_json(self.out + ".json", {"command": self.command(driver), "finished": finished})

    def finished(self, driver):
        return self.state(driver).get("finished", False)

    def start(self, driver, gpu):
        words = self.command(driver)
        if self.state(driver) and self.checkpoints():
            words.append("--resume")
        elif os.path.isdir(self.out):
            shutil.rmtree(self.out)
        os.makedirs(os.path.dirname(self.out), exist_ok=True)
        env = dict(os.environ) if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
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

    @functools.cache  # a search asks again and again, and the log of a finished run does not change
    def result(self, by):
        _, evaluations = read_log(self.out)
        if not evaluations:
            raise SweepError(f"{self.out}: its log holds no evaluation; set eval-every")
        if evaluations[-1].get(by) is None:
            raise SweepError(f"{self.out}: its evaluations have no {by}; choose another --by")
        return {"value": evaluations[-1][by], "tokens": evaluations[-1]["tokens"], "minutes": evaluations[-1]["minutes"]}


class Search:
    """The runs of one arm. What it needs next follows from the results of its finished runs alone."""

    def __init__(self, arm, options, seeds, climbs, args):
        self.arm, self.seeds, self.climbs, self.args = arm, seeds, climbs, args
        self.lists = {key: values for key, values in options.items() if isinstance(values, list)}
        self.rest = {key: value for key, value in options.items() if key not in self.lists}
        self.runs = {}  # by place (an index into each list), seed and tuning

    def run(self, place, seed, tuning):
        tuning = tuning and "tuning-tokens" in self.rest
        key = (place, seed, tuning)
        if key not in self.runs:
            values = {name: values[i] for (name, values), i in zip(self.lists.items(), place)}
            self.runs[key] = Run(self.args.out, self.arm, self.rest, values, seed, tuning)
        return self.runs[key]

    def places(self):
        return list(itertools.product(*(range(len(values)) for values in self.lists.values())))

    def neighbours(self, place):
        """The place itself, and those one step away in one list."""
        return [other for other in self.places() if sum(abs(a - b) for a, b in zip(place, other)) <= 1]

    def unfinished(self):
        """The runs that are needed now; [] at the end."""
        at = tuple(len(values) // 2 for values in self.lists.values())
        while True:
            tried = {place: self.run(place, self.seeds[0], True) for place in (self.neighbours(at) if self.climbs else self.places())}
            missing = [run for run in tried.values() if not run.finished(self.args.driver)]
            if missing:
                return missing
            best = min(tried, key=lambda place: tried[place].result(self.args.by)["value"])
            if best == at or not self.climbs:
                return [run for run in (self.run(best, seed, False) for seed in self.seeds) if not run.finished(self.args.driver)]
            at = best


def visible_gpus(driver):
    """The names by which CUDA_VISIBLE_DEVICES selects each of the driver's GPUs; [] for a CPU build."""
    done = subprocess.run([driver, "info", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SweepError(f"{driver} info: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    count = json.loads(done.stdout).get("gpus", 0)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(gpu) for gpu in range(count)]


def train(searches, args, gpus, deadline):
    """Trains what the searches need; returns whether they are at their end."""
    active = {}
    try:
        while True:
            free = [slot for slot in range(args.jobs) if slot not in active]
            if free and time.monotonic() < deadline:
                busy = [run.out for run in active.values()]
                waiting = [run for search in searches for run in search.unfinished() if run.out not in busy]
                if not waiting and not active:
                    return True
                for slot, run in zip(free, waiting):
                    active[slot] = run
                    run.start(args.driver, gpus[slot % len(gpus)] if gpus else None)
            if time.monotonic() >= deadline:
                stop(active.values())
                return not any(search.unfinished() for search in searches)
            time.sleep(0.2)
            for slot, run in list(active.items()):
                if run.process.poll() is not None:
                    del active[slot]
                    run.complete(args.driver, args.keep_checkpoints)
    except BaseException:
        stop(active.values())
        raise


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
    """Markdown: a line for each combination and length, its seeds averaged, the longest and best first; and the same as
    data."""
    lines = [f"| arm | options | {args.by} | spread (seeds) | tokens | minutes | best at an edge of |", "|---" * 7 + "|"]
    results = []
    for arm, options in arms.items():
        groups = {}
        for run in runs:
            if run.arm == arm and run.finished(args.driver):
                groups.setdefault((run.tuning, json.dumps(run.values)), []).append((run, run.result(args.by)))
        ordered = sorted(groups.items(), key=lambda group: (group[0][0], statistics.mean(r["value"] for _, r in group[1])))
        best = next((values for (tuning, values), _ in ordered if tuning), ordered[0][0][1] if ordered else None)
        for (tuning, name), group in ordered:
            values = [result["value"] for _, result in group]
            run, result = group[0]
            results.append({"arm": arm, "options": run.values, "values": values, "seeds": [r.seed for r, _ in group], **result})
            lines.append(f"| {arm} | {' '.join(f'{k}={v}' for k, v in run.values.items())} | {statistics.mean(values):.4f} | "
                         f"{max(values) - min(values):.4f} ({len(values)}) | {result['tokens']:,.0f} | {result['minutes']:.1f} | "
                         f"{', '.join(edges(run, options)) if name == best else ''} |")
    return "\n".join(lines), results


def sweep(args):
    arms, seeds, search = read_file(args.file)
    if args.arms:
        missing = set(args.arms) - set(arms)
        if missing:
            raise SweepError(f"{args.file} has no arm {', '.join(sorted(missing))}; it has {', '.join(arms)}")
        arms = {name: arms[name] for name in args.arms}
    gpus = visible_gpus(args.driver)
    searches = [Search(arm, options, seeds, search == "climb", args) for arm, options in arms.items()]
    done = train(searches, args, gpus, time.monotonic() + 60 * args.minutes)
    text, results = table(arms, [run for search in searches for run in search.runs.values()], args)
    print(text)
    write_json(os.path.join(args.out, "sweep.json"), results, indent=1)
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
