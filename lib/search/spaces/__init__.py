"""The programs that a search chooses from: a module for each kind of workload, and `table`, which lists them.

`space` says what a space is, `generators` hands one to MetaSchedule. `roles` reads the axes of a block, `tiling` picks
register tiles, `primitives` and `microkernel` have the schedule steps that several spaces take; spaces import these,
never one another. May import `machine` and `tir`; not the search itself (`lib.search.evolution`).
"""
