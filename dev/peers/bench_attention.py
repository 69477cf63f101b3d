#!/usr/bin/env python3
"""Benchmarks causal attention of this project and of PyTorch side by side on one GPU: bf16, forward and backward.

    dev/peers/bench_attention.py --bench build/cuda/dev/bench_attention

Needs torch. The shapes are those of dev/bench/bench_attention.cpp. This project's backward pass is deterministic; the faster
one of --nondeterministic has a row of its own. PyTorch's two backends are timed with their default backward pass and with
a deterministic one where it exists:

    cuDNN               scaled_dot_product_attention with SDPBackend.CUDNN_ATTENTION. Deterministic: PyTorch's mode if it
                        exists (not up to 2.11), otherwise through nvidia-cudnn-frontend if that is installed
    FlashAttention-2    the same with SDPBackend.FLASH_ATTENTION. Deterministic: torch.use_deterministic_algorithms

All are timed the same way: device time, the median of 21 runs after 3 warm-up runs, launched without waiting, with
256 MiB read before each run so that the L2 cache is cold. Contenders are interleaved, so that a change of clocks affects
all of them; figures are medians over the turns. TFLOP/s count the visible (query, key) pairs, with two matmuls forward
and five backward. Prints one Markdown table; each figure of PyTorch is followed by this project's speed-up. A backward
pass counts as deterministic if two runs gave the same bits.
"""
import from_scripts  # noqa: F401
import argparse
import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
from typing import NamedTuple

from peer_main import peer_main

OURS, CUDNN, FLASH, DETERMINISTIC = "this project", "cuDNN", "FlashAttention-2", ", deterministic"
PEERS = [CUDNN, CUDNN + DETERMINISTIC, FLASH, FLASH + DETERMINISTIC]
NONDETERMINISTIC = "backward_nondeterministic"  # the project's alone
PASSES = {"forward": 2, "backward": 5, NONDETERMINISTIC: 5}  # products
WARM_UP, RUNS, FLUSH_BYTES = 3, 21, 256 << 20  # as dev/bench/bench_util.cpp and dev/bench/cache_flush.h have them


class BenchError(Exception):
    """One line: what failed and the remedy."""


class Shape(NamedTuple):
    B: int
    T: int
    NH: int
    NKV: int
    HS: int

    def __str__(self):
        heads = f"H{self.NH}" if self.NH == self.NKV else f"H{self.NH}/{self.NKV}"
        return f"B{self.B} {heads} T{self.T} D{self.HS}"

    def tflop(self, products):
        return 2e-12 * products * self.HS * self.B * self.NH * (self.T * (self.T + 1) // 2)


# ---- The project's side -------------------------------------------------------------------------------------------------

LINE = re.compile(rf"({'|'.join(PASSES)})/bf16/B:(\d+)/T:(\d+)/NH:(\d+)/NKV:(\d+)/HS:(\d+)\s+(\d+\.\d+) ms\s")


def parse_bench(text):
    """{(shape, pass): ms} and the line about the machine, of what dev/bench_attention has printed."""
    times = {}
    for found in map(LINE.match, text.splitlines()):
        if found:
            times[Shape(*map(int, found.groups()[1:6])), found[1]] = float(found[7])
    machine = next((line for line in text.splitlines() if line.startswith("limits measured now:")), "")
    if not times or not machine or set(times) != set(itertools.product({shape for shape, _ in times}, PASSES)):
        raise BenchError("the benchmark printed no bf16 attention in all its passes; is it the one of BACKEND=cuda?")
    return times, machine


def run_bench(program):
    done = subprocess.run([program, "--benchmark_filter=/bf16/"], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{program} ended with status {done.returncode}: {last}")
    return parse_bench(done.stdout)


# ---- PyTorch's side -----------------------------------------------------------------------------------------------------

def device_ms(launch, flush):
    import torch

    launch()  # what it does only once would leave the queue empty
    torch.cuda.synchronize()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + RUNS)] for _ in range(2))
    for start, end in zip(starts, ends):
        flush.amax()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in list(zip(starts, ends))[WARM_UP:])


def make_inputs(shape, packed):
    """q, k, v and dout [B, heads, T, HS]; packed: q, k, v are views into rows of (NH + 2 NKV) HS numbers."""
    import torch

    def normal(*sizes):
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    B, T, NH, NKV, HS = shape
    if packed:
        rows = normal(B, T, NH + 2 * NKV, HS)
        q, k, v = (part.transpose(1, 2) for part in rows.split([NH, NKV, NKV], dim=2))
        dout = normal(B, T, NH, HS).transpose(1, 2)
    else:
        q, k, v, dout = (normal(B, heads, T, HS) for heads in (NH, NKV, NKV, NH))
    return [x.detach().requires_grad_() for x in (q, k, v)] + [dout]


