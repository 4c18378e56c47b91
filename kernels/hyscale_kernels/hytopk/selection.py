"""What HyTopK returns: the selected keys of each row, and what happened on the way."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Stats:
    """What happened to each row; int32 [T] on the call's device, read without synchronising.

    nan_scores   keys of the row's window whose score is NaN; they are never selected
    rescored     1 where the sampled threshold missed and the whole row was scored again; 2 where only
                 the keys of a plateau of equal scores were missing and were filled in; else 0
    candidates   keys that passed the row's threshold; more than the plan's capacity when they overflowed
    invalid      1 where the row's window is no window: start < 0, end > S or start > end
    """

    nan_scores: torch.Tensor
    rescored: torch.Tensor
    candidates: torch.Tensor
    invalid: torch.Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The exact top-k keys of each query row.

    indices   int32 [T, K], strictly ascending in each row, -1 beyond ``count``
    count     int32 [T], selected keys of each row
    scores    float32 [T, K], the canonical scores of ``indices`` (+0 for -0), -inf beyond ``count``;
              None unless asked for. Not differentiable: gradients come from the selected scores of replay
    stats     Stats
    """

    indices: torch.Tensor
    count: torch.Tensor
    scores: torch.Tensor | None
    stats: Stats
    _start: torch.Tensor | None = field(repr=False)
    _end: torch.Tensor | None = field(repr=False)
    _k_scale: torch.Tensor | None = field(repr=False)
    _num_keys: int = field(repr=False)

    def check(self) -> None:
        """Wait for the device and raise ValueError if a window or a scale was invalid, naming it."""
        check_windows(self._start, self._end, self._num_keys)
        check_scales(self._k_scale)


def check_windows(start: torch.Tensor | None, end: torch.Tensor | None, num_keys: int) -> None:
    """Raise ValueError naming the first row whose window is not 0 <= start <= end <= num_keys."""
    if start is None and end is None:
        return
    given = start if start is not None else end
    assert given is not None
    lo = torch.zeros_like(given) if start is None else start
    hi = torch.full_like(given, num_keys) if end is None else end
    bad = ((lo < 0) | (hi > num_keys) | (lo > hi)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"window of row {row} is [{int(lo[row])}, {int(hi[row])}); it must satisfy "
            f"0 <= start <= end <= {num_keys} (the number of keys); {bad.shape[0]} row(s) do not"
        )


def check_scales(k_scale: torch.Tensor | None) -> None:
    """Raise ValueError naming the first key whose scale is not positive and finite."""
    if k_scale is None:
        return
    bad = (~((k_scale > 0) & k_scale.isfinite())).nonzero()
    if bad.numel():
        key = int(bad[0])
        raise ValueError(
            f"k_scale of key {key} is {float(k_scale[key])}; it must be positive and finite; "
            f"{bad.shape[0]} key(s) are not"
        )
