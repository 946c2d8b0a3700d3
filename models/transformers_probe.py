"""What the layers of a `transformers` model ask of attention, measured by one forward pass of no other use.

`transformers` describes every mask by a function of (query position, key position). Instead of building masks, the
probe evaluates that function far out, and so finds a layer's window whatever its size and whatever the layer is told.

Letters: T tokens, Hq / Hkv heads, D head dim, Dv head dim of the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from eyas.kernels.attention_options import AttentionOptions
from eyas.models.config import DecoderConfig
from eyas.models.transformers_attention import route, running

PROBE_NAME = "eyas_probe"
_NO_WINDOW = 0
_NOT_A_WINDOW = -1
_FARTHEST_POSITION = 1 << 20  # windows beyond it are taken for none

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def measure_windows(decoder: Any, config: DecoderConfig, token_ids: Tensor) -> tuple[int | None, ...]:
    """Window of every layer, None for all keys. The model's attention implementation must be `PROBE_NAME`.

    Raises:
        ValueError: saying what the layers do that Eyas cannot, or that the config does not tell.
    """
    run = _ProbeRun(config)
    with running(run):
        decoder(input_ids=token_ids[None], use_cache=False)
    if sorted(run.windows) != list(range(config.num_layers)):
        raise ValueError(
            f"only {len(run.windows)} of its {config.num_layers} layers put their attention through the interface of "
            "transformers"
        )
    if sorted(run.states) != list(range(config.num_layers + 1)):
        raise ValueError("its layers are not called once each in a row")
    return tuple(run.windows[layer] for layer in range(config.num_layers))


class _ProbeRun:
    def __init__(self, config: DecoderConfig) -> None:
        self.windows: dict[int, int | None] = {}
        self.states: list[int] = []
        self._config = config

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Any
    ) -> Tensor:
        config = self._config
        if layer in self.windows:
            raise ValueError(f"layer {layer} attends twice for one token, and only one pair of key and value is cached")
        expected = [(config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim),
                    (config.num_kv_heads, config.value_head_dim)]  # fmt: skip
        found = [tuple(x.shape[1:]) for x in (query, key, value)]
        if found != expected:
            raise ValueError(
                f"layer {layer} has queries, keys and values of (heads, head dim) {found}, its config says {expected}, "
                "and all layers must have the same"
            )
        if not isinstance(mask, Tensor) or mask.numel() != 1:
            raise ValueError(f"layer {layer} builds its own attention mask")
        if int(mask) == _NOT_A_WINDOW:
            raise ValueError(f"layer {layer} sees neither the whole text before a token nor a window of it")
        self.windows[layer] = None if int(mask) == _NO_WINDOW else int(mask)
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def note_state(self, index: int, state: Tensor) -> None:
        if state.shape[-1] != self._config.hidden_size or state.dim() != 3:
            raise ValueError(f"the state between its layers is {list(state.shape)}, not one vector per token")
        self.states.append(index)


def _window_marker(mask_function: MaskFunction, config: Any, device: torch.device, **_: Any) -> Tensor:
    """In place of a mask `[1, 1, T, T]`: the size of its window as the one element of `[1, 1, 1, 1]`."""
    farthest = min(config.max_position_embeddings, _FARTHEST_POSITION) - 1
    # Neighbours, to tell a window from a chunk: a window moves along with every position.
    queries = torch.tensor([0, farthest // 2, farthest - 2, farthest - 1, farthest], device=device)[:, None]
    keys = torch.arange(farthest + 1, device=device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visible = mask_function(zero, zero, queries, keys).expand(len(queries), len(keys[0]))
    size = int(visible[-1].sum())
    is_window = torch.equal(visible, (keys <= queries) & (keys > queries - size))
    window = (_NO_WINDOW if size == farthest + 1 else size) if is_window else _NOT_A_WINDOW
    return torch.full((1, 1, 1, 1), window, dtype=torch.int64, device=device)


AttentionInterface.register(PROBE_NAME, route)
AttentionMaskInterface.register(PROBE_NAME, _window_marker)
