"""Convert public kernel measurements to profile files: run once, results are committed.

    python simulator/tools/convert_public_tables.py FOLDER_OF_CSV

FOLDER_OF_CSV holds the H200 tables of NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), trimmed
to CSV: latency in microseconds, message sizes in bytes.  Figures published in prose or charts are listed
below with their source.
"""

import argparse
import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hyscale_ref.profile import ProfilePoint, as_shape, write_profile

AICONFIGURATOR = "NVIDIA AIConfigurator, H200 tables (ai-dynamo/aiconfigurator, Apache-2.0)"
HERE = Path(__file__).parents[1] / "hyscale_simulator" / "data" / "profiles"
H200, H100, B200 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200"

Row = Mapping[str, str]


def rows(path: Path) -> Iterator[Row]:
    """The rows of a CSV file, gzipped or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from csv.DictReader(data.decode().splitlines())


def point(
    op: str, implementation: str, dtype: str, latency_us: float, regime: str = "", **shape: int
) -> ProfilePoint:
    """One point of the AIConfigurator tables."""
    return ProfilePoint(
        op=op,
        implementation=implementation,
        dtype=dtype,
        shape=as_shape(shape),
        device=H200,
        median_us=latency_us,
        regime=regime,
        source=AICONFIGURATOR,
    )


def gemm(row: Row) -> ProfilePoint | None:
    """bf16 (cuBLAS) and fp8 with block scales (DeepGEMM)."""
    fp8 = row["gemm_dtype"] == "fp8_block"
    return point(
        "gemm",
        "deepgemm" if fp8 else "cublas",
        "fp8" if fp8 else "bf16",
        float(row["latency_us"]),
        m=int(row["m"]),
        n=int(row["n"]),
        k=int(row["k"]),
    )


def _window(row: Row) -> tuple[int, int] | None:
    """(rows, mean keys) of a single causal sequence; None for batches and calls too small to train with."""
    new, past = int(row["new_tokens"]), int(row["past_tokens"])
    if int(row["batch_size"]) != 1 or new < 256 or float(row["latency_us"]) <= 0:
        return None
    return new, past + (new + 1) // 2


def index_scores(row: Row) -> ProfilePoint | None:
    """DeepGEMM's fp8 indexer scores, 32 heads of 128, written out in fp32."""
    window = _window(row)
    if window is None:
        return None
    return point(
        "index_scores", "deepgemm", "fp8", float(row["latency_us"]),
        rows=window[0], keys=window[1], heads=32, dim=128,
    )  # fmt: skip


def index_select(row: Row) -> ProfilePoint | None:
    """SGLang's top-2048 of those scores; ``flat`` ones are like an untrained indexer's."""
    window = _window(row)
    if window is None or int(row["past_tokens"]) + int(row["new_tokens"]) <= 2048:
        return None
    regime = "untrained" if row["score_mode"] == "flat" else "trained"
    return point(
        "index_select", "sglang", "fp32", float(row["latency_us"]), regime,
        rows=window[0], keys=window[1], top_k=2048,
    )  # fmt: skip


def sparse_attention(row: Row) -> ProfilePoint | None:
    """FlashMLA's sparse prefill: 64 heads, 576 / 512, 2,048 keys a row, whatever the past."""
    window = _window(row)
    if window is None or row["past_tokens"] != "65536":
        return None
    return point(
        "sparse_attention", "flashmla", "bf16", float(row["latency_us"]),
        rows=window[0], heads=64, qk_dim=576, v_dim=512, top_k=2048,
    )  # fmt: skip


def convert(source: Path, reader: Callable[[Row], ProfilePoint | None]) -> list[ProfilePoint]:
    """All usable rows of one table, repeats of a shape dropped."""
    points: dict[object, ProfilePoint] = {}
    for row in rows(source):
        converted = reader(row)
        if converted is not None:
            points.setdefault(converted.key, converted)
    return list(points.values())


