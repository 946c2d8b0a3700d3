"""What an EAGLE-3 head is, read from its config: sizes, target states, and which of the published variants.

Letters: A captured layers, H head hidden, Ht target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.models.aux_layers import chosen_aux_layers, plausible_aux_layers
from eyas.models.config import DecoderConfig
from eyas.models.draft_layers import LayerStack, count_layers
from eyas.models.head_files import HeadFiles, HeadOptions


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Normalised head config.

    Args:
        layers: the first reads embedding and state side by side, further ones are ordinary.
        target_hidden_size: Ht; the head has an embedding of its own where it differs from H.
        plausible_captures: readings of the files' layer ids as residual-stream indices, low to high; the first is used.
        has_fc: False for a head that reads one target state of its own width (`use_aux_hidden_state: false`).
        norm_before_fc: one norm over the captured states side by side.
        fc_norm: one norm for each captured state.
        norm_output: the state is taken after the final norm.
        norm_before_residual: the first layer adds to the normed state.
        logit_scale: multiplies the logits.
        raw: the file's content.
    """

    layers: LayerStack
    target_hidden_size: int
    draft_vocab_size: int
    plausible_captures: tuple[tuple[int, ...], ...]
    has_fc: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    logit_scale: float
    raw: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Residual-stream indices of the target that `fc` fuses."""
        return self.plausible_captures[0]

    @property
    def capture(self) -> tuple[int, ...]:
        return self.aux_layers

    @property
    def max_depth(self) -> None:
        return None

    @property
    def feature_size(self) -> int:
        """Width of what `extend` takes, A * Ht."""
        return len(self.aux_layers) * self.target_hidden_size

    @staticmethod
    def normalise(files: HeadFiles, target: DecoderConfig, options: HeadOptions) -> Eagle3Config:
        """See `HeadKind.normalise`."""
        return Eagle3Config.from_dict(files.config, target, count_layers(files.tensors.names), options)

    @staticmethod
    def from_dict(
        raw: dict[str, Any], target: DecoderConfig, num_layers: int = 1, options: HeadOptions | None = None
    ) -> Eagle3Config:
        """Normalise a flat `config.json` against the target it will draft for; layer ids as in `plausible_aux_layers`.

        Raises:
            ValueError: naming the field, for a variant that is not implemented or a target that does not fit.
        """
        layers = LayerStack.from_dict(raw, num_layers, target.max_positions)
        target_hidden = int(_option(raw, "target_hidden_size") or layers.hidden_size)
        if target_hidden != target.hidden_size:
            raise ValueError(
                f"hidden_size: the head reads states of {target_hidden}, the target's are {target.hidden_size}"
            )
        if int(raw["vocab_size"]) != target.vocab_size:
            raise ValueError(
                f"vocab_size: the head was made for {raw['vocab_size']}, the target has {target.vocab_size}"
            )
        draft_vocab_size = int(raw.get("draft_vocab_size") or raw["vocab_size"])
        if draft_vocab_size > target.vocab_size:
            raise ValueError(f"draft_vocab_size: {draft_vocab_size} exceeds the target's {target.vocab_size}")
        norm_before_fc, fc_norm = bool(_option(raw, "norm_before_fc")), bool(_option(raw, "fc_norm"))
        if norm_before_fc and fc_norm:
            raise ValueError(
                "norm_before_fc: and fc_norm are both true, but a head has one norm before fc or the other"
            )
        reads_aux_states = _option(raw, "use_aux_hidden_state") is not False
        has_fc = reads_aux_states or target_hidden != layers.hidden_size
        if not has_fc and (norm_before_fc or fc_norm):
            raise ValueError(
                "use_aux_hidden_state: false with states as wide as the head's means no fc, but "
                f"{'fc_norm' if fc_norm else 'norm_before_fc'} is true; one of the two is wrong"
            )
        return Eagle3Config(
            layers=layers,
            target_hidden_size=target_hidden,
            draft_vocab_size=draft_vocab_size,
            plausible_captures=_captures(raw, target, reads_aux_states, options or HeadOptions()),
            has_fc=has_fc,
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_output=bool(_option(raw, "norm_output")),
            norm_before_residual=bool(_option(raw, "norm_before_residual")),
            logit_scale=float(1.0 if raw.get("logit_scale") is None else raw["logit_scale"]),
            raw=raw,
        )


def _option(raw: dict[str, Any], name: str) -> Any:
    """A field that some write at the top level and some in `eagle_config`; None if neither has it."""
    outer, inner = raw.get(name), (raw.get("eagle_config") or {}).get(name)
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(f"{name}: is {outer} at the top level but {inner} in eagle_config; make the two agree")
    return inner if outer is None else outer


def _captures(
    raw: dict[str, Any], target: DecoderConfig, reads_aux_states: bool, options: HeadOptions
) -> tuple[tuple[int, ...], ...]:
    if not reads_aux_states:
        if options.aux_layers not in (None, (target.final_index,)):
            raise ValueError("aux_layers: the head reads the target's final state alone (use_aux_hidden_state: false)")
        return ((target.final_index,),)
    if options.aux_layers is not None:
        return chosen_aux_layers(options.aux_layers, target)
    nested = raw.get("eagle_config") or {}
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    return plausible_aux_layers(ids, target, counts_states=bool(raw.get("layer_ids_count_states")))
