"""1x1 convolutions of all pixels of an image at once, where lines of pixels are not of whole register tiles.

The rows of a convolution's tile are neighbouring pixels of a line (`lib.search.spaces.contraction`). A line of 19 has
no divisor but one, and is 14 rows and 5, or 19 rows of one vector, each of which loads a number for every product. A
1x1 convolution of stride 1 does not see where a line ends: its 361 pixels are 25 tiles of 14 rows, and one of 11.
Images of odd numbers of lines are then shared out evenly, too.

The image is read, and written, as one of a single line: a view. What follows element by element does so as well, so
that it stays in the kernel.
"""

from collections.abc import Sequence

import tvm_ffi
from tvm import relax
from tvm.relax import op

from lib.graph.fusion import Model
from lib.graph.rewrite import Rewriter, Rule, alike, dtype, is_by_pixel, rewrite, rule
from lib.graph.rules import movement

_FEWEST = 4  # rows of a tile that reads its weights from L2 as fast as it multiplies


def at_once(model: Model, registers: int, *, of_bytes: bool = False) -> Model:
    """The model with 1x1 convolutions in float32 over all pixels where that fills tiles, channels last; the same model
    if it has none.

    Args:
        registers: Vector registers of the machine.
        of_bytes: Convolutions of bytes for CPUs that do not add their products (`lib.graph.pairs`), as well.
    """
    types = [("float32", "float32"), ("int8", "int32")][: 1 + of_bytes]
    over_pixels = _over_pixels(registers, types)
    module = rewrite(model.module, [over_pixels])
    if tvm_ffi.structural_equal(module, model.module):
        return model
    return Model(rewrite(module, [movement.one_movement, movement.reshape_later, movement.gate_later]), model.weights)


def _over_pixels(registers: int, types: Sequence[tuple[str, str]]) -> Rule:
    @rule("relax.nn.conv2d")
    def over_pixels(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """A convolution of one pixel at a time, as that of an image whose pixels are all in one line."""
        data, weight = call.args
        image, kernel, out = (rewriter.shape(each) for each in (data, weight, call))
        if image is None or kernel is None or out is None or (dtype(weight), dtype(call)) not in types:
            return None
        lines, pixels = image[0] * image[1], image[2]
        if (
            not is_by_pixel(call, image, kernel, out)
            or lines == 1
            or any(pixels % rows == 0 for rows in _rows(registers))
        ):
            return None
        line = rewriter.emit(alike(call, _in_one_line(rewriter, data), weight, dtype(call)))
        return op.reshape(line, out)

    return over_pixels


def _rows(registers: int) -> range:
    """Those of tiles of two vectors: registers for sums, for the weights, and one for a number of the data."""
    return range(_FEWEST, (registers - 3) // 2 + 1)


def _in_one_line(rewriter: Rewriter, data: relax.Expr) -> relax.Expr:
    """The pixels of images (N, H, W, C) as a line (1, 1, N * H * W, C); channels that are read in place
    (`lib.graph.parts`) are still a slice."""
    part = rewriter.calls(data, "relax.strided_slice")
    if part is not None and set(movement.bounds(rewriter, part) or ()) == {3}:
        whole = rewriter.emit(_viewed(rewriter, part.args[0]))
        return rewriter.emit(relax.Call(part.op, [whole, *part.args[1:]], part.attrs, part.ty_args))
    return rewriter.emit(_viewed(rewriter, data))


def _viewed(rewriter: Rewriter, image: relax.Expr) -> relax.Expr:
    *_, channels = rewriter.shape(image) or ()
    return op.reshape(image, (1, 1, -1, channels))
