"""What the benchmarks of single contractions share: their command line, and how a model is cut into subgraphs."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import tvm

from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import Subgraph
from lib.machine.targets import CpuTarget
from lib.models.source import Source
from lib.tir.workload import load_module
from stages import extract


def compare(
    description: str | None,
    target: CpuTarget,
    fits: Callable[[tvm.IRModule], bool],
    programs: Callable[[Subgraph, int], pd.DataFrame],
) -> pd.DataFrame:
    """The rows that `programs` has of each tunable subgraph that fits, of the model and the number of programs that the
    command line names; they are kept as Parquet, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--programs", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True, help="keep each turn as Parquet")
    options = parser.parse_args()
    model = choose_algorithms(extract.load(Source(options.model)), target, AlgorithmConfig())
    _, subgraphs = extract.partition(model, target)
    fitting = [s for s in subgraphs if s.tunable and fits(load_module(s.workload))]
    table = pd.concat([programs(subgraph, options.programs) for subgraph in fitting], ignore_index=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(options.out)
    return table
