"""The hardware that is compiled for: targets, their vector registers and tensor intrinsics, and the host's own facts.

May import `contracts`, and TVM for its targets; knows neither programs nor models.
"""
