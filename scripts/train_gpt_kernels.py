"""The project's kernels for arrays of NumPy, PyTorch and others: bindings of libtrain_gpt_kernels.so.

    make lib                                    # builds it, for the GPU if there is one

    import numpy as np
    from train_gpt_kernels import Kernels
    k = Kernels()
    k.zip("add", np.ones((3, 4), np.float32), np.arange(4, dtype=np.float32))
    k.layernorm_forward(x, weight, bias)        # -> out, mean, rstd

Arguments and results are arrays. An array is
  - a NumPy array, in host memory. The CPU library uses it in place; the CUDA library copies it to the GPU and results
    back;
  - an object with DLPack (__dlpack__) or __cuda_array_interface__, such as a tensor of PyTorch, CuPy or JAX. It is used in
    place; on a GPU only the CUDA library can use it;
  - a DeviceArray, in the memory of the library's device (Kernels.to_device).
Results are new arrays: DeviceArray if the first input is on the GPU, else NumPy; or the array that `out` names. A call
returns when its results are complete. With Kernels(asynchronous=True) work on GPU arrays is only queued, and
Kernels.synchronize() waits.

dtypes: float32; in the CUDA library also float16 and bfloat16 (in NumPy from the package ml_dtypes) where a kernel takes
them, and everywhere in map, zip, bin_bcast and reduce. Nothing is converted silently: TypeError for a wrong dtype,
ValueError for a wrong shape or layout, KernelError if the device fails.

Shapes below: N rows (tokens), C channels, as in the headers of kernels/, which state what is computed.

The library is the one that TRAIN_GPT_KERNELS_LIB names, else build/cuda/… or build/cpu/libtrain_gpt_kernels.so in the
directory of this project, independent of the working directory.
"""
import ctypes
import math
import os
import weakref

import numpy as np

__all__ = ["Kernels", "DeviceArray", "KernelError", "library_path"]

MAX_DIMS = 8
LIBRARY = "libtrain_gpt_kernels.so"
VARIABLE = "TRAIN_GPT_KERNELS_LIB"
OK, INVALID_ARGUMENT = 0, 1
CPU, CUDA = 0, 1

# tgk_dtype, in its order.
DTYPES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint16", "uint8"]
# The coefficients of the Newton-Schulz iteration (kernels/muon.h), in the library's order.
NEWTON_SCHULZ = ["quintic", "polar-express", "simple"]


class KernelError(RuntimeError):
    """A failure of the device: out of memory, no GPU, or another error. Wrong arguments are ValueError and TypeError."""


class _Tensor(ctypes.Structure):
    """tgk_tensor."""
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int64 * MAX_DIMS), ("stride", ctypes.c_int64 * MAX_DIMS),
                ("rank", ctypes.c_int32), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32)]


# The computing functions of train_gpt_kernels.h: numbers before the tensors, dtypes of outputs|inputs, numbers after them.
# Numbers: I int32, L int64, F float32. Tensors: T one of float32, float16 and bfloat16, the same for all tensors of a call;
# A any of these; b one of float32 and bfloat16; f float32, i int32, u uint8; r T or float32.
OPERATIONS = {
    "map": ("I", "A|A", ""),
    "zip": ("I", "A|AA", ""),
    "bin_bcast": ("I", "A|AA", ""),
    "reduce": ("I", "A|A", "IF"),
    "tensor_matmul": ("", "f|ff", ""),
    "matmul": ("", "r|TT", "III"),
    "matmul_forward": ("", "T|TTT", ""),
    "matmul_backward_input": ("", "T|TT", "I"),
    "matmul_backward_weight": ("", "ff|TT", "I"),
    "layernorm_forward": ("", "TTff|TTff", "F"),
    "layernorm_backward": ("", "Tfff|TTTfff", "I"),
    "rmsnorm_forward": ("", "TTf|TTf", "F"),
    "rmsnorm_backward": ("", "Tff|TTTff", "I"),
    "softmax_forward": ("", "T|Tu", "LFI"),
    "softmax_backward": ("", "T|TT", "F"),
    "attention_forward": ("", "Tf|TTTii", "LLILF"),
    "attention_backward": ("", "TTT|TTTTTfii", "LLILF"),
    "linear_attention_forward": ("", "Tfff|TTTfffi", "LII"),
    "linear_attention_backward": ("", "TTTfff|TffTTTfffTfi", "LII"),
    "linear_attention_decode": ("", "Tff|TTTf", "II"),
    "decay_gate_forward": ("", "f|TTf", ""),
    "decay_gate_backward": ("", "T|ff", ""),
    "rope": ("", "T|if", "I"),
    "gelu_forward": ("", "T|T", ""),
    "gelu_backward": ("", "T|TT", ""),
    "swiglu_forward": ("", "T|T", ""),
    "swiglu_backward": ("", "T|TT", ""),
    "adamw_update": ("", "fff|f", "FFFFFFL"),
    "newton_schulz": ("", "b|", "II"),
    "muon_update": ("", "ff|f", "FFFFFII"),
    "top_k": ("", "Ti|T", ""),
}
_NUMBERS = {"I": ctypes.c_int32, "L": ctypes.c_int64, "F": ctypes.c_float}
_FLOATS = ("float32", "float16", "bfloat16")
_BF16 = ("float32", "bfloat16")
_ALLOWED = {"f": ("float32",), "i": ("int32",), "u": ("uint8",)}

