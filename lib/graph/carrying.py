"""Channels that were added to fill vectors stay until a contraction reads what came of them.

Where a convolution's channels fill no whole vectors, as 228 do, some are added, and dropped as soon as the kernel has
computed them (`lib.graph.widen`): it writes vectors of four then, and the depthwise convolution that comes next has no
others. Here they stay: what is computed channel by channel, activations, depthwise convolutions, gates, sums over
lines, has whole vectors, and the next 1x1 convolution reads the channels that it had before (`lib.graph.parts`). In
bf16 and in bytes it reads all of them, of which its instructions want a multiple anyway, with weights of zero. A sum
with an image of fewer channels, as BlazeFace has, pads that one with more.

What stands in the added channels is computed from zeros, and finite.
"""

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import reweight, widen
from lib.graph.fusion import Model
from lib.graph.reweight import shape_of
from lib.graph.rewrite import alike, arguments, dtype, groups_of, is_call, is_channels_last, mutated
from lib.machine.registers import narrowed

_CONVOLUTION = "relax.nn.conv2d"
_CONVOLUTIONS = (_CONVOLUTION, "relax.nn.conv3d")  # of the latter the depthwise ones
_ALONE = tuple(f"relax.{name}" for name in (
    "nn.relu", "nn.silu", "nn.gelu", "nn.gelu_tanh", "sigmoid", "tanh", "erf", "clip", "abs", "negative", "round",
    "floor", "astype",
))  # fmt: skip
_TOGETHER = tuple(f"relax.{name}" for name in ("add", "subtract", "multiply", "maximum", "minimum"))
_POOLS = ("relax.nn.max_pool2d", "relax.nn.avg_pool2d")
_SUMS = ("relax.mean", "relax.sum")
_PAD, _RESHAPE = "relax.nn.pad", "relax.reshape"

_Needs = tuple[relax.Expr, ...]  # the tensors that must have added channels for another to have them


def carried(model: Model, lanes: int, *, reads_all: bool = False) -> Model:
    """The model with channels added where that gives whole vectors to more than the convolution that computes them; the
    same model if there is nothing such.

    Args:
        lanes: Of the machine's vectors.
        reads_all: Convolutions of floats read added channels, too, as those of bytes do.
    """
    found = _Survey(model, lanes).worthwhile()
    if not found:
        return model
    module = mutated(_Carrier(model.module, found, lanes, reads_all=reads_all), model.module)
    module = transform.DeadCodeElimination()(transform.CanonicalizeBindings()(module))
    return reweight.made_once(Model(module, model.weights))


class _Survey:
    """Which tensors of `main` may have more channels than they had."""

    def __init__(self, model: Model, lanes: int) -> None:
        function = model.module["main"]
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self._values = {binding.var: binding.value for block in blocks for binding in block.bindings}
        self._lanes = lanes
        self._readers: dict[relax.Expr, list[relax.Var]] = {}
        for var, value in self._values.items():
            for arg in arguments(value):
                self._readers.setdefault(arg, []).append(var)
        self._weights = {param for param in function.params
                         if str(param.name) in model.weights and len(self._readers.get(param, ())) == 1}  # fmt: skip

    def worthwhile(self) -> dict[relax.Var, _Needs]:
        """Those tensors, in order, each with what it is computed of; of groups of them that gain by it."""
        found: dict[relax.Var, _Needs] = {}
        for var, value in self._values.items():
            needs = self._needs(value) if isinstance(value, relax.Call) and isinstance(var, relax.DataflowVar) else None
            if needs is not None and all(each in found for each in needs):
                found[var] = needs
        while lost := [var for var in found if not self._is_taken(var, found)]:
            for var in lost:
                del found[var]
        groups = _connected(found)
        gain = {group for var, group in groups.items() if self._gains(var)}
        return {var: needs for var, needs in found.items() if groups[var] in gain}

    def _needs(self, call: relax.Call) -> _Needs | None:
        """Which of a call's arguments must have added channels for its result to have them; None if it cannot."""
        shape = shape_of(call)
        if len(shape) not in (4, 5) or shape[-1] % self._lanes == 0:
            return None
        if is_call(call, *_CONVOLUTIONS):
            return self._needs_of_convolution(call, shape[-1])
        if _pads_channels(call):
            return ()
        if is_call(call, *_TOGETHER):
            return self._needs_of_operands(call, shape[-1])
        is_of_space = is_call(call, *_ALONE, _RESHAPE) or _is_of_space(call)
        return (call.args[0],) if is_of_space and shape_of(call.args[0])[-1:] == shape[-1:] else None

    def _needs_of_convolution(self, call: relax.Call, channels: int) -> _Needs | None:
        data, weight = call.args
        if not is_channels_last(call) or weight not in self._weights or dtype(call) not in widen.SUMS:
            return None
        if _is_depthwise(call):
            return (data,)
        is_dense = is_call(call, _CONVOLUTION) and groups_of(call) == 1
        return () if is_dense and widen.computed(channels, self._lanes) > channels else None

    def _needs_of_operands(self, call: relax.Call, channels: int) -> _Needs | None:
        """Other operands are numbers, weights with a number for each channel, or have one for all channels."""
        needs = [arg for arg in call.args if shape_of(arg)[-1:] == (channels,) and arg not in self._weights]
        others = [arg for arg in call.args if not any(arg.same_as(each) for each in needs)]
        is_spread = all(shape_of(arg)[-1:] in ((), (1,)) or arg in self._weights for arg in others)
        return tuple(needs) if needs and is_spread else None

    def _is_taken(self, var: relax.Var, found: Mapping[relax.Var, _Needs]) -> bool:
        """Whether all that reads a tensor has added channels as well, or takes those that there were; and there is what
        it is computed of."""
        readers = self._readers.get(var, [])
        is_used = readers and all(
            _contains(found.get(reader, ()), var) or _takes_own(self._values[reader], var) for reader in readers
        )
        return bool(is_used) and all(each in found for each in found[var])

    def _gains(self, var: relax.Var) -> bool:
        """Whether something of a tensor is faster for it: a depthwise convolution, or any kernel where only vectors of
        a quarter of a register fill the channels."""
        return _is_depthwise(self._values[var]) or narrowed(self._lanes, shape_of(var)[-1]) < self._lanes // 2


