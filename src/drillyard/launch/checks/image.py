"""Rules of the container image: what the network stack and the GPUs need to be in it, as far as its tag tells.

A tag that tells nothing is no mistake: the rule is then a warning that says how to look.
"""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.workload import WorkloadRunConfig
from drillyard.hardware.facts import Fact
from drillyard.hardware.image_tags import image_contents, version_at_least
from drillyard.hardware.machines import Machine
from drillyard.launch.checks.request import Config, LaunchFinding, Rule, error, warning
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.network import lacks_stack, stack_of

_CUDA_ADVICE = "python3 -c 'import torch; print(torch.version.cuda)'"


def _glibc(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """The libraries of a stack that are mounted into the image need its C library to be new enough."""
    cluster = request.cluster
    if cluster.nodes == 1 or (machine is not None and lacks_stack(cluster, machine)):
        return
    stack = stack_of(cluster, machine, request.facts)
    if stack is not None and "glibc" in stack.requires:
        floor: Fact[str] = stack.fact("requires.glibc")
        yield from _floor(request, "glibc", floor, f"network stack {stack.name}", "ldd --version")


def _cuda(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Programs of an older CUDA have no code for a newer GPU."""
    if machine is None:
        return
    accelerator = request.facts.accelerator_of(machine)
    if accelerator.min_cuda is not None:
        yield from _floor(request, "cuda", accelerator.fact("min_cuda"), accelerator.title, _CUDA_ADVICE)


RULES: tuple[Rule, ...] = (_glibc, _cuda)


def _floor(request: LaunchRequest, part: str, floor: Fact[str], needed_by: str, advice: str) -> Iterator[LaunchFinding]:
    image, config, key = _image(request)
    if image is None or any(image in stack.images.values() for stack in request.facts.network_stacks.values()):
        # A network stack's own images are made for its machines.
        return
    told = image_contents(image)
    version = None if told is None else getattr(told, part)
    title = {"glibc": "glibc", "cuda": "CUDA"}[part]
    rule = f"{needed_by} needs {title} >= {floor.value} ({floor.source})"
    if told is None or version is None:
        yield warning(
            config, key, f"{rule}, and the tag of {image} does not tell; look with: {advice}, run in the image"
        )
    elif not version_at_least(version, floor.value):
        yield error(config, key, f"{image} has {title} {version} ({told.source.text}); {rule}: take a later tag")


def _image(request: LaunchRequest) -> tuple[str | None, Config, str]:
    run = request.run
    if isinstance(run, WorkloadRunConfig) and run.workload.image is not None:
        return run.workload.image, "run", "workload.image"
    return request.cluster.image, "cluster", "image"
