"""The programs that a search chooses from: which rules make them, and how one is changed into a neighbour."""

from collections.abc import Iterator, Sequence

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply, SpaceGenerator
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib.spaces import contraction, rows, transposition, window, winograd
from lib.spaces.rule import SketchRule


def generators(workload: tvm.IRModule, target: Target, seed: int) -> Iterator[SpaceGenerator | str]:
    """Spaces for a workload, the first that has programs of it to be taken: ours for what they know, on CPUs, then
    what MetaSchedule has for everything."""
    rules = _rules(workload, target)
    if rules:
        postprocs = [ms.postproc.DisallowDynamicLoop()]
        if contraction.packs_weights(workload, target):
            postprocs.append(ms.postproc.RewriteLayout())
        mutators = {ms.mutator.MutateTileSize(): 0.5, MutateChoice(seed): 0.5}
        rules = [ms.schedule_rule.InlineConstantScalars(), *rules]
        yield PostOrderApply(sch_rules=rules, postprocs=postprocs, mutator_probs=mutators)
    yield "post-order-apply"


def has_choices(sketches: Sequence[Schedule]) -> bool:
    """Whether there is something to choose: a rule that did not get along with a workload left it as it was."""
    return any(sketch.trace.decisions for sketch in sketches)


def _rules(workload: tvm.IRModule, target: Target) -> list[ms.schedule_rule.ScheduleRule]:
    if target.kind.name != "llvm":
        return []
    if winograd.fits(workload):
        return [_auto_inline(), SketchRule(winograd.sketches)]
    if contraction.fits(workload, target):
        return [_auto_inline(), SketchRule(contraction.sketches)]
    if window.fits(workload, target):
        return [_auto_inline(), SketchRule(window.sketches)]
    if rows.fits(workload, target):
        return [SketchRule(rows.sketches)]  # which inlines where that pays
    if transposition.fits(workload, target):
        return [_auto_inline(), SketchRule(transposition.sketches)]
    return []


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
    """Takes another value for one choice among several, which MetaSchedule's mutators leave as it was sampled."""

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
