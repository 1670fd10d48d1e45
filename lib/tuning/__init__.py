"""What a run learns and decides: which subgraphs share a cost model, which is worth the next trials, when a run ends.

`families`, `planning` and `budget` decide, `history` folds the rounds so far, `cost_model` learns from them, `members`
joins subgraphs with families, and `runs` says which run settings belong to. May import `contracts`, `machine` and
`tir`; not graph, search or measuring: it works from tables.
"""
