"""The profile record: what it refuses, and that files keep every field."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_ref.profile import (
    ProfileError,
    ProfilePoint,
    ProfileWriter,
    UnknownSchemaError,
    as_shape,
    best_of,
    merge_profiles,
    read_profile,
    shape_text,
    write_profile,
)

POINT = ProfilePoint(
    op="gemm",
    implementation="cublas",
    dtype="bf16",
    shape=as_shape({"m": 8192, "n": 4096, "k": 7168}),
    device="NVIDIA H200",
    median_us=712.5,
    p20_us=700.0,
    p80_us=730.0,
    samples=30,
    flops_per_s=6.75e14,
    peak_extra_bytes=0,
    versions=(("torch", "2.11.0"),),
    time_utc="2026-11-30T12:00:00Z",
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
names = texts.filter(bool)
times = st.floats(1e-3, 1e9)


@st.composite
def points(draw: st.DrawFn, device: str = "NVIDIA H200") -> ProfilePoint:
    low, median, high = sorted(draw(st.tuples(times, times, times)))
    failed = draw(st.booleans())
    return ProfilePoint(
        op=draw(names),
        implementation=draw(names),
        dtype=draw(st.sampled_from(["bf16", "fp8"])),
        shape=as_shape(draw(st.dictionaries(names, st.integers(0, 2**40), max_size=4))),
        device=device,
        median_us=None if failed else median,
        p20_us=low if not failed and draw(st.booleans()) else None,
        p80_us=high if not failed and draw(st.booleans()) else None,
        samples=draw(st.integers(0, 100)),
        regime=draw(texts),
        ceiling_fraction=draw(st.none() | st.floats(0.01, 1.5)),
        peak_extra_bytes=draw(st.none() | st.integers(0, 2**40)),
        versions=tuple(sorted(draw(st.dictionaries(names, texts, max_size=2)).items())),
        source=draw(texts),
        status="failed" if failed else "ok",
        error=draw(texts),
    )


@given(drawn=st.lists(points(), max_size=6), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_a_file_returns_every_point(
    drawn: list[ProfilePoint], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("profile") / f"points{suffix}"
    write_profile(path, drawn)
    assert read_profile(path) == drawn
    write_profile(path, drawn, append=True)
    assert read_profile(path) == drawn * 2


def test_writing_is_deterministic(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    write_profile(first, [POINT])
    write_profile(second, [POINT])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("median_us", -1.0),
        ("median_us", 0.0),
        ("median_us", math.nan),
        ("median_us", math.inf),
        ("median_us", None),
        ("median_us", "7"),
        ("p20_us", 713.0),
        ("p80_us", 712.0),
        ("samples", -1),
        ("samples", 1.5),
        ("device", ""),
        ("op", ""),
        ("shape", {"m": -1}),
        ("shape", {"m": 1.5}),
        ("shape", {"m": True}),
        ("shape", 7),
        ("ceiling_fraction", 2.0),
        ("flops_per_s", 0.0),
        ("peak_extra_bytes", -1),
        ("status", "maybe"),
        ("median_us", 10**400),
        ("versions", {"torch": ["2.11"]}),
        ("versions", "2.11"),
        ("colour", "red"),
    ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "points.jsonl"
    bad = POINT.to_json() | {field: value}
    path.write_text('{"schema":1}\n' + json.dumps(POINT.to_json()) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ProfileError, match=r"points\.jsonl:3: ") as error:
        read_profile(path)
    assert field.split("_")[0] in str(error.value)


@pytest.mark.parametrize("field", ["op", "shape", "device", "median_us"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "points.jsonl"
    record = POINT.to_json()
    del record[field]
    path.write_text('{"schema":1}\n' + json.dumps(record) + "\n")
    with pytest.raises(ProfileError, match=f"points.jsonl:2: field '{field}' is missing"):
        read_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"op":"gemm"}\n', "header"),
        ('{"schema":2}\n', "schema = 2"),
        ('{"schema":1,"colour":"red"}\n', "colour"),
        ('{"schema":1}\n{"op":"ge', "not JSON"),
        ('{"schema":1}\n[1]\n', "not a JSON object"),
    ],
)
def test_a_foreign_or_truncated_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"schema":1}\n' * 50)[:-12])
    with pytest.raises(ProfileError, match="unreadable"):
        read_profile(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="unreadable"):
        read_profile(tmp_path / "none.jsonl")


def test_a_second_device_is_refused_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    both = [POINT, replace(POINT, device="NVIDIA B200")]
    write_profile(path, both)
    with pytest.raises(ProfileError, match=r":3: device = 'NVIDIA B200'"):
        read_profile(path)
    assert read_profile(path, one_device=False) == both


def test_merging_keeps_provenance_and_order() -> None:
    ours = replace(POINT, commit="abc", median_us=705.0)
    public = replace(POINT, source="a public table")
    merged = merge_profiles([ours, POINT], [public, POINT])
    assert merged == [ours, POINT, public]
    assert best_of(merged) == {POINT.key: ours}


def test_a_failed_point_is_kept_but_never_chosen() -> None:
    failed = replace(POINT, median_us=None, p20_us=None, p80_us=None, status="failed", error="out of memory")
    assert best_of([failed, POINT]) == {POINT.key: POINT}
    with pytest.raises(ProfileError, match="a failed point has no time"):
        replace(POINT, status="failed")


# What an interrupted measurement leaves behind.


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    good = json.dumps(POINT.to_json())
    lines = ['{"schema":1}', good, '{"op":"ge', "[1]", good.replace("712.5", "NaN"), good]
    path.write_text("\n".join(lines))
    faults: list[str] = []
    assert read_profile(path, faults=faults) == [POINT, POINT]
    assert [fault.split(": ")[0] for fault in faults] == [f"{path}:{number}" for number in (3, 4, 5)]
    assert "median_us = nan" in faults[2]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_no_parser_likes_is_named_and_costs_that_line_alone(tmp_path: Path, suffix: str) -> None:
    good = json.dumps(POINT.to_json()).encode()
    bad = [b"\xff\xfe\x00", b"[" * 100_000, good.replace(b"712.5", b"9" * 5000), bytes(200)]
    data = b"\n".join([b'{"schema":1}', good, *bad, good])
    path = tmp_path / f"points.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    faults: list[str] = []
    assert read_profile(path, faults=faults) == [POINT, POINT]
    assert [fault.split(": ")[0] for fault in faults] == [f"{path}:{number}" for number in (3, 4, 5, 6)]
    assert all(len(fault) < 400 for fault in faults)
    with pytest.raises(ProfileError, match=r":3: not UTF-8 text"):
        read_profile(path)


def test_a_gzip_with_spoilt_bytes_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl.gz"
    write_profile(path, [replace(POINT, error=str(place) * 999) for place in range(9)] * 200)
    whole = bytearray(path.read_bytes())
    whole[-40:-30] = bytes(10)
    path.write_bytes(whole)
    faults: list[str] = []
    assert read_profile(path, faults=faults)
    assert "unreadable" in faults[-1]


def test_points_without_a_header_are_faults(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps(POINT.to_json()) + "\n")
    faults: list[str] = []
    assert read_profile(path, faults=faults) == []
    assert "header" in faults[0]


def test_an_unknown_schema_is_never_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text('{"schema":1}\n' + json.dumps(POINT.to_json()) + '\n{"schema":2}\n{"op":3}\n')
    with pytest.raises(UnknownSchemaError, match=r"points\.jsonl:3: schema = 2"):
        read_profile(path, faults=[])


def test_what_a_cut_off_gzip_still_holds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl.gz"
    write_profile(path, [replace(POINT, median_us=700.0 + place) for place in range(13)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    faults: list[str] = []
    assert len(read_profile(path, faults=faults)) == 13
    assert "unreadable" in faults[-1]


@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(points(), min_size=1, max_size=5), shared=st.booleans())
def test_a_writer_adds_points_one_by_one(
    drawn: list[ProfilePoint], shared: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the header shares, each point comes back as it was, over two runs."""
    path = tmp_path_factory.mktemp("profile") / "points.jsonl"
    first = drawn[0]
    header = {"device": first.device, "serial": "7", "versions": first.versions, "source": first.source}
    for _ in range(2):
        with ProfileWriter(path, header if shared else {}) as writer:
            for place, point in enumerate(drawn):
                writer.add(point)
                assert read_profile(path)[-place - 1 :] == drawn[: place + 1]
    assert read_profile(path) == drawn * 2


def test_a_shape_reads_as_text() -> None:
    assert shape_text(POINT.shape) == "k=7168 m=8192 n=4096"
    assert shape_text({"rows": 1}) == "rows=1"
