"""The composed step: parts add up exactly, engines agree, and better hardware never hurts."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator import perturb
from hyscale_simulator.critical_path import stream_use
from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.evaluate import Evaluator, evaluate, evaluator
from hyscale_simulator.flops import model_flops
from hyscale_simulator.layout import LayoutError, plan
from hyscale_simulator.result import compare
from hyscale_simulator.scenario import Scenario, load, presets
from hyscale_simulator.work import Rank, backward, forward, layer_kind
from hyscale_simulator.work.items import Compute

GLM, BASELINE = load("glm-5.1-1m-512xh20"), load("glm-5.1-1m-512xh20-baseline")


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Legal scenarios over models, layouts, schedules, policies and implementations."""
    model = draw(
        st.sampled_from(
            ["glm-5.1", "deepseek-v3", "llama3-70b", "gpt-22b", "qwen3-235b", "deepseek-v4-flash"]
        )
    )
    sparse, experts = model in ("glm-5.1", "deepseek-v4-flash"), model not in ("llama3-70b", "gpt-22b")
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe"]))
    stages = draw(st.sampled_from([2, 4])) if schedule == "dualpipe" else draw(st.sampled_from([1, 2, 4]))
    tensor, context = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    data = draw(st.sampled_from([1, 2]))
    table = sparse and draw(st.booleans())
    unfused = model == "gpt-22b" and context == 1 and draw(st.booleans())
    policy = draw(st.sampled_from(["none", "selective", "full"]))
    changes: dict[str, Any] = {
        "model": model,
        "cluster": draw(st.sampled_from(["h20-64x8-8x400g", "h20-64x8-4x400g", "h100-2048x8", "b200-64x8"])),
        "gpus": stages * tensor * context * data,
        "mtp_layers": draw(st.sampled_from([0, 1])) if experts else 0,
        "recompute.layers_fraction": draw(st.sampled_from([0.5, 1.0])),
        "layout.schedule": schedule,
        "layout.pipeline_parallel": stages,
        "layout.virtual_stages": draw(st.sampled_from([1, 2])) if schedule == "interleaved" else 1,
        "layout.tensor_parallel": tensor,
        "layout.context_parallel": context,
        "layout.expert_parallel": tensor * context * data if experts else 1,
        "layout.context_split": draw(st.sampled_from(["zigzag", "contiguous"])),
        "layout.zero_stage": draw(st.sampled_from([0, 1, 2, 3])),
        "layout.sequence_parallel": experts or draw(st.booleans()),
        "batch.sequence_tokens": 8192 if unfused else draw(st.sampled_from([8192, 65536, 1048576])),
        "batch.sequences_per_step": data * stages * draw(st.sampled_from([2, 4])),
        "precision.linear": draw(st.sampled_from(["bf16", "fp8"])),
        "precision.dispatch": draw(st.sampled_from(["bf16", "fp8"])),
        "selection.table": table,
        "selection.selector": draw(st.sampled_from(["torch.topk", "flashinfer"])) if table else "hytopk",
        "selection.scoring_dtype": draw(st.sampled_from(["bf16", "fp8"])),
        "selection.skipped_fraction": 0.0 if table else draw(st.sampled_from([0.0, 0.4])),
        "selection.shard_rows": draw(st.booleans()),
        "selection.record": draw(st.sampled_from(["int32", "packed"])),
        "recompute.policy": policy,
        "recompute.modules": draw(
            st.sampled_from([("core_attn",), ("layernorm", "mla_up_proj", "activation")])
        ),
        "recompute.replay": sparse and policy == "full" and draw(st.booleans()),
        "offload.selection": draw(st.booleans()),
        "overlap.tensor": draw(st.sampled_from(["none", "backward", "full"])),
        "overlap.context": draw(st.booleans()),
        "overlap.expert": draw(st.booleans()),
        "overlap.gradients": draw(st.booleans()),
        "overlap.parameters": draw(st.booleans()),
        "overlap.pipeline": draw(st.booleans()),
        "routing.distribution": draw(st.sampled_from(["balanced", "power_law"])),
        "kernels.attention": "unfused" if unfused else "flash",
        "kernels.dispatcher": draw(st.sampled_from(["deepep", "all_to_all"])),
    }
    return GLM.with_(**{"recompute.replay": False}).with_(**changes)


