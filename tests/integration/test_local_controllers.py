"""Workloads, cascading deletion and endpoints on a running API server, with a kubelet without processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from local_harness import ReadyKubelet, until

from hami.local.api.apiserver import ApiServer
from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, annotations_of, clone, dig, labels_of, meta, name_of
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import (
    CONFIGMAPS,
    DAEMONSETS,
    DEPLOYMENTS,
    ENDPOINTS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICASETS,
    RESOURCEQUOTAS,
    SERVICEACCOUNTS,
    SERVICES,
    Resource,
)
from hami.local.controllers.controller import Context, ControllerManager
from hami.local.controllers.job import JobController


class Workloads:
    """Requests on the registry in the namespace ``default``."""

    def __init__(self, api: ApiServer, kubelet: ReadyKubelet) -> None:
        self.api = api
        self.kubelet = kubelet

    async def create(self, resource: Resource, name: str, spec: Object, **labels: str) -> Object:
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        created, _ = await self.api.registry.create(resource, "default" if resource.namespaced else "", body)
        return created

    async def change(self, resource: Resource, name: str, **spec: Any) -> None:
        def make(current: Object) -> Object:
            changed: Object = clone(current)
            changed["spec"].update(clone(spec))
            return changed

        await self.api.registry.update(resource, "default", name, make)

    async def delete(self, resource: Resource, name: str, policy: str = "Background") -> None:
        options = DeleteOptions({"propagationPolicy": policy})
        await self.api.registry.delete(resource, "default" if resource.namespaced else "", name, options)

    def get(self, resource: Resource, name: str) -> Object:
        return self.api.store.get(resource, "default", name)

    def pods(self, app: str) -> list[Object]:
        return [pod for pod in self.api.store.list(PODS, "default") if labels_of(pod).get("app") == app]

    def status(self, resource: Resource, name: str, field: str) -> Any:
        return dig(self.get(resource, name), "status", field)

    def events(self) -> list[str]:
        return [f"{event['reason']}: {event['message']}" for event in self.api.store.list(EVENTS)]


def template(app: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "none", "command": ["sleep", "1"]}
    return {"metadata": {"labels": {"app": app}}, "spec": {"containers": [container], **spec}}


def workload(app: str, **spec: Any) -> Object:
    return {"selector": {"matchLabels": {"app": app}}, "template": template(app), **spec}


@pytest.fixture
async def world(embedded_api: ApiServer) -> AsyncIterator[Workloads]:
    kubelet = ReadyKubelet(embedded_api, ["n1", "n2"])
    workloads = Workloads(embedded_api, kubelet)
    for name in ("n1", "n2"):
        await workloads.create(NODES, name, {})
    try:
        yield workloads
    finally:
        await kubelet.stop()


async def rolled_out(world: Workloads, name: str, replicas: int) -> None:
    """What ``kubectl rollout status`` waits for."""

    def done() -> bool:
        found = world.get(DEPLOYMENTS, name)
        status = found["status"]
        return bool(
            status.get("observedGeneration") == meta(found)["generation"]
            and status.get("updatedReplicas", 0) == replicas
            and status.get("replicas", 0) == replicas
            and status.get("availableReplicas", 0) == replicas
        )

    await until(done)


# --- replica sets and deployments ---


async def test_a_replica_set_keeps_its_number_of_pods(world: Workloads) -> None:
    await world.create(REPLICASETS, "rs", workload("rs", replicas=3))
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 3)
    lost = name_of(world.pods("rs")[0])
    await world.delete(PODS, lost)
    await until(lambda: lost not in map(name_of, world.pods("rs")) and len(world.pods("rs")) == 3)
    await world.change(REPLICASETS, "rs", replicas=1)
    await until(lambda: len(world.pods("rs")) == 1 and world.status(REPLICASETS, "rs", "replicas") == 1)


async def test_a_pod_that_loses_the_label_is_let_go_and_one_that_gets_it_is_taken(world: Workloads) -> None:
    await world.create(REPLICASETS, "rs", workload("rs", replicas=1))
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 1)
    pod = name_of(world.pods("rs")[0])

    def relabel(value: str) -> Any:
        return lambda current: {**current, "metadata": {**meta(current), "labels": {"app": value}}}

    await world.api.registry.update(PODS, "default", pod, relabel("free"))
    await until(lambda: not meta(world.get(PODS, pod)).get("ownerReferences"))
    await until(lambda: len(world.pods("rs")) == 1)
    await world.change(REPLICASETS, "rs", replicas=2)
    await until(lambda: len(world.pods("rs")) == 2)
    await world.api.registry.update(PODS, "default", pod, relabel("rs"))
    await until(lambda: len(world.pods("rs")) == 2 and world.status(REPLICASETS, "rs", "replicas") == 2)


async def test_a_deployment_rolls_a_new_template_out_step_by_step(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=4))
    await rolled_out(world, "web", 4)
    first = name_of(world.api.store.list(REPLICASETS)[0])
    asked: list[int] = []
    running: list[int] = []

    def look(key: str, _event: Any) -> None:
        if key == REPLICASETS.key:
            asked.append(sum(found["spec"]["replicas"] for found in world.api.store.list(REPLICASETS)))
        elif key == PODS.key:
            alive = [pod for pod in world.pods("web") if not meta(pod).get("deletionTimestamp")]
            running.append(sum(dig(pod, "status", "phase") == "Running" for pod in alive))

    world.api.store.subscribe(look)
    await world.change(DEPLOYMENTS, "web", template=template("web", priority=1))
    await rolled_out(world, "web", 4)
    assert (max(asked), min(running)) == (5, 3)  # a quarter more, a quarter fewer
    sets = {name_of(found): found["spec"]["replicas"] for found in world.api.store.list(REPLICASETS)}
    assert len(sets) == 2
    assert sets[first] == 0
    assert annotations_of(world.get(DEPLOYMENTS, "web"))["deployment.kubernetes.io/revision"] == "2"


async def test_a_rollout_of_pods_that_never_get_ready_keeps_the_old_ones(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=4, progressDeadlineSeconds=1))
    await rolled_out(world, "web", 4)
    world.kubelet.held.add("web")
    await world.change(DEPLOYMENTS, "web", template=template("web", priority=1))
    await until(
        lambda: (
            "ProgressDeadlineExceeded"
            in [item["reason"] for item in world.status(DEPLOYMENTS, "web", "conditions")]
        )
    )
    running = [pod for pod in world.pods("web") if dig(pod, "status", "phase") == "Running"]
    assert len(running) >= 3


async def test_going_back_uses_the_replica_set_that_is_there(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=1))
    await rolled_out(world, "web", 1)
    await world.change(DEPLOYMENTS, "web", template=template("web", priority=1))
    await rolled_out(world, "web", 1)
    await world.change(DEPLOYMENTS, "web", template=template("web"))
    await rolled_out(world, "web", 1)
    assert len(world.api.store.list(REPLICASETS)) == 2
    assert annotations_of(world.get(DEPLOYMENTS, "web"))["deployment.kubernetes.io/revision"] == "3"


async def test_recreate_ends_all_old_pods_before_new_ones_start(world: Workloads) -> None:
    spec = workload("web", replicas=3, strategy={"type": "Recreate"})
    await world.create(DEPLOYMENTS, "web", spec)
    await rolled_out(world, "web", 3)
    mixed: list[set[Any]] = []

    def look(key: str, _event: Any) -> None:
        if key == "pods":
            mixed.append({labels_of(pod).get("pod-template-hash") for pod in world.pods("web")})

    world.api.store.subscribe(look)
    await world.change(DEPLOYMENTS, "web", template=template("web", priority=1))
    await rolled_out(world, "web", 3)
    assert max(map(len, mixed)) == 1


async def test_old_replica_sets_beyond_the_history_go(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=1, revisionHistoryLimit=1))
    for priority in range(4):
        await world.change(DEPLOYMENTS, "web", template=template("web", priority=priority))
        await rolled_out(world, "web", 1)
    await until(lambda: len(world.api.store.list(REPLICASETS)) == 2)


async def test_a_paused_deployment_does_not_roll_out(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=1))
    await rolled_out(world, "web", 1)
    await world.change(DEPLOYMENTS, "web", paused=True, template=template("web", priority=1), replicas=2)
    await until(lambda: len(world.pods("web")) == 2)
    assert len(world.api.store.list(REPLICASETS)) == 1
    await world.change(DEPLOYMENTS, "web", paused=False)
    await rolled_out(world, "web", 2)
    assert len(world.api.store.list(REPLICASETS)) == 2


async def test_a_quota_is_told_as_event_and_condition_and_waited_for(world: Workloads) -> None:
    await world.create(RESOURCEQUOTAS, "q", {"hard": {"pods": "1"}})
    await world.create(REPLICASETS, "rs", workload("rs", replicas=2))
    await until(lambda: any("exceeded quota" in line for line in world.events()))
    await until(
        lambda: (world.status(REPLICASETS, "rs", "conditions") or [{}])[0].get("type") == "ReplicaFailure"
    )
    assert len(world.pods("rs")) == 1
    await world.delete(RESOURCEQUOTAS, "q")
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 2)


# --- deletion ---


async def test_deleting_a_deployment_takes_its_replica_sets_and_pods_along(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=2))
    await rolled_out(world, "web", 2)
    await world.delete(DEPLOYMENTS, "web")
    assert world.api.store.find(DEPLOYMENTS, "default", "web") is None
    await until(lambda: not world.api.store.list(REPLICASETS) and not world.pods("web"))


async def test_foreground_deletion_keeps_the_owner_until_its_dependents_are_gone(world: Workloads) -> None:
    await world.create(REPLICASETS, "rs", workload("rs", replicas=2))
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 2)
    order: list[str] = []
    world.api.store.subscribe(
        lambda key, event: order.append(key) if event.change == "DELETED" and key != "events" else None
    )
    await world.delete(REPLICASETS, "rs", "Foreground")
    assert meta(world.get(REPLICASETS, "rs"))["deletionTimestamp"]
    await until(lambda: not world.api.store.list(REPLICASETS))
    assert order == ["pods", "pods", REPLICASETS.key]


async def test_orphaned_pods_stay_and_are_adopted_again(world: Workloads) -> None:
    await world.create(REPLICASETS, "rs", workload("rs", replicas=2))
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 2)
    before = {name_of(pod) for pod in world.pods("rs")}
    await world.delete(REPLICASETS, "rs", "Orphan")
    await until(lambda: not world.api.store.list(REPLICASETS))
    assert {name_of(pod) for pod in world.pods("rs")} == before
    assert all(not meta(pod).get("ownerReferences") for pod in world.pods("rs"))
    await world.create(REPLICASETS, "rs", workload("rs", replicas=2))
    await until(lambda: world.status(REPLICASETS, "rs", "availableReplicas") == 2)
    assert {name_of(pod) for pod in world.pods("rs")} == before


async def test_an_object_goes_with_the_last_of_its_owners(world: Workloads) -> None:
    owners = []
    for name in ("a", "b"):
        owner, _ = await world.api.registry.create(CONFIGMAPS, "default", {"metadata": {"name": name}})
        owners.append({"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": meta(owner)["uid"]})
    body = {"metadata": {"name": "child", "ownerReferences": owners}}
    await world.api.registry.create(CONFIGMAPS, "default", body)
    await world.delete(CONFIGMAPS, "a")
    await until(lambda: len(meta(world.get(CONFIGMAPS, "child"))["ownerReferences"]) == 1)
    await world.delete(CONFIGMAPS, "b")
    await until(lambda: world.api.store.find(CONFIGMAPS, "default", "child") is None)


async def test_a_late_dependent_follows_its_owner(world: Workloads) -> None:
    owner, _ = await world.api.registry.create(CONFIGMAPS, "default", {"metadata": {"name": "a"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": meta(owner)["uid"]}
    await world.delete(CONFIGMAPS, "a")
    body = {"metadata": {"name": "late", "ownerReferences": [reference]}}
    await world.api.registry.create(CONFIGMAPS, "default", body)
    await until(lambda: world.api.store.find(CONFIGMAPS, "default", "late") is None)


async def test_an_unknown_propagation_policy_is_refused() -> None:
    with pytest.raises(ApiError, match="propagationPolicy"):
        DeleteOptions({"propagationPolicy": "Sideways"})


async def test_a_namespace_with_workloads_can_be_deleted(world: Workloads) -> None:
    await world.api.registry.create(NAMESPACES, "", {"metadata": {"name": "team"}})
    for resource, spec in (
        (DEPLOYMENTS, workload("web", replicas=2)),
        (JOBS, {"template": template("job", restartPolicy="Never")}),
    ):
        await world.api.registry.create(resource, "team", {"metadata": {"name": "x"}, "spec": spec})
    await until(lambda: len(world.api.store.list(PODS, "team")) == 3)
    await world.api.registry.delete(NAMESPACES, "", "team")
    await until(lambda: world.api.store.find(NAMESPACES, "", "team") is None)
    assert world.api.store.list(PODS, "team") == []


# --- daemon sets ---


async def test_a_daemon_set_runs_on_every_node_that_comes(world: Workloads) -> None:
    await world.create(DAEMONSETS, "agent", workload("agent"))
    await until(lambda: world.status(DAEMONSETS, "agent", "numberAvailable") == 2)
    assert sorted(pod["spec"]["nodeName"] for pod in world.pods("agent")) == ["n1", "n2"]
    await world.create(NODES, "n3", {})
    await until(lambda: world.status(DAEMONSETS, "agent", "numberAvailable") == 3)
    await world.delete(NODES, "n3")
    await until(lambda: world.status(DAEMONSETS, "agent", "desiredNumberScheduled") == 2)
    await until(lambda: len(world.pods("agent")) == 2)


async def test_a_changed_daemon_set_replaces_all_its_pods(world: Workloads) -> None:
    await world.create(DAEMONSETS, "agent", workload("agent"))
    await until(lambda: world.status(DAEMONSETS, "agent", "numberAvailable") == 2)
    before = {name_of(pod) for pod in world.pods("agent")}
    await world.change(DAEMONSETS, "agent", template=template("agent", priority=1))

    def replaced() -> bool:
        status = world.get(DAEMONSETS, "agent")["status"]
        counts = (status.get("updatedNumberScheduled"), status.get("numberAvailable"))
        return counts == (2, 2) and status["observedGeneration"] == 2

    await until(replaced)
    assert not before & {name_of(pod) for pod in world.pods("agent")}


# --- jobs ---


async def finish(world: Workloads, app: str, phase: str) -> None:
    """End one running pod."""
    await until(lambda: [pod for pod in world.pods(app) if dig(pod, "status", "phase") == "Running"])
    running = [pod for pod in world.pods(app) if dig(pod, "status", "phase") == "Running"]
    await world.kubelet.set_status(running[0], phase)


async def test_a_job_is_complete_after_its_completions(world: Workloads) -> None:
    spec = {"completions": 3, "parallelism": 2, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "once", spec)
    await until(lambda: world.status(JOBS, "once", "active") == 2)
    for _ in range(3):
        await finish(world, "job", "Succeeded")
    await until(lambda: world.status(JOBS, "once", "completionTime"))
    assert world.status(JOBS, "once", "succeeded") == 3
    assert world.status(JOBS, "once", "conditions")[0]["type"] == "Complete"
    await until(lambda: all(not meta(pod).get("finalizers") for pod in world.pods("job")))
    assert len(world.pods("job")) == 3


async def test_a_job_fails_beyond_its_backoff_limit(world: Workloads) -> None:
    spec = {"backoffLimit": 0, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "bad", spec)
    await finish(world, "job", "Failed")
    await until(lambda: world.status(JOBS, "bad", "conditions"))
    condition = world.status(JOBS, "bad", "conditions")[0]
    assert (condition["type"], condition["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert world.status(JOBS, "bad", "failed") == 1


async def test_a_deleted_job_pod_counts_as_failed_and_goes(world: Workloads) -> None:
    spec = {"backoffLimit": 0, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "bad", spec)
    await until(lambda: [pod for pod in world.pods("job") if dig(pod, "status", "phase") == "Running"])
    await world.delete(PODS, name_of(world.pods("job")[0]))
    await until(lambda: world.status(JOBS, "bad", "conditions"))
    await until(lambda: not world.pods("job"))


async def test_a_suspended_job_has_no_pods_until_it_is_resumed(world: Workloads) -> None:
    spec = {"suspend": True, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "later", spec)
    await until(lambda: world.status(JOBS, "later", "conditions"))
    assert world.pods("job") == []
    await world.change(JOBS, "later", suspend=False)
    await finish(world, "job", "Succeeded")
    await until(lambda: world.status(JOBS, "later", "completionTime"))


async def test_a_finished_job_goes_after_its_time_to_live(world: Workloads) -> None:
    spec = {"ttlSecondsAfterFinished": 0, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "brief", spec)
    await finish(world, "job", "Succeeded")
    await until(lambda: world.api.store.find(JOBS, "default", "brief") is None)
    await until(lambda: not world.pods("job"))


async def test_an_indexed_job_completes_every_index(world: Workloads) -> None:
    spec = {
        "completions": 3, "parallelism": 3, "completionMode": "Indexed",
        "template": template("job", restartPolicy="Never"),
    }  # fmt: skip
    await world.create(JOBS, "parts", spec)
    for _ in range(3):
        await finish(world, "job", "Succeeded")
    await until(lambda: world.status(JOBS, "parts", "completionTime"))
    assert world.status(JOBS, "parts", "completedIndexes") == "0-2"


async def test_a_failed_pod_of_a_job_is_replaced_after_a_pause(embedded_api: ApiServer) -> None:
    """With the pause of the controller made short."""
    await embedded_api.stop()
    context = Context(embedded_api.registry, time.time)
    manager = ControllerManager(context, [JobController(context, backoff_s=0.05)])
    kubelet = ReadyKubelet(embedded_api, ["n1"])
    world = Workloads(embedded_api, kubelet)
    manager.start()
    try:
        spec = {"template": template("job", restartPolicy="Never")}
        await world.create(JOBS, "again", spec)
        await finish(world, "job", "Failed")
        await finish(world, "job", "Succeeded")
        await until(lambda: world.status(JOBS, "again", "completionTime"))
        assert (world.status(JOBS, "again", "failed"), world.status(JOBS, "again", "succeeded")) == (1, 1)
    finally:
        await manager.stop()
        await kubelet.stop()


async def test_less_parallelism_ends_pods(world: Workloads) -> None:
    spec = {"completions": 5, "parallelism": 3, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "wide", spec)
    await until(lambda: world.status(JOBS, "wide", "active") == 3)
    await world.change(JOBS, "wide", parallelism=1)
    await until(lambda: len(world.pods("job")) == 1)


async def test_a_job_over_its_quota_says_so(world: Workloads) -> None:
    await world.create(RESOURCEQUOTAS, "q", {"hard": {"pods": "0"}})
    await world.create(JOBS, "none", {"template": template("job", restartPolicy="Never")})
    await until(lambda: any(line.startswith("FailedCreate") for line in world.events()))
    assert world.pods("job") == []


async def test_a_job_past_its_deadline_fails(world: Workloads) -> None:
    spec = {"activeDeadlineSeconds": 1, "template": template("job", restartPolicy="Never")}
    await world.create(JOBS, "slow", spec)
    await until(lambda: world.status(JOBS, "slow", "conditions"))
    assert world.status(JOBS, "slow", "conditions")[0]["reason"] == "DeadlineExceeded"
    await until(lambda: not world.pods("job"))


async def test_pods_do_not_wait_for_a_job_that_is_gone(world: Workloads) -> None:
    await world.create(JOBS, "gone", {"template": template("job", restartPolicy="Never")})
    await until(lambda: [pod for pod in world.pods("job") if dig(pod, "status", "phase") == "Running"])
    await world.delete(JOBS, "gone")
    await until(lambda: not world.pods("job"))


async def test_a_daemon_set_over_its_quota_says_so(world: Workloads) -> None:
    await world.create(RESOURCEQUOTAS, "q", {"hard": {"pods": "1"}})
    await world.create(DAEMONSETS, "agent", workload("agent"))
    await until(lambda: any(line.startswith("FailedCreate") for line in world.events()))
    assert len(world.pods("agent")) == 1


async def test_a_deployment_adopts_the_replica_sets_of_one_that_was_orphaned(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=1))
    await rolled_out(world, "web", 1)
    before = {name_of(found) for found in world.api.store.list(REPLICASETS)}
    await world.delete(DEPLOYMENTS, "web", "Orphan")
    await until(lambda: world.api.store.find(DEPLOYMENTS, "default", "web") is None)
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=2))
    await rolled_out(world, "web", 2)
    assert {name_of(found) for found in world.api.store.list(REPLICASETS)} == before


# --- services ---


async def test_a_service_has_the_addresses_of_its_ready_pods(world: Workloads) -> None:
    await world.create(SERVICES, "web", {"selector": {"app": "web"}, "ports": [{"port": 80}]})
    await world.create(REPLICASETS, "rs", workload("web", replicas=2))

    def addresses() -> int:
        found = world.api.store.find(ENDPOINTS, "default", "web")
        return sum(len(subset.get("addresses") or []) for subset in (found or {}).get("subsets") or [])

    await until(lambda: addresses() == 2)
    await world.change(REPLICASETS, "rs", replicas=1)
    await until(lambda: addresses() == 1)
    await world.delete(SERVICES, "web")
    await until(lambda: world.api.store.find(ENDPOINTS, "default", "web") is None)


async def test_endpoints_of_a_service_without_selector_are_left_alone(world: Workloads) -> None:
    body = {"metadata": {"name": "own"}, "subsets": [{"addresses": [{"ip": "10.0.0.9"}]}]}
    await world.api.registry.create(ENDPOINTS, "default", body)
    await world.create(SERVICES, "own", {"ports": [{"port": 80}]})
    await world.create(SERVICES, "marker", {"selector": {"app": "x"}})
    await until(lambda: world.api.store.find(ENDPOINTS, "default", "marker"))
    assert world.get(ENDPOINTS, "own")["subsets"] == body["subsets"]


async def test_every_namespace_has_a_default_service_account(world: Workloads) -> None:
    await world.api.registry.create(NAMESPACES, "", {"metadata": {"name": "team"}})
    await until(lambda: world.api.store.find(SERVICEACCOUNTS, "team", "default"))
    await world.api.registry.delete(SERVICEACCOUNTS, "team", "default")
    await until(lambda: world.api.store.find(SERVICEACCOUNTS, "team", "default"))


async def test_a_restarted_server_goes_on_with_its_workloads(world: Workloads) -> None:
    await world.create(DEPLOYMENTS, "web", workload("web", replicas=1))
    await rolled_out(world, "web", 1)
    await world.api.stop()
    await world.change(DEPLOYMENTS, "web", replicas=3)
    assert len(world.pods("web")) == 1
    await world.api.start()
    await rolled_out(world, "web", 3)
