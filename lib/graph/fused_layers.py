"""Convolutions that follow one another as one function, which computes them band by band.

MobileNet's blocks make an image six times as wide, slide a window over each of its channels, and make it narrow again.
Most of what they do is to write these wide images and to read them again, from a cache that both cores share or from
memory: of 112x112 pixels and 96 channels 4.8 MB, with 32 operations for each four bytes. In one function they are made
for some lines at a time, and read while they are near (`lib.search.spaces.fused_layers`). Lines at the border of a band
are computed twice.

Around an image, a window sees zeros, and not what the convolution before would make of zeros. So that one computes a
wider image, of data with more zeros around them, and what follows puts zeros around its own: a `border`, which also
marks the place where FuseOps ends one function and where `joined` goes on with the next.
Source: Alwani et al., "Fused-Layer CNN Accelerators" (MICRO 2016).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax, te, tirx
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.concatenation import called
from lib.graph.rewrite import Rewriter, Rule, alike, dtype, groups_of, is_call, is_channels_last, static_shape
from lib.graph.rules.constants import ELEMENTWISE
from lib.machine.registers import narrowed
from lib.tir.operators import core_operator, operators
from lib.tir.workload import as_workload

_BORDER, _MARK = "border", "goes_on"  # what such functions are called, and their attribute
_FUNCTION = "fused_conv2d_by_bands"  # name of the functions, for people
_CONVOLUTION, _FLOAT = "relax.nn.conv2d", "float32"
_LEAST = 1 << 16  # bytes of an image that does not stay near anyway, for each lane: L2 is larger where these are more
_MOST_PRODUCTS = 128  # for each of its elements: more take longer than to write and to read it
_BETWEEN = (*ELEMENTWISE, "relax.clip")
_FIRST, _LAST = ("conv2d_1x1", "conv2d"), "conv2d_1x1"


def chained(lanes: int) -> Rule:
    """What makes zeros around the data of a depthwise convolution a part of the result of the one that computes these,
    where their channels are whole vectors of so many lanes."""
    return Rule("chained", (_CONVOLUTION,), partial(_chained, lanes))


def _chained(lanes: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    image, weight = call.args
    shape, window = rewriter.shape(image), rewriter.shape(weight)
    if shape is None or window is None or not is_channels_last(call) or dtype(call) != _FLOAT:
        return None
    if groups_of(call) != shape[-1] or window[-1] != shape[-1] or shape[-1] % lanes:
        return None
    if 4 * math.prod(shape) < lanes * _LEAST:
        return None
    made = _Made(rewriter, image)
    if made.convolution is None:
        return None
    around = [int(n) for n in call.attrs.padding]
    wider = made.again(_wider(made.convolution, around))
    border = rewriter.builder_.call_te(
        partial(_zeros_around, around), wider, primfunc_name_hint=_BORDER,
        primfunc_attrs={**patterns.marks(patterns.ELEMENTWISE), _MARK: tirx.IntImm("int32", 1)},
    )  # fmt: skip
    return alike(call, rewriter.emit(border), weight, _FLOAT, padding=[0] * 4)


def _wider(convolution: relax.Call, around: Sequence[int]) -> relax.Call:
    """A convolution that computes so many lines and columns more, before and after."""
    strides = [int(n) for n in convolution.attrs.strides] * 2
    padding = [
        int(own) + stride * more
        for own, stride, more in zip(convolution.attrs.padding, strides, around, strict=True)
    ]  # fmt: skip
    data, weight = convolution.args
    return alike(convolution, data, weight, dtype(convolution), padding=padding)


def _zeros_around(around: Sequence[int], image: te.Tensor) -> te.Tensor:
    """An image (N, H, W, C) with zeros in the place of its first and last lines and columns."""
    (top, left, bottom, right), (_, lines, columns, _) = around, map(int, image.shape)

    def value(n: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> tirx.Expr:
        inside = [y >= top, y < lines - bottom, x >= left, x < columns - right]
        needed = [each for each, zeros in zip(inside, (top, bottom, left, right), strict=True) if zeros]
        return (
            tirx.Select(tirx.all(*needed), image[n, y, x, c], tirx.const(0.0, _FLOAT)) if needed else image[n, y, x, c]
        )

    return te.compute(image.shape, value, name=_BORDER)


class _Made:
    """How an image is made of a convolution's results, element by element, for one reader alone."""

    def __init__(self, rewriter: Rewriter, image: relax.Expr) -> None:
        self._rewriter, self._image = rewriter, image
        self._steps: dict[relax.Var, relax.Call] = {}  # those between, in order
        self._reads: dict[relax.Expr, int] = {image: 1}  # how many of them, and of the reader, read each
        self._result: relax.Var | None = None  # of the convolution
        self.convolution: relax.Call | None = None  # None: it is made otherwise
        if self._goes_back(image) and self._result is not None:
            found = rewriter.calls(self._result, _CONVOLUTION)
            between = [*self._steps, self._result]
            are_read_here = all(rewriter.readers(var) == self._reads[var] for var in between)
            self.convolution = found if found is not None and are_read_here and _is_light(rewriter, found) else None

    def again(self, convolution: relax.Call) -> relax.Expr:
        """The image, of another convolution's results."""
        assert self._result is not None
        new = {self._result: self._rewriter.emit(convolution)}
        for var, call in self._steps.items():
            args = [new.get(arg, arg) for arg in call.args]
            new[var] = self._rewriter.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
        return new[self._image]

    def _goes_back(self, expr: relax.Expr) -> bool:
        """Whether an expression is made of the result of one convolution, and of tensors with a number for each channel
        at most; steps are noted in their order."""
        if not isinstance(expr, relax.Var):
            return False
        if expr in self._steps or (self._result is not None and expr.same_as(self._result)):
            return True
        call = self._rewriter.lookup_binding(expr)
        if is_call(call, _CONVOLUTION) and self._result is None:
            self._result = expr
            return True
        if not is_call(call, *_BETWEEN) or static_shape(call) != static_shape(self._image):
            return False
        for arg in call.args:
            if static_shape(arg) == static_shape(self._image):
                if not self._goes_back(arg):
                    return False
            elif not _is_by_channel(arg):
                return False
        for arg in {*call.args}:
            self._reads[arg] = self._reads.get(arg, 0) + 1
        self._steps[expr] = call
        return True


