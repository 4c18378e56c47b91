"""Races without a GPU: their inputs, the correctness gate, and what the command refuses."""

from importlib.metadata import entry_points

import pytest
import torch

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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["race", "--shapes", "4x"], 2),
        (["race", "--rivals", "nobody"], 2),
        (["race", "--dtypes", "int4"], 2),
        (["race", "--op", "nothing"], 2),
        (["race", "--rounds", "1"], 2),
        (["race", "--op", "replay", "--shapes", "4x5"], 2),
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
