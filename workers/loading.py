"""What an engine is made of, and how each worker loads its part."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from eyas.models.config import DecoderConfig, read_json
from eyas.models.eagle3 import Eagle3Config, load_eagle3
from eyas.models.linear import pack_linears
from eyas.models.llama import load_decoder
from eyas.models.parallel import TensorParallel
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.target import TargetRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineSpec(msgspec.Struct, frozen=True):
    """Everything a worker process needs to load its share of an engine.

    Args:
        head_folder: None serves without speculation.
        num_threads: torch threads of each target rank, or of the one process of an offline engine.
        drafter_num_threads: torch threads of a drafter in a process of its own.
        shares_noise: see `DraftRunner`.
    """

    target_folder: str
    head_folder: str | None
    dtype: str
    device: str
    num_pages: int
    page_size: int
    num_threads: int
    tensor_parallel_size: int = 1
    shares_noise: bool = True
    drafter_num_threads: int = 1

    @property
    def layout(self) -> PoolLayout:
        return PoolLayout(self.num_pages, self.page_size)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype} is not supported; use one of {sorted(DTYPES)}")
        return DTYPES[self.dtype]

    def target_config(self) -> DecoderConfig:
        return DecoderConfig.from_folder(Path(self.target_folder))

    def aux_layers(self) -> tuple[int, ...]:
        """Residual-stream states the head reads; none without a head."""
        if self.head_folder is None:
            return ()
        return Eagle3Config.from_dict(
            read_json(Path(self.head_folder) / "config.json"), self.target_config()
        ).aux_layers

    def validate(self) -> None:
        """Refuse at start what cannot work anywhere, naming the field; reads no device, the router has none."""
        _ = self.torch_dtype
        self.target_config().check_tensor_parallel(self.tensor_parallel_size)
        self.aux_layers()

    def check_device(self) -> None:
        """Refuse a device that this process does not see."""
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: cuda was asked for, but torch sees no CUDA device; use cpu")


def load_target(spec: EngineSpec, parallel: TensorParallel | None = None) -> TargetRunner:
    """Load one target rank."""
    spec.check_device()
    model = load_decoder(Path(spec.target_folder), spec.torch_dtype, torch.device(spec.device), parallel)
    pack_linears(model)
    return TargetRunner(model, spec.layout, spec.aux_layers())


def load_drafter(spec: EngineSpec) -> DraftRunner | None:
    """Load the drafter, or None for an engine without a head."""
    if spec.head_folder is None:
        return None
    spec.check_device()
    target_folder = Path(spec.target_folder)
    head = load_eagle3(
        Path(spec.head_folder), spec.target_config(), target_folder, spec.torch_dtype, torch.device(spec.device)
    )
    pack_linears(head)
    return DraftRunner(head, spec.layout, spec.shares_noise)
