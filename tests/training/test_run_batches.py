from __future__ import annotations

from itertools import islice

import pytest
import torch

from eyas.training.dataset import Corpus, training_order
from eyas.training.ranks import Ranks
from eyas.training.run_batches import RunBatches
from eyas.training.run_config import RunConfig

CONFIG = RunConfig(num_steps=1, tokens_per_batch=26, validation_share=0.2, seed=3)


@pytest.mark.parametrize("step", [0, 3])
def test_ranks_share_one_order(corpus: Corpus, step: int) -> None:
    """Catches ranks that train on the same batch, and a resumed run that begins elsewhere."""
    ranks = [RunBatches(corpus, CONFIG, Ranks(rank, 2)) for rank in range(2)]
    readers = [batches.training_from(step) for batches in ranks]
    found = [next(readers[index % 2]) for index in range(8)]
    order = training_order(ranks[0].training, CONFIG.tokens_per_batch, CONFIG.seed, 2 * step)
    for batch, group in zip(found, islice(order, 8), strict=True):
        assert torch.equal(batch.token_ids, corpus.batch(group).token_ids)


def test_only_the_first_rank_keeps_what_is_held_out(corpus: Corpus) -> None:
    """Catches texts to validate on that are trained on, kept by every rank, or kept at twice their size."""
    first, second = (RunBatches(corpus, CONFIG, Ranks(rank, 2)) for rank in range(2))
    training, validation = corpus.split(CONFIG.validation_share)
    assert first.training == second.training == training
    assert sum(len(batch.lengths) for batch in first.held_out) == len(validation)
    assert not second.held_out
    assert all(batch.features.dtype == torch.bfloat16 for batch in first.held_out)
    assert list(first.validation()) == first.held_out
