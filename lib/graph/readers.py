"""Which functions of a fused module read which weights."""

from collections import defaultdict

import tvm
from tvm import relax

from lib.graph import concatenation, fusion


def readers(module: tvm.IRModule) -> dict[str, set[str]]:
    """The names of the weights that `main` hands to each TIR function, by the function's name."""
    main = module[fusion.ENTRY]
    weights = {param: str(param.name) for param in main.params[int(main.attrs["num_input"]) :]}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for block in main.body.blocks:
        for binding in block.bindings:
            called = concatenation.called(binding.value) if isinstance(binding, relax.VarBinding) else None
            if called is not None:
                found[str(called[0].name_hint)] |= {weights[each] for each in called[1] if each in weights}
    return dict(found)
