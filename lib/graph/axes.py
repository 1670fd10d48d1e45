"""Chains of reshapes and transposes as one reshape, transpose and reshape.

The axes of a tensor are split into atoms, which no reshape of the chain splits further. A transpose permutes atoms, a
reshape groups them into other axes. So any chain is one grouping, one permutation and another grouping; if the
permutation is the identity, it is a single reshape, which costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Movement:
    """`reshape(transpose(reshape(x, before), order), after)`; no transpose where `order` is ascending."""

    before: tuple[int, ...]
    order: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def is_reshape(self) -> bool:
        """Whether the elements stay in their order in memory."""
        return self.order == tuple(range(len(self.order)))


Step = tuple[str, tuple[int, ...]]  # ("reshape", shape) or ("permute", axes)


def compose(shape: Sequence[int], steps: Sequence[Step]) -> Movement | None:
    """The movement that a chain amounts to.

    Args:
        shape: Of the tensor before the chain; all extents are at least 1.
        steps: In the order in which they are applied.

    Returns:
        The movement with the fewest axes, without unit axes in `before`; None if a reshape cuts across axes in a
        way that has no common atoms (6 as 2x3 after 3x2 was reordered).
    """
    atoms = list(shape)  # extents, in the order of the input
    axes = [[n] for n in range(len(shape))]  # of the current tensor: the atoms of each, in order
    for kind, argument in steps:
        if kind == "permute":
            axes = [axes[axis] for axis in argument]
            continue
        joined = _merged(atoms, [atom for axis in axes for atom in axis], ())  # a reshape forgets earlier ones
        regrouped = _regroup(joined.order, joined.before, argument)
        if regrouped is None:
            return None
        axes, atoms = regrouped
    final = tuple(_extent(axis, atoms) for axis in axes)
    return _merged(atoms, [atom for axis in axes for atom in axis], final)


def _extent(axis: list[int], atoms: list[int]) -> int:
    product = 1
    for atom in axis:
        product *= atoms[atom]
    return product


def _regroup(
    flat: Sequence[int], atoms: Sequence[int], shape: Sequence[int]
) -> tuple[list[list[int]], list[int]] | None:
    """Group atoms, none of extent 1, into axes of the new shape, splitting them where that is needed."""
    splits: dict[int, list[int]] = {}  # extents of the parts of an atom
    pieces: list[list[tuple[int, int]]] = []  # of each new axis: (atom, index of its part)
    left = atoms[flat[0]] if flat else 1
    position = 0
    for extent in shape:
        axis: list[tuple[int, int]] = []
        need = extent
        while need > 1:
            if left == 1:
                position += 1
                left = atoms[flat[position]]
            piece = min(need, left)
            if need % piece or left % piece:
                return None
            atom = flat[position]
            splits.setdefault(atom, []).append(piece)
            axis.append((atom, len(splits[atom]) - 1))
            need //= piece
            left //= piece
        pieces.append(axis)
    numbers: dict[tuple[int, int], int] = {}
    extents: list[int] = []
    for atom, whole in enumerate(atoms):
        for number, extent in enumerate(splits.get(atom, [whole])):
            numbers[atom, number] = len(extents)
            extents.append(extent)
    return [[numbers[piece] for piece in axis] for axis in pieces], extents


def _merged(atoms: list[int], order: list[int], final: tuple[int, ...]) -> Movement:
    """Join atoms that stay adjacent, so that as few axes as possible are permuted."""
    order = [atom for atom in order if atoms[atom] > 1]
    rank = {atom: n for n, atom in enumerate(sorted(order))}  # among those of other extents than 1
    runs: list[list[int]] = []
    for atom in (rank[atom] for atom in order):
        if runs and runs[-1][-1] + 1 == atom:
            runs[-1].append(atom)
        else:
            runs.append([atom])
    extents = [atoms[atom] for atom in sorted(order)]
    in_input_order = sorted(runs)
    before = tuple(_extent(run, extents) for run in in_input_order)
    return Movement(before, tuple(in_input_order.index(run) for run in runs), final)