@given(scenario=scenarios())
@settings(max_examples=200, deadline=None)
def test_parts_add_up_and_streams_account_for_the_step(scenario: Scenario) -> None:
    result = evaluate(scenario)
    assert result.step_ns > 0
    for parts in result.stage_parts_ns:
        assert sum(parts.values()) == result.step_ns
        assert min(parts.values()) >= 0
    assert sum(result.parts_ns.values()) == result.step_ns * scenario.layout.pipeline_parallel
    assert math.isclose(math.fsum(s for _, s in result.breakdown), result.step_time_s, rel_tol=1e-12)
    assert math.isclose(math.fsum(s for _, s in result.critical_path), result.step_time_s, rel_tol=1e-12)
    for use in stream_use(result.timeline):
        assert use.busy_ns + use.idle_ns == result.step_ns
    assert math.isclose(sum(result.provenance.values()), 1.0)
    low, high = result.uncertainty_s
    assert 0 <= low <= result.step_time_s <= high
    assert result.mfu > 0
    assert result.memory.peak_bytes > 0


@given(scenario=scenarios())
@settings(max_examples=50, deadline=None)
def test_simpy_and_the_longest_path_agree_to_the_nanosecond(scenario: Scenario) -> None:
    both = [evaluator()(scenario, engine=engine).timeline for engine in ("simpy", "longest_path")]
    assert (both[0].start_ns == both[1].start_ns).all()
    assert (both[0].end_ns == both[1].end_ns).all()


KINDS = ("attention", "experts", "selection", "projections", "feed-forward", "elementwise")
WAYS = ("gather", "point_to_point", "dispatch", "combine", "all_gather", "reduce_scatter", "all_reduce")


@given(scenario=scenarios(), faster=st.sampled_from(KINDS + WAYS), factor=st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=200, deadline=None)
def test_a_faster_kernel_or_collective_or_network_never_slows_the_step(
    scenario: Scenario, faster: str, factor: float
) -> None:
    """But for what a shorter overlap changes in which kernels lose SMs, which no schedule can exclude."""
    scenario = scenario.with_(**{"overlap.communication_sms": 0})
    base = evaluate(scenario).step_ns
    assert evaluate(scenario, scale=((faster, factor),)).step_ns <= base
    cluster = scenario.cluster_description
    wider = scenario.model_copy()
    wider.__dict__["cluster_description"] = cluster.model_copy(
        update={"nic_gbit_per_s": 2 * cluster.nic_gbit_per_s}
    )
    assert evaluate(wider).step_ns <= base


def test_doubling_every_duration_doubles_the_step() -> None:
    once = evaluate(GLM)
    twice = evaluator()(GLM, perturb=lambda g: g.with_durations(2 * g.duration_ns))
    assert twice.step_ns == 2 * once.step_ns


def test_a_straggling_stage_is_shown_as_jitter_and_slows_all() -> None:
    slow = evaluate(GLM.with_(**{"faults.slow_stage": 3, "faults.slow_stage_factor": 1.2}))
    assert slow.step_ns > evaluate(GLM).step_ns
    assert dict(slow.breakdown)["jitter"] > 0
    assert all(sum(parts.values()) == slow.step_ns for parts in slow.stage_parts_ns)
    with pytest.raises(LayoutError, match=r"faults\.slow_stage = 8: there are 0 to 7"):
        evaluate(GLM.with_(**{"faults.slow_stage": 8, "faults.slow_stage_factor": 1.2}))


def test_jitter_is_seeded_and_mostly_waits() -> None:
    noisy = GLM.with_(**{"faults.jitter_fraction": 0.05, "faults.seed": 7})
    assert evaluate(noisy).step_ns == evaluate(noisy).step_ns
    assert evaluate(noisy).step_ns != evaluate(noisy.with_(**{"faults.seed": 8})).step_ns
    assert evaluate(noisy).step_ns > evaluate(GLM).step_ns
    assert (
        evaluator()(GLM, perturb=lambda graph: perturb.jitter(graph, 0.05, seed=7)).step_ns
        == evaluate(noisy).step_ns
    )


