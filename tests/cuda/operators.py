"""Small workloads of each kind of operator that the zoo's models have, with extents that divide well and badly."""

from collections.abc import Callable

import tvm
from tvm import te, topi

from lib.tir.workload import as_workload
from tests.helpers import gather, matmul
from tests.lib.search.spaces.test_contraction import attention, convolution, grouped


def _of(*tensors: te.Tensor) -> tvm.IRModule:
    return as_workload(te.create_prim_func(list(tensors)))


def _image(channels: int = 8, size: int = 14) -> te.Tensor:
    return te.placeholder((1, size, size, channels), name="image")


def depthwise(stride: int = 1) -> tvm.IRModule:
    image, weight = _image(16), te.placeholder((3, 3, 16, 1), name="weight")
    out = topi.nn.depthwise_conv2d_nhwc(image, weight, stride, 1, 1)
    return _of(image, weight, topi.nn.relu(out))


def product_of_halves(sums: str = "float16", n: int = 64, m: int = 64, k: int = 64) -> tvm.IRModule:
    """What tensor cores are for."""
    x, w = te.placeholder((n, k), "float16", name="x"), te.placeholder((k, m), "float16", name="w")
    axis = te.reduce_axis((0, k), "axis")
    terms = lambda i, j: te.sum(x[i, axis].astype(sums) * w[axis, j].astype(sums), axis=axis)  # noqa: E731
    return _of(x, w, te.compute((n, m), terms, name="product"))


def batched() -> tvm.IRModule:
    x, y = te.placeholder((4, 24, 32), name="x"), te.placeholder((4, 32, 20), name="y")
    return _of(x, y, topi.nn.batch_matmul(x, y, transpose_b=False))


def dense() -> tvm.IRModule:
    x, w, b = (te.placeholder(shape, name=name) for shape, name in (((5, 48), "x"), ((30, 48), "w"), ((30,), "b")))
    return _of(x, w, b, topi.nn.relu(topi.add(topi.nn.matmul(x, w, transpose_b=True), b)))


def softmax(n: int = 100) -> tvm.IRModule:
    x = te.placeholder((16, n), name="x")
    return _of(x, topi.nn.softmax(x, 1))


def layer_norm() -> tvm.IRModule:
    x, gain, shift = te.placeholder((12, 96), name="x"), *(te.placeholder((96,), name=name) for name in ("g", "s"))
    return _of(x, gain, shift, topi.nn.layer_norm(x, gain, shift, [1], 1e-5))


def rms_norm() -> tvm.IRModule:
    x, gain = te.placeholder((12, 96), name="x"), te.placeholder((96,), name="g")
    return _of(x, gain, topi.nn.rms_norm(x, gain, [1], 1e-5))


def pool(kind: str) -> tvm.IRModule:
    image = _image(16)
    return _of(image, topi.nn.pool2d(image, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], kind, layout="NHWC"))


def mean() -> tvm.IRModule:
    image = _image(16, 7)
    return _of(image, topi.divide(topi.sum(image, [1, 2]), 49.0))


def gelu() -> tvm.IRModule:
    x, b = te.placeholder((12, 96), name="x"), te.placeholder((96,), name="b")
    y = topi.add(x, b)
    return _of(x, b, topi.multiply(topi.multiply(y, 0.5), topi.add(topi.erf(topi.multiply(y, 0.70710678)), 1.0)))


def added() -> tvm.IRModule:
    x, y = te.placeholder((7, 13, 5), name="x"), te.placeholder((7, 13, 5), name="y")
    return _of(x, y, topi.nn.relu(topi.add(x, y)))


def transposed() -> tvm.IRModule:
    x = te.placeholder((12, 8, 20), name="x")
    return _of(x, topi.transpose(x, [1, 0, 2]))


OPERATORS: dict[str, Callable[[], tvm.IRModule]] = {
    "conv2d 3x3": convolution,
    "conv2d 3x3 stride 2": lambda: convolution(stride=2),
    "conv2d 7x7 of 3 channels": lambda: convolution(kernel=7, channels=(3, 16), stride=2),
    "conv2d 1x1": lambda: convolution(kernel=1),
    "conv2d in groups": grouped,
    "depthwise": depthwise,
    "depthwise stride 2": lambda: depthwise(2),
    "matmul": lambda: matmul(32, 48, 64),
    "matmul of odd extents": lambda: matmul(15, 33, 21),
    "matmul of a vector": lambda: matmul(1, 100, 64),
    "dense with bias": dense,
    "batched matmul": batched,
    "attention scores": attention,
    "softmax": softmax,
    "softmax of few": lambda: softmax(10),
    "layer norm": layer_norm,
    "rms norm": rms_norm,
    "max pool": lambda: pool("max"),
    "average pool": lambda: pool("avg"),
    "mean": mean,
    "gelu": gelu,
    "add and relu": added,
    "transpose": transposed,
    "gather": gather,
}
HALVES: dict[str, Callable[[], tvm.IRModule]] = {
    "f16 matmul, f16 sums": product_of_halves,
    "f16 matmul, f32 sums": lambda: product_of_halves("float32"),
    "f16 matmul of odd extents": lambda: product_of_halves("float16", 60, 40, 72),
}
