"""Races without a GPU: their inputs, the correctness gate, and what the command refuses."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hyscale_kernels.hytopk import api
from hyscale_kernels.layer import Rows, selection
from hyscale_kernels.profiling import contenders
from hyscale_kernels.profiling.cases import REGIMES, Case, draw
from hyscale_kernels.profiling.commands import profile
from hyscale_kernels.profiling.contenders import CONTENDERS
from hyscale_kernels.profiling.gate import objection
from hyscale_kernels.profiling.race import Shape
from hyscale_kernels.profiling.race_command import RACES


def case(dtype: str = "bf16", regime: str = "random", windows: str = "causal") -> Case:
    return draw(40, 300, dtype, regime=regime, windows=windows, H=4, D=32, top_k=20, device="cpu")


def best(inputs: Case) -> torch.Tensor:
    """The exact selection in float64, best first."""
    q, k, w = inputs.q.double(), inputs.k.double(), inputs.w.double()
    scores = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, k).relu(), w)
    if inputs.k_scale is not None:
        scores = scores * inputs.k_scale.double()
    keys = torch.arange(inputs.keys)
    inside = (keys >= inputs.start[:, None]) & (keys < inputs.end[:, None])
    ranked = scores.masked_fill(~inside, float("-inf")).sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, : inputs.top_k].int()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("regime", list(REGIMES))
def test_the_exact_selection_passes_the_gate_in_any_order(dtype: str, regime: str) -> None:
    inputs = case(dtype, regime)
    indices = best(inputs)
    assert objection(inputs, indices) is None
    assert objection(inputs, indices.flip(1)) is None


def test_periodic_scores_are_best_at_a_stride() -> None:
    inputs = replace(case(regime="periodic", windows="full"), top_k=10)
    assert (best(inputs).sort(dim=1).values == torch.arange(0, 300, 32)).all()


def test_the_gate_stops_a_wrong_member() -> None:
    inputs = case(windows="full")
    indices = best(inputs)
    indices[0, 0] = best(draw(40, 300, "bf16", H=4, D=32, top_k=300, device="cpu"))[0, -1]  # the worst key
    assert "misses key" in str(objection(inputs, indices))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda indices: indices[:, :-1], "returned shape"),
        (lambda indices: indices.index_fill(1, torch.tensor([0]), -1), "distinct keys, not 20"),
        (lambda indices: indices.index_copy(1, torch.tensor([0]), indices[:, 1:2]), "distinct keys, not 20"),
        (lambda indices: indices.index_fill(1, torch.tensor([0]), 299), "outside its window"),
    ],
)
def test_the_gate_names_what_is_wrong(spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    inputs = case()
    assert message in str(objection(inputs, spoil(best(inputs))))


def test_every_row_of_a_short_window_is_wanted() -> None:
    inputs = draw(40, 40, "bf16", windows="causal", H=4, D=32, top_k=20, device="cpu")
    indices = best(inputs).masked_fill(torch.arange(20) >= inputs.end[:, None], -1)
    assert objection(inputs, indices) is None


def test_the_race_of_replay_is_found() -> None:
    """The command finds it by entry point, for its gate is the suite's."""
    found = {entry.name: entry.load() for entry in entry_points(group=RACES)}
    assert callable(found["replay"].race)
    assert found["replay"].header()["op"] == "replay"


def test_a_race_of_replay_needs_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hyscale_kernels.profiling import race_command

    monkeypatch.setattr(race_command, "need_gpu", lambda: None)
    monkeypatch.setattr(race_command, "entry_points", lambda group: [])
    assert profile(["race", "--op", "replay"]) == 3
    assert "installed" in capsys.readouterr().err


