"""What Medusa heads are, read off their tensors: published configs are often wrong.

Letters: K heads, H hidden, V target vocabulary, Vd scored vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eyas.models.config import DecoderConfig
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.tensor_source import TensorSource
from eyas.models.vocabulary_map import read_token_map

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)")
_OWN_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight")
SHARED_PROJECTION, TOKEN_MAP = "lm_head.weight", "token_map"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Normalised config. All sizes are read off the tensors: published configs say 2 heads where the file holds 5.

    Args:
        num_heads: K.
        num_layers: residual blocks of a head.
        has_bias: of the residual blocks.
        projection: `own` of every head, `shared` by all heads, or the `target`'s.
        projection_rows: tokens a stored projection scores; V for the target's.
        draft_vocab_size: Vd; smaller than `projection_rows` if a token map picks rows.
        capture: the state it reads: by default the one after the final norm, which the output projection reads too.
        plausible_captures: that one and the state before the norm.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    has_bias: bool
    projection: str
    projection_rows: int
    draft_vocab_size: int
    logit_scale: float
    capture: tuple[int, ...]
    plausible_captures: tuple[tuple[int, ...], ...]

    @property
    def max_depth(self) -> int:
        return self.num_heads

    @staticmethod
    def normalise(files: HeadFiles, target: DecoderConfig, options: HeadOptions) -> MedusaConfig:
        """See `HeadKind.normalise`."""
        source = files.tensors
        if options.num_candidates is not None:
            raise ValueError("num_candidates: a Medusa head has no low-rank candidate projection; leave it out")
        num_heads, num_layers = _count(source)
        projection, rows = _projection(source, num_heads, target)
        hidden_size = _rows(source, "blocks.0.layers.0.weight")
        if hidden_size != target.hidden_size:
            raise ValueError(
                f"hidden_size: {source.origin} reads states of {hidden_size}, the target's are {target.hidden_size}"
            )
        declared = files.config.get("vocab_size")
        if projection == "target" and declared not in (None, target.vocab_size):
            raise ValueError(f"vocab_size: {source.origin} was made for {declared}, the target has {target.vocab_size}")
        logit_scale = files.config.get("logit_scale", 1.0)
        if isinstance(logit_scale, bool) or not isinstance(logit_scale, int | float):
            raise ValueError(f"logit_scale: {source.origin} has {logit_scale}, expected a number")
        plausible = _captures(target, options)
        return MedusaConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=hidden_size,
            has_bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in source.names),
            projection=projection,
            projection_rows=rows,
            draft_vocab_size=_draft_vocab_size(source, rows, target, options),
            logit_scale=float(logit_scale),
            capture=plausible[0],
            plausible_captures=plausible,
        )


def _count(source: TensorSource) -> tuple[int, int]:
    """Numbers of heads and of residual blocks in each; every head must have all of its blocks."""
    blocks = {(int(m[1]), int(m[2])) for name in source.names if (m := _BLOCK.fullmatch(name))}
    if not blocks:
        raise ValueError(f"{source.origin}: no residual block of a Medusa head is among its tensors")
    projected = [int(m[1]) for name in source.names if (m := _OWN_PROJECTION.fullmatch(name))]
    num_heads = 1 + max([head for head, _ in blocks] + projected)
    num_layers = 1 + max(layer for _, layer in blocks)
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}.weight"
            if name not in source.names:
                raise ValueError(
                    f"{source.origin}: tensor {name} ({head}.{layer}.linear.weight) of {num_heads} heads with "
                    f"{num_layers} residual blocks each is missing"
                )
    return num_heads, num_layers


def _projection(source: TensorSource, num_heads: int, target: DecoderConfig) -> tuple[str, int]:
    """Whose projection is used, and how many tokens it scores."""
    if SHARED_PROJECTION in source.names:
        return "shared", _rows(source, SHARED_PROJECTION)
    own = [f"lm_heads.{head}.weight" for head in range(num_heads)]
    missing = [name for name in own if name not in source.names]
    if len(missing) == num_heads:
        return "target", target.vocab_size
    if missing:
        raise ValueError(f"{source.origin}: tensor {missing[0]} is missing, but other heads have a projection")
    return "own", _rows(source, own[0])


def _rows(source: TensorSource, name: str) -> int:
    shape = source.shape(name)
    if len(shape) != 2:
        raise ValueError(f"{source.origin}: tensor {name} is {list(shape)}, expected a matrix")
    return shape[0]


def _draft_vocab_size(source: TensorSource, rows: int, target: DecoderConfig, options: HeadOptions) -> int:
    if TOKEN_MAP not in source.names:
        if rows != target.vocab_size:
            raise ValueError(
                f"{source.origin}: the projections score {rows} tokens, the target has {target.vocab_size}, and there "
                f"is no {TOKEN_MAP} to say which; export the head with its map, or use the target it was made for"
            )
        return rows if options.token_map is None else read_token_map(Path(options.token_map), rows).numel()
    if options.token_map is not None:
        raise ValueError(f"token_map: {source.origin} has a {TOKEN_MAP} of its own; leave the option out")
    (size, *rest) = source.shape(TOKEN_MAP) or (0, 0)
    if rest or not size:
        raise ValueError(f"{source.origin}: tensor {TOKEN_MAP} is {list(source.shape(TOKEN_MAP))}, expected a list")
    if rows not in (size, target.vocab_size):
        raise ValueError(
            f"{source.origin}: the projections score {rows} tokens, but {TOKEN_MAP} lists {size} and the target has "
            f"{target.vocab_size}"
        )
    return size


def _captures(target: DecoderConfig, options: HeadOptions) -> tuple[tuple[int, ...], ...]:
    if options.aux_layers is None:
        return (target.final_index,), (target.num_layers,)
    if len(options.aux_layers) != 1 or not 0 <= options.aux_layers[0] <= target.final_index:
        raise ValueError(
            f"aux_layers: a Medusa head reads one state of the target, 0 to {target.final_index}, got "
            f"{list(options.aux_layers)}"
        )
    return (options.aux_layers,)
