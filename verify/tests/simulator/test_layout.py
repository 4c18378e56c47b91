"""Layouts: what is legal, what is refused and by which rule, and how the model is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.layout import LayoutError, plan
from hyscale_simulator.scenario import Routing, Scenario, load
from hyscale_simulator.work import Rank
from hyscale_simulator.work.rank import expert_imbalance

GLM = load("glm-5.1-1m-512xh20")
SHARED = GLM.with_(model="glm-5.2")
DENSE = load("llama3-405b-8192xh100")


@pytest.mark.parametrize(
    ("scenario", "changes", "rule"),
    [
        (GLM, {"gpus": 513}, "the cluster 64 nodes"),
        (GLM, {"gpus": 500}, "multiple of tensor x context x pipeline"),
        (GLM, {"layout.tensor_parallel": 16, "layout.context_parallel": 4}, "fit in a node of 8"),
        (
            GLM,
            {"layout.context_parallel": 16, "layout.pipeline_parallel": 8, "gpus": 128},
            "must divide tensor x",
        ),
        (GLM, {"layout.expert_parallel": 48}, "must divide"),
        (GLM, {"batch.sequence_tokens": 1048575}, "multiple of 128"),
        (
            GLM,
            {"batch.sequences_per_step": 1, "batch.sequences_per_microbatch": 2},
            "multiple of data-parallel",
        ),
        (GLM, {"layout.stage_layers": [78]}, "needs 8 numbers that add up to 78"),
        (GLM, {"layout.stage_layers": [10, 10, 10, 10, 10, 10, 10, 10]}, "add up to 78"),
        (GLM, {"layout.virtual_stages": 2}, "only the interleaved schedule"),
        (GLM, {"layout.context_exchange": "all_to_all"}, "divide the 64 heads|only 'all_gather'"),
        (GLM, {"routing.distribution": "counts", "routing.counts": [1, 2]}, "one for each of 256 experts"),
        (
            GLM,
            {"layout.schedule": "dualpipe", "batch.sequences_per_step": 15},
            "DualPipe wants an even number",
        ),
        (SHARED, {}, "must begin with a layer that selects"),
        (DENSE, {"layout.expert_parallel": 2}, "has no experts"),
        (DENSE, {"recompute.policy": "full", "recompute.replay": True}, "has no indexer"),
        (DENSE, {"batch.sequences_per_step": 1088}, "multiple of the 16 stages"),
        (DENSE, {"cluster": "a100-384x8", "gpus": 2048, "precision.linear": "fp8"}, "no fp8 tensor cores"),
    ],
)
def test_an_illegal_layout_is_refused_with_its_rule(
    scenario: Scenario, changes: dict[str, object], rule: str
) -> None:
    with pytest.raises(LayoutError, match=rule):
        plan(scenario.with_(**changes))


def test_index_sharing_is_legal_where_stages_begin_with_a_selecting_layer() -> None:
    plan(SHARED.with_(**{"layout.stage_layers": [10, 12, 8, 12, 8, 12, 8, 8]}))


@given(
    stages=st.sampled_from([1, 2, 3, 4, 6, 8]),
    virtual=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
)
def test_every_layer_is_on_exactly_one_stage(stages: int, virtual: int, schedule: str) -> None:
    if virtual > 1 and schedule != "interleaved":
        virtual = 1
    cut = plan(
        GLM.with_(
            **{
                "gpus": 64 * stages,
                "layout.pipeline_parallel": stages,
                "layout.virtual_stages": virtual,
                "layout.schedule": schedule,
                "batch.sequences_per_step": 4 * stages,
            }
        )
    )
    placed = sorted(layer for stage in range(stages) for layer in cut.layers_of(stage))
    assert placed == list(range(78))
    sizes = [len(piece) for piece in cut.pieces]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the last holds the head


def test_dualpipe_holds_the_model_twice() -> None:
    cut = plan(load("deepseek-v3-2048xh800"))
    placed = sorted(layer for stage in range(16) for layer in cut.layers_of(stage))
    assert placed == sorted([*range(61), *range(61)])
    assert cut.pieces_of(3) == (3, 12)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_contiguous_split_gives_the_last_rank_nearly_twice_the_pairs(ranks: int) -> None:
    """Max over mean is 2 - 1/P; zig-zag is 1."""
    changes = {"layout.context_parallel": ranks, "layout.expert_parallel": ranks, "gpus": 8 * ranks}
    zigzag = Rank(GLM.with_(**changes), plan(GLM.with_(**changes)))
    contiguous = GLM.with_(**changes, **{"layout.context_split": "contiguous"})
    rank = Rank(contiguous, plan(contiguous))
    assert zigzag.keys_slowest == zigzag.keys_mean
    assert rank.keys_slowest / rank.keys_mean == pytest.approx(2 - 1 / ranks, rel=1e-6)


@given(exponent=st.floats(0.01, 2.0), ranks=st.sampled_from([1, 2, 8, 32, 64, 256]))
def test_imbalance_of_a_power_law(exponent: float, ranks: int) -> None:
    routing = Routing(distribution="power_law", exponent=exponent)
    imbalance = expert_imbalance(routing, 256, ranks)
    assert 1.0 <= imbalance <= ranks
    assert imbalance <= expert_imbalance(routing, 256, 256) + 1e-12


def test_imbalance_of_counts() -> None:
    counts = Routing(distribution="counts", counts=(3, 1, 0, 0))
    assert expert_imbalance(counts, 4, 2) == 2.0
    assert expert_imbalance(counts, 4, 4) == 3.0
    assert expert_imbalance(Routing(), 4, 2) == 1.0
