"""Memory against published figures and closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.layout import plan
from hyscale_simulator.memory import (
    CONTEXT_BYTES,
    activation_bytes,
    kept_bytes,
    memory,
    parameters_of,
    what_would_fit,
)
from hyscale_simulator.published import sources
from hyscale_simulator.scenario import Scenario, load
from hyscale_simulator.validation import compare_memory
from hyscale_simulator.work import Rank, layer_kind
from hyscale_simulator.work.selection import record_bytes

GLM = load("glm-5.1-1m-512xh20")


def test_published_memory_is_met_within_ten_percent() -> None:
    compared = compare_memory()
    assert len(compared) >= 10
    for item in compared:
        assert abs(item.error_pct) <= 10, item


@given(
    micro=st.sampled_from([1, 2, 4]),
    length=st.sampled_from([1024, 2048, 4096]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    split=st.booleans(),
    core=st.booleans(),
)
def test_activations_of_a_gpt_layer_follow_korthikanti(
    micro: int, length: int, tensor: int, split: bool, core: bool
) -> None:
    """s b h (10 + 24/t + 5 a s / (h t)); all of it over t with sequence parallelism."""
    (source,) = [s for s in sources() if s.source.startswith("Korthikanti")]
    base = source.scenario_of(source.cases[0])
    scenario = base.with_(
        **{
            "gpus": tensor,
            "layout.tensor_parallel": tensor,
            "layout.sequence_parallel": split,
            "batch.sequence_tokens": length,
            "batch.sequences_per_step": micro,
            "batch.sequences_per_microbatch": micro,
            "recompute.policy": "none" if core else "selective",
        }
    )
    rank = Rank(scenario, plan(scenario))
    s, b, h, a, t = length, micro, 6144, 64, tensor
    table = 5 * a * s / h / t if core else 0.0
    expected = s * b * h * ((34 / t if split else 10 + 24 / t) + table)
    assert activation_bytes(rank, layer_kind(rank, 3)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["glm-5.1-1m-512xh20", "deepseek-v3-2048xh800", "llama3-405b-8192xh100"])
def test_parameters_of_all_stages_add_up_to_the_model(name: str) -> None:
    scenario = load(name).with_(mtp_layers=0)
    cut = plan(scenario)
    rank = Rank(scenario, cut)
    copies = cut.schedule.num_chunks if scenario.layout.schedule == "dualpipe" else 1
    held = sum(
        dense * cut.tensor + expert * cut.expert
        for dense, expert in (parameters_of(rank, stage) for stage in range(cut.pipeline))
    )
    assert held / copies == pytest.approx(scenario.model_description.parameters, rel=1e-6)


def test_a_recomputed_layer_keeps_its_input_alone() -> None:
    rank = Rank(GLM, plan(GLM))
    assert kept_bytes(rank, layer_kind(rank, 40)) == 2 * 16384 * 6144  # 201 MB


def test_selection_records_at_a_million_tokens() -> None:
    """CP64: 134 MB a layer as int32 indices, 46 MB packed at 11 bits."""
    packed = Rank(GLM, plan(GLM))
    raw = Rank(GLM.with_(**{"selection.record": "int32"}), plan(GLM))
    assert record_bytes(raw) == 16384 * (4 * 2048 + 4)
    assert record_bytes(packed) / (16384 * 2048) == pytest.approx(11 / 8, rel=0.01)


def test_records_on_the_host_take_no_device_memory() -> None:
    names = [name for name, _ in memory(GLM.with_(**{"offload.selection": True})).items]
    assert "selection records" not in names
    assert "selection records" in [name for name, _ in memory(GLM).items]


def test_an_unbounded_score_table_does_not_fit_and_is_told_how_to() -> None:
    table = GLM.with_(
        **{"selection.table": True, "selection.selector": "torch.topk", "selection.table_rows": 16384}
    )
    held = memory(table)
    assert not held.fits
    assert held.items[0][0] == "score table"
    # A layer allocates what follows its selection in the table's place: the rest of the table counts.
    whole = 4 * 16384 * 1048576
    assert 0.9 * whole < held.items[0][1] < whole
    half = memory(table.with_(**{"selection.table_rows": 8192}))
    assert held.items[0][1] - half.items[0][1] == whole / 2
    assert what_would_fit(table) == ("bound the score table to 1 GiB (selection.table_rows = 0)",)
    assert memory(table.with_(**{"selection.table_rows": 0})).fits


def test_what_cannot_fit_is_not_promised() -> None:
    huge = GLM.with_(
        **{
            "gpus": 8,
            "layout.context_parallel": 8,
            "layout.pipeline_parallel": 1,
            "layout.expert_parallel": 8,
        }
    )
    assert not memory(huge).fits
    assert what_would_fit(huge) == ()


@given(stage=st.sampled_from([0, 1, 2, 3]))
def test_zero_shards_what_its_stage_says(stage: int) -> None:
    scenario = load("llama3-405b-8192xh100").with_(**{"layout.zero_stage": stage})
    items = dict(memory(scenario).items)
    whole = dict(memory(scenario.with_(**{"layout.zero_stage": 0})).items)
    for name, from_stage in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        ratio = whole[name] / items[name]
        assert ratio == pytest.approx(64 if stage >= from_stage else 1)


def test_a_table_that_the_rest_of_the_layer_needs_the_room_of_adds_nothing() -> None:
    """A gigabyte of scores is freed before attention and the feed-forward allocate more than that."""
    bounded = GLM.with_(**{"selection.table": True, "selection.selector": "flashinfer"})
    assert dict(memory(bounded).items)["score table"] == 0
    assert memory(bounded).peak_bytes <= memory(GLM).peak_bytes


def eager(tokens: int, **changes: object) -> Scenario:
    """Four dense layers on one GPU, recomputed, as PyTorch runs them operator by operator."""
    model = {
        "name": "small", "source": "test", "layers": 4, "hidden": 1024, "vocabulary": 256,
        "feed_forward": 4096,
        "attention": {"kind": "grouped", "heads": 8, "kv_heads": 8, "head_dim": 128},
    }  # fmt: skip
    fields = {
        "name": "eager", "model": model, "cluster": "h200-64x8", "gpus": 1,
        "batch": {"sequence_tokens": tokens, "sequences_per_step": 1},
        "kernels": {"framework": "eager", "fused_cross_entropy": False},
    }  # fmt: skip
    return Scenario.model_validate(fields).with_(**changes)


def held_parameters(scenario: Scenario) -> float:
    return sum(parameters_of(Rank(scenario, plan(scenario)), 0))


def test_gradients_that_are_made_when_due_give_way_to_inputs() -> None:
    """Short sequences are fullest in the first layer, with the gradients of the others; long ones in the
    last, with the inputs of all."""
    short, long = dict(memory(eager(1024)).items), dict(memory(eager(2**20)).items)
    layer = eager(1024).model_description.dense_parameters(0)
    assert (short["gradients"], long["gradients"]) == (3 * 4 * layer, 0)
    assert (short["activations"], long["activations"]) == (2 * 1024 * 1024, 4 * 2 * 2**20 * 1024)
    # Of two microbatches the first leaves its gradients behind.
    twice = eager(1024, **{"batch.sequences_per_step": 2})
    assert dict(memory(twice).items)["gradients"] == 4 * held_parameters(twice)


@given(tokens=st.integers(1, 2**20))
def test_no_moment_of_an_eager_step_is_fuller_than_its_peak(tokens: int) -> None:
    """Every layer's moment by hand: what is before it keeps inputs, what is behind it left gradients."""
    scenario = eager(tokens)
    model, held = scenario.model_description, memory(scenario)
    layer = model.dense_parameters(0)
    rank = Rank(scenario, plan(scenario))
    running = activation_bytes(rank, layer_kind(rank, 0)) + 2 * 2 * tokens * 4096 + 2 * layer
    moments = [2 * tokens * 1024 * (at + 1) + 4 * layer * (3 - at) for at in range(4)]
    logits = 6 * min(tokens, 4096) * 256
    whole = running + max(moments) + 12 * held_parameters(scenario) + logits + CONTEXT_BYTES
    assert held.peak_bytes == pytest.approx(whole)


def test_weights_in_the_optimizers_format_are_copied_for_the_layer_that_runs() -> None:
    scenario = eager(2**20)
    layer = scenario.model_description.dense_parameters(0)
    assert dict(memory(scenario).items)["weights"] == 2 * layer
    kept = scenario.with_(**{"recompute.policy": "none"})
    assert dict(memory(kept).items)["weights"] == 4 * 2 * layer


def test_gradients_inside_a_feed_forward_join_its_activations() -> None:
    """At its activation function gate, up and silu(gate) are held, and the gradients of silu(gate), of up and
    of their product; that product itself is no longer."""
    items = dict(memory(eager(2**20)).items)
    assert items["inner gradients"] == 2 * 2 * 2**20 * 4096
