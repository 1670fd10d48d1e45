"""Candidates in, measurements out, whatever happens to them.

`runner` is the contract, with one function that makes rows; `local_pool` measures on this CPU, `device_pool` (`batch`,
`device_processes`) on devices of a `fleet`, `replay` from tables; `factory` picks one by what `devices` read from the
command line. Foreign code runs in processes only: `process` is one seen from here, `connection` its own end,
`protocol` and `wire` what passes between, and `worker` (`timing`) and `driver` (`device_source`, `tracker`) what runs
there; `launcher` starts them, by forks of the process `launch`, which has loaded TVM. `model_session` and `libraries`
are the two ends for whole models, `file_peer` and `onnx_process` (of torch `lib.torch_process`) those for the files
that they came from. May import contracts, machine and tir; not graph, search, tuning or report: a program reaches it as
the texts of a workload and a trace.
"""
