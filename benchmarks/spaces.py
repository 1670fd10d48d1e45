"""Random programs of this project's space beside random ones of MetaSchedule's, for what neither multiplies nor rolls.

    python benchmarks/spaces.py [--programs 12] [--only NAME ...]

Reductions over the pixels of an image, as squeeze and excitation has them, and element-wise chains, in the shapes of
RegNet-Y, EfficientNet-B0, Swin-T and ViT-Base. All programs of a workload are built first, then timed in turn, in an
order that is shuffled anew for each of five turns, with weights and data in caches; a program's time is its median.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from lib.machine import host

os.environ["TVM_NUM_THREADS"] = str(host.physical_cores())

import tvm
from tvm import relax
from tvm.relax import op

from lib.machine import targets
from lib.search import evolution
from lib.search.spaces.table import SPACES
from lib.tir import lowering, traces
from tests.helpers import subgraph

_TURNS = 5
Make = Callable[..., relax.Expr]
Shape = tuple[int, ...]


def _mean(_: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return op.mean(x, [1, 2], keepdims=True)


def _quantized(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    rounded = builder.emit(op.round(builder.emit(op.multiply(x, relax.const(30.0)))))
    return op.astype(builder.emit(op.clip(rounded, 0, 255)), "uint8")


def _gelu(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return _quantized(builder, builder.emit(op.nn.gelu(x)))


def _gated(builder: relax.BlockBuilder, gate: relax.Expr, x: relax.Expr) -> relax.Expr:
    return op.multiply(builder.emit(op.sigmoid(gate)), x)


def _sum(_: relax.BlockBuilder, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    return op.add(x, y)


WORKLOADS: dict[str, tuple[Make, Sequence[Shape]]] = {
    "mean of 7x7x888": (_mean, [(1, 7, 7, 888)]),
    "mean of 14x14x336": (_mean, [(1, 14, 14, 336)]),
    "mean of 56x56x48": (_mean, [(1, 56, 56, 48)]),
    "mean of 112x112x32": (_mean, [(1, 112, 112, 32)]),
    "gate of 14x14x336": (_gated, [(1, 1, 1, 336), (1, 14, 14, 336)]),
    "sum of 197x768": (_sum, [(1, 197, 768), (1, 197, 768)]),
    "bytes of 3136x96": (_quantized, [(3136, 96)]),
    "GELU and bytes of 3136x384": (_gelu, [(3136, 384)]),
}


def timed(kernels: list[tvm.runtime.Module], arguments: Sequence[Any]) -> list[float]:
    """Microseconds of each, the median of its turns."""
    order, found = list(range(len(kernels))), [list[float]() for _ in kernels]
    rng = np.random.default_rng(0)
    for _ in range(_TURNS):
        rng.shuffle(order)
        for n in order:
            evaluator = kernels[n].time_evaluator("main", tvm.cpu(), number=1, repeat=1, min_repeat_ms=10)
            found[n].append(1e6 * evaluator(*arguments).mean)
    return [median(each) for each in found]


def main() -> None:
    """Print a row for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=12, help="of each space")
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), help="of the workloads")
    given = parser.parse_args()
    target = targets.cpu_target("host")
    print("| workload | space | programs | best, us | median, us | MetaSchedule's | best, us | median, us |")
    print("|---" * 8 + "|")
    for name, (make, shapes) in WORKLOADS.items():
        if name not in (given.only or WORKLOADS):
            continue
        workload = subgraph(target, make, *shapes)
        out = workload["main"].params[-1].ty
        arrays = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes)]
        arrays.append(np.zeros([int(extent) for extent in out.shape], str(out.dtype)))
        proposals = [
            evolution.sample(workload, target.tvm(), given.programs, known=set(), seed=0, spaces=spaces)
            for spaces in (SPACES, ())
        ]
        kernels = [
            lowering.build(traces.apply(workload, each.trace).mod, target.tvm()) for part in proposals for each in part
        ]
        latencies = timed(kernels, [tvm.runtime.tensor(array) for array in arrays])
        own, stock = latencies[: len(proposals[0])], latencies[len(proposals[0]) :]
        cells = [name, proposals[0][0].space]
        for part in (own, stock):
            cells += [str(len(part)), f"{min(part):.1f}", f"{median(part):.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