def test_a_damaged_network_slows_what_crosses_it() -> None:
    half = evaluate(GLM.with_(**{"faults.network_level": "leaf", "faults.network_bandwidth_fraction": 0.5}))
    ports = evaluate(GLM.with_(**{"faults.network_level": "leaf", "faults.ports_lost": 4}))
    healthy = dict(evaluate(GLM).breakdown)["expert comm"]
    assert dict(half.breakdown)["expert comm"] == pytest.approx(2 * healthy, rel=0.1)
    assert half.step_ns == ports.step_ns
    with pytest.raises(LayoutError, match="faults: ports_lost = 8: at most 7"):
        evaluate(GLM.with_(**{"faults.ports_lost": 8}))


@pytest.mark.parametrize("name", presets())
def test_every_preset_fits_its_gpus_and_evaluates(name: str) -> None:
    result = evaluate(load(name))
    assert result.memory.fits, result.memory.items
    record = result.to_json()
    assert record["schema"] == 1
    assert record["memory"]["fits"] is True
    assert {row["phase"] for row in result.frame().to_dict("records")} <= {
        "forward", "recompute", "backward", "step",
    }  # fmt: skip
    assert result.frame()["seconds"].sum() / load(name).layout.pipeline_parallel == pytest.approx(
        result.step_time_s
    )


def test_results_compare_side_by_side() -> None:
    frame = compare(evaluate(GLM), evaluate(BASELINE), evaluate(GLM))
    assert list(frame.columns) == [GLM.name, BASELINE.name, f"{GLM.name} (3)"]
    for name, result in zip(frame.columns, (GLM, BASELINE, GLM), strict=True):
        assert frame.loc["step", name] == evaluate(result).step_time_s
        assert frame[name].drop("step").sum() == pytest.approx(frame.loc["step", name])


def test_evaluation_is_pure() -> None:
    fresh = Evaluator()
    first = fresh(GLM).to_json()
    fresh(BASELINE)
    assert fresh(GLM).to_json() == first == Evaluator()(GLM).to_json()


def test_exposed_communication_says_what_it_rests_on() -> None:
    """Within a node, of the H200 that was measured and of an H20 with its links; beyond, a closed form."""

    def known(cluster: str) -> set[tuple[str, str]]:
        changes: dict[str, Any] = {
            "model": "llama3-8b",
            "cluster": cluster,
            "gpus": 8,
            "layout.pipeline_parallel": 1,
            "layout.virtual_stages": 1,
            "layout.schedule": "1f1b",
            "batch.sequences_per_step": 8,
        }
        result = evaluate(load("llama3-405b-8192xh100").with_(**changes))
        return {(op, how) for (op, dtype, how, _), _ in result.coverage if not dtype}

    assert known("h200-64x8") == {("all_gather", "measured"), ("reduce_scatter", "measured")}
    assert known("h20-64x8-8x400g") == {("all_gather", "projected"), ("reduce_scatter", "projected")}
    exchange = {how for (op, _, how, _), _ in evaluate(GLM).coverage if op in ("dispatch", "combine")}
    assert exchange == {"assumed"}


# What selection and replay do.


def seconds(scenario: Scenario, phase: str, kind: str) -> float:
    return evaluate(scenario).parts_ns.get(f"{phase}/{kind}", 0) / 1e9


def test_replay_removes_the_second_selection() -> None:
    without = GLM.with_(**{"recompute.replay": False})
    assert seconds(without, "forward", "selection") == pytest.approx(
        seconds(without, "recompute", "selection"), rel=1e-6
    )
    assert seconds(GLM, "recompute", "selection") < 0.01 * seconds(GLM, "forward", "selection")
    assert evaluate(GLM).step_time_s < evaluate(without).step_time_s


def test_the_loss_scores_the_selected_keys_itself_with_replay_or_without() -> None:
    without = GLM.with_(**{"recompute.replay": False})
    for scenario in (GLM, without):
        assert seconds(scenario, "forward", "index loss") == 0.0
    assert seconds(GLM, "recompute", "index loss") == seconds(without, "recompute", "index loss") > 0


def test_non_reentrant_checkpointing_computes_the_loss_twice() -> None:
    twice = GLM.with_(**{"recompute.reentrant": False})
    loss = seconds(GLM, "recompute", "index loss")
    assert seconds(twice, "forward", "index loss") == seconds(twice, "recompute", "index loss") == loss
    # The record is kept all the same.
    assert seconds(twice, "recompute", "selection") == seconds(GLM, "recompute", "selection")


def test_replay_alone_stays_below_two() -> None:
    gain = evaluate(BASELINE).step_time_s / evaluate(BASELINE.with_(**{"recompute.replay": True})).step_time_s
    assert 1.2 < gain < 2.0


