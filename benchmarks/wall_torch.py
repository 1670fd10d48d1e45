"""torch's operators by its own samples of them, each exported as a `.pt2` file and compared with what torch computes.

    pip install expecttest                                          # which torch's tests read their samples with
    python benchmarks/wall_torch.py --out ROWS.parquet [--only NAME ...] [--jobs 2] [--samples 2] [--dtype int64]

Each is exported, imported, compiled untuned, and run. A row says what came of it: see `wall.VERDICTS`. Left out is what
torch itself does not export, what has no results that are numbers of NumPy, and what draws random numbers.
"""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch
import wall
import wall_serve
from torch import nn
from torch.utils import _pytree

_KINDS = (torch.float32, torch.int64, torch.int32, torch.bool, torch.int8, torch.uint8)
_RANDOM = ("dropout", "bernoulli", "multinomial", "normal", "rand", "uniform", "cauchy", "exponential", "geometric",
           "empty", "fractional_max_pool", "rrelu", "svd_lowrank", "pca_lowrank", "resize", "jiterator")  # fmt: skip


class Applied(nn.Module):
    """An operator with all of its arguments but tensors, which are its inputs."""

    def __init__(self, operator: Callable[..., Any], arguments: tuple[list[Any], dict[str, Any]]) -> None:
        super().__init__()
        leaves, self._spec = _pytree.tree_flatten(arguments)
        self._operator = operator
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The operator's result."""
        leaves = list(self._others)
        for place, given in zip(self._places, inputs, strict=True):
            leaves[place] = given
        arguments, named = _pytree.tree_unflatten(leaves, self._spec)
        made = self._operator(*arguments, **named)
        return tuple(made) if isinstance(made, tuple) else made  # torch writes no tuples with names


def operators(dtype: torch.dtype) -> dict[str, Any]:
    """Of torch's table, those that take elements of a type, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db if dtype in op.dtypes}
    return {name: op for name, op in found.items() if not any(part in name for part in _RANDOM)}


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[Applied, tuple[torch.Tensor, ...]]]:
    """Some of an operator's samples, from the first to the last of them."""
    torch.manual_seed(0)
    every = list(op.sample_inputs("cpu", dtype))
    for sample in islice(every, 0, None, max(1, -(-len(every) // count))):
        arguments = ([sample.input, *sample.args], sample.kwargs)
        inputs = tuple(each for each in _pytree.tree_leaves(arguments) if isinstance(each, torch.Tensor))
        yield Applied(op.op, arguments), inputs


def write(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> tuple[wall.Arrays, wall.Arrays]:
    """Export a model; returns its inputs, and what it makes of them.

    Raises:
        TypeError: torch does not export it, or something of it is no tensor of numbers that NumPy has.
    """
    with torch.no_grad():
        outputs = [each for each in _pytree.tree_leaves(model(*inputs)) if isinstance(each, torch.Tensor)]
    tensors = [*inputs, *outputs]
    if not inputs or not outputs or any(each.dtype not in _KINDS or each.layout != torch.strided for each in tensors):
        raise TypeError("no tensors of numbers")
    try:
        torch.export.save(torch.export.export(model, inputs), path)
    except Exception as error:  # whatever of torch's own
        raise TypeError(f"not exported: {type(error).__name__}") from error
    return [each.numpy() for each in inputs], [each.resolve_conj().numpy() for each in outputs]


def serve(dtype: torch.dtype, count: int) -> None:
    """The process that tries operators, a sample each time."""
    from wall_stages import Stages

    known, stages = operators(dtype), Stages()

    def attempt(name: str) -> wall_serve.Row:
        operator, _, number = name.rpartition("#")
        found = next(islice(samples(known[operator], dtype, count), int(number), None), None)
        if found is None:
            return {"operator": operator, "verdict": "no tensors", "told": "no such sample"}
        return wall.of_operator(operator, "model.pt2", partial(write, *found), stages.untuned)

    wall_serve.serve(attempt)


def main() -> None:
    """Try them, keep a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("wall_torch.parquet"))
    parser.add_argument("--only", nargs="+", help="some of the operators; default: all")
    parser.add_argument("--samples", type=int, default=2, help="of each")
    parser.add_argument("--dtype", default="float32", choices=["float32", "int64", "bool"], help="of their tensors")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=90.0, help="seconds for a sample")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.serve:
        with contextlib.suppress(BrokenPipeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            serve(dtype, options.samples)
        return
    names = [f"{name}#{n}" for name in options.only or operators(dtype) for n in range(options.samples)]
    command = [__file__, "--serve", "--samples", str(options.samples), "--dtype", options.dtype]
    print(wall.summary(wall_serve.rows(command, names, options.jobs, options.deadline, options.out)))


if __name__ == "__main__":
    main()
