"""What a space of programs is, and the schedule rule that gives MetaSchedule its sketches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import SBlockRV, ScheduleError
from tvm.target import Target

from lib.machine.registers import Registers, registers

Sketches = Callable[[Schedule, SBlockRV, Registers], list[Schedule]]
Transform = Callable[[Schedule], None]


def _always(_workload: tvm.IRModule, _target: Target) -> bool:
    return True


def never(_workload: tvm.IRModule, _target: Target) -> bool:
    """Of no workload."""
    return False


@dataclass(frozen=True, slots=True)
class Space:
    """The programs of one kind of workload: which workloads it takes, and how its sketches are made.

    Attributes:
        name: As in the column `space` of CANDIDATES.
        fits: Whether it has programs of a workload on a CPU target.
        sketches: The schedules of a workload once the rule comes to a block, with the tile sizes left to be sampled;
            empty for blocks that are not the space's to schedule.
        inlines: Whether element-wise blocks are inlined into their consumers before the sketches are made.
        packs_weights: Whether MetaSchedule's RewriteLayout can bring the weights of all programs into their order.
    """

    name: str
    fits: Callable[[tvm.IRModule, Target], bool]
    sketches: Sketches
    inlines: bool = True
    packs_weights: Callable[[tvm.IRModule, Target], bool] = _always


@derived_object
class SketchRule(ms.schedule_rule.PyScheduleRule):
    """Replaces a schedule by the sketches that a space has for a block; blocks without any are left as they are."""

    def __init__(self, sketches: Sketches) -> None:
        super().__init__()
        self.sketches = sketches
        self.registers = Registers(0, 0)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.registers = registers(context.target)

    def apply(self, schedule: Schedule, block: SBlockRV) -> list[Schedule]:
        """See `PyScheduleRule.apply`."""
        return self.sketches(schedule, block, self.registers) or [schedule]

    def clone(self) -> "SketchRule":
        """Another one: TVM copies rules for each thread."""
        return SketchRule(self.sketches)


def feasible(schedule: Schedule, transforms: Iterable[Transform]) -> list[Schedule]:
    """A copy of a schedule for each transform, but for those with a primitive whose preconditions do not hold, say a
    `compute_at` of a block that cannot be moved."""
    found = []
    for transform in transforms:
        sketch = schedule.copy()
        try:
            transform(sketch)
        except ScheduleError:
            continue
        found.append(sketch)
    return found
