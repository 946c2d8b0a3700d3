"""Trains a tiny head with two Ray Train workers on a local cluster of its own; see test_torch_workers.py.

Arguments: target folder, corpus folder, work folder. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from eyas.deployments.rank_options import check_ranks, run_ranks
from eyas.deployments.train_job import TrainJob
from eyas.training.training_config import TrainingConfig

CONFIG = TrainingConfig(
    kind="eagle3",
    num_steps=3,
    draft_vocab_size=32,
    loss_vocab_size=24,
    num_sampled=8,
    tokens_per_batch=20,
    dtype="float32",
)


def main() -> None:
    target, corpus, work = sys.argv[1:]
    args = Namespace(
        device="cpu", ranks=1, ray_workers=2, gpus_per_worker=0, ray_address=None, threads=2, work_dir=Path(work)
    )
    check_ranks(args)
    job = TrainJob(
        CONFIG,
        target,
        (Path(corpus),),
        Path(work),
        Path(work, "head"),
        2,
        Namespace(states="recorded", skip_calibration=True),
    )
    print(json.dumps(asdict(run_ranks(args, job.run))))


if __name__ == "__main__":
    main()
