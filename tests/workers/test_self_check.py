from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from eyas.models.target_loading import load_target_decoder
from eyas.models.transformers_decoder import TransformersDecoder
from eyas.workers.self_check import check_target

if TYPE_CHECKING:
    from tests.conftest import TinyModels

CPU = torch.device("cpu")


def load(tiny_models: TinyModels, dtype: torch.dtype) -> TransformersDecoder:
    folder = tiny_models.target("Gemma2ForCausalLM", head_dim=8, sliding_window=5, query_pre_attn_scalar=11)
    decoder = load_target_decoder(folder, dtype, CPU)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_models_pass(dtype: torch.dtype, tiny_models: TinyModels) -> None:
    """Catches a tolerance below rounding, and a reference that stays in memory after it was used."""
    decoder = load(tiny_models, dtype)
    assert decoder.dtype == dtype
    check_target(decoder)
    assert decoder.reference is None
    check_target(decoder)
    check_target(load_target_decoder(tiny_models.target(), dtype, CPU))  # a native one has nothing to check


class NeighbourMixing(nn.Module):
    """A state beside keys and values, as a short convolution over rows is: each row sees the row before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
        return mixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_does_not_branch_is_refused(dtype: torch.dtype, tiny_models: TinyModels) -> None:
    """Catches a recurrent layer that no name gives away: a row of the tree is not its neighbour's child."""
    decoder = load(tiny_models, dtype)
    reference = decoder.reference
    assert reference is not None
    layer = decoder._decoder.layers[1]
    layer.mlp = NeighbourMixing(layer.mlp)
    # What the model itself says with that layer, so that only the tree differs.
    mixed = _eager_logits(decoder, reference.token_ids)
    decoder.reference = type(reference)(reference.token_ids, mixed)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM was refused by the self-check: .* of their size"):
        check_target(decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_window_is_refused(dtype: torch.dtype, tiny_models: TinyModels) -> None:
    """Catches a tolerance so loose that a mask of other keys passes."""
    decoder = load(tiny_models, dtype)
    decoder._windows = (None, None, None, None)
    with pytest.raises(ValueError, match="refused by the self-check"):
        check_target(decoder)


@torch.inference_mode()
def _eager_logits(decoder: TransformersDecoder, token_ids: Tensor) -> Tensor:
    for config in (decoder._decoder.config, decoder._head.config):
        config._attn_implementation = "eager"
    logits = decoder.logits(decoder._decoder(input_ids=token_ids, use_cache=False).last_hidden_state.flatten(0, 1))
    for config in (decoder._decoder.config, decoder._head.config):
        config._attn_implementation = "eyas"
    return logits.view(*token_ids.shape, -1)
