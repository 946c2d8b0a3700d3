"""What an engine is made of, and how each worker loads its part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import torch

from eyas.kernels.backends import AUTO, KernelNeed, choose_attention, choose_kernels, create_attention
from eyas.kernels.capabilities import Capabilities
from eyas.kernels.kernel_set import load_kernels
from eyas.kernels.static_tree import TreeChoices
from eyas.models.config import DecoderConfig
from eyas.models.decoder import Decoder
from eyas.models.head import DraftHead
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import HeadConfig, load_head, normalise_head, open_head
from eyas.models.linear import pack_linears
from eyas.models.mtp import MtpConfig
from eyas.models.parallel import TensorParallel
from eyas.models.target_loading import load_target_decoder
from eyas.models.target_weights import TargetWeights
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graph_memory import check_step_memory, step_bytes
from eyas.workers.graphs import Progress, no_progress, recorder_for
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.needs import head_need, kernel_need, target_need
from eyas.workers.probe import ProbeReport, probe_head
from eyas.workers.self_check import check_target
from eyas.workers.step_backends import StepBackends
from eyas.workers.target import TargetRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepLimits(msgspec.Struct, frozen=True):
    """The largest step an engine will plan.

    Args:
        num_extra_slots: slots a request needs beside its text.
    """

    max_batch: int
    max_nodes: int
    draft_depth: int
    width: int
    num_extra_slots: int


class EngineSpec(msgspec.Struct, frozen=True):
    """Everything a worker process needs to load its share of an engine.

    Args:
        head_folder: folder or file of the head; None serves without speculation.
        head_options: what the user says of the head beyond its files.
        tree_choices: rank paths of a fixed tree; None grows trees from the scores.
        num_threads: torch threads of each target rank, or of the one process of an offline engine.
        drafter_num_threads: torch threads of a drafter in a process of its own.
        num_pages: pages of every pool; None until they are agreed on from the memory that the weights leave.
        gpu_memory_fraction: see `agree_num_pages`.
        shares_noise: see `DraftRunner`.
        acceptance_prior: grow trees by the calibrated scores of a head that has a prior; False takes its raw ones.
        attention_backend, kernel_backend: names of `kernels.capabilities`, or `auto`.
        step_limits: sizes the recordings; None only where nothing is recorded.
        cuda_graphs: capture verify passes and draft loops on a CUDA device; False launches every kernel by itself.
    """

    target_folder: str
    head_folder: str | None
    dtype: str
    device: str
    num_pages: int | None
    page_size: int
    num_threads: int
    tensor_parallel_size: int = 1
    shares_noise: bool = True
    acceptance_prior: bool = True
    drafter_num_threads: int = 1
    head_options: HeadOptions = HeadOptions()
    tree_choices: tuple[tuple[int, ...], ...] | None = None
    gpu_memory_fraction: float = 0.9
    attention_backend: str = AUTO
    kernel_backend: str = AUTO
    cuda_graphs: bool = True
    step_limits: StepLimits | None = None

    @property
    def layout(self) -> PoolLayout:
        if self.num_pages is None:
            raise RuntimeError("no pool can be laid out before its number of pages is agreed on")
        return PoolLayout(self.num_pages, self.page_size)

    def with_pages(self, num_pages: int) -> EngineSpec:
        """The same engine once its pages are agreed on."""
        return msgspec.structs.replace(self, num_pages=num_pages)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype} is not supported; use one of {sorted(DTYPES)}")
        return DTYPES[self.dtype]

    def target_config(self) -> DecoderConfig:
        return DecoderConfig.from_folder(Path(self.target_folder))

    def head_config(self) -> HeadConfig | None:
        """Normalised config of the head; None without one.

        Raises:
            ValueError: naming the field that does not fit the target.
        """
        if self.head_folder is None:
            return None
        return normalise_head(open_head(Path(self.head_folder)), self.target_config(), self.head_options)

    def capture(self) -> tuple[int, ...]:
        """Target states the head reads; none without a head."""
        config = self.head_config()
        return () if config is None else config.capture

    def plausible_captures(self) -> list[tuple[int, ...]]:
        """Readings of the head's files, theirs first; only the user's own where one is given."""
        config = self.head_config()
        if config is None:
            return []
        if self.head_options.aux_layers is not None:
            return [config.capture]
        return list(config.plausible_captures)

    @property
    def captures_graphs(self) -> bool:
        """Whether steps are captured in CUDA graphs."""
        return self._need.graph_capture

    @property
    def _need(self) -> KernelNeed:
        device = torch.device(self.device).type
        return KernelNeed(device, self.torch_dtype, graph_capture=self.cuda_graphs and device == "cuda")

    def graph_limits(self) -> GraphLimits | None:
        """What recorded steps must hold; None where steps run eagerly."""
        if not self.captures_graphs:
            return None
        limits = self.step_limits
        if limits is None:
            raise RuntimeError("the largest step of an engine that records its steps must be known")
        max_places = self.target_config().max_positions + limits.num_extra_slots
        max_pages = min(-(-max_places // self.page_size), self.layout.num_pages)
        return GraphLimits(limits.max_batch, limits.max_nodes, limits.draft_depth, max_pages, limits.width)

    def target_backends(self) -> StepBackends:
        """What a target rank computes with."""
        return StepBackends(load_kernels(self.kernels().name), partial(create_attention, self.target_attention()))

    def head_backends(self) -> StepBackends:
        """What the drafter computes with."""
        kernels, attention = load_kernels(self.kernels().name), self.head_attention()
        if attention is None:
            return StepBackends(kernels)
        return StepBackends(kernels, partial(create_attention, attention))

    def target_attention(self) -> Capabilities:
        """The target's attention backend; see `choose_attention`."""
        return choose_attention(self.attention_backend, target_need(self._need, self.target_config(), self.page_size))

    def head_attention(self) -> Capabilities | None:
        """The head's attention backend; None for a head that attends to nothing, and without a head."""
        need = head_need(self._need, self.head_config(), self.page_size)
        return None if need is None else choose_attention(self.attention_backend, need)

    def kernels(self, draft_depth: int = 0, width: int = 0) -> Capabilities:
        """The backend of everything but attention; see `kernel_need` and `choose_kernels`."""
        need = kernel_need(self._need, self.target_config(), self.head_config(), draft_depth, width)
        return choose_kernels(self.kernel_backend, need)

    def validate(self, draft_depth: int = 0, width: int = 0) -> None:
        """Refuse at start what cannot work anywhere, naming the field; reads no device, the router has none.

        Args:
            draft_depth: levels of the deepest draft.
            width: candidates kept per level of trees that are grown.
        """
        _ = self.torch_dtype
        self.target_config().check_tensor_parallel(self.tensor_parallel_size)
        self.target_attention()
        self.head_attention()
        self.kernels(draft_depth, width)
        self._check_recording()
        config = self.head_config()
        if config is not None and config.max_depth is not None and draft_depth > config.max_depth:
            raise ValueError(
                f"draft_depth: {draft_depth} levels were asked for, but the head has {config.max_depth} heads, one a "
                f"level; use at most {config.max_depth}"
            )

    def _check_recording(self) -> None:
        """Refuse to record code that is not Eyas's own: it may look at the device in the middle of a step."""
        if not self.captures_graphs:
            return
        foreign = None
        if isinstance(self.head_config(), MtpConfig):
            foreign = "the layer of an MTP head"
        if not self.target_config().is_native:
            foreign = self.target_config().architecture
        if foreign is not None:
            raise ValueError(
                f"cuda_graphs: {foreign} runs through transformers, whose code cannot be recorded; use --eager"
            )

    def check_device(self) -> None:
        """Refuse a device that this process does not see."""
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: cuda was asked for, but torch sees no CUDA device; use cpu")


