#!/usr/bin/env python3
"""The kernels from Python (scripts/train_gpt_kernels.py, TRAIN_GPT_KERNELS_LIB): results against NumPy in float64 over
shapes, strides and broadcasts that hypothesis generates, arrays of every library, and the exceptions for invalid arguments."""
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import unittest
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts"))

HAVE = all(importlib.util.find_spec(module) for module in ("numpy", "hypothesis", "ml_dtypes"))
if HAVE:
    import ml_dtypes
    import numpy as np
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    import train_gpt_kernels
    from train_gpt_kernels import DeviceArray, Kernels
    # The same examples in every run; threads of other programs make times vary.
    settings.register_profile("here", deadline=None, derandomize=True, max_examples=60,
                              suppress_health_check=list(HealthCheck))
    settings.load_profile("here")

TOLERANCE = 2e-6


def library():
    """The library under test, or None: without the variable, train_gpt_kernels searches for it."""
    try:
        return train_gpt_kernels.library_path() if HAVE else None
    except FileNotFoundError:
        return None


if HAVE:
    @st.composite
    def layouts(draw, shape, seed, positive=False, writable=False):
        """A float32 array of a shape in any layout: Fortran order, permuted, with gaps, reversed; to be read also with
        repeated dimensions."""
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2])) for _ in shape]
        memory = [shape[d] * abs(steps[d]) for d in order]
        rng = np.random.default_rng(seed)
        array = np.array(rng.standard_normal(memory), np.float32)
        if positive:
            array = np.asarray(np.abs(array) + np.float32(0.1))
        array = array.transpose(np.argsort(order)) if shape else array
        array = array[(*(slice(None, None, step) for step in steps), ...)]  # …: of no dimensions, still an array
        if not writable and shape and draw(st.booleans()):
            d = draw(st.integers(0, len(shape) - 1))
            array = np.broadcast_to(array.take([0], axis=d), shape) if shape[d] else array
        assert array.shape == tuple(shape)
        return array

    SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 8, 17, 33])

    @st.composite
    def shapes(draw, max_rank=8, min_rank=0):
        shape, room = [], 20000
        for _ in range(draw(st.integers(min_rank, max_rank))):
            size = draw(SIZES)
            shape.append(size if size <= room else 1)
            room //= max(1, shape[-1])
        return tuple(shape)

    def narrower(draw, shape):
        """A shape that broadcasts to `shape`."""
        kept = [draw(st.sampled_from([size, size, 1])) for size in shape]
        return tuple(kept[draw(st.integers(0, len(kept))) if draw(st.booleans()) else 0:])


@unittest.skipUnless(HAVE, "needs numpy, hypothesis and ml_dtypes (make venv)")
@unittest.skipUnless(library(), "the library is not built (make lib)")
class KernelsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.k = Kernels()
        if cls.k.backend == "cuda":
            try:
                cls.k.to_device(np.zeros(1, np.float32))
            except train_gpt_kernels.KernelError as error:
                raise unittest.SkipTest(str(error))

    def assert_close(self, got, expected, tolerance=TOLERANCE, scale=None):
        """Relative to the largest term of each element (scale), else to the element itself."""
        expected = np.asarray(expected, np.float64)
        got = np.asarray(got, np.float64)
        self.assertEqual(got.shape, expected.shape)
        scale = np.abs(expected) if scale is None else scale
        with np.errstate(invalid="ignore"):
            wrong = ~((got == expected) | (np.isnan(got) & np.isnan(expected)) |
                      (np.abs(got - expected) <= tolerance * scale + 1e-37))
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            self.fail(f"{wrong.sum()} of {wrong.size} elements are wrong; at {at} {got[at]}, expected {expected[at]}")


