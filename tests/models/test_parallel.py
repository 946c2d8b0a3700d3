from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.llama import load_decoder
from eyas.models.parallel import TensorParallel

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]
RunRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]

VOCAB_SIZE = 61  # prime: no number of ranks divides it
TOLERANCE = 1e-4  # float32, one more order of summation
SPLITTABLE = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": VOCAB_SIZE}


@torch.inference_mode()
def run_decoder(folder: Path, parallel: TensorParallel, attention: Attention) -> tuple[Tensor, Tensor]:
    """Logits and captured states of one rank."""
    model = load_decoder(folder, torch.float32, torch.device("cpu"), parallel)
    output = model(torch.arange(30), torch.arange(30), attention, (1, 4))
    assert output.features is not None
    return model.logits(output.hidden), output.features


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 8}),
    ],
    ids=["llama", "llama with biases", "qwen2", "qwen3"],
)
def test_ranks_together_are_the_whole_model(
    architecture: str,
    options: dict[str, Any],
    size: int,
    tiny_models: TinyModels,
    text_attention: NewAttention,
    run_ranks: RunRanks,
) -> None:
    """Catches heads dealt out unevenly, a bias added once per rank, and a vocabulary cut short by its padding."""
    folder = tiny_models.target(architecture, **SPLITTABLE | options)
    whole_logits, whole_features = run_decoder(folder, TensorParallel(), text_attention())
    ranks = run_ranks(size, lambda parallel: run_decoder(folder, parallel, text_attention()))
    for logits, features in ranks:
        assert logits.shape == (30, VOCAB_SIZE)
        torch.testing.assert_close(logits, whole_logits, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(features, whole_features, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(logits, ranks[0][0])


def test_shards_cover_a_weight_once() -> None:
    """Catches rows that two ranks hold, or none."""
    weight = torch.arange(24).view(6, 4)
    for dim, size in ((0, 2), (0, 3), (1, 2), (1, 4)):
        parts = [TensorParallel(rank, size).shard(weight, dim) for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim=dim), weight)
    assert TensorParallel().shard(weight, 0) is weight
    with pytest.raises(ValueError, match=r"dimension 1 of \(6, 4\) cannot be split over 3 ranks"):
        TensorParallel(0, 3).shard(weight, 1)


def test_collectives(run_ranks: RunRanks) -> None:
    """Catches parts joined out of rank order, and a strided part sent as if it were dense."""

    def work(parallel: TensorParallel) -> tuple[Tensor, Tensor]:
        own = torch.arange(6).view(3, 2).T + 100 * parallel.rank
        return parallel.sum(own.contiguous()), parallel.concatenate(own)

    base = torch.arange(6).view(3, 2).T
    for total, joined in run_ranks(3, work):
        assert torch.equal(total, 3 * base + 300)
        assert torch.equal(joined, torch.cat([base, base + 100, base + 200], dim=-1))


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 3, 4)])
def test_concatenation_of_any_shape(shape: tuple[int, ...], run_ranks: RunRanks) -> None:
    """Catches the joined dimension put elsewhere than last, and a step without rows."""
    parts = [torch.randn(shape) for _ in range(3)]
    for joined in run_ranks(3, lambda parallel: parallel.concatenate(parts[parallel.rank])):
        assert torch.equal(joined, torch.cat(parts, dim=-1))


def test_rank_0_decides_at_a_fixed_width(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that keep their own choice, and an amount sent that follows the step's number of rows."""
    sent: list[int] = []
    broadcast = dist.broadcast

    def note(tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.numel())
        return broadcast(tensor, **options)

    monkeypatch.setattr(dist, "broadcast", note)
    for count in (0, 1, 5, 8):
        chosen = torch.arange(count) + 7
        ranks = run_ranks(
            3, lambda parallel, chosen=chosen: parallel.broadcast(chosen * (1 if parallel.rank == 0 else -1), width=8)
        )
        assert all(torch.equal(decided, chosen) for decided in ranks)
    assert sent == [8] * 3 * 4


def test_a_broadcast_wider_than_its_bucket_is_refused() -> None:
    """Catches tokens cut off silently when a step outgrew the bucket."""
    with pytest.raises(ValueError, match="5 values cannot be broadcast at a width of 4"):
        TensorParallel().broadcast(torch.arange(5), width=4)


def test_one_rank_needs_no_group() -> None:
    """Catches a copy, or a call into a process group that does not exist, on a single device."""
    x = torch.ones(2, 2)
    assert TensorParallel().sum(x) is x
    assert TensorParallel().concatenate(x) is x
    assert TensorParallel().broadcast(x, width=2) is x