def load_target_model(spec: EngineSpec, parallel: TensorParallel | None = None) -> Decoder:
    """Load the weights of one target rank, and check that they compute what they should."""
    spec.check_device()
    model = load_target_decoder(Path(spec.target_folder), spec.torch_dtype, torch.device(spec.device), parallel)
    check_target(model)
    return model


def new_target_runner(spec: EngineSpec, model: Decoder) -> TargetRunner:
    """Allocate the pool of a loaded target rank, and all else it needs for steps."""
    return TargetRunner(model, spec.layout, spec.capture(), spec.target_backends())


def load_target(spec: EngineSpec, parallel: TensorParallel | None = None) -> TargetRunner:
    """Load one target rank, of an engine whose pages are known."""
    return new_target_runner(spec, load_target_model(spec, parallel))


def load_draft_head(spec: EngineSpec) -> DraftHead | None:
    """Load the head, or None for an engine without one."""
    if spec.head_folder is None:
        return None
    spec.check_device()
    target = TargetWeights(Path(spec.target_folder), spec.target_config())
    head = load_head(Path(spec.head_folder), target, spec.torch_dtype, torch.device(spec.device), spec.head_options)
    pack_linears(head)
    if not spec.acceptance_prior:
        head.acceptance_prior = None
    return head


def probe(spec: EngineSpec, runner: TargetRunner, prompts: list[list[int]], is_first_rank: bool) -> ProbeReport | None:
    """Measure what the head of `spec` reads; see `probe_head`. Every rank calls it, the first one loads the head."""
    head = load_draft_head(spec) if is_first_rank else None
    return probe_head(runner, head, spec.plausible_captures(), prompts)


def new_draft_runner(spec: EngineSpec, head: DraftHead) -> DraftRunner:
    """Allocate the pool of a loaded head, and all else it needs for steps."""
    choices = None if spec.tree_choices is None else TreeChoices(spec.tree_choices)
    return DraftRunner(head, spec.layout, spec.shares_noise, choices, spec.head_backends())


def load_drafter(spec: EngineSpec) -> DraftRunner | None:
    """Load the drafter, of an engine whose pages are known; None for an engine without a head."""
    head = load_draft_head(spec)
    return None if head is None else new_draft_runner(spec, head)


def record_steps(spec: EngineSpec, runner: TargetRunner | DraftRunner, on_progress: Progress = no_progress) -> None:
    """Record the runner's steps where the engine replays them; call it once the runner's capture is settled.

    Raises:
        ValueError: if they do not fit into the memory that is left.
    """
    limits = spec.graph_limits()
    if limits is None:
        return
    if isinstance(runner, TargetRunner):
        rows = limits.max_batch * limits.max_nodes
        needed = step_bytes(spec.target_config(), rows, spec.torch_dtype, spec.tensor_parallel_size)
        check_step_memory(needed, runner.device)
    try:
        runner.record_graphs(limits, recorder_for(runner.device), on_progress)
    except torch.cuda.OutOfMemoryError:
        raise ValueError(
            "gpu_memory_fraction: recording the largest step ran out of memory; lower it, max_batch_size or node_budget"
        ) from None
