"""The files of the page, and its first view as plain HTML for browsers without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Final

from hami.dashboard.shapes import Amount, Summary

_KINDS: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
_NAMES: Final = ("app.js", "parts.js", "pages.js", "style.css", "texts.en.json", "texts.zh.json", "icon.svg")
_MARK: Final = "<!-- summary -->"

Asset = tuple[bytes, str]  # body and content type


def load_assets() -> Mapping[str, Asset]:
    """Every file of the page by its path; nothing else can be asked for."""
    folder = files("hami.dashboard") / "static"
    return {
        f"/static/{name}": ((folder / name).read_bytes(), _KINDS[name.rpartition(".")[2]]) for name in _NAMES
    }


def load_shell() -> str:
    """The page without its summary."""
    return (files("hami.dashboard") / "static" / "index.html").read_text("utf-8")


def page(shell: str, summary: Summary | None) -> bytes:
    """The page, with the summary as a table for browsers without scripts; None: it is not shown."""
    return shell.replace(_MARK, _nothing() if summary is None else _table(summary)).encode()


def _nothing() -> str:
    return "<p>The summary is not shown here: the cluster has not been read yet, or a token is needed.</p>"


def _table(summary: Summary) -> str:
    nodes, devices, pods = summary.nodes, summary.devices, summary.workloads
    rows = [
        ("Nodes with devices / ready / all", f"{nodes.gpu_nodes} / {nodes.ready} / {nodes.total}"),
        ("Devices healthy / all", f"{devices.healthy} / {devices.total}"),
        ("Slots allocated", _amount(summary.slots, "")),
        ("Cores allocated", _amount(summary.cores, "")),
        ("Memory allocated", _amount(summary.memory_mi_b, " MiB")),
        ("Workloads running / pending", f"{pods.running} / {pods.pending}"),
        ("Workloads failed / completed", f"{pods.failed} / {pods.completed}"),
    ]
    rows += [(f"{one.vendor} {one.type}", f"{one.healthy} / {one.total}") for one in devices.by_type]
    rows += [(f"Alert: {one.kind}", f"{one.subject} {one.detail}") for one in summary.alerts[:20]]
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows
    )
    return f"<table><caption>Summary</caption><tbody>{body}</tbody></table>"


def _amount(amount: Amount, unit: str) -> str:
    return f"{amount.allocated} of {amount.total}{unit}"
