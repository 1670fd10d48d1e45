"""What a CPU can do at most: a program of nothing but one instruction on registers, timed like any candidate."""

from textwrap import indent

import tvm

from lib.machine.dots import Dot, Matrix
from lib.machine.registers import Registers, registers
from lib.machine.targets import AnyTarget, CpuTarget
from lib.measure.runner import Pool
from lib.tir import matrix, small_weights
from lib.tir.dot import MARK, TOGETHER
from lib.tir.traces import EMPTY_TRACE

_STEPS = 1 << 16  # a fifth of a millisecond: what starting the threads takes does not show
_REPEATS = 5
# Words of data that a loop reads in turn, and by how many a vector of weights is multiplied, where another instruction
# adds products: the compiler would compute equal ones once, and those that stay the same before the loop.
_WORDS, _BY_VECTOR = 64, 4
_VECTORS = 2  # of a tile of matrices; it has as many registers of rows

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
            for step in range({steps}):
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
    "params": 'x: T.Buffer(({threads}, {words}, {depth}), "{data}"), '
    'w: T.Buffer(({threads}, {vectors}, {lanes}, {depth}), "{weights}")',
    "reads": "x[t, 0:{words}, 0:{depth}], w[t, 0:{vectors}, 0:{lanes}, 0:{depth}]",
    "first": "T.{kind}(0)",
    "step": """
                    for lane in T.serial({lanes}, annotations={{"{mark}": "{name}"}}):
                        for product in T.unroll({depth}):
                            with T.sblock("add"):
                                T.sblock_attr({{"{small}": {together}}})
                                a, b = T.axis.remap("SS", [n, lane])
                                m, v = T.axis.spatial({words}, {word}), T.axis.spatial({vectors}, {vector})
                                k = T.axis.reduce({depth}, product)
                                held[a, b] = held[a, b] + T.Cast("{kind}", x[t, m, k]) * T.Cast(
                                    "{kind}", w[t, v, b, k])
""",
}


# Around the loop over lanes, where words are added together.
_TOGETHER = """\
                    for both in T.serial({together}, annotations={{"{mark}": 1}}):
"""
# A tile of as many sums as there are registers for.
_OF_MATRICES = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer(({threads}, {rows}, {steps}, {depth}), "{data}"),
         w: T.Buffer(({threads}, {steps}, {columns}, {depth}), "{weights}"),
         y: T.Buffer(({threads}, {rows}, {columns}), "{kind}")):
    for thread in T.parallel({threads}):
        with T.sblock("sums"):
            t = T.axis.spatial({threads}, thread)
            T.reads(x[t, 0:{rows}, 0:{steps}, 0:{depth}], w[t, 0:{steps}, 0:{columns}, 0:{depth}])
            T.writes(y[t, 0:{rows}, 0:{columns}])
            held = T.sblock_alloc_buffer(({rows}, {columns}), "{kind}", scope="local")
            for vector in T.serial({vectors}, annotations={{"{mark}": "{name}"}}):
                for row in T.serial({rows}):
                    for lane in T.vectorized({lanes}):
                        held[row, vector * {lanes} + lane] = T.{kind}(0)
            for vector in T.serial({vectors}):
                for _ in range({turns}):
                    for step in T.serial({steps}, annotations={{"{mark}": "{name}"}}):
                        for row in T.serial({rows}):
                            for lane in T.serial({lanes}, annotations={{"{dot_mark}": "{dot}"}}):
                                for product in T.unroll({depth}):
                                    with T.sblock("add"):
                                        a = T.axis.spatial({rows}, row)
                                        b = T.axis.spatial({columns}, vector * {lanes} + lane)
                                        k, p = T.axis.remap("RR", [step, product])
                                        held[a, b] = held[a, b] + T.Cast("{kind}", x[t, a, k, p]) * T.Cast(
                                            "{kind}", w[t, k, b, p])
            for row in T.serial({rows}):
                for column in T.vectorized({columns}):
                    y[t, row, column] = held[row, column]