def test_pairs_and_flops_are_counted_by_window() -> None:
    assert case(windows="full").pairs() == 40 * 300
    assert case(windows="causal").pairs() == sum(range(261, 301))
    assert case(windows="full").flops() == 2 * 40 * 300 * 4 * 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int4"}, "no dtype 'int4'; there are: bf16, fp16, fp8"),
        ({"dtype": "bf16", "regime": "odd"}, "no regime 'odd'"),
        ({"dtype": "bf16", "windows": "odd"}, "no windows 'odd'"),
    ],
)
def test_an_unknown_name_is_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(4, 8, **arguments, device="cpu")  # type: ignore[arg-type]


def test_more_causal_queries_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="got 9 queries and 8 keys"):
        draw(9, 8, "bf16", windows="causal", device="cpu")


@pytest.mark.parametrize("text", ["4096", "4x", "0x5", "axb", "1x2x3"])
def test_a_shape_is_rows_by_keys(text: str) -> None:
    with pytest.raises(ValueError, match="is not ROWSxKEYS"):
        Shape.parse(text)
    assert Shape.parse("4X5") == Shape(4, 5)


def test_a_contender_says_why_it_cannot_run() -> None:
    assert CONTENDERS["cudnn"].obstacle(case("fp8")) == "takes bf16, not fp8"
    assert "deep_gemm" in str(CONTENDERS["deepgemm+flashinfer"].obstacle(case("fp8")))
    assert CONTENDERS["slab"].obstacle(case("fp8")) is None


