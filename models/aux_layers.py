"""Which states of the target an EAGLE-3 head reads, as residual-stream indices: k is the state after k layers.

Files name layers by number, and systems disagree on which side of the layer the state lies. The EAGLE authors' code,
SGLang, SpecForge, vLLM and speculators agree only when no layer is named: then it is low, middle and high. A wrong
reading raises no error, the head is only hardly ever accepted; so the other readings are listed too, to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.models.config import DecoderConfig


def plausible_aux_layers(
    ids: Sequence[int] | None, target: DecoderConfig, counts_states: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Every reading of a head's layer ids, the likeliest first; without ids there is only the default.

    Ids that start at 1 name layer outputs (SpecForge), so k is likeliest the state after k + 1 layers; other ids name
    states (vLLM, and SGLang since it follows the same rule).

    Args:
        ids: as the files have them.
        counts_states: the format itself says that id k is the state after k layers (speculators).

    Raises:
        ValueError: if the likeliest reading lies outside the target.
    """
    default = target.default_aux_layers()
    if not ids:
        return (default,)
    states = tuple(int(index) for index in ids)
    outputs = tuple(index + 1 for index in states)
    likeliest = outputs if states[0] == 1 and not counts_states else states
    if not _exist(likeliest, target):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: {list(ids)} is outside the target's {target.num_layers} layers"
        )
    others = [states, outputs, default] if len(default) == len(states) else [states, outputs]
    return tuple(dict.fromkeys([likeliest, *(layers for layers in others if _exist(layers, target))]))


def chosen_aux_layers(layers: tuple[int, ...], target: DecoderConfig) -> tuple[tuple[int, ...], ...]:
    """The user's own choice as the only reading.

    Raises:
        ValueError: if it lies outside the target.
    """
    if not layers or not _exist(layers, target):
        raise ValueError(f"aux_layers: {list(layers)} must be states 0 to {target.num_layers} of the target")
    return (layers,)


def _exist(layers: tuple[int, ...], target: DecoderConfig) -> bool:
    return all(0 <= index <= target.num_layers for index in layers)
