"""The programs that a search chooses from: which rules make them, and how one is changed into a neighbour."""

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply, SpaceGenerator
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib.spaces import contraction, window, winograd

_DEFAULT = "post-order-apply"


def generator(workload: tvm.IRModule, target: Target, seed: int) -> SpaceGenerator | str:
    """The rules for a workload: a contraction on a CPU gets register tiles, all else what MetaSchedule has for it."""
    if target.kind.name != "llvm":
        return _DEFAULT
    if winograd.fits(workload):
        rules = [_auto_inline(), winograd.WinogradPasses()]
    elif contraction.fits(workload, target):
        rules = [ms.schedule_rule.InlineConstantScalars(), _auto_inline(), contraction.RegisterTile()]
    elif window.fits(workload, target):
        rules = [ms.schedule_rule.InlineConstantScalars(), _auto_inline(), window.SlidingWindow()]
    else:
        return _DEFAULT
    postprocs = [ms.postproc.DisallowDynamicLoop(), ms.postproc.RewriteLayout()]
    mutators = {ms.mutator.MutateTileSize(): 0.5, MutateChoice(seed): 0.5}
    return PostOrderApply(sch_rules=rules, postprocs=postprocs, mutator_probs=mutators)


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