def test_leaving_tiles_out_selects_what_leaving_none_out_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, prune = [], api.launch_prune

    def spied(*chunk: Any) -> Any:
        asked.append(chunk)
        return prune(*chunk)

    monkeypatch.setattr(api, "launch_prune", spied)
    inputs = draw(4, 300, "bf16", regime="documents", H=2, D=16, top_k=20, device="cpu")
    pruned, whole = (CONTENDERS[name].prepare(inputs)() for name in ("hytopk", "hytopk_unpruned"))
    assert torch.equal(pruned, whole)
    assert len(asked) == 1


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretended packages of the rivals, as strict as the real ones; what FlashInfer was given, in order."""
    seen: list[dict[str, Any]] = []

    def top_k_ragged_transform(
        scores: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, top_k: int, **options: Any
    ) -> torch.Tensor:
        assert scores.is_contiguous()
        assert (scores.dtype, offsets.dtype, lengths.dtype) == (torch.float32, torch.int32, torch.int32)
        assert (options["deterministic"], options["tie_break"]) == (True, 1)
        seen.append({"rows": scores.shape[0], **options})
        first = options["row_starts"]
        first = torch.zeros_like(lengths) if first is None else first
        at = torch.arange(scores.shape[1])
        inside = (at >= first[:, None]) & (at < (first + lengths)[:, None])
        ranked = scores.masked_fill(~inside, float("-inf")).sort(dim=1, descending=True, stable=True)
        chosen = ranked.indices[:, :top_k] - first[:, None] + offsets[:, None]
        return chosen.masked_fill(torch.arange(top_k) >= lengths[:, None], -1).int()

    def fp8_mqa_logits(
        q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor, start: torch.Tensor,
        end: torch.Tensor, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert not clean_logits
        k, scale = keys
        scores = scored(q, k, w) * scale
        padded = torch.full((scores.shape[0], (scores.shape[1] + 255) // 256 * 256), float("nan"))
        padded[:, : scores.shape[1]] = scores
        return padded[:, : scores.shape[1]]

    for name, call in (("flashinfer", top_k_ragged_transform), ("deep_gemm", fp8_mqa_logits)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, call.__name__, call)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(contenders, "dense_scores", lambda q, k, w, **windows: scored(q, k, w))
    monkeypatch.setattr(contenders, "TABLE_BYTES", 4.0 * 300 * 16)  # 40 rows in chunks of 16, 16 and 8
    return seen


def scored(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q.float(), k.float()).relu(), w.float())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("triton+flashinfer", "bf16"), ("triton+flashinfer", "fp16"), ("deepgemm+flashinfer", "fp8")],
)
@pytest.mark.parametrize("windows", ["full", "causal", "packed"])
def test_a_table_is_written_in_chunks_and_selected_by_flashinfer(
    rivals: list[dict[str, Any]], name: str, dtype: str, windows: str
) -> None:
    inputs = case(dtype, windows="causal" if windows == "causal" else "full")
    if windows == "packed":  # two sequences; a row of the second selects nothing of the first
        inputs = replace(
            inputs, start=torch.arange(40, dtype=torch.int32).div(20, rounding_mode="floor") * 130
        )
        inputs = replace(inputs, end=inputs.start + torch.arange(40, dtype=torch.int32) + 1)
    contender = CONTENDERS[name]
    assert contender.obstacle(inputs) is None
    call = contender.prepare(inputs)
    assert objection(inputs, call()) is None
    assert torch.equal(call(), call())
    assert [given["rows"] for given in rivals[:3]] == [16, 16, 8]
    told = [given["row_starts"] is not None for given in rivals]
    assert set(told) == {windows == "packed"}


class CuDNN:
    """A pretended ``cudnn.DSA``: row t sees the keys up to an offset + t; what it does not see is junk."""

    @staticmethod
    def indexer_forward_wrapper(
        q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, *, ratio: int, sm_scale: float, precision: str,
        q_causal_offsets: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert (ratio, sm_scale, precision) == (1, 1.0, "bf16")
        assert (q_causal_offsets.dtype, tuple(q_causal_offsets.shape)) == (torch.int32, (1,))
        scores = scored(q[0], k[0, :, 0], w[0])
        limit = q_causal_offsets + torch.arange(q.shape[1]) + 1
        return {"scores": scores.masked_fill(torch.arange(k.shape[1]) >= limit[:, None], 1e9)[None]}

    @staticmethod
    def indexer_top_k_wrapper(
        scores: torch.Tensor, lengths: torch.Tensor, top_k: int, *, next_n: int, return_val: bool,
        tie_break: int, deterministic: bool,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert (next_n, return_val, tie_break, deterministic) == (1, False, 1, True)
        beyond = torch.arange(scores.shape[1]) >= lengths[:, None]
        return {"indices": scores.masked_fill(beyond, float("-inf")).topk(top_k, dim=1).indices.int()}


@pytest.mark.parametrize("windows", ["full", "causal"])
def test_cudnn_is_told_where_rows_end(monkeypatch: pytest.MonkeyPatch, windows: str) -> None:
    module = ModuleType("cudnn")
    module.DSA = CuDNN  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(contenders, "TABLE_BYTES", 4.0 * 300 * 16)
    inputs = case("bf16", windows=windows)
    prepare = CONTENDERS["cudnn"].prepare
    assert objection(inputs, prepare(inputs)()) is None
    for other in (replace(inputs, start=inputs.start + 1), replace(inputs, end=inputs.end.flip(0) - 1)):
        with pytest.raises(ValueError, match="windows: of another kind"):
            prepare(other)


@pytest.mark.parametrize("documents", [None, [0, 13, 40]])
def test_the_layer_selects_by_the_same_calls(
    rivals: list[dict[str, Any]], documents: list[int] | None
) -> None:
    cut = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    rows = Rows.of(40, cu_seqlens=cut)
    drawn = case("fp8")
    k, scale, (start, end) = drawn.k[:40], drawn.k_scale[:40], rows.windows
    found = selection._deepgemm_flashinfer(drawn.q, k, drawn.w, scale, drawn.top_k, rows, 4 * 40 * 16, None)
    assert objection(replace(drawn, k=k, k_scale=scale, start=start, end=end), found) is None
    held = found >= 0
    assert (held[:, 1:] <= held[:, :-1]).all()
    assert (found.diff(dim=1) > 0)[held[:, 1:]].all()
    assert {given["row_starts"] is not None for given in rivals} == {documents is not None}
    assert [given["rows"] for given in rivals] == [16, 16, 8]  # as many as the table holds


def test_the_rival_of_16_bit_scores_needs_flashinfer_alone() -> None:
    contender = CONTENDERS["triton+flashinfer"]
    assert contender.obstacle(case("fp8")) == "takes bf16, fp16, not fp8"
    assert contender.packages == ("flashinfer",)
    if importlib.util.find_spec("flashinfer") is None:
        assert "needs the package 'flashinfer'" in str(contender.obstacle(case("bf16")))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["race", "--shapes", "4x"], 2),
        (["race", "--rivals", "nobody"], 2),
        (["race", "--dtypes", "int4"], 2),
        (["race", "--op", "nothing"], 2),
        (["race", "--rounds", "1"], 2),
        (["race", "--op", "replay", "--shapes", "4x5"], 2),
        (["race", "--shapes", "9x8", "--windows", "causal"], 2),
        (["race", "--json", "/no/such/folder/r.json"], 2),
        (["race", "--op", "replay", "--out", "/"], 2),
        (["nothing"], 2),
        (["--help"], 0),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    assert profile(arguments) == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_each_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(["race"]) == 3
    assert profile(["race", "--op", "replay"]) == 3
    assert capsys.readouterr().err.strip().count("\n") == 1


def test_a_race_of_the_captured_regime_needs_the_capture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hyscale_kernels.profiling import race_command

    monkeypatch.setattr(race_command, "need_gpu", lambda: None)
    assert profile(["race", "--regimes", "captured", "--shapes", "255x32768", "--dtypes", "fp8"]) == 2
    assert "captured" in capsys.readouterr().err


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the command race pretended contenders: what each shape does, in order."""

    def use(*fates: Callable[[], str]) -> None:
        from hyscale_kernels.profiling import cases, race, race_command

        coming = iter(fates)

        def pretend(inputs: Any, names: Any, **settings: Any) -> Iterator[dict[str, Any]]:
            reason = next(coming)()
            shape = {"rows": 4, "keys": 8, "dtype": "bf16", "regime": "random", "windows": "full"}
            yield {**shape, "contender": "hytopk", "status": "cannot run", "reason": reason}

        monkeypatch.setattr(race_command, "need_gpu", lambda: None)
        monkeypatch.setattr(race, "race", pretend)
        monkeypatch.setattr(cases, "draw", lambda rows, keys, dtype, **given: fits(rows))

    def fits(rows: int) -> object:
        if rows > 99:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 PiB.")
        return object()

    return use


