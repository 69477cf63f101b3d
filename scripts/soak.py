#!/usr/bin/env python3
"""Disturbs training runs at random and checks that nothing is lost.

A round is one training run. It is started, disturbed and resumed until it is finished: with signals to the run, to one
of its ranks or to their launcher, in each state; on full disks; with a second run in the same directory; beside copies
whose files are damaged; with files that cannot be read, too few threads or descriptors, what killed runs leave, and
ranks that differ. Some steps have no loss tokens. It may continue on other ranks and in another ZeRO stage. Then its
weights, its optimizer state and its log must be those of a run that was left alone, bit for bit. Some models are then
served, and the server is ended under load.

All choices follow from --seed and the number of the round; how far a run gets until a signal arrives does not.
"""
import in_venv  # noqa: F401
import argparse
import glob
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from dataclasses import dataclass

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dev", "tests"))
import harness  # noqa: E402
import serving  # noqa: E402
import several_ranks  # noqa: E402

STEPS, SAVE_EVERY, EVAL_EVERY = 20, 3, 2
SEQ_LEN, BATCH, SEQUENCES = 32, 2, 24  # a step has 24 sequences, so 12 micro-steps on one rank and 4 on three
PROMPTS = ["--grad-clip", "0.9"]  # of the variant that trains on prompts, so that some steps have no loss tokens
VARIANTS = ([], ["--recompute", "block"], ["--attention", "LG", "--document-mask"], PROMPTS)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STATES = ("plan", "warm-up", "step", "evaluation", "save", "publish", "log")
FILES = ("config.json", "trainer.json", "state.safetensors", "model.safetensors", "tokenizer.json")
CRASHES = ("Segmentation fault", "exited on signal", "terminate called", "Sanitizer", "core dumped", "Bus error")


class Lost(Exception):
    """What the campaign looks for."""


@dataclass(frozen=True)
class World:
    ranks: int
    stage: int

    def bits(self):
        """Worlds with equal bits: stages 0 and 1 sum all micro-steps of a step over the ranks, 2 and 3 each of them."""
        return self.ranks, self.ranks > 1 and self.stage >= 2

    def __str__(self):
        return f"{self.ranks} ranks, stage {self.stage}" if self.ranks > 1 else "1 rank"


def worlds():
    counts = [1] if several_ranks.WHY_NOT else (1, 2, 3)
    if several_ranks.CUDA:
        counts = [n for n in (1, 2, 4, 8) if n <= max(several_ranks.GPUS, 1)]
    return [World(ranks, stage) for ranks in counts for stage in ((0,) if ranks == 1 else (0, 1, 2, 3))]


def newest_step(out):
    """The step of the newest checkpoint, -1 without one."""
    names = harness.checkpoints(out) if os.path.isdir(out) else []
    return int(names[-1][len("step_"):]) if names else -1


def text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def last_line(out):
    lines = [line for line in text(os.path.join(out, "log.jsonl")).split("\n")[:-1] if line]
    return json.loads(lines[-1]) if lines else {}


