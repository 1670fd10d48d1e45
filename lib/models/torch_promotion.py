"""Integers that operators of floats are given, and truth values that those of numbers are, as torch promotes them.

TVM 0.27's importer takes them as they are. torch gives the sine of an integer in floats, and the quotient of two; in a
decomposed program that stands nowhere but in the type of the result.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from lib.models.torch_graph import cast

_WITH_INTEGERS = ("where", "_to_copy", "masked_fill", "ldexp")  # which read them beside floats, or make floats of them


def promote(torch: ModuleType, program: Any) -> None:
    """Make integers and truth values that an operator computes floats of, element by element, such floats, in place."""
    for node in list(program.graph.nodes):
        if not _computes_floats(torch, node):
            continue
        made = node.meta["val"].dtype
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex:
                with program.graph.inserting_before(node):
                    node.replace_input_with(given, cast(torch, program.graph, given, made))


def _computes_floats(torch: ModuleType, node: Any) -> bool:
    """Whether an operator makes floats, each of the elements at its place."""
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    value, name = node.meta.get("val"), node.target.__name__.partition(".")[0]
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and name not in _WITH_INTEGERS


def _of_truths(operation: str, *, is_truth: bool) -> Callable[..., Any]:
    """Of truth values by integers: TVM 0.27 compiles no comparison and no order of the former.

    Args:
        operation: A function of torch.
        is_truth: What it gives are truth values again, with their places where it says these.
    """

    def compute(x: Any, *given: Any, **named: Any) -> Any:
        import torch

        tensors = [x, *(each for each in given if isinstance(each, torch.Tensor))]
        if any(each.dtype != torch.bool for each in tensors):
            return NotImplemented
        as_integers = [each.to(torch.int32) if isinstance(each, torch.Tensor) else each for each in (x, *given)]
        made = getattr(torch, operation)(*as_integers, **named)
        if not is_truth:
            return made
        return (made[0].bool(), *made[1:]) if isinstance(made, tuple) else made.bool()

    return compute


def _of_truths_at_places(operation: str) -> Callable[..., Any]:
    """Of truth values that are joined with others at places, by integers, too: their sum is whether one is true."""

    def compute(x: Any, *given: Any, **named: Any) -> Any:
        import torch

        is_put = operation == "index_put" and not (named.get("accumulate") or given[2:] == (True,))
        if x.dtype != torch.bool or is_put:
            return NotImplemented
        is_truth = [isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in given]
        others = [each.to(torch.int32) if truth else each for each, truth in zip(given, is_truth, strict=True)]
        return getattr(torch, operation)(x.to(torch.int32), *others, **named).bool()

    return compute


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **{
        f"{name}.{of}": _of_truths(name, is_truth=False)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for of in ("Tensor", "Scalar")
    },
    **{
        f"{name}.default": _of_truths(name, is_truth=True)
        for name in ("maximum", "minimum", "amax", "amin", "max", "min", "sort")
    },
    "scatter_add.default": _of_truths_at_places("scatter_add"),
    "index_put.default": _of_truths_at_places("index_put"),
    "scatter.reduce": _of_truths_at_places("scatter"),
}
