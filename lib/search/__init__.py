"""Candidates for one workload: spaces of programs, and an evolutionary search in them that a cost model guides.

`evolution` is what stages call; `spaces` are what it searches, `features` what the cost model sees of a program: what
the workload is (`described`), and what a trace (`nest`) made of its loops (`decided`). A search keeps no state: the
same workload, measurements and seed give the same candidates. May import `contracts`, `machine` and `tir`; not graph
or models (a workload comes alone), nor tuning or measuring: the model is a `Scorer`.
"""
