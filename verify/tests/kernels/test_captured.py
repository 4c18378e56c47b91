"""The trained regime: what was captured comes back, says what it repeats, and enters races."""

from pathlib import Path

import pytest
import torch

from hyscale_kernels.profiling import captured as captures
from hyscale_kernels.profiling.cases import captured_case
from hyscale_kernels.profiling.gate import objection


def layer_of(seed: int, number: int = 3) -> captures.CapturedLayer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    positions = torch.tensor([7, 30, 63])
    return captures.CapturedLayer.of(number, normal(3, 2, 16), normal(64, 16), normal(3, 2), positions)


def test_a_captured_indexer_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "data" / "indexer.npz"
    layer = layer_of(0)
    size = captures.write(path, [layer], {"steps": 5})
    found = captures.read(path)
    assert size == path.stat().st_size
    assert list(path.parent.iterdir()) == [path]
    assert found.provenance["steps"] == 5
    mine, theirs = layer.operands("fp8"), found.layers[0].operands("fp8")
    for one, other in zip(mine[:6], theirs[:6], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.float(), other.float())


def test_both_dtypes_of_a_capture_are_the_same_numbers() -> None:
    layer = layer_of(1)
    low, high = layer.operands("fp8"), layer.operands("bf16")
    assert low.k_scale is not None
    assert torch.equal(low.k.float() * low.k_scale[:, None], high.k.float())
    assert torch.equal(low.q.float() * low.w[..., None], high.q.float() * high.w[..., None])


def test_tiled_keys_say_so_and_keep_their_windows() -> None:
    found = layer_of(2).operands("fp8", tiles=3, row_tiles=2)
    assert found.k.shape == (192, 16)
    assert found.q.shape == (6, 2, 16)
    assert found.end.tolist() == [136, 159, 192] * 2
    assert found.k_scale is not None
    assert torch.equal(found.k_scale[:64], found.k_scale[128:])
    assert "64 keys repeated 3 times" in found.label
    assert "rows repeated 2 times" in found.label
    assert "repeated" not in layer_of(2).operands("bf16").label


def test_a_capture_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "LIMIT_BYTES", 100)
    with pytest.raises(ValueError, match="allowed: at most 100"):
        captures.write(tmp_path / "indexer.npz", [layer_of(0)], {})
    assert not list(tmp_path.iterdir())


def test_a_missing_or_foreign_capture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"trained_indexer\.py trains one"):
        captures.read(tmp_path / "none.npz")
    (tmp_path / "other.npz").write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="not a captured indexer"):
        captures.read(tmp_path / "other.npz")


def test_a_captured_case_is_raced_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "indexer.npz"
    captures.write(path, [layer_of(0), layer_of(1, 5)], {})
    for dtype in ("bf16", "fp8"):
        case = captured_case(6, 128, dtype, layer=1, top_k=4, path=path, device="cpu")
        assert (case.rows, case.keys, case.windows) == (6, 128, "causal")
        assert "layer 5" in case.regime
        assert "64 keys repeated 2 times" in case.regime
        k = case.k.double() if case.k_scale is None else case.k.double() * case.k_scale.double()[:, None]
        products = torch.einsum("thd,sd->ths", case.q.double(), k).relu()
        scores = torch.einsum("ths,th->ts", products, case.w.double())
        hidden = torch.arange(case.keys) >= case.end[:, None]
        ranked = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True, stable=True)
        assert objection(case, ranked.indices[:, : case.top_k].int()) is None
        assert objection(case, ranked.indices[:, 1 : case.top_k + 1].int()) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T": 4}, "captured: 3 rows, 64 keys"),
        ({"S": 100}, "captured: 3 rows, 64 keys"),
        ({"layer": 2}, "layer: 2; allowed: 0 to 0"),
        ({"dtype": "fp16"}, "captured: bf16, fp8"),
    ],
)
def test_what_was_not_captured_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "indexer.npz"
    captures.write(path, [layer_of(0)], {})
    given = {"T": 3, "S": 64, "dtype": "bf16", "path": path, "device": "cpu", **change}
    with pytest.raises(ValueError, match=message):
        captured_case(**given)  # type: ignore[arg-type]
