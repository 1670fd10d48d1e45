"""Complex numbers of torch as two real ones beside each other: the last axis, as `view_as_real` has them.

Models turn queries and keys by angles with them (rotary embeddings of DeepSeek-V2 and Llama 4). TVM has no complex
types, so tensors of them have one axis more here than in torch, and what knows nothing of that is refused.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from tvm import relax, te, tirx

from lib.contracts.errors import ModelError
from lib.models.torch_converters import Convert


def is_complex(value: Any) -> bool:
    """Whether something is a tensor of complex numbers."""
    return getattr(getattr(value, "dtype", None), "is_complex", False)


def as_real(torch: ModuleType, value: Any) -> Any:
    """A tensor of torch with an axis more if it is complex."""
    return torch.view_as_real(value.resolve_conj()).contiguous() if is_complex(value) else value


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


def converters(multiply: Convert) -> dict[str, Convert]:
    """Those of this module, which take real numbers as well.

    Args:
        multiply: What multiplies these.
    """

    def product(node: Any, importer: Any) -> relax.Expr:
        is_ours = any(is_complex(each.meta.get("val")) for each in node.all_input_nodes)
        return (_multiplied if is_ours else multiply)(node, importer)

    return {**CONVERTERS, "mul.Tensor": product}


def _same(node: Any, importer: Any) -> relax.Expr:
    return importer.env[node.args[0]]


def _polar(node: Any, importer: Any) -> relax.Expr:
    """From lengths and angles."""
    emit = importer.block_builder.emit
    length, angle = (importer.env[each] for each in node.args)
    parts = [emit(relax.op.multiply(length, emit(of(angle)))) for of in (relax.op.cos, relax.op.sin)]
    return emit(relax.op.stack(parts, axis=-1))


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


def _unsqueezed(node: Any, importer: Any) -> relax.Expr:
    axis = node.args[1] % node.meta["val"].ndim
    return importer.block_builder.emit(relax.op.expand_dims(importer.env[node.args[0]], axis))


def _reshaped(node: Any, importer: Any) -> relax.Expr:
    value = node.meta["val"]
    shape = (*map(int, value.shape), *([2] if is_complex(value) else []))
    return importer.block_builder.emit(relax.op.reshape(importer.env[node.args[0]], shape))


CONVERTERS: dict[str, Convert] = {
    "mul.Tensor": _multiplied,
    "polar.default": _polar,
    "reshape.default": _reshaped,
    "unsqueeze.default": _unsqueezed,
    "view.default": _reshaped,
    "view_as_complex.default": _same,
    "view_as_real.default": _same,
}