def test_offloading_hides_beneath_kernels_or_shows() -> None:
    """At 1M tokens a layer's input leaves in milliseconds; everything kept without recomputation does not."""
    hidden = GLM.with_(**{"offload.activations": 1.0})
    assert evaluate(hidden).step_ns == evaluate(GLM).step_ns
    assert evaluate(hidden).memory.peak_bytes < evaluate(GLM).memory.peak_bytes
    small = {
        "model": "llama3-8b",
        "gpus": 8,
        "layout.tensor_parallel": 1,
        "layout.pipeline_parallel": 1,
        "layout.virtual_stages": 1,
        "layout.schedule": "1f1b",
        "batch.sequences_per_step": 8,
    }
    shown = load("llama3-405b-8192xh100").with_(
        **small, **{"recompute.policy": "none", "offload.activations": 1.0}
    )
    assert dict(evaluate(shown).breakdown)["host copies"] > 0


def test_sharing_rows_divides_selection_among_tensor_ranks() -> None:
    """Otherwise each of them selects for all: TP 4 with CP 16 takes four times what CP 64 does."""
    wide = {"layout.tensor_parallel": 4, "layout.context_parallel": 16}
    replicated, shared = (
        evaluate(GLM.with_(**wide, **{"selection.shard_rows": shard})) for shard in (False, True)
    )
    alone = dict(evaluate(GLM).breakdown)["selection"]
    assert dict(replicated.breakdown)["selection"] == pytest.approx(4 * alone, rel=0.05)
    assert dict(shared.breakdown)["selection"] == pytest.approx(alone, rel=0.05)
    assert dict(shared.breakdown)["tensor comm"] > dict(replicated.breakdown)["tensor comm"]


def test_unfused_fp32_scoring_costs_what_it_writes() -> None:
    """32 heads of 20 bytes a pair beside the products: an order of magnitude over bf16 scoring."""
    unfused = BASELINE.with_(
        **{"selection.scoring_dtype": "fp32", "selection.square": True, "selection.selector": "torch.topk"}
    )
    assert (
        dict(evaluate(unfused).breakdown)["selection"] > 8 * dict(evaluate(BASELINE).breakdown)["selection"]
    )
    wide, narrow = (
        dict(evaluate(unfused.with_(**{"selection.table_rows": rows})).memory.items)["score table"]
        for rows in (512, 256)
    )
    assert wide - narrow == 33 * 4 * 256 * BASELINE.batch.sequence_tokens


def test_a_contiguous_split_nearly_doubles_selection() -> None:
    contiguous = evaluate(GLM.with_(**{"layout.context_split": "contiguous"}))
    balanced = evaluate(GLM)
    parts, even = dict(contiguous.breakdown), dict(balanced.breakdown)
    assert parts["selection"] == pytest.approx(even["selection"], rel=1e-3)  # the mean rank does the same
    assert parts["imbalance"] == pytest.approx(even["selection"] * (1 - 1 / 64), rel=0.05)


def test_selection_shares_of_one_layer_at_a_million_tokens() -> None:
    """Scoring is about 77 % of a layer's forward FLOPs."""
    rank = Rank(GLM, plan(GLM))
    items = [item for item in forward(rank, layer_kind(rank, 40)) if isinstance(item, Compute)]
    flops = {item.name: item.call.cost.tensor_flops * item.count for item in items}
    scoring = 2.0 * 32 * 128 * rank.tokens * rank.keys_mean
    assert scoring / (sum(flops.values()) - flops["select.hytopk"] + scoring) == pytest.approx(0.77, abs=0.02)


def test_backward_linears_do_twice_the_forward() -> None:
    """dgrad and wgrad each repeat the product, but for the detached indexer, which has no dgrad."""
    scenario = load("llama3-405b-8192xh100")
    rank = Rank(scenario, plan(scenario))
    kind = layer_kind(rank, 3)

    def gemms(items: list[Any]) -> float:
        return sum(
            item.call.cost.tensor_flops
            for item in items
            if isinstance(item, Compute) and item.call.op == "gemm"
        )

    assert gemms(backward(rank, kind)) == pytest.approx(2 * gemms(forward(rank, kind)))