@mutator
class _Carrier(PyExprMutator):
    def __init__(self, module: tvm.IRModule, found: Mapping[relax.Var, _Needs], lanes: int, *, reads_all: bool) -> None:
        super().__init__(module)
        self._found, self._lanes, self._reads_all = found, lanes, reads_all
        self._wide: dict[relax.Expr, relax.Var] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._found:
            super().visit_var_binding_(binding)
            return
        channels = shape_of(binding.var)[-1]
        wide = self.builder_.emit(self._widened(binding.value, -channels % self._lanes))
        self._wide[binding.var] = wide
        self.set_var_remap(binding.var, self.builder_.emit(op.strided_slice(wide, [-1], [0], [channels], [1])))

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        reads_more = self._more_read(old)
        return self._convolved(old, reads_more, 0) if reads_more else self.visit_expr_post_order(old)

    def _widened(self, call: relax.Call, more: int) -> relax.Expr:
        """A call with so many channels more."""
        if _is_depthwise(call):
            data = self._wide[call.args[0]]
            return alike(call, data, self._padded(call.args[1], more), dtype(call), groups=shape_of(data)[-1])
        if is_call(call, _CONVOLUTION):
            return self._convolved(call, self._more_read(call), more)
        channels = shape_of(call)[-1]
        if _pads_channels(call):
            widths = [int(n) for n in call.attrs.pad_width]
            widths[-1] += more
            return op.nn.pad(self.visit_expr(call.args[0]), widths, "constant", float(call.attrs.pad_value))
        if is_call(call, _RESHAPE):
            return op.reshape(self._wide[call.args[0]], [*shape_of(call)[:-1], channels + more])
        args = [self._wide[arg] if arg in self._wide else self._padded(arg, more) if shape_of(arg)[-1:] == (channels,)
                else self.visit_expr(arg) for arg in call.args]  # fmt: skip
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    def _more_read(self, call: relax.Call) -> int:
        """How many added channels a convolution reads."""
        data = call.args[0] if is_call(call, _CONVOLUTION) else None
        takes_any = data in self._wide and (self._reads_all or dtype(call.args[1]) == "int8")
        return shape_of(self._wide[data])[-1] - shape_of(data)[-1] if takes_any and _reads_channels(call, data) else 0

    def _convolved(self, call: relax.Call, read: int, written: int) -> relax.Expr:
        """A convolution that reads, and writes, so many channels more."""
        data = self._wide[call.args[0]] if read else self.visit_expr(call.args[0])
        weight = self._padded(call.args[1], written, read)
        return alike(call, data, weight, dtype(call))

    def _padded(self, param: relax.Expr, columns: int, rows: int = 0) -> relax.Expr:
        """A weight with zeros after its last axis, and the one before."""
        widths = [0] * (2 * len(shape_of(param))) + [0, rows, 0, columns]
        return self.builder_.emit(op.nn.pad(param, widths[-2 * len(shape_of(param)) :]))


def _contains(needs: _Needs, var: relax.Expr) -> bool:
    return any(each.same_as(var) for each in needs)


def _is_depthwise(call: relax.Expr) -> bool:
    return is_call(call, *_CONVOLUTIONS) and 1 < groups_of(call) == shape_of(call)[-1] == shape_of(call.args[0])[-1]


def _reads_channels(call: relax.Expr, data: relax.Expr) -> bool:
    """Whether it is a 1x1 convolution of an image, of all its channels at once."""
    return (
        is_call(call, _CONVOLUTION) and groups_of(call) == 1 and is_channels_last(call)
        and call.args[0].same_as(data) and not call.args[1].same_as(data) and shape_of(call.args[1])[:2] == (1, 1)
    )  # fmt: skip


def _pads_channels(call: relax.Expr) -> bool:
    """Whether it gives an image more channels, after its own."""
    if not is_call(call, _PAD) or str(call.attrs.pad_mode) != "constant":
        return False
    before, after = map(int, call.attrs.pad_width[-2:])
    return before == 0 < after


def _takes_own(call: relax.Expr, data: relax.Expr) -> bool:
    """Whether it reads the channels that there were, and no others."""
    return _reads_channels(call, data) or _pads_channels(call)


def _is_of_space(call: relax.Call) -> bool:
    """Whether it puts together pixels of each channel by itself, channels last."""
    if is_call(call, *_POOLS):
        return str(call.attrs.layout) == "NHWC"
    if is_call(call, _PAD):
        return str(call.attrs.pad_mode) == "constant" and not any(int(n) for n in call.attrs.pad_width[-2:])
    axes, last = call.attrs.axis if is_call(call, *_SUMS) else None, len(shape_of(call)) - 1
    return axes is not None and bool(call.attrs.keepdims) and not any(int(axis) in (last, -1) for axis in axes)


def _connected(found: Mapping[relax.Var, _Needs]) -> dict[relax.Var, int]:
    """The group of each tensor: those that have added channels together, or not."""
    groups: dict[relax.Var, int] = {}
    for n, (var, needs) in enumerate(found.items()):
        joined = {groups[each] for each in needs}
        groups[var] = min(joined, default=n)
        for other, group in groups.items():
            if group in joined:
                groups[other] = groups[var]
    return groups
