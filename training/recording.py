"""Recording the target's hidden states while it writes the corpus, so that they need not be computed again.

The recorder takes the drafter's place in an engine: it proposes nothing and keeps every committed row's features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class CommittedRun(Protocol):
    """A request's rows committed by one step; see `workers.messages.AcceptedRun`."""

    @property
    def request_id(self) -> int: ...

    @property
    def num_committed(self) -> int: ...


class FeatureRecorder:
    """Collects features `[A * H]` per committed position until `take` hands a request's over."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}

    def update_requests(self, plan: Any) -> None:
        """Nothing to do: a request's rows are kept until they are taken."""

    def draft(self, plan: Any) -> dict[int, tuple[list[int], list[int]]]:
        """No trees: the corpus is written by plain decoding."""
        return {}

    def extend(self, runs: list[Any], features: Tensor) -> None:
        """Keep the features `[sum of num_committed, A * H]` of a step's runs."""
        pieces = features.to(torch.bfloat16).split([run.num_committed for run in runs])
        for run, piece in zip(runs, pieces, strict=True):
            self._parts.setdefault(run.request_id, []).append(piece.clone())

    def take(self, request_id: int) -> Tensor:
        """Features of all committed positions of a request, `[T, A * H]`, and forget them."""
        return torch.cat(self._parts.pop(request_id))

    def clear(self) -> None:
        """Forget everything not taken."""
        self._parts.clear()
