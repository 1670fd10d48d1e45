"""Spaces as MetaSchedule takes them: their rules, postprocessors and mutators."""

from collections.abc import Sequence

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib.search.spaces.space import SketchRule, Space


def generator(space: Space, workload: tvm.IRModule, target: Target, seed: int) -> PostOrderApply:
    """MetaSchedule's generator for a space that fits a workload; `seed` decides how programs are mutated."""
    rules = [ms.schedule_rule.InlineConstantScalars()]
    if space.inlines:
        rules.append(_auto_inline())
    postprocs = [ms.postproc.DisallowDynamicLoop()]
    if space.packs_weights(workload, target):
        postprocs.append(ms.postproc.RewriteLayout())
    mutators = {ms.mutator.MutateTileSize(): 0.5, MutateChoice(seed): 0.5}
    return PostOrderApply(sch_rules=[*rules, SketchRule(space.sketches)], postprocs=postprocs, mutator_probs=mutators)


def has_choices(sketches: Sequence[Schedule]) -> bool:
    """Whether anything is sampled in sketches: a rule that does not apply to a workload leaves it as it was."""
    return any(sketch.trace.decisions for sketch in sketches)


def _auto_inline() -> ms.schedule_rule.AutoInline:
    """As MetaSchedule has it for CPUs."""
    return ms.schedule_rule.AutoInline(
        into_producer=False,
        into_consumer=True,
        inline_const_tensor=True,
        disallow_if_then_else=True,
        require_injective=True,
        require_ordered=True,
        disallow_op=["tirx.exp"],
    )


@derived_object
class MutateChoice(ms.mutator.PyMutator):
    """Changes one categorical decision of a trace; MetaSchedule's own mutators change those of its unroll annotations
    alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.random = np.random.default_rng(seed)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None: ...

    def apply(self, trace: Trace, _: object) -> Trace | None:
        """See `PyMutator.apply`."""
        choices = [
            inst
            for inst in trace.insts
            if inst.kind.name == "SampleCategorical" and len(inst.attrs[0]) > 1 and inst in trace.decisions
        ]
        if not choices:
            return None
        chosen = choices[self.random.integers(len(choices))]
        others = [n for n in range(len(chosen.attrs[0])) if n != int(trace.decisions[chosen])]
        return trace.with_decision(chosen, others[self.random.integers(len(others))], remove_postproc=True)

    def clone(self) -> "MutateChoice":
        """Another one with the same seed: TVM copies mutators for each thread."""
        return MutateChoice(self.seed)
