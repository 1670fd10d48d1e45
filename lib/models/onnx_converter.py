"""What TVM's importer calls for an operator: the base of converters that this project brings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax


class Converter:
    """Of one operator, in all of its versions; see TVM's `OnnxOpConverter`."""

    @classmethod
    def get_converter(cls, _opset: int) -> Callable[..., relax.Expr]:
        """What converts a node."""
        return cls._convert

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        raise NotImplementedError
