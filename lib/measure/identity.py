"""Under which conditions this code measures: what each measurement carries, and what a run is named after."""

from lib.contracts.conditions import Conditions
from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.tir import lowering

# Raise it with every change to how programs are timed: inputs, cold weights, warm-up, the clock.
TIMING_REVISION = 1


def conditions(target: AnyTarget, device: str, weights: str = "warm") -> Conditions:
    """The conditions of measurements for a target, as they are made here and now.

    Args:
        device: Kind of device; equal for devices that are equally fast.
        weights: `cold` or `warm`.
    """
    lowered = lowering.standard(target.kind).text
    return Conditions(target.text, target.threads, weights, lowered, TIMING_REVISION, device, host.compilers())
