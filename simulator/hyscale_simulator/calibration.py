"""The free constants, from one file: what is neither measured for a shape nor on a data sheet."""

import tomllib
from functools import cache

from pydantic import model_validator

from hyscale_simulator.descriptions import DATA, Description, DescriptionError, Rate, Several, Share, parse

__all__ = ["Calibration", "calibration"]


class SustainedTensor(Description):
    """GEMM rate over the data sheet's, of one GPU family and dtype (or ``any``): best, and sustained."""

    family: str
    dtype: str
    loaded: Share
    roof: Share | None = None
    """99th percentile of the shipped table of that family, where there is one."""
    source: str


class Stream(Description):
    """Copy rate over the data sheet's memory rate."""

    fraction: Share
    source: str


class Launch(Description):
    """Time of an empty kernel."""

    us: Rate
    source: str


class Assumed(Description):
    """Fraction of its own roofline that an unmeasured op reaches, and how far that may be off."""

    op: str
    fraction: Share
    uncertainty: Share
    source: str


class Calibration(Description):
    """All of them."""

    sustained_tensor: Several[SustainedTensor]
    stream: Stream
    launch: Launch
    assumed: Several[Assumed]

    @model_validator(mode="after")
    def _few(self) -> "Calibration":
        if self.free_constants > 12:
            raise ValueError(f"{self.free_constants} free constants; at most 12 are allowed")
        return self

    @property
    def free_constants(self) -> int:
        """How many numbers could be turned (a roof is read off a table)."""
        return len(self.sustained_tensor) + len(self.assumed) + 2

    def tensor(self, family: str, dtype: str) -> SustainedTensor:
        """The entry of a family and dtype; DescriptionError for a family without one."""
        for item in self.sustained_tensor:
            if item.family == family and item.dtype in ("any", "bf16" if dtype == "fp16" else dtype):
                return item
        known = sorted({item.family for item in self.sustained_tensor})
        raise DescriptionError(
            f"family = {family!r}: no sustained {dtype} rate in calibration.toml (families: "
            f"{', '.join(known)}); give the GPU a sustained_tensor_fraction"
        )

    def assumption(self, op: str) -> Assumed | None:
        """What is assumed of an op, if anything."""
        return next((item for item in self.assumed if item.op == op), None)


@cache
def calibration() -> Calibration:
    """The shipped constants."""
    text = (DATA / "calibration.toml").read_text(encoding="utf-8")
    return parse(Calibration, tomllib.loads(text), "data/calibration.toml")
