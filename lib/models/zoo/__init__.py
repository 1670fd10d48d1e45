"""Networks by name that need no file, in Relax's `nn` frontend, NHWC and float32; `catalogue` lists and loads them.

`convolutional` and `transformers` define them out of `layers`; `checkpoints` reads .safetensors files by the `recipes`
of each network. May import `contracts` and `graph`; not the importers beside it.
"""
