"""`eyas inspect`: what a checkpoint is, how Eyas reads it, what it costs, and what is wrong with it.

Cost is the one a speculative step pays: c = weights read by one drafted level / weights read by one target pass, both
for one row. At batch 1 a decoder is bound by reading weights, so c is the ratio of the times, too.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from eyas.kernels.attention_options import AttentionOptions
from eyas.models.acceptance_prior import FIELD, AcceptancePrior
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.head import Candidates, DraftHead
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.target_weights import TargetWeights
from eyas.models.tensor_source import TensorSource

_CPU = torch.device("cpu")


@dataclass
class Inspection:
    """What was found; `problems` is empty for a checkpoint that can be served as it is.

    Args:
        what: one line for people.
        fields: normalised config, in order.
        num_bytes: of all tensors as stored.
        cost: see the module; None for a target or where the head cannot be loaded.
        extend_cost: the same for one committed token, which also pays what only true features need.
    """

    what: str
    fields: dict[str, Any] = field(default_factory=dict)
    num_tensors: int = 0
    num_bytes: int = 0
    cost: float | None = None
    extend_cost: float | None = None
    problems: list[str] = field(default_factory=list)


def inspect_path(path: Path, target_folder: Path | None, options: HeadOptions) -> Inspection:
    """Look at a head, or at a target if that is what `path` holds.

    Args:
        target_folder: the target the head is meant for; None leaves out all that depends on it.
    """
    try:
        files = open_head(path)
    except ValueError as error:
        target = _inspect_target(path)
        return target if target is not None else Inspection(f"{path}: unreadable", problems=[str(error)])
    found = Inspection(f"{files.format} ({files.kind} head)")
    _count_tensors(found, files.tensors)
    found.fields = _plain(files.config)
    if target_folder is None:
        found.problems.append("no target was given, so nothing could be checked against it; pass --target")
        return found
    try:
        target_config = DecoderConfig.from_folder(target_folder)
        config = normalise_head(files, target_config, options)
        found.fields = _plain(dataclasses.asdict(config)) if dataclasses.is_dataclass(config) else {}
        found.fields["reads target states"] = list(config.capture)
        found.fields["other plausible readings"] = [list(each) for each in config.plausible_captures[1:]]
        head = load_head(path, TargetWeights(target_folder, target_config), torch.float32, _CPU, options)
        found.fields["acceptance prior"] = _regimes(head.acceptance_prior)
        num_features = len(config.capture) * target_config.hidden_size
        target_weights = target_pass_weights(target_folder, target_config)
        found.cost = step_weights(head, num_features, extends=False) / target_weights
        found.extend_cost = step_weights(head, num_features, extends=True) / target_weights
    except ValueError as error:
        found.problems.append(str(error))
    return found


def _regimes(prior: AcceptancePrior | None) -> str:
    """Which requests' trees grow by calibrated scores."""
    if prior is None:
        return "none"
    kept = [name for name, curves in (("greedy", prior.greedy), ("sampled", prior.sampled)) if curves is not None]
    return ", ".join(kept) or "raw scores are kept"


class _First:
    """A `Ranker` that takes the best token and costs nothing."""

    def rank(self, logits: torch.Tensor, token_ids: torch.Tensor) -> Candidates:
        best, columns = logits.topk(1, dim=-1)
        return Candidates(columns, best)

    def shortlist(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        return logits.topk(count, dim=-1).indices


def step_weights(head: DraftHead, num_features: int, extends: bool) -> float:
    """Weights one row multiplies in one drafted level (or in one committed token), its candidates included.

    Counted by running the head: two floating-point operations a weight; embedding rows and attention to a cache of one
    position are left out as the trifles they are.
    """

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions | None = None
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    token, position = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with torch.inference_mode():
        state = head.extend(torch.zeros(1, num_features), token, position, attend)
        with counter:
            if extends:
                state = head.extend(torch.zeros(1, num_features), token, position, attend)
            elif head.is_path_dependent:
                state = head.step(state, token, position, attend)
            if not extends:
                head.candidates(state, range(1, 2), _First())
    return counter.get_total_flops() / 2


_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def target_pass_weights(folder: Path, config: DecoderConfig) -> float:
    """Weights one row multiplies in one pass of the target, experts that are not chosen left out."""
    checkpoint = Checkpoint(folder)
    total = 0.0
    num_experts = next((config.raw[name] for name in _NUM_EXPERTS if config.raw.get(name)), 1)
    chosen = config.raw.get("num_experts_per_tok") or config.raw.get("experts_per_token") or num_experts
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        if "embed" in name and not config.tie_word_embeddings:
            continue
        share = chosen / num_experts if ".experts." in name else 1.0
        total += share * math.prod(shape)
    return total


def _inspect_target(path: Path) -> Inspection | None:
    if not (path / "config.json").exists():
        return None
    try:
        config = DecoderConfig.from_folder(path)
    except ValueError as error:
        return Inspection(f"{path}: a model folder", problems=[str(error)])
    found = Inspection(f"target model, {config.architecture}", _plain(dataclasses.asdict(config)))
    found.fields["tensor_parallel_sizes"] = config.tensor_parallel_sizes()
    try:
        _count_tensors(found, Checkpoint(path))
    except ValueError as error:
        found.problems.append(str(error))
    return found


def _count_tensors(found: Inspection, source: TensorSource) -> None:
    found.num_tensors = len(source.names)
    found.num_bytes = sum(source.num_bytes(name) for name in source.names)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Flat, without the raw file, which is on disk to be read."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        # The captures and the prior are told apart from the rest.
        if name not in ("raw", "plausible_captures", "capture", FIELD):
            flat |= _plain(value) if isinstance(value, dict) else {name: value}
    return flat
