"""What decisions make of a workload's loops, as numbers: the part of the features that tells its programs apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.machine.dots import AMX_BF16
from lib.search.described import Plain, Workload, log
from lib.search.spaces.roles import Roles
from lib.search.spaces.tiling import cycles

OF_TILE = (
    "tile rows", "tile vectors", "lanes", "unrolled", "accumulators", "registers left", "tile efficiency",
    "rows of a task", "columns of a task", "tiles of a task", "rows are inner", "panel bytes", "task weight bytes",
    "task data bytes", "task result bytes", "task bytes", "reuse of weights", "reuse of data", "row waste",
    "column waste", "slowness",
)  # fmt: skip
OF_PLAIN = (
    "task elements", "steps of a task", "lanes beyond a row", "lanes beyond a run", "rows cut by tasks",
    "tasks cut by rows", "flat", "vector bytes", "vector step in source", "vector step in result",
    "next step in source", "next step in result",
)  # fmt: skip
SLAB = "slab"  # kind of the loop over the parts that a reduction was cut into


@dataclass(slots=True, eq=False)
class Loop:
    """A loop, as far as it is known where it comes from; equal to none but itself."""

    extent: int
    block: str = ""  # that it is around
    axes: tuple[int, ...] = ()  # of that, which it runs over as one, the last fastest
    stride: int = 1  # of them, for each iteration
    kind: str = "serial"
    is_whole: bool = False  # over all of its axes
    parts: tuple["Loop", ...] = ()  # it was fused from

    @property
    def axis(self) -> int | None:
        """The one that it runs over; None if that is not known, or it runs over several."""
        return self.axes[0] if len(self.axes) == 1 else None

    def mark(self, kind: str) -> None:
        """Its kind, and that of its parts."""
        self.kind = kind
        for part in self.parts:
            part.mark(kind)


def single(loops: Sequence[Loop]) -> list[Loop]:
    """The loops of a nest, the outermost first; those that were fused one by one."""
    found: list[Loop] = []
    stack = list(reversed(loops))
    while stack:
        loop = stack.pop()
        if loop.parts:
            stack += reversed(loop.parts)
        else:
            found.append(loop)
    return found


def of_tile(workload: Workload, roles: Roles, nest: Sequence[Loop]) -> dict[str, float]:
    """Of the register tile, of what a task works on, and of how often it reads the same again."""
    extents = workload.extents[workload.main]
    columns = (roles.columns,)

    def product(kind: str, axes: Sequence[int]) -> int:
        return math.prod(loop.extent for loop in nest if loop.kind == kind and loop.axis in axes)

    r, v, lanes = product("unroll", roles.rows), product("unroll", columns), product("vectorize", columns)
    turns, turns_of_columns = product("serial", roles.rows), product("serial", columns)  # of a tile within a task
    longer = [loop for loop in nest if loop.kind == "serial" and loop.extent > 1 and loop.axis not in roles.reduction]
    rows_of_task, columns_of_task = turns * r, turns_of_columns * v * lanes
    slabs = product(SLAB, roles.reduction)
    reduced, channels = math.prod(extents[n] for n in roles.reduction) // slabs, extents[roles.reduction[-1]] // slabs
    sizes = workload.sizes
    data, weights = sizes.data * rows_of_task * channels, sizes.weights * reduced * columns_of_task
    results = sizes.results * rows_of_task * columns_of_task
    width = lanes / max(1, workload.machine.lanes)
    steps = product("steps", roles.reduction)  # of a product of matrices; else there are none
    efficiency = r * v * width / 2 / cycles(r, v, width)
    if any(loop.kind == "steps" for loop in nest):
        rows = [loop.extent for loop in nest if loop.kind == "unroll" and loop.axis == roles.rows[-1]]
        efficiency = _of_matrices(r, rows[-1] if rows else 1, v, steps)
    row_waste = product("parallel", roles.rows) * rows_of_task / math.prod(extents[n] for n in roles.rows)
    column_waste = product("parallel", columns) * columns_of_task / extents[roles.columns]
    return {
        "tile rows": r, "tile vectors": v, "lanes": lanes, "unrolled": log(steps * product("unroll", roles.reduction)),
        "accumulators": r * v, "registers left": workload.machine.count - r * v - v - 1,
        "tile efficiency": efficiency, "slowness": math.log2(row_waste * column_waste / max(efficiency, 1e-3)),
        "rows of a task": log(rows_of_task), "columns of a task": log(columns_of_task),
        "tiles of a task": log(turns * turns_of_columns),
        "rows are inner": float(longer[-1].axis in roles.rows) if longer else math.nan,
        "panel bytes": log(sizes.weights * reduced * v * lanes), "task weight bytes": log(weights),
        "task data bytes": log(data), "task result bytes": log(results), "task bytes": log(data + weights + results),
        "reuse of weights": log(turns), "reuse of data": log(turns_of_columns),
        "row waste": row_waste, "column waste": column_waste,
    }  # fmt: skip


def _of_matrices(rows: int, rows_of_line: int, vectors: int, steps: int) -> float:
    """The share of its peak that an instruction for matrices has with a tile; all of them have equal registers."""
    heights = AMX_BF16.heights(rows_of_line) * (rows // rows_of_line)
    return rows * vectors * steps / AMX_BF16.STEPS / AMX_BF16.cycles(heights, vectors, steps)


def of_plain(workload: Workload, plain: Plain, loops: Sequence[Loop], *, is_main: bool) -> dict[str, float]:
    """Of a program without a register tile: what a task works on, and whether vectors are whole, and contiguous where
    they are read and written.

    Args:
        loops: Around the block that tasks are made of. `is_main`: whether its axes are those of `plain`.
    """
    nest = single(loops)
    inner = [loop for loop in nest if loop.kind != "parallel"]
    vector = next((loop for loop in reversed(nest) if loop.kind == "vectorize"), None)
    lanes = vector.extent if vector else 1
    elements = math.prod(loop.extent for loop in inner)
    reduced = [loop for loop in inner if is_main and loop.axis in plain.reduction]
    written = elements // max(1, math.prod(loop.extent for loop in reduced))
    columns = workload.extents[workload.main][plain.spatial[-1]] if plain.spatial else 1
    unrolled = math.prod(loop.extent for loop in inner if loop.kind == "unroll")
    sizes = workload.sizes
    read, results = sizes.data * elements, sizes.results * written
    found = {
        "lanes": lanes, "unrolled": log(unrolled), "accumulators": unrolled if reduced else math.nan,
        "task elements": log(elements), "steps of a task": log(elements / lanes),
        "lanes beyond a row": log(lanes / math.gcd(lanes, columns)),
        "lanes beyond a run": log(lanes / math.gcd(lanes, plain.run)),
        "rows cut by tasks": log(columns / math.gcd(columns, written)),
        "tasks cut by rows": log(written / math.gcd(columns, written)),
        "flat": float(vector is not None and len(vector.axes) > 1), "vector bytes": log(lanes * sizes.results),
        "task data bytes": log(read), "task result bytes": log(results), "task bytes": log(read + results),
    }  # fmt: skip
    if vector is not None:
        found["slowness"] = math.log2(1 if _is_whole(workload, plain, vector, written) else lanes)
    if is_main:
        following = next((loop for loop in reversed(inner) if loop is not vector and loop.extent > 1), None)
        found |= _steps(plain, "vector", vector) | _steps(plain, "next", following)
    return found


def _is_whole(workload: Workload, plain: Plain, vector: Loop, elements: int) -> bool:
    """Whether elements are likely to be read and written in vectors.

    They are not where a vector crosses the end of a row or of a run. What TVM makes loops of is in vectors again where
    LLVM sees that addresses follow one another. It does not see that if tasks end within rows, as far as TVM keeps
    divisions for these; nor in loops so short that it unrolls them, of elements that fill no register.

    Args:
        elements: Of a task.
    """
    lanes, columns = vector.extent, workload.extents[workload.main][plain.spatial[-1]]
    if plain.is_serial and lanes <= workload.machine.lanes and workload.sizes.results < 4:
        return False
    if len(vector.axes) < 2:
        steps = [tensor.step(vector.axes, vector.stride) for tensor in (plain.source, plain.result) if tensor]
        return plain.run % lanes == 0 or any(abs(step) > 1 for step in steps)  # across rows there are no runs
    within, around = columns % elements == 0, elements % columns == 0  # tasks in rows, rows in tasks
    if columns % lanes:
        return plain.is_one_run and (elements == lanes or not (within or around))
    if plain.is_serial or plain.has_conditions:
        return elements == lanes or around or (plain.is_one_run and not within)
    return True


def _steps(plain: Plain, name: str, loop: Loop | None) -> dict[str, float]:
    """How far an iteration of a loop leads in memory, in elements."""
    if loop is None or not loop.axes:
        return {}
    sides = {"source": plain.source, "result": plain.result}
    return {
        f"{name} step in {side}": log(abs(tensor.step(loop.axes, loop.stride)))
        for side, tensor in sides.items()
        if tensor is not None
    }
