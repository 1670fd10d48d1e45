"""The verbs, in pipeline order: extract, cluster, generate, measure, train, compile, report.

Each has `run(inputs..., config, *, out)`, a thin edge that reads and writes files, over a pure core. A stage
imports no other stage, and two stages share nothing but files.
"""
