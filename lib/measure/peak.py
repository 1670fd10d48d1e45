"""What a CPU can do at most: a program of nothing but one instruction on registers, timed like any candidate."""

import tvm

from lib.machine.dots import Dot
from lib.machine.registers import registers
from lib.machine.targets import AnyTarget, CpuTarget
from lib.measure.runner import Pool
from lib.tir.dot import MARK
from lib.tir.traces import EMPTY_TRACE

_STEPS = 1 << 16  # a fifth of a millisecond: what starting the threads takes does not show
_REPEATS = 5

# Each thread has enough independent sums that the units for multiply-adds never wait for a result.
_SOURCE = """
@T.prim_func(s_tir=True)
def main({params}, y: T.Buffer(({threads}, {sums}, {lanes}), "{kind}")):
    for thread in T.parallel({threads}):
        with T.sblock("sums"):
            t = T.axis.spatial({threads}, thread)
            T.reads({reads})
            T.writes(y[t, 0:{sums}, 0:{lanes}])
            held = T.sblock_alloc_buffer(({sums}, {lanes}), "{kind}", scope="local")
            for n in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    held[n, lane] = {first}
            for _ in range({steps}):
                for n in T.unroll({sums}):
{step}
            for n in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    y[t, n, lane] = held[n, lane]
"""
_FLOATS = {
    "params": 'x: T.Buffer(({threads}, {lanes}), "float32")',
    "reads": "x[t, 0:{lanes}]",
    "first": "x[t, lane]",
    "step": """
                    for lane in T.vectorized({lanes}):
                        held[n, lane] = held[n, lane] * x[t, lane] + x[t, lane]
""",
}
_DOTS = {
    "params": 'x: T.Buffer(({threads}, {depth}), "{data}"), w: T.Buffer(({threads}, {lanes}, {depth}), "{weights}")',
    "reads": "x[t, 0:{depth}], w[t, 0:{lanes}, 0:{depth}]",
    "first": "T.{kind}(0)",
    "step": """
                    for lane in T.serial({lanes}, annotations={{"{mark}": "{name}"}}):
                        for product in T.unroll({depth}):
                            with T.sblock("add"):
                                a, b = T.axis.remap("SS", [n, lane])
                                k = T.axis.reduce({depth}, product)
                                held[a, b] = held[a, b] + T.Cast("{kind}", x[t, k]) * T.Cast("{kind}", w[t, b, k])
""",
}


def flops(target: AnyTarget, pool: Pool, dot: Dot | None = None) -> float | None:
    """FLOP/s of float32 that a device reaches with the target's threads, or of an instruction for narrower elements;
    None where that cannot be told: on GPUs, and where the program fails.
    """
    if not isinstance(target, CpuTarget):
        return None
    workload, flop = loop(target.tvm(), target.threads, dot)
    [latencies], _ = pool.compare(tvm.ir.save_json(workload), [EMPTY_TRACE], _REPEATS, baseline=None)
    return flop / min(latencies) if latencies else None


def loop(target: tvm.target.Target, threads: int, dot: Dot | None = None) -> tuple[tvm.IRModule, int]:
    """The program for a CPU, and the FLOP of a run."""
    machine = registers(target)
    sums, lanes = machine.count * 3 // 4, machine.lanes
    program = tvm.IRModule({"main": tvm.script.from_source(source(threads, lanes, sums, _STEPS, dot))})
    return program, 2 * (dot.depth if dot else 1) * threads * sums * lanes * _STEPS


def source(threads: int, lanes: int, sums: int, steps: int, dot: Dot | None = None) -> str:
    """The program, as TVMScript: so many sums in each thread, each of a vector."""
    sizes: dict[str, object] = {"threads": threads, "lanes": lanes, "sums": sums, "steps": steps, "kind": "float32"}
    parts = _FLOATS
    if dot:
        parts = _DOTS
        sizes |= {"depth": dot.depth, "data": dot.data, "weights": dot.weights, "name": dot.name, "mark": MARK,
                  "kind": dot.sums}  # fmt: skip
    filled = {name: part.format(**sizes).strip("\n") for name, part in parts.items()}
    return _SOURCE.format(**sizes, **filled)
