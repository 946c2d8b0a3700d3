from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.attention import no_attention
from eyas.models.config import DecoderConfig
from eyas.models.head import Candidates
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.linear import pack_linears
from eyas.models.medusa import MedusaHead
from eyas.models.stacked_linear import StackedLinear
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

TOLERANCE = 1e-5  # float32, other order of summation than the transcription below
PACKED_TOLERANCE = 0.05  # bfloat16, two summation orders
HIDDEN, VOCAB_SIZE, NUM_ROWS = 32, 61, 7
CPU = torch.device("cpu")

NewTensors = Callable[..., dict[str, Tensor]]


class Everything:
    """A `Ranker` that keeps the scores of all rows, unordered."""

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        return Candidates(token_ids.expand_as(logits), logits)

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        raise NotImplementedError


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def load(
    path: Path, target: Path, options: HeadOptions | None = None, dtype: torch.dtype = torch.float32
) -> MedusaHead:
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(path, weights, dtype, CPU, options)
    assert isinstance(head, MedusaHead)
    return head


def published_logits(tensors: dict[str, Tensor], output: Tensor, states: Tensor, head: int, num_layers: int) -> Tensor:
    """Head by head as in the paper (section 2.1.1): softmax(W2 (SiLU(W1 h) + h)), blocks repeated, row by row."""
    rows = []
    for h in states:
        for layer in range(num_layers):
            inner = tensors[f"{head}.{layer}.linear.weight"] @ h + tensors.get(f"{head}.{layer}.linear.bias", 0)
            h = inner * torch.sigmoid(inner) + h
        rows.append(tensors.get(f"{head}.{num_layers}.weight", output) @ h)
    return torch.stack(rows)


def random_states() -> Tensor:
    return torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("rows", [VOCAB_SIZE, None], ids=["own projections", "the target's"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("levels", [range(1, 4), range(1, 2), range(2, 4), range(3, 4)], ids=str)
def test_heads_equal_the_published_formula(
    levels: range,
    bias: bool,
    rows: int | None,
    num_layers: int,
    tiny_models: TinyModels,
    medusa_tensors: NewTensors,
    tmp_path: Path,
) -> None:
    """Catches a head that answers for another level, levels and rows interleaved wrongly, and a residual left out."""
    target = tiny_models.target()
    tensors = medusa_tensors(num_layers=num_layers, rows=rows, bias=bias)
    head, states = load(write(tmp_path / "head", tensors), target), random_states()
    output = load_file(target / "model.safetensors")["lm_head.weight"]
    with torch.inference_mode():
        extended = head.extend(states, torch.zeros(NUM_ROWS), torch.arange(NUM_ROWS), no_attention)
        scores = head.candidates(extended, levels, Everything()).log_probs
    expected = [published_logits(tensors, output, states, level - 1, num_layers) for level in levels]
    assert scores.shape == (NUM_ROWS * len(levels), VOCAB_SIZE)
    torch.testing.assert_close(scores, torch.stack(expected, dim=1).flatten(0, 1), rtol=TOLERANCE, atol=10 * TOLERANCE)


def test_what_a_head_is(tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path) -> None:
    """Catches features taken before the final norm, and a drafter that asks for states of drafted tokens."""
    target = tiny_models.target()
    folder = write(tmp_path / "head", medusa_tensors())
    head, config = load(folder, target), normalise_head(open_head(folder), DecoderConfig.from_folder(target))
    assert head.capture == config.capture == (5,)  # four layers, then the norm
    assert config.plausible_captures == ((5,), (4,))
    assert head.max_depth == config.max_depth == 3
    assert head.cache is None
    assert not head.is_path_dependent
    assert head.candidate_ids.tolist() == list(range(VOCAB_SIZE))
    with pytest.raises(NotImplementedError, match="drafts all levels at once"):
        head.step(random_states(), torch.zeros(NUM_ROWS), torch.arange(NUM_ROWS), no_attention)


@pytest.mark.parametrize("levels", [range(0, 1), range(1, 5), range(4, 5), range(2, 2), range(1, 4, 2)], ids=str)
def test_levels_without_a_head_are_refused(
    levels: range, tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path
) -> None:
    """Catches the last head standing in for levels that have none."""
    head = load(write(tmp_path / "head", medusa_tensors()), tiny_models.target())
    with pytest.raises(ValueError, match="were asked of 3 Medusa heads"):
        head.logits(random_states(), levels)


@pytest.mark.parametrize("rows", [VOCAB_SIZE, None], ids=["own projections", "the target's"])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_heads_score_the_same(
    bias: bool, rows: int | None, tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path
) -> None:
    """Catches packed layers paired with other heads' rows, and a path that is never packed."""
    target = tiny_models.target()
    folder = write(tmp_path / "head", medusa_tensors(rows=rows, bias=bias))
    plain, packed = (load(folder, target, dtype=torch.bfloat16) for _ in range(2))
    pack_linears(packed)
    states = random_states().bfloat16()
    with torch.inference_mode():
        for levels in (range(1, 4), range(2, 3)):
            expected, found = plain.logits(states, levels), packed.logits(states, levels)
            torch.testing.assert_close(found, expected, rtol=PACKED_TOLERANCE, atol=PACKED_TOLERANCE)
    if torch.backends.mkldnn.is_available():
        assert all(isinstance(block, StackedLinear) and block.weight.numel() == 0 for block in packed.blocks)


def test_checkpoint_tensors_can_be_loaded_again(
    tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path
) -> None:
    """Catches a trained head that is written with its heads or blocks in another order."""
    target = tiny_models.target()
    for rows in (VOCAB_SIZE, None):
        tensors = medusa_tensors(num_layers=2, rows=rows)
        written = load(write(tmp_path / str(rows), tensors), target).checkpoint_tensors()
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_token_map_option_cuts_the_vocabulary(
    tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path
) -> None:
    """Catches columns that stand for other ids than the ones the user lists."""
    target = tiny_models.target()
    (tmp_path / "ids.json").write_text("[40, 3, 17]")
    for rows in (VOCAB_SIZE, None):
        folder = write(tmp_path / f"head-{rows}", medusa_tensors(rows=rows))
        cut = load(folder, target, HeadOptions(token_map=str(tmp_path / "ids.json")))
        whole = load(folder, target)
        assert cut.candidate_ids.tolist() == [3, 17, 40]
        states, levels = random_states(), range(1, 4)
        expected = whole.logits(states, levels)[:, :, [3, 17, 40]]
        torch.testing.assert_close(cut.logits(states, levels), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_aux_layer_option(tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path) -> None:
    """Catches heads trained on the state before the norm that cannot be served."""
    target = tiny_models.target()
    folder = write(tmp_path / "head", medusa_tensors())
    assert load(folder, target, HeadOptions(aux_layers=(4,))).capture == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (HeadOptions(aux_layers=(6,)), "aux_layers: a Medusa head reads one state of the target, 0 to 5, got .6."),
        (HeadOptions(aux_layers=(1, 2)), "aux_layers: a Medusa head reads one state"),
        (HeadOptions(num_candidates=8), "num_candidates: a Medusa head has no low-rank"),
        (HeadOptions(token_map="/none.json"), "token_map: /none.json does not exist"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    options: HeadOptions, message: str, tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path
) -> None:
    """Catches an option that is ignored."""
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "head", medusa_tensors()), tiny_models.target(), options)