def _is_by_channel(expr: relax.Expr) -> bool:
    *others, _ = static_shape(expr) or (1,)
    return all(extent == 1 for extent in others)


def _is_light(rewriter: Rewriter, call: relax.Call) -> bool:
    """Whether a convolution of floats has few products for each element."""
    weight = rewriter.shape(call.args[1])
    is_dense = is_channels_last(call) and groups_of(call) == 1 and dtype(call) == dtype(call.args[0]) == _FLOAT
    return is_dense and weight is not None and math.prod(weight[:-1]) <= _MOST_PRODUCTS


def joined(module: tvm.IRModule, lanes: int) -> tvm.IRModule:
    """Functions that end with a border as one with that which reads it, and with the 1x1 convolution that reads that
    one, if its columns fill some vectors; between FuseOps and FuseTIR."""
    chains = _chains(module, module["main"], lanes)
    if not chains:
        return module
    joiner = _Joiner(module, chains)
    joiner.builder_.update_func(module.get_global_var("main"), joiner.visit_expr(module["main"]))
    return relax.transform.DeadCodeElimination()(joiner.builder_.get())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A call of `main`: of what FuseOps made one function of, or of a function alone."""

    var: relax.Var
    call: relax.Call
    module: tvm.IRModule

    def steps(self) -> list[tuple[relax.Var, relax.Call]]:
        """The calls in TIR that it is made of."""
        if called(self.call) is not None:
            return [(self.var, self.call)]
        function = self.module[self.call.op]
        return [(binding.var, binding.value) for block in function.body.blocks for binding in block.bindings]

    def inputs(self) -> list[tuple[relax.Expr, relax.Expr]]:
        """What its steps call what they are given, and what that is in `main`."""
        if (found := called(self.call)) is not None:
            return [(each, each) for each in found[1]]
        return list(zip(self.module[self.call.op].params, self.call.args, strict=True))

    def is_joinable(self) -> bool:
        """Whether all of its steps are such calls."""
        if called(self.call) is None and not isinstance(self.call.op, tvm.ir.GlobalVar):
            return False
        return all(called(value) is not None for _, value in self.steps())

    def ends_with_border(self) -> bool:
        return _MARK in (self.module[self.steps()[-1][1].args[0]].attrs or {})

    def begins_with(self) -> str:
        """The core operator of its first step."""
        return core_operator(operators(as_workload(self.module[self.steps()[0][1].args[0]])))

    def is_last_layer(self, image: relax.Var, lanes: int) -> bool:
        """Whether it is a 1x1 convolution of floats, of each of an image's pixels, with what follows it."""
        _, *pixels, columns = static_shape(self.steps()[0][0]) or (0, 0)
        has_all = pixels == list(static_shape(image) or ())[1:-1]
        return has_all and narrowed(lanes, columns) > 1 and self.begins_with() == _LAST


