"""Checks RayService manifests and Serve configs without a cluster.

    python -m eyas.k8s.manifest k8s/rayservice.yaml k8s/serve.yaml

A RayService must fit KubeRay's CRD, the rules its operator enforces after admission, and what Eyas itself needs to
serve and to stop without cutting answers off. CEL rules of the CRD are not evaluated.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from packaging.version import InvalidVersion, Version

from eyas.k8s.crd_schema import SCHEMA_PATH
from eyas.k8s.serve_config import serve_config_problems

Manifest = dict[str, Any]

# The operator appends 6 characters to name the cluster, and cluster names have at most 53.
MAX_NAME_CHARS = 47
DNS_1035_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
FIRST_RAY_WITH_TOKENS = Version("2.52.0")
FIRST_RAY_WITH_AUTOSCALER_V2 = Version("2.47.0")
RESOURCE_START_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
GPU = "nvidia.com/gpu"
# Ray Serve's and KubeRay's defaults.
GRACEFUL_SHUTDOWN_TIMEOUT_S = 20
TERMINATION_GRACE_PERIOD_S = 30
CLUSTER_DELETION_DELAY_S = 60


def problems_of(document: Manifest) -> list[str]:
    """What is wrong with one parsed YAML document, of either kind."""
    if "apiVersion" in document or "kind" in document:
        return rayservice_problems(document)
    return serve_config_problems(document)


def rayservice_problems(manifest: Manifest) -> list[str]:
    """The problems of the first check that finds any: each relies on what the ones before it established."""
    for check in (crd_problems, operator_problems, embedded_config_problems, service_problems):
        problems = list(check(manifest))
        if problems:
            return problems
    return []


def crd_problems(manifest: Manifest) -> Iterator[str]:
    validator = Draft202012Validator(json.loads(SCHEMA_PATH.read_text()))
    for error in sorted(validator.iter_errors(manifest), key=lambda error: error.json_path):
        yield f"{error.json_path.removeprefix('$.')}: {error.message}"


def operator_problems(manifest: Manifest) -> Iterator[str]:
    """Rules of KubeRay's operator: a manifest that breaks one is admitted by the API server and then never runs."""
    name = manifest["metadata"].get("name", "")
    if not DNS_1035_LABEL.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        yield f"metadata.name: {name!r} is not a DNS-1035 label of at most {MAX_NAME_CHARS} characters"

    cluster = manifest["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headGroupSpec.headService: a fixed name clashes while two clusters run during an upgrade"

    for place, group in groups(manifest):
        start_params = group.get("rayStartParams", {})
        if not group["template"].get("spec", {}).get("containers"):
            yield f"{place}: no container"
        if group.get("resources") and any(param in start_params for param in RESOURCE_START_PARAMS):
            yield f"{place}: resources are set both in rayStartParams and in resources"
        if "labels" in start_params:
            yield f"{place}.rayStartParams.labels: belongs in the group's labels field"
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if not low <= group.get("replicas", low) <= high:
            yield f"{place}: replicas must lie between minReplicas and maxReplicas"

    yield from _autoscaler_problems(cluster)
    yield from _authentication_problems(cluster)
    yield from _redis_problems(cluster)

    upgrade = manifest["spec"].get("upgradeStrategy", {})
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        if not cluster.get("enableInTreeAutoscaling"):
            yield "upgradeStrategy: an incremental upgrade needs enableInTreeAutoscaling"
        if not upgrade.get("clusterUpgradeOptions"):
            yield "upgradeStrategy: an incremental upgrade needs clusterUpgradeOptions"


def embedded_config_problems(manifest: Manifest) -> Iterator[str]:
    """`serveConfigV2` is YAML inside a string, which neither the API server nor the operator looks into."""
    try:
        config = serve_config(manifest)
    except yaml.YAMLError as error:
        yield f"spec.serveConfigV2: {error}"
        return
    for problem in serve_config_problems(config):
        yield f"spec.serveConfigV2.{problem}"


def service_problems(manifest: Manifest) -> Iterator[str]:
    """What Eyas asks of a RayService beyond the operator's rules."""
    spec = manifest["spec"]
    if spec["rayClusterConfig"].get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode: without token anyone who reaches the dashboard port can run code on the cluster"
    head = spec["rayClusterConfig"]["headGroupSpec"]
    if head.get("rayStartParams", {}).get("num-cpus") != "0":
        yield 'headGroupSpec.rayStartParams: num-cpus must be "0", or replicas may run on the head'
    for container in containers(head):
        if GPU in container.get("resources", {}).get("limits", {}):
            yield f"headGroupSpec: container {container['name']} holds a GPU that no replica can use"

    if not any(
        port.get("name") == "serve"
        for _, group in groups(manifest)
        for container in containers(group)
        for port in container.get("ports", [])
    ):
        yield "rayClusterConfig: no container port is named serve, so the Serve service has no target"

    for place, group in groups(manifest):
        if "plasma-directory" in group.get("rayStartParams", {}):
            yield f"{place}.rayStartParams.plasma-directory: keeps the operator from mounting memory at /dev/shm"
        ray_container = containers(group)[0]
        if "memory" not in ray_container.get("resources", {}).get("limits", {}):
            yield f"{place}: a memory limit is missing, which is also the size of /dev/shm"
        image_name, _, tag = ray_container.get("image", "").rpartition("/")[2].partition(":")
        if not image_name or tag in ("", "latest"):
            yield f"{place}: the image needs a fixed tag, for Ray and Python must be the same on every node"
    for place, group in groups(manifest)[1:]:
        if "readinessProbe" in containers(group)[0]:
            yield f"{place}: a readinessProbe of your own replaces the operator's, which waits for the Serve proxy"

    drain_s = max(
        (
            deployment.get("graceful_shutdown_timeout_s", GRACEFUL_SHUTDOWN_TIMEOUT_S)
            for application in serve_config(manifest)["applications"]
            for deployment in application.get("deployments", [])
        ),
        default=GRACEFUL_SHUTDOWN_TIMEOUT_S,
    )
    for place, group in groups(manifest)[1:]:
        if group["template"]["spec"].get("terminationGracePeriodSeconds", TERMINATION_GRACE_PERIOD_S) <= drain_s:
            yield f"{place}: terminationGracePeriodSeconds must exceed graceful_shutdown_timeout_s ({drain_s})"
    if spec.get("rayClusterDeletionDelaySeconds", CLUSTER_DELETION_DELAY_S) < drain_s:
        yield f"rayClusterDeletionDelaySeconds: must be at least graceful_shutdown_timeout_s ({drain_s})"


def serve_config(manifest: Manifest) -> Any:
    return yaml.safe_load(manifest["spec"].get("serveConfigV2", ""))


def groups(manifest: Manifest) -> list[tuple[str, Manifest]]:
    """The head group, then the worker groups, each with its place for messages."""
    cluster = manifest["spec"]["rayClusterConfig"]
    workers = [(f"workerGroupSpecs.{group['groupName']}", group) for group in cluster.get("workerGroupSpecs", [])]
    return [("headGroupSpec", cluster["headGroupSpec"]), *workers]


def containers(group: Manifest) -> list[Manifest]:
    """The first one runs Ray."""
    pod_containers: list[Manifest] = group["template"].get("spec", {}).get("containers", [])
    return pod_containers


def _head_environment(cluster: Manifest) -> dict[str, str]:
    first, *_ = containers(cluster["headGroupSpec"]) or [{}]
    return {variable["name"]: variable.get("value", "") for variable in first.get("env", [])}


def _ray_version(cluster: Manifest) -> Version | None:
    try:
        return Version(cluster.get("rayVersion", ""))
    except InvalidVersion:
        return None


def _authentication_problems(cluster: Manifest) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("mode") != "token":
        return
    version = _ray_version(cluster)
    if version is None or version < FIRST_RAY_WITH_TOKENS:
        yield f"rayVersion: token authentication needs {FIRST_RAY_WITH_TOKENS} or later"
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth: not supported for a RayService"


def _autoscaler_problems(cluster: Manifest) -> Iterator[str]:
    environment_version = _head_environment(cluster).get("RAY_enable_autoscaler_v2")
    option_version = cluster.get("autoscalerOptions", {}).get("version")
    if not cluster.get("enableInTreeAutoscaling"):
        if environment_version in ("1", "true"):
            yield "headGroupSpec: RAY_enable_autoscaler_v2 needs enableInTreeAutoscaling"
        return
    if environment_version is not None and option_version is not None:
        yield "autoscalerOptions.version: also set as RAY_enable_autoscaler_v2 on the head"
    ray_version = _ray_version(cluster)
    default_version = "v1" if ray_version is not None and ray_version < FIRST_RAY_WITH_AUTOSCALER_V2 else "v2"
    if (option_version or default_version) == "v2":
        for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
            if group["template"].get("spec", {}).get("restartPolicy", "Never") != "Never":
                yield f"{group.get('groupName', 'headGroupSpec')}: autoscaler v2 needs restartPolicy Never"


def _redis_problems(cluster: Manifest) -> Iterator[str]:
    start_params = cluster["headGroupSpec"].get("rayStartParams", {})
    environment = _head_environment(cluster)
    if "redis-username" in start_params or "REDIS_USERNAME" in environment:
        yield "headGroupSpec: the Redis user belongs in gcsFaultToleranceOptions.redisUsername"
    if "gcsFaultToleranceOptions" not in cluster:
        if "RAY_REDIS_ADDRESS" in environment:
            yield "headGroupSpec: RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"
        return
    if "redis-password" in start_params or "REDIS_PASSWORD" in environment:
        yield "headGroupSpec: the Redis password belongs in gcsFaultToleranceOptions.redisPassword"
    if "RAY_REDIS_ADDRESS" in environment:
        yield "headGroupSpec: the Redis address belongs in gcsFaultToleranceOptions.redisAddress"


def main() -> None:
    parser = argparse.ArgumentParser(description="Check RayService manifests and Serve config files.")
    parser.add_argument("files", nargs="+", type=Path)
    num_problems = 0
    for path in parser.parse_args().files:
        for document in yaml.safe_load_all(path.read_text()):
            for problem in problems_of(document):
                num_problems += 1
                print(f"{path}: {problem}")
    print(f"{num_problems} problems")
    sys.exit(1 if num_problems else 0)


if __name__ == "__main__":
    main()
