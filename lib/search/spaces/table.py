"""All spaces of this project, in the order in which a workload is offered to them."""

from collections.abc import Sequence
from functools import partial

import tvm
from tvm.target import Target

from lib.search.spaces import (
    attention,
    columns,
    contraction,
    elementwise,
    fused_layers,
    recurrence,
    rows,
    strassen,
    transposition,
    window,
    winograd,
    winograd_1d,
)
from lib.search.spaces.space import Space, never

# Raise it with every change to which programs the spaces have: what was exhausted before is then searched again.
REVISION = 28

SPACES = (
    # Which blocks are inlined is part of the sketches of those that set `inlines`.
    Space("attention", attention.fits, attention.sketches, inlines=False),
    Space("recurrence", recurrence.fits, recurrence.sketches, inlines=False, packs_weights=never),
    Space("winograd", winograd.fits, winograd.sketches),
    Space("winograd_1d", winograd_1d.fits, winograd_1d.sketches),
    Space("strassen", strassen.fits, strassen.sketches),
    Space("fused_layers", fused_layers.fits, fused_layers.sketches, inlines=False),
    contraction.space(),
    Space("window", window.fits, window.sketches, packs_weights=window.packs_weights),
    Space("words", partial(window.fits, words=True), window.sketches, inlines=False),
    Space("rows", rows.fits, rows.sketches, inlines=False),
    Space("columns", columns.fits, columns.sketches),
    Space("transposition", transposition.fits, transposition.sketches),
    Space("elementwise", elementwise.fits, elementwise.sketches, inlines=False),
)


def fitting(workload: tvm.IRModule, target: Target, spaces: Sequence[Space] = SPACES) -> Space | None:
    """The first of some spaces that has programs of a workload; None if there is none, or the target is no CPU."""
    if target.kind.name != "llvm":
        return None
    return next((space for space in spaces if space.fits(workload, target)), None)
