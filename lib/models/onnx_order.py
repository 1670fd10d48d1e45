"""Nodes of an ONNX file, each after those whose results it reads.

The standard asks for that order, but files are about that nobody sorted: what makes halves of floats appends the casts
of inputs behind all that reads them, and ONNX Runtime, which sorts for itself, takes such a file.
"""

import heapq

import onnx

from lib.models import onnx_folding


def sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes of a graph, and of bodies within it, in place.

    Of nodes that can come next the first of the file does, so that a sorted graph stays as it is (Kahn, 1962). Nodes
    that read their own results, through others or not, are last; what nothing makes is not looked at.
    """
    for node in graph.node:
        for body in onnx_folding.bodies(node):
            sort(body)
    order = _order(graph)
    if order != sorted(order):
        nodes = [graph.node[n] for n in order]
        del graph.node[:]
        graph.node.extend(nodes)


def _order(graph: onnx.GraphProto) -> list[int]:
    """Places of nodes, in the order in which they should come."""
    maker: dict[str, int] = {}
    for n, node in enumerate(graph.node):
        for name in filter(None, node.output):
            maker.setdefault(name, n)
    waiting: list[set[int]] = []  # for each node, those that must come before it
    readers: list[list[int]] = [[] for _ in graph.node]
    for n, node in enumerate(graph.node):
        waiting.append({maker[name] for name in (*node.input, *onnx_folding.read_inside(node)) if name in maker})
        for before in waiting[n]:
            readers[before].append(n)
    ready = [n for n, before in enumerate(waiting) if not before]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for n in readers[order[-1]]:
            waiting[n].discard(order[-1])
            if not waiting[n]:
                heapq.heappush(ready, n)
    return order + sorted(set(range(len(waiting))) - set(order))