FA3 = "FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, head dim 128"
FA4 = "flash-attention PR 2280 (head dim 128, 2CTA backward) and PR 2270 (head dims 192 and 128)"

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
H100_TFLOPS: Mapping[tuple[str, str, str], tuple[int, ...]] = {
    ("flash-attention-3", "attention", "full"): (467, 565, 625, 638, 646, 648),
    ("flash-attention-3", "attention", "causal"): (292, 423, 521, 579, 602, 616),
    ("flash-attention-3", "attention_bwd", "full"): (316, 424, 501, 542, 559, 561),
    ("cudnn", "attention", "full"): (497, 574, 617, 609, 600, 595),
    ("cudnn", "attention", "causal"): (315, 410, 484, 518, 529, 539),
    ("cudnn", "attention_bwd", "full"): (305, 408, 465, 499, 518, 516),
    ("flash-attention-2", "attention", "full"): (309, 350, 362, 368, 370, 370),
    ("flash-attention-2", "attention", "causal"): (191, 260, 298, 319, 333, 335),
    ("flash-attention-2", "attention_bwd", "full"): (214, 260, 291, 310, 318, 322),
}


def attention(
    device: str,
    op: str,
    regime: str,
    length: int,
    batch: int,
    tflops: float,
    source: str,
    who: str,
    qk_dim: int = 128,
) -> ProfilePoint:
    """An attention benchmark given as TFLOPS: 2 b s^2 h (d_qk + d_v) forward, halved when causal, 2.5 times
    backward (the convention of both sources)."""
    heads, v_dim = 16, 128
    keys = length // 2 if regime == "causal" else length
    flops = 2.0 * batch * length * keys * heads * (qk_dim + v_dim) * (2.5 if op == "attention_bwd" else 1)
    return ProfilePoint(
        op=op,
        implementation=who,
        dtype="bf16",
        shape=as_shape(
            {"batch": batch, "heads": heads, "kv_heads": heads, "queries": length, "keys": keys,
             "qk_dim": qk_dim, "v_dim": v_dim}
        ),
        device=device,
        median_us=round(flops / tflops / 1e6, 3),
        flops_per_s=tflops * 1e12,
        regime=regime,
        source=source,
    )  # fmt: skip


def h100() -> Iterator[ProfilePoint]:
    """FlashAttention-3, and what it was compared with, on an H100."""
    for (who, op, regime), rates in H100_TFLOPS.items():
        for length, rate in zip(LENGTHS, rates, strict=True):
            yield attention(H100, op, regime, length, 16384 // length, rate, FA3, who)


def b200() -> Iterator[ProfilePoint]:
    """Attention on a B200."""
    for op, regime, rate, wide in (
        ("attention", "full", 1534.8, 1555.7), ("attention", "causal", 1418.1, 1494.1),
        ("attention_bwd", "full", 1359.8, 1072.8), ("attention_bwd", "causal", 1208.6, 971.1),
    ):  # fmt: skip
        yield attention(B200, op, regime, 8192, 4, rate, FA4, "flash-attention-4")
        yield attention(B200, op, regime, 8192, 4, wide, FA4, "flash-attention-4", qk_dim=192)


def write(name: str, points: Iterable[ProfilePoint]) -> None:
    """Write one shipped profile and say how large it is."""
    found = list(points)
    path = HERE / name
    write_profile(path, found)
    print(f"{path.name}: {len(found)} points, {path.stat().st_size} bytes")


def main() -> None:
    """Write every shipped public profile, and copy the collective tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    write("h200-gemm.jsonl.gz", convert(folder / "h200_gemm.csv.gz", gemm))
    selection = convert(folder / "h200_glm5_mqa_logits_deepgemm.csv", index_scores)
    selection += convert(folder / "h200_glm5_topk_sglang.csv", index_select)
    selection += convert(folder / "h200_glm5_sparse_mla_flashmla.csv", sparse_attention)
    write("h200-sparse-attention.jsonl.gz", selection)
    write("h100-attention.jsonl", h100())
    write("b200-attention.jsonl", b200())
    for table in ("h200_nccl.csv", "h200_deepep.csv"):
        data = (folder / table).read_bytes()
        (HERE / f"{table.replace('_', '-')}.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
