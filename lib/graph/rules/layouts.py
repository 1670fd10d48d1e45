"""What ConvertLayout does not know, in NHWC all the same.

It goes back to NCHW at an operator without a rule of its own, and joins, slices and sums of what comes after stay in
NCHW, too, up to the next convolution. The transposes that it leaves are moved behind such operators here.

A depthwise convolution that makes several channels of each (FastViT's, a multiplier) reads no whole vectors of channels
in NHWC; one for each of these several does, and a shuffle brings their channels into order.

A shuffle of channels (ShuffleNet's groups) is a reshape, a transpose and a reshape in exporters' files, which do not
show that they leave an image an image. As a lookup of channels by known numbers it keeps its meaning until the layouts
are chosen.
"""

from functools import partial

import numpy as np
from tvm import relax, te, topi
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, rule, to_channels_first, undoing
from lib.graph.rules import movement

_MANY = 3  # parts of a concatenation: fewer may be a mask, or a step of an attention's rotation
_LARGE = 1 << 14  # elements

_COMPARISONS = ("relax.greater", "relax.greater_equal", "relax.less", "relax.less_equal", "relax.equal",
                "relax.not_equal", "relax.logical_and", "relax.logical_or")  # fmt: skip
_WHOLE = 4  # channels in the narrowest vectors
_SEVERAL = range(2, 5)  # channels made of one: of more, the image would be read too often
_RANKS = (4, 5)  # of images and volumes; (0, 2, 1) of a signal may be a matrix that attention transposes


