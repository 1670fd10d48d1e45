"""Weights from a .safetensors file: checked as a whole, then turned into the layouts of our networks.

A `Recipe` says of which tensors a weight is made, and how. Recipes are given for all weights of a network, so that
a file of another model is refused with the names of what it lacks, before a tensor is read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # gives NumPy the name `bfloat16`, which safetensors looks up
import numpy as np
from safetensors import SafetensorError, safe_open

from lib.contracts.errors import ModelError, require_file

Shape = tuple[int, ...]

_FLOATS = ("F64", "F32", "F16", "BF16")
_PREFIXES = ("bert.", "roberta.", "transformer.", "vit.")  # of checkpoints with a head for some task
_NAMED = 8  # differences told in an error; a file of another model has hundreds


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a weight is made of tensors of a checkpoint."""

    tensors: Callable[[Shape], dict[str, Shape]]  # their names and shapes, for a weight of some shape
    make: Callable[..., np.ndarray]  # of these, in that order and in fp32; reshaped to the weight's shape after
    optional: bool = False  # whether the weight is zero in a file that lacks them


def read(path: Path, model: str, recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """The weights of a network in fp32, by name, in the order of `shapes`.

    Tensors may carry the prefix of the model, as in `bert.embeddings...`. Those that no recipe asks for are left.

    Args:
        path: A .safetensors file.
        model: Its name, for messages.
        recipes: For each weight, how it is made.
        shapes: Of each weight.

    Raises:
        ModelError: The file is missing or damaged, or it lacks a tensor or has one of another shape or kind.
    """
    require_file(path)
    try:
        with safe_open(path, "np") as file:
            tensors = _Tensors(file, {_plain(name): name for name in file.keys()})  # noqa: SIM118  # it is no dict
            differences = _differences(tensors, recipes, shapes)
            if differences:
                raise ModelError(_told(path, model, differences))
            return {weight: _make(recipes[weight], shape, tensors) for weight, shape in shapes.items()}
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or no .safetensors file: {error}") from error


@dataclass(frozen=True, slots=True)
class _Tensors:
    """An open file, by plain names."""

    file: Any  # of safetensors, which does not say its type
    names: Mapping[str, str]  # in the file, by plain name

    def difference(self, name: str, shape: Shape) -> str:
        """How a tensor is not what is expected; empty if it is."""
        if name not in self.names:
            return f"{name}: expected {shape}, found no such tensor"
        tensor = self.file.get_slice(self.names[name])
        if tuple(tensor.get_shape()) != shape:
            return f"{self.names[name]}: expected {shape}, found {tuple(tensor.get_shape())}"
        if tensor.get_dtype() not in _FLOATS:
            return f"{self.names[name]}: expected floats ({', '.join(_FLOATS)}), found {tensor.get_dtype()}"
        return ""

    def array(self, name: str) -> np.ndarray:
        """A tensor in fp32."""
        return np.asarray(self.file.get_tensor(self.names[name])).astype(np.float32, copy=False)


def _plain(name: str) -> str:
    """A tensor's name without the model's prefix, and by today's name for the two parts of a layer norm."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _differences(tensors: _Tensors, recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape]) -> list[str]:
    """What the recipes ask for and the file does not have, a line for each tensor."""
    found: dict[str, str] = {}  # some tensors are in several recipes
    for weight, shape in shapes.items():
        for name, expected in recipes[weight].tensors(shape).items():
            if name in tensors.names or not recipes[weight].optional:
                found[name] = tensors.difference(name, expected)
    return [line for line in found.values() if line]


def _told(path: Path, model: str, differences: list[str]) -> str:
    more = [f"and {len(differences) - _NAMED} more"] if len(differences) > _NAMED else []
    lines = "\n  ".join([f"{path} is no checkpoint of {model}:", *differences[:_NAMED], *more])
    return (
        f"{lines}\nGive one of this very architecture, by the names of timm (convolutional networks) or of the "
        "transformers library (the others)."
    )


def _make(recipe: Recipe, shape: Shape, tensors: _Tensors) -> np.ndarray:
    needed = recipe.tensors(shape)
    if recipe.optional and not tensors.names.keys() >= needed.keys():
        return np.zeros(shape, np.float32)
    return np.ascontiguousarray(recipe.make(*map(tensors.array, needed)).reshape(shape))


def same(name: str) -> Recipe:
    """The tensor as it is."""
    return Recipe(lambda shape: {name: shape}, lambda tensor: tensor)


def vector(name: str) -> Recipe:
    """A weight that is a vector in the file, whatever its dimensions here."""
    return Recipe(lambda shape: {name: (math.prod(shape),)}, lambda tensor: tensor)


def transposed(name: str) -> Recipe:
    """(out, in) to (in, out)."""
    return Recipe(lambda shape: {name: shape[::-1]}, lambda tensor: tensor.transpose())


def linear(ours: str, theirs: str) -> dict[str, Recipe]:
    """Weight and bias of a product."""
    return {f"{ours}.weight": transposed(f"{theirs}.weight"), f"{ours}.bias": vector(f"{theirs}.bias")}


def norm(ours: str, theirs: str) -> dict[str, Recipe]:
    """Weight and bias of a layer norm."""
    return {f"{ours}.{part}": same(f"{theirs}.{part}") for part in ("weight", "bias")}


def convolution(ours: str, theirs: str) -> dict[str, Recipe]:
    """Weight of a convolution: OIHW to HWIO."""
    return {f"{ours}.weight": Recipe(lambda shape: {f"{theirs}.weight": _oihw(shape)}, _hwio)}


def folded(ours: str, conv: str, batch_norm: str, eps: float = 1e-5) -> dict[str, Recipe]:
    """Weight and bias of a convolution without bias and the batch norm behind it."""

    def weight_tensors(shape: Shape) -> dict[str, Shape]:
        scales = {f"{batch_norm}.{part}": shape[-1:] for part in ("weight", "running_var")}
        return {f"{conv}.weight": _oihw(shape), **scales}

    def weight(kernel: np.ndarray, gamma: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return _hwio(kernel) * (gamma / np.sqrt(variance + np.float32(eps)))

    return {f"{ours}.weight": Recipe(weight_tensors, weight), f"{ours}.bias": _shift(batch_norm, eps)}


def affine(ours: str, batch_norm: str, eps: float = 1e-5) -> dict[str, Recipe]:
    """Scale and shift of a batch norm that stays by itself."""

    def tensors(shape: Shape) -> dict[str, Shape]:
        return {f"{batch_norm}.{part}": shape[-1:] for part in ("weight", "running_var")}

    def scale(gamma: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return gamma / np.sqrt(variance + np.float32(eps))

    return {f"{ours}.scale": Recipe(tensors, scale), f"{ours}.shift": _shift(batch_norm, eps)}


def _shift(batch_norm: str, eps: float) -> Recipe:
    """What a batch norm adds once its scale is applied."""

    def tensors(shape: Shape) -> dict[str, Shape]:
        return {f"{batch_norm}.{part}": shape[-1:] for part in ("weight", "bias", "running_mean", "running_var")}

    def shift(gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return beta - mean * gamma / np.sqrt(variance + np.float32(eps))

    return Recipe(tensors, shift)


def _oihw(hwio: Shape) -> Shape:
    height, width, n_in, n_out = hwio
    return (n_out, n_in, height, width)


def _hwio(kernel: np.ndarray) -> np.ndarray:
    return kernel.transpose(2, 3, 1, 0)
