"""The commands behind `eyas`: serve, demo, generate, bench, eval, train, inspect, convert, calibrate."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pydantic

from eyas.deployments.api_error import ApiError
from eyas.deployments.calibrate_command import add_calibrate_parser
from eyas.deployments.eval_command import add_eval_parser
from eyas.deployments.head_commands import add_convert_parser
from eyas.deployments.inspect_command import add_inspect_parser
from eyas.deployments.settings import EngineSettings
from eyas.deployments.train_command import add_train_parser
from eyas.kernels.backends import AUTO
from eyas.kernels.capabilities import ATTENTION_BACKENDS, KERNEL_BACKENDS
from eyas.models.catalog import DEFAULT_TARGET

_MAX_DEFAULT_THREADS = 8


def run() -> None:
    """Parse the command line and carry it out; what the user can mend is one line on standard error, status 2."""
    args = _parser().parse_args()
    try:
        status: int = args.run(args)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        sys.exit(_complain(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"))
    except (ValueError, ApiError, OSError) as error:
        sys.exit(_complain(str(error)))
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _complain(message: str) -> int:
    print(f"eyas: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eyas", description="Tree speculative decoding on Ray Serve.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP until interrupted")
    _add_engine_options(serve)
    _add_serve_options(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="serve, answer one prompt over HTTP, print figures, exit")
    _add_engine_options(demo)
    _add_serve_options(demo)
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="answer one prompt without a server")
    _add_engine_options(generate)
    generate.add_argument("--prompt", required=True, help="the user's message")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--max-tokens", type=int, default=128)
    _add_sampling_options(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="WHAT")
    offline = bench.add_parser("offline", help="batches without HTTP: acceptance, milliseconds, tokens/s")
    _add_engine_options(offline)
    offline.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns, messages or prompt")
    offline.add_argument("--max-tokens", type=int, default=128)
    offline.add_argument("--batch", type=int, default=1, help="requests decoded together")
    offline.add_argument("--limit", type=int, default=None, help="use only the first so many prompts")
    offline.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    offline.add_argument("--json", action="store_true", help="print one JSON object (else a table)")
    _add_sampling_options(offline)
    offline.set_defaults(run=_bench_offline)

    add_eval_parser(commands)
    add_train_parser(commands)
    add_inspect_parser(commands)
    add_convert_parser(commands)
    add_calibrate_parser(commands)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    fields = EngineSettings.model_fields

    def option(*names: str, field: str, **keywords: Any) -> None:
        default = fields[field].default
        keywords.setdefault("type", type(default))
        parser.add_argument(
            *names, dest=field, default=argparse.SUPPRESS, help=f"{fields[field].description} [{default}]", **keywords
        )

    parser.add_argument("model", nargs="?", default=DEFAULT_TARGET, help=f"{fields['model'].description} [%(default)s]")
    option("--head", field="head", type=str)
    option("--tp", "--tensor-parallel-size", field="tensor_parallel_size")
    option("--node-budget", field="node_budget")
    option("--draft-depth", field="draft_depth")
    option("--width", field="width")
    option("--tree", field="tree")
    option("--aux-layers", field="aux_layers", type=_integers)
    option("--token-map", field="token_map", type=str)
    option("--num-candidates", field="num_candidates", type=int)
    parser.add_argument("--skip-probe", action="store_true", help="trust the head's files on which states it reads")
    option("--dtype", field="dtype", choices=["bfloat16", "float32"])
    option("--device", field="device", choices=["cpu", "cuda"])
    option("--attention-backend", field="attention_backend", choices=[AUTO, *ATTENTION_BACKENDS])
    option("--kernel-backend", field="kernel_backend", choices=[AUTO, *KERNEL_BACKENDS])
    parser.add_argument("--eager", action="store_true", help="on cuda, launch every kernel by itself, without graphs")
    option("--num-pages", field="num_pages", type=int)
    option("--gpu-memory-fraction", field="gpu_memory_fraction")
    option("--page-size", field="page_size")
    option("--max-prefill-tokens", field="max_prefill_tokens")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of each target rank [cores / tp]")
    parser.add_argument("--no-speculation", action="store_true", help="one token per step, without a drafter")
    parser.add_argument(
        "--candidate-noise", choices=["shared", "none"], default="shared",
        help="rank draft candidates with the target's noise, or plainly, to compare [shared]",
    )  # fmt: skip
    parser.add_argument("--raw-scores", action="store_true", help="grow trees without the head's acceptance prior")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of whole numbers like 2,15,27") from None


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--served-model-name", default=None, help="id in the API [the model's name]")
    parser.add_argument("--max-batch-size", type=int, default=32, help="requests decoded together [%(default)s]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [%(default)s]")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on [%(default)s]")
    parser.add_argument("--ray-address", default=None, help="join this Ray cluster instead of starting Ray here")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)


def settings_of(args: argparse.Namespace, **fixed: Any) -> EngineSettings:
    """Engine settings from parsed options."""
    given = {name: value for name, value in vars(args).items() if name in EngineSettings.model_fields}
    tensor_parallel_size = given.get("tensor_parallel_size", 1)
    threads = (
        args.threads
        if args.threads is not None
        else max(1, min(os.cpu_count() or 1, _MAX_DEFAULT_THREADS) // max(tensor_parallel_size, 1))
    )
    return EngineSettings.model_validate(
        {
            **given,
            "threads_per_worker": threads,
            "speculate": not args.no_speculation,
            "shares_noise": args.candidate_noise == "shared",
            "acceptance_prior": not args.raw_scores,
            "probe": not args.skip_probe,
            "cuda_graphs": not args.eager,
            **fixed,
        }
    )


def _serve(args: argparse.Namespace) -> int:
    from eyas.deployments.serving import serve_forever

    return serve_forever(settings_of(args), args.host, args.port, args.ray_address)


def _demo(args: argparse.Namespace) -> int:
    from eyas.deployments.serving import serve_once

    return serve_once(settings_of(args), args.host, args.port, args.ray_address)


def _generate(args: argparse.Namespace) -> int:
    from eyas.deployments.local_engine import open_engine
    from eyas.deployments.offline import OfflineRequest
    from eyas.workers.sampling import SamplingParams

    with open_engine(settings_of(args, max_batch_size=1)) as (engine, tokenizer):
        if args.raw:
            prompt_ids = tokenizer.encode(args.prompt)
        else:
            prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}])
        sampling = SamplingParams(args.temperature, 1.0, args.seed)
        output = engine.generate([OfflineRequest(prompt_ids, sampling, args.max_tokens, tokenizer.eos_token_ids)])[0]
        text = tokenizer.decode([token for token in output.token_ids if token not in tokenizer.eos_token_ids])
        tokens_per_s = len(output.token_ids) / engine.times.elapsed_s
    if args.json:
        report = {
            "text": text,
            "token_ids": output.token_ids,
            "acceptance_length": output.acceptance_length,
            "steps": output.num_steps,
            "tokens_per_s": tokens_per_s,
        }
        print(json.dumps(report))
    else:
        print(text)
        print(
            f"[{len(output.token_ids)} tokens, {output.acceptance_length:.2f} per verify step, "
            f"{tokens_per_s:.1f} tokens/s]",
            file=sys.stderr,
        )
    return 0


def _bench_offline(args: argparse.Namespace) -> int:
    from eyas.deployments.bench import bench_offline, print_report, print_table

    report = bench_offline(
        settings_of(args, max_batch_size=args.batch),
        args.prompts,
        args.max_tokens,
        args.temperature,
        args.seed,
        args.ignore_eos,
        args.limit,
    )
    (print_report if args.json else print_table)(report)
    return 0
