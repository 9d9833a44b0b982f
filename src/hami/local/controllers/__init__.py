"""The controllers of the embedded cluster: what makes pods out of Deployments, DaemonSets and Jobs."""

from __future__ import annotations

from hami.local.controllers.controller import Context, ControllerManager
from hami.local.controllers.daemonset import DaemonSetController
from hami.local.controllers.deployment import DeploymentController
from hami.local.controllers.endpoints import EndpointsController, ServiceAccountsController
from hami.local.controllers.garbage import GarbageCollector
from hami.local.controllers.job import JobController
from hami.local.controllers.replicaset import ReplicaSetController


def default_controllers(context: Context) -> ControllerManager:
    """All controllers that the embedded cluster has."""
    kinds = (
        GarbageCollector, ServiceAccountsController, EndpointsController, ReplicaSetController,
        DeploymentController, DaemonSetController, JobController,
    )  # fmt: skip
    return ControllerManager(context, [kind(context) for kind in kinds])
