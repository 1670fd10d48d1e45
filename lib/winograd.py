"""3x3 convolutions with fewer multiplications: Winograd's minimal filtering, F(m x m, 3 x 3).

A tile of m x m outputs is computed from (m + 2) x (m + 2) inputs d and the kernel g as A^T [(G g G^T) * (B^T d B)] A;
summed over the input channels, the product in the middle is one matrix product for each of the (m + 2)^2 positions.
It takes 4 (m = 2: 2.25) times fewer multiplications than the convolution; the transforms of data and results cost
additions and memory, those of the kernels are done once, here.
Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), sections 3 and 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.rewrite import dtype, is_call, static_shape

FUNCTION = "conv2d_winograd"  # how the functions are named that compute one
KERNEL = 3
_CONV = "relax.nn.conv2d"
_OUT_ELEMENTWISE = 4  # relax.OpPatternKind
_LANES = 8  # channels that fill a vector
_FROM_MEMORY, _THROUGH_CACHE = 10, 14  # multiplications


@dataclass(frozen=True, slots=True)
class Transforms:
    """The matrices of F(m x m, 3 x 3)."""

    tile: int  # m: outputs in a line of a tile
    data: np.ndarray  # B^T, (m + 2) x (m + 2)
    kernel: np.ndarray  # G, (m + 2) x 3
    result: np.ndarray  # A^T, m x (m + 2)

    @property
    def window(self) -> int:
        """Inputs in a line of a tile."""
        return self.tile + KERNEL - 1


_TRANSFORMS = {
    2: Transforms(
        2,
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
        np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2,
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]]),
    ),
    4: Transforms(
        4,
        np.array([[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
                  [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]),
        np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24,
        np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]),
    ),
}  # fmt: skip


def rewrite(module: tvm.IRModule, weights: Mapping[str, np.ndarray]) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Replace convolutions of `main` that gain by it; before operators are fused.

    Args:
        weights: Values of the parameters that are no inputs, by name.

    Returns:
        The module, in which the kernels concerned are transformed ones, and their values by name.
    """
    function = module["main"]
    rewriter = _Rewriter(module, function, weights)
    if not rewriter.tiles:
        return module, {}
    module = rewriter.rewritten(function)
    return module, {name: transformed(weights[name], tile) for name, tile in rewriter.tiles.items()}