SHAPES = ("race", "--dtypes", "bf16", "--shapes")


def interrupt() -> str:
    raise KeyboardInterrupt


def test_a_race_goes_to_standard_output_as_json_alone(
    raced: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    raced(lambda: "asleep")
    assert profile([*SHAPES, "4x8", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["schema"], [each["reason"] for each in record["races"]]) == (1, ["asleep"])
    assert list(tmp_path.iterdir()) == []
    raced(lambda: "asleep")
    assert profile([*SHAPES, "4x8"]) == 0
    assert "HyTopK race" in capsys.readouterr().out


def test_an_interrupted_race_keeps_what_it_found(
    raced: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raced(lambda: "asleep", interrupt)
    out, path = tmp_path / "r.jsonl", tmp_path / "r.json"
    assert profile([*SHAPES, "4x8,5x8", "--out", str(out), "--json", str(path)]) == 130
    assert "interrupted after 1 records" in capsys.readouterr().err
    assert [json.loads(line) for line in out.read_text().splitlines()] == json.loads(path.read_text())[
        "races"
    ]


def test_a_shape_that_does_not_fit_is_named_and_the_rest_is_raced(
    raced: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raced(lambda: "asleep")
    path = tmp_path / "r.json"
    assert profile([*SHAPES, "100x8,5x8", "--json", str(path)]) == 1
    assert "left out: 100 x 8 bf16 random full: its inputs do not fit" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["races"]) == 1
