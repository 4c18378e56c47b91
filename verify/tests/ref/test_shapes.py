"""Model shapes: facts that tie their fields together."""

import pytest

from hyscale_ref.shapes import GLM_5_1, MODELS, ModelShape, model_shape


@pytest.mark.parametrize("shape", MODELS.values(), ids=lambda s: s.name)
def test_a_shape_is_consistent(shape: ModelShape) -> None:
    assert model_shape(shape.name) is shape
    assert 0 < shape.value_dim <= shape.latent_dim
    assert shape.rope_dim <= shape.latent_dim
    assert shape.indexer.rope_dim <= shape.indexer.head_dim
    assert shape.rope_dim % 2 == 0
    assert shape.indexer.rope_dim % 2 == 0
    assert (shape.qk_nope_dim is None) == (shape.v_dim is None)
    assert (shape.v_dim is None) == (shape.output_groups is not None) == (shape.output_lora_rank is not None)
    if shape.qk_nope_dim is not None:
        assert shape.value_dim == shape.latent_dim - shape.rope_dim  # the compressed part is the value
    if shape.output_groups is not None:
        assert shape.heads % shape.output_groups == 0
    assert set(shape.selecting_layers) <= set(shape.sparse_layers) <= set(range(shape.layers))
    for layer in shape.sparse_layers:
        assert shape.source_layer(layer) in shape.selecting_layers


def test_glm_5_1_parameters_of_one_layer() -> None:
    """Weights of one attention layer and its indexer, as the published totals imply (165.0 M and 9.37 M)."""
    s = GLM_5_1
    assert s.qk_nope_dim is not None
    assert s.v_dim is not None
    kv_rank = s.latent_dim - s.rope_dim
    attention = (
        s.hidden * s.q_lora_rank
        + s.q_lora_rank * s.heads * (s.qk_nope_dim + s.rope_dim)
        + s.hidden * s.latent_dim
        + kv_rank * s.heads * (s.qk_nope_dim + s.v_dim)
        + s.heads * s.v_dim * s.hidden
    )
    i = s.indexer
    indexer = s.q_lora_rank * i.heads * i.head_dim + s.hidden * i.head_dim + s.hidden * i.heads
    assert attention / 1e6 == pytest.approx(165.0, abs=0.1)
    assert indexer / 1e6 == pytest.approx(9.37, abs=0.01)


def test_index_sharing_of_glm_5_2() -> None:
    shape = model_shape("glm-5.2")
    assert len(shape.selecting_layers) == 21
    assert len(shape.sparse_layers) - len(shape.selecting_layers) == 57
    assert [shape.source_layer(layer) for layer in (0, 1, 2, 3, 5, 6, 9, 77)] == [0, 1, 2, 2, 2, 6, 6, 74]


def test_layers_that_select_nothing_are_refused() -> None:
    shape = model_shape("deepseek-v4-flash")
    assert len(shape.selecting_layers) == 21
    with pytest.raises(ValueError, match="layer: 3; allowed for deepseek-v4-flash"):
        shape.source_layer(3)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"model: 'glm-9'; allowed: glm-5\.1, glm-5\.2, .*, small"):
        model_shape("glm-9")
