"""Concatenated images without copying: each convolution writes its channels where they belong.

TVM computes a concatenation as a function of its own, with a branch for every element. Here each input is *placed*: a
small function writes it to its channels of the joint tensor. FuseOps makes that part of the epilogue of the convolution
that computes the input; the calls then write into one buffer, one after the other (`call_tir_inplace`). Convolutions
that differ in where they write alone are one workload (`lib.tir.workload`). An input that other convolutions read as
well is placed at once, and they read it where it is (`lib.graph.parts`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script import tirx as T

from lib.graph import patterns
from lib.graph.rewrite import arguments, dtype, is_call, is_channels_last, static_shape

_JOINS = "joins_parts"  # attribute of the functions that stand for joint tensors
_CALL_TIR = "relax.call_tir"
_IN_PLACE = "relax.call_tir_inplace"

Lookup = Callable[[relax.Var], relax.Expr | None]  # what a variable is bound to


def place_parts(module: tvm.IRModule) -> tvm.IRModule:
    """Turn concatenations of images by channels (NHWC) into placements and a join; before FuseOps."""
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            placer = _Placer(module, function)
            placed = placer.visit_expr(function)
            module = placer.builder_.get()
            module.update_func(module.get_global_var(gvar.name_hint), placed)
    return module


def write_in_place(module: tvm.IRModule) -> tvm.IRModule:
    """Have all placements of a join write into the result of the first; after FuseTIR."""
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            functions[gvar] = _Chainer(module, function).visit_expr(function)
    module = tvm.IRModule(functions, attrs=module.attrs)
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(module))


def as_arguments(module: tvm.IRModule) -> tvm.IRModule:
    """The tensors that calls write into as arguments of plain calls, for passes that do not know the others."""
    return _with_calls(module, _AsArguments)


def in_place_again(module: tvm.IRModule) -> tvm.IRModule:
    """Undo `as_arguments`."""
    return _with_calls(module, _InPlaceAgain)


def _with_calls(module: tvm.IRModule, changed: Callable[[tvm.IRModule], PyExprMutator]) -> tvm.IRModule:
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            functions[gvar] = changed(module).visit_expr(function)
    return tvm.IRModule(functions, attrs=module.attrs)


def called(value: relax.Expr | None) -> tuple[tvm.ir.GlobalVar, list[relax.Expr]] | None:
    """The TIR function that an expression calls, in place or not, and its arguments; None for other expressions."""
    if value is None or not is_call(value, _CALL_TIR, _IN_PLACE):
        return None
    return value.args[0], list(value.args[1].fields)


def _extents(expr: relax.Expr) -> tuple[int, ...]:
    """The static shape of a tensor that has one."""
    shape = static_shape(expr)
    assert shape is not None
    return shape


def _is_image_concat(call: relax.Expr | None) -> bool:
    """Whether a call joins images (N, H, W, C) by channels."""
    if call is None or not is_call(call, "relax.concat"):
        return False
    shape = static_shape(call)
    return shape is not None and len(shape) == 4 and int(call.attrs.axis or 0) % 4 == 3


def _tuple_fields(lookup: Lookup, concat: relax.Call) -> list[relax.Expr]:
    fields = concat.args[0]
    if isinstance(fields, relax.Var):
        fields = lookup(fields)
    return list(fields.fields) if isinstance(fields, relax.Tuple) else []


@cache  # to read a program takes 20 ms, and a transformer has the same one in each layer
def _place_function(shape: tuple[int, ...], offset: int, channels: int, kind: str) -> tirx.PrimFunc:
    """Writes an image (N, H, W, C) to channels [offset, offset + C) of a joint one."""
    batch, height, width, own = (tirx.IntImm("int64", extent) for extent in shape)  # as legalised operators have it
    total, first = tirx.IntImm("int64", channels), tirx.IntImm("int64", offset)

    @T.prim_func(private=True, s_tir=True)
    def place(
        part: T.Buffer((batch, height, width, own), kind),  # type: ignore[valid-type]
        whole: T.Buffer((batch, height, width, total), kind),  # type: ignore[valid-type]
    ) -> None:
        for n, y, x, c in T.grid(batch, height, width, own):
            with T.sblock("place"):
                vn, vy, vx, vc = T.axis.remap("SSSS", [n, y, x, c])
                whole[vn, vy, vx, vc + first] = part[vn, vy, vx, vc]

    return place.with_attr("tirx.noalias", True)


def _readers(function: relax.Function) -> dict[relax.Expr, list[relax.Expr]]:
    """What reads each tensor, concatenations of images left out."""
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    values = {binding.var: binding.value for binding in bindings}
    joined = {values.get(call.args[0], call.args[0]) for call in values.values() if _is_image_concat(call)}
    found: dict[relax.Expr, list[relax.Expr]] = {}
    for value in values.values():
        if value not in joined and not _is_image_concat(value):
            for each in arguments(value):
                found.setdefault(each, []).append(value)
    return found


def _are_convolutions(readers: Sequence[relax.Expr]) -> bool:
    """Whether some operators are convolutions alone that read channels where they are (`lib.graph.parts`)."""
    return bool(readers) and all(is_call(each, "relax.nn.conv2d") and is_channels_last(each) for each in readers)


def _join_function(shape: tuple[int, ...], count: int, kind: str) -> tirx.PrimFunc:
    """A placeholder for the joint tensor until the placements write into it; never compiled."""
    parts = [tvm.te.placeholder(shape, kind, name=f"part{n}") for n in range(count)]
    whole = tvm.te.compute(shape, lambda *i: sum((part(*i) for part in parts[1:]), parts[0](*i)), name="whole")
    function = tvm.te.create_prim_func([*parts, whole]).without_attr("global_symbol")
    return function.with_attrs({**patterns.marks(patterns.OPAQUE), _JOINS: True})


@mutator
class _Placer(PyExprMutator):
    """Replaces concatenations. One that begins with the result of another, or with the same images, shares its buffer,
    of which the earlier one is a slice: later writes leave the earlier channels as they are. So the layers of a
    DenseNet, each of which reads all before it, add their own images to one buffer."""

    def __init__(self, module: tvm.IRModule, function: relax.Function) -> None:
        super().__init__(module)
        self._values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
        self._buffer_of: dict[relax.Call, relax.Var] = {}  # the joint tensor behind a concatenation
        self._channels: dict[relax.Call, int] = {}  # of that tensor
        self._appends: set[relax.Call] = set()  # concatenations that append to the one they begin with
        concats = [call for call in self._values.values() if _is_image_concat(call)]
        self._base = self._bases(concats)
        self._early: dict[relax.Var, tuple[relax.Call, int]] = {}  # images that are placed as soon as they are computed
        self._placed_early: dict[relax.Expr, relax.Var] = {}
        for call in reversed(concats):
            channels = self._channels.setdefault(call, _extents(call)[3])
            base, _ = self._base[call]
            if base is not None and base not in self._channels:  # one concatenation alone may append to another
                self._channels[base] = channels
                self._appends.add(call)
        readers = _readers(function)
        for call in concats:
            for image, offset in self._placed(call):
                if isinstance(image, relax.DataflowVar) and _are_convolutions(readers.get(image, ())):
                    self._early.setdefault(image, (call, offset))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if binding.var in self._early:
            concat, offset = self._early[binding.var]
            whole = self.builder_.emit(self._place(concat, binding.var, offset))
            self._placed_early[binding.var] = whole
            end = offset + _extents(binding.var)[3]
            self.set_var_remap(binding.var, self.builder_.emit(op.strided_slice(whole, [3], [offset], [end], [1])))

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        if old not in self._channels:
            return self.visit_expr_post_order(old)
        base, _ = self._base[old]
        parts = [self._buffer_of[base]] if old in self._appends else []
        whole = self._joint(old)
        for field, offset in self._placed(old):
            is_there = field in self._placed_early and self._early[field] == (old, offset)
            parts.append(self._placed_early[field] if is_there else self.builder_.emit(self._place(old, field, offset)))
        join = self.builder_.add_func(_join_function(tuple(whole.shape), len(parts), dtype(old)), "join_placed")
        self._buffer_of[old] = self.builder_.emit(relax.call_tir(join, parts, whole))
        own = _extents(old)[3]
        if own == self._channels[old]:
            return self._buffer_of[old]
        return op.strided_slice(self._buffer_of[old], [3], [0], [own], [1])

    def _joint(self, concat: relax.Call) -> relax.TensorType:
        return relax.TensorType((*_extents(concat)[:3], self._channels[concat]), dtype(concat))

    def _place(self, concat: relax.Call, image: relax.Expr, offset: int) -> relax.Call:
        function = _place_function(_extents(image), offset, self._channels[concat], dtype(image))
        place = self.builder_.add_func(function.with_attrs(patterns.marks(patterns.ELEMENTWISE)), "place")
        return relax.call_tir(place, [self.visit_expr(image)], self._joint(concat))

    def _placed(self, call: relax.Call) -> list[tuple[relax.Expr, int]]:
        """The images of a concatenation that are not in its buffer before it, each with its offset there."""
        images = _tuple_fields(self._values.get, call)
        offsets = accumulate((_extents(image)[3] for image in images), initial=0)
        n_there = self._base[call][1] if call in self._appends else 0
        return list(zip(images, offsets, strict=False))[n_there:]

    def _bases(self, concats: Sequence[relax.Call]) -> dict[relax.Call, tuple[relax.Call | None, int]]:
        """The concatenation before it that each begins with, if any, and as how many images of its own: the one whose
        result is its first image, else the longest of those of its first images."""
        found: dict[relax.Call, tuple[relax.Call | None, int]] = {}
        of_images: dict[tuple[relax.Expr, ...], relax.Call] = {}
        for call in concats:
            images = tuple(map(self._resolved, _tuple_fields(self._values.get, call)))
            first = self._values.get(images[0])
            if _is_image_concat(first):
                found[call] = first, 1
            else:
                lengths = (n for n in range(len(images) - 1, 1, -1) if images[:n] in of_images)
                n = next(lengths, 0)
                found[call] = of_images.get(images[:n]), n
            of_images.setdefault(images, call)
        return found

    def _resolved(self, image: relax.Expr) -> relax.Expr:
        """The variable that computes an image, through aliases."""
        while isinstance(value := self._values.get(image), relax.Var):
            image = value
        return image


@mutator
class _Chainer(PyExprMutator):
    def __init__(self, module: tvm.IRModule, function: relax.Function) -> None:
        super().__init__(module)
        bindings = [binding for block in function.body.blocks for binding in block.bindings]
        order = {binding.var: n for n, binding in enumerate(bindings)}
        values = {binding.var: binding.value for binding in bindings}
        # All placements of a join in program order, which FuseOps may have changed, with those of the join that it
        # appends to: as each writes channels of its own, one more of them in between changes nothing for that one.
        self._before: dict[relax.Call, relax.Var] = {}  # the placement that comes before this one
        self._last: dict[relax.Call, relax.Var] = {}  # of a join
        placements: dict[relax.Call, list[relax.Var]] = {}  # of a join
        for value in values.values():
            found = called(value)
            if found is not None and _JOINS in (module[found[0]].attrs or {}):
                parts = [each for part in found[1] for each in placements.get(values[part], [part])]
                placements[value] = sorted(parts, key=lambda part: order[part])
                self._before.update({values[part]: before for before, part in pairwise(placements[value])})
                self._last[value] = placements[value][-1]

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if old in self._last:
            return self.visit_expr(self._last[old])
        if old not in self._before:
            return call
        gvar, arguments = call.args[0], list(call.args[1].fields)
        before = self.visit_expr(self._before[old])
        return relax.call_tir_inplace(gvar, [*arguments, before], [len(arguments)], old.ty)


@mutator
class _AsArguments(PyExprMutator):
    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, _IN_PLACE):
            return call
        return relax.call_tir(call.args[0], call.args[1], old.ty)


@mutator
class _InPlaceAgain(PyExprMutator):
    """A call that gives a function's last parameter, its result, is one that wrote into it."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._module = module

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, _CALL_TIR):
            return call
        gvar, arguments = call.args[0], list(call.args[1].fields)
        if len(arguments) < len(self._module[gvar].params):
            return call
        return relax.call_tir_inplace(gvar, arguments, [len(arguments) - 1], old.ty)
