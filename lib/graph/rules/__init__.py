"""Rewrites of a graph optimiser, one rule a function, in modules by what they rewrite; `lib.graph.simplify` lists them.

May import `lib.graph.rewrite`, `lib.graph.axes` and `lib.tir.analysis`; rules know neither one another nor the passes
that come after them (fusion, subgraphs).
"""
