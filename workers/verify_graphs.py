"""Decode steps of a target replayed from recordings, one per bucket of nodes and requests.

Letters: T rows of a bucket, B requests of a bucket, N nodes, A = draft depth + 1, F width of the captured features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from eyas.kernels.tree import PADDING_PARENT
from eyas.workers.buckets import Bucket, GraphLimits, smallest_bucket, verify_buckets
from eyas.workers.graphs import Progress, Recorder, no_progress
from eyas.workers.input_block import InputBlock, PageRows
from eyas.workers.kv_pool import PageTable
from eyas.workers.sampling import SamplingParams
from eyas.workers.tree_verification import NUM_RESULTS, ForwardPass, TreeVerification, VerifyInputs


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One request's part of a step."""

    request_id: int
    tokens: list[int]
    parents: list[int]
    num_committed: int
    pages: PageTable
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """Args:
    tokens: what each request gains: its accepted draft tokens, then the bonus token.
    features: of the committed rows, request by request, `[sum of gains, F]`; None without capture.
    not_finite: places of requests whose logits hold NaN or infinity.
    """

    tokens: list[list[int]]
    features: Tensor | None
    not_finite: list[int]


class VerifyGraphs:
    """All recorded steps of one target rank."""

    def __init__(
        self, verification: TreeVerification, capture: tuple[int, ...], limits: GraphLimits, recorder: Recorder
    ) -> None:
        self._verification = verification
        self._capture = capture
        self._limits = limits
        self._recorder = recorder
        self.buckets = verify_buckets(limits)
        pool = verification.pool
        self._pages = PageRows(limits.max_batch, limits.max_pages, pool.layout.scratch_page, verification.model.device)
        self._steps: dict[Bucket, _RecordedStep] = {}

    @torch.inference_mode()
    def record(self, on_progress: Progress = no_progress) -> None:
        """Record every bucket; `on_progress` is told how many of how many are done."""
        for done, bucket in enumerate(self.buckets):
            on_progress(done, len(self.buckets))
            self._steps[bucket] = _RecordedStep(
                bucket, self._verification, self._capture, self._limits, self._pages.device, self._recorder
            )
        on_progress(len(self.buckets), len(self.buckets))

    @torch.inference_mode()
    def verify(self, requests: list[VerifyRequest]) -> VerifyOutcome:
        """Verify, accept and compact the trees of one step.

        Raises:
            ValueError: if no bucket holds them, or a row is no tree.
        """
        bucket = smallest_bucket(self.buckets, sum(len(each.tokens) for each in requests), len(requests))
        self._pages.upload(
            [each.request_id for each in requests], [each.pages.page_ids for each in requests], bucket.batch + 1
        )
        return self._steps[bucket].run(requests)


class _RecordedStep:
    """One bucket's buffers and recordings."""

    def __init__(
        self, bucket: Bucket, verification: TreeVerification, capture: tuple[int, ...], limits: GraphLimits,
        page_table: Tensor, recorder: Recorder,
    ) -> None:  # fmt: skip
        rows, batch, max_nodes = bucket.num_rows, bucket.batch, limits.max_nodes
        device = verification.model.device
        self._bucket = bucket
        self._block = InputBlock(
            {
                **dict.fromkeys(("tokens", "requests", "nodes"), (rows,)),
                "parents": (batch, max_nodes),
                "num_nodes": (batch,),
                **dict.fromkeys(("committed", "seeds", "temperatures", "top_p"), (batch + 1,)),
            },
            device,
        )
        self._fill([])
        block = self._block
        inputs = VerifyInputs(
            **{name: block.device[name] for name in ("tokens", "requests", "nodes", "parents", "num_nodes")},
            committed=block.device["committed"],
            seeds=block.device["seeds"],
            temperatures=block.device_floats("temperatures"),
            top_p=block.device_floats("top_p"),
            page_table=page_table[: batch + 1],
        )
        self._passed: ForwardPass
        self._results = torch.zeros(batch, limits.draft_depth + 1 + NUM_RESULTS, dtype=torch.int64, device=device)

        def forward() -> None:
            self._passed = verification.forward(inputs, capture)

        def accept(has_nucleus: bool) -> None:
            self._results.copy_(verification.accept(inputs, self._passed, has_nucleus))

        block.upload()
        self._forward = recorder.record(forward)
        self._accept = {narrows: recorder.record(partial(accept, narrows)) for narrows in (False, True)}

    def run(self, requests: list[VerifyRequest]) -> VerifyOutcome:
        self._fill(requests)
        self._block.upload()
        self._forward()
        self._accept[any(each.sampling.temperature > 0 and each.sampling.top_p < 1 for each in requests)]()
        results = self._results[: len(requests)].tolist()
        tokens, rows, not_finite = [], [], []
        first = 0
        for place, (request, (*path, num_accepted, bonus, is_finite, is_tree)) in enumerate(
            zip(requests, results, strict=True)
        ):
            if not is_tree:
                raise ValueError(f"the parents {request.parents} of request {request.request_id} are no tree")
            kept = path[: num_accepted + 1]
            tokens.append([*(request.tokens[node] for node in kept[1:]), bonus])
            rows += [first + node for node in kept]
            first += len(request.tokens)
            if not is_finite:
                not_finite.append(place)
        features = self._passed.features
        if features is not None:
            features = features[torch.tensor(rows, device=features.device)]
        return VerifyOutcome(tokens, features, not_finite)

    def _fill(self, requests: list[VerifyRequest]) -> None:
        """Write the step's inputs; everything past the requests becomes padding."""
        host, count = self._block.host, len(requests)
        host["requests"].fill(self._bucket.batch)
        for name in ("tokens", "nodes", "committed", "seeds", "temperatures"):
            host[name].fill(0)
        self._block.host_floats("top_p").fill(1.0)
        host["parents"].fill(PADDING_PARENT)
        host["num_nodes"].fill(0)
        sizes = np.array([len(each.tokens) for each in requests], dtype=np.int64)
        places = np.repeat(np.arange(count), sizes)
        nodes = np.arange(places.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        host["num_nodes"][:count] = sizes
        host["requests"][: places.size] = places
        host["nodes"][: places.size] = nodes
        host["tokens"][: places.size] = list(chain.from_iterable(each.tokens for each in requests))
        host["parents"][places, nodes] = list(chain.from_iterable(each.parents for each in requests))
        host["committed"][:count] = [each.num_committed for each in requests]
        host["seeds"][:count] = [each.sampling.seed for each in requests]
        self._block.host_floats("temperatures")[:count] = [each.sampling.temperature for each in requests]
        self._block.host_floats("top_p")[:count] = [each.sampling.top_p for each in requests]
