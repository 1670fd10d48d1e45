"""Operators on constants, computed once with NumPy. TVM's FoldConstant compiles a function for each of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from scipy.special import erf, expit
from tvm import relax

from lib.graph.rewrite import Rewriter, Rule, constant, dtype, rule

_GROWTH = 1 << 20  # elements; a larger result than this and than its arguments is cheaper to make than to read


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers towards zero, as TVM and ONNX do it, and not through a float, which has fewer digits."""
    if np.asarray(a).dtype.kind not in "iu":
        return np.divide(a, b)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), dtype=a.dtype)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "divide": _divide, "equal": np.equal, "erf": erf, "exp": np.exp,
    "floor": np.floor, "floor_divide": np.floor_divide, "greater": np.greater, "greater_equal": np.greater_equal,
    "isnan": np.isnan, "less": np.less, "less_equal": np.less_equal, "log": np.log, "logical_and": np.logical_and,
    "logical_not": np.logical_not, "logical_or": np.logical_or, "maximum": np.maximum, "minimum": np.minimum,
    "multiply": np.multiply, "negative": np.negative, "not_equal": np.not_equal, "power": np.power,
    "round": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": expit, "sqrt": np.sqrt, "square": np.square,
    "subtract": np.subtract, "tanh": np.tanh, "where": np.where,
    "nn.gelu": lambda x: x * (erf(x * np.float32(np.sqrt(0.5))) + 1) / 2,
    "nn.relu": lambda x: np.maximum(x, 0), "nn.silu": lambda x: x * expit(x),
}  # fmt: skip
FUNCTIONS = {f"relax.{name}": function for name, function in _ELEMENTWISE.items()}  # by operator
ELEMENTWISE = tuple(FUNCTIONS)


def elementwise(call: relax.Call, values: list[np.ndarray]) -> np.ndarray:
    """What one of `ELEMENTWISE` makes of values, in the type of its result.

    Raises:
        TypeError, ValueError: NumPy's function does not take them, as negative powers of integers.
    """
    with np.errstate(all="ignore"):  # what is not finite here would not be finite at run time
        return np.asarray(FUNCTIONS[call.op.name](*values)).astype(dtype(call))


def _axes(axes: Any) -> list[int] | None:
    return None if axes is None else [int(axis) for axis in axes]


def _take(call: relax.Call, values: list[np.ndarray]) -> np.ndarray:
    mode = str(call.attrs.mode)
    return np.take(values[0], values[1], call.attrs.axis, mode="raise" if mode == "fast" else mode)  # type: ignore


def _cumsum(call: relax.Call, value: np.ndarray) -> np.ndarray:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    total = np.cumsum(value, axis, dtype=str(call.attrs.dtype or value.dtype))
    return total - value.reshape(total.shape) if call.attrs.exclusive else total


# Of a call, the values of its arguments and the shape of its result.
_MOVEMENT: dict[str, Callable[[relax.Call, list[np.ndarray], tuple[int, ...]], np.ndarray]] = {
    "reshape": lambda call, values, shape: values[0].reshape(shape),
    "flatten": lambda call, values, shape: values[0].reshape(shape),
    "expand_dims": lambda call, values, shape: values[0].reshape(shape),
    "squeeze": lambda call, values, shape: values[0].reshape(shape),
    "broadcast_to": lambda call, values, shape: np.broadcast_to(values[0], shape),
    "permute_dims": lambda call, values, shape: np.transpose(values[0], _axes(call.attrs.axes)),
    "astype": lambda call, values, shape: values[0].astype(str(call.attrs.dtype)),
    "take": lambda call, values, shape: _take(call, values).reshape(shape),
    "cumsum": lambda call, values, shape: _cumsum(call, values[0]),
}


@rule(*ELEMENTWISE)
def fold_elementwise(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Arithmetic on constants; broadcasting as in NumPy."""
    values = rewriter.values(call.args)
    shape = rewriter.shape(call)
    if values is None or shape is None or not _worth_it(shape, values):
        return None
    try:
        return constant(elementwise(rewriter.builder_.normalize(call), values))
    except (TypeError, ValueError):  # negative powers of integers; types that NumPy's function does not take
        return None


@rule(*(f"relax.{name}" for name in _MOVEMENT))
def fold_movement(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Constants in another shape, order or type."""
    tensors = [argument for argument in call.args if not isinstance(argument, relax.ShapeExpr)]
    values = rewriter.values(tensors)
    shape = rewriter.shape(call)
    if values is None or shape is None or not _worth_it(shape, values):
        return None
    try:
        with np.errstate(all="ignore"):
            return constant(_MOVEMENT[call.op.name.removeprefix("relax.")](call, values, shape))
    except (IndexError, ValueError):  # rows that a table does not have; a mode that NumPy does not know
        return None


@rule("relax.concat")
def fold_concat(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Constants side by side."""
    fields = rewriter.fields(call.args[0])
    values = None if fields is None else rewriter.values(fields)
    return None if values is None else constant(np.concatenate(values, int(call.attrs.axis or 0)))


@rule("relax.full", "relax.zeros", "relax.ones")
def fold_filled(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A tensor of one value."""
    shape = rewriter.shape(call)
    if shape is None or np.prod(shape) > _GROWTH:
        return None
    kind = str(rewriter.builder_.normalize(call).ty.dtype)
    if call.op.name != "relax.full":
        return constant(np.full(shape, call.op.name == "relax.ones", kind))
    value = rewriter.value(call.args[1])
    return None if value is None else constant(np.full(shape, value, kind))


@rule("relax.shape_to_tensor")
def fold_shape(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The extents of a tensor of static shape."""
    extents = getattr(call.args[0].ty, "values", None)
    if extents is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in extents):
        return None
    return constant(np.array([int(extent) for extent in extents], np.int64))


def _worth_it(shape: tuple[int, ...], values: list[np.ndarray]) -> bool:
    return int(np.prod(shape)) <= max(_GROWTH, 2 * sum(value.size for value in values))


RULES: list[Rule] = [fold_elementwise, fold_movement, fold_concat, fold_filled, fold_shape]