# The other functions: arguments and result.
_P, _SIZE, _TENSOR = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(_Tensor)
FUNCTIONS = {
    "create": ([ctypes.POINTER(_P)], ctypes.c_int),
    "destroy": ([_P], None),
    "synchronize": ([_P], ctypes.c_int),
    "wait_for_stream": ([_P, _SIZE], ctypes.c_int),
    "last_error": ([], ctypes.c_char_p),
    "backend": ([], ctypes.c_char_p),
    "device_description": ([ctypes.c_char_p, _SIZE], ctypes.c_int),
    "alloc": ([_P, ctypes.POINTER(_P), _SIZE], ctypes.c_int),
    "free": ([_P, _P], ctypes.c_int),
    "copy_to_device": ([_P, _P, _P, _SIZE], ctypes.c_int),
    "copy_to_host": ([_P, _P, _P, _SIZE], ctypes.c_int),
    "num_functions": ([], ctypes.c_int32),
    "function_name": ([ctypes.c_int32], ctypes.c_char_p),
    "function_arguments": ([ctypes.c_int32], ctypes.c_int32),
    "rope_table": ([_TENSOR, ctypes.c_double], ctypes.c_int),
}


def library_path():
    """The path of the library that Kernels() loads. FileNotFoundError says how to build it."""
    if os.environ.get(VARIABLE):
        if not os.path.isfile(os.environ[VARIABLE]):
            raise FileNotFoundError(f"{VARIABLE} is {os.environ[VARIABLE]}, which is not a file")
        return os.path.abspath(os.environ[VARIABLE])
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for backend in ("cuda", "cpu"):
        path = os.path.join(root, "build", backend, LIBRARY)
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(f"{LIBRARY} is not built. Run `make lib` in {root}, or set {VARIABLE} to its path")


def _load(path):
    library = ctypes.CDLL(path)
    signatures = dict(FUNCTIONS)
    for name, (before, tensors, after) in OPERATIONS.items():
        arguments = [_P, *(_NUMBERS[n] for n in before), *(_TENSOR for _ in tensors.replace("|", "")), *(_NUMBERS[n] for n in after)]
        signatures[name] = (arguments, ctypes.c_int)
    for name, (arguments, result) in signatures.items():
        function = getattr(library, "tgk_" + name)
        function.argtypes, function.restype = arguments, result
    return library


def _dtype(name):
    """The NumPy dtype of a name of DTYPES."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise TypeError("NumPy has no bfloat16 of its own: install the package ml_dtypes") from error
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _newton_schulz(coefficients):
    """The number of coefficients in the library."""
    if coefficients not in NEWTON_SCHULZ:
        raise ValueError(f"coefficients are {coefficients!r}, expected one of {', '.join(NEWTON_SCHULZ)}")
    return NEWTON_SCHULZ.index(coefficients)


def _strides(array):
    """Row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(array):
        strides.insert(0, step)
        step *= max(1, size)
    return tuple(strides)


class _View:
    """The library's description of an array: pointer, shape, strides in elements, dtype; and the owner of the memory."""

    def __init__(self, name, pointer, shape, strides, dtype, device, owner, writable=True):
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{name} has {len(shape)} dimensions; at most {MAX_DIMS} are supported")
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {dtype}, expected one of {', '.join(DTYPES)}")
        self.name, self.shape, self.strides, self.dtype, self.device = name, tuple(shape), tuple(strides), dtype, device
        self.owner, self.writable = owner, writable
        self.c = _Tensor(pointer, (ctypes.c_int64 * MAX_DIMS)(*shape), (ctypes.c_int64 * MAX_DIMS)(*strides),
                         len(shape), DTYPES.index(dtype), device)


class DeviceArray:
    """A contiguous array in the memory of the library's device. Kernels.to_device() and operations return it; numpy()
    copies it to the host. On a GPU, PyTorch, CuPy and Numba accept it through __cuda_array_interface__."""

    def __init__(self, kernels, shape, dtype):
        self.kernels, self.shape, self.dtype = kernels, tuple(int(n) for n in shape), _dtype(str(np.dtype(dtype)))
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        pointer = ctypes.c_void_p()
        kernels._call("alloc", ctypes.byref(pointer), self.nbytes)
        self.pointer = pointer.value
        weakref.finalize(self, kernels._free, self.pointer)

    def numpy(self):
        out = np.empty(self.shape, self.dtype)
        self.kernels._call("copy_to_host", out.ctypes.data, self.pointer, self.nbytes)
        return out

    @property
    def __cuda_array_interface__(self):
        if self.kernels.backend != "cuda":
            raise AttributeError("this DeviceArray is in host memory")
        if self.dtype.name == "bfloat16":
            raise AttributeError("__cuda_array_interface__ does not support bfloat16")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3,
                "strides": None, "stream": 1}

    def __repr__(self):
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"


