"""The nouns that stages share. Knows neither Luigi nor the stages.

TVM is imported by `host`, `zoo`, `onnx_import`, `simplify`, `graph`, `structure`, `workloads`, `features`,
`search`, `deploy` and `worker` only; everything else works from files and needs no compiler.
"""
