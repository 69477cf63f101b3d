#!/usr/bin/env python3
"""Prints the tables of docs/log/scaling.md: for each ZeRO stage and number of GPUs, the bytes that a step communicates, the time of
that and the compute time. Shapes and FLOP counts come from the driver; everything else is an option.

    dev/peers/scaling_table.py                                  the page's tables
    dev/peers/scaling_table.py --gpus 512 --network-gib 23.3    another cluster
"""
import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass

# The recipes' shapes (scripts/run_*.sh): tokens of a step, of a sequence, sequences per GPU and micro-step at most, and the MFU
# of such runs on H200s (docs/log/communication.md).
RUNS = {"gpt2-124M": (524288, 1024, 64, 0.500), "gpt2-1558M": (1048576, 1024, 16, 0.546), "llama-1B": (524288, 2048, 8, 0.512),
        "llama-8B": (4194304, 2048, 2, 0.555)}
GIB = 2.0 ** 30


@dataclass
class Shape:
    """A model's weights by the groups that travel together, and its arithmetic."""
    name: str
    weights: int
    layers: int
    ends: int          # weights of the embedding and the head, which are groups of their own
    flop_per_token: float

    @property
    def layer(self):
        return (self.weights - self.ends) / self.layers


def shape_of(driver, name, seq_len):
    def ask(*command):
        return json.loads(subprocess.run([driver, *command, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout)

    plan = ask("plan", "--model", name, "--seq-len", str(seq_len))
    config = ask("info", name)["config"]
    table = config["vocab_size"] * config.get("hidden_size", config.get("n_embd"))
    ends = table * (1 if config.get("tie_word_embeddings", True) else 2)
    return Shape(name, plan["weights"], config.get("num_hidden_layers", config.get("n_layer")), ends, plan["flop_per_token"])


@dataclass
class Cluster:
    """Bandwidths in bytes a second per GPU, latencies in seconds per step of a ring."""
    bus: float         # of NVLink within a machine, as NCCL's large messages reach it
    bus_latency: float
    network: float     # of a GPU's own network card
    network_latency: float
    per_machine: int
    peak: float        # FLOP/s of a GPU

    def machines(self, n):
        return math.ceil(n / self.per_machine)

    def bandwidth(self, n, apart=False):
        """Of the bus among n GPUs: as many rings as a machine has GPUs cross its border, each over a card of its own, so that
        the slower of NVLink and all cards together counts. apart: each GPU's peers are all on other machines, and its group
        has one card."""
        if apart:
            return self.network
        return self.bus if n <= self.per_machine else min(self.bus, self.network * self.per_machine)

    def ring_latency(self, n, apart=False):
        """Of the n - 1 steps of a reduce_scatter or all_gather."""
        if n == 1:
            return 0.0
        across = n - 1 if apart else self.machines(n) - 1
        return across * self.network_latency + (n - 1 - across) * self.bus_latency

    def gather(self, nbytes, n, apart=False):
        """Seconds of an all_gather or reduce_scatter of so many bytes in all."""
        return (n - 1) / n * nbytes / self.bandwidth(n, apart) + self.ring_latency(n, apart)

    def all_reduce(self, nbytes, n, apart=False):
        """By a ring, or by trees between the machines, which have the ring's bandwidth and fewer steps (Sanders, Speck, Träff
        2009); the shorter."""
        machines = n if apart else self.machines(n)
        within = 0 if apart else min(n, self.per_machine) - 1
        tree = 2 * (math.ceil(math.log2(machines)) * self.network_latency + within * self.bus_latency)
        return 2 * (n - 1) / n * nbytes / self.bandwidth(n, apart) + min(2 * self.ring_latency(n, apart), tree)


@dataclass
class Plan:
    """What a GPU does in a step."""
    sent: float        # bytes
    seconds: float     # of communication, were nothing hidden
    hideable: float    # seconds of computation that it may hide behind
    waited: float = 0  # seconds of communication with no computation beside it

    @property
    def exposed(self):
        return self.waited + max(0.0, self.seconds - self.waited - self.hideable)


def groups(shape):
    """Weights of each group that travels by itself."""
    return [shape.layer] * shape.layers + [shape.ends]


def plan_stage(cluster, shape, stage, n, micro_steps, compute, args):
    """compute: seconds that a GPU computes in a step. Backward is two thirds of it."""
    part = (n - 1) / n
    backward = compute * 2 / 3
    gradient, weight = args.gradient_bytes, args.weight_bytes
    if stage == 0:  # gradients, behind the last micro-step's backward
        times = [cluster.all_reduce(w * gradient, n) for w in groups(shape)]
        return Plan(2 * part * shape.weights * gradient, sum(times), backward / micro_steps)
    if stage in (1, 2):  # gradients, behind the last backward or (2) in every micro-step; the update waits for the weights
        sums, hideable = (1, backward / micro_steps) if stage == 1 else (micro_steps, compute)
        reduced = sum(sums * cluster.gather(w * gradient, n) for w in groups(shape))
        updated = sum(cluster.gather(w * weight, n) for w in groups(shape))
        return Plan(part * shape.weights * (sums * gradient + weight), reduced + updated, hideable, updated)
    if stage == 3:  # and weights, once for forward and once for backward
        times = [micro_steps * (cluster.gather(w * gradient, n) + 2 * cluster.gather(w * weight, n)) for w in groups(shape)]
        return Plan(part * shape.weights * micro_steps * (gradient + 2 * weight), sum(times), compute)
    # Hybrid: stage 3 within each machine; the parts of gradients are summed between machines at the end of the step.
    inside = min(n, cluster.per_machine)
    replicas = n // inside
    once = plan_stage(cluster, shape, 3, inside, micro_steps, compute, args)
    times = [cluster.all_reduce(w * gradient / inside, replicas, apart=True) if replicas > 1 else 0.0 for w in groups(shape)]
    sent = 2 * (replicas - 1) / replicas * shape.weights * gradient / inside
    return Plan(once.sent + sent, once.seconds + sum(times), compute)


def state_bytes(shape, stage, n, args):
    """Weights, fp32 master weights, gradients, Adam's m and v that a GPU keeps."""
    master_and_moments = 12
    inside = min(n, args.gpus_per_machine)
    whole = {0: args.weight_bytes + 4 + master_and_moments, 1: args.weight_bytes + 4, 2: args.weight_bytes, 3: 0, "hybrid": 0}[stage]
    divided = args.weight_bytes + 4 + master_and_moments - whole
    return shape.weights * (whole + divided / (inside if stage == "hybrid" else n))


def first_count(good, args, total_sequences):
    """The first power of two of GPUs, beyond one machine, for which good(n) holds; "-" if a step has no sequence for each."""
    n = 2 * args.gpus_per_machine
    while n <= total_sequences:
        if good(n):
            return f"{n:,}"
        n *= 2
    return "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default="./train_gpt", help="tells shapes and FLOP (default %(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(RUNS), default=["gpt2-1558M", "llama-8B"], metavar="MODEL",
                        help=f"of {', '.join(RUNS)}")
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 1024], help="(default 8 64 1024)")
    parser.add_argument("--gpus-per-machine", type=int, default=8)
    parser.add_argument("--bus-gib", type=float, default=326, help="GiB/s of NVLink's bus (default %(default)s)")
    parser.add_argument("--bus-latency-us", type=float, default=4.6, help="of a ring's step inside a machine (default %(default)s)")
    parser.add_argument("--network-gib", type=float, default=46.6, help="GiB/s of a GPU's network card (default %(default)s)")
    parser.add_argument("--network-latency-us", type=float, default=14, help="of a step between machines (default %(default)s)")
    parser.add_argument("--peak-tflops", type=float, default=989.4, help="of a GPU, dense bf16 (default %(default)s)")
    parser.add_argument("--gradient-bytes", type=float, default=4, help="that a gradient is sent in (default %(default)s)")
    parser.add_argument("--weight-bytes", type=float, default=2, help="that a weight is sent in (default %(default)s)")
    args = parser.parse_args()
    cluster = Cluster(args.bus_gib * GIB, args.bus_latency_us * 1e-6, args.network_gib * GIB, args.network_latency_us * 1e-6,
                      args.gpus_per_machine, args.peak_tflops * 1e12)
    for name in args.models:
        total_tokens, seq_len, most, mfu = RUNS[name]
        shape = shape_of(args.driver, name, seq_len)

        def micro_steps_of(n):
            return math.ceil(total_tokens / seq_len / n / most)

        def compute_seconds(n):
            return shape.flop_per_token * total_tokens / n / (cluster.peak * mfu)

        def planned(stage, n):
            return plan_stage(cluster, shape, stage, n, micro_steps_of(n), compute_seconds(n), args)

        print(f"\n{name}: {shape.weights:,} weights, {total_tokens:,} tokens a step of {seq_len}-token sequences, computing at "
              f"{mfu:.1%} MFU\n")
        print("| GPUs | sequences x micro-steps per GPU | computing | stage | sent per GPU | communication | exposed | "
              "state per GPU |")
        print("|---|---|---|---|---|---|---|---|")
        for n in args.gpus:
            sequences = total_tokens / seq_len / n
            if sequences < 1 or sequences != int(sequences):
                print(f"| {n:,} | a step has only {total_tokens // seq_len} sequences | | | | | | |")
                continue
            compute = compute_seconds(n)
            micro_steps = micro_steps_of(n)
            for stage in (0, 1, 2, 3, "hybrid"):
                if stage == "hybrid" and n <= args.gpus_per_machine:
                    continue
                p = planned(stage, n)
                print(f"| {n:,} | {sequences / micro_steps:g} x {micro_steps} | {compute * 1e3:,.0f} ms | {stage} | "
                      f"{p.sent / GIB:.1f} GiB | {p.seconds * 1e3:,.0f} ms | {p.exposed * 1e3:,.0f} ms | "
                      f"{state_bytes(shape, stage, n, args) / GIB:.1f} GiB |")
        shown = [first_count(lambda n: planned(3, n).seconds > planned("hybrid", n).seconds, args, total_tokens // seq_len),
                 first_count(lambda n: planned(3, n).seconds > planned(3, n).hideable, args, total_tokens // seq_len),
                 first_count(lambda n: planned("hybrid", n).seconds > planned("hybrid", n).hideable, args, total_tokens // seq_len)]
        print(f"\nHybrid communicates for less time than stage 3 from {shown[0]} GPUs on. Stage 3 communicates for longer than it computes "
              f"from {shown[1]} on, hybrid from {shown[2]} on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
