"""Settings of one engine: the arguments of the app builder, of `eyas serve`, and of the manifests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.cluster.placement import engine_bundles
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import Scheduler, TreeShape
from eyas.kernels.published_trees import named_tree
from eyas.models.catalog import DEFAULT_TARGET, resolve_head, resolve_target
from eyas.models.head_files import HeadOptions
from eyas.workers.loading import EngineSpec, StepLimits

# Draft nodes stand past the end of the text, where the model's RoPE table must still reach.
_MAX_DRAFT_DEPTH = 64
_CPU_PAGES = 1024
_MIN_REQUEST_TOKENS = 2  # one of the prompt, one of the answer


class EngineSettings(BaseModel):
    """Unknown keys are refused, so that a misspelt option cannot be ignored silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(DEFAULT_TARGET, description="the default model's name, a Hugging Face folder, or a .gguf file")
    head: str | None = Field(
        None, description="draft head: folder or file; for MTP the model's own folder; by default the shipped one"
    )
    served_model_name: str | None = Field(None, description="id in the API; by default the model's name")
    speculate: bool = Field(True, description="false decodes one token per step, without a drafter")
    node_budget: int = Field(8, ge=1, description="nodes verified per request and step, root included")
    draft_depth: int = Field(3, ge=1, le=_MAX_DRAFT_DEPTH, description="levels of the draft tree below its root")
    width: int = Field(4, ge=1, description="candidates kept per level")
    tree: str = Field(
        "dynamic", description="dynamic, cartesian:4,2,2, medusa-63, or a JSON file of rank paths; sets the shape"
    )
    aux_layers: tuple[int, ...] | None = Field(
        None, description="target states the head reads, as residual-stream indices, against what its files say"
    )
    token_map: str | None = Field(None, description="file of the target ids a head may propose (FR-Spec)")
    num_candidates: int | None = Field(
        None, ge=1, description="rows a low-rank candidate projection retrieves for exact scoring"
    )
    probe: bool = Field(True, description="measure at start which target states the head was trained on")
    tensor_parallel_size: int = Field(1, ge=1, description="target ranks")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    attention_backend: Literal["auto", "reference", "triton", "flashinfer", "flashinfer-cascade"] = Field(
        "auto", description="what computes attention; auto takes the first that fits, see docs/backends.md"
    )
    kernel_backend: Literal["auto", "reference", "triton"] = Field(
        "auto", description="what computes tree operations, sampling and the work between matrix products"
    )
    cuda_graphs: bool = Field(True, description="capture steps in CUDA graphs on cuda; false launches every kernel")
    num_pages: int | None = Field(
        None, ge=1, description="KV pages of every pool; by default what the GPUs' memory holds, on cpu 1024"
    )
    gpu_memory_fraction: float = Field(
        0.9, gt=0, lt=1, description="share of a GPU for weights and KV pages; the rest is for activations and graphs"
    )
    page_size: int = Field(16, ge=1, description="token positions per page")
    max_batch_size: int = Field(32, ge=1, description="requests decoded together")
    max_queue_size: int = Field(256, ge=1, description="requests waiting before new ones get 429")
    max_prefill_tokens: int = Field(512, ge=1, description="prompt tokens processed per step")
    threads_per_worker: int = Field(2, ge=1, description="CPU threads of a target rank, and CPUs per worker")
    shares_noise: bool = Field(True, description="draft with the target's noise; false is plain top-k, to compare")
    acceptance_prior: bool = Field(
        True, description="grow trees by the head's calibrated scores, if it has a prior; false takes its raw ones"
    )
    drafter_threads: int = Field(1, ge=1, description="CPU threads of the drafter's process")
    drafter_gpu_fraction: float = Field(0.1, gt=0, lt=1, description="share of rank 0's GPU kept for the drafter")

    @property
    def model_id(self) -> str:
        return self.served_model_name or self.model

    @property
    def gpus_per_rank(self) -> float:
        return 1.0 if self.device == "cuda" else 0.0

    def tree_shape(self) -> TreeShape:
        """Raises `ValueError`, naming the field, for a shape that cannot be grown."""
        if not self.speculate:
            return TreeShape()
        if self.tree != "dynamic":
            clash = sorted(self.model_fields_set & {"node_budget", "draft_depth", "width"})
            if clash:
                raise ValueError(f"tree: the fixed shape {self.tree} sets {clash[0]}; give one or the other")
            return TreeShape.fixed(named_tree(self.tree))
        if self.node_budget == 1:
            return TreeShape()
        return TreeShape(self.node_budget, self.draft_depth, self.width)

    def max_committed_rows(self) -> int:
        """Most rows one step can commit, which sizes the exchange ring."""
        return self.max_prefill_tokens + self.max_batch_size * (self.tree_shape().draft_depth + 1)

    def engine_spec(self) -> EngineSpec:
        """What the workers load; resolves names to folders and refuses what cannot work.

        Raises:
            ValueError: naming the field and the remedy.
        """
        shape = self.tree_shape()
        is_speculating = shape.node_budget > 1
        target = resolve_target(self.model)
        head = resolve_head(self.head, self.model) if is_speculating else None
        if is_speculating and head is None:
            raise ValueError(f"head: no head is shipped for {self.model}; pass --head FOLDER, or --no-speculation")
        spec = EngineSpec(
            target_folder=str(target),
            head_folder=None if head is None else str(head),
            dtype=self.dtype,
            device=self.device,
            num_pages=_CPU_PAGES if self.num_pages is None and self.device == "cpu" else self.num_pages,
            page_size=self.page_size,
            num_threads=self.threads_per_worker,
            drafter_num_threads=self.drafter_threads,
            tensor_parallel_size=self.tensor_parallel_size,
            shares_noise=self.shares_noise,
            acceptance_prior=self.acceptance_prior,
            head_options=HeadOptions(self.aux_layers, self.token_map, self.num_candidates),
            tree_choices=None if shape.choices is None else shape.choices.paths,
            gpu_memory_fraction=self.gpu_memory_fraction,
            attention_backend=self.attention_backend,
            kernel_backend=self.kernel_backend,
            cuda_graphs=self.cuda_graphs,
            step_limits=StepLimits(
                max_batch=self.max_batch_size,
                max_nodes=shape.node_budget,
                draft_depth=shape.draft_depth,
                width=shape.width,
                num_extra_slots=shape.num_extra_slots,
            ),
        )
        spec.validate(shape.draft_depth, shape.width if is_speculating and shape.choices is None else 0)
        if spec.num_pages is not None:
            self.new_scheduler(spec, spec.num_pages)
        return spec

    def min_pages(self) -> int:
        """Pages without which no request could ever run."""
        return -(-(_MIN_REQUEST_TOKENS + self.tree_shape().num_extra_slots) // self.page_size)

    def new_scheduler(self, spec: EngineSpec, num_pages: int) -> Scheduler:
        """Raises `ValueError`, naming the field, if no request could ever run."""
        return Scheduler(
            PageAllocator(num_pages, self.page_size),
            self.tree_shape(),
            self.max_batch_size,
            self.max_prefill_tokens,
            spec.target_config().max_positions,
        )

    def placement_bundles(self) -> list[dict[str, float]]:
        return engine_bundles(
            self.tensor_parallel_size, self.gpus_per_rank, self.drafter_gpu_fraction, float(self.threads_per_worker)
        )
