"""ONNX files as models: checked before anything is converted, with errors that name the operator or the input."""

import ast
import contextlib
import io
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import tvm
from google.protobuf.message import DecodeError
from tvm import relax
from tvm.error import OpNotImplemented
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from lib.contracts.errors import ModelError, require_file
from lib.graph.fusion import Model, lift_constants
from lib.graph.simplify import channels_last, in_integers, simplify
from lib.models import (
    onnx_branches,
    onnx_contributed,
    onnx_decompositions,
    onnx_dequantized,
    onnx_experts,
    onnx_external,
    onnx_few_bits,
    onnx_float8,
    onnx_float32,
    onnx_folding,
    onnx_functions,
    onnx_layers,
    onnx_masks,
    onnx_ml,
    onnx_order,
    onnx_parts,
    onnx_quantized,
)
from lib.models.onnx_converter import Converter
from lib.models.onnx_graph import attributes

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
OF_UNKNOWN_SHAPE = {"NonZero", "NonMaxSuppression", "Unique", "Compress"}


def load(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    has_loops: bool = True,
    instruction: str = "",
    lanes: int = 8,
) -> Model:
    """Import an ONNX file; convolutions in NHWC, batch norms folded.

    Args:
        has_loops: Whether recurrent layers may be programs of their own (`lib.graph.recurrence`): on CPUs.
        instruction: For rows that are rounded to bytes where a file allows it (`lib.tir.few_bits_rows`), if any.
        lanes: Of a vector of the target, for weights that are laid out here (`lib.graph.experts`).
        shapes: Of inputs, by name, where the file leaves dimensions open; or extents (one number) of dimensions,
            by their name in the file.

    Raises:
        ModelError: The file is missing or damaged, has dynamic shapes that `shapes` does not settle, or uses an
            operator that TVM does not import. The message says which.
    """
    module = _import(
        path, dict(shapes or {}), has_loops, instruction, lanes
    )  # the file's own copy of the weights is gone with it
    return lift_constants(channels_last(simplify(in_integers(module))))


def _import(
    path: Path, shapes: dict[str, tuple[int, ...]], has_loops: bool, instruction: str, lanes: int
) -> tvm.IRModule:
    proto = settled(path, shapes)
    had_halves = onnx_float32.widen(proto)
    decide(proto)
    onnx_dequantized.in_bytes(proto)
    for simplified in (
        onnx_float8.expand,
        partial(
            onnx_contributed.expand, has_loops=has_loops, instruction=instruction, lanes=lanes, had_halves=had_halves
        ),
        onnx_functions.expand,
        partial(onnx_dequantized.expand, has_loops=has_loops, lanes=lanes),
        partial(onnx_decompositions.decompose, has_loops=has_loops),
    ):
        if simplified(proto):
            onnx_folding.fold(proto)
    _refuse_shapes_that_depend_on_values(proto.graph, path)
    _refuse_extents_that_depend_on_values(proto.graph, path)
    _refuse_choices(proto.graph, path)
    _refuse_training(proto.graph, path)
    _refuse_what_tvm_means_otherwise(proto.graph, path)
    return _convert(proto, path)


