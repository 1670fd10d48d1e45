"""Which operators are computed otherwise than the model has them: with less work, in whole vectors, or in bf16."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

from tvm import relax

from lib.contracts.errors import ConfigError, TargetError
from lib.graph import (
    attention,
    carrying,
    dot_products,
    fused_layers,
    fusion,
    lookups,
    packing,
    pairs,
    pixels,
    precision,
    reweight,
    signed,
    splitting,
    strassen,
    taps,
    widen,
    winograd,
    winograd_1d,
)
from lib.graph.fusion import Model
from lib.machine.dots import BF16, INT8, INT16
from lib.machine.registers import Registers, registers
from lib.machine.targets import AnyTarget

AS_IT_IS, IN_BF16, IN_THREE_BF16, IN_SIX_BF16, IN_INT8 = "model", "bf16", "bf16x3", "bf16x6", "int8"
PRECISIONS = (AS_IT_IS, IN_BF16, IN_THREE_BF16, IN_SIX_BF16, IN_INT8)
MULTIPLY_BF16 = (IN_BF16, IN_THREE_BF16, IN_SIX_BF16)
_PARTS = {IN_THREE_BF16: 2, IN_SIX_BF16: 3}  # of a float


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Each where it should save time (`auto`), or `never`. On CPUs."""

    winograd: str = "auto"  # convolutions of 3x3 to 7x7, and those along one axis, in Winograd's way
    strassen: str = "auto"  # products of floats in Strassen's way
    widen: str = "auto"  # output channels to whole vectors, and of few channels their taps
    fused_layers: str = "auto"  # convolutions that follow one another in one kernel, band by band
    attention: str = "auto"  # in one kernel, where scores stay in caches, or in three, whichever is faster
    # Of what products and convolutions read: as the file has it, which int8 makes one of; bf16; three products of bf16,
    # or six, for each.
    precision: str = AS_IT_IS

    def __post_init__(self) -> None:
        for name in ("winograd", "strassen", "widen", "fused_layers", "attention"):
            if getattr(self, name) not in ("auto", "never"):
                raise ConfigError(f"[extract] {name} must be `auto` or `never`, but got {getattr(self, name)!r}.")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision must be one of {', '.join(PRECISIONS)}, but got {self.precision!r}.")

    @property
    def for_all_shapes(self) -> "AlgorithmConfig":
        """Without what has other weights, or packs them otherwise, in some shapes alone, so that those of a range have
        them in common: whether products in Strassen's way pay is a matter of their rows, and whether convolutions are
        one kernel of their pixels."""
        return replace(self, strassen="never", fused_layers="never")

    @property
    def suffix(self) -> str:
        """Of the name of a model's folder: empty for the defaults, else e.g. `-winograd_never`."""
        return "".join(f"-{name}_{value}" for name, value in asdict(self).items() if value not in ("auto", AS_IT_IS))


def choose_algorithms(model: Model, target: AnyTarget, config: AlgorithmConfig) -> Model:
    """Replace what can be computed otherwise on this kind of target; the same model if there is nothing.

    Raises:
        TargetError: The target has no instructions for this precision.
    """
    is_narrow, parts = config.precision == IN_BF16, _PARTS.get(config.precision, 1)
    if target.kind != "llvm":
        if config.precision in MULTIPLY_BF16:
            raise TargetError(f"--precision {config.precision} is for CPUs; on {target.name} there is no such kernel.")
        return model
    machine = registers(target.tvm())
    matrix = machine.matrix(BF16)
    _require_instructions(config.precision, machine, target.name)
    of_bytes = [dot for dot in machine.dots if dot.weights == INT8.weights]
    in_pairs = not of_bytes and INT16 in machine.dots
    if not of_bytes and not in_pairs:
        model = pairs.others_in_floats(model, machine, _for_floats(target.instructions, machine, config))
    for_bytes = [*of_bytes, *([machine.for_small] if machine.for_small else [])]
    takes_unsigned = any(dot.data == INT8.data for dot in for_bytes)
    if for_bytes and not takes_unsigned:
        model = signed.in_signed(model, for_bytes[0])
    widened: list[reweight.Choose] = []
    if config.widen == "auto":
        widened.append(widen.replacement(machine))
        model = carrying.carried(model, machine.lanes, reads_all=is_narrow or parts > 1)
    if parts > 1 and matrix:
        model = splitting.split(reweight.replaced(model, widened), matrix, parts)
    by_matrices = is_narrow and matrix is not None
    if not by_matrices:  # whose tiles are of several lines as well
        model = pixels.at_once(model, machine.count, of_bytes=not of_bytes)
    choices = widened
    if config.strassen == "auto" and not is_narrow and parts == 1:
        choices = [strassen.replacement(machine), *choices]
    if config.winograd == "auto" and not by_matrices:  # whose products are cheaper than transforms
        lanes = machine.lanes if widened else 1
        images = winograd.replacement(target.instructions, lanes, is_narrow=is_narrow)
        choices = [images, winograd_1d.replacement(lanes, is_narrow=is_narrow), *choices]
    if widened:
        choices = [taps.replacement(machine.lanes), *choices]
    model = dot_products.read_as_they_lie(model, is_narrow=is_narrow)
    if config.attention == "auto":
        dot = next((dot for dot in machine.dots if is_narrow and dot.data == BF16.data), None)
        model = attention.fuse(model, dot, machine.lanes)
    if widened:
        model = packing.with_whole_vectors(model, machine.lanes)
    if in_pairs and config.winograd == "auto":
        lanes = machine.lanes if widened else 1
        choices = [winograd.replacement_in_pairs(target.instructions, model.weights, lanes), *choices]
    model = reweight.replaced(model, choices)
    if config.fused_layers == "auto" and not is_narrow:
        model = fusion.rewritten(model, [fused_layers.chained(machine.lanes)])
    if of_bytes:
        chosen = precision.in_quads(model, machine.lanes, machine.matrix(INT8), packs=takes_unsigned)
    else:
        chosen = pairs.in_pairs(model, machine)
    if machine.looks_up:
        chosen = lookups.in_tables(chosen)
    return precision.in_bf16(chosen, machine.lanes, matrix) if is_narrow else chosen


def _for_floats(instructions: str, machine: Registers, config: AlgorithmConfig) -> Callable[[relax.Call], bool]:
    """Which convolutions of bytes are faster in floats, where both are had."""
    if config.winograd == "never":
        return lambda _call: False
    return partial(winograd.is_for_floats, instructions, machine.lanes if config.widen == "auto" else 1)


def _require_instructions(wanted: str, machine: Registers, name: str) -> None:
    """Raises: TargetError: The machine has none for this precision."""
    if wanted == IN_BF16 and not any(dot.data == BF16.data for dot in machine.dots):
        lacks = "has no instruction for bf16 (AVX512-BF16, or BF16 of ARM)"
    elif wanted in _PARTS and not machine.matrix(BF16):
        lacks = "has no instruction that multiplies matrices in bf16 (AMX), and without one float32 is faster"
    else:
        return
    raise TargetError(
        f"--precision {wanted}: {name} {lacks}. Leave the option out: the model is then tuned as its file has it."
    )