# --- DLPack: the C structures of its specification, version 0


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


_DL_DTYPES = {(2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (2, 16): "float16", (0, 32): "int32",
              (0, 64): "int64", (1, 16): "uint16", (1, 8): "uint8"}
_DL_DEVICES = {1: CPU, 2: CUDA, 3: CPU, 13: CUDA}  # host, CUDA, page-locked host, managed memory

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _view_of_dlpack(name, array):
    device_type = int(array.__dlpack_device__()[0])
    if device_type not in _DL_DEVICES:
        raise ValueError(f"{name} is on a device of DLPack's type {device_type}, expected the host or a CUDA device")
    # On a GPU the producer synchronises with the default stream, which the library's stream is ordered with.
    capsule = array.__dlpack__(stream=1) if device_type in (2, 13) else array.__dlpack__()
    t = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    key = (t.code, t.bits)
    if t.lanes != 1 or key not in _DL_DTYPES:
        raise TypeError(f"{name} has DLPack's dtype {key}, expected one of {', '.join(DTYPES)}")
    shape = tuple(t.shape[:t.ndim])
    strides = tuple(t.strides[:t.ndim]) if t.strides else _strides(shape)
    # The capsule is not consumed, so it frees the tensor when it is deleted.
    return _View(name, (t.data or 0) + t.byte_offset, shape, strides, _DL_DTYPES[key], _DL_DEVICES[device_type],
                 (array, capsule))


class Kernels:
    """A loaded library with its own stream. One thread at a time may use it; each thread may have its own."""

    def __init__(self, path=None, asynchronous=False):
        self.path = path or library_path()
        self.asynchronous = asynchronous
        self._library = _load(self.path)
        context = ctypes.c_void_p()
        self._check(self._library.tgk_create(ctypes.byref(context)))
        self._context = context
        weakref.finalize(self, self._library.tgk_destroy, context)
        self.backend = self._library.tgk_backend().decode()
        #: Functions for map and zip: name to number of arguments.
        self.functions = {self._library.tgk_function_name(f).decode(): self._library.tgk_function_arguments(f)
                          for f in range(self._library.tgk_num_functions())}
        self._numbers = {name: f for f, name in enumerate(self.functions)}

    # --- the device

    def device_description(self):
        """A description of the device: "2 threads, AVX-512", or the GPU."""
        text = ctypes.create_string_buffer(256)
        self._check(self._library.tgk_device_description(text, len(text)))
        return text.value.decode()

    def to_device(self, array):
        """Copies a NumPy array to a DeviceArray."""
        array = np.ascontiguousarray(array)
        out = DeviceArray(self, array.shape, array.dtype)
        self._call("copy_to_device", out.pointer, array.ctypes.data, array.nbytes)
        return out

    def synchronize(self):
        """Waits until all work queued so far is done."""
        self._call("synchronize")

    # --- tensors of any strides (tensor_library/tensor_ops.h)

    def map(self, function, inp, out=None):
        """f(inp), elementwise: id, neg, inv, exp, log, sigmoid, tanh, relu. out: any shape that inp broadcasts to."""
        inp = self._view("inp", inp)
        out, result = self._out(out, inp.shape, inp)
        return self._run("map", [self._number(function, 1)], [out, inp], [], result)

    def zip(self, function, x, y, out=None):
        """f(x, y), elementwise with NumPy's broadcasting: add, sub, mul, div, max, pow, lt, eq, is_close, and the
        gradients inv_back, log_back, relu_back of x and d."""
        x, y = self._view("x", x), self._view("y", y)
        out, result = self._out(out, self._broadcast(x, y), x)
        return self._run("zip", [self._number(function, 2)], [out, x, y], [], result)

    def bin_bcast(self, function, x, y, out=None):
        """x + y, x - y, x·y or x/y (add, sub, mul, div) of up to 4 dimensions, y repeated in blocks over x: each of its
        sizes divides x's. If x is None: y repeated over `out` (add, mul), or −y, 1/y (sub, div)."""
        y = self._view("y", y)
        x = self._optional("x", x)
        if x is None and out is None:
            raise ValueError("bin_bcast: without x pass an out to repeat y over")
        out, result = self._out(out, x.shape if x else (), x or y)
        return self._run("bin_bcast", [self._number(function, 2)], [out, x, y], [], result)

    def reduce(self, function, inp, axis, start=None, out=None):
        """Reduces inp along one axis, which becomes 1 long: add, mul or max. start: the initial value, by default the
        neutral element (0, 1, −∞)."""
        inp = self._view("inp", inp)
        if not -len(inp.shape) <= axis < len(inp.shape):
            raise ValueError(f"reduce: axis {axis} is outside inp {inp.shape}")
        axis %= len(inp.shape)
        starts = {"add": 0.0, "mul": 1.0, "max": -math.inf}
        if function not in starts:
            raise ValueError(f"reduce: function is {function!r}, expected add, mul or max")
        out, result = self._out(out, inp.shape[:axis] + (1,) + inp.shape[axis + 1:], inp)
        start = starts[function] if start is None else start
        return self._run("reduce", [self._number(function, 2)], [out, inp], [axis, start], result)

    def tensor_matmul(self, a, b, out=None):
        """out [..., m, p] of a [..., m, n] and b [..., n, p], float32 of any strides; the dimensions before the last two
        broadcast."""
        a, b = self._view("a", a), self._view("b", b)
        if min(len(a.shape), len(b.shape)) < 2:
            raise ValueError(f"tensor_matmul: a {a.shape} and b {b.shape} must have two dimensions or more")
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out, result = self._out(out, (*batch, a.shape[-2], b.shape[-1]), a)
        return self._run("tensor_matmul", [], [out, a, b], [], result)

    # --- linear layers (kernels/matmul.h)

    def matmul(self, a, b, transpose_a=False, transpose_b=False, out=None, accumulate=False):
        """out [M, N] = op(a)·op(b), added to out if accumulate. op(x) is x or, if transpose_x, its transpose. Matrices have
        unit inner stride."""
        a, b = self._matrix("a", a), self._matrix("b", b)
        if accumulate and out is None:
            raise ValueError("matmul: accumulate needs an out to add to")
        shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
        out, result = self._out(out, shape, a)
        return self._run("matmul", [], [out, a, b], [transpose_a, transpose_b, accumulate], result)

    def matmul_forward(self, inp, weight, bias=None, out=None):
        """out [N, OC] = inp [N, C]·weight [OC, C]ᵀ + bias [OC]."""
        inp, weight, bias = self._matrix("inp", inp), self._matrix("weight", weight), self._optional("bias", bias)
        out, result = self._out(out, (inp.shape[0], weight.shape[0]), inp)
        return self._run("matmul_forward", [], [out, inp, weight, bias], [], result)

    def matmul_backward_input(self, dout, weight):
        """dinp [N, C] = dout [N, OC]·weight [OC, C]."""
        dout, weight = self._matrix("dout", dout), self._matrix("weight", weight)
        dinp, result = self._out(None, (dout.shape[0], weight.shape[1]), dout)
        return self._run("matmul_backward_input", [], [dinp, dout, weight], [False], result)

    def matmul_backward_weight(self, dout, inp):
        """dweight [OC, C] = doutᵀ·inp and dbias [OC] = Σ_n dout, float32, of dout [N, OC] and inp [N, C]."""
        dout, inp = self._matrix("dout", dout), self._matrix("inp", inp)
        dweight, r0 = self._out(None, (dout.shape[1], inp.shape[1]), dout, "float32")
        dbias, r1 = self._out(None, (dout.shape[1],), dout, "float32")
        return self._run("matmul_backward_weight", [], [dweight, dbias, dout, inp], [False], (r0, r1))

    # --- norms (kernels/norm.h)

    def layernorm_forward(self, inp, weight, bias=None, residual=None, eps=1e-5):
        """(out [N, C], mean [N], rstd [N]) of inp [N, C], weight and bias [C] float32; with residual [N, C] the norm of
        inp + residual, and that sum [N, C] as the fourth result."""
        inp, weight = self._matrix("inp", inp), self._view("weight", weight)
        bias, residual = self._optional("bias", bias), self._optional("residual", residual)
        out, r0 = self._out(None, inp.shape, inp)
        mean, r1 = self._out(None, inp.shape[:1], inp, "float32")
        rstd, r2 = self._out(None, inp.shape[:1], inp, "float32")
        total, r3 = self._out(None, inp.shape, inp) if residual else (None, None)
        return self._run("layernorm_forward", [], [out, total, mean, rstd, inp, residual, weight, bias], [eps],
                         (r0, r1, r2, r3) if residual else (r0, r1, r2))

    def layernorm_backward(self, dout, inp, weight, mean, rstd, dresidual=None):
        """(dinp [N, C], dweight [C], dbias [C]); inp: the x of the forward pass, dresidual [N, C] is added to dinp."""
        dout, inp, weight = self._matrix("dout", dout), self._matrix("inp", inp), self._view("weight", weight)
        mean, rstd = self._view("mean", mean), self._view("rstd", rstd)
        dresidual = self._optional("dresidual", dresidual)
        dinp, r0 = self._out(None, inp.shape, inp)
        dweight, r1 = self._out(None, inp.shape[1:], inp, "float32")
        dbias, r2 = self._out(None, inp.shape[1:], inp, "float32")
        return self._run("layernorm_backward", [],
                         [dinp, dweight, dbias, None, dout, dresidual, inp, weight, mean, rstd], [False], (r0, r1, r2))

    def rmsnorm_forward(self, inp, weight, residual=None, eps=1e-5):
        """(out [N, C], rstd [N]) of inp [N, C] and weight [C] float32; with residual [N, C] the norm of inp + residual,
        and that sum [N, C] as the third result."""
        inp, weight = self._matrix("inp", inp), self._view("weight", weight)
        residual = self._optional("residual", residual)
        out, r0 = self._out(None, inp.shape, inp)
        rstd, r1 = self._out(None, inp.shape[:1], inp, "float32")
        total, r2 = self._out(None, inp.shape, inp) if residual else (None, None)
        return self._run("rmsnorm_forward", [], [out, total, rstd, inp, residual, weight], [eps],
                         (r0, r1, r2) if residual else (r0, r1))

    def rmsnorm_backward(self, dout, inp, weight, rstd, dresidual=None):
        """(dinp [N, C], dweight [C]); inp: the x of the forward pass, dresidual [N, C] is added to dinp."""
        dout, inp, weight = self._matrix("dout", dout), self._matrix("inp", inp), self._view("weight", weight)
        rstd, dresidual = self._view("rstd", rstd), self._optional("dresidual", dresidual)
        dinp, r0 = self._out(None, inp.shape, inp)
        dweight, r1 = self._out(None, inp.shape[1:], inp, "float32")
        return self._run("rmsnorm_backward", [], [dinp, dweight, None, dout, dresidual, inp, weight, rstd], [False],
                         (r0, r1))

    # --- softmax (kernels/softmax.h), attention (kernels/attention/attention.h)

    def softmax_forward(self, inp, mask=None, queries=None, scale=1.0, causal=False, out=None):
        """Softmax of scale·inp along the rows of inp [R, K]. Row r is query r mod Q; causal: it sees keys up to
        r mod Q + K − Q. mask [Q, K] uint8: it sees only keys that are not 0. queries: Q, by default all R rows."""
        inp, mask = self._matrix("inp", inp), self._optional("mask", mask)
        out, result = self._out(out, inp.shape, inp)
        queries = inp.shape[0] if queries is None else queries
        return self._run("softmax_forward", [], [out, inp, mask], [queries, scale, causal], result)

    def softmax_backward(self, dout, out, scale=1.0):
        """dinp [R, K] of dout and the forward pass's out [R, K]."""
        dout, out = self._matrix("dout", dout), self._matrix("out", out)
        dinp, result = self._out(None, out.shape, out)
        return self._run("softmax_backward", [], [dinp, dout, out], [scale], result)

    def attention_forward(self, q, k, v, scale=None, cum_q=None, cum_k=None, max_q=None, max_k=None, causal=True, window=0):
        """Attention: (out [Nq, NH, HS], lse [NH, Nq]) of q [Nq, NH, HS] and k, v [Nk, NKV, HS]; NKV divides NH.
        Sequence s has the tokens cum_q[s] … cum_q[s + 1] of q, and cum_k of k (int32 [S + 1], None: one sequence); max_q
        and max_k are the longest sequences. Query i sees keys up to i + (keys − queries) if causal, and of these at most `window`
        on either side, including its own (0: all). scale: 1/√HS by default."""
        q, k, v = (self._view(n, t, rank=3) for n, t in (("q", q), ("k", k), ("v", v)))
        sequences, limits = self._sequences(q, k, cum_q, cum_k, max_q, max_k)
        out, r0 = self._out(None, q.shape, q)
        lse, r1 = self._out(None, (q.shape[1], q.shape[0]), q, "float32")
        scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
        return self._run("attention_forward", [], [out, lse, q, k, v, *sequences], [*limits, causal, window, scale], (r0, r1))

    def attention_backward(self, dout, q, k, v, out, lse, scale=None, cum_q=None, cum_k=None, max_q=None, max_k=None, causal=True,
                           window=0):
        """(dq, dk, dv), shaped as q, k and v. The other arguments are those of attention_forward and its results."""
        dout, q, k, v, out = (self._view(n, t, rank=3)
                              for n, t in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out)))
        lse = self._view("lse", lse)
        sequences, limits = self._sequences(q, k, cum_q, cum_k, max_q, max_k)
        grads, results = zip(*(self._out(None, t.shape, t) for t in (q, k, v)))
        scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
        return self._run("attention_backward", [], [*grads, dout, q, k, v, out, lse, *sequences], [*limits, causal, window, scale],
                         results)

    # --- causal linear attention (kernels/linear_attention/linear_attention.h) and its gate (kernels/linear_attention/decay_gate.h)

    def linear_attention_forward(self, q, k, v, gate=None, features="elu", normalise=True, initial=None, cum=None, max_length=None):
        """(out [N, NH, M], norm [NH, N] or None, final state) of q [N, NH, E], k [N, NKV, E] and v [N, NKV, M]; NKV
        divides NH. features: "elu" (elu + 1) or "identity". gate [N, NKV] float32: log decays ≤ 0, or None. A state is
        (s [S, NKV, E, M], z [S, NKV, E]), z None if not normalised; float32. Sequence i has the tokens cum[i] …
        cum[i + 1] (int32 [S + 1], None: one sequence), max_length: the longest one."""
        q, k, v = (self._view(n, t, rank=3) for n, t in (("q", q), ("k", k), ("v", v)))
        sequences, length = self._linear_sequences(q, cum, max_length)
        shape = (sequences.shape[0] - 1, *k.shape[1:], v.shape[2])
        out, r0 = self._out(None, (*q.shape[:2], v.shape[2]), q)
        norm, r1 = self._out(None, (q.shape[1], q.shape[0]), q, "float32") if normalise else (None, None)
        final, state = self._new_state(shape, q, normalise)
        views = [out, norm, *final, q, k, v, self._optional("gate", gate), *self._state("initial", initial), sequences]
        return self._run("linear_attention_forward", [], views, [length, *self._linear_options(features, normalise)], (r0, r1, state))

    def linear_attention_backward(self, dout, q, k, v, out, norm, gate=None, features="elu", normalise=True, initial=None, dfinal=None,
                                  cum=None, max_length=None):
        """(dq, dk, dv, dgate or None, gradient of the initial state or None). dfinal: the gradient of the final state, or
        None. The other arguments are those of linear_attention_forward and its results."""
        dout, q, k, v, out = (self._view(n, t, rank=3)
                              for n, t in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out)))
        sequences, length = self._linear_sequences(q, cum, max_length)
        grads, results = zip(*(self._out(None, t.shape, t) for t in (q, k, v)))
        gate = self._optional("gate", gate)
        dgate, r3 = (None, None) if gate is None else self._out(None, gate.shape, gate)
        shape = (sequences.shape[0] - 1, *k.shape[1:], v.shape[2])
        dinitial, r4 = ((None, None), None) if initial is None else self._new_state(shape, q, normalise)
        views = [*grads, dgate, *dinitial, dout, *self._state("dfinal", dfinal), q, k, v, gate, *self._state("initial", initial), out,
                 (self._view if normalise else self._optional)("norm", norm), sequences]
        return self._run("linear_attention_backward", [], views, [length, *self._linear_options(features, normalise)], (*results, r3, r4))

    def linear_attention_decode(self, state, q, k, v, gate=None, features="elu", normalise=True):
        """out [S, NH, M] of one token for each of S sequences; updates their state (see linear_attention_forward) IN
        PLACE. q [S, NH, E], k [S, NKV, E], v [S, NKV, M], gate [S, NKV] or None."""
        q, k, v = (self._view(n, t, rank=3) for n, t in (("q", q), ("k", k), ("v", v)))
        out, result = self._out(None, (*q.shape[:2], v.shape[2]), q)
        if state is None:
            raise TypeError("state is None, expected (s, z)")
        s, z = self._written("state[0]", state[0], rank=4), state[1]
        z = self._written("state[1]", z, rank=3) if normalise or z is not None else None
        views = [out, s, z, q, k, v, self._optional("gate", gate)]
        return self._run("linear_attention_decode", [], views, self._linear_options(features, normalise), result)

    def decay_gate_forward(self, inp, weight, bias):
        """gate [N, H] = log σ(inp·weightᵀ + bias), float32, of inp [N, C], weight [H, C] and bias [H] float32."""
        inp, weight, bias = self._view("inp", inp, rank=2), self._view("weight", weight, rank=2), self._view("bias", bias)
        gate, result = self._out(None, (inp.shape[0], weight.shape[0]), inp, "float32")
        return self._run("decay_gate_forward", [], [gate, inp, weight, bias], [], result)

    def decay_gate_backward(self, dgate, gate):
        """dx [N, H], the gradient of inp·weightᵀ + bias; float32."""
        dgate, gate = self._view("dgate", dgate, rank=2), self._view("gate", gate, rank=2)
        dx, result = self._out(None, gate.shape, gate)
        return self._run("decay_gate_backward", [], [dx, dgate, gate], [], result)

    # --- RoPE (kernels/rope.h), activations (kernels/activation.h)

    def rope_table(self, positions, rotary_size, theta=10000.0):
        """cos and sin for positions 0 … positions − 1: float32 [positions, rotary_size/2, 2], in host memory."""
        if rotary_size % 2:
            raise ValueError(f"rope_table: rotary_size is {rotary_size}, expected an even number")
        table = np.empty((positions, rotary_size // 2, 2), np.float32)
        self._check(self._library.tgk_rope_table(ctypes.byref(self._view("table", table).c), theta))
        return table

    def rope(self, x, positions, table, backward=False):
        """x [N, H, HS] rotated IN PLACE by positions [N] int32 and a table of rope_table; backward: rotated back.
        Returns x."""
        result, x = x, self._written("x", x, rank=3)
        positions, table = self._view("positions", positions), self._view("table", table)
        return self._run("rope", [], [x, positions, table], [backward], result)

    def gelu_forward(self, inp, out=None):
        """GELU (tanh form) of inp [N, C]."""
        inp = self._matrix("inp", inp)
        out, result = self._out(out, inp.shape, inp)
        return self._run("gelu_forward", [], [out, inp], [], result)

    def gelu_backward(self, dout, inp):
        """dinp [N, C] of dout and inp [N, C]."""
        dout, inp = self._matrix("dout", dout), self._matrix("inp", inp)
        dinp, result = self._out(None, inp.shape, inp)
        return self._run("gelu_backward", [], [dinp, dout, inp], [], result)

    def swiglu_forward(self, gate_up, out=None):
        """silu(gate)·up [N, I] of gate_up [N, 2·I], the gates in the first half of each row."""
        gate_up = self._matrix("gate_up", gate_up)
        out, result = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up)
        return self._run("swiglu_forward", [], [out, gate_up], [], result)

    def swiglu_backward(self, dout, gate_up):
        """dgate_up [N, 2·I] of dout [N, I] and gate_up [N, 2·I]."""
        dout, gate_up = self._matrix("dout", dout), self._matrix("gate_up", gate_up)
        dgate_up, result = self._out(None, gate_up.shape, gate_up)
        return self._run("swiglu_backward", [], [dgate_up, dout, gate_up], [], result)

    # --- AdamW (kernels/adamw.h), Muon (kernels/muon.h), top-k (kernels/generation/topk.h)

    def adamw_update(self, params, m, v, grads, t, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0,
                     grad_scale=1.0):
        """Update number t (from 1) of params, m and v [n] float32, IN PLACE, by grads [n]."""
        params, m, v = (self._written(n, a, rank=1) for n, a in (("params", params), ("m", m), ("v", v)))
        grads = self._view("grads", grads, rank=1)
        self._run("adamw_update", [], [params, m, v, grads], [lr, beta1, beta2, eps, weight_decay, grad_scale, t], None)

    def newton_schulz(self, x, coefficients="quintic", iterations=0):
        """Orthogonalises the matrices x [batch, rows, columns] float32 or bfloat16 IN PLACE. iterations: 0 for as many
        as is usual with these coefficients (NEWTON_SCHULZ)."""
        x = self._written("x", x, rank=3)
        self._run("newton_schulz", [], [x], [_newton_schulz(coefficients), iterations], None)

    def muon_update(self, params, m, grads, lr=0.02, momentum=0.95, weight_decay=0.0, shape_scale=1.0, grad_scale=1.0,
                    coefficients="quintic", iterations=0):
        """One Muon step of the matrices params and m [batch, rows, columns] float32, IN PLACE, by grads. shape_scale is
        usually max(1, rows/columns)**0.5."""
        params, m = self._written("params", params, rank=3), self._written("m", m, rank=3)
        grads = self._view("grads", grads, rank=3)
        self._run("muon_update", [], [params, m, grads],
                  [lr, momentum, weight_decay, shape_scale, grad_scale, _newton_schulz(coefficients), iterations], None)

    def top_k(self, inp, k):
        """(values [B, k], ids [B, k] int32) of the k largest of each row of inp [B, V], descending; equal ones by
        ascending id. k up to 1024."""
        inp = self._matrix("inp", inp)
        values, r0 = self._out(None, (inp.shape[0], k), inp)
        ids, r1 = self._out(None, (inp.shape[0], k), inp, "int32")
        return self._run("top_k", [], [values, ids, inp], [], (r0, r1))

    # --- from arrays to tensors

    def _optional(self, name, array, rank=None):
        """The _View of an array, or None of None."""
        return None if array is None else self._view(name, array, rank)

    def _view(self, name, array, rank=None):
        """The _View of an array."""
        if isinstance(array, _View):
            view = array
        elif isinstance(array, DeviceArray):
            view = _View(name, array.pointer, array.shape, _strides(array.shape), array.dtype.name,
                         CUDA if self.backend == "cuda" else CPU, array)
        elif isinstance(array, (np.ndarray, np.generic)):
            writable = isinstance(array, np.ndarray) and array.flags.writeable
            array = np.asarray(array)
            if any(stride % array.itemsize for stride in array.strides):
                raise ValueError(f"{name} has strides of {array.strides} bytes, which are not multiples of the element size "
                                 f"{array.itemsize}")
            if not array.dtype.isnative:
                raise TypeError(f"{name} is {array.dtype}, which does not have this machine's byte order")
            view = _View(name, array.ctypes.data, array.shape, [s // array.itemsize for s in array.strides],
                         array.dtype.name, CPU, array, writable)
        elif hasattr(array, "__dlpack__"):
            view = _view_of_dlpack(name, array)
        elif hasattr(array, "__cuda_array_interface__"):
            view = self._view_of_cuda(name, array)
        else:
            kind = "None" if array is None else f"a {type(array).__name__}"
            raise TypeError(f"{name} is {kind}, expected an array: NumPy's, or one with __dlpack__ or "
                            "__cuda_array_interface__")
        if view.device == CUDA and self.backend == "cpu":
            raise ValueError(f"{name} is on a GPU, and {self.path} was built for the CPU")
        if rank is not None and len(view.shape) != rank:
            raise ValueError(f"{name} has shape {view.shape}, expected {rank} dimensions")
        return view

    def _matrix(self, name, array):
        view = self._view(name, array, rank=2)
        if view.shape[1] > 1 and view.strides[1] != 1:
            raise ValueError(f"{name} {view.shape} has strides of {view.strides} elements; its rows must be contiguous")
        return view

    def _view_of_cuda(self, name, array):
        interface = array.__cuda_array_interface__
        dtype = np.dtype(interface["typestr"])
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        stream = interface.get("stream")
        if stream not in (None, 1):  # 1: the default stream, which the library's stream is ordered with
            self._call("wait_for_stream", stream)
        strides = _strides(shape) if strides is None else [s // dtype.itemsize for s in strides]
        pointer, read_only = interface["data"]
        return _View(name, pointer, shape, strides, dtype.name, CUDA, array, not read_only)

    def _written(self, name, array, rank=None):
        view = self._view(name, array, rank)
        if not view.writable:
            raise ValueError(f"{name} is read-only")
        return view

    def _out(self, out, shape, like, dtype=None):
        """The _View of a result and the array to return: `out`, or a new one on the device of `like`."""
        if out is not None:
            return self._written("out", out), out
        dtype = dtype or like.dtype
        array = DeviceArray(self, shape, _dtype(dtype)) if like.device == CUDA else np.empty(shape, _dtype(dtype))
        return self._view("out", array), array

    @staticmethod
    def _broadcast(x, y):
        try:
            return np.broadcast_shapes(x.shape, y.shape)
        except ValueError:
            raise ValueError(f"{x.name} {x.shape} and {y.name} {y.shape} do not broadcast to one shape") from None

    def _sequences(self, q, k, cum_q, cum_k, max_q, max_k):
        """cum_q and cum_k as views, and the lengths of the longest sequences."""
        views, limits = [], []
        for name, tokens, cum, most in (("cum_q", q, cum_q, max_q), ("cum_k", k, cum_k, max_k)):
            cum = np.array([0, tokens.shape[0]], np.int32) if cum is None else cum
            views.append(self._view(name, cum, rank=1))
            limits.append(tokens.shape[0] if most is None else most)
        return views, limits

    def _linear_sequences(self, q, cum, max_length):
        cum = np.array([0, q.shape[0]], np.int32) if cum is None else cum
        return self._view("cum", cum, rank=1), q.shape[0] if max_length is None else max_length

    @staticmethod
    def _linear_options(features, normalise):
        if features not in ("identity", "elu"):
            raise ValueError(f'features is {features!r}, expected "identity" or "elu"')
        return [int(features == "elu"), int(normalise)]

    def _state(self, name, state):
        """The views of a state (s, z), or None twice of None."""
        s, z = (None, None) if state is None else state
        return self._optional(name + "[0]", s, 4), self._optional(name + "[1]", z, 3)

    def _new_state(self, shape, like, normalise):
        """Views and arrays of a new state (s, z)."""
        s, r0 = self._out(None, shape, like, "float32")
        z, r1 = self._out(None, shape[:3], like, "float32") if normalise else (None, None)
        return (s, z), (r0, r1)

    # --- calls

    def _number(self, function, arguments):
        if self.functions.get(function) != arguments:
            names = [name for name, count in self.functions.items() if count == arguments]
            raise ValueError(f"function is {function!r}, expected one of {', '.join(names)}")
        return self._numbers[function]

    def _check(self, status):
        if status == OK:
            return
        message = self._library.tgk_last_error().decode(errors="replace")
        raise ValueError(message) if status == INVALID_ARGUMENT else KernelError(message)

    def _call(self, name, *arguments):
        self._check(getattr(self._library, "tgk_" + name)(self._context, *arguments))

    def _free(self, pointer):
        self._library.tgk_free(self._context, pointer)

    def _check_dtypes(self, name, views):
        outputs, inputs = OPERATIONS[name][1].split("|")
        # Inputs first: results take their dtype from them.
        pairs = [*zip(inputs, views[len(outputs):]), *zip(outputs, views)]
        # On the CPU only the operations over tensors of any strides support 16-bit dtypes.
        floats, bf16 = (_FLOATS, _BF16) if self.backend == "cuda" else (_FLOATS[:1], _BF16[:1])
        common = None  # T
        for rule, view in pairs:
            if view is None:
                continue
            if rule == "T":
                allowed = (common,) if common else floats
            elif rule == "r":
                allowed = (common, "float32")
            elif rule == "b":
                allowed = bf16
            else:
                allowed = _ALLOWED.get(rule, _FLOATS)
            if view.dtype not in allowed:
                raise TypeError(f"{name}: {view.name} is {view.dtype}, expected {' or '.join(dict.fromkeys(allowed))}")
            common = view.dtype if rule == "T" else common

    def _run(self, name, before, views, after, result):
        """Calls tgk_<name>(context, before…, tensors…, after…)."""
        self._check_dtypes(name, views)
        self._call(name, *before, *(None if v is None else ctypes.byref(v.c) for v in views), *after)
        if not self.asynchronous and any(v is not None and v.device == CUDA for v in views):
            self.synchronize()
        return result
