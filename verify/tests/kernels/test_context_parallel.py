"""Context parallelism: two and four ranks against one; gloo on the CPU, NCCL where there are GPUs enough.

The file is also the program that each rank runs: ``test_context_parallel.py RANK FOLDER``. The ranks are
started once and run every case, those of two ranks in a group of two.

What is promised. Selections: the same bits, in every layer, because projections run in blocks of rows of one
size (``row_block``) and nothing else of a row's forward pass looks at other rows of its rank. Losses and
gradients: the same terms added in another order, so within 64 units of float32's precision of the largest
element of the tensor (measured: 10); whatever goes missing or comes twice is a share of the whole. In
bfloat16 the ranks' parts of a key's gradient are rounded before they are added: 8 units of its precision.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

GPUS = torch.cuda.device_count()
RANKS = 4 if GPUS == 0 or GPUS >= 4 else 2
S, K, VOCABULARY = 8, 3, 16
DTYPE = torch.bfloat16 if GPUS else torch.float32
BUDGET = {torch.float32: 64 * 2.0**-23, torch.bfloat16: 8 * 2.0**-8}
TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """One configuration: how many ranks, how the sequence is split, and what the layers do."""

    ranks: int
    split: str
    layer: dict[str, Any]
    stage: str = "sparse"
    ratio: int = 1
    documents: bool = False
    selecting_layers: tuple[int, ...] = (0, 1)
    layers: int = 2


ONE_LAYER: dict[str, Any] = {"layers": 1, "selecting_layers": (0,)}

CASES = {
    "2 zigzag, replay": Case(2, "zigzag", {"recompute": "full+replay"}, selecting_layers=(0,)),
    "2 zigzag, materialised": Case(2, "zigzag", {"recompute": "full", "selection": "materialised"}),
    "2 zigzag, warm-up": Case(2, "zigzag", {}, stage="warmup"),
    "4 contiguous, documents": Case(4, "contiguous", {"recompute": "none"}, documents=True),
    "4 contiguous, compressed": Case(4, "contiguous", {"recompute": "none"}, ratio=2, **ONE_LAYER),
    "4 zigzag, fp8": Case(4, "zigzag", {"recompute": "full+replay", "indexer_dtype": "fp8"}, **ONE_LAYER),
}


def run(case: Case, context: Any, device: str) -> dict[str, Any]:
    """One step of a small model on the rows of this rank; results on the CPU."""
    from hyscale_kernels.layer import (
        Decoder,
        DecoderConfig,
        LayerConfig,
        Observation,
        PartTimer,
        Rows,
        Step,
        next_tokens,
    )
    from hyscale_ref.shapes import TINY

    shape = replace(TINY, indexer=replace(TINY.indexer, top_k=K, key_ratio=case.ratio))
    shape = replace(
        shape, layers=case.layers, selecting_layers=case.selecting_layers,
        sparse_layers=tuple(range(case.layers)),
    )  # fmt: skip
    layer = LayerConfig(shape=shape, dtype=DTYPE, row_block=1, **case.layer)
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(layer=layer, vocabulary=VOCABULARY, mlp=16, head_rows=2)).to(device)
    tokens = torch.randint(VOCABULARY, (S,), generator=torch.Generator().manual_seed(1)).to(device)
    cu_seqlens = torch.tensor([0, 3, 7], device=device) if case.documents else None
    rows = (Rows.of if context is None else context.rows)(
        S, cu_seqlens=cu_seqlens, ratio=case.ratio, device=device
    )
    timer = PartTimer(device)
    step = Step(rows=rows, context=context, stage=case.stage, timer=timer)  # type: ignore[arg-type]
    given, wanted = (rows.of_sequence(each) for each in (tokens, next_tokens(tokens, cu_seqlens)))
    seen: list[Observation] = []
    if case.stage == "sparse":
        model.observe(given, step, seen.append)
    timer.start()
    losses = model(given, wanted, step)
    losses.total.backward()
    values = torch.stack([losses.total.detach(), losses.language, *losses.indexer])
    if context is not None:
        context.sum_gradients(model.parameters(), timer)
        values = context.sum_over_ranks(values)
    return {
        "positions": rows.positions.long().cpu(),
        "indices": [each.indices.cpu() for each in seen],
        "losses": values.cpu(),
        "gradients": {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None},
        "parts": timer.report(),
    }


def main(rank: int, folder: Path) -> None:
    """Rank ``rank``: every case, results to FOLDER/<case>.<rank>.pt."""
    from torch import distributed

    from hyscale_kernels.layer import ContextParallel

    torch.set_num_threads(1)
    device = f"cuda:{rank}" if GPUS else "cpu"
    if GPUS:
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    else:
        from hyscale_verify.interpreter import quicken

        quicken()
    distributed.init_process_group(
        "nccl" if GPUS else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    pair = distributed.new_group([0, 1])
    for number, case in enumerate(CASES.values()):
        if rank < case.ranks <= RANKS:
            group = pair if case.ranks == 2 else None
            context = ContextParallel.over(group, case.split)  # type: ignore[arg-type]
            torch.save(run(case, context, device), folder / f"{number}.{rank}.pt")
    if rank >= 2:
        try:
            ContextParallel.over(pair)
        except ValueError as error:
            (folder / f"refused.{rank}").write_text(str(error))
    distributed.destroy_process_group()


@pytest.mark.skipif(GPUS == 1, reason="needs two GPUs, or none")
def test_ranks_give_what_one_gives(tmp_path: Path, device: str) -> None:
    """One test, so that the ranks start once: every case, and what the last lines say."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        wanted = alone(device)
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, f"rank {rank}:\n{output}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for number, (name, case) in enumerate(CASES.items()):
        if case.ranks > RANKS:
            continue
        found = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(case.ranks)]
        check_agreement(name, wanted[name], found)
        if name == "2 zigzag, materialised":
            check_exposed_communication(found[0]["parts"])
    for rank in range(2, RANKS):  # a rank that does not belong to the pair asked for its context
        assert f"without this process, rank {rank}" in (tmp_path / f"refused.{rank}").read_text()


def alone(device: str) -> dict[str, dict[str, Any]]:
    """Every case on one rank, here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: run(case, None, device) for name, case in CASES.items() if case.ranks <= RANKS}
    finally:
        torch.set_num_threads(threads)


def check_agreement(name: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Positions make up the sequence; selections are equal; losses and gradients agree, and on all ranks."""
    positions = torch.cat([each["positions"] for each in ranks])
    assert positions.sort().values.tolist() == list(range(S)), name
    for each in ranks:
        assert len(each["indices"]) == len(one["indices"]), name
        for ours, whole in zip(each["indices"], one["indices"], strict=True):
            assert torch.equal(ours, whole[each["positions"]]), name
        assert each["gradients"].keys() == one["gradients"].keys(), name
        for key, want in values(one).items():
            found = values(each)[key]
            budget = BUDGET[torch.float32 if key == "losses" else DTYPE]
            assert (found - want).abs().max() <= budget * want.abs().max(), (name, key)
            assert torch.equal(found, values(ranks[0])[key]), (name, key)


def check_exposed_communication(parts: dict[str, float]) -> None:
    """Waiting for keys, in both passes over a layer, and for their gradients and the parameters'."""
    kinds = {name.partition(".")[2] for name in parts if name.startswith("communication")}
    assert kinds == {"forward", "recompute", "backward"}
    assert all(parts[f"communication.{kind}"] > 0 for kind in kinds)


def values(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Losses and gradients by name."""
    return {"losses": result["losses"]} | result["gradients"]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