def best_tile(image: tuple[int, int], channels: tuple[int, int], batch: int = 1) -> int:
    """m of the transform for a convolution to outputs of height and width, from and to channels; 0 for none.

    Counts in multiplications of floats what each way takes: its own, and what its memory traffic costs on CPUs of
    today, which do about ten of them while one number comes from memory, where the kernels of a large model are, and
    about seven while one is written to a cache that several passes share and read again.
    """
    height, width = image
    kernel, area = channels[0] * channels[1], batch * height * width
    costs = {0: 9.0 * kernel * area + _FROM_MEMORY * 9 * kernel}
    for tile, ways in _TRANSFORMS.items():
        places = batch * -(-height // tile) * -(-width // tile) * ways.window**2
        costs[tile] = kernel * places + _FROM_MEMORY * ways.window**2 * kernel + _THROUGH_CACHE * places * sum(channels)
    return min(costs, key=lambda tile: costs[tile])


def transformed(kernel: np.ndarray, tile: int) -> np.ndarray:
    """G g G^T for each pair of channels: HWIO to (m + 2) x (m + 2) x I x O, summed in double precision."""
    matrix = _TRANSFORMS[tile].kernel
    return np.einsum("ai,bj,ijco->abco", matrix, matrix, kernel.astype(np.float64)).astype(kernel.dtype)


def convolution(data: te.Tensor, kernel: te.Tensor, tile: int, padding: tuple[int, int, int, int]) -> te.Tensor:
    """A convolution of images (N, H, W, C) with a transformed kernel.

    Args:
        padding: Of the images, in lines and columns: top, left, bottom, right.
    """
    ways = _TRANSFORMS[tile]
    batch, height, width, channels = (int(extent) for extent in data.shape)
    top, left, bottom, right = padding
    out_height, out_width = height + top + bottom - KERNEL + 1, width + left + right - KERNEL + 1
    down, across = -(-out_height // tile), -(-out_width // tile)  # tiles
    beyond = down * tile - out_height, across * tile - out_width
    padded = topi.nn.pad(data, [0, top, left, 0], [0, bottom + beyond[0], right + beyond[1], 0], name="pad_temp")
    tiles, size, columns = batch * down * across, ways.window, int(kernel.shape[3])

    def inputs(number: tirx.Var, line: tirx.Var, column: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        image, rest = number // (down * across), number % (down * across)
        return padded[image, rest // across * tile + line, rest % across * tile + column, channel]

    line = te.reduce_axis((0, size), "line")
    half = te.compute(
        (tiles, size, size, channels),
        lambda p, a, j, c: te.sum(inputs(p, line, j, c) * _entry(ways.data, a, line), axis=line),
        name="data_lines",
    )
    column = te.reduce_axis((0, size), "column")
    spread = te.compute(
        (size, size, tiles, channels),
        lambda a, b, p, c: te.sum(half[p, a, column, c] * _entry(ways.data, b, column), axis=column),
        name="data_columns",
    )
    channel = te.reduce_axis((0, channels), "channel")
    product = te.compute(
        (size, size, tiles, columns),
        lambda a, b, p, o: te.sum(spread[a, b, p, channel] * kernel[a, b, channel, o], axis=channel),
        name="product",
    )
    position = te.reduce_axis((0, size), "position")
    lines = te.compute(
        (tiles, tile, size, columns),
        lambda p, i, b, o: te.sum(product[position, b, p, o] * _entry(ways.result, i, position), axis=position),
        name="result_lines",
    )
    other = te.reduce_axis((0, size), "other")
    results = te.compute(
        (tiles, tile, tile, columns),
        lambda p, i, j, o: te.sum(lines[p, i, other, o] * _entry(ways.result, j, other), axis=other),
        name="result_columns",
    )
    return te.compute(
        (batch, out_height, out_width, columns),
        lambda n, y, x, o: results[(n * down + y // tile) * across + x // tile, y % tile, x % tile, o],
        name=FUNCTION,
    )


def mark_patterns(module: tvm.IRModule) -> tvm.IRModule:
    """Tell FuseOps that what follows such a convolution may be fused into it; after AnnotateTIROpPattern."""
    functions = {
        gvar: function.with_attr("op_pattern", _OUT_ELEMENTWISE) if gvar.name_hint.startswith(FUNCTION) else function
        for gvar, function in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, module: tvm.IRModule, function: relax.Function, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(module)
        self.tiles: dict[str, int] = {}  # by name of the kernel
        self._params = {param: param for param in function.params}
        for param, calls in _readers(function).items():
            found = {_applicable(call, param) for call in calls}
            if str(param.name) in weights and len(found) == 1 and (tile := found.pop()):
                self.tiles[str(param.name)] = tile
                *_, i, o = static_shape(param) or ()
                size = tile + KERNEL - 1
                self._params[param] = relax.Var(str(param.name), relax.TensorType((size, size, i, o), "float32"))

    def rewritten(self, function: relax.Function) -> tvm.IRModule:
        """The module with its `main` rewritten."""
        params = list(self._params.values())
        for old, new in self._params.items():
            self.set_var_remap(old, new)
        body = self.visit_with_new_scope(function.body)
        changed = relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
        gvar = self.builder_.get().get_global_var("main")
        self.builder_.update_func(gvar, changed)
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        old = call.args[1] if is_call(call, _CONV) else None
        call = self.visit_expr_post_order(call)
        if not isinstance(old, relax.Var) or str(old.name) not in self.tiles:
            return call
        top, left, bottom, right = (int(p) for p in call.attrs.padding)
        return self.builder_.call_te(
            convolution, call.args[0], call.args[1], self.tiles[str(old.name)], (top, left, bottom, right),
            primfunc_name_hint=FUNCTION,
        )  # fmt: skip


def _readers(function: relax.Function) -> dict[relax.Var, list[relax.Expr]]:
    """The expressions that read each parameter."""
    found: dict[relax.Var, list[relax.Expr]] = {param: [] for param in function.params}

    def visit(expr: relax.Expr) -> None:
        arguments = expr.args if isinstance(expr, relax.Call) else expr.fields if isinstance(expr, relax.Tuple) else []
        for argument in arguments:
            if isinstance(argument, relax.Var) and argument in found:
                found[argument].append(expr)

    relax.analysis.post_order_visit(function, visit)
    return found


def _applicable(call: relax.Expr, param: relax.Var) -> int:
    """m of the transform for a convolution with a parameter for a kernel; 0 if it is not one, or does not gain."""
    if not is_call(call, _CONV) or not call.args[1].same_as(param) or dtype(call) != "float32":
        return 0
    attrs = call.attrs
    plain = [int(n) for n in (*attrs.strides, *attrs.dilation, attrs.groups)] == [1] * 5
    layouts = [str(name) for name in (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)]
    kernel, out = static_shape(param), static_shape(call)
    if not plain or layouts not in (["NHWC", "HWIO", "NHWC"], ["NHWC", "HWIO", ""]) or kernel is None or out is None:
        return 0
    height, width, inputs, outputs = kernel
    if (height, width) != (KERNEL, KERNEL) or inputs % _LANES or outputs % _LANES:
        return 0
    return best_tile((out[1], out[2]), (inputs, outputs), out[0])


def _entry(matrix: np.ndarray, row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
    """An entry of a constant matrix: a number, once the loops are unrolled."""
    value: tirx.Expr = tirx.const(0.0, "float32")
    for (i, j), number in np.ndenumerate(matrix):
        if number:
            here = tirx.all(tirx.EQ(row, i), tirx.EQ(column, j))
            value = tirx.Select(here, tirx.const(float(number), "float32"), value)
    return value
