"""Traces: the schedule decisions that turn a workload into a program, as JSON."""

import json

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib.machine import intrinsics
from lib.tir import lowering

EMPTY_TRACE = "[[], []]"  # what TVM makes of a workload without a schedule


def program(workload: tvm.IRModule, trace: str, target: Target) -> tvm.IRModule:
    """A workload under a trace; the empty trace stands for what TVM does untuned.

    Raises:
        Exception: Whatever TVM raises when a trace does not fit.
    """
    if trace == EMPTY_TRACE:
        return lowering.scheduled(workload, target)
    if '"Tensorize"' in trace:
        intrinsics.load(target)
    return apply(workload, trace).mod


def apply(workload: tvm.IRModule, trace: str) -> Schedule:
    """Replay a trace, postprocessors included.

    Raises:
        Exception: Whatever TVM raises when a trace does not fit.
    """
    schedule = Schedule(workload, debug_mask="none")
    Trace.apply_json_to_schedule(json.loads(trace), schedule)
    return schedule


def to_json(schedule: Schedule) -> str:
    """The trace of a schedule as JSON."""
    return as_json(schedule.trace)


def as_json(trace: Trace) -> str:
    """A trace as JSON."""
    return json.dumps(trace.as_json(), default=lambda value: value.value)  # TVM's integer and float objects are inside
