"""Models in: ONNX files, exported programs of torch, and networks by name (`zoo`), each as a `lib.graph.fusion.Model`.

Of an ONNX file narrow floats are widened (`onnx_float32`, `onnx_float8`), arithmetic on shapes is done
(`onnx_folding`), branches are chosen by it (`onnx_branches`), and operators that TVM lacks taken apart: those of ONNX
Runtime (`onnx_contributed`), those that ONNX defines by others (`onnx_functions`), and the rest
(`onnx_decompositions`). `source` says which model is meant and what is wrong with that, `file_facts` what a file says
of its inputs and outputs. May import `contracts`, `machine`, `tir` and `graph`;
not search, tuning or measuring. torch is imported where a .pt2 file is read, since the default install is without it;
`torch_outputs` runs such a file by torch itself, to compare with.
"""
