"""The table of kinds that the embedded API server serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind: where it lives, what it is called, which subresources it has.

    ``stored_as`` names the resource whose objects it shows in another form (see ``views``).
    """

    group: str
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    stored_as: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> str:
        """The unique name of the resource: ``pods``, ``leases.coordination.k8s.io``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def storage_key(self) -> str:
        return self.stored_as or self.key

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources

    @property
    def base_path(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


def _core(
    plural: str,
    singular: str,
    kind: str,
    namespaced: bool,
    short_names: Iterable[str] = (),
    categories: Iterable[str] = (),
    subresources: Iterable[str] = (),
) -> Resource:
    return Resource(
        "", "v1", plural, singular, kind, namespaced,
        tuple(short_names), tuple(categories), tuple(subresources),
    )  # fmt: skip


PODS = _core("pods", "pod", "Pod", True, ["po"], ["all"], [
    "status", "binding", "eviction", "log", "exec", "portforward",
])  # fmt: skip
NODES = _core("nodes", "node", "Node", False, ["no"], subresources=["status"])
NAMESPACES = _core("namespaces", "namespace", "Namespace", False, ["ns"], subresources=["status", "finalize"])
EVENTS = _core("events", "event", "Event", True, ["ev"])
CONFIGMAPS = _core("configmaps", "configmap", "ConfigMap", True, ["cm"])
SECRETS = _core("secrets", "secret", "Secret", True)
SERVICES = _core("services", "service", "Service", True, ["svc"], ["all"], ["status"])
ENDPOINTS = _core("endpoints", "endpoints", "Endpoints", True, ["ep"])
SERVICEACCOUNTS = _core(
    "serviceaccounts", "serviceaccount", "ServiceAccount", True, ["sa"], subresources=["token"]
)
RESOURCEQUOTAS = _core(
    "resourcequotas", "resourcequota", "ResourceQuota", True, ["quota"], subresources=["status"]
)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "lease", "Lease", True)
MUTATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "mutatingwebhookconfiguration",
    "MutatingWebhookConfiguration", False, (), ("api-extensions",),
)  # fmt: skip
VALIDATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations",
    "validatingwebhookconfiguration", "ValidatingWebhookConfiguration", False, (), ("api-extensions",),
)  # fmt: skip

EVENTS_V1 = Resource("events.k8s.io", "v1", "events", "event", "Event", True, ("ev",), stored_as=EVENTS.key)
DEPLOYMENTS = Resource(
    "apps", "v1", "deployments", "deployment", "Deployment", True, ("deploy",), ("all",), ("status", "scale")
)
REPLICASETS = Resource(
    "apps", "v1", "replicasets", "replicaset", "ReplicaSet", True, ("rs",), ("all",), ("status", "scale")
)
DAEMONSETS = Resource(
    "apps", "v1", "daemonsets", "daemonset", "DaemonSet", True, ("ds",), ("all",), ("status",)
)
JOBS = Resource("batch", "v1", "jobs", "job", "Job", True, (), ("all",), ("status",))
DISRUPTION_BUDGETS = Resource(
    "policy", "v1", "poddisruptionbudgets", "poddisruptionbudget", "PodDisruptionBudget", True, ("pdb",),
    (), ("status",),
)  # fmt: skip


def _rbac(plural: str, singular: str, kind: str, namespaced: bool) -> Resource:
    return Resource("rbac.authorization.k8s.io", "v1", plural, singular, kind, namespaced)


ROLES = _rbac("roles", "role", "Role", True)
ROLEBINDINGS = _rbac("rolebindings", "rolebinding", "RoleBinding", True)
CLUSTERROLES = _rbac("clusterroles", "clusterrole", "ClusterRole", False)
CLUSTERROLEBINDINGS = _rbac("clusterrolebindings", "clusterrolebinding", "ClusterRoleBinding", False)


def _review(group: str, plural: str, kind: str, namespaced: bool = False) -> Resource:
    return Resource(group, "v1", plural, kind.lower(), kind, namespaced, verbs=("create",))


TOKENREVIEWS = _review("authentication.k8s.io", "tokenreviews", "TokenReview")
SELF_SUBJECT_REVIEWS = _review("authentication.k8s.io", "selfsubjectreviews", "SelfSubjectReview")
ACCESS_REVIEWS = _review("authorization.k8s.io", "subjectaccessreviews", "SubjectAccessReview")
SELF_ACCESS_REVIEWS = _review("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview")
LOCAL_ACCESS_REVIEWS = _review(
    "authorization.k8s.io", "localsubjectaccessreviews", "LocalSubjectAccessReview", namespaced=True
)
SELF_RULES_REVIEWS = _review("authorization.k8s.io", "selfsubjectrulesreviews", "SelfSubjectRulesReview")


@dataclass(frozen=True, slots=True)
class ResourceTable:
    """Look-ups over the served kinds."""

    resources: tuple[Resource, ...]
    _by_path: dict[tuple[str, str, str], Resource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for resource in self.resources:
            self._by_path[(resource.group, resource.version, resource.plural)] = resource

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._by_path.get((group, version, plural))

    def group_versions(self) -> dict[tuple[str, str], list[Resource]]:
        """Resources by (group, version), the core group first."""
        found: dict[tuple[str, str], list[Resource]] = {}
        for resource in sorted(self.resources, key=lambda r: (r.group, r.version)):
            found.setdefault((resource.group, resource.version), []).append(resource)
        return found

    def namespaced(self) -> list[Resource]:
        """Stored kinds that live in namespaces; views of other kinds are left out."""
        return [
            resource
            for resource in self.resources
            if resource.namespaced and resource.verbs == VERBS and not resource.stored_as
        ]


DEFAULT_TABLE = ResourceTable(
    (
        PODS, NODES, NAMESPACES, EVENTS, CONFIGMAPS, SECRETS, SERVICES, ENDPOINTS, SERVICEACCOUNTS,
        RESOURCEQUOTAS, LEASES, MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS, EVENTS_V1, DEPLOYMENTS, REPLICASETS,
        DAEMONSETS, JOBS, DISRUPTION_BUDGETS, ROLES, ROLEBINDINGS, CLUSTERROLES, CLUSTERROLEBINDINGS,
        TOKENREVIEWS, SELF_SUBJECT_REVIEWS, ACCESS_REVIEWS, SELF_ACCESS_REVIEWS, LOCAL_ACCESS_REVIEWS,
        SELF_RULES_REVIEWS,
    )
)  # fmt: skip
