"""What people read of a run: progress while it tunes, and afterwards where the time went, as text and drawings.

May import `contracts`, `machine`, `tir`, `tuning` and `measure`; not graph, models or search. It changes no file that a
stage reads.
"""
