"""Complex numbers of torch as two real ones beside each other: the last axis, as `view_as_real` has them.

Models turn queries and keys by angles with them (rotary embeddings of DeepSeek-V2 and Llama 4), and look at sound and
images by their spectra (`lib.models.torch_fft`). TVM has no complex types, so tensors of them have one axis more here
than in torch, and what knows nothing of that is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from lib.contracts.errors import ModelError
from lib.models import torch_fft
from lib.models.torch_converters import CONVERTERS as OF_REAL
from lib.models.torch_converters import Convert, dtype_of


def is_complex(value: Any) -> bool:
    """Whether something is a tensor of complex numbers."""
    return getattr(getattr(value, "dtype", None), "is_complex", False)


def as_real(torch: ModuleType, value: Any) -> Any:
    """A tensor of torch with an axis more if it is complex."""
    return torch.view_as_real(value.resolve_conj()).contiguous() if is_complex(value) else value


def parameters_as_real(torch: ModuleType, program: Any) -> None:
    """Complex parameters stand in the graph as `get_attr`, of Relax constants: the importer takes no others."""
    names = program.graph_signature.inputs_to_parameters
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in names and node.users and is_complex(value := program.state_dict[names[node.name]]):
            become_attribute(torch, program, node, value, f"_real_{node.name}")


def become_attribute(torch: ModuleType, program: Any, node: Any, value: Any, name: str) -> None:
    """Have a tensor take a node's place, as an attribute of the graph, real if it is complex."""
    real = as_real(torch, value)
    setattr(program.graph_module, name, relax.const(real.numpy(force=True), dtype_of(real)))
    with program.graph.inserting_before(node):
        made = program.graph.create_node("get_attr", name)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)


def require_known(program: Any, path: Path) -> None:
    """Raises: ModelError: A decomposed program has complex inputs or outputs, or an operator on complex numbers that
    is not known here."""
    for node in program.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
        if not any(map(is_complex, values)) or (node.op == "call_function" and name in CONVERTERS):
            continue
        if node.op == "get_attr":
            continue  # of constants, which are real ones by now
        what = {"placeholder": f"input {node.name!r}", "output": "an output"}.get(node.op, f"the operator {name}")
        raise ModelError(
            f"{path}: {what} is of complex numbers. Known of these are {', '.join(sorted(CONVERTERS))} within a model: "
            "export all else with real and imaginary parts as real numbers."
        )


def converters(usual: Mapping[str, Convert]) -> dict[str, Convert]:
    """Those of this module, which take real numbers as well: as these converters have them, or the importer itself."""
    return {name: _of_either(name, convert, usual.get(name)) for name, convert in CONVERTERS.items()}


def _of_either(name: str, convert: Convert, usual: Convert | None) -> Convert:
    def either(node: Any, importer: Any) -> relax.Expr:
        if any(is_complex(each.meta.get("val")) for each in (node, *node.all_input_nodes)):
            return convert(node, importer)
        return usual(node, importer) if usual else importer.create_convert_map()[name](node)

    return either


def _same(node: Any, importer: Any) -> relax.Expr:
    return importer.env[node.args[0]]


def _polar(node: Any, importer: Any) -> relax.Expr:
    """From lengths and angles."""
    emit = importer.block_builder.emit
    length, angle = (importer.env[each] for each in node.args)
    real, imaginary = (emit(relax.op.multiply(length, emit(of(angle)))) for of in (relax.op.cos, relax.op.sin))
    return _together(real, imaginary, importer)


def _multiplied(node: Any, importer: Any) -> relax.Expr:
    emit, builder = importer.block_builder.emit, importer.block_builder
    if not all(hasattr(each, "meta") for each in node.args):
        number = next(each for each in node.args if not hasattr(each, "meta"))
        x = importer.env[next(each for each in node.args if hasattr(each, "meta"))]
        return emit(relax.op.multiply(x, relax.const(float(number), str(x.ty.dtype))))
    left, right = (importer.env[each] for each in node.args)
    if not all(is_complex(each.meta["val"]) for each in node.args):
        left, right = (
            found if is_complex(each.meta["val"]) else emit(relax.op.expand_dims(found, -1))
            for each, found in zip(node.args, (left, right), strict=True)
        )
        return emit(relax.op.multiply(left, right))
    shape = [*map(int, node.meta["val"].shape), 2]
    return emit(builder.call_te(lambda x, y: _product(shape, x, y), left, right, primfunc_name_hint="complex_product"))


