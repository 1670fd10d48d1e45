"""Transposed convolutions, in one to three dimensions, as products or convolutions, for which there are spaces."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    Rewriter,
    Rule,
    constant,
    dtype,
    is_channels_last,
    rule,
    to_channels_first,
)

_VECTOR = 8  # channels that fill vectors on all CPUs that have been tuned for
_WORTH_PHASES = 1.2  # times fewer products


@rule(*(f"{name}_transpose" for name in CONVOLUTIONS))
def transposed_convolution(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """With channels last, as ConvertLayout leaves it and TVM 0.27 cannot lower it: as a product where windows lie side
    by side, else as a convolution that computes all results of a step of the stride, else with channels first between
    two transpositions."""
    attrs, (data, weight) = call.attrs, call.args
    shape, kernel = rewriter.shape(data), rewriter.shape(weight)
    if not is_channels_last(call) or shape is None or kernel is None:
        return None
    others = [*attrs.padding, *attrs.output_padding, *(int(d) - 1 for d in attrs.dilation)]
    if [int(s) for s in attrs.strides] == list(kernel[2:]) and int(attrs.groups) == 1 and not any(map(int, others)):
        return _side_by_side(rewriter, data, shape, weight, kernel)
    if (steps := _by_steps(rewriter, call)) is not None:
        return steps
    return _channels_first(rewriter, call)


def _name(call: relax.Call) -> str:
    """Of the convolution that is transposed."""
    return str(call.op.name).rpartition(".")[2].removesuffix("_transpose")


def _side_by_side(
    rewriter: Rewriter, data: relax.Expr, shape: Sequence[int], weight: relax.Expr, kernel: Sequence[int]
) -> relax.Expr:
    """Each element becomes a window of its own."""
    (n, *extents, _), (into, out, *window) = shape, kernel
    order = [0, *range(2, 2 + len(window)), 1]
    columns = op.reshape(rewriter.emit(op.permute_dims(weight, order)), [into, int(np.prod(window)) * out])
    product = op.matmul(data, rewriter.emit(columns))
    return _interleaved(rewriter, product, n, extents, window, [out])


def _interleaved(
    rewriter: Rewriter, made: relax.Expr, n: int, extents: Sequence[int], window: Sequence[int], channels: Sequence[int]
) -> relax.Expr:
    """What was computed of each element as channels, (n, *extents, [groups,] *window, channels), at its places: (n,
    extents * window, channels)."""
    dims, of = len(extents), len(channels) - 1
    apart = op.reshape(rewriter.emit(made), [n, *extents, *channels[:-1], *window, channels[-1]])
    pairs = [axis for dim in range(dims) for axis in (1 + dim, 1 + dims + of + dim)]
    order = [0, *pairs, *range(1 + dims, 1 + dims + of), 1 + 2 * dims + of]
    whole = [extent * size for extent, size in zip(extents, window, strict=True)]
    joined = rewriter.emit(op.permute_dims(rewriter.emit(apart), order))
    return op.reshape(joined, [n, *whole, int(np.prod(channels))])


def _by_steps(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A transposed convolution without the zeros between its elements.

    y[q * s + r] is the sum of x[q - j] * w[j * s + r] over j, so that the s results of a step q are channels of one
    convolution. (Sub-pixel convolutions: Shi et al., "Is the deconvolution layer the same as a convolutional layer?",
    arXiv 1609.07009.)
    """
    attrs, weight, groups = call.attrs, rewriter.value(call.args[1]), int(call.attrs.groups)
    shape, results = rewriter.shape(call.args[0]), rewriter.shape(call)
    if weight is None or shape is None or results is None or any(int(d) != 1 for d in attrs.dilation):
        return None
    _, out, *window = weight.shape
    strides = [int(s) for s in attrs.strides]
    before = [int(p) for p in attrs.padding][: len(strides)]
    axes = [_Steps(*each) for each in zip(shape[1:-1], results[1:-1], window, strides, before, strict=True)]
    if any(min(axis.padding) < 0 for axis in axes):
        return None
    if (phases := _by_phases(rewriter, call, weight, axes, shape[0])) is not None:
        return phases
    layout, kernel_layout = CHANNELS_LAST[f"relax.nn.{_name(call)}"]
    made = getattr(op.nn, _name(call))(
        call.args[0], constant(_weights_by_steps(weight, axes, groups)), out_dtype=dtype(call), groups=groups,
        padding=[*(axis.padding[0] for axis in axes), *(axis.padding[1] for axis in axes)],
        data_layout=layout, kernel_layout=kernel_layout,
    )  # fmt: skip
    extents = [axis.last - axis.first + 1 for axis in axes]
    elements = _interleaved(rewriter, made, shape[0], extents, strides, [groups, out] if groups > 1 else [out])
    begins = [axis.before - axis.first * axis.stride for axis in axes]
    ends = [begin + extent for begin, extent in zip(begins, results[1:-1], strict=True)]
    return op.strided_slice(rewriter.emit(elements), [*range(1, 1 + len(axes))], begins, ends, [1] * len(axes))


