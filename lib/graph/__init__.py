"""Models as Relax modules: from what an importer gives to fused TIR functions, and the subgraphs among them.

`simplify` applies the `rules` through `rewrite`; `algorithms` chooses what `reweight` puts in the place of operators
(`winograd`, `winograd_1d`, `strassen`, `widen`), and `lookups` makes tables of functions of a byte; `fusion` lowers and
fuses operators, with `legalize`, `concatenation`, `halts` and `patterns`; `subgraphs` describes the distinct functions;
`regions` has them called together, when their memory is planned. `recurrence`, `byte_units` and `few_bits` stand for
what Relax has no operator for, from the import to programs of this project. May import `contracts`, `machine` and
`tir`; not the importers (`models`), which are built on it, nor search, tuning or measuring.
"""