def deterministically(launch):
    """PyTorch asks for the mode at every call, the backward pass too."""
    import torch

    def run():
        torch.use_deterministic_algorithms(True)
        try:
            return launch()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def torch_passes(shape, q, k, v, dout, backend, mode=lambda launch: launch):
    """{pass: what launches it and returns its results}."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if backend == CUDNN else SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                    enable_gqa=shape.NH != shape.NKV)

    out = mode(forward)()
    return {"forward": mode(forward),
            "backward": mode(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))}


@functools.lru_cache(maxsize=None)
def cudnn_handle():
    import cudnn
    import torch

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


def cudnn_graph(make_node, inputs, outputs):
    """What launches a cuDNN graph of one node that reads and writes these tensors, the inputs by their names."""
    import cudnn
    import torch

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, handle=cudnn_handle())
    nodes = {name: graph.tensor_like(x) for name, x in inputs.items()}
    memory = {nodes[name]: x for name, x in inputs.items()}
    for node, x in zip(make_node(graph, nodes), outputs):
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
        if x.dtype == torch.float32:
            node.set_data_type(cudnn.data_type.FLOAT)
        memory[node] = x
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)

    def launch():
        graph.execute(memory, workspace, handle=cudnn_handle())
        return outputs

    return launch


def frontend_backward(shape, q, k, v, dout):
    """cuDNN's deterministic backward pass, which cuDNN's own front end can ask for."""
    import torch

    q, k, v = (x.detach() for x in (q, k, v))
    out, stats = torch.empty_like(dout), torch.empty(*dout.shape[:3], 1, device="cuda", dtype=torch.float32)
    settings = {"attn_scale": 1 / math.sqrt(shape.HS), "use_causal_mask": True}
    cudnn_graph(lambda graph, nodes: graph.sdpa(**nodes, **settings, generate_stats=True), {"q": q, "k": k, "v": v},
                [out, stats])()
    return cudnn_graph(lambda graph, nodes: graph.sdpa_backward(**nodes, **settings, use_deterministic_algorithm=True),
                       {"q": q, "k": k, "v": v, "o": out, "dO": dout, "stats": stats},
                       [torch.empty_like(x) for x in (q, k, v)])


def repeats(launch):
    import torch

    first = [x.clone() for x in launch()]
    return all(map(torch.equal, first, launch()))


def make_peers(shape, packed, notes):
    """{(pass, peer): launch} of what there is. Where it comes from, or why it is not there, goes into notes."""
    inputs = make_inputs(shape, packed)
    launches = {}
    for backend in (CUDNN, FLASH):
        try:
            for name, launch in torch_passes(shape, *inputs, backend).items():
                launch()
                launches[name, backend] = launch
        except RuntimeError as error:
            notes.add(f"{backend}: {first_line(error)}")
        # PyTorch refuses where it knows no deterministic algorithm.
        makers = {"PyTorch": lambda: torch_passes(shape, *inputs, backend, deterministically)["backward"]}
        if backend == CUDNN:
            makers["nvidia-cudnn-frontend"] = lambda: frontend_backward(shape, *inputs)
        refusals = []
        for source, make in makers.items():
            try:
                launch = make()
                if repeats(launch):
                    launches["backward", backend + DETERMINISTIC] = launch
                    notes.add(f"{backend}{DETERMINISTIC}: through {source}")
                    break
                refusals.append(f"{source}: two runs differ")
            except Exception as error:  # whatever cuDNN's front end raises, the table can do without it
                refusals.append(f"{source}: {first_line(error)}")
        else:
            notes.add(f"{backend}{DETERMINISTIC}: none. {'; '.join(refusals)}")
    return launches


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- The table ----------------------------------------------------------------------------------------------------------

def table(turns):
    """Markdown, of [{(shape, pass, contender): ms}, …], one for each turn."""
    ms = {key: statistics.median(turn[key] for turn in turns if key in turn) for turn in turns for key in turn}
    shapes = dict.fromkeys(shape for shape, _, contender in ms if contender == OURS)
    lines = ["| shape | pass | " + " | ".join([OURS] + PEERS) + " |", "|---" * (3 + len(PEERS)) + "|"]
    for shape, name in itertools.product(shapes, PASSES):
        ours, tflop = ms[shape, name, OURS], shape.tflop(PASSES[name])
        cells = [f"{tflop / ours * 1e3:.0f}"]
        for peer in PEERS:
            unequal = name == NONDETERMINISTIC and peer.endswith(DETERMINISTIC)
            theirs = None if unequal else ms.get((shape, name.partition("_")[0], peer))
            cells.append(f"{tflop / theirs * 1e3:.0f} ({theirs / ours:.2f}x)" if theirs else "")
        lines.append(f"| {shape} | {name.replace('_', ', ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def largest_spread(turns):
    """Of a contender's times between turns, relative to its fastest."""
    times = {key: [turn[key] for turn in turns if key in turn] for turn in turns for key in turn}
    return max(max(t) / min(t) - 1 for t in times.values())


def compare(args):
    import torch

    if not torch.cuda.is_available():
        raise BenchError("PyTorch sees no GPU")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    turns, notes, peers = [], set(), {}
    for turn in range(args.turns):
        ours, machine = run_bench(args.bench)
        times = {(shape, name, OURS): ms for (shape, name), ms in ours.items()}
        for shape in dict.fromkeys(shape for shape, _ in ours):
            if shape not in peers:
                peers[shape] = make_peers(shape, args.packed, notes)
            for (name, peer), launch in peers[shape].items():
                times[shape, name, peer] = device_ms(launch, flush)
        turns.append(times)
        print(f"turn {turn + 1} of {args.turns} done", file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
          f"{torch.backends.cudnn.version()}; {machine}\n")
    print(f"TFLOP/s, causal half counted, and this project's speed over each contender's; cold L2, medians of {RUNS} runs and "
          f"{args.turns} turns, which differ by {100 * largest_spread(turns):.1f}% at most. PyTorch's tensors are "
          + ("views into packed QKV rows, as the project's are.\n" if args.packed else
             "contiguous [B, H, T, D]; the project's are views into packed QKV rows.\n"))
    print(table(turns))
    print("".join(f"\n- {note}" for note in sorted(notes)))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="build/cuda/dev/bench_attention", help="the project's benchmark (default %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of all contenders (default %(default)s)")
    parser.add_argument("--packed", action="store_true", help="PyTorch reads q, k and v from packed rows too")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns must be at least 1")
    return peer_main("bench_attention", lambda: compare(args), BenchError, "install PyTorch")


if __name__ == "__main__":
    sys.exit(main())