def _chains(module: tvm.IRModule, function: relax.Function, lanes: int) -> list[list[_Piece]]:
    """The calls that become one."""
    blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
    pieces = {binding.var: _Piece(binding.var, binding.value, module) for block in blocks for binding in block.bindings
              if isinstance(binding.value, relax.Call)}  # fmt: skip
    users = {var: users for block in blocks for var, users in udchain(block).items()}

    def reader(piece: _Piece) -> _Piece | None:
        """The only one that reads what it makes."""
        [*found] = users.get(piece.var, ())
        only = pieces.get(found[0]) if len(found) == 1 and isinstance(piece.var, relax.DataflowVar) else None
        return only if only is not None and only.is_joinable() else None

    chains = []
    for piece in pieces.values():
        if not piece.is_joinable() or not piece.ends_with_border() or piece.begins_with() not in _FIRST:
            continue
        if (window := reader(piece)) is not None:
            last = reader(window)
            goes_on = last is not None and last.is_last_layer(window.var, lanes) and not last.ends_with_border()
            chains.append([piece, window, last] if last is not None and goes_on else [piece, window])
    return chains


@mutator
class _Joiner(PyExprMutator):
    def __init__(self, module: tvm.IRModule, chains: Sequence[Sequence[_Piece]]) -> None:
        super().__init__(module)
        self._chains = {chain[-1].var: chain for chain in chains}
        self._within = {piece.var for chain in chains for piece in chain[:-1]}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self._chains:
            function, args = _as_one(self._chains[binding.var])
            gvar = self.builder_.add_func(function, _FUNCTION)
            made = relax.Call(gvar, [self.visit_expr(arg) for arg in args])
            is_inner = isinstance(binding.var, relax.DataflowVar)
            self.set_var_remap(binding.var, (self.builder_.emit if is_inner else self.builder_.emit_output)(made))
        elif binding.var not in self._within:
            super().visit_var_binding_(binding)


def _as_one(chain: Sequence[_Piece]) -> tuple[relax.Function, list[relax.Expr]]:
    """One function of the pieces of a chain, as FuseOps makes them, and what it is to be called with."""
    made = {piece.var for piece in chain}
    params: dict[relax.Expr, relax.Var] = {}  # by what they are in `main`
    for piece in chain:
        for _, given in piece.inputs():
            if given not in made and given not in params:
                params[given] = relax.Var(f"param_{len(params)}", given.ty)
    builder = relax.BlockBuilder()
    with builder.function(_FUNCTION, list(params.values()), attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            results: dict[relax.Expr, relax.Expr] = {}
            for piece in chain:
                known = {inner: results.get(given, params.get(given)) for inner, given in piece.inputs()}
                for var, call in piece.steps():
                    function, args, *others = call.args
                    again = [function, relax.Tuple([known[arg] for arg in args.fields]), *others]
                    known[var] = builder.emit(relax.Call(call.op, again, call.attrs, call.ty_args))
                results[piece.var] = known[var]
            out = builder.emit_output(results[chain[-1].var])
        builder.emit_func_output(out)
    return builder.get()[_FUNCTION], list(params)
