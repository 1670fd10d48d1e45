"""Models in: ONNX files, exported programs of torch, and networks by name (`zoo`), each as a `lib.graph.fusion.Model`.

`source` says which model is meant and what is wrong with that. May import `contracts`, `machine`, `tir` and `graph`;
not search, tuning or measuring. torch is imported where a .pt2 file is read, since the default install is without it.
"""
