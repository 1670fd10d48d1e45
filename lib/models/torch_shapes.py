"""Open dimensions of exported programs, and what a user says they are.

torch keeps no names of dimensions in a file. It has symbols for them (`s77`), and inputs say where these stand; a
dimension may also be computed of a symbol (`2*s77`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.contracts.errors import ModelError
from lib.models.torch_graph import inputs

_ASSUMED = 2  # of what may be of any extent, torch says it is not less, and takes one as well


def settle(torch: ModuleType, program: Any, shapes: Mapping[str, Sequence[int]], path: Path) -> bool:
    """Give inputs the shapes that are asked for, in place. What is computed of them follows when it is decomposed.

    Args:
        shapes: Of inputs by name, or extents (one number) of dimensions by their symbols.

    Returns:
        Whether any dimension was open.

    Raises:
        ModelError: `shapes` says nothing of a dimension, contradicts the file, or names what is not there.
    """
    tensors = {node: value for node, value in inputs(torch, program) if isinstance(value, torch.Tensor)}
    open_shapes = {node: expressions(torch, value) for node, value in tensors.items()}
    symbols = {
        str(symbol): symbol
        for shape in open_shapes.values()
        for extent in shape
        if not isinstance(extent, int)
        for symbol in extent.free_symbols
    }
    _check_names(shapes, {node.name for node in tensors}, set(symbols), path)
    known = {symbols[name]: extents[0] for name, extents in shapes.items() if name in symbols and len(extents) == 1}
    for node, shape in open_shapes.items():
        if node.name in shapes:
            _solve(node.name, shape, shapes[node.name], known, path)
    for node, shape in open_shapes.items():
        settled = [extent if isinstance(extent, int) else extent.subs(known) for extent in shape]
        _check_settled(node.name, shape, settled, shapes, path)
        if settled != shape:
            node.meta["val"] = _static(torch, tensors[node], settled)
    _check_limits(program, known, path)
    return bool(symbols)


def expressions(torch: ModuleType, value: Any) -> list[Any]:
    """Extents: integers, or of SymPy."""
    return [extent.node.expr if isinstance(extent, torch.SymInt) else int(extent) for extent in value.shape]


def _static(torch: ModuleType, value: Any, settled: Sequence[Any]) -> Any:
    """What stands for a tensor of this shape.

    Of a file that it read, torch 2.13 also has the ranges of what is computed of symbols, takes it for symbols when a
    program is decomposed, and fails: these go.
    """
    ranges = value.fake_mode.shape_env.var_to_range
    for computed in [each for each in ranges if not each.is_Symbol]:
        del ranges[computed]
    empty = torch.empty([int(extent) for extent in settled], dtype=value.dtype)
    return value.fake_mode.from_tensor(empty, static_shapes=True)


def _check_names(shapes: Mapping[str, Sequence[int]], inputs: set[str], symbols: set[str], path: Path) -> None:
    for name in shapes:
        if name not in inputs | symbols:
            raise ModelError(
                f"--shape: {path} has no input and no open dimension {name!r}. Inputs are {', '.join(sorted(inputs))}; "
                f"open are {', '.join(sorted(symbols)) or 'none'}."
            )
        if name in symbols and len(shapes[name]) != 1:
            raise ModelError(f"--shape: {name} of {path} is one dimension, but got {_written(shapes[name])}.")


def _solve(name: str, shape: Sequence[Any], asked: Sequence[int], known: dict[Any, int], path: Path) -> None:
    """Learn what symbols are from an input's shape."""
    import sympy

    if len(asked) != len(shape):
        raise ModelError(f"--shape: input {name!r} of {path} has the shape ({_written(shape)}), not {_written(asked)}.")
    for extent, wanted in zip(shape, asked, strict=True):
        rest = sympy.sympify(extent).subs(known)
        if len(rest.free_symbols) == 1:
            [symbol] = rest.free_symbols
            found = [each for each in sympy.solve(rest - wanted, symbol) if each.is_Integer and each > 0]
            if found:
                known[symbol] = int(found[0])
            rest = rest.subs(known) if found else sympy.nan
        if rest.is_number and rest != wanted:
            raise ModelError(
                f"--shape: input {name!r} of {path} has the shape ({_written(shape)}), where {_written(asked)} does "
                f"not fit: {wanted} is not {extent}{f' = {rest}' if rest.is_Integer and rest != extent else ''}."
            )


def _check_settled(
    name: str, shape: Sequence[Any], settled: Sequence[Any], shapes: Mapping[str, Sequence[int]], path: Path
) -> None:
    missing = [n for n, extent in enumerate(settled) if not getattr(extent, "is_number", True)]
    if missing:
        raise ModelError(
            f"{path}: input {name!r} has the dynamic shape ({_written(shape)}): dimension {missing[0]} is not fixed. "
            f"Say what it is, by --shape '{name}=...' for all of its dimensions, or '{settled[missing[0]]}=...' (or "
            f"'{settled[missing[0]]}=1..512', a range); or export the model without `dynamic_shapes`, on inputs of the "
            "size to tune for."
        )
    if name in shapes and [int(extent) for extent in settled] != list(shapes[name]):
        raise ModelError(
            f"--shape: input {name!r} of {path} cannot have the shape {_written(shapes[name])}: other inputs make it "
            f"{_written(settled)}."
        )


def _check_limits(program: Any, known: Mapping[Any, int], path: Path) -> None:
    """Within what the export was told, or found."""
    for symbol, limits in program.range_constraints.items():
        least, extent = 1 if limits.lower <= _ASSUMED else limits.lower, known.get(symbol)
        if extent is not None and not least <= extent <= limits.upper:
            raise ModelError(
                f"--shape: {path} was exported for {symbol} from {least} to {limits.upper}, which {extent} is not."
            )


def _written(shape: Sequence[Any]) -> str:
    return ", ".join(map(str, shape))