class TensorOperations(KernelsTest):
    def functions(self):
        """The functions in float64."""
        return {
            "id": lambda x: x, "neg": lambda x: -x, "inv": lambda x: 1 / x, "exp": np.exp, "log": np.log,
            "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0),
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "pow": np.power,
            "lt": np.less, "eq": np.equal, "is_close": lambda x, y: np.abs(x - y) < 1e-2,
            "inv_back": lambda x, d: -d / x ** 2, "log_back": lambda x, d: d / x, "relu_back": lambda x, d: d * (x > 0),
        }

    def test_functions_match_the_library(self):
        self.assertEqual(set(self.k.functions), set(self.functions()))

    if HAVE:
        @given(st.data())
        def test_map_and_zip(self, data):
            function = data.draw(st.sampled_from(sorted(self.k.functions)))
            definition, arguments = self.functions()[function], self.k.functions[function]
            shape = data.draw(shapes())
            positive = function in ("log", "pow", "inv", "div", "inv_back", "log_back")
            inputs = [data.draw(layouts(narrower(data.draw, shape), i, positive)) for i in range(arguments)]
            out_shape = np.broadcast_shapes(*(a.shape for a in inputs))
            call = self.k.map if arguments == 1 else self.k.zip
            wide = [a.astype(np.float64) for a in inputs]
            scale = np.add(*map(np.abs, wide)) if function in ("add", "sub") else None
            expected = np.broadcast_to(definition(*wide), out_shape)
            if data.draw(st.booleans()):
                out = data.draw(layouts(out_shape, 7, writable=True))
                base = out.base if out.base is not None else out
                self.assertIs(call(function, *inputs, out=out), out)
                self.assertIsNotNone(base)
                self.assert_close(out, expected, scale=scale)
            else:
                self.assert_close(call(function, *inputs), expected, scale=scale)

        @given(st.data())
        def test_reduce(self, data):
            shape = data.draw(shapes(min_rank=1))
            axis = data.draw(st.integers(-len(shape), len(shape) - 1))
            inp = data.draw(layouts(shape, 1))
            start = data.draw(st.sampled_from([None, 0.5, -2.0]))
            wide = inp.astype(np.float64)
            first = 0.0 if start is None else start
            self.assert_close(self.k.reduce("add", inp, axis, start), wide.sum(axis=axis, keepdims=True) + first,
                              scale=np.abs(wide).sum(axis=axis, keepdims=True) + abs(first))
            first = -np.inf if start is None else start
            self.assert_close(self.k.reduce("max", inp, axis, start), wide.max(axis=axis, keepdims=True, initial=first), 0)
            near = (1 + inp / 50).astype(np.float32)
            self.assert_close(self.k.reduce("mul", near, axis), near.astype(np.float64).prod(axis=axis, keepdims=True))

        @given(st.data())
        def test_matmul(self, data):
            batch = data.draw(shapes(max_rank=3))
            m, n, p = (data.draw(st.sampled_from([0, 1, 2, 5, 16, 33])) for _ in range(3))
            a = data.draw(layouts((*narrower(data.draw, batch), m, n), 1))
            b = data.draw(layouts((*narrower(data.draw, batch), n, p), 2))
            wide = [t.astype(np.float64) for t in (a, b)]
            self.assert_close(self.k.tensor_matmul(a, b), np.matmul(*wide), scale=np.matmul(*map(np.abs, wide)))

        @given(st.data())
        def test_bin_bcast(self, data):
            small = data.draw(shapes(max_rank=4))
            repeats = [data.draw(st.sampled_from([1, 1, 2, 3])) for _ in small]
            extra = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=4 - len(small))))
            x = data.draw(layouts(extra + tuple(np.multiply(small, repeats).astype(int)) if small else extra, 1))
            y = data.draw(layouts(small, 2, positive=True))
            function = data.draw(st.sampled_from(["add", "sub", "mul", "div"]))
            wide_x, wide_y = x.astype(np.float64), np.tile(y.astype(np.float64), (*extra, *repeats))
            definition = self.functions()[function]
            scale = np.abs(wide_x) + np.abs(wide_y) if function in ("add", "sub") else None
            self.assert_close(self.k.bin_bcast(function, x, y), definition(wide_x, wide_y), scale=scale)
            out = np.empty(x.shape, np.float32)
            self.k.bin_bcast("add", None, y, out=out)
            self.assert_close(out, wide_y, 0)

    def test_mixed_16_bit_dtypes(self):
        rng = np.random.default_rng(1)
        for x_dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for y_dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
                x, y = rng.standard_normal((6, 40)).astype(x_dtype), rng.standard_normal((3, 1)).astype(y_dtype)
                exact = x.astype(np.float32) * np.repeat(np.tile(y.astype(np.float32), (2, 1)), 40, axis=1)
                got = self.k.bin_bcast("mul", x, y)
                self.assertEqual(got.dtype, x.dtype)
                np.testing.assert_array_equal(got.astype(np.float32), exact.astype(x.dtype).astype(np.float32))
                out = np.empty((1, 40), np.float32)
                self.k.reduce("add", x, 0, out=out)
                self.assert_close(out, x.astype(np.float64).sum(axis=0, keepdims=True),
                                  scale=np.abs(x.astype(np.float64)).sum(axis=0, keepdims=True))

    def test_special_values_match_numpy(self):
        x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, 2], np.float32)
        y = np.array([1, np.nan, np.inf, -0.0, 0.0, np.nan, -np.inf], np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for function, definition in self.functions().items():
                if function not in ("relu_back",):  # there 0·∞ is NaN, and a choice is 0
                    arguments = [x, y][: self.k.functions[function]]
                    call = self.k.map if len(arguments) == 1 else self.k.zip
                    self.assert_close(call(function, *arguments), definition(*(a.astype(np.float64) for a in arguments)))
        self.assertTrue(np.isnan(self.k.reduce("max", x, 0)[0]))
        self.assertTrue(np.signbit(self.k.map("neg", np.zeros(3, np.float32))).all())

    def test_invalid_input_is_rejected(self):
        k, x = self.k, np.ones((3, 4), np.float32)
        for error, message, call in [
                (ValueError, "function is 'sin', expected one of id, ", lambda: k.map("sin", x)),
                (ValueError, "function is 'neg', expected one of add, ", lambda: k.zip("neg", x, x)),
                (ValueError, r"x \(3, 4\) and y \(3,\) do not broadcast", lambda: k.zip("add", x, x[:, 0])),
                (TypeError, "inp is a list, expected an array", lambda: k.map("neg", [1.0])),
                (TypeError, "map: inp is float64, expected float32 or", lambda: k.map("neg", x.astype(float))),
                (TypeError, "inp is complex64, expected one of", lambda: k.map("neg", x.astype(np.complex64))),
                (TypeError, "byte order", lambda: k.map("neg", x.astype(">f4"))),
                (ValueError, "overlaps inp", lambda: k.map("neg", x, out=x)),
                (ValueError, "^tgk_matmul: out overlaps a;", lambda: k.matmul(x, x[:, :3].copy(), True, True, out=x)),
                (ValueError, "overlaps inp", lambda: k.map("neg", x[:, :2], out=x[:, 1:3])),
                (ValueError, "out is read-only", lambda: k.map("neg", x, out=np.broadcast_to(x[0], (3, 4)))),
                (ValueError, "inp .* does not broadcast", lambda: k.map("neg", x, out=np.ones((2, 4), np.float32))),
                (ValueError, "9 dimensions; at most 8", lambda: k.map("neg", x.reshape((1,) * 7 + (3, 4)))),
                (ValueError, r"axis 2 is outside inp \(3, 4\)", lambda: k.reduce("add", x, 2)),
                (ValueError, "function is 'sub', expected add, mul or max", lambda: k.reduce("sub", x, 0)),
                (ValueError, "does not repeat over", lambda: k.bin_bcast("add", x, np.ones((2, 4), np.float32))),
                (ValueError, "without x pass an out", lambda: k.bin_bcast("add", None, x)),
                (ValueError, "does not give out", lambda: k.tensor_matmul(x, x)),
                (TypeError, "tensor_matmul: a is float16", lambda: k.tensor_matmul(x.astype(np.float16), x.T)),
                (ValueError, "its rows must be contiguous", lambda: k.gelu_forward(x.T)),
                (ValueError, "expected 2 dimensions", lambda: k.gelu_forward(x[0])),
                (TypeError, "weight is None", lambda: k.matmul_forward(x, None)),
                (TypeError, "layernorm_forward: weight is float16", lambda: k.layernorm_forward(x, x[0].astype(np.float16))),
                (ValueError, "layernorm_forward: weight is fp32", lambda: k.layernorm_forward(x, x[:, 0])),
                (TypeError, "rope: positions is int64", lambda: k.rope(x.reshape(3, 1, 4), np.arange(3), k.rope_table(3, 4))),
                (TypeError, "params is None", lambda: k.adamw_update(None, x[0], x[1], x[2], 1)),
                (TypeError, "x is None", lambda: k.rope(None, np.arange(3, dtype=np.int32), k.rope_table(3, 4))),
                (ValueError, "top_k: k is 5, expected 1 to 4", lambda: k.top_k(x, 5)),
                (ValueError, "muon_update: m is fp32", lambda: k.muon_update(x[None].copy(), x[None, :2].copy(), x[None])),
                (TypeError, "newton_schulz: x is float16", lambda: k.newton_schulz(x[None].astype(np.float16))),
                (ValueError, "adamw_update: t is 0", lambda: k.adamw_update(x[0], x[1], x[2], np.ones(4, np.float32), 0))]:
            with self.subTest(message):
                self.assertRaisesRegex(error, message, call)
        with self.subTest("None"):
            self.none_is_refused()
        # Odd and even columns share memory, but no element.
        pair = np.arange(20, dtype=np.float32)
        k.map("neg", pair[::2], out=pair[1::2])
        np.testing.assert_array_equal(pair[1::2], -pair[::2])

    def none_is_refused(self):
        """Every array without a default, of every function."""
        x, row, rows = (np.ones(shape, np.float32) for shape in ((3, 4), 4, 3))
        q, ids, lse = x.reshape(3, 1, 4), np.arange(3, dtype=np.int32), np.ones((1, 3), np.float32)
        state = np.ones((3, 1, 4, 4), np.float32), np.ones((3, 1, 4), np.float32)
        values = {"function": "add", "axis": 0, "state": state, "q": q, "k": q, "v": q, "lse": lse, "norm": lse,
                  "weight": row, "bias": row, "mean": rows, "rstd": rows, "params": row, "m": row.copy(), "grads": row.copy(),
                  "t": 1, "positions": ids}
        linear = {"weight": x, "bias": rows}
        special = {"map": {"function": "neg"}, "tensor_matmul": {"b": x.T}, "adamw_update": {"v": row.copy()},
                   "newton_schulz": {"x": x[None].copy()},
                   "muon_update": {"params": x[None].copy(), "m": x[None].copy(), "grads": x[None]},
                   "rope": {"x": q, "table": self.k.rope_table(3, 4)}, "attention_backward": {"dout": q, "out": q},
                   "linear_attention_backward": {"dout": q, "out": q}, "top_k": {"k": 2}, "matmul": {"b": x.T.copy()},
                   "matmul_forward": linear, "decay_gate_forward": linear,
                   "matmul_backward_input": {"weight": np.ones((4, 4), np.float32)},
                   "swiglu_backward": {"gate_up": np.ones((3, 8), np.float32)}}
        refused = 0
        for name, function in inspect.getmembers(type(self.k), inspect.isfunction):
            if name.startswith("_") or name in ("synchronize", "device_description", "to_device", "rope_table"):
                continue
            parameters = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty][1:]
            arguments = {p.name: special.get(name, {}).get(p.name, values.get(p.name, x)) for p in parameters}
            getattr(self.k, name)(**arguments)
            for argument, value in arguments.items():
                if isinstance(value, (np.ndarray, tuple)) and (name, argument) != ("bin_bcast", "x"):
                    with self.subTest(f"{name}: {argument}"):
                        self.assertRaisesRegex(TypeError, f"^{argument} is None, expected", getattr(self.k, name),
                                               **{**arguments, argument: None})
                    refused += 1
        self.assertGreater(refused, 60)
        decode = self.k.linear_attention_decode
        self.assertRaisesRegex(TypeError, r"^state\[1\] is None", decode, (state[0], None), q, q, q)