class Segment:
    """One process of a run, with its ranks."""

    def __init__(self, world, out, arguments, limits=None, variables=None):
        self.world, self.out, self.errors = world, out, out + ".stderr"
        self.checkpoints = set(harness.checkpoints(out)) if os.path.isdir(out) else set()
        self.log = self.logged()
        command = several_ranks.command(world.ranks, *arguments)
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                                            env={**several_ranks.ENVIRONMENT, **(variables or {})}, preexec_fn=limits,
                                            start_new_session=True)  # a launcher may signal its process group

    def said(self):
        return text(self.errors)

    def logged(self):
        return text(os.path.join(self.out, "log.jsonl"))

    def in_state(self, state):
        if state == "plan":
            return "memory plan" in self.said()
        if state == "warm-up":
            return "MFU is" in self.said()
        if state == "step":
            return "training tokens in" in self.said()
        if not os.path.isdir(self.out):
            return False
        if state == "evaluation":
            line = last_line(self.out)
            return line.get("step", 1) % EVAL_EVERY == 0 and "val_loss" not in line and self.logged() != self.log
        if state == "save":
            return bool(glob.glob(os.path.join(self.out, ".tmp-step_*")))
        if state == "publish":
            return not set(harness.checkpoints(self.out)) <= self.checkpoints
        return self.logged() not in ("", self.log)

    def wait_for(self, state):
        """False: the process ended first."""
        end = time.monotonic() + 120
        while not self.in_state(state):
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end:
                raise Lost(f"state {state} does not come; its output: {self.said()[-2000:]}")
            time.sleep(0.0005)
        return True

    def process_ids(self):
        ranks = [several_ranks.process_of_rank(rank, self.process.pid) for rank in range(self.world.ranks)] \
            if self.world.ranks > 1 else [self.process.pid]
        return [pid for pid in ranks if pid]

    def wait(self, limit=120):
        try:
            return self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Lost(f"it does not end within {limit} s; its output: {self.said()[-2000:]}") from None

    def kill(self):
        for pid in [*self.process_ids(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


class Round:
    def __init__(self, campaign, number):
        self.campaign, self.number = campaign, number
        self.random = random.Random(f"{campaign.seed}:{number}")
        self.out = os.path.join(campaign.top, f"round{number}")
        self.variant = self.random.choice(VARIANTS)
        ranks = self.random.choice(sorted({world.ranks for world in campaign.worlds}))  # one rank as often as three
        self.world = self.random.choice([world for world in campaign.worlds if world.ranks == ranks])
        self.parts = []  # (first step, world) of each segment
        self.segment = None

    # ---- the run -----------------------------------------------------------------------------------------------------

    def arguments(self, out, world, resume, steps=STEPS, extra=()):
        world_options = ["--batch-size", BATCH, "--zero-stage", world.stage, "--steps", steps, *extra]
        if resume:
            return ["--resume", "--out", out, *world_options]
        data = self.campaign.prompts if self.variant is PROMPTS else self.campaign.data
        return [*harness.MODEL, "--data", data, "--out", out, "--seq-len", SEQ_LEN,
                "--total-batch-tokens", SEQUENCES * SEQ_LEN, "--schedule", "constant", "--warmup", 2, "--keep", 2,
                "--save-every", SAVE_EVERY, "--eval-every", EVAL_EVERY, "--gemm-tune", "off", *self.variant,
                *world_options]

    def start(self, extra=(), **options):
        step = newest_step(self.out)
        self.parts.append((max(step, 0), self.world))
        arguments = self.arguments(self.out, self.world, step >= 0, extra=extra)
        self.segment = Segment(self.world, self.out, arguments, **options)
        return self.segment

    def expected(self, parts):
        """The directory of a run that was left alone on the same ranks in the same steps."""
        merged = []
        for step, world in parts:
            if merged and merged[-1][0] == step:
                merged.pop()
            if not merged or merged[-1][1] != world.bits():
                merged.append((step, world.bits()))
        key = (tuple(self.variant), tuple(merged))
        if key not in self.campaign.expected:
            out = os.path.join(self.campaign.top, f"expected{len(self.campaign.expected)}")
            ends = [step for step, _ in merged[1:]] + [STEPS]
            for (step, (ranks, splits)), end in zip(merged, ends):
                world = World(ranks, 2 if splits else 0)
                done = several_ranks.run(ranks, *self.arguments(out, world, step > 0, end))
                if done.returncode:
                    raise Lost(f"a run that was left alone failed: {done.stderr[-2000:]}")
            self.campaign.expected[key] = out
        return self.campaign.expected[key]

    def differences(self, out, parts):
        """What differs from the run that was left alone."""
        expected, final = self.expected(parts), f"step_{STEPS:08}"
        found, wanted = (harness.digests(os.path.join(run, final)) for run in (out, expected))
        different = [name for name in ("model.safetensors", "state.safetensors") if found[name] != wanted[name]]
        logged = [[(line["step"], line.get("loss"), line.get("val_loss"), line.get("no_loss_tokens"))
                   for line in harness.log(run) if "loss" in line or line["step"] % EVAL_EVERY == 0]
                  for run in (out, expected)]
        if self.variant is PROMPTS and not any(line[-1] for line in logged[0]):
            different.append("log.jsonl: no step is marked as without loss tokens")
        if logged[0] != logged[1]:
            first = next((pair for pair in zip(*logged) if pair[0] != pair[1]), [len(lines) for lines in logged])
            different.append(f"log.jsonl: {first[0]} instead of {first[1]}")
        return different

    def check_checkpoints(self, at_least):
        """Every checkpoint is complete, and none that was there is lost."""
        names = harness.checkpoints(self.out) if os.path.isdir(self.out) else []
        for name in names:
            info = harness.run("info", os.path.join(self.out, name), "--json")
            if info.returncode or json.loads(info.stdout)["trainer"]["step"] != int(name[len("step_"):]):
                raise Lost(f"{name} is not complete: {info.stderr}")
        if newest_step(self.out) < at_least:
            raise Lost(f"the newest checkpoint was of step {at_least} and is of step {newest_step(self.out)}")

    def check_failure(self, said, status, what):
        """A refusal is one line, and no crash."""
        if status in (0, None) or status < 0 or status >= 128 or any(crash in said for crash in CRASHES):
            raise Lost(f"{what}: exit status {status}: {said[-2000:]}")
        if self.world.ranks == 1 and said.count("train_gpt: ") != 1:
            raise Lost(f"{what}: not one line of error: {said[-2000:]}")

    # ---- disturbances ------------------------------------------------------------------------------------------------

    def say(self, what):
        self.campaign.say(f"  {what}; newest checkpoint {newest_step(self.out)}")

    def send(self, segment, number, target):
        ranks = segment.process_ids()
        pid = segment.process.pid if target == "launcher" or not ranks else self.random.choice(ranks)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def signalled(self):
        """A signal in one of the states: to the run, to a rank or to the launcher of the ranks."""
        before, segment = newest_step(self.out), self.start()
        state, number = self.random.choice(STATES), self.random.choice(SIGNALS)
        target = self.random.choice(("rank", "rank", "launcher")) if self.world.ranks > 1 else "rank"
        delay = self.random.uniform(0, 0.4) if state == "step" else self.random.uniform(0, 0.004)
        twice = self.random.random() < 0.2
        came = segment.wait_for(state)
        if came:
            time.sleep(delay)
            self.send(segment, number, target)
            if twice:
                time.sleep(0.002)
                self.send(segment, number, target)
        status = segment.wait()
        self.wait_for_orphans(segment)
        if any(crash in segment.said() for crash in CRASHES if crash != "exited on signal"):
            raise Lost(segment.said()[-2000:])
        self.check_checkpoints(before)
        if "stopped at step" in segment.said() and status == 0:  # a signal that was caught loses no step
            logged = max((line["step"] for line in harness.log(self.out)), default=0)
            if newest_step(self.out) != logged:
                raise Lost(f"it logged step {logged} and saved step {newest_step(self.out)}")
        self.say(f"{signal.Signals(number).name}{' twice' if twice else ''} to {target} in {state}" +
                 ("" if came else " came too late") + f", exit status {status}")
        self.campaign.count[f"{signal.Signals(number).name} in {state}"] += came

    def wait_for_orphans(self, segment):
        """Ranks may outlive a launcher that was killed, for a moment."""
        end = time.monotonic() + 30
        name = os.path.realpath(self.out)
        while True:
            left = []
            for path in glob.glob("/proc/[0-9]*/cmdline"):
                try:
                    with open(path, "rb") as file:
                        words = file.read().split(b"\0")
                except OSError:
                    continue
                if harness.DRIVER.encode() in words and any(os.fsencode(w) in words for w in (self.out, name)):
                    left.append(int(path.split("/")[2]))
            if not left:
                return
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise Lost(f"ranks outlive their launcher: {segment.said()[-2000:]}")
            time.sleep(0.02)

    def rank_lost(self):
        """A rank that hangs ends the run within --comm-timeout."""
        before, segment = newest_step(self.out), self.start(["--comm-timeout", 3])
        came = segment.wait_for("step")
        if came:
            time.sleep(self.random.uniform(0, 0.2))
            self.send(segment, signal.SIGSTOP, "rank")
        try:
            status = segment.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            segment.kill()
            if newest_step(self.out) < STEPS:
                raise Lost(f"the other ranks wait for one that hangs: {segment.said()[-2000:]}") from None
            status = "none: the run was complete, and MPI_Finalize waits for all ranks"
        self.wait_for_orphans(segment)
        self.check_checkpoints(before)
        self.say(f"a rank {'hung' if came else 'would have hung'}, exit status {status}")
        self.campaign.count["rank that hangs"] += came

    def disk_full(self):
        """No space in the run directory: at one file operation, in a small file system, or beyond a file size limit."""
        before, kind = newest_step(self.out), self.random.choice(("operation", "file system", "file size"))
        at, limits, mounted = self.random.randrange(1, 60), None, False
        size = self.random.randrange(4096, 450000) if kind == "file size" else self.random.randrange(700, 2000) * 1024
        variables = {}
        if kind == "file system":
            mounted = self.campaign.mount(self.out, size)
        if kind == "operation" or (kind == "file system" and not mounted):
            kind = "operation"
            variables = {"LD_PRELOAD": harness.SHIM, "CRASH_SHIM_MODE": "enospc", "CRASH_SHIM_AT": str(at),
                         "CRASH_SHIM_DIR": os.path.realpath(self.out)}
        if kind == "file size":
            limits = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))  # noqa: E731
        try:
            segment = self.start(limits=limits, variables=variables)
            status = segment.wait()
            left = glob.glob(os.path.join(self.out, ".tmp-*"))
        finally:
            if mounted:
                self.campaign.unmount(self.out)
        if status:
            self.check_failure(segment.said(), status, f"full disk ({kind})")
        if left:
            raise Lost(f"full disk ({kind}): {left} are left")
        self.check_checkpoints(before)
        self.say(f"full disk ({kind}, {at if kind == 'operation' else size}), exit status {status}")
        self.campaign.count[f"full disk ({kind})"] += status != 0

    def shim(self, path, mode, at, times=1):
        return {"LD_PRELOAD": harness.SHIM, "CRASH_SHIM_MODE": mode, "CRASH_SHIM_AT": str(at),
                "CRASH_SHIM_FOR": str(times), "CRASH_SHIM_DIR": os.path.realpath(path)}

    def log_unwritable(self):
        """A log that cannot be written for a while: the run goes on, and no line is lost."""
        at, times = self.random.randrange(1, 30), self.random.randrange(1, 6)
        segment = self.start(variables=self.shim(os.path.join(self.out, "log.jsonl"), "enospc", at, times))
        if segment.wait():
            raise Lost(f"a log that cannot be written for a while ended the run: {segment.said()[-2000:]}")
        self.say(f"log unwritable {times} times from write {at} on")
        self.campaign.count["log unwritable"] += "is written again; no line is lost" in segment.said()

    def scarce(self):
        """Too few threads or descriptors: one line, or no effect on the result."""
        kind, most = self.random.choice((("threads", 6), ("descriptors", 14)))
        number, before, options = self.random.randrange(most), newest_step(self.out), {}
        if kind == "threads":
            options["variables"] = {**self.shim(self.out, "enospc", 0), "CRASH_SHIM_THREADS": str(number)}
        else:
            options["limits"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
        segment = self.start(**options)
        status = segment.wait()
        if status == 127 and kind == "descriptors":  # the system could not load the program
            status = 0
        if status:
            self.check_failure(segment.said(), status, f"{number} {kind}")
        self.check_checkpoints(before)
        self.say(f"{number} {kind}, exit status {status}")
        self.campaign.count[f"too few {kind}"] += status != 0

    def unreadable(self):
        """A read that fails is no damage: nothing advises to remove a checkpoint, and none is lost."""
        before = newest_step(self.out)
        path = self.campaign.data if before < 0 else os.path.join(self.out, harness.checkpoints(self.out)[-1])
        at = self.random.randrange(1, 60)
        segment = self.start(variables=self.shim(path, "eio", at))
        status = segment.wait()
        if status:
            self.check_failure(segment.said(), status, "unreadable file")
            if any(word in segment.said() for word in ("; remove", "damaged", "start again")):
                raise Lost(f"a read that failed is called damage: {segment.said()[-2000:]}")
        self.check_checkpoints(before)
        self.say(f"read {at} of {os.path.basename(path)} fails, exit status {status}")
        self.campaign.count["unreadable file"] += status != 0

    def leftover(self):
        """What a killed run leaves is removed at the start, although its process id lives again."""
        before, left = newest_step(self.out), os.path.join(self.out, ".tmp-step_00000099-1")
        os.makedirs(left, exist_ok=True)
        segment = self.start()
        if segment.wait_for("step"):
            if os.path.exists(left):
                raise Lost(f"{left} stays")
            self.send(segment, signal.SIGTERM, "rank")
        segment.wait()
        self.wait_for_orphans(segment)
        self.check_checkpoints(before)
        self.say("a leftover whose process id lives")
        self.campaign.count["leftover"] += 1

    def ranks_differ(self):
        """Ranks with different options are refused with one line, and disturb nothing."""
        before = newest_step(self.out)
        name, value = self.random.choice((("--lr", 0.1), ("--seed", 7), ("--grad-clip", 0.7)))
        arguments = self.arguments(self.out, self.world, before >= 0)
        commands = [several_ranks.command(1, *arguments, *([name, value] if rank == self.world.ranks - 1 and
                                                           name not in arguments else []))
                    for rank in range(self.world.ranks)]
        if name in arguments:
            return self.signalled()
        status, said = several_ranks.run_each(*commands)
        if not status or f"rank {self.world.ranks - 1} has {name} " not in said:
            raise Lost(f"ranks that differ in {name}: exit status {status}: {said[-2000:]}")
        self.check_checkpoints(before)
        self.say(f"ranks differ in {name}")
        self.campaign.count["ranks that differ"] += 1
        return None

    def second_run(self):
        """A second run in the same directory is refused and does not disturb the first."""
        segment = self.start()
        came, step = segment.wait_for("step"), newest_step(self.out)
        if came:
            second = several_ranks.run(1, *self.arguments(self.out, World(1, 0), step >= 0))
            # It was no second run if the first had ended, or had saved its last step and given the directory back.
            if segment.process.poll() is None and f"is done: step {STEPS} of" not in second.stderr:
                self.check_failure(second.stderr, second.returncode, "a second run")
                self.campaign.count["second run refused"] += 1
        status = segment.wait()
        if status:
            raise Lost(f"the first of two runs failed: {segment.said()[-2000:]}")
        self.say("two runs at once")

    def damaged_files(self):
        """Of a copy with a damaged file: it is refused, or continues with the same bits."""
        if newest_step(self.out) < 0:
            return self.signalled()
        copy = self.out + ".damaged"
        shutil.copytree(self.out, copy)
        name = self.random.choice(FILES)
        path = os.path.join(copy, harness.checkpoints(copy)[-1], name)
        how = self.random.choice(("flipped bit", "cut off", "zeroed", "removed"))
        with open(path, "rb") as file:
            content = bytearray(file.read())
        at = self.random.randrange(len(content))
        if how == "flipped bit":
            content[at] ^= 1 << self.random.randrange(8)
        elif how == "cut off":
            del content[at:]
        elif how == "zeroed":
            content[at:at + 512] = bytes(len(content[at:at + 512]))
        with open(path, "wb") as file:
            file.write(content)
        if how == "removed":
            os.remove(path)
        done = several_ranks.run(1, *self.arguments(copy, World(1, 0), True))
        what = f"{name} {how} at {at}"
        if done.returncode:
            if any(crash in done.stderr for crash in CRASHES) or done.returncode != 1:
                raise Lost(f"{what}: exit status {done.returncode}: {done.stderr[-2000:]}")
        elif how != "removed":  # without it the checkpoint before is the newest complete one
            different = self.differences(copy, [*self.parts, (newest_step(self.out), World(1, 0))])
            if different:
                raise Lost(f"{what} went unnoticed and changed {different}")
        shutil.rmtree(copy)
        self.say(f"{what}: {'refused' if done.returncode else 'no effect'}")
        self.campaign.count["damaged file " + ("refused" if done.returncode else "without effect")] += 1
        return None

    def run(self):
        moves = self.random.random() < 0.4
        then = ", then others" if moves else ""
        self.campaign.say(f"round {self.number}: {self.world}{then} {' '.join(self.variant)}")
        for _ in range(self.random.randrange(2, 6)):
            if newest_step(self.out) >= STEPS:
                break
            kinds = [self.signalled] * 4 + [self.damaged_files, self.second_run, self.leftover]
            kinds += [self.rank_lost, self.ranks_differ] if self.world.ranks > 1 else \
                [self.disk_full] * 2 + [self.log_unwritable, self.scarce, self.scarce, self.unreadable]
            self.random.choice(kinds)()
            if moves:
                self.world = self.random.choice(self.campaign.worlds)
            elif self.world.ranks > 1 and self.random.random() < 0.5:  # another stage with the same bits
                self.world = World(self.world.ranks, self.world.stage ^ 1)
        killed_at_the_end = newest_step(self.out) >= STEPS
        if not killed_at_the_end:
            segment = self.start()
            if segment.wait():
                raise Lost(f"it cannot be continued: {segment.said()[-2000:]}")
        different = self.differences(self.out, self.parts)
        if different:
            raise Lost(f"the run {self.parts} and one that was left alone differ: {different}")
        # A run that is killed while it publishes its last checkpoint leaves an earlier one until a run starts here again.
        allowed = ".old" if killed_at_the_end else None
        left = [name for name in os.listdir(self.out)
                if name.startswith((".tmp", ".old")) and not (allowed and name.startswith(allowed))]
        if left:
            raise Lost(f"{left} are left")
        if newest_step(self.out) >= STEPS and self.random.random() < 0.3:
            self.served()
        shutil.rmtree(self.out)

    def served(self):
        """The model behind a server that is ended under load: whatever a client has got is right, SIGTERM lets running
        requests end and gives status 0, and a server that is started then answers as before."""
        try:
            serving.needs_serve()
        except unittest.SkipTest:
            return
        model = os.path.join(self.out, harness.checkpoints(self.out)[-1])
        load, number = serving.Load(model, 64, "--dtype", "fp32"), self.random.choice((signal.SIGKILL, signal.SIGTERM))
        arguments = ["--model", model, "--name", "m", "--dtype", "fp32", "--context", 64,
                     "--slots", self.random.randrange(1, 6), "--max-queue", self.random.randrange(40)]
        with serving.LoadedServer(*arguments) as server:
            load.start(server, 8, 2, server_ends=True)
            time.sleep(self.random.uniform(0, 1.5))
            server.process.send_signal(number)
            said = server.printed()
            status = server.process.wait(60)
            if status != (0 if number == signal.SIGTERM else -number) or any(crash in said for crash in CRASHES):
                raise Lost(f"a server that got {number.name}: exit status {status}: {said[-2000:]}")
            wrong = load.join()
        with serving.LoadedServer(*arguments) as server:
            load.start(server, 4, 0.5)
            wrong += load.join()
        if wrong:
            raise Lost(f"answers of the server: {wrong[0]}")
        self.campaign.count[f"server ended by {number.name}"] += 1
        self.say(f"a server got {number.name}")


class Campaign:
    def __init__(self, seed, quiet):
        self.seed, self.quiet = seed, quiet
        self.top = tempfile.mkdtemp(prefix="train_gpt_soak_")
        self.data = harness.make_data(self.top)
        self.prompts = self.make_prompts()
        self.worlds = worlds()
        self.expected, self.count = {}, Counter()

    def make_prompts(self):
        """Data of which one sequence in 24 has loss tokens, as many as a step has."""
        tokens = [(7 * i * i + 3) % 250 for i in range(SEQ_LEN * 480 + 1)]
        prompts = harness.write_tokens(os.path.join(self.top, "prompts"), tokens,
                                       [(i - 1) // SEQ_LEN % SEQUENCES == 0 for i in range(len(tokens))])
        for name in ("tokenizer.json", "val_000000.bin"):
            shutil.copy(os.path.join(self.data, name), prompts)
        return prompts

    def say(self, line):
        if not self.quiet:
            print(line, flush=True)

    def mount(self, directory, size):
        """A small file system with the directory's files. False where this user may not."""
        kept = directory + ".kept"
        os.makedirs(directory, exist_ok=True)
        files = glob.glob(directory + "/**", recursive=True)
        held = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
        options = ["mount", "-t", "tmpfs", "-o", f"size={size + held}", "none", directory]
        shutil.copytree(directory, kept)
        if subprocess.run(options, stderr=subprocess.DEVNULL).returncode:
            shutil.rmtree(kept)
            return False
        shutil.copytree(kept, directory, dirs_exist_ok=True)
        shutil.rmtree(kept)
        return True

    def unmount(self, directory):
        kept = directory + ".kept"
        shutil.copytree(directory, kept)
        subprocess.run(["umount", directory], check=True)
        shutil.rmtree(directory)
        os.rename(kept, directory)

    def run(self, minutes, only):
        """True if nothing was lost."""
        begin, rounds = time.monotonic(), 0
        for number in [only] if only else range(1, 1 << 30):
            if not only and time.monotonic() - begin > minutes * 60:
                break
            this = Round(self, number)
            try:
                this.run()
            except Lost as lost:
                print(f"LOST in round {number} (repeat it with --seed {self.seed} --round {number}): {lost}\n"
                      f"its files are in {self.top}", flush=True)
                return False
            finally:
                if this.segment and this.segment.process.poll() is None:
                    this.segment.kill()
            rounds += 1
        shutil.rmtree(self.top)
        minutes = (time.monotonic() - begin) / 60
        print(f"{rounds} rounds in {minutes:.1f} minutes, seed {self.seed}: nothing lost")
        for what, times in sorted(self.count.items()):
            print(f"{times:6} {what}")
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", nargs="?", type=float, default=10, help="a round that has begun is completed (10)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30),
                        help="of all choices; default: another each time")
    parser.add_argument("--round", type=int, help="only this round")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # runs inherit it; nohup would have them ignore the signal
    if not os.path.exists(harness.SHIM):
        sys.exit(f"soak: {harness.SHIM} is missing, so no call would fail; build it: make test-binaries")
    campaign = Campaign(options.seed, options.quiet)
    print(f"seed {options.seed}, {harness.DRIVER}, up to {campaign.worlds[-1].ranks} ranks", flush=True)
    sys.exit(not campaign.run(options.minutes, options.round))


if __name__ == "__main__":
    main()
