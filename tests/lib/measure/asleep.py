"""A worker that never gets ready."""

import signal


def main(*_arguments: object) -> None:
    """Wait until somebody kills it."""
    signal.pause()