"""


def flops(target: AnyTarget, pool: Pool, instruction: Dot | Matrix | None = None) -> float | None:
    """FLOP/s of float32 that a device reaches with the target's threads, or of an instruction for narrower elements;
    None where that cannot be told: on GPUs, and where the program fails.
    """
    if not isinstance(target, CpuTarget):
        return None
    workload, flop = loop(target.tvm(), target.threads, instruction)
    [latencies], _ = pool.compare(tvm.ir.save_json(workload), [EMPTY_TRACE], _REPEATS, baseline=None)
    return flop / min(latencies) if latencies else None


def loop(target: tvm.target.Target, threads: int, instruction: Dot | Matrix | None = None) -> tuple[tvm.IRModule, int]:
    """The program for a CPU, and the FLOP of a run."""
    if isinstance(instruction, Matrix):
        rows, columns, products = _VECTORS * instruction.ROWS, _VECTORS * instruction.LANES, instruction.dot.depth
        text, turns = source_of_matrices(threads, instruction), _STEPS // instruction.STEPS
        flop = 2 * threads * rows * columns * instruction.STEPS * products * turns
        return tvm.IRModule({"main": tvm.script.from_source(text)}), flop
    machine = registers(target)
    sums, lanes = _sums(machine, instruction), machine.lanes
    program = tvm.IRModule({"main": tvm.script.from_source(source(threads, lanes, sums, _STEPS, instruction))})
    products = instruction.depth * instruction.words if instruction else 1
    return program, 2 * products * threads * sums * lanes * _STEPS


def source(threads: int, lanes: int, sums: int, steps: int, dot: Dot | None = None) -> str:
    """The program, as TVMScript: so many sums in each thread, each of a vector."""
    sizes: dict[str, object] = {"threads": threads, "lanes": lanes, "sums": sums, "steps": steps, "kind": "float32"}
    parts = _FLOATS
    if dot:
        parts = _DOTS
        sizes |= {"depth": dot.depth, "data": dot.data, "weights": dot.weights, "name": dot.name, "mark": MARK,
                  "kind": dot.sums, "small": small_weights.MARK, "together": dot.words}  # fmt: skip
        sizes |= _operands(sums, dot)  # with weights that are called small, which those of `FOR_SMALL` ask for
    filled = {name: part.format(**sizes).strip("\n") for name, part in parts.items()}
    if dot and dot.words > 1:
        filled["step"] = _TOGETHER.format(together=dot.words, mark=TOGETHER) + indent(filled["step"], "    ")
    return _SOURCE.format(**sizes, **filled)


def _sums(machine: Registers, dot: Dot | None) -> int:
    """As many as registers hold; of an instruction that does not add itself, beside weights and data of its words."""
    if dot is None or dot.adds:
        return machine.count * 3 // 4
    return machine.beside(dot, dot.words).count // (dot.words + 1)


def _operands(sums: int, dot: Dot) -> dict[str, object]:
    """How many words of data and vectors of weights there are, and which a sum takes in a step."""
    if dot.adds:
        return {"words": 1, "word": 0, "vectors": 1, "vector": 0}
    words, vectors, together = f"step % {_WORDS} + n % {_BY_VECTOR}", f"n // {_BY_VECTOR}", dot.words
    if together > 1:
        words, vectors = f"{words} + {_BY_VECTOR} * both", f"{vectors} * {together} + both"
    return {
        "words": _WORDS + together * _BY_VECTOR, "word": words,
        "vectors": -(-sums // _BY_VECTOR) * together, "vector": vectors,
    }  # fmt: skip


def source_of_matrices(threads: int, instruction: Matrix) -> str:
    """The same for matrices: a tile of two by two in each thread."""
    of = instruction.dot
    return _OF_MATRICES.format(
        threads=threads, rows=_VECTORS * instruction.ROWS, columns=_VECTORS * instruction.LANES, vectors=_VECTORS,
        lanes=instruction.LANES, steps=instruction.STEPS, turns=_STEPS // instruction.STEPS, depth=of.depth,
        data=of.data, weights=of.weights, kind=of.sums, name=instruction.name, mark=matrix.MARK, dot=of.name,
        dot_mark=MARK,
    )  # fmt: skip