def _product(shape: list[int], x: te.Tensor, y: te.Tensor) -> te.Tensor:
    """Of tensors that broadcast to a shape, whose last axis has real and imaginary parts."""

    def part(of: te.Tensor, place: tuple[tirx.Var, ...], n: int) -> tirx.Expr:
        extents = of.shape[:-1]
        own = place[len(place) - len(extents) :]
        at = [tirx.IntImm("int64", 0) if int(extent) == 1 else i for i, extent in zip(own, extents, strict=True)]
        return of(*at, tirx.IntImm("int64", n))

    def at(*index: tirx.Var) -> tirx.Expr:
        *place, which = index
        a, b, c, d = (part(of, tuple(place), n) for of in (x, y) for n in (0, 1))
        return tirx.Select(which == 0, a * c - b * d, a * d + b * c)

    return te.compute([tirx.IntImm("int64", n) for n in shape], at, "complex_product")


def _parts(node: Any, importer: Any) -> tuple[relax.Expr, relax.Expr]:
    """The real and the imaginary ones of what a node gives."""
    emit, last = importer.block_builder.emit, node.meta["val"].ndim
    real, imaginary = (emit(relax.op.take(importer.env[node], relax.const(n, "int64"), axis=last)) for n in (0, 1))
    return real, imaginary


def _together(real: relax.Expr, imaginary: relax.Expr, importer: Any) -> relax.Expr:
    """Complex numbers of their parts. Not by `stack`: ConvertLayout takes none along a new last axis."""
    emit, last = importer.block_builder.emit, real.ty.ndim
    return emit(relax.op.concat([emit(relax.op.expand_dims(part, last)) for part in (real, imaginary)], last))


def _matrix_product(node: Any, importer: Any) -> relax.Expr:
    """Four products of real matrices."""
    emit = importer.block_builder.emit
    (a, b), (c, d) = (_parts(each, importer) for each in node.args)
    ac, bd, ad, bc = (emit(relax.op.matmul(left, right)) for left, right in ((a, c), (b, d), (a, d), (b, c)))
    return _together(emit(relax.op.subtract(ac, bd)), emit(relax.op.add(ad, bc)), importer)


def _unsqueezed(node: Any, importer: Any) -> relax.Expr:
    axis = node.args[1] % node.meta["val"].ndim
    return importer.block_builder.emit(relax.op.expand_dims(importer.env[node.args[0]], axis))


def _reshaped(node: Any, importer: Any) -> relax.Expr:
    value = node.meta["val"]
    shape = (*map(int, value.shape), *([2] if is_complex(value) else []))
    return importer.block_builder.emit(relax.op.reshape(importer.env[node.args[0]], shape))


def _magnitude(node: Any, importer: Any) -> relax.Expr:
    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    return emit(relax.op.sqrt(emit(relax.op.sum(emit(relax.op.multiply(x, x)), [-1]))))


def _conjugated(node: Any, importer: Any) -> relax.Expr:
    signs = relax.const(np.array([1, -1], np.float32))
    return importer.block_builder.emit(relax.op.multiply(importer.env[node.args[0]], signs))


def _of_parts(node: Any, importer: Any) -> relax.Expr:
    emit, shape = importer.block_builder.emit, tuple(map(int, node.meta["val"].shape))
    real, imaginary = (emit(relax.op.broadcast_to(importer.env[each], shape)) for each in node.args[:2])
    return _together(real, imaginary, importer)


def _copied(node: Any, importer: Any) -> relax.Expr:
    """Of a real number a complex one without an imaginary part; other copies are what they are of."""
    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    if is_complex(node.args[0].meta["val"]):
        return x
    x = x if str(x.ty.dtype) == "float32" else emit(relax.op.astype(x, "float32"))
    return _together(x, emit(relax.op.multiply(x, relax.const(0, "float32"))), importer)


