"""The `ray up` configs against the checks Ray itself makes before it starts a machine."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from eyas.cluster.placement import engine_bundles

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("cluster/ray-up-*.yaml"))
AWS = ROOT / "cluster" / "ray-up-aws-gpu.yaml"
LOCAL = ROOT / "cluster" / "ray-up-local.yaml"

Config = dict[str, Any]


def load(path: Path) -> Config:
    config: Config = yaml.safe_load(path.read_text())
    return config


def prepared(config: Config) -> Config:
    """The config as `ray up` uses it: Ray's defaults filled in, validated against Ray's own schema."""
    filled: Config = prepare_config(copy.deepcopy(config))
    validate_config(filled)
    return filled


def start_commands(config: Config) -> list[str]:
    return [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]


def test_both_configs_are_found() -> None:
    assert CONFIGS == [AWS, LOCAL]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
class TestEveryConfig:
    def test_ray_accepts_it(self, path: Path) -> None:
        prepared(load(path))

    def test_nothing_runs_that_the_file_does_not_state(self, path: Path) -> None:
        """Ray's defaults for a provider may hold commands, such as the installation of a nightly Ray."""
        config, filled = load(path), prepared(load(path))
        assert filled["setup_commands"] == config["setup_commands"]
        assert filled["head_setup_commands"] == config["setup_commands"] + config.get("head_setup_commands", [])
        assert filled["worker_setup_commands"] == config["setup_commands"]
        assert start_commands(filled) == start_commands(config)

    def test_every_node_demands_the_token(self, path: Path) -> None:
        config = load(path)
        assert len(start_commands(config)) == 2
        assert all("RAY_AUTH_MODE=token" in command for command in start_commands(config))
        assert "~/.ray/auth_token" in config["file_mounts"].values()

    def test_the_head_takes_no_replicas(self, path: Path) -> None:
        (command,) = (command for command in load(path)["head_start_ray_commands"] if "ray start" in command)
        assert "--head" in command
        assert "--num-cpus=0" in command

    def test_start_options_exist(self, path: Path) -> None:
        """A misspelt option of `ray start` shows only when the machine is up."""
        from ray.scripts.scripts import start

        known = {option for parameter in start.params for option in parameter.opts}
        for command in start_commands(load(path)):
            assert set(re.findall(r"--[a-z-]+", command.partition("ray start")[2])) <= known

    @pytest.mark.parametrize("typo", ["setup_command", "idle_timeout", "head_node_types"])
    def test_a_misspelt_key_is_refused(self, path: Path, typo: str) -> None:
        with pytest.raises(ValidationError, match=typo):
            prepared(load(path) | {typo: []})


def test_aws_misspelt_docker_option_is_refused() -> None:
    config = load(AWS)
    config["docker"]["worker_run_option"] = ["--gpus all"]
    with pytest.raises(ValidationError, match="worker_run_option"):
        prepared(config)


def test_aws_gpu_node_holds_one_engine() -> None:
    node = load(AWS)["available_node_types"]["gpu"]
    (bundle,) = engine_bundles(tensor_parallel_size=1, gpus_per_rank=1, drafter_gpu_fraction=0.1, cpus_per_worker=1)
    assert all(amount <= node["resources"][resource] for resource, amount in bundle.items())


def test_aws_containers_have_gpus_and_shared_memory() -> None:
    docker = load(AWS)["docker"]
    assert "--gpus all" in docker["worker_run_options"]
    shared_memory_gb = next(
        int(match[1]) for option in docker["run_options"] if (match := re.match(r"--shm-size=(\d+)g", option))
    )
    for command in start_commands(load(AWS)):
        object_store_bytes = re.search(r"--object-store-memory=(\d+)", command)
        assert object_store_bytes
        assert int(object_store_bytes[1]) < shared_memory_gb * 2**30, "no room for the channels of the engines"


def test_local_installs_what_is_copied() -> None:
    config = load(LOCAL)
    copied = set(config["file_mounts"])
    used = {path for command in config["setup_commands"] for path in re.findall(r"~/eyas/(?!venv)[a-z.]+", command)}
    assert used
    assert used <= copied


def test_local_machines_all_join() -> None:
    config = load(LOCAL)
    assert prepared(config)["max_workers"] == len(config["provider"]["worker_ips"])
