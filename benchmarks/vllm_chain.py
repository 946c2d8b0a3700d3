"""Is an EAGLE-3 head accepted as often by vLLM's chain as by ours? The same prompts, model and head in both.

    python benchmarks/vllm_chain.py --vllm-python VENV/bin/python --head HEAD --prompts FILE
        [--target FOLDER] [--depth 5] [--limit 20] [--max-tokens 128] [--dtype float32] [--out results/NAME.json]

vLLM needs an environment of its own; its part runs there, as `vllm_chain.py --in-vllm`, the other through `eyas eval`.
Both count tokens that stay in a text, less the one each prompt's pass gives, per verify step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TOLERANCE = 0.05
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_AOT_COMPILE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip


def run_in_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Answer the prompts with vLLM; counts of its own metrics and of the texts."""
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.target, dtype=args.dtype, max_model_len=1024, max_num_seqs=4, seed=0,
        speculative_config={"method": "eagle3", "model": args.head, "num_speculative_tokens": args.depth},
        disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    lines = Path(args.prompts).read_text().splitlines()[: args.limit]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    outputs = engine.chat(chats, SamplingParams(temperature=0.0, max_tokens=args.max_tokens), use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    num_steps = int(counts["vllm:spec_decode_num_drafts"])
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs) - len(outputs)
    return {"version": vllm.__version__, "num_steps": num_steps, "num_tokens": num_tokens,
            "acceptance_length": num_tokens / num_steps}  # fmt: skip


def run_in_eyas(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same chain by `eyas eval`."""
    report, shape = folder / "eyas.json", f"{args.depth + 1}x{args.depth}x1"
    subprocess.run(
        [sys.executable, "-m", "eyas.deployments.cli", "eval", args.head, "--target", args.target, "--prompts",
         args.prompts, "--shapes", shape, "--limit", str(args.limit), "--max-tokens", str(args.max_tokens), "--dtype",
         args.dtype, "--raw-scores", "--json", str(report)],
        check=True,
    )  # fmt: skip
    figures = json.loads(report.read_text())
    (chain,) = figures["heads"][0]["shapes"]
    kept = {name: chain[name] for name in ("num_steps", "num_tokens", "acceptance_length")}
    return {"version": figures["versions"]["eyas"], **kept, "machine": figures["machine"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--in-vllm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--target", default="SmolLM2-135M-Instruct", help="folder, or a name `eyas` knows")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.in_vllm is not None:
        args.in_vllm.write_text(json.dumps(run_in_vllm(args)))
        return
    if args.vllm_python is None:
        parser.error("--vllm-python: name the interpreter of an environment with vLLM")
    from eyas.models.catalog import resolve_target

    args.target = str(resolve_target(args.target))
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "vllm.json"
        same = [part for option in ("head", "prompts", "target", "depth", "limit", "max-tokens", "dtype")
                for part in (f"--{option}", str(getattr(args, option.replace("-", "_"))))]  # fmt: skip
        command = [str(args.vllm_python), __file__, "--in-vllm", str(answer), *same]
        subprocess.run(command, check=True, env={**_VLLM_ENVIRONMENT, **os.environ}, stdout=sys.stderr)
        result = {
            "head": args.head, "prompts": Path(args.prompts).name, "depth": args.depth, "limit": args.limit,
            "max_tokens": args.max_tokens, "dtype": args.dtype, "vllm": json.loads(answer.read_text()),
            "eyas": run_in_eyas(args, Path(name)),
        }  # fmt: skip
    result["ratio"] = result["eyas"]["acceptance_length"] / result["vllm"]["acceptance_length"]
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if abs(result["ratio"] - 1) > _TOLERANCE:
        sys.exit(f"the acceptance lengths differ by more than {_TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
