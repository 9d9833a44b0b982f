"""Rendering the chart, and finding one's way in what it renders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/hami"
GOLDEN = Path(__file__).resolve().parent / "golden"
KUBE = "v1.31.4"

Object = dict[str, Any]


class Refused(Exception):
    """helm refused the values; the text is helm's."""


@dataclass(frozen=True)
class Rendered:
    """The objects of one rendering."""

    objects: list[Object]

    @property
    def names(self) -> set[tuple[str, str]]:
        """Kind and name of every object."""
        return {(found["kind"], found["metadata"]["name"]) for found in self.objects}

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [found for found in self.objects if found["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        """The one object of that kind and name."""
        (found,) = [item for item in self.of(kind) if item["metadata"]["name"] == name]
        return found

    @property
    def deployment(self) -> Object:
        (found,) = self.of("Deployment")
        return found

    @property
    def pod(self) -> Object:
        """Pod spec of the scheduler."""
        spec: Object = self.deployment["spec"]["template"]["spec"]
        return spec

    @property
    def node_pod(self) -> Object:
        """Pod spec of the device plugin."""
        sets = [item for item in self.of("DaemonSet") if "mock" not in item["metadata"]["name"]]
        (found,) = sets
        spec: Object = found["spec"]["template"]["spec"]
        return spec

    @property
    def extender(self) -> Object:
        return container(self.pod, "vgpu-scheduler-extender")

    @property
    def kube_scheduler(self) -> Object:
        return container(self.pod, "kube-scheduler")

    @property
    def plugin(self) -> Object:
        return container(self.node_pod, "device-plugin")

    @property
    def monitor(self) -> Object:
        return container(self.node_pod, "vgpu-monitor")

    @property
    def kube_scheduler_config(self) -> Object:
        """The KubeSchedulerConfiguration."""
        (found,) = [item for item in self.of("ConfigMap") if "config.yaml" in item["data"]]
        config: Object = yaml.safe_load(found["data"]["config.yaml"])
        return config

    @property
    def device_config(self) -> str:
        """The text of device-config.yaml."""
        (found,) = [item for item in self.of("ConfigMap") if "device-config.yaml" in item["data"]]
        text: str = found["data"]["device-config.yaml"]
        return text

    @property
    def managed(self) -> dict[str, bool]:
        """Managed resources and whether kube-scheduler ignores them."""
        (extender,) = self.kube_scheduler_config["extenders"]
        listed = [(item["name"], item["ignoredByScheduler"]) for item in extender["managedResources"]]
        assert len(listed) == len(dict(listed)), "a resource is listed twice"
        return dict(listed)

    def pods(self) -> Iterator[Object]:
        """The pod specs of all workloads."""
        for found in self.objects:
            if found["kind"] in ("Deployment", "DaemonSet", "Job"):
                yield found["spec"]["template"]["spec"]

    def images(self) -> list[str]:
        """Every image."""
        return [
            item["image"]
            for spec in self.pods()
            for item in [*spec.get("initContainers", []), *spec["containers"]]
        ]


def container(spec: Object, name: str) -> Object:
    """A container of a pod spec."""
    (found,) = [item for item in spec["containers"] if item["name"] == name]
    return dict(found)


def env(holder: Object) -> dict[str, Any]:
    """Environment with plain values; None where a value comes from elsewhere."""
    return {item["name"]: item.get("value") for item in holder["env"]}


def host_paths(spec: Object) -> dict[str, str]:
    """Volume name -> path on the host."""
    return {item["name"]: item["hostPath"]["path"] for item in spec["volumes"] if "hostPath" in item}


def helm(*arguments: str) -> str:
    """What helm prints; raises `Refused`."""
    done = subprocess.run(
        [os.environ["HAMI_HELM"], *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def render(
    values: Mapping[str, Any] | None = None,
    *arguments: str,
    release: str = "hami",
    kube: str = KUBE,
    chart: Path = CHART,
) -> Rendered:
    """Render the chart with nested values; keys with dots are paths (`a.b.c`)."""
    nested: Object = {}
    for path, value in (values or {}).items():
        *parents, last = path.split(".")
        place = nested
        for step in parents:
            place = place.setdefault(step, {})
        place[last] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        file.write_text(json.dumps(nested), "utf-8")
        text = helm(
            *("template", release, str(chart), "--namespace", "kube-system", "--kube-version", kube),
            *("--values", str(file), *arguments),
        )
    return Rendered([found for found in yaml.safe_load_all(text) if found])


def notes(values: Mapping[str, Any] | None = None, *, kube: str = KUBE) -> str:
    """The NOTES of an installation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "hami")
        shutil.copytree(CHART, copy)
        shown = 'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "hami.notes" . | toJson }}\n'
        (copy / "templates/notes.yaml").write_text(shown, "utf-8")
        text: str = render(values, kube=kube, chart=copy).get("Notes", "notes")["text"]
    return text