@pytest.mark.parametrize("name", ["glm-5.1-1m-512xh20", "llama3-405b-8192xh100", "deepseek-v3-2048xh800"])
def test_counted_flops_match_the_models(name: str) -> None:
    """FLOPs of all priced kernels without recomputation against the model's own count, where they must agree.

    Kernels pad (experts to tiles), repeat QK^T in backward (2.5 for 2), absorb projections and keep a loss:
    a little more than the model asks for, never less.
    """
    scenario = load(name).with_(**{"recompute.replay": False}).with_(**{"recompute.policy": "none"})
    cut = plan(scenario)
    rank = Rank(scenario, cut)
    counted = 0.0
    for layer in range(scenario.model_description.layers + scenario.mtp_layers):
        kind = layer_kind(rank, layer)
        for item in (*forward(rank, kind), *backward(rank, kind)):
            if isinstance(item, Compute) and item.kind.split("/")[1] not in ("index loss", "selection"):
                call = item.mean or item.call
                counted += call.cost.tensor_flops * item.count
    model, batch = scenario.model_description, scenario.batch
    per_rank = model_flops(model, batch.sequence_tokens, batch.sequences_per_microbatch, scenario.mtp_layers)
    head = 6.0 * model.hidden * model.vocabulary * (1 + scenario.mtp_layers)
    per_rank -= head * batch.sequence_tokens * batch.sequences_per_microbatch
    if model.indexer is not None:
        pairs = (batch.sequence_tokens + 1) / 2
        scored = 2.0 * model.indexer.heads * model.indexer.head_dim * (pairs + 2 * 2048)
        per_rank -= scored * model.layers * batch.sequence_tokens
    per_rank /= cut.tensor * cut.context
    assert 1.0 <= counted / per_rank <= 1.35


def test_one_layer_is_traced_kernel_by_kernel() -> None:
    timeline = evaluator().layer(GLM, 40)
    names = {timeline.graph.name(task) for task in range(len(timeline.graph))}
    assert {"select.hytopk", "dispatch", "core", "core.bwd", "experts.up.wgrad"} <= names
    with pytest.raises(ValueError, match="layer = 78; the model has 0 to 77"):
        evaluator().layer(GLM, 78)


sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 6, 8, 16])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_asked_is_answered_or_refused(data: st.DataObject) -> None:
    """Layouts drawn with no regard to the rules: a result, or one message that names the field."""
    fields: dict[str, Any] = {
        f"layout.{name}": data.draw(sizes)
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    }
    ranks = math.prod(fields[f"layout.{n}_parallel"] for n in ("tensor", "context", "pipeline"))
    fields |= {
        "model": data.draw(st.sampled_from(["glm-5.1", "glm-5.2", "gpt-22b", "deepseek-v3", "qwen3-235b"])),
        "cluster": data.draw(st.sampled_from(["h20-64x8-4x400g", "a100-384x8", "b200-64x8"])),
        "gpus": ranks * data.draw(st.integers(1, 3)),
        "layout.schedule": data.draw(st.sampled_from(["1f1b", "interleaved", "dualpipe", "zero_bubble"])),
        "layout.virtual_stages": data.draw(st.sampled_from([1, 1, 1, 2])),
        "layout.sequence_parallel": data.draw(st.booleans()),
        "layout.zero_stage": data.draw(st.integers(0, 3)),
        "batch.sequence_tokens": data.draw(st.sampled_from([1, 100, 4096, 65536, 27720])),
        "batch.sequences_per_step": data.draw(st.sampled_from([1, 7, 48, 5040])),
        "recompute.replay": False,
        "overlap.communication_sms": data.draw(st.sampled_from([0, 20, 70, 500])),
        "overlap.tensor": data.draw(st.sampled_from(["none", "full"])),
        "overlap.expert": data.draw(st.booleans()),
        "routing.max_nodes": data.draw(st.integers(0, 2)),
        "selection.scoring_dtype": data.draw(st.sampled_from(["bf16", "fp8"])),
        "precision.linear": data.draw(st.sampled_from(["bf16", "fp8"])),
    }
    refusal = ""
    try:
        result = evaluate(GLM.with_(**fields))
    except DescriptionError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("scenario glm-5.1-1m-512xh20: ")
    else:
        assert all(sum(parts.values()) == result.step_ns for parts in result.stage_parts_ns)


def test_unknown_engines_and_illegal_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="engine = 'fast'"):
        evaluator()(GLM, engine="fast")
    with pytest.raises(LayoutError):
        evaluate(GLM.with_(gpus=500))
