"""What an engine asks of its kernels, read off the configs of its models: no weights, no device.

Sinks are not among it: configs do not tell of them, and every attention backend does them.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from eyas.kernels.backends import AttentionNeed, KernelNeed
from eyas.kernels.capabilities import AttentionFeature
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleConfig
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.head import HeadCache
from eyas.models.head_loading import HeadConfig
from eyas.models.mtp import MtpConfig


def kernel_need(
    engine: KernelNeed, target: DecoderConfig, head: HeadConfig | None, draft_depth: int, width: int
) -> KernelNeed:
    """What the tree operations and the elementwise kernels must take.

    Args:
        engine: its device, dtype and graphs.
        width: candidates kept per level; 0 for trees of a fixed shape, which are not grown.
    """
    cache = head_cache(head)
    # A model that runs through transformers does its elementwise work itself.
    sizes = {
        "head_dim": max(target.head_dim if target.is_native else 0, cache.head_dim if cache is not None else 0),
        "hidden_size": max(target.hidden_size if target.is_native or head is not None else 0, _widest_norm(head)),
        "draft_depth": draft_depth,
        "width": width,
        "candidates": width + max(draft_depth - 1, 0) * width**2,
    }
    return KernelNeed(engine.device, engine.dtype, engine.graph_capture, sizes)


def target_need(engine: KernelNeed, config: DecoderConfig, page_size: int) -> AttentionNeed:
    """What the target's layers ask of attention."""
    return AttentionNeed(
        engine.device,
        engine.dtype,
        engine.graph_capture,
        side="target",
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        page_size=page_size,
        features=frozenset() if config.is_native else _features(config),
    )


def head_need(engine: KernelNeed, config: HeadConfig | None, page_size: int) -> AttentionNeed | None:
    """What the draft head's layers ask of attention; None for a head without any, and without a head."""
    cache = head_cache(config)
    if cache is None:
        return None
    has_windows = isinstance(config, EagleConfig | Eagle3Config) and any(
        window is not None for window in config.layers.windows
    )
    return AttentionNeed(
        engine.device,
        engine.dtype,
        engine.graph_capture,
        side="draft head",
        head_dim=cache.head_dim,
        value_head_dim=cache.value_head_dim,
        page_size=page_size,
        features=frozenset({AttentionFeature.WINDOWS}) if has_windows else frozenset(),
    )


def head_cache(config: HeadConfig | None) -> HeadCache | None:
    """Keys and values that a head of this config keeps."""
    if isinstance(config, EagleConfig | Eagle3Config):
        return config.layers.cache
    return config.cache if isinstance(config, MtpConfig) else None


def _widest_norm(head: HeadConfig | None) -> int:
    """Elements of the longest row that a head norms, where it is not the target's own."""
    if isinstance(head, Eagle3Config):
        return max(head.hidden_size, head.feature_size if head.norm_before_fc else 0)
    return 0


def _features(config: DecoderConfig) -> frozenset[AttentionFeature]:
    """Of a model that runs through `transformers`, whose config classes fill in what a file leaves out."""
    raw = config.raw
    known = AutoConfig.for_model(raw["model_type"], **{name: raw[name] for name in raw if name != "model_type"})
    text: Any = known.get_text_config(decoder=True)
    features = set()
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else getattr(text, "use_sliding_window", True)
    if window is not None and window < config.max_positions and slides:
        features.add(AttentionFeature.WINDOWS)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        features.add(AttentionFeature.SOFTCAP)
    return frozenset(features)
