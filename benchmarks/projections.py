"""Query, key and value projections: merged into one product, or apart with heads split by the products themselves.

    python benchmarks/projections.py [--candidates 64] [--turns 9]

Both graphs turn (1, n, d) into queries, keys and values of shape (1, h, n, s), for the sizes of BERT-Base, BERT-Large
and ViT-Huge. *merged*: one product with the weights side by side, then for each of the three a slice, reshape and
transpose, fused into one copy. *apart*: three products whose results lie as (1, h, n, s) at once. Every subgraph gets
the best of equally many sampled schedules; weights are packed on both sides; the two libraries are timed alternately in
this process. Nothing else may run on the machine meanwhile.
"""

import argparse
import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from lib import deploy, packing
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.measure.local_pool import LocalPool
from lib.measure.runner import MeasureConfig
from lib.search import evolution
from lib.tir.workload import load_module

CPU = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(CPU.threads)

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

SIZES = {"BERT-Base": (128, 768, 12), "BERT-Large": (128, 1024, 16), "ViT-Huge": (257, 1280, 16)}


def merged(tokens: int, width: int, heads: int) -> tvm.IRModule:
    """One product, three copies."""
    x, weight, bias = _vars({"x": (1, tokens, width), "weight": (width, 3 * width), "bias": (3 * width,)})

    def emit(builder: relax.BlockBuilder) -> list[relax.Var]:
        whole = builder.emit(op.add(op.matmul(x, weight), bias))
        parts = []
        for n in range(3):
            part = builder.emit(op.strided_slice(whole, [2], [n * width], [(n + 1) * width], [1]))
            split = builder.emit(op.reshape(part, (1, tokens, heads, width // heads)))
            parts.append(builder.emit(op.permute_dims(split, [0, 2, 1, 3])))
        return parts

    return _module([x, weight, bias], emit)


def apart(tokens: int, width: int, heads: int) -> tvm.IRModule:
    """Three products with results by head."""
    size = width // heads
    [x] = _vars({"x": (1, tokens, width)})
    weights = _vars({f"weight{n}": (width, heads, size) for n in range(3)})
    biases = _vars({f"bias{n}": (heads, 1, size) for n in range(3)})

    def emit(builder: relax.BlockBuilder) -> list[relax.Var]:
        return [
            builder.emit(op.add(op.einsum((x, weight), "bnd,dhs->bhns"), bias))
            for weight, bias in zip(weights, biases, strict=True)
        ]

    return _module([x, *weights, *biases], emit)


def _vars(shapes: dict[str, tuple[int, ...]]) -> list[relax.Var]:
    return [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]


def _module(params: list[relax.Var], emit) -> tvm.IRModule:  # type: ignore[no-untyped-def]
    builder = relax.BlockBuilder()
    with builder.function(fusion.ENTRY, params, attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple(emit(builder)))
        builder.emit_func_output(out)
    return fusion.fuse(builder.get(), CPU.tvm())


def compiled(module: tvm.IRModule, pool: LocalPool, candidates: int, out: Path) -> tuple[str, relax.VirtualMachine]:
    """What its subgraphs take, in words, and the library with the best sampled schedule of each."""
    traces: dict[str, str] = {}
    times = []
    for subgraph in extract_subgraphs(module):
        workload = load_module(subgraph.workload)
        programs = evolution.sample(workload, CPU.tvm(), candidates, known=set(), seed=0)
        latencies, _ = pool.compare(subgraph.workload, [p.trace for p in programs], 3, baseline=programs[0].trace)
        best, trace = min((median(of), p.trace) for of, p in zip(latencies, programs, strict=True) if of)
        traces |= dict.fromkeys(subgraph.functions, trace)
        times.append(f"{subgraph.weight} x {best * 1e6:.0f}")
    pool.close()
    deploy.build(module, traces, CPU.tvm(), out, out.with_suffix(".json"))
    return " + ".join(times), relax.VirtualMachine(tvm.runtime.load_module(str(out)), tvm.cpu())


def arguments(module: tvm.IRModule, packs: Path) -> list[tvm.runtime.Tensor]:
    """The input and the packed weights, at random."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal([int(n) for n in p.ty.shape.values], dtype=np.float32) / math.sqrt(768)
        for p in module[fusion.ENTRY].params
    ]
    weights = {str(n): array for n, array in enumerate(arrays[1:])}
    [packed] = packing.pack([load_module(packs.read_text())], [weights], CPU.tvm())
    return [tvm.runtime.tensor(array) for array in (arrays[0], *packed)]


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    print("| size | merged, us | apart, us | merged / apart | subgraphs of merged, us | of apart, us |")
    print("|---|---|---|---|---|---|")
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            pool = LocalPool(CPU, MeasureConfig())
            modules = {"merged": merged(*size), "apart": apart(*size)}
            times, timers = {}, {}
            for side, module in modules.items():
                library = Path(folder) / f"{side}.so"
                times[side], machine = compiled(module, pool, options.candidates, library)
                given = arguments(module, library.with_suffix(".json"))
                timers[side] = (machine.time_evaluator("main", tvm.cpu(), number=20, repeat=5), given)
            found: dict[str, list[float]] = {side: [] for side in timers}
            for _ in range(options.turns):
                for side, (evaluate, given) in timers.items():
                    time.sleep(0.1)
                    found[side].append(float(evaluate(*given).median) * 1e6)
        a, b = (median(found[side]) for side in ("merged", "apart"))
        spread = {side: f"{min(of):.0f} to {max(of):.0f}" for side, of in found.items()}
        print(
            f"| {name} | {a:.0f} ({spread['merged']}) | {b:.0f} ({spread['apart']}) | {a / b:.2f} | {times['merged']} "
            f"| {times['apart']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
