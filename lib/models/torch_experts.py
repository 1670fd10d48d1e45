"""Mixtures of experts as transformers exports them: rows sorted by expert, and one product for all of them, by an
operator of its own (`torch_archive.declare_experts`)."""

from functools import partial
from typing import Any

from tvm import relax, te, tirx

from lib.graph import experts
from lib.models.torch_archive import EXPERTS
from lib.models.torch_converters import Convert, dtype_of


def converters(lanes: int) -> dict[str, Convert]:
    """Of the operators of such models.

    Args:
        lanes: Of a vector of the target.
    """
    return {
        f"{EXPERTS}.default": partial(_grouped, lanes),
        "histc.default": _histogram,
        "topk.default": _largest,
    }


def _grouped(lanes: int, node: Any, importer: Any) -> relax.Var:
    rows, weight, ends = (importer.env[each] for each in node.args[:3])
    return experts.emit(importer.block_builder, rows, weight, ends, lanes)


def _histogram(node: Any, importer: Any) -> relax.Var:
    """How many elements fall into each of equally wide intervals, the last of which has both its ends."""
    given = {"bins": 100, "min": 0, "max": 0} | dict(zip(("input", "bins", "min", "max"), node.args, strict=False))
    bins, low, high = (given[name] for name in ("bins", "min", "max"))
    if low == high:
        raise NotImplementedError("histc has no limits of its own: then values decide them.")

    def counted(values: te.Tensor) -> te.Tensor:
        flat = te.reduce_axis((0, values.shape[0]), "element")

        def at(n: tirx.Var) -> tirx.Expr:
            value = values[flat].astype("float32")
            interval = tirx.min(tirx.floor((value - low) * (bins / (high - low))), float(bins - 1))
            is_in = tirx.all(value >= low, value <= high, interval == n.astype("float32"))
            return te.sum(tirx.if_then_else(is_in, 1.0, 0.0), axis=flat)

        return te.compute((bins,), at, "histogram")

    flat = importer.block_builder.emit(relax.op.reshape(importer.env[node.args[0]], (-1,)))
    found = importer.block_builder.emit(importer.block_builder.call_te(counted, flat, primfunc_name_hint="histogram"))
    dtype = dtype_of(node.meta["val"])
    return found if dtype == "float32" else importer.block_builder.emit(relax.op.astype(found, dtype))


def _largest(node: Any, importer: Any) -> relax.Var:
    """The largest or smallest, in order; where any order is allowed, the importer takes none."""
    given = dict(zip(("input", "k", "dim", "largest", "sorted"), node.args, strict=False)) | node.kwargs
    return importer.block_builder.emit(relax.op.topk(
        importer.env[given["input"]], k=given["k"], axis=given.get("dim", -1), largest=given.get("largest", True),
        ret_type="both", dtype="int64",
    ))  # fmt: skip
