// TVM's kernels include it and need nothing of it.
