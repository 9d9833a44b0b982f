"""The API and the application around it: what is answered, and what is refused (webui.md §6.3, §6.6)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dashboard_harness import NOW, World, api, card, container, node, pod, quota

import hami.dashboard
from hami.dashboard.access import ProxyHeader
from hami.dashboard.errors import AccessError
from hami.dashboard.scope import Scope
from hami.dashboard.shapes import Source

STATIC = Path(hami.dashboard.__file__).parent / "static"


def small() -> World:
    world = World()
    world.put(node("n", card("c-0"), card("c-1", 1)), pod("p", "n", "c-0,NVIDIA,2000,30:;"), pod("waits"))
    return world


class Only:
    """Access of somebody who may see some namespaces; "" for nobody."""

    def __init__(self, *namespaces: str) -> None:
        self._namespaces = frozenset(namespaces)

    def reader(self, headers: Any) -> str:
        return ""

    async def scope(self, headers: Any, namespaces: Any) -> Scope:
        if not self._namespaces:
            raise AccessError(401, "who are you?")
        return Scope(self._namespaces)


# --- lists ------------------------------------------------------------------------------------------------


def test_a_limit_over_1000_is_capped_and_echoed() -> None:
    assert api(small(), "devices?limit=5000")["limit"] == 1000


def test_an_unknown_parameter_is_named() -> None:
    reply = small().get("/api/v1/nodes?foo=1")
    assert reply.status == 400
    assert "'foo'" in reply.error
    assert "status" in reply.error, "it also says which ones there are"


def test_an_unknown_device_is_a_json_error() -> None:
    reply = small().get("/api/v1/devices/unknown")
    assert (reply.status, reply.headers["content-type"]) == (404, "application/json")
    assert "unknown" in reply.error


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=1e3",
        "limit=%D9%A3",
        "cursor=x",
        "order=up",
        "sort=secret",
        "q=" + "x" * 257,
        "q=%FF",
        "status=a&status=b",
        "&".join(f"q{at}=1" for at in range(40)),
        "x" * 5000,
    ],
)
def test_a_query_that_makes_no_sense_is_refused(query: str) -> None:
    assert small().get(f"/api/v1/devices?{query}").status == 400


def test_pages_of_a_list_follow_each_other_without_gaps() -> None:
    world = World()
    world.put(node("n", *(card(f"c-{at}", at) for at in range(7))))
    seen, query = [], "limit=3"
    while True:
        page = api(world, f"devices?{query}")
        seen += [one["uuid"] for one in page["items"]]
        if page["nextCursor"] is None:
            break
        query = f"limit=3&cursor={page['nextCursor']}"
    assert seen == [f"c-{at}" for at in range(7)]
    assert api(world, "devices?cursor=999999999")["items"] == []


def test_lists_are_filtered_searched_and_sorted() -> None:
    world = small()
    assert api(world, "devices?namespace=default")["total"] == 1
    assert api(world, "workloads?q=WAIT")["items"][0]["pod"] == "waits"
    assert [one["uuid"] for one in api(world, "devices?sort=memory&order=desc")["items"]] == ["c-0", "c-1"]
    assert api(world, "nodes?node=10.0.0.7")["total"] == 1


# --- pending ----------------------------------------------------------------------------------------------


def test_a_pod_larger_than_every_card_is_told_the_largest() -> None:
    world = World()
    world.put(
        node("n", card("c-0", devmem=81920), card("c-1", 1, devmem=40960)),
        pod("p", containers=[container("main", gpu=1, gpumem=90000)]),
    )
    found = api(world, "pending/default/p")
    (refusal,) = found["nodes"]
    assert refusal["text"] == "2/2 CardInsufficientMemory"
    assert refusal["reasons"][0]["sentence"] == "cards have less free memory than the pod asks for"
    assert "c-0" in found["suggestions"][0]
    assert "81920 MiB" in found["suggestions"][0]
    assert found["beingBound"] is False


def test_a_pod_of_another_scheduler_is_told_that_the_webhook_did_not_patch_it() -> None:
    world = World()
    world.put(
        node("n", card("c-0")),
        pod("p", containers=[container("main", gpumem=100)], scheduler="default-scheduler"),
    )
    text = "not handled by the GPU scheduler: webhook did not patch this pod"
    assert api(world, "pending")["items"][0]["note"] == text
    found = api(world, "pending/default/p")
    assert (found["note"], found["patched"]) == (text, False)


def test_a_pod_that_fits_now_is_being_bound() -> None:
    assert api(small(), "pending/default/waits")["beingBound"] is True


# --- history ----------------------------------------------------------------------------------------------


def test_a_gap_in_the_history_stays_a_gap() -> None:
    world = small()
    for at in (0, 30, 60, 300, 330):
        values = {} if at == 30 else {("cluster", "memoryUsedMiB"): float(at)}
        world.history.note(NOW + at, values)
    found = api(world, f"history?metric=memoryUsedMiB&from={NOW:.0f}&to={NOW + 400:.0f}")["points"]
    assert found == [
        [NOW, 0.0],
        [NOW + 30, None],
        [NOW + 60, 60.0],
        [NOW + 90, None],
        [NOW + 300, 300.0],
        [NOW + 330, 330.0],
    ]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("metric=up", 400),
        ("from=2&to=1", 400),
        ("from=x", 400),
        ("from=1e9", 400),
        ("to=99999999999999", 400),
        ("scope=node/none", 404),
        ('scope=node/n"}', 404),
    ],
)
def test_history_is_only_of_what_there_is(query: str, status: int) -> None:
    assert small().get(f"/api/v1/history?{query}").status == status


# --- who may see what -------------------------------------------------------------------------------------


def test_a_reader_of_one_namespace_sees_other_pods_as_other_only() -> None:
    world = World()
    world.put(
        node("n", card("c-0"), **{"hami.io__mutex.lock": "2026-08-21T00:00:00Z,secret,hidden"}),
        pod("mine", "n", "c-0,NVIDIA,2000,30:;", namespace="team-a"),
        pod("hidden", "n", "c-0,NVIDIA,3000,20:;", namespace="secret"),
        pod("hidden-waits", namespace="secret", containers=[container("main", gpu=9)]),
    )
    world.store.put_quota(quota("secret", gpumem=1000))
    world.access = Only("team-a")
    assert [one["pod"] for one in api(world, "workloads")["items"]] == ["mine"]
    parts = api(world, "devices/c-0")["containers"]
    assert {(one["pod"], one["memoryMiB"], one["other"]) for one in parts} == {
        ("mine", 2000, False),
        ("", 3000, True),
    }
    everything = ["summary", "nodes", "nodes/n", "devices", "devices/c-0", "workloads", "pending", "quotas"]
    for path in everything:
        assert b"hidden" not in world.get(f"/api/v1/{path}").body, path
        assert b"secret" not in world.get(f"/api/v1/{path}").body, path
    assert b"hidden" not in world.get("/").body
    for path in ("workloads/secret/hidden", "pending/secret/hidden-waits"):
        assert world.get(f"/api/v1/{path}").status == 404, path
    assert api(world, "summary")["memoryMiB"]["allocated"] == 5000, "the cluster's sums stay"


def test_an_explanation_names_no_pod_of_a_namespace_that_may_not_be_seen() -> None:
    world = World()
    world.put(
        node("n", card("c-0", count=1)),
        pod("hidden", "n", "c-0,NVIDIA,2000,30:;", namespace="secret"),
        pod("mine", namespace="team-a"),
    )
    assert b"hidden" in world.get("/api/v1/pending/team-a/mine").body, "who may see all is told"
    world.access, world.app = Only("team-a"), None
    reply = world.get("/api/v1/pending/team-a/mine")
    assert reply.status == 200
    assert b"hidden" not in reply.body


def test_without_a_token_the_page_is_there_but_no_data() -> None:
    world = small()
    world.access = Only()
    reply = world.get("/api/v1/summary")
    assert (reply.status, reply.headers["www-authenticate"]) == (401, 'Bearer realm="hami-dashboard"')
    shell = world.get("/")
    assert shell.status == 200
    assert b"NVIDIA-T4" not in shell.body


@pytest.mark.parametrize(
    ("given", "status"), [({}, 401), ({"x-forwarded-user": " "}, 401), ({"x-forwarded-user": "ann"}, 200)]
)
def test_the_header_of_the_proxy_is_needed(given: dict[str, str], status: int) -> None:
    world = small()
    world.access = ProxyHeader("X-Forwarded-User")
    assert world.get("/api/v1/summary", headers=given).status == status


# --- the application --------------------------------------------------------------------------------------


def test_probes_before_and_after_the_first_sync() -> None:
    world = small()
    world.is_read = False
    assert (world.get("/healthz").status, world.get("/readyz").status) == (200, 503)
    assert world.get("/api/v1/summary").status == 503
    world.is_read = True
    assert (world.get("/healthz").status, world.get("/readyz").status) == (200, 200)
    assert b"hami_dashboard_answers_total" in world.get("/metrics").body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
@pytest.mark.parametrize("path", ["/", "/api/v1/nodes", "/api/v1/workloads/default/p", "/healthz"])
def test_nothing_can_be_written(method: str, path: str) -> None:
    reply = small().get(path, method=method)
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


def test_head_gives_the_headers_only() -> None:
    reply = small().get("/api/v1/summary", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) > 100


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost:80:80",
        "[::1",
        "dash.example.org@evil.example",
        "127.0.0.1/../x",
        "\xff",
    ],
)
def test_a_request_for_another_host_is_refused(host: str) -> None:
    assert small().get("/api/v1/summary", host=host).status == 421


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3:8080", "[::1]:8080", "LOCALHOST:1", "dash.example.org", "dash.example.org."],
)
def test_addresses_and_names_of_our_own_are_answered(host: str) -> None:
    assert small().get("/api/v1/summary", host=host).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../process.py",
        "/static/%2e%2e/process.py",
        "/static/..%2fprocess.py",
        "/static//app.js",
        "/static/",
        "//api/v1/summary",
        "/api/v1/../../etc/passwd",
        "/api/v1/devices/..%2f..%2fetc%2fpasswd",
        "/api/v1/nodes/%00",
        "/api/v1/nodes/%ff",
        "/api/v1/a/b/c/d/e/f/g/h",
        "/api/v2/summary",
        "/api/v1/",
    ],
)
def test_paths_lead_nowhere_else(path: str) -> None:
    reply = small().get(path)
    assert reply.status == 404
    assert b"root:" not in reply.body


def test_a_client_that_asks_too_often_is_slowed_down_and_forgiven() -> None:
    world = small()
    statuses = [world.get("/static/app.js").status for _ in range(61)]
    assert statuses == [200] * 60 + [429]
    assert world.get("/healthz").status == 200, "probes always pass"
    world.ticks = 0.05
    assert world.get("/static/app.js").status == 200


def test_readers_behind_one_proxy_are_counted_apart() -> None:
    world = small()
    world.access = ProxyHeader("x-forwarded-user")
    ann, bob = ({"x-forwarded-user": name} for name in ("ann", "bob"))
    assert [world.get("/", headers=ann).status for _ in range(61)][-1] == 429
    assert world.get("/", headers=bob).status == 200


def test_long_heads_are_refused_and_bodies_close_the_connection() -> None:
    world = small()
    assert world.get("/", headers={"x-long": "x" * (16 << 10)}).status == 431
    reply = world.get("/api/v1/summary", headers={"content-length": "5"})
    assert (reply.status, reply.headers["connection"]) == (200, "close")


def test_every_answer_carries_the_security_headers_and_no_cookie() -> None:
    for path in ("/", "/static/app.js", "/api/v1/summary", "/api/v1/none", "/healthz"):
        headers = small().get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not {"set-cookie", "access-control-allow-origin", "server"} & set(headers)


# --- the page ---------------------------------------------------------------------------------------------


def test_without_scripts_a_table_with_the_summary_is_served() -> None:
    body = small().get("/").body.decode()
    inside = body.partition("<noscript>")[2].partition("</noscript>")[0]
    assert '<th scope="row">Devices healthy / all</th><td>2 / 2</td>' in inside


def test_markup_in_names_and_annotations_stays_text() -> None:
    evil = '<img src=x onerror="alert(1)">'
    world = World()
    broken = node("broken")
    broken["metadata"]["annotations"]["hami.io/node-nvidia-register"] = evil
    world.put(
        node("n", card("c-0", type=evil, health=False)),
        broken,
        pod(evil, "n", "c-0,NVIDIA,2000,30:;", namespace=evil),
    )
    world.store.report(Source("pods", "stale", evil))
    body = world.get("/").body
    assert b"&lt;img src=x" in body
    assert b"<img" not in body
    reply = world.get("/api/v1/workloads")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["items"][0]["pod"] == evil


def test_the_scripts_never_turn_text_into_markup() -> None:
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|DOMParser|"
        r"localStorage|sessionStorage|document\.cookie|https?://(?!www\.w3\.org/2000/svg)"
    )
    for file in sorted(STATIC.glob("*.js")):
        assert ways.findall(file.read_text("utf-8")) == [], file.name
    page = (STATIC / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=|https?://", page) == []


def test_the_page_is_small_and_names_only_files_that_there_are() -> None:
    files = list(STATIC.iterdir())
    assert sum(file.stat().st_size for file in files) < 300 * 1024
    world = small()
    for file in files:
        if file.name != "index.html":
            assert world.get(f"/static/{file.name}").body == file.read_bytes()
    named = re.findall(r'"/(static/[^"]+)"', (STATIC / "index.html").read_text("utf-8"))
    assert {name.removeprefix("static/") for name in named} <= {file.name for file in files}


def test_both_languages_have_every_text_that_the_pages_use() -> None:
    english, chinese = (json.loads((STATIC / f"texts.{one}.json").read_text("utf-8")) for one in ("en", "zh"))
    assert english.keys() == chinese.keys()
    assert all(english.values())
    assert all(chinese.values())
    scripts = "".join(file.read_text("utf-8") for file in STATIC.glob("*.js"))
    used = set(re.findall(r'\bt\("([^"]+)"\)', scripts)) | set(re.findall(r'\bkey: "([^"]+)"', scripts))
    used |= set(re.findall(r'\b(?:missing|tile|points|line)\("([^"]+)"', scripts))
    used |= set(re.findall(r'\["(\w+)"[,\]]', scripts)) - {"memoryAllocatedMiB", "d", "h", "min"}
    alerts = ("unhealthyDevice", "registration", "staleMonitor", "oldLock", "blocked", "idle")
    used |= {f"alert.{kind}" for kind in alerts}
    used |= {"ready", "notReady", "cordoned", "running", "pending", "failed", "completed", "unknown"}
    used |= {"ok", "stale", "missing", "off", "healthy", "unhealthy", "overview", "allocated", "used"}
    assert used - english.keys() == set()
