from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.training.dataset import Corpus
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.initialisation import TargetOutput
from eyas.training.prior_samples import FeatureReader, PathSamples, SampleCollector
from eyas.training.shard import Shard

AUX_LAYERS, DEPTH, WIDTH = (2, 3, 5), 3, 4
LENGTHS, PROMPT_LENGTHS = [12, 9, 14], [4, 3, 1]
HIDDEN = 32


class KnowingHead(DraftHead):
    """Its features are the target's own last states of the rows to come, level by level; it is as good as the target.

    Args:
        shift: added to every token it proposes, which makes it wrong.
    """

    cache = None
    is_path_dependent = False
    capture = AUX_LAYERS
    state_size = len(AUX_LAYERS) * HIDDEN

    def __init__(self, output: TargetOutput, shift: int = 0) -> None:
        super().__init__()
        self.target_output = output
        self.candidate_ids = (torch.arange(output.weight.shape[0]) + shift) % output.weight.shape[0]
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return features

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        raise NotImplementedError

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        state = states.chunk(len(AUX_LAYERS), dim=1)[levels.start - 1]
        return ranker.rank(self.target_output.logits(state), self.candidate_ids)


@pytest.fixture(scope="module")
def output(target_folder: Path, target: DecoderConfig) -> TargetOutput:
    return TargetOutput.load(target_folder, target, torch.float32)


@pytest.fixture(scope="module")
def corpus(output: TargetOutput) -> Corpus:
    """Texts that mostly follow the target's favourites, with features for `KnowingHead`."""
    generator = torch.Generator().manual_seed(4)
    tokens, features = [], []
    for length in LENGTHS:
        last = torch.randn(length, HIDDEN, generator=generator).to(torch.bfloat16).float()
        favourites = output.logits(last).argmax(dim=1)
        others = torch.randint(3, favourites.max() + 1, (length,), generator=generator)
        is_followed = torch.rand(length, generator=generator) < 0.8
        tokens.append(torch.where(is_followed, favourites, others).roll(1).clamp(min=3))
        ahead = [torch.cat([last[1 + level :], torch.zeros(1 + level, HIDDEN)]) for level in range(DEPTH)]
        features.append(torch.cat([*ahead, last], dim=1).to(torch.bfloat16))
    is_answer = torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPT_LENGTHS, strict=True)])
    is_answer[-8:-5] = False  # the last text has a second user turn
    return Corpus([Shard(torch.cat(tokens), is_answer, LENGTHS, torch.cat(features))], 64, 2)


def reader(output: TargetOutput) -> FeatureReader:
    return FeatureReader(AUX_LAYERS, 7, output)


def collected(
    head: DraftHead, output: TargetOutput, corpus: Corpus, seed: int | None, depth: int = DEPTH
) -> PathSamples:
    batches = [corpus.batch(corpus.conversations[:2]), corpus.batch(corpus.conversations[2:])]
    greedy, sampled = SampleCollector(head, reader(output), depth, WIDTH, seed or 0).collect(batches)
    return greedy if seed is None else sampled


def test_greedy_samples_are_those_of_every_base_by_hand(output: TargetOutput, corpus: Corpus) -> None:
    """Catches a level compared with another row, a path counted past a token that the target would not have chosen or
    the head not proposed, prompts counted, and texts mixed up."""
    head = KnowingHead(output, shift=1)
    samples = collected(head, output, corpus, None)
    found = 0
    for index, item in enumerate(corpus.conversations):
        batch = corpus.batch([item])
        logits = output.logits(batch.features[:, -HIDDEN:].float())
        for base in range(max(0, item.prompt_length - 2), item.length - 1):
            is_open = True
            answers = [*batch.is_answer[1:].tolist(), True]  # of the token after each row
            assert int(samples.conversations[found]) == index
            for level in range(DEPTH):
                row = base + 1 + level
                if row >= item.length:
                    assert not bool(samples.is_counted[found, level])
                    continue
                ranked = logits[row].topk(WIDTH)
                proposed = (ranked.indices + 1) % logits.shape[1]
                torch.testing.assert_close(samples.log_probs[found, level], ranked.values - logits[row].logsumexp(0))
                choice = int(logits[row].argmax())
                is_open = is_open and answers[row]
                rank = proposed.tolist().index(choice) if choice in proposed.tolist() else -1
                assert int(samples.accepted[found, level]) == rank
                assert bool(samples.is_counted[found, level]) == is_open
                follows = row + 1 < item.length and int(batch.token_ids[row + 1]) == choice
                is_open = is_open and rank >= 0 and follows
            found += 1
    assert found == samples.accepted.shape[0]
    assert 0 < int(samples.is_counted[:, 1].sum()) < found


def test_the_head_shares_the_noise_of_the_target(output: TargetOutput, corpus: Corpus) -> None:
    """Catches draws of another row, seed or token: a head as good as the target is right at every draw."""
    samples = collected(KnowingHead(output), output, corpus, 5)
    exists = samples.log_probs.isfinite().all(dim=2)
    assert set(samples.accepted[exists].tolist()) == {0}
    greedy = collected(KnowingHead(output), output, corpus, None)
    assert not torch.equal(samples.log_probs[exists], greedy.log_probs[exists])
    other = collected(KnowingHead(output), output, corpus, 6)
    assert not torch.equal(samples.log_probs[exists], other.log_probs[exists])
    rows = samples.log_probs[:, 0]
    assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]
    batch = corpus.batch(corpus.conversations)
    _, twice = SampleCollector(KnowingHead(output), reader(output), DEPTH, WIDTH, 5).collect([batch, batch])
    first, second = twice.log_probs[:, 0].chunk(2)
    assert not torch.isclose(first, second).any()


@torch.no_grad()
def test_a_head_drafts_from_its_own_states(
    new_eagle3: Callable[..., Eagle3Head], output: TargetOutput, corpus: Corpus
) -> None:
    """Catches levels of a path-dependent head that all come from the target's states."""
    head = new_eagle3(torch.arange(0, 64, 2))
    samples = collected(head, output, corpus, None, depth=2)
    batch = corpus.batch(corpus.conversations[:2])
    states = Eagle3Method(AUX_LAYERS).level_states(head, batch.features[:, : 3 * HIDDEN].float(), batch, 2)[1]
    expected = head.logits(states).log_softmax(dim=1).topk(WIDTH).values
    exists = samples.log_probs[:, 1].isfinite().all(dim=1) & (samples.conversations < 2)
    torch.testing.assert_close(samples.log_probs[exists, 1], expected)


def test_states_are_read_by_their_indices(output: TargetOutput) -> None:
    """Catches a head given another layer, or the last state without its norm, and a corpus that lacks a layer."""
    features = torch.randn(3, 4 * HIDDEN, generator=torch.Generator().manual_seed(2))
    parts = dict(zip((*AUX_LAYERS, 6), features.chunk(4, dim=1), strict=True))
    head = KnowingHead(output)
    for capture, expected in (
        ((5, 2), torch.cat([parts[5], parts[2]], dim=1)),
        ((6,), parts[6]),
        ((7,), output.normed(parts[6])),
    ):
        head.capture = capture
        assert torch.equal(reader(output).read(head, features), expected)
    head.capture = (2, 4)
    with pytest.raises(ValueError, match=r"corpus: holds the target's states \[2, 3, 5, 6\], but the head reads 4"):
        reader(output).read(head, features)
