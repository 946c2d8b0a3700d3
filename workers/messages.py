"""Control messages between the router, the target ranks and the drafter: msgpack structs, grouped by receiver.

No tensor rides here: hidden states stay in the `HiddenStateExchange` ring, a message names their slot. Workers hold the
authoritative sequence lengths; a plan carries deltas only.
"""

from __future__ import annotations

import msgspec

from eyas.workers.sampling import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A request the workers have not seen yet."""

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """The next `length` prompt tokens of a request; the chunk that ends the prompt also yields the first token."""

    request_id: int
    length: int


class DecodeItem(msgspec.Struct, frozen=True, gc=False):
    """One verify of a request; `num_nodes` is its node budget, root included, so 1 is plain decoding."""

    request_id: int
    num_nodes: int


class StepPlan(msgspec.Struct, frozen=True, gc=False, tag="plan"):
    """Router to every worker: what to do in one step, and what changed since the last one.

    Args:
        new_pages: pages appended to each request's page table.
        finished: requests whose state is dropped before the step runs.
        draft_depth, width: shape of the trees grown in this step.
    """

    step: int
    new: list[NewRequest] = []
    new_pages: dict[int, list[int]] = {}
    finished: list[int] = []
    prefill: list[PrefillChunk] = []
    decode: list[DecodeItem] = []
    draft_depth: int = 0
    width: int = 0


class DraftedTree(msgspec.Struct, frozen=True, gc=False):
    """One request's tree: node tokens (root included) and parent indices."""

    request_id: int
    tokens: list[int]
    parents: list[int]


class DraftedTrees(msgspec.Struct, frozen=True, gc=False, tag="trees"):
    """Drafter to every target rank, once per plan: the trees of the requests that draft in it.

    Args:
        draft_ms: wall time of extending over the last step's tokens and of growing these trees.
        num_pages: pages that live requests hold on the drafter.
    """

    step: int
    trees: list[DraftedTree]
    draft_ms: float
    num_pages: int


class AcceptedRun(msgspec.Struct, frozen=True, gc=False):
    """What one request's KV grew by in a step.

    Args:
        start: first position whose KV became final.
        num_committed: positions that became final; the feature rows of exactly these are published.
        tokens: new text tokens: none for a prompt chunk that does not end the prompt, else accepted + bonus.
    """

    request_id: int
    start: int
    num_committed: int
    tokens: list[int]


class StepOutcome(msgspec.Struct, frozen=True, gc=False, tag="outcome"):
    """Target rank 0 to the drafter: accepted tokens and the exchange slot that holds their target features.

    Args:
        exchange_slot, exchange_sequence: see `HiddenStateExchange`; -1 when nothing was published.
        exchange_generation: of the ring, so that a drafter attached to the ring of another run notices.
    """

    step: int
    runs: list[AcceptedRun]
    exchange_slot: int = -1
    exchange_sequence: int = -1
    exchange_generation: int = -1


class StepResult(msgspec.Struct, frozen=True, gc=False, tag="result"):
    """Target rank 0 to the router.

    Args:
        errors: requests that cannot go on (their reason), e.g. logits that are not finite.
        draft_ms, verify_ms: wall time of the drafter's and the target's part of this step.
        target_pages, drafter_pages: pages that live requests hold on either side.
    """

    step: int
    runs: list[AcceptedRun]
    errors: dict[int, str] = {}
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    target_pages: int = 0
    drafter_pages: int = 0


class Shutdown(msgspec.Struct, frozen=True, gc=False, tag="shutdown"):
    """Router to every worker: leave the run loop."""


WorkerInbox = StepPlan | DraftedTrees | StepOutcome | Shutdown
RouterInbox = StepResult