class Networks(KernelsTest):
    """The kernels of training against NumPy's float64."""

    def random(self, *shape, seed=1):
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)

    def test_linear(self):
        inp, weight, bias, dout = self.random(19, 24), self.random(40, 24), self.random(40), self.random(19, 40)
        i, w, b, d = (a.astype(np.float64) for a in (inp, weight, bias, dout))
        self.assert_close(self.k.matmul_forward(inp, weight, bias), i @ w.T + b, scale=np.abs(i) @ np.abs(w).T + np.abs(b))
        self.assert_close(self.k.matmul_forward(inp, weight), i @ w.T, scale=np.abs(i) @ np.abs(w).T)
        self.assert_close(self.k.matmul_backward_input(dout, weight), d @ w, scale=np.abs(d) @ np.abs(w))
        dweight, dbias = self.k.matmul_backward_weight(dout, inp)
        self.assert_close(dweight, d.T @ i, scale=np.abs(d).T @ np.abs(i))
        self.assert_close(dbias, d.sum(axis=0), scale=np.abs(d).sum(axis=0))
        out = np.ones((24, 24), np.float32)
        self.assert_close(self.k.matmul(weight, weight, transpose_a=True, out=out, accumulate=True), 1 + w.T @ w,
                          scale=1 + np.abs(w).T @ np.abs(w))
        # Rows with gaps, as views of a larger matrix have them.
        wide = self.random(19, 64)
        self.assert_close(self.k.matmul_forward(wide[:, 8:32], weight), wide[:, 8:32].astype(np.float64) @ w.T,
                          scale=np.abs(wide[:, 8:32].astype(np.float64)) @ np.abs(w).T)

    def test_norms(self):
        eps = 1e-5
        inp, residual, weight, bias, dout = self.random(9, 80), self.random(9, 80, seed=2), self.random(80), \
            self.random(80, seed=2), self.random(9, 80, seed=3)
        for has_residual in (False, True):
            x = inp.astype(np.float64) + (residual if has_residual else 0)
            extra = residual if has_residual else None
            for centred in (True, False):
                c = x - x.mean(axis=1, keepdims=True) if centred else x
                rstd = 1 / np.sqrt((c ** 2).mean(axis=1) + eps)
                hat = c * rstd[:, None]
                g = dout.astype(np.float64) * weight
                dinp = rstd[:, None] * (g - hat * (g * hat).mean(axis=1, keepdims=True) -
                                        (g.mean(axis=1, keepdims=True) if centred else 0))
                dweight = (dout * hat).sum(axis=0)
                if centred:
                    out, mean, r, *total = self.k.layernorm_forward(inp, weight, bias, extra, eps)
                    self.assert_close(mean, x.mean(axis=1), scale=np.abs(x).mean(axis=1))
                    grads = self.k.layernorm_backward(dout, total[0] if total else inp, weight, mean, r, extra)
                    self.assert_close(grads[2], dout.sum(axis=0, dtype=np.float64), scale=np.abs(dout).sum(axis=0))
                else:
                    out, r, *total = self.k.rmsnorm_forward(inp, weight, extra, eps)
                    grads = self.k.rmsnorm_backward(dout, total[0] if total else inp, weight, r, extra)
                self.assertEqual(len(total), has_residual)
                self.assert_close(r, rstd)
                self.assert_close(out, hat * weight + (bias if centred else 0), scale=4)
                self.assert_close(grads[0], dinp + (residual if has_residual else 0), scale=8)
                self.assert_close(grads[1], dweight, scale=np.abs(dout * hat).sum(axis=0))

    def test_softmax(self):
        inp, dout = self.random(12, 30), self.random(12, 30, seed=2)
        mask = (self.random(4, 30, seed=3) > 0).astype(np.uint8)
        rows, columns = np.arange(12)[:, None] % 4, np.arange(30)[None]
        for causal in (False, True):
            seen = (np.tile(mask, (3, 1)) > 0) & ((columns <= rows + 26) | (not causal))
            s = np.where(seen, 0.5 * inp.astype(np.float64), -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out = self.k.softmax_forward(inp, mask, queries=4, scale=0.5, causal=causal)
            self.assert_close(out, p)
            expected = 0.5 * p * (dout - (dout * p).sum(axis=1, keepdims=True))
            self.assert_close(self.k.softmax_backward(dout, out, scale=0.5), expected, scale=4 * p)

    @staticmethod
    def attention(q, k, v, dout, scale, causal, window):
        """Attention of one sequence with its gradients; arrays [tokens, heads, HS]."""
        group = q.shape[1] // k.shape[1]
        q, k, v, dout = (a.astype(np.float64).transpose(1, 0, 2) for a in (q, k, v, dout))
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        s = scale * q @ k.transpose(0, 2, 1)
        ahead = np.arange(s.shape[2]) - (np.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1])  # of the key, of its query
        s = np.where(((ahead <= 0) | (not causal)) & ((abs(ahead) < window) | (window == 0)), s, -np.inf)
        lse = np.log(np.exp(s).sum(axis=2))
        p = np.exp(s - lse[:, :, None])
        out = p @ v
        dp = dout @ v.transpose(0, 2, 1)
        ds = p * (dp - (dout * out).sum(axis=2, keepdims=True))
        shared = lambda a: a.reshape(-1, group, *a.shape[1:]).sum(axis=1).transpose(1, 0, 2)
        return (out.transpose(1, 0, 2), lse, (scale * ds @ k).transpose(1, 0, 2),
                shared(scale * ds.transpose(0, 2, 1) @ q), shared(p.transpose(0, 2, 1) @ dout))

    def test_attention(self):
        lengths = [5, 1, 21]
        cum = np.array([0, *np.cumsum(lengths)], np.int32)
        T, NH, NKV, HS = int(cum[-1]), 6, 2, 16
        # q, k and v are views of one packed matrix.
        packed, dout = self.random(T, (NH + 2 * NKV) * HS), self.random(T, NH, HS, seed=2)
        heads = packed.reshape(T, NH + 2 * NKV, HS)
        q, k, v = heads[:, :NH], heads[:, NH:NH + NKV], heads[:, NH + NKV:]
        for cums, spans in ((cum, list(zip(cum[:-1], cum[1:]))), (None, [(0, T)])):
            sequences = {} if cums is None else {"cum_q": cums, "cum_k": cums, "max_q": 21, "max_k": 21}
            for seen in ({}, {"causal": False}, {"window": 4}, {"causal": False, "window": 2}):
                out, lse = self.k.attention_forward(q, k, v, **sequences, **seen)
                grads = self.k.attention_backward(dout, q, k, v, out, lse, **sequences, **seen)
                for a, b in spans:
                    expected = self.attention(q[a:b], k[a:b], v[a:b], dout[a:b], 1 / np.sqrt(HS), seen.get("causal", True),
                                              seen.get("window", 0))
                    for got, ref in zip((out[a:b], lse[:, a:b], *(g[a:b] for g in grads)), expected):
                        self.assert_close(got, ref, scale=np.abs(ref).max() + 1)

    @staticmethod
    def linear_attention(q, k, v, gate, elu, normalise, s, z):
        """Token by token, from the state (s [NKV, E, M], z [NKV, E]): out and the state after the last token."""
        q, k, v, s, z = (a.astype(np.float64) for a in (q, k, v, s, z))
        if elu:
            q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
        group, out = q.shape[1] // k.shape[1], np.empty((*q.shape[:2], v.shape[2]))
        for t in range(len(q)):
            decay = np.exp(gate[t].astype(np.float64)) if gate is not None else np.ones(k.shape[1])
            s = decay[:, None, None] * s + k[t][:, :, None] * v[t][:, None, :]
            z = decay[:, None] * z + k[t]
            for h in range(q.shape[1]):
                out[t, h] = q[t, h] @ s[h // group]
                if normalise:
                    out[t, h] /= q[t, h] @ z[h // group] + 1e-6
        return out, s, z

    def test_linear_attention(self):
        lengths, NH, NKV, E, M = [5, 1, 70], 4, 2, 16, 24
        cum = np.array([0, *np.cumsum(lengths)], np.int32)
        N, S = int(cum[-1]), len(lengths)
        q, k, v = self.random(N, NH, E), self.random(N, NKV, E, seed=2), self.random(N, NKV, M, seed=3)
        dout, ds = self.random(N, NH, M, seed=4), self.random(S, NKV, E, M, seed=5)
        s0, z0 = self.random(S, NKV, E, M, seed=6), np.abs(self.random(S, NKV, E, seed=7)) * 4
        log_decays = -np.abs(self.random(N, NKV, seed=8)) / 10
        for features, normalise, gate in (("elu", True, None), ("identity", False, log_decays)):
            kind = {"gate": gate, "features": features, "normalise": normalise, "cum": cum, "max_length": 70}
            initial = (s0, z0 if normalise else None)
            out, norm, final = self.k.linear_attention_forward(q, k, v, initial=initial, **kind)
            for i, (a, b) in enumerate(zip(cum[:-1], cum[1:])):
                g = None if gate is None else gate[a:b]
                ref, s, z = self.linear_attention(q[a:b], k[a:b], v[a:b], g, normalise, normalise, s0[i], z0[i])
                self.assert_close(out[a:b], ref, scale=np.abs(ref).max() + 10)
                self.assert_close(final[0][i], s, scale=np.abs(s).max() + 10)
                if normalise:
                    self.assert_close(final[1][i], z, scale=np.abs(z).max() + 10)
            # One more token from the state equals a sequence that is one token longer.
            step = self.k.linear_attention_decode(final, q[:S], k[:S], v[:S], None if gate is None else gate[:S], features, normalise)
            longer = self.linear_attention(q[:1], k[:1], v[:1], None if gate is None else gate[:1], normalise, normalise,
                                           *self.state_after(q, k, v, gate, normalise, s0, z0, cum))[0]
            self.assert_close(step[:1], longer, scale=np.abs(longer).max() + 10)
            # Gradients along a direction, by differences of the reference.
            dfinal = (ds, np.zeros_like(z0) if normalise else None)
            dq, dk, dv, dgate, dinitial = self.k.linear_attention_backward(dout, q, k, v, out, norm, initial=initial, dfinal=dfinal, **kind)

            def loss(q, k, v, gate, s0):
                total = 0.0
                for i, (a, b) in enumerate(zip(cum[:-1], cum[1:])):
                    g = None if gate is None else gate[a:b]
                    y, s, _ = self.linear_attention(q[a:b], k[a:b], v[a:b], g, normalise, normalise, s0[i], z0[i])
                    total += (y * dout[a:b]).sum() + (s * ds[i]).sum()
                return total

            values = [a if a is None else a.astype(np.float64) for a in (q, k, v, gate, s0)]
            for i, gradient in enumerate((dq, dk, dv, dgate, dinitial[0])):
                if gradient is None:
                    self.assertIsNone(values[i])
                    continue
                direction, h = self.random(*gradient.shape, seed=20 + i).astype(np.float64), 1e-6
                ends = [loss(*(x if j != i else x + e * direction for j, x in enumerate(values))) for e in (h, -h)]
                expected, size = (ends[0] - ends[1]) / (2 * h), np.linalg.norm(gradient)
                self.assertLess(abs((gradient * direction).sum() - expected), 1e-4 * size, f"{features} gradient {i}")
        with self.assertRaisesRegex(ValueError, "features is 'relu'"):
            self.k.linear_attention_forward(q, k, v, features="relu")
        with self.assertRaisesRegex(ValueError, "the normaliser needs positive features"):
            self.k.linear_attention_forward(q, k, v, features="identity")

    def state_after(self, q, k, v, gate, normalise, s0, z0, cum):
        """The reference's state after the first sequence."""
        g = None if gate is None else gate[:cum[1]]
        return self.linear_attention(q[:cum[1]], k[:cum[1]], v[:cum[1]], g, normalise, normalise, s0[0], z0[0])[1:]

    def test_decay_gate(self):
        inp, weight, bias, dgate = self.random(9, 33), self.random(5, 33, seed=2), self.random(5, seed=3) + 4, self.random(9, 5, seed=4)
        x = inp.astype(np.float64) @ weight.T + bias
        gate = self.k.decay_gate_forward(inp, weight, bias)
        self.assert_close(gate, -np.logaddexp(0, -x), scale=20)
        self.assert_close(self.k.decay_gate_backward(dgate, gate), dgate / (1 + np.exp(x)), scale=20)

    def test_rope(self):
        x = self.random(7, 3, 12)
        positions, table = np.array([0, 5, 1, 2, 9, 9, 4], np.int32), self.k.rope_table(10, 8, theta=500.0)
        angle = positions[:, None] * 500.0 ** (-np.arange(4) / 4)
        self.assert_close(table[positions], np.stack([np.cos(angle), np.sin(angle)], axis=2), scale=1)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        expected = x.astype(np.float64)
        expected[..., :4], expected[..., 4:8] = x[..., :4] * c - x[..., 4:8] * s, x[..., 4:8] * c + x[..., :4] * s
        rotated = x.copy()
        self.assertIs(self.k.rope(rotated, positions, table), rotated)
        self.assert_close(rotated, expected, scale=4)
        self.assert_close(self.k.rope(rotated, positions, table, backward=True), x, scale=4)

    def test_activations(self):
        inp, dout = self.random(6, 50) * 3, self.random(6, 50, seed=2)
        x, d = inp.astype(np.float64), dout.astype(np.float64)
        slope = np.sqrt(2 / np.pi)
        t = np.tanh(slope * (x + 0.044715 * x ** 3))
        self.assert_close(self.k.gelu_forward(inp), x / 2 * (1 + t), scale=np.abs(x))
        derivative = (1 + t) / 2 + x / 2 * (1 - t ** 2) * slope * (1 + 3 * 0.044715 * x ** 2)
        self.assert_close(self.k.gelu_backward(dout, inp), d * derivative, scale=4 * np.abs(d))
        gate, up, d = x[:, :25], x[:, 25:], d[:, :25]
        sigmoid = 1 / (1 + np.exp(-gate))
        self.assert_close(self.k.swiglu_forward(inp), gate * sigmoid * up)
        dgate, dup = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid
        self.assert_close(self.k.swiglu_backward(np.ascontiguousarray(dout[:, :25]), inp), np.hstack([dgate, dup]),
                          scale=4 * np.abs(np.hstack([d * up, d * gate])))

    def test_adamw(self):
        params, m, v = self.random(300), np.zeros(300, np.float32), np.zeros(300, np.float32)
        p, pm, pv = params.astype(np.float64), 0, 0
        for t in (1, 2, 3):
            grads = self.random(300, seed=t)
            g = 0.5 * grads.astype(np.float64)
            pm, pv = 0.9 * pm + 0.1 * g, 0.99 * pv + 0.01 * g ** 2
            p -= 0.01 * (pm / (1 - 0.9 ** t) / (np.sqrt(pv / (1 - 0.99 ** t)) + 1e-8) + 0.1 * p)
            self.k.adamw_update(params, m, v, grads, t, lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=0.5)
        self.assert_close(m, pm, scale=1)
        self.assert_close(v, pv, scale=1)
        self.assert_close(params, p, scale=np.abs(p) + 0.1)

    # Jordan's optimizer (Muon, 2024) without its rounding to bf16, in float64.
    @staticmethod
    def orthogonalised(x, steps):
        if x.shape[0] > x.shape[1]:
            return Networks.orthogonalised(x.T, steps).T
        x = x / (np.linalg.norm(x) + 1e-7)
        for a, b, c in steps:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def test_muon(self):
        for shape in ((3, 1, 1), (2, 7, 5), (2, 5, 7), (1, 33, 129), (1, 129, 33), (2, 64, 64)):
            for name, steps in (("quintic", [(3.4445, -4.7750, 2.0315)] * 5), ("simple", [(2, -1.5, 0.5)] * 12)):
                with self.subTest(shape=shape, coefficients=name):
                    params, m = self.random(*shape) * np.float32(0.02), np.zeros(shape, np.float32)
                    p, momentum, start = params.astype(np.float64), np.zeros(shape), params.copy()
                    scale = max(1, shape[1] / shape[2]) ** 0.5
                    for step in (1, 2, 3):
                        grads = self.random(*shape, seed=step)
                        momentum += 0.05 * (grads - momentum)
                        update = grads + 0.95 * (momentum - grads)
                        p *= 1 - 0.02 * 0.1
                        p -= 0.02 * scale * np.stack([self.orthogonalised(u, steps) for u in update])
                        self.k.muon_update(params, m, grads, weight_decay=0.1, shape_scale=scale, coefficients=name)
                    change, expected = params.astype(np.float64) - start, p - start
                    # The sum of the errors that dev/tests/test_muon.cpp analyses. Worst on a CPU: 1.1e-6, and 4e-6
                    # for single numbers, whose three steps partly cancel.
                    self.assertLessEqual(np.linalg.norm(change - expected), 1e-5 * np.linalg.norm(expected))
                    self.assert_close(m, momentum, scale=1)

    def test_newton_schulz(self):
        x = self.random(2, 20, 28)
        for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
            got = x.astype(dtype)
            if dtype == "bfloat16" and self.k.backend == "cpu":
                self.assertRaisesRegex(TypeError, "newton_schulz: x is bfloat16", self.k.newton_schulz, got)
                continue
            self.k.newton_schulz(got, "polar-express", 9)
            u, _, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
            self.assertLessEqual(np.abs(got.astype(np.float64) - u @ v).max(), tolerance)
        self.assertRaisesRegex(ValueError, "coefficients are 'cubic'", self.k.newton_schulz, x, "cubic")

    def test_top_k(self):
        inp = np.round(self.random(4, 3000) * 20).astype(np.float32)  # many equal ones
        values, ids = self.k.top_k(inp, 100)
        expected = np.argsort(-inp, axis=1, kind="stable")[:, :100]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(inp, expected, axis=1))


class Arrays(KernelsTest):
    """The memory of arrays, and the library itself."""

    def test_device_memory(self):
        x = np.random.default_rng(1).standard_normal((5, 70)).astype(np.float32)
        on_device = self.k.to_device(x)
        np.testing.assert_array_equal(on_device.numpy(), x)
        got = self.k.map("neg", on_device)
        if self.k.backend == "cuda":
            self.assertIsInstance(got, DeviceArray)
            interface = got.__cuda_array_interface__
            self.assertEqual((interface["shape"], interface["typestr"]), ((5, 70), "<f4"))
            got = got.numpy()
            # Through the interface of others: the same memory, seen by columns.
            class Foreign:
                __cuda_array_interface__ = {**on_device.__cuda_array_interface__, "shape": (70, 5), "strides": (4, 280),
                                            "stream": 2}
            np.testing.assert_array_equal(self.k.reduce("max", Foreign, 0).numpy(), x.max(axis=1)[None])
        np.testing.assert_array_equal(got, -x)
        out = self.k.to_device(np.zeros((5, 1), np.float32))
        self.assertIs(self.k.reduce("max", on_device, 1, out=out), out)
        np.testing.assert_array_equal(out.numpy()[:, 0], x.max(axis=1))
        for _ in range(100):  # memory is freed with its last reference
            self.k.to_device(np.zeros(1 << 20, np.uint8))

    def test_arrays_with_dlpack(self):
        class Foreign:  # like another library's tensor: only the protocol
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **_):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        x = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
        self.assertTrue((self.k.map("neg", Foreign(x[::2, 1:].T)) == -x[::2, 1:].T).all())
        out = np.zeros((6, 8), np.float32)
        self.k.map("neg", x, out=Foreign(out))
        np.testing.assert_array_equal(out, -x)
        self.assertRaisesRegex(TypeError, "DLPack's dtype", lambda: self.k.map("neg", Foreign(x.astype(np.complex64))))

    def test_every_function_of_the_header_is_bound(self):
        with open(os.path.join(ROOT, "tensor_library", "train_gpt_kernels.h"), encoding="utf-8") as file:
            header = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.S)
        declared = {name: [" ".join(a.split()) for a in arguments.split(",")] for name, arguments in
                    re.findall(r"TGK_API\s+[\w\s*]+?\btgk_(\w+)\(([^)]*)\)", header)}
        bound = {name: len(arguments) for name, (arguments, _) in train_gpt_kernels.FUNCTIONS.items()}
        kinds = {"I": "int32_t", "L": "int64_t", "F": "float"}
        for name, (before, tensors, after) in train_gpt_kernels.OPERATIONS.items():
            types = ["tgk_context", *(kinds[n] for n in before), *["const tgk_tensor"] * len(tensors.replace("|", "")),
                     *(kinds[n] for n in after)]
            for argument, kind in zip(declared[name], types):
                self.assertTrue(argument.startswith(kind), f"{name}: {argument}, bound as {kind}")
            bound[name] = len(types)
        self.assertEqual(bound, {name: len([a for a in arguments if a != "void"]) for name, arguments in declared.items()})

    @unittest.skipUnless(shutil.which("nm"), "nm is not here")
    def test_library_exports_only_the_interface(self):
        # Exported C++ symbols would replace those of the process, and crash where the two differ.
        symbols = subprocess.run(["nm", "-D", "--defined-only", self.k.path], capture_output=True, text=True, check=True).stdout
        names = {line.split()[-1] for line in symbols.splitlines()}
        self.assertIn("tgk_create", names)
        self.assertEqual([name for name in names if not name.startswith("tgk_")], [])

    def test_signal_handlers_run_on_their_own_stack(self):
        # During a matmul the stack pointer may be a buffer on the heap, where a handler would write over other memory.
        script = ("import ctypes, sys; sys.path.insert(0, sys.argv[1]); import train_gpt_kernels as t\n"
                  "class Stack(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\n"
                  "def size(): s = Stack(); ctypes.CDLL(None).sigaltstack(None, ctypes.byref(s)); return 0 if s.flags & 2 else s.size\n"
                  "print(size()); t.Kernels(); print(size() >= 1 << 16)")
        done = subprocess.run([sys.executable, "-c", script, os.path.join(ROOT, "scripts")], capture_output=True, text=True, timeout=60,
                              env={k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"})
        self.assertEqual(done.stdout.split(), ["0", "True"], done.stderr)

    def test_library_is_found_from_any_directory(self):
        script = ("import sys; sys.path.insert(0, sys.argv[1]); import train_gpt_kernels as t; "
                  "k = t.Kernels(); print(k.path)")
        env = {name: value for name, value in os.environ.items() if name != train_gpt_kernels.VARIABLE}
        run = lambda env: subprocess.run([sys.executable, "-c", script, os.path.join(ROOT, "scripts")], env=env, cwd="/",
                                         capture_output=True, text=True, timeout=60)
        done = run({**env, train_gpt_kernels.VARIABLE: self.k.path})
        self.assertEqual(done.stdout.strip(), self.k.path, done.stderr)
        done = run({**env, train_gpt_kernels.VARIABLE: "/nowhere.so"})
        self.assertIn("TRAIN_GPT_KERNELS_LIB is /nowhere.so, which is not a file", done.stderr)
        built = [os.path.join(ROOT, "build", b, train_gpt_kernels.LIBRARY) for b in ("cuda", "cpu")]
        built = next(filter(os.path.isfile, built), None)
        done = run(env)
        if built == self.k.path:
            self.assertEqual(done.stdout.strip(), built, done.stderr)
        elif built is None:
            self.assertIn("`make lib`", done.stderr)


if __name__ == "__main__":
    unittest.main()