@rule("relax.reshape")
def shuffle_as_lookup(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A chain that leaves each channel as it is, and moves it elsewhere."""
    source, steps = movement.chain(rewriter, call)
    shape = rewriter.shape(call)
    if shape is None or len(shape) not in _RANKS or rewriter.shape(source) != shape or not all(shape):
        return None
    if all(kind == "reshape" for kind, _ in steps):
        return None
    order = movement.order_after(shape, steps).reshape(shape[0], shape[1], -1)
    channels, pixels = order[0, :, 0] // order.shape[2], np.arange(order.shape[2])
    images = np.arange(shape[0])[:, None, None] * (shape[1] * len(pixels))
    if not np.array_equal(order, images + (channels * len(pixels))[:, None] + pixels):
        return None
    return _lookup(source, channels)


def _lookup(image: relax.Expr, channels: np.ndarray, axis: int = 1) -> relax.Expr:
    return op.take(image, constant(channels.astype(np.int64)), axis, "clip")


def _looked_up(rewriter: Rewriter, expr: relax.Expr, axis: int = 1) -> tuple[relax.Expr, np.ndarray] | None:
    """An image, and the numbers of its channels that are looked up, each of them once; None if this is something
    else."""
    call = rewriter.calls(expr, "relax.take")
    if call is None or call.attrs.axis is None or int(call.attrs.axis) != axis:
        return None
    channels = rewriter.value(call.args[1])
    if channels is None or channels.ndim != 1 or len(rewriter.shape(call) or ()) not in _RANKS:
        return None
    is_once = len(np.unique(channels)) == len(channels) and channels.min() >= 0
    return (call.args[0], channels) if is_once else None


@rule("relax.take")
def lookup_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A lookup of channels of what was NHWC before, in NHWC."""
    found, rank = _looked_up(rewriter, call), len(rewriter.shape(call) or ())
    image = movement.channels_last(rewriter, call.args[0], rank)
    if found is None or image is None:
        return None
    return op.permute_dims(rewriter.emit(_lookup(image, found[1], rank - 1)), to_channels_first(rank))


@rule("relax.strided_slice")
def slice_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A slice of what was NHWC before, in NHWC."""
    rank, bounds = len(rewriter.shape(call) or ()), movement.bounds(rewriter, call)
    image = movement.channels_last(rewriter, call.args[0], rank)
    if image is None or not bounds or rank not in _RANKS:
        return None
    order = to_channels_first(rank)
    begins, ends = zip(*bounds.values(), strict=True)
    part = op.strided_slice(image, [order[axis] for axis in bounds], begins, ends, [1] * len(bounds))
    return op.permute_dims(rewriter.emit(part), order)


@rule("relax.nn.pad")
def padding_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Padding of what was NHWC before, in NHWC."""
    rank = len(rewriter.shape(call) or ())
    image = movement.channels_last(rewriter, call.args[0], rank)
    if image is None or rank not in _RANKS:
        return None
    ends, order = [int(width) for width in call.attrs.pad_width], to_channels_first(rank)
    widths = [width for axis in undoing(order) for width in ends[2 * axis :][:2]]
    padded = op.nn.pad(image, widths, str(call.attrs.pad_mode), float(call.attrs.pad_value))
    return op.permute_dims(rewriter.emit(padded), order)


@rule("relax.where", *_COMPARISONS)
def choice_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """An element-wise choice between images that were NHWC before, in NHWC."""
    rank = len(rewriter.shape(call) or ())
    images = [movement.channels_last(rewriter, argument, rank) for argument in call.args]
    if rank not in _RANKS or all(image is None for image in images):
        return None
    args = []
    for argument, image in zip(call.args, images, strict=True):
        shape, value = rewriter.shape(argument), rewriter.value(argument)
        if image is not None:
            args.append(image)
        elif shape is not None and np.prod(shape) == 1:
            args.append(argument)
        elif value is not None and value.ndim == rank:
            args.append(constant(value.transpose(0, *range(2, rank), 1)))
        else:
            return None
    chosen = relax.Call(call.op, args, call.attrs, call.ty_args)
    return op.permute_dims(rewriter.emit(chosen), to_channels_first(rank))


@rule("relax.nn.max_pool2d", "relax.nn.avg_pool2d")
def pooling_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Windows of what was NHWC before, in NHWC: where tokens are pooled as an image (MViT), no convolution is near."""
    attrs = call.attrs
    image = movement.channels_last(rewriter, call.args[0], 4)
    if image is None or str(attrs.layout) != "NCHW":
        return None
    sizes = {key: [int(n) for n in getattr(attrs, key)] for key in ("pool_size", "strides", "padding", "dilation")}
    pooled = getattr(op.nn, call.op.name.rpartition(".")[2])(
        image, **sizes, ceil_mode=bool(attrs.ceil_mode), count_include_pad=bool(attrs.count_include_pad), layout="NHWC"
    )
    return op.permute_dims(rewriter.emit(pooled), to_channels_first(4))


@rule("relax.image.grid_sample")
def sample_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Pixels between those of what was NHWC before, in NHWC: all channels of four neighbours, in vectors."""
    attrs = call.attrs
    image = movement.channels_last(rewriter, call.args[0], 4)
    image = _heads_of_tokens(rewriter, call.args[0]) if image is None else image
    if image is None or str(attrs.layout) != "NCHW":
        return None
    how = str(attrs.method), str(attrs.padding_mode), bool(attrs.align_corners)
    found = rewriter.builder_.call_te(partial(_sampled, how), image, call.args[1], primfunc_name_hint="grid_sample")
    return op.permute_dims(rewriter.emit(found), to_channels_first(4))


def _heads_of_tokens(rewriter: Rewriter, images: relax.Expr) -> relax.Expr | None:
    """Images in NHWC, one of each head, of what were tokens with the channels of all heads, as deformable attention
    has them (Zhu et al. 2021); None of others."""
    joined = rewriter.calls(images, "relax.reshape")
    moved = rewriter.calls(joined.args[0], "relax.permute_dims") if joined is not None else None
    if moved is None or not movement.swaps_matrices(moved):
        return None
    tokens, shape = rewriter.shape(moved.args[0]), rewriter.shape(images)
    if tokens is None or shape is None or len(tokens) != 3 or len(shape) != 4:
        return None
    (batch, places, channels), (n, each, height, width) = tokens, shape
    if places != height * width or channels % each or n * each != batch * channels:
        return None
    heads = rewriter.emit(op.reshape(moved.args[0], (batch, places, channels // each, each)))
    apart = rewriter.emit(op.permute_dims(heads, [0, 2, 1, 3]))
    return rewriter.emit(op.reshape(apart, (n, height, width, each)))


def _sampled(how: tuple[str, str, bool], image: te.Tensor, grid: te.Tensor) -> te.Tensor:
    method, padding, align_corners = how
    n, height, width, channels = image.shape
    first = te.compute((n, channels, height, width), lambda n, c, y, x: image[n, y, x, c], name="channels_first")
    found = topi.image.grid_sample(first, grid, method, "NCHW", padding, align_corners)
    shape = (n, *found.shape[2:], channels)
    return te.compute(shape, lambda n, y, x, c: found[n, c, y, x], name="channels_last")


@rule("relax.take")
def lookup_as_shuffle(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A lookup that takes from each group of channels in turn as what it came from, in NHWC: it has no indices to
    read."""
    shape = rewriter.shape(call)
    found = _looked_up(rewriter, call, len(shape or ()) - 1)
    if found is None or shape is None or rewriter.shape(call.args[0]) != shape or shape[-1] < 2:
        return None
    channels, width = found[1], int(found[1][1])
    if width < 1 or len(channels) % width:
        return None
    groups = len(channels) // width
    if not np.array_equal(channels, np.arange(len(channels)).reshape(groups, width).T.reshape(-1)):
        return None
    rank = len(shape)
    apart = rewriter.emit(op.reshape(call.args[0], (*shape[:-1], groups, width)))
    turned = rewriter.emit(op.permute_dims(apart, [*range(rank - 1), rank, rank - 1]))
    return op.reshape(turned, shape)


@rule(*CONVOLUTIONS)
def multiplier_apart(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A depthwise convolution with a few times as many results as channels, as that many, channel by channel."""
    image, weight = rewriter.shape(call.args[0]), rewriter.value(call.args[1])
    groups = int(call.attrs.groups)
    if image is None or weight is None or groups == 1 or groups % _WHOLE or weight.shape[1] != 1:
        return None
    if not str(call.attrs.data_layout).startswith("NC") or image[1] != groups:
        return None
    several = weight.shape[0] // groups
    if several not in _SEVERAL or len(image) not in _RANKS:
        return None
    parts = [
        rewriter.emit(alike(call, call.args[0], constant(weight[n::several]), dtype(call))) for n in range(several)
    ]
    joined = rewriter.emit(op.concat(parts, axis=1))
    return _lookup(joined, np.arange(several * groups).reshape(several, groups).T.reshape(-1))


@rule("relax.concat")
def parts_as_channels(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """What is joined of several parts along another axis, as detectors join what they find in each of their images, as
    channels of images: these are written where they belong (`lib.graph.concatenation`). In one kernel with what
    computes them, each element would have to find out of which part it is."""
    parts, shape = rewriter.fields(call.args[0]), rewriter.shape(call)
    if parts is None or shape is None or len(parts) < _MANY or np.prod(shape) < _LARGE:
        return None
    axis = int(call.attrs.axis or 0) % len(shape)
    is_image = len(shape) == 4 and axis == 3
    computed = [part for part in parts if not isinstance(rewriter.definition(part), relax.Var)]
    if is_image or len(computed) < _MANY:
        return None
    lines = int(np.prod(shape[:axis]))
    images = [rewriter.emit(op.reshape(part, (1, 1, lines, -1))) for part in parts]
    return op.reshape(rewriter.emit(op.concat(images, 3)), shape)


BEFORE: list[Rule] = [shuffle_as_lookup, multiplier_apart]  # layouts are chosen
AFTER: list[Rule] = [
    lookup_channels_last, slice_channels_last, padding_channels_last, choice_channels_last, pooling_channels_last,
    sample_channels_last,
]  # fmt: skip
LAST: list[Rule] = [lookup_as_shuffle, parts_as_channels]
