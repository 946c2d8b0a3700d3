"""The batches of one training run: those it trains on, in their order, and those it is validated on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from eyas.training.batch import Batch
from eyas.training.dataset import Corpus, make_batches, training_order
from eyas.training.ranks import Ranks
from eyas.training.run_config import RunConfig


class RunBatches:
    """What one rank reads of a corpus.

    The batches of validation are kept as they were read, in the dtype of the corpus, because states may be computed.

    Args:
        ranks: rank r trains on batch `step * size + r` of an order that depends on the seed alone; only the first one
            validates.
    """

    def __init__(self, corpus: Corpus, config: RunConfig, ranks: Ranks) -> None:
        self._corpus = corpus
        self._config = config
        self._ranks = ranks
        self.training, validation = corpus.split(config.validation_share)
        by_length = sorted(validation, key=lambda item: item.length) if ranks.is_first else []
        self.held_out = [corpus.batch(group) for group in make_batches(by_length, config.tokens_per_batch)]

    def training_from(self, step: int) -> Iterator[Batch]:
        """Batches without end, from `step` on, on the rank's device."""
        config, ranks = self._config, self._ranks
        order = training_order(self.training, config.tokens_per_batch, config.seed, step * ranks.size + ranks.rank)
        for group in islice(order, 0, None, ranks.size):
            yield self._corpus.batch(group).to(ranks.device)

    def validation(self) -> Iterator[Batch]:
        """The held-out batches, one after the other on the rank's device."""
        for batch in self.held_out:
            yield batch.to(self._ranks.device)
