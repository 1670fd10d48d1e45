"""A space for the convolutions that `lib.graph.fused_layers` makes one function, on CPUs: band by band.

A task has some lines of the results, and computes what these need of the images before: for a part of the channels at a
time the first convolution and, of that, the windows; then the last convolution, if there is one, of all channels.

    parallel (images, lines.0)
        padded data
        channels.0
            first convolution: channels.1, lines, pixels: a register tile
            windows: lines, pixels.0, channels.1, the window (unrolled), pixels.1 (unrolled), vectors (unrolled), lanes
        last convolution: columns, lines, pixels: a register tile

The images between them stay in L2. How many lines a task has, how many channels are computed at a time, and the
register tiles are left to the search.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers, registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.microkernel import tile_in_task
from lib.search.spaces.roles import Roles, contraction_roles, window_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.search.spaces.window import MAX_PIXELS, MAX_UNROLLED, MAX_VECTORS
from lib.tir import analysis
from lib.tir.operators import FUSED_LAYERS, core_operator, operators

_MOST_LINES = 32  # of a task


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether a workload is such a chain, with channels that fill vectors."""
    if core_operator(operators(workload)) != FUSED_LAYERS:
        return False
    reductions = analysis.reductions(workload["main"])
    layers = _layers(reductions)
    return layers is not None and bool(_tiles(reductions, layers, registers(target)))


@dataclass(frozen=True, slots=True)
class _Layers:
    """The roles of the axes of each convolution."""

    first: Roles
    window: Roles
    last: Roles | None


def _layers(reductions: Sequence[tvm.s_tir.SBlock]) -> _Layers | None:
    if len(reductions) not in (2, 3):
        return None
    first, window = contraction_roles(reductions[0]), window_roles(reductions[1])
    last = [contraction_roles(block) for block in reductions[2:]]
    if first is None or window is None or None in last:
        return None
    return _Layers(first, window, last[0] if last else None)


def _tiles(
    reductions: Sequence[tvm.s_tir.SBlock], layers: _Layers, machine: Registers
) -> list[tuple[Tile, Tile | None]]:
    """The register tiles of the first convolution and of the last one."""

    def of(n: int, roles: Roles) -> list[Tile]:
        extents = [int(axis.dom.extent) for axis in reductions[n].iter_vars]
        rows, columns = extents[roles.rows[-1]], extents[roles.columns]
        found = tiling.tiles(rows, columns, machine, remainders=True)
        return [tile for tile in found if columns % (tile.vectors * tile.lanes) == 0]

    first = [tile for tile in of(0, layers.first) if tile.lanes == machine.lanes]
    return list(itertools.product(first, of(2, layers.last) if layers.last else [None]))


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """When the rule comes to the block of the windows: one for each pair of register tiles."""
    blocks = [b for b in primitives.all_blocks(schedule) if schedule.get(b).init is not None]
    layers = _layers([schedule.get(b) for b in blocks])
    if layers is None or not schedule.get(block).same_as(schedule.get(blocks[1])):
        return []
    tiles = _tiles([schedule.get(b) for b in blocks], layers, machine)
    return feasible(schedule, [partial(_sketch, layers, first, last) for first, last in tiles])


@dataclass(frozen=True, slots=True)
class _Layer:
    """A convolution, whose accumulators have the scope `local`, and the block that reads them."""

    sums: SBlockRV
    result: SBlockRV


def _sketch(layers: _Layers, first_tile: Tile, last_tile: Tile | None, schedule: Schedule) -> None:
    pads, (first, window, *last) = _in_layers(schedule)
    task = _in_bands(schedule, (last[0] if last else window).sums)
    if last:
        for block in (window.result, window.sums):
            schedule.compute_at(block, task, preserve_unit_loops=True)
    channels = _slide(schedule, window, layers.window, first_tile)
    for block in (first.result, first.sums):
        schedule.compute_at(block, channels, preserve_unit_loops=True)
    tile_in_task(schedule, first.sums, first.result, first_tile, layers.first)
    for pad in pads:
        primitives.pad(schedule, pad, task)
    if layers.last and last_tile:  # whose loop over images is one with that over tasks
        roles = replace(layers.last, rows=layers.last.rows[1:])
        tile_in_task(schedule, last[0].sums, last[0].result, last_tile, roles)


def _in_layers(schedule: Schedule) -> tuple[list[SBlockRV], list[_Layer]]:
    """What pads the data of the first convolution, and the convolutions, with all that follows one inlined into one
    block."""
    blocks = primitives.all_blocks(schedule)
    starts = [n for n, block in enumerate(blocks) if schedule.get(block).init is not None]
    layers = []
    for start, end in itertools.pairwise([*starts, len(blocks)]):
        sums, *following = blocks[start:end]
        for block in following[:-1]:
            schedule.compute_inline(block)
        if following:
            schedule.set_scope(sums, 0, "local")
        layers.append(_Layer(sums, following[-1] if following else schedule.cache_write(sums, 0, "local")))
    return blocks[: starts[0]], layers


def _in_bands(schedule: Schedule, block: SBlockRV) -> LoopRV:
    """Share out the lines of a convolution; returns the loop over tasks."""
    image, lines, *_ = schedule.get_loops(block)
    counts = [n for n in tiling.divisors(primitives.extent_of(schedule, lines)) if n <= _MOST_LINES]
    lines, _ = schedule.split(lines, [None, primitives.sampled_choice(schedule, counts)])
    task = schedule.fuse(image, lines)
    schedule.parallel(task)
    return task


def _slide(schedule: Schedule, layer: _Layer, roles: Roles, tile: Tile) -> LoopRV:
    """Tile the windows, for some channels at a time, in whole tiles of the convolution before.

    Returns:
        The loop over these channels.
    """
    loops = schedule.get_loops(layer.sums)[-len(schedule.get(layer.sums).iter_vars) :]
    _, lines, row = [loops[n] for n in roles.rows]  # there is one image in a task
    window, lanes = [loops[n] for n in roles.reduction], tile.lanes
    n_tiles = primitives.extent_of(schedule, loops[roles.columns]) // (tile.vectors * lanes)
    at_once = [n * tile.vectors * lanes for n in tiling.divisors(n_tiles)]
    channels, within = schedule.split(loops[roles.columns], [None, primitives.sampled_choice(schedule, at_once)])
    vectors = primitives.sampled_choice(schedule, [n for n in tiling.divisors(tile.vectors) if n <= MAX_VECTORS])
    within, vector, lane = schedule.split(within, [None, vectors, lanes])
    pixels = [n for n in tiling.divisors(primitives.extent_of(schedule, row)) if n <= MAX_PIXELS]
    row, pixel = schedule.split(row, [None, primitives.sampled_choice(schedule, pixels)])
    schedule.reorder(channels, lines, row, within, *window, pixel, vector, lane)
    schedule.vectorize(lane)
    is_small = math.prod(primitives.extent_of(schedule, loop) for loop in window) <= MAX_UNROLLED
    for loop in (*(window if is_small else ()), pixel, vector):
        schedule.unroll(loop)
    schedule.reverse_compute_at(layer.result, within, preserve_unit_loops=True)
    primitives.vectorize_last(schedule, layer.result, lanes)
    primitives.set_to_zero(schedule, schedule.decompose_reduction(layer.sums, window[0]), n_loops=3)
    return channels
