"""python -m family_tuner_runtime check|info FOLDER: whether a bundle can be trusted here, and what it is."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .bundle import Bundle
from .errors import BundleError
from .model import Model
from .weights import Mapped, entries

_UNTIMED = {False: "not timed", True: "see above"}
_PRECISIONS = {
    "model": "as the model's file has it",
    "bf16x3": "float32, as three products of bf16 each",
    "bf16x6": "float32, as six products of bf16 each",
}


def main(
    arguments: Sequence[str], program: str = "python -m family_tuner_runtime", more: Mapping[str, str] = {}
) -> int:
    """The command; the exit status is 1 if something is wrong with a bundle.

    Args:
        more: Further commands for the help, with what they do.
    """
    listed = "".join(f"  {name}: {told}." for name, told in more.items())
    parser = argparse.ArgumentParser(prog=program, description=f"Look at a compiled model.{listed}")
    parser.add_argument("command", choices=("check", "info", *more))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(info(options.folder) if options.command == "info" else check(options.folder))
    except BundleError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check(folder: Path) -> str:
    """Compare all digests, see whether the bundle fits this machine, and run it on its reference.

    Returns:
        What was checked.

    Raises:
        BundleError: Something is wrong; the message has all of it.
    """
    bundle = Bundle.read(folder)
    if wrong := [*bundle.damages(), *bundle.misfits()]:
        raise BundleError("\n".join(wrong))
    told = f"{folder}: whole, and fits this machine"
    if bundle.reference is None:
        return f"{told}; it has no reference to compare with"
    error, allowed = error_on_reference(Model(folder, rest=False)), float(bundle.facts["tolerance"])
    if not error <= allowed:
        raise BundleError(
            f"{folder} computes something else here: its outputs differ from the reference by {error:.1e} of their "
            f"largest value, and {allowed:.2g} is allowed."
        )
    return f"{told}; its outputs differ from the reference by {error:.1e} of their largest value"


def error_on_reference(model: Model) -> float:
    """The largest difference of an output to the bundle's reference, over the largest value of that output."""
    assert model.bundle.reference is not None
    found = Mapped(model.bundle.reference).arrays()
    outputs = model(*[found[f"input{n}"] for n in range(len(model.inputs))])
    values = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
    return max(_error(value, found[f"output{n}"]) for n, value in enumerate(values))


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """As `lib/tir/numerics.py` has it; where one is infinite or no number, so must be the other."""
    one, other = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(other)
    if not np.array_equal(finite, np.isfinite(one)):
        return float("inf")
    largest = np.abs(other[finite]).max(initial=0.0)
    return float(np.abs(one - other)[finite].max(initial=0.0) / (largest or 1.0))


def info(folder: Path) -> str:
    """What a bundle is, for people.

    Raises:
        BundleError: It is damaged.
    """
    bundle = Bundle.read(folder)
    facts, tensors = bundle.facts, entries(bundle.weights)
    target = facts["target"]
    sizes = ", ".join(f"{name} {said['bytes'] / 1e6:,.1f} MB" for name, said in facts["files"].items())
    of_range = "buckets" in facts
    latencies = facts.get("latencies_s", {}).get("tuned") or []
    rows = [
        *((("range", _ranges(bundle)), ("compiled", _buckets(facts["buckets"]))) if of_range else ()),
        ("inputs", "; ".join(map(str, bundle.inputs))),
        ("outputs", "; ".join(map(str, bundle.whole_outputs))),
        *((("rest", f"computed by ONNX Runtime, of {'; '.join(map(str, bundle.outputs))}"),) if bundle.rest else ()),
        ("precision", _PRECISIONS.get(facts["precision"], facts["precision"])),
        ("weights", f"{len(tensors)} tensors of {', '.join(sorted({tensor.dtype for tensor in tensors}))}"),
        ("threads", str(bundle.threads)),
        ("target", f"{target['kind']} {target.get('mcpu', '')}, needs {', '.join(facts['instructions']) or 'nothing'}"),
        ("error", f"{facts['max_error']:.1e} of the largest output, beside {facts['compared_with']}"),
        ("latency", f"{np.median(latencies) * 1e3:.2f} ms on {facts['device']}" if latencies else _UNTIMED[of_range]),
        ("made with", str(facts["versions"])),
        ("files", sizes),
        *(("licence", f"{each['licence']} ({each['of']})") for each in facts["licences"]),
    ]
    return "\n".join(f"{name:<10} {value}" for name, value in rows)


def _ranges(bundle: Bundle) -> str:
    limits = bundle.ranges.limits.items()
    return ", ".join(f"{name} from {lowest} to {highest}" for name, (lowest, highest) in limits)


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    """The shapes that were compiled, each with what it takes where it was timed."""
    told = [" ".join(f"{name}={extent}" for name, extent in each["extents"].items()) for each in buckets]
    return "; ".join(f"{name} ({each['latency_s'] * 1e3:.2f} ms)" for name, each in zip(told, buckets, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
