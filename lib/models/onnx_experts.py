"""ONNX Runtime's mixture of experts (`com.microsoft.MoE`): each row of some rows goes through the experts that a router
likes best, and gets the sum of what they make of it, by the router's shares.

Source: ONNX Runtime's `ContribOperators.md`, and what its kernel for CPUs computes where that says nothing: `gelu` is
the one with a hyperbolic tangent, and of `swiglu` only the form whose two halves alternate is there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax

from lib.graph import experts
from lib.models.onnx_converter import Converter
from lib.models.onnx_graph import Graph, Made, Nodes, attributes

KEPT = "GroupedMatMul"  # nodes that `CONVERTERS` takes: rows sorted by expert, weights (E, N, K), ends
_FIRST = 11  # version of ONNX whose TopK can give the smallest


def mixture(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Rows sorted by expert, and two products for all of them; None where there is a third, which ONNX Runtime does not
    compute on CPUs, or a router of another kind."""
    given = attributes(
        node, k=1, activation_type=b"relu", normalize_routing_weights=0, use_sparse_mixer=0, swiglu_fusion=0,
        swiglu_limit=None, activation_alpha=1.0, activation_beta=0.0,
    )  # fmt: skip
    x, router, first, first_bias, second, second_bias, third = [*node.input, *[""] * 7][:7]
    shape, of_first, of_second = graph.shape(x), graph.shape(first), graph.shape(second)
    activated = _activation(given)
    if third or given["use_sparse_mixer"] or activated is None or graph.version < _FIRST:
        return None
    if shape is None or of_first is None or of_second is None:
        return None
    made, count, each = Made(graph), of_first[0], given["k"]
    n_rows = math.prod(shape[:-1])
    shares, chosen = _best(made, made.op("Softmax", router, axis=-1), each)
    if given["normalize_routing_weights"]:
        shares = made.op("Div", shares, made.sum(shares))
    chosen = made.op("Reshape", chosen, made.axes(-1))
    order = _ascending(made, chosen, n_rows * each)
    expert = made.op("Gather", chosen, order)
    ends = _ends(made, expert, count)
    rows = made.op("Reshape", x, made.axes(-1, shape[-1]))
    rows = made.op("Gather", rows, made.op("Div", order, made.integer(each)))

    def product(rows: str, weight: str, bias: str, n: int) -> str:
        found = made.op(KEPT, rows, weight, ends, lanes=graph.lanes)
        graph.tell(found, TensorProto.FLOAT, (n_rows * each, n))
        return made.op("Add", found, made.op("Gather", bias, expert)) if bias else found

    hidden = activated(made, product(rows, first, first_bias, of_first[1]))
    results = product(hidden, second, second_bias, of_second[1])
    share = made.op("Gather", made.op("Reshape", shares, made.axes(-1)), order)
    results = made.op("Mul", results, made.unsqueezed(share, 1))
    back = made.op("Gather", results, _ascending(made, order, n_rows * each))
    by_row = made.op("Reshape", back, made.axes(n_rows, each, of_second[1]))
    summed = made.op("Reshape", made.add(graph.reduce("ReduceSum", by_row, 1)), made.axes(*shape[:-1], of_second[1]))
    return made.ending(node, summed)


def _best(made: Made, values: str, count: int, *, largest: int = 1) -> tuple[str, str]:
    """The largest or smallest along the last axis, in order, and where they are."""
    names = [made.graph.fresh(), made.graph.fresh()]
    made.nodes.append(helper.make_node("TopK", [values, made.axes(count)], names, axis=-1, largest=largest))
    return names[0], names[1]


def _ascending(made: Made, numbers: str, count: int) -> str:
    """Where the smallest of whole numbers is, where the next, and so on."""
    return _best(made, made.op("Cast", numbers, to=TensorProto.FLOAT), count, largest=0)[1]


def _ends(made: Made, expert: str, count: int) -> str:
    """How many rows have an expert or one before it."""
    beyond = made.graph.constant(np.arange(1, count + 1)[:, None])
    are_before = made.op("Cast", made.op("Less", made.unsqueezed(expert, 0), beyond), to=TensorProto.INT64)
    return made.op("Reshape", made.sum(are_before), made.axes(count))


def _activation(given: Mapping[str, Any]) -> Callable[[Made, str], str] | None:
    """What comes between the products; None if it is not known."""
    name = given["activation_type"].decode()
    if name == "swiglu":
        return (lambda made, x: _gated(made, x, given)) if given["swiglu_fusion"] == 1 else None
    return _ACTIVATIONS.get(name)


def _gated(made: Made, x: str, given: Mapping[str, Any]) -> str:
    """Gates and what they let through alternate."""
    apart = made.op("Reshape", x, made.axes(0, -1, 2))
    gate, through = (made.op("Gather", apart, made.integer(n), axis=2) for n in (0, 1))
    if given["swiglu_limit"] is not None:
        limit = made.number(given["swiglu_limit"])
        gate = made.op("Min", gate, limit)
        through = made.op("Max", made.op("Min", through, limit), made.number(-given["swiglu_limit"]))
    opened = made.op("Sigmoid", made.op("Mul", gate, made.number(given["activation_alpha"])))
    beside = made.op("Add", through, made.number(given["activation_beta"]))
    return made.op("Mul", made.op("Mul", gate, opened), beside)


def _gelu(made: Made, x: str) -> str:
    cube = made.op("Mul", made.op("Mul", x, x), x)
    within = made.op("Add", x, made.op("Mul", cube, made.number(0.044715)))
    turned = made.op("Tanh", made.op("Mul", within, made.number(math.sqrt(2 / math.pi))))
    return made.op("Mul", made.op("Mul", x, made.number(0.5)), made.op("Add", turned, made.number(1)))


_ACTIVATIONS: dict[str, Callable[[Made, str], str]] = {
    "gelu": _gelu,
    "identity": lambda _, x: x,
    "relu": lambda made, x: made.op("Relu", x),
    "silu": lambda made, x: made.op("Mul", x, made.op("Sigmoid", x)),
}


class _Grouped(Converter):
    """Of a product for all experts."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        rows, weight, ends = (inputs[n] for n in range(3))
        turned = builder.emit(relax.op.permute_dims(weight, (0, 2, 1)))
        return experts.emit(builder, rows, turned, ends, int(given["lanes"]))


CONVERTERS = {KEPT: _Grouped}
