"""A recurrent layer as one program: all its steps, in all its directions.

What a step's inputs contribute is computed before, for all steps at once, in one product. What is left of a step is one
row's product with the weights of the recurrence, for each sequence of the batch, and the arithmetic of its gates. As
operators these are a graph that grows with the number of steps, and a kernel or two for each of them; here the steps
are a loop, and what never meets, directions and parts of the batch, may be tasks (`lib.search.spaces.recurrence`).

Shapes: n steps, d directions, b sequences, k units, g gates; units are counted in j vectors of `LANES`, the last one
filled up with units whose weights, inputs and states are zeros, so that they stay zeros. A lane of tasks is a direction
of a part of the batch.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

LANES = 16  # float32 in the widest vectors; narrower ones divide it

# The blocks; the first three are what takes the time.
SUMS, INNER, STATES, ROUNDED, CARRY, RESULT, FIRST, LAST = (
    f"recurrence_{block}" for block in ("sums", "inner", "states", "rounded", "carry", "result", "first", "last")
)
DEPTHS = {"float32": 1, "bfloat16": 2}  # neighbours that an instruction sums at once, by element type of the weights
_CLIP = 9.0  # beyond which tanh is one to float32
# tanh as a rational function, the highest powers first: that of Eigen and of TVM's `topi.fast_tanh`; within 2.4e-7.
_ABOVE = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
          1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

Exprs = Sequence[tirx.Expr]


@dataclass(frozen=True, slots=True)
class Layer:
    """What the tensors do not say.

    Attributes:
        kind: A key of `CELLS`.
        activations: Of the cell, in the order of ONNX; keys of `ACTIVATIONS`.
        is_reverse: Of each direction, whether it begins at the last step.
        keeps_cell: Whether the result has one step more, with the last of the states that no step shows (an LSTM's c).
        parts: Of the batch, as large as each other, of which each goes through all steps by itself.
    """

    kind: str
    activations: tuple[str, ...]
    is_reverse: tuple[bool, ...]
    keeps_cell: bool = False
    parts: int = 1

    @classmethod
    def parsed(cls, text: str) -> "Layer":
        """From `text`."""
        given = json.loads(text)
        activations, is_reverse = (tuple(given[name]) for name in ("activations", "is_reverse"))
        return cls(given["kind"], activations, is_reverse, given["keeps_cell"], given["parts"])

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Unit:
    """What one unit computes its new states from, in one step.

    Attributes:
        act: The activations, by their order in ONNX.
        sums: Of the recurrence, for each gate; `x`: what the inputs contribute; `states`: before the step.
        bias: Of what a GRU's reset gate multiplies.
    """

    act: Sequence[Callable[[tirx.Expr], tirx.Expr]]
    sums: Exprs
    x: Exprs
    states: Exprs
    bias: tirx.Expr

    def gate(self, number: int, activation: int = 0) -> tirx.Expr:
        """The value of a gate."""
        return self.act[activation](self.sums[number] + self.x[number])


@dataclass(frozen=True, slots=True)
class Cell:
    """The arithmetic of a step, in two parts.

    Attributes:
        gates: How many a unit has; `states`: likewise. The first of these, h, is what a step shows.
        inner: What the new states have in common.
        outer: The new states, of that.
    """

    gates: int
    states: int
    inner: Callable[[Unit], tirx.Expr]
    outer: Callable[[Unit, tirx.Expr], Exprs]


def _lstm_inner(unit: Unit) -> tirx.Expr:
    """c, of the gates i o f c."""
    return unit.gate(2) * unit.states[1] + unit.gate(0) * unit.gate(3, activation=1)


def _lstm_outer(unit: Unit, inner: tirx.Expr) -> Exprs:
    return [unit.gate(1) * unit.act[2](inner), inner]


def _gru_inner(unit: Unit) -> tirx.Expr:
    """What z, of the gates z r h, lets through; the reset gate comes after the product and its bias."""
    return unit.act[1](unit.x[2] + unit.gate(1) * (unit.sums[2] + unit.bias))


def _gru_outer(unit: Unit, inner: tirx.Expr) -> Exprs:
    return [inner + unit.gate(0) * (unit.states[0] - inner)]


def _rnn_inner(unit: Unit) -> tirx.Expr:
    return unit.gate(0)


def _rnn_outer(_unit: Unit, inner: tirx.Expr) -> Exprs:
    return [inner]


CELLS = {
    "lstm": Cell(4, 2, _lstm_inner, _lstm_outer),
    "gru": Cell(3, 1, _gru_inner, _gru_outer),
    "rnn": Cell(1, 1, _rnn_inner, _rnn_outer),
}


def recurrence(layer: Layer, steps: int, batch: int, turns: int, n_vectors: int, weights: str) -> tirx.PrimFunc:
    """The program.

    Its parameters, in float32 but for the weights:
        weights: (d, j, turns, g, LANES, depth), of the element type `weights`: turns * depth units are summed over, k
            or, where that is odd, one more. States are rounded to that type for the products.
        x: (n, b, d, j, g, LANES), what the inputs contribute, with all biases but the next one.
        states: (states, d, b, j * LANES), before the first step.
        bias: (d, j, LANES), of what a GRU's reset gate multiplies; else not read.
        result: (n, d, b, j * LANES); with `keeps_cell` (n + 1, ...).
    """
    cell, act = CELLS[layer.kind], [ACTIVATIONS[name] for name in layer.activations]
    n_directions, n_gates, n_states = len(layer.is_reverse), cell.gates, cell.states
    depth, n_rows = DEPTHS[weights], steps + layer.keeps_cell
    n_lines, rows = n_directions * layer.parts, batch // layer.parts

    def direction(line: tirx.Expr) -> tirx.Expr:
        return line % n_directions if layer.parts > 1 else line

    def sequence(line: tirx.Expr, row: tirx.Expr) -> tirx.Expr:
        """Of the batch, by its number in a line's part."""
        return line // n_directions * rows + row if layer.parts > 1 else row

    def step_of(direction: tirx.Expr, turn: tirx.Expr) -> tirx.Expr:
        """The step that a direction has its turn at."""
        if len(set(layer.is_reverse)) == 1:
            return steps - 1 - turn if layer.is_reverse[0] else turn
        return tirx.Select(direction == layer.is_reverse.index(True), steps - 1 - turn, turn)

    def unit(tensors: Sequence[Any], place: Sequence[tirx.Expr], of_step: Sequence[tirx.Expr]) -> Unit:
        """One of (b, j, lane), in a (line, turn)."""
        sums, x, states, bias = tensors
        (b, j, lane), (line, turn) = place, of_step
        d = direction(line)
        return Unit(
            act,
            [sums[b, j, gate, lane] for gate in range(n_gates)],
            [x[step_of(d, turn), sequence(line, b), d, j, gate, lane] for gate in range(n_gates)],
            [states[s, line, b, j * LANES + lane] for s in range(n_states)],
            bias[d, j, lane],
        )

    def state(number: tirx.Expr, one: Unit, inner: tirx.Expr) -> tirx.Expr:
        """A new one, by a number that is known when loops are unrolled."""
        first, *others = cell.outer(one, inner)
        return tirx.Select(number == 0, first, others[0]) if others else first

    @T.prim_func(private=True, s_tir=True)
    def function(
        weights_: T.Buffer((n_directions, n_vectors, turns, n_gates, LANES, depth), weights),  # type: ignore[valid-type]
        x: T.Buffer((steps, batch, n_directions, n_vectors, n_gates, LANES), "float32"),  # type: ignore[valid-type]
        before: T.Buffer((n_states, n_directions, batch, n_vectors * LANES), "float32"),  # type: ignore[valid-type]
        bias: T.Buffer((n_directions, n_vectors, LANES), "float32"),  # type: ignore[valid-type]
        result: T.Buffer((n_rows, n_directions, batch, n_vectors * LANES), "float32"),  # type: ignore[valid-type]
    ) -> None:
        states = T.sblock_alloc_buffer((n_states, n_lines, rows, n_vectors * LANES), "float32")
        for d in range(n_lines):
            for s, b, j, lane in T.grid(n_states, rows, n_vectors, LANES):
                with T.sblock(FIRST):
                    vs, vd, vb, vj, vl = T.axis.remap("SSSSS", [s, d, b, j, lane])
                    states[vs, vd, vb, vj * LANES + vl] = before[vs, direction(vd), sequence(vd, vb), vj * LANES + vl]
            for t in range(steps):
                with T.sblock("recurrence_step"):
                    # A scope of its own: what is carried over is written after all of the step has read it.
                    vd = T.axis.spatial(n_lines, d)
                    vt = T.axis.opaque(steps, t)
                    new = T.sblock_alloc_buffer((n_states, rows, n_vectors, LANES), "float32")
                    with T.sblock("recurrence_cells"):
                        wd = T.axis.spatial(n_lines, vd)
                        wt = T.axis.opaque(steps, vt)
                        rounded = T.sblock_alloc_buffer((rows, turns * depth), weights)
                        sums = T.sblock_alloc_buffer((rows, n_vectors, n_gates, LANES), "float32")
                        inner = T.sblock_alloc_buffer((rows, n_vectors, LANES), "float32")
                        for b, k in T.grid(rows, turns * depth):
                            with T.sblock(ROUNDED):
                                vb, vk = T.axis.remap("SS", [b, k])
                                rounded[vb, vk] = states[0, wd, vb, vk].astype(weights)
                        for b, j, k, g, lane in T.grid(rows, n_vectors, turns * depth, n_gates, LANES):
                            with T.sblock(SUMS):
                                vb, vj, vk, vg, vl = T.axis.remap("SSRSS", [b, j, k, g, lane])
                                with T.init():
                                    sums[vb, vj, vg, vl] = T.float32(0)
                                sums[vb, vj, vg, vl] = sums[vb, vj, vg, vl] + rounded[vb, vk].astype("float32") * (
                                    weights_[direction(wd), vj, vk // depth, vg, vl, vk % depth].astype("float32")
                                )
                        for b, j, lane in T.grid(rows, n_vectors, LANES):
                            with T.sblock(INNER):
                                vb, vj, vl = T.axis.remap("SSS", [b, j, lane])
                                inner[vb, vj, vl] = cell.inner(unit((sums, x, states, bias), (vb, vj, vl), (wd, wt)))
                        for b, j, s, lane in T.grid(rows, n_vectors, n_states, LANES):
                            with T.sblock(STATES):
                                vb, vj, vs, vl = T.axis.remap("SSSS", [b, j, s, lane])
                                new[vs, vb, vj, vl] = state(
                                    vs, unit((sums, x, states, bias), (vb, vj, vl), (wd, wt)), inner[vb, vj, vl]
                                )
                    for s, b, j, lane in T.grid(n_states, rows, n_vectors, LANES):
                        with T.sblock(CARRY):
                            vs, vb, vj, vl = T.axis.remap("SSSS", [s, b, j, lane])
                            states[vs, vd, vb, vj * LANES + vl] = new[vs, vb, vj, vl]
                    for b, j, lane in T.grid(rows, n_vectors, LANES):
                        with T.sblock(RESULT):
                            vb, vj, vl = T.axis.remap("SSS", [b, j, lane])
                            result[step_of(direction(vd), vt), direction(vd), sequence(vd, vb), vj * LANES + vl] = new[
                                0, vb, vj, vl
                            ]
            if layer.keeps_cell:
                for b, j, lane in T.grid(rows, n_vectors, LANES):
                    with T.sblock(LAST):
                        vd, vb, vj, vl = T.axis.remap("SSSS", [d, b, j, lane])
                        result[steps, direction(vd), sequence(vd, vb), vj * LANES + vl] = states[
                            n_states - 1, vd, vb, vj * LANES + vl
                        ]

    return function.with_attr("tirx.noalias", True)


def _tanh(x: tirx.Expr) -> tirx.Expr:
    x = tirx.Min(tirx.Max(x, _float(-_CLIP)), _float(_CLIP))
    square = x * x
    return x * _polynomial(_ABOVE, square) / _polynomial(_BELOW, square)


def _polynomial(factors: Sequence[float], x: tirx.Expr) -> tirx.Expr:
    first, *others = factors
    found: tirx.Expr = _float(first)
    for factor in others:
        found = found * x + _float(factor)
    return found


def _sigmoid(x: tirx.Expr) -> tirx.Expr:
    half = _float(0.5)
    return half * _tanh(half * x) + half


def _relu(x: tirx.Expr) -> tirx.Expr:
    return tirx.Max(x, _float(0.0))


def _float(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


ACTIVATIONS: dict[str, Callable[[tirx.Expr], tirx.Expr]] = {"sigmoid": _sigmoid, "tanh": _tanh, "relu": _relu}
