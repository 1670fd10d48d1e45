"""The contracts between stages: which files there are, what stands in them, and how they are written and checked.

`schemas` are the columns with their units, `tables` reads and writes them whole or not at all, `files` says where they
lie, `conditions` and `statuses` what a measurement carries; `settings` turns text into frozen configs, `errors` is the
hierarchy of what users are told. Everything may import this package. It imports nothing of the project, and no TVM.
"""
