"""What goes wrong, and is not TVM's to say."""


class BundleError(RuntimeError):
    """A bundle that is damaged, or is for another machine or another TVM; the message says what was expected, what was
    found, and what to do."""


class InputError(ValueError):
    """Inputs whose names, number, shapes or types are not those of the model."""
