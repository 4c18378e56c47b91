"""What can come of a judgement, beside "holds"."""


class FalsifiedError(AssertionError):
    """A property does not hold. ``rows`` and ``keys`` are those to look at."""

    def __init__(self, message: str, rows: tuple[int, ...] = (), keys: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows
        self.keys = keys


class InapplicableError(Exception):
    """The property means nothing on this machine; the message says what is missing."""


class EnvironmentLackingError(RuntimeError):
    """A device or target cannot run on this machine; the message says what is missing."""
