"""What a CPU can do at most: a program of nothing but multiply-adds in registers, timed like any candidate."""

import tvm

from lib.machine.registers import registers
from lib.machine.targets import AnyTarget, CpuTarget
from lib.measure.runner import Pool
from lib.tir.traces import EMPTY_TRACE

_STEPS = 1 << 16  # a fifth of a millisecond: what starting the threads takes does not show
_REPEATS = 5

# Each thread has enough independent sums that the units for multiply-adds never wait for a result.
_SOURCE = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer(({threads}, {lanes}), "float32"), y: T.Buffer(({threads}, {sums}, {lanes}), "float32")):
    for thread in T.parallel({threads}):
        with T.sblock("sums"):
            t = T.axis.spatial({threads}, thread)
            T.reads(x[t, 0:{lanes}])
            T.writes(y[t, 0:{sums}, 0:{lanes}])
            held = T.sblock_alloc_buffer(({sums}, {lanes}), scope="local")
            for n in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    held[n, lane] = x[t, lane]
            for _ in range({steps}):
                for n in T.unroll({sums}):
                    for lane in T.vectorized({lanes}):
                        held[n, lane] = held[n, lane] * x[t, lane] + x[t, lane]
            for n in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    y[t, n, lane] = held[n, lane]
"""


def flops(target: AnyTarget, pool: Pool) -> float | None:
    """FLOP/s of float32 that a device reaches with the target's threads; None where that cannot be told: on GPUs, and
    where the program fails.
    """
    if not isinstance(target, CpuTarget):
        return None
    machine = registers(target.tvm())
    sums, lanes = machine.count * 3 // 4, machine.lanes
    source = _SOURCE.format(threads=target.threads, lanes=lanes, sums=sums, steps=_STEPS)
    workload = tvm.IRModule({"main": tvm.script.from_source(source)})
    [latencies], _ = pool.compare(tvm.ir.save_json(workload), [EMPTY_TRACE], _REPEATS, baseline=None)
    return 2 * target.threads * sums * lanes * _STEPS / min(latencies) if latencies else None
