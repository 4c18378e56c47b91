"""Descriptions: exact parameter counts, and one clear message for whatever is wrong."""

from pathlib import Path

import numpy as np
import pytest

from hyscale_simulator.calibration import calibration
from hyscale_simulator.descriptions import DescriptionError, find, schemas, shipped
from hyscale_simulator.hardware import Cluster, Gpu
from hyscale_simulator.model import Model
from hyscale_simulator.profiles import load_profiles
from hyscale_simulator.published import sources
from hyscale_simulator.scenario import Scenario, load, presets

PARAMETERS = {
    "glm-5.1": 743_911_199_232,  # as transformers loads GLM-5
    "glm-5.2": 743_377_000_704,
    "deepseek-v3": 671_026_404_352,  # 671,026,419,200 less 58 x 256 router biases
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-235b": 235_093_634_560,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_counted_exactly(name: str, count: int) -> None:
    assert find(Model, "models", name).parameters == count


@pytest.mark.parametrize("name", [name for name in shipped("models") if name.startswith("gpt-")])
def test_gpt_sizes_are_as_named_and_as_their_paper_counts(name: str) -> None:
    """Narayanan et al. 2021, equation 2, 12 l h^2 (1 + 13/12h + (V + s)/12lh), and the last norm."""
    model = find(Model, "models", name)
    layers, h = model.layers, model.hidden
    counted = 12 * layers * h**2 + 13 * layers * h + (model.vocabulary + model.learned_positions) * h
    assert model.parameters == counted + 2 * h
    size = name.removeprefix("gpt-")
    billions = float(size[:-1]) * {"b": 1, "t": 1000}[size[-1]]
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_an_indexer_is_all_that_v3_2_adds_to_v3() -> None:
    """61 times: queries from their latent, keys and their norm, head weights."""
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    after, before = (find(Model, "models", name).parameters for name in ("deepseek-v3.2", "deepseek-v3"))
    assert after == before + 61 * indexer


def test_index_sharing_saves_the_indexers_of_57_layers() -> None:
    full, shared = find(Model, "models", "glm-5.1"), find(Model, "models", "glm-5.2")
    assert full.indexer is not None
    assert full.parameters - shared.parameters == 57 * full.indexer.parameters(6144, 2048)
    assert sum(shared.selects(layer) for layer in range(78)) == 21


def test_active_parameters_of_glm() -> None:
    assert find(Model, "models", "glm-5.1").active_parameters / 1e9 == pytest.approx(41.8, abs=0.05)


def test_every_shipped_description_is_valid_and_says_where_from() -> None:
    assert all(find(Model, "models", name).source for name in shipped("models"))
    assert all(find(Gpu, "gpus", name).source for name in shipped("gpus"))
    assert all(find(Cluster, "clusters", name).source for name in shipped("clusters"))


def test_every_preset_and_case_is_valid() -> None:
    for name in presets():
        scenario = load(name)
        assert scenario.name == name
        assert scenario.gpus <= scenario.cluster_description.gpus
    for source in sources():
        for case in source.cases:
            source.scenario_of(case)


def test_schemas_are_exported() -> None:
    exported = schemas((Scenario, Model, Cluster, Gpu))
    assert exported["Scenario"]["additionalProperties"] is False
    assert "layout" in exported["Scenario"]["properties"]


GOOD = """
name = "mine"
model = "glm-5.1"
cluster = "h20-64x8-8x400g"
gpus = 512
[batch]
sequence_tokens = 1048576
sequences_per_step = 8
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (GOOD.replace("gpus = 512", "gpu = 512"), ["gpu:", "unknown field"]),
        (GOOD.replace("gpus = 512", "gpus = 0"), ["gpus = 0", "greater than 0"]),
        (GOOD.replace("gpus = 512", "gpus = -8"), ["gpus = -8", "greater than 0"]),
        (GOOD.replace("gpus = 512", 'gpus = "many"'), ["gpus = 'many'", "integer"]),
        (GOOD.replace("gpus = 512", "gpus = 1.5"), ["gpus = 1.5", "integer"]),
        (GOOD.replace("sequence_tokens = 1048576", ""), ["batch.sequence_tokens", "required"]),
        (
            GOOD + '[recompute]\npolicy = "some"\n',
            ["recompute.policy = 'some'", "'none', 'selective' or 'full'"],
        ),
        (
            GOOD + "[selection]\nskipped_fraction = 1.5\n",
            ["selection.skipped_fraction = 1.5", "less than or equal"],
        ),
        (GOOD + "[selection]\ntable = true\n", ["selection", "never writes a score table"]),
        (GOOD + '[recompute]\npolicy = "none"\nreplay = true\n', ["replay", "policy = 'full'"]),
        ("name = ", ["not TOML"]),
    ],
)
def test_a_bad_scenario_is_explained(tmp_path: Path, text: str, wanted: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DescriptionError) as error:
        load(str(path))
    for part in [str(path), *wanted]:
        assert part in str(error.value)


def test_a_missing_file_and_an_unknown_name_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="unreadable"):
        load(str(tmp_path / "none.toml"))
    with pytest.raises(DescriptionError, match="preset 'glm': not shipped; there are: "):
        load("glm")
    with pytest.raises(DescriptionError, match=r"models: no 'gpt-5' is shipped"):
        find(Model, "models", "gpt-5")


def test_a_description_of_ones_own_is_used_by_path(tmp_path: Path) -> None:
    gpu = tmp_path / "mine.toml"
    source = (Path(__file__).parents[3] / "simulator/hyscale_simulator/data/gpus/h20.toml").read_text()
    gpu.write_text(source.replace("memory_gb = 96.0", "memory_gb = 128.0"))
    cluster = tmp_path / "cluster.toml"
    shipped_cluster = (
        Path(__file__).parents[3] / "simulator/hyscale_simulator/data/clusters/h20-64x8-8x400g.toml"
    )
    cluster.write_text(shipped_cluster.read_text().replace('gpu = "h20"', f'gpu = "{gpu}"'))
    scenario = load("glm-5.1-1m-512xh20").with_(cluster=str(cluster))
    assert scenario.gpu_description.memory_gb == 128.0
    assert scenario.hash != load("glm-5.1-1m-512xh20").hash


def test_scenarios_are_values() -> None:
    one, two = load("glm-5.1-1m-512xh20"), load("glm-5.1-1m-512xh20")
    assert one == two
    assert hash(one) == hash(two)
    changed = one.with_(**{"layout.context_parallel": 32, "batch.sequences_per_step": 32})
    assert changed != one
    assert one.layout.context_parallel == 64
    assert changed.layout.context_parallel == 32
    assert changed.with_(**{"layout.context_parallel": 64, "batch.sequences_per_step": 16}) == one
    assert one.with_(name="other").hash == one.hash


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layout.colour", "layout.tensor_parallel"),
        ("colour", "there are: name"),
        ("layout.tensor_parallel.more", "no such field"),
        ("nothing.at.all", "no such field"),
    ],
)
def test_changing_a_field_that_does_not_exist_is_refused(path: str, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        load("glm-5.1-1m-512xh20").with_(**{path: 1})


def test_there_are_few_free_constants() -> None:
    assert calibration().free_constants <= 12
    assert all(item.source for item in calibration().sustained_tensor)
    assert all(item.source for item in calibration().assumed)


def test_no_case_has_a_constant_of_its_own() -> None:
    package = Path(__file__).parents[3] / "simulator/hyscale_simulator"
    texts = [path.read_text().lower() for path in package.rglob("*.py")]
    texts.append((package / "data/calibration.toml").read_text().lower())
    for source in sources():
        for case in source.cases:
            for text in texts:
                assert case.name.lower() not in text
                assert f'"{case.set.get("model", source.scenario["model"])}"' not in text


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_roof_is_the_best_of_the_table(dtype: str) -> None:
    gpu = find(Gpu, "gpus", "h200")
    tables = [t for t in load_profiles().tables() if (t.op, t.dtype, t.gpu.name) == ("gemm", dtype, gpu.name)]
    table = max(tables, key=lambda table: len(table.rows))  # the public one
    rates = [2e-6 * m * n * k / p.median_us for (m, n, k), p in table.rows.items() if p.median_us]
    best = float(np.quantile(rates, 0.99)) * 1e12 / gpu.tensor_flops_per_s(dtype)
    assert calibration().tensor("hopper", dtype).roof == pytest.approx(best, rel=0.01)
