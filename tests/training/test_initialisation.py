from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.training.initialisation import TargetOutput


def test_a_new_head_starts_from_the_target(new_eagle3: Callable[..., Eagle3Head], target_folder: Path) -> None:
    """Catches the embedding half and the state half of the projections exchanged, and output rows of other tokens."""
    token_ids = torch.tensor([3, 5, 8, 60])
    head = new_eagle3(token_ids, torch.bfloat16)
    tensors, checkpoint = head.checkpoint_tensors(), Checkpoint(target_folder)
    last_query = checkpoint.read("model.layers.5.self_attn.q_proj.weight", (32, 32), torch.float32)
    embedding = checkpoint.read("model.embed_tokens.weight", (64, 32), torch.float32)
    assert torch.equal(tensors["midlayer.self_attn.q_proj.weight"][:, 32:], last_query)
    assert tensors["midlayer.self_attn.q_proj.weight"][:, :32].abs().max() < 0.2
    assert torch.equal(tensors["lm_head.weight"], embedding[token_ids])
    assert torch.equal(head.candidate_ids, token_ids)
    assert head.embedding.dtype == torch.bfloat16
    states = torch.randn(4, 96)
    torch.testing.assert_close(head.fc(states), states[:, 64:], atol=0.15, rtol=0)


def test_a_head_of_two_layers_starts_from_the_last_two(
    new_eagle3: Callable[..., Eagle3Head], target: DecoderConfig, target_folder: Path
) -> None:
    """Catches the target's layers in another order, and more layers than the target has taken from nowhere."""
    tensors, checkpoint = new_eagle3(torch.arange(4), num_layers=2).checkpoint_tensors(), Checkpoint(target_folder)
    for place, index in (("midlayer", 4), ("layers.1", 5)):
        expected = checkpoint.read(f"model.layers.{index}.mlp.up_proj.weight", (48, 32), torch.float32)
        assert torch.equal(tensors[f"{place}.mlp.up_proj.weight"], expected)
    query = checkpoint.read("model.layers.5.self_attn.q_proj.weight", (32, 32), torch.float32)
    assert torch.equal(tensors["layers.1.self_attn.q_proj.weight"], query)
    with pytest.raises(ValueError, match=r"^num_layers: the target has 6, the head cannot begin as 7$"):
        new_eagle3(torch.arange(4), num_layers=7)


def test_seeds_differ_and_repeat(new_eagle3: Callable[..., Eagle3Head]) -> None:
    """Catches noise drawn from the global generator, which a resumed process would not repeat."""
    first, again, other = (new_eagle3(torch.arange(1, 10), seed=seed).fc.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_target_logits_over_some_ids(target: DecoderConfig, target_folder: Path) -> None:
    """Catches a missing final norm and rows in another order than the draft vocabulary."""
    output = TargetOutput.load(target_folder, target, torch.float32)
    states, token_ids = torch.randn(5, 32), torch.tensor([1, 7, 40])
    torch.testing.assert_close(output.restricted(token_ids).logits(states), output.logits(states)[:, token_ids])
    torch.testing.assert_close(output.logits(10 * states), output.logits(states), rtol=1e-3, atol=1e-3)
