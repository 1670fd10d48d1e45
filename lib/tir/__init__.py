"""Programs of one kernel, as TIR: what a workload computes, the traces that schedule it, and how it is lowered.

`analysis` reads blocks, loops and strides, `addresses` where elements lie, `operators` names what blocks compute,
`workload` and `traces` are what is stored of programs, `lowering` compiles them with passes (`prefetch`, `straight`,
`remainder`, `matrix` and its `overlap`, `dot`, `rounding`, `lookup`), `regions` have threads do several kernels, in
`tasks`, and `numerics` makes inputs and compares results.
May import `contracts` and `machine`; knows no Relax graphs, no search, and nothing of measuring.
"""
