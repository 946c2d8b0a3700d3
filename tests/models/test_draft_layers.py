from __future__ import annotations

from typing import Any

import pytest

from eyas.models.draft_layers import LayerStack, count_layers

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 8}, (8, 8)),
        ({"sliding_window": 128}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 8, "model_type": "qwen3"}, (None, None)),
        ({"sliding_window": 8, "model_type": "qwen3", "use_sliding_window": True}, (8, 8)),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, (8, 8)),
    ],
)
def test_windows_of_the_layers(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """Catches a window taken from a config that only mentions it, or a windowed head that attends to everything."""
    assert LayerStack.from_dict(CONFIG | fields, 2, context_length=128).windows == windows


def test_types_of_too_few_layers_are_refused() -> None:
    """Catches the layers past the end of the list being given some attention or other."""
    with pytest.raises(ValueError, match="layer_types: names 1 layers, the head has 2"):
        LayerStack.from_dict(CONFIG | {"sliding_window": 8, "layer_types": ["full_attention"]}, 2, 128)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["fc.weight"], 1),
        (["midlayer.mlp.up_proj.weight"], 1),
        (["layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"], 2),
        (["midlayer.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"], 3),
    ],
)
def test_layers_are_counted_by_their_tensors(names: list[str], count: int) -> None:
    """Catches the middle layer being counted twice or not at all."""
    assert count_layers(names) == count
