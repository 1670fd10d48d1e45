"""Spaces as MetaSchedule takes them: their rules and postprocessors."""

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
from tvm.target import Target

from lib.search.spaces.space import SketchRule, Space


def generator(space: Space, workload: tvm.IRModule, target: Target) -> PostOrderApply:
    """MetaSchedule's generator for a space that fits a workload."""
    rules = [ms.schedule_rule.InlineConstantScalars()]
    if space.inlines:
        rules.append(_auto_inline())
    postprocs = [ms.postproc.DisallowDynamicLoop()]
    if space.packs_weights(workload, target):
        postprocs.append(ms.postproc.RewriteLayout())
    return PostOrderApply(sch_rules=[*rules, SketchRule(space.sketches)], postprocs=postprocs, mutator_probs={})


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
