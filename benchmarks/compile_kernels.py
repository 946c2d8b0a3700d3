"""Every Triton kernel compiled for sm_80, sm_90 and sm_100, no GPU needed: registers, spills, shared memory.

    python benchmarks/compile_kernels.py [--processes 2] [--output benchmarks/results/triton-aot.json]

The specialisations are the `AOT` lists of the `eyas.kernels.triton_*` modules, those that the launchers ask for. Prints
a table, writes the report, and exits 1 naming each case that does not compile, spills or asks for more shared memory
than a block can have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eyas.kernels import aot
from eyas.kernels.aot import CompiledReport, compile_case

CAPABILITIES = (80, 90, 100)
REPORT = Path(__file__).with_name("results") / "triton-aot.json"


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """One case on one target; the case is named by its place in its module, since kernels do not travel by pickle."""

    module: str
    index: int
    name: str
    capability: int

    def __str__(self) -> str:
        return f"{self.name} sm_{self.capability}"


def kernel_modules() -> list[str]:
    """Names of the modules that hold Triton kernels."""
    return sorted(f"eyas.kernels.{file.stem}" for file in Path(aot.__file__).parent.glob("triton_*.py"))


def list_jobs(modules: list[str]) -> list[Job]:
    """All cases of `modules` on all targets.

    Raises:
        ValueError: two cases of one kernel carry the same label.
    """
    jobs, modules_by_name = [], dict[str, str]()
    for module in modules:
        for index, case in enumerate(getattr(import_module(module), "AOT", [])):
            if case.name in modules_by_name:
                raise ValueError(f"{case.name} stands twice, in {modules_by_name[case.name]} and {module}")
            modules_by_name[case.name] = module
            jobs += [Job(module, index, case.name, capability) for capability in CAPABILITIES]
    return jobs


def use_cache(folder: str) -> None:
    """Keep what Triton writes while it compiles out of the user's own cache."""
    os.environ["TRITON_CACHE_DIR"] = folder


def run_job(job: Job) -> CompiledReport:
    """Compile one case; what goes wrong is raised as a RuntimeError, since Triton's own errors do not travel back."""
    try:
        return compile_case(import_module(job.module).AOT[job.index], job.capability)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def compile_all(jobs: list[Job], processes: int) -> tuple[dict[Job, CompiledReport], dict[Job, str]]:
    """Reports of the jobs that compiled, and the problems of those that did not or must not be launched."""
    reports: dict[Job, CompiledReport] = {}
    problems: dict[Job, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(processes, get_context("spawn"), use_cache, (cache,)) as pool,
    ):
        task = progress.add_task("compiling", total=len(jobs))
        futures = {pool.submit(run_job, job): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            try:
                reports[job] = future.result()
            except RuntimeError as error:
                problems[job] = str(error)
            else:
                if reports[job].problem:
                    problems[job] = str(reports[job].problem)
            progress.advance(task)
    return reports, problems


def report_json(reports: dict[Job, CompiledReport]) -> str:
    """The report as it is stored: sorted, one line for each case and target, without anything of this machine."""
    lines = [json.dumps({"module": job.module.rpartition(".")[2]} | asdict(reports[job])) for job in sorted(reports)]
    header = f'{{"triton": {json.dumps(triton.__version__)}, "capabilities": {list(CAPABILITIES)}, "cases": [\n'
    return header + ",\n".join(lines) + "\n]}\n"


def table(reports: dict[Job, CompiledReport]) -> Table:
    rows: dict[tuple[str, int], dict[int, CompiledReport]] = {}
    for job in sorted(reports):
        rows.setdefault((job.module, job.index), {})[job.capability] = reports[job]
    result = Table(title=f"Triton {triton.__version__}: sm_80 / sm_90 / sm_100")
    for column in ("kernel", "case"):
        result.add_column(column)
    for column in ("registers", "shared bytes", "spilled bytes"):
        result.add_column(column, justify="right")
    for by_capability in rows.values():
        some = next(iter(by_capability.values()))
        result.add_row(
            some.kernel,
            some.label,
            *(
                " / ".join(str(getattr(by_capability[c], field)) if c in by_capability else "-" for c in CAPABILITIES)
                for field in ("registers", "shared_bytes", "spill_bytes")
            ),
        )
    return result


def main(arguments: list[str] | None = None, modules: list[str] | None = None) -> int:
    """Compile what `modules` list, by default all kernels; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=REPORT)
    args = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    jobs = list_jobs(kernel_modules() if modules is None else modules)
    reports, problems = compile_all(jobs, args.processes)
    Console(width=140).print(table(reports))
    args.output.write_text(report_json(reports))
    for job, problem in sorted(problems.items()):
        print(f"{job}: {problem}", file=sys.stderr)
    print(f"{len(reports)} of {len(jobs)} compiled, {len(problems)} problems; report in {args.output}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