def settled(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A file with weights and true inputs of static shapes.

    Args:
        shapes: See `load`.

    Raises:
        ModelError: See `load`.
    """
    proto = read(path)
    _leave_true_inputs(proto.graph)
    if not proto.graph.input:
        raise ModelError(f"{path} has no inputs: it computes the same each time, and nothing is left to tune.")
    _settle_shapes(proto.graph, shapes, path)
    del proto.graph.value_info[:]  # of shapes that are open, or of before; what is told from now on is so
    return proto


def decide(proto: onnx.ModelProto) -> None:
    """Compute, in place, what depends on shapes and constants alone, take the branches that these choose, put by masks
    what is put at the places of their ones, and take parts that begin at a computed place."""
    onnx_folding.fold(proto)
    while onnx_branches.expand(proto):
        onnx_folding.fold(proto)
    onnx_masks.settle(proto)
    onnx_parts.settle(proto)


def _refuse_what_tvm_means_otherwise(graph: onnx.GraphProto, path: Path) -> None:
    """A RoiAlign of the largest: ONNX weighs the four pixels around a sample one by one, TVM the sample."""
    if any(node.op_type == "RoiAlign" and attributes(node, mode=b"avg")["mode"] == b"max" for node in graph.node):
        raise ModelError(f"{path} uses RoiAlign with mode `max`, which TVM computes otherwise than ONNX means it.")


def _refuse_shapes_that_depend_on_values(graph: onnx.GraphProto, path: Path) -> None:
    if found := sorted({node.op_type for node in graph.node} & OF_UNKNOWN_SHAPE):
        raise ModelError(
            f"{path} uses {', '.join(found)}, whose results have shapes that depend on the values of inputs: nothing "
            "after it can be compiled for fixed shapes, and nothing that multiplies comes before. If an input decides "
            "them, fix it (--fix NAME=VALUE). A range of shapes has no such operators: give one shape."
        )


def _refuse_extents_that_depend_on_values(graph: onnx.GraphProto, path: Path) -> None:
    constants = {tensor.name for tensor in graph.initializer} | {""}
    bounds = {"Range": 0, "Slice": 1}  # where they begin among the inputs
    for node in graph.node:
        if node.op_type in bounds and not constants.issuperset(node.input[bounds[node.op_type] :]):
            raise ModelError(
                f"{path} uses {node.op_type} ({node.name or node.output[0]!r}), whose extent depends on the values of "
                "inputs. Fix the one that decides it: --fix NAME=VALUE."
            )


def _refuse_choices(graph: onnx.GraphProto, path: Path) -> None:
    if found := [node for node in graph.node if node.op_type == "If"]:
        raise ModelError(
            f"{path} has an If ({found[0].name or found[0].output[0]!r}) that depends on the values of inputs "
            f"({found[0].input[0]!r}): there is no program for both branches. If an input says which, fix it: of a "
            "merged decoder --fix use_cache_branch=true, say. Or give a file with one of them, such as "
            "`decoder_with_past_model.onnx`."
        )


def _refuse_training(graph: onnx.GraphProto, path: Path) -> None:
    for node in graph.node:
        if node.op_type == "BatchNormalization" and attributes(node, training_mode=0)["training_mode"]:
            raise ModelError(
                f"{path}: BatchNormalization {node.name!r} is in training mode, where it computes with the statistics "
                "of its batch. Export the model for inference (`model.eval()`)."
            )


def read(path: Path) -> onnx.ModelProto:
    """A file with all its weights, once it was found to be whole.

    Raises:
        ModelError: It is missing, damaged or incomplete.
    """
    require_file(path)
    try:
        proto = onnx.load(path, load_external_data=False)
        onnx_external.check(proto, path)
        onnx.load_external_data_for_model(proto, str(path.parent))
    except DecodeError as error:
        raise ModelError(f"{path} is damaged or no ONNX file: {error}") from error
    except (onnx.checker.ValidationError, ValueError) as error:  # a location outside the model's folder, say
        raise ModelError(f"{path} is incomplete: {str(error).splitlines()[0]}") from error
    if not proto.graph.node:
        raise ModelError(f"{path} is damaged or empty: it holds no operators.")
    _declare_domains(proto)
    try:
        onnx_functions.put_in_place(proto)
    except (onnx.checker.ValidationError, RuntimeError) as error:
        raise ModelError(f"{path} has functions that cannot be put in place: {str(error).splitlines()[0]}") from error
    onnx_order.sort(proto.graph)
    _check_header(proto, path)
    onnx_ml.put_in_place(proto)
    return proto


def _declare_domains(proto: onnx.ModelProto) -> None:
    """That there are operators of ONNX Runtime's, where a file does not say so (NNCF's): ONNX infers no shapes then."""
    declared = {opset.domain for opset in proto.opset_import}
    if onnx_contributed.DOMAIN not in declared and any(
        node.domain == onnx_contributed.DOMAIN for node in proto.graph.node
    ):
        proto.opset_import.append(onnx.helper.make_opsetid(onnx_contributed.DOMAIN, 1))


def _check_header(proto: onnx.ModelProto, path: Path) -> None:
    """What the importer would take without a word."""
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            raise ModelError(f"{path} has operator set {opset.version}; known are those up to {newest}.")
    names = Counter(value.name for value in proto.graph.input)
    if double := sorted(name for name, count in names.items() if count > 1):
        raise ModelError(f"{path} has several inputs of one name: {', '.join(double)}.")
    graph = proto.graph
    made = {value.name for value in (*graph.input, *graph.initializer)}
    made |= {tensor.values.name for tensor in graph.sparse_initializer} | {""}  # an input that is left out has no name
    for node in graph.node:
        if missing := [name for name in node.input if name not in made]:
            raise ModelError(
                f"{path} is damaged: {node.op_type} {node.name!r} reads {missing[0]!r}, which nothing before it makes."
            )
        made.update(node.output)


def _leave_true_inputs(graph: onnx.GraphProto) -> None:
    """Old files list the weights among the inputs."""
    weights = {tensor.name for tensor in graph.initializer}
    true_inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(true_inputs)


def _settle_shapes(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Give every input a static shape."""
    names = {value.name for value in graph.input}
    dims = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    open_dims = {name for dim in dims for name in (_formula_of(dim) or {dim})}
    for name, shape in shapes.items():
        if name not in names | open_dims or (name not in names and len(shape) != 1):
            raise ModelError(
                f"--shape {name}={','.join(map(str, shape))}: {path} has the inputs {', '.join(sorted(names))}"
                + (f" and the open dimensions {', '.join(sorted(open_dims))} (one extent each)." if open_dims else ".")
            )
    for value in graph.input:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") and value.name not in shapes:
            raise ModelError(
                f"{path}: input {value.name!r} has no shape. Give it one: --shape {value.name}=EXTENT,EXTENT,..."
            )
    left_open = {value.name: found for value in graph.input if (found := _settle(value, shapes, path))}
    if left_open:
        told = ", ".join(f"{name} ({', '.join(found)})" for name, found in left_open.items())
        words = dict.fromkeys(word for name, found in left_open.items() for word in _to_type(name, found, shapes))
        raise ModelError(
            f"{path} leaves dimensions open: {told}. Say which to tune for: --shape '{' '.join(words)}' with numbers."
        )


