"""What replay raises when it is used outside its contract."""


class ReplayError(RuntimeError):
    """Selections would be replayed wrongly; the message says where, what happened and what to do."""
