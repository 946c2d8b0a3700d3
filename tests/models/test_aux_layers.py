from __future__ import annotations

import pytest

from eyas.models.aux_layers import chosen_aux_layers, plausible_aux_layers
from eyas.models.config import DecoderConfig

TARGET = DecoderConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
)


@pytest.mark.parametrize(
    ("ids", "counts_states", "readings"),
    [
        (None, False, ((2, 12, 21),)),
        ([], True, ((2, 12, 21),)),
        ([1, 11, 21], False, ((2, 12, 22), (1, 11, 21), (2, 12, 21))),
        ([1, 11, 21], True, ((1, 11, 21), (2, 12, 22), (2, 12, 21))),
        ([2, 12, 21], False, ((2, 12, 21), (3, 13, 22))),
        ([0, 12, 24], False, ((0, 12, 24), (2, 12, 21))),
        ([1, 11, 20], False, ((2, 12, 21), (1, 11, 20))),
        ([1, 5, 11, 17, 21], True, ((1, 5, 11, 17, 21), (2, 6, 12, 18, 22))),
    ],
)
def test_readings_of_layer_ids(
    ids: list[int] | None, counts_states: bool, readings: tuple[tuple[int, ...], ...]
) -> None:
    """Catches a convention that is never measured, a reading outside the target, or of another number of states."""
    assert plausible_aux_layers(ids, TARGET, counts_states) == readings


@pytest.mark.parametrize("ids", [[1, 11, 24], [0, 1, 25], [-1, 2, 3]])
def test_ids_outside_the_target_are_refused(ids: list[int]) -> None:
    """Catches a head made for a deeper target being given other states instead."""
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids: .* outside the target's 24 layers"):
        plausible_aux_layers(ids, TARGET)


def test_own_choice_is_the_only_reading() -> None:
    """Catches an override that the probe overrides again, or that names no state."""
    assert chosen_aux_layers((1, 2, 24), TARGET) == ((1, 2, 24),)
    for layers in ((), (1, 25)):
        with pytest.raises(ValueError, match="aux_layers: .* must be states 0 to 24"):
            chosen_aux_layers(layers, TARGET)