def _by_phases(
    rewriter: Rewriter, call: relax.Call, weight: np.ndarray, axes: Sequence["_Steps"], batch: int
) -> relax.Expr | None:
    """Of images and volumes, a convolution for each of the results of a step, s * s of images, where all steps together
    multiply many zeros: those in a window that is no multiple of the stride, and those beyond the first and the last
    result."""
    groups, columns = int(call.attrs.groups), weight.shape[1]
    if len(axes) < 2 or groups > 1 or columns % _VECTOR or any(a.result % a.stride for a in axes):
        return None
    by_steps = np.prod([(a.last - a.first + 1) * a.taps * a.stride for a in axes])
    if by_steps < _WORTH_PHASES * np.prod([a.result // a.stride * a.window for a in axes]):
        return None
    phases = [axis.phases for axis in axes]
    if any(not phase.taps or min(phase.padding) < 0 for of_axis in phases for phase in of_axis):
        return None
    layout, kernel_layout = CHANNELS_LAST[f"relax.nn.{_name(call)}"]
    order = [*range(2, 2 + len(axes)), 0, 1]
    made = []
    for phase in itertools.product(*phases):
        apart = [slice(each.first, None, axis.stride) for each, axis in zip(phase, axes, strict=True)]
        chosen = (slice(None), slice(None), *apart)
        taps = np.flip(weight[chosen], tuple(range(2, weight.ndim)))
        convolution = getattr(op.nn, _name(call))(
            call.args[0], constant(np.ascontiguousarray(taps.transpose(order))), out_dtype=dtype(call),
            padding=[each.padding[end] for end in (0, 1) for each in phase],
            data_layout=layout, kernel_layout=kernel_layout,
        )  # fmt: skip
        made.append(rewriter.emit(convolution))
    strides, extents = [a.stride for a in axes], [a.result // a.stride for a in axes]
    return _interleaved(rewriter, op.concat(made, len(axes) + 1), batch, extents, strides, [columns])


def _weights_by_steps(weight: np.ndarray, axes: Sequence["_Steps"], groups: int) -> np.ndarray:
    """(inputs, outputs of a group, *window) to (*taps, inputs of a group, groups * strides * outputs of a group)."""
    into, out, *window = weight.shape
    dims = len(axes)
    around = [(0, axis.taps * axis.stride - extent) for axis, extent in zip(axes, window, strict=True)]
    whole = np.pad(weight, [(0, 0), (0, 0), *around])
    apart = whole.reshape(groups, into // groups, out, *(part for axis in axes for part in (axis.taps, axis.stride)))
    taps, steps = range(3, 3 + 2 * dims, 2), range(4, 4 + 2 * dims, 2)
    kernel = np.flip(apart, tuple(taps)).transpose(*taps, 1, 0, *steps, 2)
    return kernel.reshape(*kernel.shape[: dims + 1], -1)


def _channels_first(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
    """As TVM can lower it."""
    attrs, dims = call.attrs, len(call.attrs.strides)
    last, transposed = CHANNELS_LAST[call.op.name]
    given = rewriter.emit(op.permute_dims(call.args[0], to_channels_first(dims + 2)))
    made = getattr(op.nn, f"{_name(call)}_transpose")(
        given, call.args[1], strides=[int(s) for s in attrs.strides], padding=[int(p) for p in attrs.padding],
        output_padding=[int(p) for p in attrs.output_padding], dilation=[int(d) for d in attrs.dilation],
        groups=int(attrs.groups), data_layout=f"NC{last[1:-1]}", kernel_layout=transposed, out_dtype=dtype(call),
    )  # fmt: skip
    return op.permute_dims(rewriter.emit(made), [0, *range(2, dims + 2), 1])


@dataclass(frozen=True, slots=True)
class _Steps:
    """Along one axis of a transposed convolution; elements of the result are counted with those that padding drops."""

    extent: int
    result: int
    window: int
    stride: int
    before: int  # elements that are dropped

    @property
    def taps(self) -> int:
        """Elements that a step reads."""
        return -(-self.window // self.stride)

    @property
    def first(self) -> int:
        """Step of the first element that is kept."""
        return self.before // self.stride

    @property
    def last(self) -> int:
        """Step of the last one."""
        return (self.before + self.result - 1) // self.stride

    @property
    def phases(self) -> list["_Phase"]:
        """Of results that are a stride apart, those that begin with the first, the second and so on."""
        found = []
        for n in range(self.stride):
            later, first = divmod(n + self.before, self.stride)
            taps, results = len(range(first, self.window, self.stride)), len(range(n, self.result, self.stride))
            found.append(_Phase(first, taps, (taps - 1 - later, results - 1 + later - (self.extent - 1))))
        return found

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros that the convolution reads before and after the image; negative: it does not read all of that."""
        return self.taps - 1 - self.first, self.last - (self.extent - 1)


@dataclass(frozen=True, slots=True)
class _Phase:
    """Results that are a stride apart are those of a convolution with each stride-th tap of the window."""

    first: int  # tap
    taps: int
    padding: tuple[int, int]  # as of `_Steps`


RULES: list[Rule] = [transposed_convolution]
