"""Rotary position embedding, half-split: elements i and i + R/2 of a vector turn together.

Weights trained with interleaved pairs (2i, 2i + 1) fit after a permutation of the projections' outputs, which
leaves every product of a query and a key as it is.

Shape letters: T rows, R rotary elements.
"""

import torch


def rotary_table(positions: torch.Tensor, size: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [T, size / 2], of the angles position * theta**(-2i / size)."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size
    angle = positions[:, None].double() * theta**-exponent
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, R] or [T, H, R] turned by its row's angles, in its dtype (float32 inside)."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rotate``, and so its gradient."""
    return rotate(x, cos, -sin)


def rotate_first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``rotate`` for the leading elements of x, as many as the table turns; the others stay."""
    size = 2 * cos.shape[-1]
    return torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)


def rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``rotate`` for the trailing elements of x; the others stay."""
    size = 2 * cos.shape[-1]
    return torch.cat([x[..., :-size], rotate(x[..., -size:], cos, sin)], dim=-1)
