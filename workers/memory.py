"""How many KV pages an engine's GPUs can hold, measured once all its workers have loaded their weights.

On every GPU, with F bytes free, T bytes in all, the fraction f that Eyas may fill before it serves, and p_w the bytes
of one page in the pool of worker w on that GPU:

    pages = (F - (1 - f) * T) / sum of p_w - 1

where the one is the scratch page that every pool has beside those it hands out.
The engine gets the least over its GPUs, because all pools share page numbers. What is left, (1 - f) * T, is for
activations and CUDA graphs. It knows nothing of requests or of Ray.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from eyas.models.decoder import Decoder
from eyas.models.head import DraftHead
from eyas.workers.cuda_ipc import gpu_uuid

_SCRATCH_PAGES = 1


class MemoryReport(msgspec.Struct, frozen=True):
    """What one worker found.

    Args:
        gpu: UUID of its GPU; workers that report the same one share it.
        free_bytes, total_bytes: of the GPU, whoever uses it.
        page_bytes: of one KV page in this worker's pool.
    """

    gpu: str
    free_bytes: int
    total_bytes: int
    page_bytes: int


def release_cached(device: torch.device) -> None:
    """Give back device memory that this process holds but does not use, such as copies made while loading."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def measure(device: torch.device, page_bytes: int) -> MemoryReport | None:
    """Report this worker's GPU; None on a CPU, where the pool is not measured."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryReport(gpu_uuid(device), free_bytes, total_bytes, page_bytes)


def target_page_bytes(model: Decoder, page_size: int) -> int:
    """Bytes of one page in a target rank's pool."""
    config = model.config
    width = config.head_dim + config.value_head_dim
    kv_heads = config.num_kv_heads // model.parallel.size
    return page_size * config.num_layers * kv_heads * width * model.dtype.itemsize


def head_page_bytes(head: DraftHead, page_size: int) -> int:
    """Bytes of one page in the drafter's pool; 0 for a head without one."""
    cache = head.cache
    if cache is None:
        return 0
    return (
        page_size
        * cache.num_layers
        * cache.num_kv_heads
        * (cache.head_dim + cache.value_head_dim)
        * (head.dtype.itemsize)
    )


def agree_num_pages(
    asked: int | None, reports: Sequence[MemoryReport | None], gpu_memory_fraction: float, min_pages: int
) -> int:
    """Pages of every pool of the engine.

    Args:
        asked: the user's own number; None takes what fits.
        reports: of all workers, target ranks and drafter; None from those without a GPU.
        gpu_memory_fraction: share of a GPU that weights, rings and pools may fill.
        min_pages: what a single request needs.

    Raises:
        ValueError: naming the setting, the bytes needed and the bytes found, if a GPU cannot hold them.
    """
    shared: dict[str, list[MemoryReport]] = defaultdict(list)
    for report in reports:
        if report is not None:
            shared[report.gpu].append(report)
    if not shared and asked is None:
        raise ValueError("num_pages: must be given where there is no GPU memory to measure")
    field, wanted = ("gpu_memory_fraction", min_pages) if asked is None else ("num_pages", asked)
    wanted += _SCRATCH_PAGES
    affordable = [asked] if asked is not None else []
    for gpu, workers in shared.items():
        page_bytes = sum(worker.page_bytes for worker in workers)
        free_bytes = min(worker.free_bytes for worker in workers)
        reserve_bytes = round((1 - gpu_memory_fraction) * workers[0].total_bytes)
        found = max(free_bytes - reserve_bytes, 0)
        if wanted * page_bytes > found:
            purpose = "one request needs at least" if asked is None else f"num_pages={asked} needs"
            raise ValueError(
                f"{field}: {purpose} {_mib(wanted * page_bytes)} for KV pages on GPU {gpu}, which has {_mib(found)} "
                f"left for them: {_mib(free_bytes)} are free after loading the weights, and gpu_memory_fraction="
                f"{gpu_memory_fraction} keeps {_mib(reserve_bytes)} for activations and CUDA graphs; "
                f"{'use more target ranks' if asked is None else 'lower num_pages'}, raise gpu_memory_fraction, or "
                "free the GPU"
            )
        affordable.append(found // page_bytes - _SCRATCH_PAGES)
    return min(affordable)


def limit_process(device: torch.device, num_pages: int, page_bytes: int, gpu_memory_fraction: float) -> None:
    """Let this process take no more than its weights, its pool and the GPU's whole reserve, never its neighbour's part.

    Call after loading the weights, before allocating the pool.
    """
    if device.type != "cuda":
        return
    total_bytes = torch.cuda.mem_get_info(device)[1]
    own_bytes = torch.cuda.memory_reserved(device) + (num_pages + _SCRATCH_PAGES) * page_bytes
    share = own_bytes / total_bytes + 1 - gpu_memory_fraction
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device.index)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
