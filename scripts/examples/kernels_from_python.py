#!/usr/bin/env python3
"""Compares results and times of the project's kernels with NumPy's: an example of scripts/train_gpt_kernels.py.

    make lib && .venv/bin/python scripts/examples/kernels_from_python.py

Prints a line for each kernel: the largest error, relative to the largest element of NumPy's result in float64; the median
times of NumPy in float32 and of the kernel on arrays on its device; and how many times faster the kernel is. NumPy runs on
the host, even if the kernels run on a GPU.
"""
import argparse
import os
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from train_gpt_kernels import DeviceArray, KernelError, Kernels  # noqa: E402


def layernorm(x, weight, bias):
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(axis=1, keepdims=True) + x.dtype.type(1e-5)) * weight + bias


def gelu(x):
    return x / 2 * (1 + np.tanh(x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x ** 3)))


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def attention(q, k, v):
    q, k, v = (a.transpose(1, 0, 2) for a in (q, k, v))
    s = q @ k.transpose(0, 2, 1) * q.dtype.type(1 / np.sqrt(q.shape[2]))
    s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf).astype(q.dtype)
    return (softmax(s.reshape(-1, s.shape[2])).reshape(s.shape) @ v).transpose(1, 0, 2)


def kernels(k, size):
    """Name, NumPy function, kernel, shapes of the arguments."""
    n, c = size, 1024
    return [
        ("map exp", np.exp, lambda x: k.map("exp", x), [(n, c)]),
        ("zip add a row", np.add, lambda x, y: k.zip("add", x, y), [(n, c), (c,)]),
        ("zip mul a column", np.multiply, lambda x, y: k.zip("mul", x, y), [(n, c), (n, 1)]),
        ("bin_bcast mul", lambda x, y: (x.reshape(-1, *y.shape) * y).reshape(x.shape),
         lambda x, y: k.bin_bcast("mul", x, y), [(n, c), (n // 8, c)]),
        ("reduce add, rows", lambda x: x.sum(axis=1, keepdims=True), lambda x: k.reduce("add", x, 1), [(n, c)]),
        ("reduce add, columns", lambda x: x.sum(axis=0, keepdims=True), lambda x: k.reduce("add", x, 0), [(n, c)]),
        ("reduce max, rows", lambda x: x.max(axis=1, keepdims=True), lambda x: k.reduce("max", x, 1), [(n, c)]),
        ("tensor_matmul, batch of 8", np.matmul, k.tensor_matmul, [(8, n // 8, 256), (1, 256, 256)]),
        ("matmul_forward", lambda x, w: x @ w.T, k.matmul_forward, [(n // 4, c), (c, c)]),
        ("layernorm_forward", layernorm, lambda *a: k.layernorm_forward(*a)[0], [(n, c), (c,), (c,)]),
        ("softmax_forward", softmax, k.softmax_forward, [(n, c)]),
        ("gelu_forward", gelu, k.gelu_forward, [(n, c)]),
        ("attention_forward", attention, lambda *a: k.attention_forward(*a)[0], [(512, 8, 64)] * 3),
    ]


def median_ms(function, repeats):
    times = []
    for _ in range(repeats + 1):  # the first run warms up
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows of 1,024 numbers, a multiple of 8 (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each (default %(default)s)")
    options = parser.parse_args()
    if options.size < 8 or options.size % 8 or options.repeats < 1:
        parser.error("--size must be a multiple of 8, --repeats at least 1")
    try:
        k = Kernels()
        print(f"{k.path} on {k.device_description()}, against NumPy {np.__version__}\n")
        print(f"{'kernel':26} {'largest error':>13} {'NumPy ms':>10} {'kernel ms':>10} {'faster':>8}")
        for name, numpy_way, kernel_way, shapes in kernels(k, options.size):
            rng = np.random.default_rng(1)
            arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
            on_device = [k.to_device(a) for a in arrays]
            got = kernel_way(*on_device)
            got = got.numpy() if isinstance(got, DeviceArray) else got
            expected = numpy_way(*(a.astype(np.float64) for a in arrays))
            error = np.abs(got - expected).max() / np.abs(expected).max()
            numpy_ms = median_ms(lambda: numpy_way(*arrays), options.repeats)
            kernel_ms = median_ms(lambda: kernel_way(*on_device), options.repeats)
            print(f"{name:26} {error:13.1e} {numpy_ms:10.3f} {kernel_ms:10.3f} {numpy_ms / kernel_ms:7.1f}x")
    except (FileNotFoundError, KernelError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
