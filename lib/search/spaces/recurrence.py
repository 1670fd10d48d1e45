"""A space for recurrent layers in one program (`lib.tir.recurrence`) on CPUs.

    directions, steps
        units.0, batch.0
            the sums of batch.1 x units.1 in registers, over all units of the step before; what the gates make of them

Each step reads all weights, from the cache that has room for them; so what is to be chosen is how many vectors of units
go side by side, and what is shared out among the cores: directions, which never wait for one another, or the units of
each step, after which all wait, or nothing, where a step is shorter than the waiting.
"""

from functools import partial

import tvm
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from lib.machine.dots import Dot
from lib.machine.registers import Registers, narrowed
from lib.search.spaces import primitives, tiling
from lib.search.spaces.space import feasible
from lib.tir import analysis, dot, parallel
from lib.tir.recurrence import CARRY, FIRST, INNER, LANES, LAST, RESULT, ROUNDED, STATES, SUMS

_DIRECTIONS, _UNITS, _NOTHING = "directions", "units", ""  # what is shared out
_OTHERS = 2  # registers for what is no sum: an element of the states, and a vector of weights
_MOST = 3  # numbers of sequences at a time, to choose from


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a program."""
    names = {str(block.name_hint) for block in analysis.leaf_blocks(workload["main"])}
    return {SUMS, INNER, STATES} <= names


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """When it comes to the new states: for each of what may be shared out, and some numbers of sequences at a time."""
    if str(schedule.get(block).name_hint) != STATES:
        return []
    n_sequences, n_vectors, *_ = (int(axis.dom.extent) for axis in schedule.get(block).iter_vars)
    n_directions = primitives.extent_of(schedule, _directions(schedule))
    shared = [_UNITS, _NOTHING, *([_DIRECTIONS] if n_directions > 1 else [])]
    together = sorted(tiling.divisors(n_sequences), reverse=True)
    fitting = [(rows, vectors) for rows in together if (vectors := _vectors(schedule, machine, rows, n_vectors))]
    tiles = fitting[:_MOST] or [(1, [1])]
    return feasible(
        schedule, [partial(_tiled, machine=machine, tile=tile, shared=each) for tile in tiles for each in shared]
    )


def _directions(schedule: Schedule) -> tvm.s_tir.schedule.LoopRV:
    """The loop over directions, which is around all others."""
    return schedule.get_loops(schedule.get_sblock(FIRST))[0]


def _vectors(schedule: Schedule, machine: Registers, rows: int, n_vectors: int) -> list[int]:
    """How many vectors of units fit into registers, with all their gates, for so many sequences."""
    gates = int(schedule.get(schedule.get_sblock(SUMS)).iter_vars[3].dom.extent)
    each = rows * gates * (LANES // machine.lanes)
    return [n for n in tiling.divisors(n_vectors) if n * each <= machine.count - _OTHERS]


def _tiled(schedule: Schedule, machine: Registers, tile: tuple[int, list[int]], shared: str) -> None:
    rows, vectors = tile
    sums, inner, states = (schedule.get_sblock(name) for name in (SUMS, INNER, STATES))
    sequence, vector, state, lane = schedule.get_loops(states)
    sequences, sequence = schedule.split(sequence, [None, rows])
    units, vector = schedule.split(vector, [None, primitives.sampled_choice(schedule, vectors)])
    schedule.reorder(units, sequences, sequence, vector, state, lane)
    task = schedule.fuse(units, sequences)
    schedule.unroll(state)
    for block in (inner, sums):
        # A trace is replayed with other tiles: how many loops there are must not depend on them.
        schedule.compute_at(block, task, preserve_unit_loops=True)
    _accumulate(schedule, sums, machine)
    names = {str(block.name_hint) for block in analysis.leaf_blocks(schedule.mod["main"])}
    for name in (INNER, STATES, ROUNDED, CARRY, RESULT, FIRST, LAST):
        if name in names:
            block = schedule.get_sblock(name)
            primitives.vectorize_last(schedule, block, narrowed(machine.lanes, primitives.columns_of(schedule, block)))
    # Marks: TVM takes no block within steps for one whose results nothing else in the loop reads.
    if shared:
        schedule.annotate(_directions(schedule) if shared == _DIRECTIONS else task, parallel.MARK, 1)


def _accumulate(schedule: Schedule, sums: SBlockRV, machine: Registers) -> None:
    """The sums of a tile in registers, by an instruction for pairs where the weights are such."""
    row, unit, turn, gate, lane = schedule.get_loops(sums)[-5:]
    part, lane = schedule.split(lane, [None, machine.lanes])
    instruction = _instruction(schedule.get(sums), machine)
    turn, *products = schedule.split(turn, [None, instruction.depth]) if instruction else [turn]
    schedule.reorder(turn, row, unit, gate, part, lane, *products)
    for loop in (row, unit, gate, part, *products):
        schedule.unroll(loop)
    if instruction:
        schedule.annotate(lane, dot.MARK, instruction.name)
    else:
        schedule.vectorize(lane)
    initial = schedule.decompose_reduction(sums, turn)
    if instruction:
        schedule.vectorize(schedule.get_loops(initial)[-1])


def _instruction(block: SBlock, machine: Registers) -> Dot | None:
    """That the elements of the weights are in pairs for."""
    kinds = {str(load.source.dtype) for load in analysis.loaded(analysis.stored(block))}
    return next((found for found in machine.dots if found.weights in kinds), None)
