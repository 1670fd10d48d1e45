"""The library under the stages, in packages whose imports go one way; `[tool.importlinter]` holds the order.

From the bottom: `runtime` (a distribution of its own, which runs what was compiled), `contracts` (files, tables,
errors), `machine` (targets and their registers), `tir` (workloads, traces, lowering), `graph` (Relax modules); on
these, side by side, `models` (importers), `search`, `tuning` (what is worth the next trials), `measure`, `deploy` and
`bundle` (what is deployed); then `report`, and `options` and `scheduling` for the pipeline. `rpc_server` runs on
devices as a single file. Nothing here may import `stages` or `pipeline`, and `scheduling` alone knows Luigi.
"""