def _to_type(name: str, dims: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What of `--shape` would settle an input: its dimensions by their names, or all of them where one has none."""
    if "?" in dims:
        return [f"{name}={','.join(str(_extent(dim, shapes) or 'N') for dim in dims)}"]
    unknown = [dim for dim in dims if not _extent(dim, shapes)]
    return [f"{each}=N" for dim in unknown for each in sorted(_formula_of(dim) or {dim}) if each not in shapes]


def _settle(value: onnx.ValueInfoProto, shapes: Mapping[str, tuple[int, ...]], path: Path) -> list[str]:
    """Give an input a static shape; returns its dimensions if they are not known."""
    tensor = value.type.tensor_type
    found = [dim.dim_param or "?" if not dim.HasField("dim_value") else str(dim.dim_value) for dim in tensor.shape.dim]
    given = shapes.get(value.name)
    if given is None:
        given = tuple(_extent(dim, shapes) for dim in found)
    elif tensor.HasField("shape") and (
        len(given) != len(found) or any(d.isdigit() and int(d) not in (0, n) for d, n in zip(found, given, strict=True))
    ):
        raise ModelError(
            f"--shape {value.name}={','.join(map(str, given))}: the file {path} has ({', '.join(found)}) there."
        )
    if 0 in given and not any(dim == "?" or not dim.isdigit() for dim in found):
        raise ModelError(
            f"{path}: input {value.name!r} has the shape ({', '.join(found)}): no elements, nothing to tune."
        )
    if not all(given):
        return found
    del tensor.shape.dim[:]
    tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=extent) for extent in given)
    return []


def _formula_of(dim: str) -> set[str]:
    """Names that a dimension is computed of; none if it is one itself."""
    try:
        formula = ast.parse(dim, mode="eval").body
    except SyntaxError:
        return set()
    return {each.id for each in ast.walk(formula) if isinstance(each, ast.Name)} - {dim}


def _extent(dim: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What a dimension is, by what was said of it, or of those that it is computed of (`past + sequence`), as exporters
    write it; 0 if that is not known."""
    if dim in shapes:
        return shapes[dim][0]
    try:
        return max(0, _computed(ast.parse(dim, mode="eval").body, shapes))
    except (SyntaxError, LookupError, ZeroDivisionError):
        return 0


def _computed(formula: ast.expr, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Raises: LookupError: It has something else than whole numbers, names that are known, and four operators."""
    if isinstance(formula, ast.Constant) and isinstance(formula.value, int):
        return formula.value
    if isinstance(formula, ast.Name):
        return shapes[formula.id][0]
    if isinstance(formula, ast.BinOp):
        return _ARITHMETIC[type(formula.op)](_computed(formula.left, shapes), _computed(formula.right, shapes))
    raise LookupError(ast.dump(formula))


@contextlib.contextmanager
def _pairwise() -> Iterator[None]:
    """Max and Min two by two, as TVM imports them where it knows no shapes; else it stacks all of them, and its
    ConvertLayout fails on that."""
    kinds = (onnx_frontend.Max, onnx_frontend.Min)
    before = [vars(kind).get("_impl_v1") for kind in kinds]
    for kind in kinds:
        kind._impl_v1 = classmethod(lambda cls, bb, inputs, attr, params: cls._impl_dynamic(bb, inputs))
    try:
        yield
    finally:
        for kind, own in zip(kinds, before, strict=True):
            if own is None:
                del kind._impl_v1
            else:
                kind._impl_v1 = own


class _Einsum(Converter):
    """As Relax's operator, which rules read (`lib.graph.rules.products`); TVM makes a loop nest of it."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        return builder.emit(relax.op.einsum(tuple(inputs), given["equation"].decode("utf-8")))


class _CumProd(Converter):
    """Of ONNX 26; TVM's importer has sums alone."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        made, axis = inputs[0], int(inputs[1].value.numpy().item())
        is_reverse, is_exclusive = (bool(given.get(name, 0)) for name in ("reverse", "exclusive"))
        if is_reverse:
            made = builder.emit(relax.op.flip(made, axis))
        made = builder.emit(relax.op.cumprod(made, axis, exclusive=is_exclusive))
        return builder.emit(relax.op.flip(made, axis)) if is_reverse else made


CONVERTERS = {
    **onnx_layers.CONVERTERS, **onnx_quantized.CONVERTERS, **onnx_few_bits.CONVERTERS, **onnx_experts.CONVERTERS,
    **onnx_float8.CONVERTERS, "CumProd": _CumProd, "Einsum": _Einsum,
}  # fmt: skip


@contextlib.contextmanager
def _more_operators() -> Iterator[None]:
    """With converters for the recurrent layers that were not taken apart, of which TVM has none, for bytes, for
    einsums and for running products."""
    own = onnx_frontend._get_convert_map
    onnx_frontend._get_convert_map = lambda: {**own(), **CONVERTERS}
    try:
        yield
    finally:
        onnx_frontend._get_convert_map = own


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Without onnx's checker, which the importer asks first: of what it finds there would be a warning, since it knows
    no operators but its own, and it copies all weights twice."""
    own = onnx.checker.check_model
    onnx.checker.check_model = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        onnx.checker.check_model = own


_OPERATOR = re.compile(r"^In ir\.Op\(.*?support_level=\d+\), ")  # with all that TVM knows of it


def _convert(proto: onnx.ModelProto, path: Path) -> tvm.IRModule:
    told = io.StringIO()  # the importer prints what it raises next
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(told):
            warnings.simplefilter("ignore")
            with _pairwise(), _more_operators(), _unchecked():
                return from_onnx(proto)
    except OpNotImplemented as error:
        operators = str(error).rpartition(": ")[2].strip()
        raise ModelError(f"{path} uses operators that cannot be imported: {operators}.") from error
    except Exception as error:  # the importer raises whatever its converters meet
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, LookupError):
            reason = [f"it lacks {reason[-1]}"]
        operator = told.getvalue().partition("Error converting operator ")[2].partition(",")[0]
        where = f" (operator {operator})" if operator else ""
        told_of_shapes = "broadcastable" in reason[-1] or "shape" in reason[-1]
        hint = " Inputs whose shapes do not fit each other end so: see --shape." if told_of_shapes else ""
        raise ModelError(f"{path} cannot be imported{where}: {_OPERATOR.sub('', reason[-1])}{hint}") from error
