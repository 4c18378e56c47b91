"""Reading descriptions: TOML files checked against pydantic classes, with errors that name file and field.

Every description is immutable and hashable; unknown fields are refused; units are in the field names.
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DATA = resources.files("hyscale_simulator") / "data"

Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[int, Field(gt=0, strict=True)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
"""Microseconds."""

Item = TypeVar("Item")
Several = Annotated[tuple[Item, ...], Field(strict=False)]
"""A list in the file, a tuple here; its items are checked as strictly as any field."""


class DescriptionError(ValueError):
    """A description that cannot be used: names the file, the field, the value and what is allowed."""


class Description(BaseModel):
    """Base of every description: frozen (so hashable), no unknown fields, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


D = TypeVar("D", bound=Description)


def explain(error: ValidationError, origin: str) -> str:
    """One line a problem: where, what came, what is allowed."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if not _is_alternative(part))
        message, value = item["msg"].removeprefix("Value error, "), _short(item["input"])
        if item["loc"][-1:] == ("str",) and isinstance(item["input"], Mapping):
            continue  # a description in place of a name: what is wrong with it is said by the others
        if item["type"] == "extra_forbidden":
            lines.append(f"{origin}: {where}: unknown field (value {value})")
        elif item["type"] == "missing":
            lines.append(f"{origin}: {where}: required, but missing")
        elif item["type"] == "value_error":  # names its fields itself
            lines.append(": ".join(part for part in (origin, where, message) if part))
        else:
            lines.append(f"{origin}: {where or '(whole)'} = {value}: {message}")
    return "\n".join(lines)


def _is_alternative(part: int | str) -> bool:
    """Whether a part of pydantic's path names one kind of a field that has two, not a field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "Gpu"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse(kind: type[D], fields: Mapping[str, Any], origin: str) -> D:
    """Check ``fields`` against ``kind``; :class:`DescriptionError` names ``origin`` and every bad field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise DescriptionError(explain(error, origin)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; :class:`DescriptionError` when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path}: unreadable: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise DescriptionError(f"{path}: not TOML: {error}") from error


@cache
def shipped(folder: str) -> tuple[str, ...]:
    """Names of the descriptions shipped in ``data/<folder>``, sorted."""
    return tuple(
        sorted(
            item.name.removesuffix(".toml")
            for item in (DATA / folder).iterdir()
            if item.name.endswith(".toml")
        )
    )


def find(kind: type[D], folder: str, name: str, asked_by: str = "") -> D:
    """A shipped description by name, or a user's by path (anything that ends in ``.toml``).

    asked_by: the field that names it, for the :class:`DescriptionError` where there is none or a bad one.
    """
    try:
        if name.endswith(".toml"):
            return parse(kind, read_toml(Path(name)), name)
        found = _find_shipped(kind, folder, name)
    except DescriptionError as error:
        raise DescriptionError(f"{asked_by}: {error}" if asked_by else str(error)) from None
    assert isinstance(found, kind)
    return found


@cache
def _find_shipped(kind: type[D], folder: str, name: str) -> D:
    if name not in shipped(folder):
        known = ", ".join(shipped(folder))
        raise DescriptionError(f"{folder}: no {name!r} is shipped; there are: {known}; or give a .toml file")
    origin = f"data/{folder}/{name}.toml"
    return parse(kind, tomllib.loads((DATA / folder / f"{name}.toml").read_text(encoding="utf-8")), origin)


def schemas(kinds: Iterable[type[Description]]) -> dict[str, dict[str, Any]]:
    """JSON schema of each class, by its name: what an editor needs to check a file as it is written."""
    return {kind.__name__: kind.model_json_schema() for kind in kinds}
