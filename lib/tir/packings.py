"""How a program packs its weights: read from its trace, so that programs of different shapes can be compared.

RewriteLayout brings a weight into the order in which a program reads it, by an index map: a digit of each index of the
weight becomes an index of the packed one. Two programs that split their loops otherwise may still read the same bytes;
so digits that follow one another in both are one here.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_KIND = "TransformLayout"
_Digit = tuple[str, int, int]  # of which index; modulus (0: none); stride: (index % modulus) // stride


@lru_cache(maxsize=50_000)
def packing(trace: str) -> str:
    """The orders of bytes into which a trace brings weights, as text: equal for equal orders; empty if it packs none.

    Args:
        trace: JSON.
    """
    if _KIND not in trace:
        return ""
    instructions = json.loads(trace)[0]
    orders = [_order(text) for kind, inputs, *_ in instructions if kind == _KIND for text in inputs[1:2]]
    return "; ".join(order for order in orders if order)


@lru_cache(maxsize=50_000)
def _order(index_map: str) -> str:
    """Of one index map (JSON); empty if bytes stay where they are."""
    graph = json.loads(index_map)
    nodes = graph["nodes"]
    root = nodes[graph["root_index"]]["data"]
    names = {node: f"i{n}" for n, node in enumerate(nodes[root["initial_indices"]]["data"])}
    digits = [_digit(nodes, node, names) for node in nodes[root["final_indices"]]["data"]]
    if None in digits:
        return index_map  # of another kind: equal where it is equal
    merged: list[_Digit] = []
    for digit in (each for each in digits if each is not None):
        if merged and merged[-1][0] == digit[0] and merged[-1][2] == digit[1]:
            merged[-1] = (digit[0], merged[-1][1], digit[2])
        else:
            merged.append(digit)
    if merged == [(name, 0, 1) for name in names.values()]:
        return ""
    return " ".join(f"{name}%{modulus}/{stride}" for name, modulus, stride in merged)


def _digit(nodes: Sequence[Mapping[str, Any]], node: int, names: Mapping[int, str]) -> _Digit | None:
    """`(index % modulus) // stride`, in whatever order TVM wrote it; None if it is something else."""
    found = nodes[node]
    kind, data = found["type"], found["data"]
    if node in names:
        return names[node], 0, 1
    if kind == "prim.Cast":
        return _digit(nodes, data["value"], names)
    if kind not in ("prim.FloorDiv", "prim.FloorMod"):
        return None
    inner, number = _digit(nodes, data["a"], names), _number(nodes, data["b"])
    if inner is None or number is None:
        return None
    name, modulus, stride = inner
    if kind == "prim.FloorDiv":
        return name, modulus, stride * number
    return name, stride * number, stride


def _number(nodes: Sequence[Mapping[str, Any]], node: int) -> int | None:
    found = nodes[node]
    if found["type"] == "prim.Cast":
        return _number(nodes, found["data"]["value"])
    if found["type"] != "ir.IntImm":
        return None
    value = found["data"]["value"]
    return int(nodes[value]["data"]) if nodes[value]["type"] == "int" else None
