from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.candidate_projection import CandidateProjection, RowLinear, weights_read
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head
from eyas.models.linear import pack_linears
from eyas.models.target_weights import TargetWeights
from eyas.workers.sampler import NoiseRanker, RowSampling
from eyas.workers.sampling import SamplingParams

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NUM_ROWS, HIDDEN, RANK, VOCAB_SIZE, DRAFT_VOCAB_SIZE, WIDTH = 6, 32, 8, 61, 23, 4
SAMPLING = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.6, seed=4)] * 2
RANKER = NoiseRanker(RowSampling(SAMPLING, list(range(NUM_ROWS))), WIDTH)
LEVELS = range(1, 2)


def factors(rows: int, rank: int = RANK) -> dict[str, tuple[int, ...]]:
    return {"efficient_lm_head_down_proj.weight": (rank, HIDDEN), "efficient_lm_head.weight": (rows, rank)}


def eagle3_folder(tiny_models: TinyModels, target: Path) -> Path:
    """Laid out as EAGLE-4 exports: `layers.0`, EAGLE-3.1 norms, a window, an embedding of its own."""
    head = tiny_models.head(
        target, draft_vocab_size=DRAFT_VOCAB_SIZE, fc_norm=True, norm_output=True, sliding_window=4,
        architectures=["LlamaForCausalLMEagle4"],
    )  # fmt: skip
    norms = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    head = tiny_models.changed(head, norms | {"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)})
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return tiny_models.write(json.loads((head / "config.json").read_text()), renamed)


def eagle_folder(tiny_models: TinyModels, target: Path) -> Path:
    return tiny_models.eagle_head(target)


FOLDERS = {"eagle3": (eagle3_folder, DRAFT_VOCAB_SIZE), "eagle": (eagle_folder, VOCAB_SIZE)}


Write = Callable[["TinyModels", Path], Path]


def load(folder: Path, target: Path, num_candidates: int | None = None) -> Eagle3Head | EagleHead:
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    options = HeadOptions(num_candidates=num_candidates)
    head = load_head(folder, weights, torch.float32, torch.device("cpu"), options)
    assert isinstance(head, Eagle3Head | EagleHead)
    return head


def random_states() -> Tensor:
    return torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("write", "rows"), FOLDERS.values(), ids=FOLDERS.keys())
def test_all_candidates_are_the_full_head(write: Write, rows: int, tiny_models: TinyModels) -> None:
    """Catches the factors taking part in the scores, which only the full rows may give."""
    target = tiny_models.target()
    plain = write(tiny_models, target)
    full = load(plain, target).candidates(random_states(), LEVELS, RANKER)
    head = load(tiny_models.changed(plain, factors(rows)), target, num_candidates=rows)
    assert head.projection is not None
    found = head.candidates(random_states(), LEVELS, RANKER)
    assert torch.equal(found.tokens, full.tokens)
    assert torch.equal(found.log_probs, full.log_probs)


@pytest.mark.parametrize("num_candidates", [WIDTH, 12])
@pytest.mark.parametrize(("write", "rows"), FOLDERS.values(), ids=FOLDERS.keys())
def test_candidates_are_found_by_the_factors_and_scored_by_the_rows(
    write: Write, rows: int, num_candidates: int, tiny_models: TinyModels
) -> None:
    """Catches rows of other tokens being scored, approximate scores being kept, or noise of other tokens."""
    target = tiny_models.target()
    folder = tiny_models.changed(write(tiny_models, target), factors(rows))
    head, states, tensors = (
        load(folder, target, num_candidates),
        random_states(),
        load_file(folder / "model.safetensors"),
    )
    down, up = tensors["efficient_lm_head_down_proj.weight"], tensors["efficient_lm_head.weight"]
    approximate = states @ down.T @ up.T
    found = head.candidates(states, LEVELS, RANKER)
    assert found.tokens.shape == found.log_probs.shape == (NUM_ROWS, WIDTH)
    for row in range(NUM_ROWS):
        alone = NoiseRanker(RowSampling([SAMPLING[row]], [row]), WIDTH)
        one = slice(row, row + 1)
        columns = alone.shortlist(approximate[one], head.candidate_ids, num_candidates)[0]
        exact = head.logits(states)[one, columns]
        expected = alone.rank(exact, head.candidate_ids[columns])
        assert found.tokens[row].tolist() == expected.tokens[0].tolist()
        torch.testing.assert_close(found.log_probs[one], expected.log_probs, rtol=1e-5, atol=1e-5)


def test_good_factors_find_what_the_full_head_would(tiny_models: TinyModels) -> None:
    """Catches factors applied to the state before its norm, or in the wrong order: exact ones must lose nothing."""
    target = tiny_models.target()
    plain = eagle3_folder(tiny_models, target)
    tensors = load_file(plain / "model.safetensors")
    left, singular, right = torch.linalg.svd(tensors["lm_head.weight"], full_matrices=False)
    tensors["efficient_lm_head.weight"] = (left * singular).contiguous()
    tensors["efficient_lm_head_down_proj.weight"] = right.contiguous()
    folder = tiny_models.write(json.loads((plain / "config.json").read_text()), tensors)
    full = load(plain, target).candidates(random_states(), LEVELS, RANKER)
    found = load(folder, target, num_candidates=WIDTH).candidates(random_states(), LEVELS, RANKER)
    assert torch.equal(found.tokens, full.tokens)


def test_factors_over_the_whole_vocabulary_serve_a_reduced_one(tiny_models: TinyModels) -> None:
    """Catches the first rows being taken for the draft vocabulary's."""
    target = tiny_models.target()
    folder = tiny_models.changed(eagle3_folder(tiny_models, target), factors(VOCAB_SIZE))
    head = load(folder, target, num_candidates=8)
    up = load_file(folder / "model.safetensors")["efficient_lm_head.weight"]
    assert head.projection is not None
    assert torch.equal(head.projection.up.weight, up[head.candidate_ids])


def test_what_is_read_is_counted() -> None:
    """Catches a saving stated that a drafted level does not have: factors counted once a node, or rows once a level."""
    num_factor_weights = 8 * 32 + 61 * 8
    assert weights_read(61, 32, 8, 12, 1) == num_factor_weights + 12 * 32
    assert weights_read(61, 32, 8, 12, 4) == num_factor_weights + 48 * 32
    assert weights_read(61, 32, 8, 12, 9) == num_factor_weights + 61 * 32  # no row twice


def test_packing_leaves_the_rows_readable() -> None:
    """Catches a weight packed for the matrix library, whose rows can no longer be gathered."""
    output = RowLinear(torch.randn(VOCAB_SIZE, HIDDEN, dtype=torch.bfloat16))
    projection = CandidateProjection(torch.randn(RANK, HIDDEN), torch.randn(VOCAB_SIZE, RANK), 8).bfloat16()
    model = torch.nn.ModuleList([output, projection])
    pack_linears(model)
    found = projection.rank(random_states().bfloat16(), output, torch.arange(VOCAB_SIZE), 1.0, RANKER)
    assert bool(found.log_probs.isfinite().all())


@pytest.mark.parametrize(
    ("added", "options", "message"),
    [
        ({}, 8, "num_candidates: .* holds no low-rank candidate projection"),
        (factors(DRAFT_VOCAB_SIZE), 0, "num_candidates: must be at least 1, got 0"),
        (factors(40), None, "efficient_lm_head.weight has 40 rows, expected 23 or 61"),
        ({"efficient_lm_head.weight": (23, 8)}, None, "efficient_lm_head_down_proj.weight is missing"),
        ({"efficient_lm_head_down_proj.weight": (8, 32)}, None, "efficient_lm_head.weight is missing"),
        (factors(23) | {"efficient_lm_head.weight": (23, 9)}, None, r"efficient_lm_head.weight is \[23, 9\]"),
    ],
)
def test_bad_factors_are_refused(
    added: dict[str, tuple[int, ...]], options: int | None, message: str, tiny_models: TinyModels
) -> None:
    """Catches half a projection, one of another head, and an option that does nothing."""
    target = tiny_models.target()
    with pytest.raises(ValueError, match=message):
        load(tiny_models.changed(eagle3_folder(tiny_models, target), added), target, options)