def _added(operation: Any) -> Convert:
    """Sums and differences of complex numbers of shapes that broadcast."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        if node.kwargs.get("alpha", 1) != 1 or not all(
            is_complex(getattr(n, "meta", {}).get("val")) for n in node.args
        ):
            raise ValueError(f"{node.target.__name__} of complex numbers and others is not imported")
        return importer.block_builder.emit(operation(*(importer.env[each] for each in node.args)))

    return convert


def _sliced(node: Any, importer: Any) -> relax.Expr:
    usual: list[Any] = [None, 0, 0, None, 1]
    x, axis, begin, end, step = list(node.args) + usual[len(node.args) :]
    axis, found = axis % node.meta["val"].ndim, importer.env[x]
    begin, end = _within(begin, end, int(found.ty.shape[axis]))
    return importer.block_builder.emit(relax.op.strided_slice(found, [axis], [begin], [end], [step]))


def _within(begin: int | None, end: int | None, extent: int) -> tuple[int, int]:
    """The ends of a slice, counted from the start."""
    first, last = (min(n + extent if n < 0 else n, extent) for n in (begin or 0, extent if end is None else end))
    return first, last


def _broadcast(node: Any, importer: Any) -> relax.Expr:
    """What the last argument that is a tensor gives, in the shape of the result (`expand`, and `copy` of torch, which
    gives what is copied)."""
    shape = (*map(int, node.meta["val"].shape), 2)
    return importer.block_builder.emit(relax.op.broadcast_to(importer.env[node.all_input_nodes[-1]], shape))


def _read_at(node: Any, importer: Any) -> relax.Expr:
    x, axis, places = node.args
    axis %= node.meta["val"].ndim
    return importer.block_builder.emit(relax.op.take(importer.env[x], importer.env[places], axis=axis))


def _put(node: Any, importer: Any) -> relax.Expr:
    """A slice in the place of another one."""
    usual: list[Any] = [None, None, 0, 0, None, 1]
    x, source, axis, begin, end, step = list(node.args) + usual[len(node.args) :]
    axis, emit = axis % node.meta["val"].ndim, importer.block_builder.emit
    begin, end = _within(begin, end, int(node.meta["val"].shape[axis]))
    return emit(relax.op.slice_scatter(importer.env[x], importer.env[source], begin, end, step, axis=axis))


def _joined(node: Any, importer: Any) -> relax.Expr:
    axis = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].ndim
    return importer.block_builder.emit(relax.op.concat([importer.env[each] for each in node.args[0]], axis))


def _padded(node: Any, importer: Any) -> relax.Expr:
    """With zeros, from the last axis on."""
    around, value = list(node.args[1]), (*node.args, 0)[2]
    if value or min(around) < 0:
        raise ValueError(f"padding of complex numbers by {around} with {value} is not imported")
    pairs = [around[n : n + 2] for n in range(0, len(around), 2)][::-1]
    whole = [*[[0, 0]] * (node.meta["val"].ndim - len(pairs)), *pairs, [0, 0]]
    flat = [width for pair in whole for width in pair]
    return importer.block_builder.emit(relax.op.nn.pad(importer.env[node.args[0]], flat))


CONVERTERS: dict[str, Convert] = {
    **torch_fft.CONVERTERS,
    "_conj.default": _conjugated,
    "_conj_physical.default": _conjugated,
    "_to_copy.default": _copied,
    "abs.default": _magnitude,
    "add.Tensor": _added(relax.op.add),
    "alias.default": _same,
    "bmm.default": _matrix_product,
    "cat.default": _joined,
    "clone.default": _same,
    "complex.default": _of_parts,
    "constant_pad_nd.default": _padded,
    "copy.default": _broadcast,
    "expand.default": _broadcast,
    "index_select.default": _read_at,
    "matmul.default": _matrix_product,
    "mul.Tensor": _multiplied,
    "permute.default": OF_REAL["permute.default"],
    "polar.default": _polar,
    "reshape.default": _reshaped,
    "select.int": OF_REAL["select.int"],
    "slice.Tensor": _sliced,
    "slice_scatter.default": _put,
    "sub.Tensor": _added(relax.op.subtract),
    "unsqueeze.default": _unsqueezed,
    "view.default": _reshaped,
    "view_as_complex.default": _same,
    "view_as_real.default": _same,
}
