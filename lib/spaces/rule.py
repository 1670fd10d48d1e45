"""What all spaces share: the schedule rule that asks one for its sketches of a block."""

from collections.abc import Callable, Iterable

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import SBlockRV, ScheduleError

from lib.spaces import tiling
from lib.spaces.tiling import Registers

Sketches = Callable[[Schedule, SBlockRV, Registers], list[Schedule]]
Way = Callable[[Schedule], None]


@derived_object
class SketchRule(ms.schedule_rule.PyScheduleRule):
    """Puts the sketches that a space has for a block in the place of a schedule; leaves blocks alone that get none."""

    def __init__(self, sketches: Sketches) -> None:
        super().__init__()
        self.sketches = sketches
        self.machine = Registers(0, 0)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.machine = tiling.registers(context.target)

    def apply(self, schedule: Schedule, block: SBlockRV) -> list[Schedule]:
        """See `PyScheduleRule.apply`."""
        return self.sketches(schedule, block, self.machine) or [schedule]

    def clone(self) -> "SketchRule":
        """Another one: TVM copies rules for each thread."""
        return SketchRule(self.sketches)


def tried(schedule: Schedule, ways: Iterable[Way]) -> list[Schedule]:
    """A schedule in each of several ways, but for those in which a neighbour would have to move, and cannot."""
    found = []
    for way in ways:
        sketch = schedule.copy()
        try:
            way(sketch)
        except ScheduleError:
            continue
        found.append(sketch)
    return found
