"""A mesh on Kubernetes (deploy/kubernetes): a Deployment of each role's name, and `kubectl scale`.

Whom kubectl talks to is its own affair (KUBECONFIG, the current context), so this place is never found by
itself: it must be named.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import msgspec

from common.errors import LauncherError
from common.messages import Role
from common.scaling import ScaledRole, ScaledService
from services.connectors.connector import Standing
from services.connectors.programs import output_of
from services.launcher.launch_plan import ROLES, SCALED_ROLES
from services.launcher.probes import READY_TIMEOUT_S
from services.launcher.wishes import CountWish, RoleChange, RoleCount, Wishes, check_phases, wanted_counts

OF_THE_MESH = ("--selector", "app.kubernetes.io/part-of=lamella", "--output", "json")
ROLE_LABEL = "app.kubernetes.io/component"
MAX_PODS = 1000
"""Of one role; a typing error should not fill a cluster."""
REQUEST_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 1.0
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST = -1000
"""Pods cost 0 without a word."""
SETTINGS = "/etc/lamella/lamella.toml"
"""In every pod (deploy/kubernetes/base/every-service.yaml)."""
OVER = ("Succeeded", "Failed")
"""Phases of a pod that runs no more, and only stays to be looked at."""


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class DeploymentSpec(msgspec.Struct, frozen=True):
    replicas: int = 1


class Deployment(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: DeploymentSpec


class PodStatus(msgspec.Struct, frozen=True):
    phase: str = "Unknown"
    conditions: list[Condition] = []


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: PodStatus

    @property
    def role(self) -> str | None:
        return self.metadata.labels.get(ROLE_LABEL)

    @property
    def is_ending(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def is_ready(self) -> bool:
        is_ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return is_ready and not self.is_ending


class Deployments(msgspec.Struct, frozen=True):
    items: list[Deployment]


class Pods(msgspec.Struct, frozen=True):
    items: list[Pod]


@dataclass(frozen=True, slots=True)
class KubernetesConnector:
    """A Connector. ``is_forced``: the last pod that prefills, or decodes, may be ended."""

    namespace: str
    is_forced: bool = False
    ready_timeout_s: float = READY_TIMEOUT_S

    async def apply(self, wishes: Wishes) -> list[RoleChange]:
        """Nothing is taken back where pods do not become ready in time: the cluster goes on trying."""
        replicas = await self._replicas()
        for role in wishes:
            if role not in replicas:
                raise LauncherError(f"there is no Deployment {role} in the namespace {self.namespace}")
        counts = wanted_counts(wishes, replicas, MAX_PODS)
        if not self.is_forced:
            check_phases(_instances(replicas), _instances(replicas | counts))
        before = await self._pods()
        for role, count in counts.items():
            await self._kubectl("scale", f"deployment/{role}", f"--replicas={count}")
        after = await self._wait_settled(counts)
        return [_change(role, before, after) for role in counts]

    async def drain(self, service_id: str) -> None:
        """``service_id``: the pod's name. Its Deployment has one pod fewer from then on, and gives up this
        one unless another is not ready anyway."""
        pods = await self._pods()
        found = next((each for each in pods if each.metadata.name == service_id and not each.is_ending), None)
        role = next((each for each in SCALED_ROLES if found is not None and each == found.role), None)
        if role is None:
            raise LauncherError(f"no pod of the mesh in the namespace {self.namespace} is {service_id}")
        await self._kubectl("annotate", "pod", service_id, f"{DELETION_COST}={FIRST}", "--overwrite")
        [change] = await self.apply({role: CountWish(-1, is_change=True)})
        if service_id not in change.ended:
            raise LauncherError(f"{', '.join(change.ended)} ended instead of {service_id}: it was not ready")

    async def standing(self) -> Standing:
        """Of every Deployment, also one that is to have no pod."""
        replicas = await self._replicas()
        if not replicas:
            raise LauncherError(f"there is no Deployment of the mesh in the namespace {self.namespace}")
        ready = [each.role for each in await self._pods() if each.is_ready]
        return Standing([RoleCount(role, ready.count(role), count) for role, count in replicas.items()])

    @property
    def following_load(self) -> frozenset[ScaledService]:
        """Gateways, too: a Service stands before them."""
        return frozenset(get_args(ScaledService))

    @property
    def hears_wishes(self) -> bool:
        return False

    def inside(self, *arguments: str) -> tuple[str, ...]:
        """In a scheduler's pod: there is always one."""
        command = ("kubectl", "--namespace", self.namespace, "exec", "--stdin", "deployment/scheduler", "--")
        return (*command, "lamella", *arguments, "--config", SETTINGS)

    async def _replicas(self) -> dict[ScaledRole, int]:
        """How many pods each role's Deployment is to have."""
        answer = await self._kubectl("get", "deployments", *OF_THE_MESH)
        found = msgspec.json.decode(answer, type=Deployments).items
        named = {each.metadata.name: each.spec.replicas for each in found}
        return {role: named[role] for role in SCALED_ROLES if role in named}

    async def _pods(self) -> list[Pod]:
        answer = await self._kubectl("get", "pods", *OF_THE_MESH)
        found = msgspec.json.decode(answer, type=Pods).items
        return [each for each in found if each.status.phase not in OVER]

    async def _wait_settled(self, counts: Mapping[ScaledRole, int]) -> list[Pod]:
        """Until there are so many pods of each role, all ready, and none is ending. Raises LauncherError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.ready_timeout_s
        while True:
            pods = await self._pods()
            late = [said for role, count in counts.items() for said in _what_is_missing(role, count, pods)]
            if not late:
                return pods
            if loop.time() > deadline_s:
                raise LauncherError(
                    f"{'; '.join(late)} after {self.ready_timeout_s:g} s: the cluster goes on trying,"
                    " unless something else scales the same Deployments"
                )
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _kubectl(self, *arguments: str) -> bytes:
        command = ("kubectl", "--namespace", self.namespace, *arguments)
        return await output_of(*command, timeout_s=REQUEST_TIMEOUT_S)


def _instances(replicas: Mapping[ScaledRole, int]) -> list[Role]:
    return [role for role in ROLES for _ in range(replicas.get(role, 0))]


def _of(role: ScaledRole, pods: list[Pod]) -> list[str]:
    return sorted(each.metadata.name for each in pods if each.role == role and not each.is_ending)


def _what_is_missing(role: ScaledRole, count: int, pods: list[Pod]) -> list[str]:
    mine = [each for each in pods if each.role == role]
    ready = sum(each.is_ready for each in mine)
    ending = [each.metadata.name for each in mine if each.is_ending]
    said = [] if ready == count else [f"{role}: {ready} pods ready instead of {count}"]
    return said + ([f"{', '.join(ending)} still drains"] if ending else [])


def _change(role: ScaledRole, before: list[Pod], after: list[Pod]) -> RoleChange:
    former, present = _of(role, before), _of(role, after)
    started = tuple(name for name in present if name not in former)
    ended = tuple(name for name in former if name not in present)
    return RoleChange(role, len(former), len(present), started, ended)
