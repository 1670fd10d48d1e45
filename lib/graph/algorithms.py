"""Which operators are computed otherwise than the model has them: with less work, or in whole vectors."""

from dataclasses import asdict, dataclass

from lib.contracts.errors import ConfigError
from lib.graph import reweight, widen, winograd
from lib.graph.fusion import Model
from lib.machine.registers import registers
from lib.machine.targets import AnyTarget


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Each where it should save time (`auto`), or `never`. On CPUs."""

    winograd: str = "auto"  # 3x3 convolutions in Winograd's way
    widen: str = "auto"  # output channels to whole vectors

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value not in ("auto", "never"):
                raise ConfigError(f"[extract] {name} must be `auto` or `never`, but got {value!r}.")

    @property
    def suffix(self) -> str:
        """Of the name of a model's folder: empty for the defaults, else e.g. `-winograd_never`."""
        return "".join(f"-{name}_{value}" for name, value in asdict(self).items() if value != "auto")


def choose_algorithms(model: Model, target: AnyTarget, config: AlgorithmConfig) -> Model:
    """Replace what can be computed otherwise on this kind of target; the same model if there is nothing."""
    if target.kind != "llvm":
        return model
    widened = widen.replacement(registers(target.tvm()).lanes)
    ways = [(config.winograd, winograd.replacement), (config.widen, widened)]
    choices = [way for wanted, way in ways if wanted == "auto"]
    module, changed = reweight.rewrite(model.module, model.weights, choices)
    return Model(module, {**model.weights, **changed}) if changed else model
