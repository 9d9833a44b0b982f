// The six pages: each takes the path's parts and the filters of the address, and gives elements.

import { age, api, chart, csv, facts, filtered, granted, h, link, migStrip, missing, number, slices, t, table, time } from "./parts.js";

const MEMORY = "MiB";

function status(value) {
  const kind = { ready: "good", running: "good", healthy: "good", ok: "good", pending: "mid", cordoned: "mid", completed: "soft", off: "soft" }[value] ?? "bad";
  return h("span", { class: kind }, t(value));
}
const health = (row) => status(row.healthy ? "healthy" : "unhealthy");
const podLink = (row) => link("workloads", [row.namespace, row.pod], `${row.namespace}/${row.pod}`);
const used = (amount, unit) => number(amount.used, unit);

const NODES = [
  { key: "name", sort: "name", shown: (row) => link("nodes", [row.name], row.name) },
  { key: "status", sort: "status", shown: (row) => status(row.status) },
  { key: "ip", shown: (row) => row.ip },
  { key: "devices", sort: "devices", shown: (row) => `${row.healthyDevices} / ${row.deviceCount}` },
  { key: "slots", sort: "slots", shown: (row) => granted(row.slots) },
  { key: "memory", sort: "memory", shown: (row) => granted(row.memoryMiB, MEMORY) },
  { key: "memoryUsed", number: true, shown: (row) => used(row.memoryMiB, MEMORY) },
  { key: "cores", sort: "cores", shown: (row) => granted(row.cores) },
  { key: "monitor", shown: (row) => (row.monitor.state === "ok" ? age(row.monitor.ageSeconds) : h("span", { class: "bad", title: row.monitor.reason }, t(row.monitor.state))) },
];
const DEVICES = [
  { key: "uuid", sort: "uuid", shown: (row) => link("devices", [row.uuid], row.uuid) },
  { key: "type", sort: "type", shown: (row) => row.type },
  { key: "node", sort: "node", shown: (row) => link("nodes", [row.node], row.node) },
  { key: "status", sort: "status", shown: health },
  { key: "slots", sort: "slots", shown: (row) => granted(row.slots) },
  { key: "memory", sort: "memory", shown: (row) => h("div", {}, granted(row.memoryMiB, MEMORY), overcommit(row)) },
  { key: "memoryUsed", number: true, shown: (row) => used(row.memoryMiB, MEMORY) },
  { key: "cores", sort: "cores", shown: (row) => granted(row.cores) },
  { key: "busy", number: true, shown: (row) => used(row.cores, "%") },
];
const WORKLOADS = [
  { key: "pod", sort: "name", shown: podLink },
  { key: "status", sort: "status", shown: (row) => status(row.status) },
  { key: "node", sort: "node", shown: (row) => (row.node ? link("nodes", [row.node], row.node) : missing("noNode")) },
  { key: "devices", sort: "devices", number: true, shown: (row) => number(row.deviceCount) },
  { key: "memory", sort: "memory", number: true, shown: (row) => number(row.memoryMiB, MEMORY) },
  { key: "memoryUsed", number: true, shown: (row) => number(row.usedMemoryMiB, MEMORY) },
  { key: "cores", sort: "cores", number: true, shown: (row) => number(row.cores) },
  { key: "created", sort: "created", shown: (row) => time(row.created) },
];
const PENDING = [
  { key: "pod", sort: "name", shown: (row) => link("pending", [row.namespace, row.pod], `${row.namespace}/${row.pod}`) },
  { key: "created", sort: "created", shown: (row) => time(row.created) },
  { key: "asks", shown: (row) => row.asks.join("; ") },
  { key: "lastWord", shown: (row) => (row.note ? h("span", { class: "bad" }, row.note) : row.lastWord) },
];
const QUOTAS = [
  { key: "namespace", sort: "namespace", shown: (row) => row.namespace },
  { key: "resource", shown: (row) => row.resource },
  { key: "used", sort: "used", shown: (row) => granted({ total: row.limit, allocated: row.used }) },
];

function overcommit(card) {
  return card.overcommitPercent == null ? null : h("strong", { class: "bad" }, `${t("overcommit")}: ${number(card.overcommitPercent, "%")}`);
}

// --- lists ---

const LISTS = {
  nodes: { columns: NODES, filters: [["status", ["ready", "notReady", "cordoned"]], ["vendor"], ["q"]] },
  devices: { columns: DEVICES, filters: [["status", ["healthy", "unhealthy"]], ["node"], ["type"], ["vendor"], ["q"]] },
  workloads: { columns: WORKLOADS, filters: [["status", ["running", "pending", "failed", "completed", "unknown"]], ["namespace"], ["node"], ["type"], ["q"]] },
  pending: { columns: PENDING, filters: [["namespace"], ["q"]] },
  quotas: { columns: QUOTAS, filters: [["namespace"], ["q"]] },
};

async function list(page, query, go) {
  const { columns, filters } = LISTS[page];
  const found = await api(page, query);
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); go(Object.fromEntries(new FormData(form))); } },
    filters.map(([name, choices]) => h("label", {}, t(name), choices
      ? h("select", { name }, h("option", { value: "" }, t("all")), choices.map((one) => h("option", { value: one, selected: query[name] === one }, t(one))))
      : h("input", { name, value: query[name] ?? "", autocomplete: "off" }))),
    h("button", { type: "submit" }, t("filter")),
    h("button", { type: "button", onclick: async () => csv(page, columns, (await api(page, { ...query, cursor: "", limit: 1000 })).items) }, t("csv")));
  const sort = (by) => go({ ...query, cursor: "", sort: by, order: query.sort === by && query.order !== "desc" ? "desc" : "asc" });
  const first = Number(query.cursor || 0);
  const shown = `${found.total ? first + 1 : 0}–${first + found.items.length} / ${found.total}`;
  return [h("h1", {}, t(page)), form, table(shown, columns, found.items, query, sort),
    first > 0 ? h("button", { type: "button", onclick: () => go({ ...query, cursor: String(Math.max(0, first - found.limit)) }) }, t("previous")) : null,
    found.nextCursor ? h("button", { type: "button", onclick: () => go({ ...query, cursor: found.nextCursor }) }, t("next")) : null];
}

// --- overview ---

async function overview(query, go) {
  const [summary, roomy, trend] = await Promise.all([
    api("summary"), api("nodes", { sort: "memoryFree", order: "desc", limit: 10 }), trends("cluster", query),
  ]);
  const tile = (key, ...shown) => h("div", { class: "tile" }, t(key), shown);
  const pods = summary.workloads;
  return [
    h("h1", {}, summary.cluster || t("overview")),
    h("div", { class: "tiles" },
      tile("devices", h("b", {}, filtered("devices", {}, `${summary.devices.healthy} / ${summary.devices.total}`)), h("span", { class: "soft" }, t("healthyOfAll"))),
      tile("slots", granted(summary.slots)),
      tile("memory", granted(summary.memoryMiB, MEMORY), h("div", {}, t("used"), ": ", used(summary.memoryMiB, MEMORY))),
      tile("cores", granted(summary.cores), h("div", {}, t("busy"), ": ", used(summary.cores, "%"))),
      tile("nodes", h("b", {}, filtered("nodes", {}, `${summary.nodes.gpuNodes} / ${summary.nodes.total}`)), h("span", { class: "soft" }, t("withDevicesOfAll"))),
      tile("workloads", ["running", "pending", "failed", "completed"].map((one) => h("div", {}, filtered("workloads", { status: one }, `${t(one)}: ${pods[one]}`))))),
    h("h2", {}, t("alerts")),
    summary.alerts.length ? h("ul", {}, summary.alerts.map((one) => h("li", {}, h("strong", { class: "bad" }, t(`alert.${one.kind}`)), ` ${one.subject} `, h("span", { class: "soft" }, one.detail)))) : h("p", { class: "good" }, t("noAlerts")),
    h("h2", {}, t("trends")), ranges(query, go), h("div", { class: "tiles" }, trend),
    h("h2", {}, t("types")),
    table("", [{ key: "type", shown: (row) => filtered("devices", { type: row.type }, `${row.vendor} ${row.type}`) }, { key: "healthyOfAll", shown: (row) => granted({ total: summary.devices.total, allocated: row.total }) }, { key: "healthy", number: true, shown: (row) => `${row.healthy} / ${row.total}` }], summary.devices.byType),
    h("h2", {}, t("roomiest")), table("", NODES, roomy.items),
    h("h2", {}, t("sources")),
    table("", [{ key: "name", shown: (row) => row.name }, { key: "status", shown: (row) => status(row.state) }, { key: "age", shown: (row) => age(row.ageSeconds) }, { key: "reason", shown: (row) => row.reason }], summary.sources),
  ];
}

const RANGES = [["1 h", 3600], ["3 h", 10800], ["6 h", 21600], ["1 d", 86400], ["7 d", 604800], ["30 d", 2592000]];

function ranges(query, go) {
  const chosen = query.range || "1 h";
  const select = h("select", { name: "range", onchange: (event) => go({ ...query, range: event.target.value }) },
    RANGES.map(([name]) => h("option", { value: name, selected: name === chosen }, name)));
  return h("form", {}, h("label", {}, t("range"), select));
}

async function trends(scope, query, more = []) {
  const span = Object.fromEntries(RANGES)[query.range] ?? 3600;
  const to = Math.floor(Date.now() / 1000);
  const get = async (metric) => (await api("history", { metric, scope, from: to - span, to })).points;
  const wanted = ["memoryAllocatedMiB", "memoryUsedMiB", "coresAllocated", "coresUsedPercent", ...more];
  const found = Object.fromEntries(await Promise.all(wanted.map(async (one) => [one, await get(one)])));
  const line = (kind, metric) => ({ kind, points: found[metric] });
  return [
    chart(t("memory"), MEMORY, [line("allocated", "memoryAllocatedMiB"), line("used", "memoryUsedMiB")]),
    chart(t("cores"), "", [line("allocated", "coresAllocated")]),
    chart(t("busy"), "%", [line("used", "coresUsedPercent")]),
    ...more.map((one) => chart(t(one), one === "powerWatts" ? "W" : "°C", [line("used", one)])),
  ];
}

// --- details ---

async function node([name], query, go) {
  const [found, trend] = await Promise.all([api(`nodes/${encodeURIComponent(name)}`), trends(`node/${name}`, query)]);
  const one = found.node;
  return [
    h("h1", {}, one.name), one.problems.map((text) => h("p", { class: "note" }, text)),
    facts([["status", status(one.status)], ["ip", one.ip], ["osImage", one.osImage], ["kernel", one.kernelVersion], ["kubelet", one.kubeletVersion],
      ["runtime", one.containerRuntimeVersion], ["architecture", one.architecture], ["created", time(one.created)],
      ["monitor", h("span", {}, status(one.monitor.state), ` ${one.monitor.reason}`)],
      ["lock", one.lock ? `${one.lock.holder || t("otherPod")} (${age(one.lock.ageSeconds)})` : t("none")],
      ["slots", granted(one.slots)], ["memory", granted(one.memoryMiB, MEMORY)], ["cores", granted(one.cores)]]),
    h("h2", {}, t("devices")), found.devices.map((card) => h("div", {}, h("p", {}, link("devices", [card.uuid], `${card.index} ${card.uuid}`), " ", health(card), overcommit(card)), cardBar(card))),
    h("h2", {}, t("trends")), ranges(query, go), h("div", { class: "tiles" }, trend),
    h("p", {}, filtered("workloads", { node: one.name }, t("workloads"))),
  ];
}
const cardBar = (card) => (card.mode === "mig" ? migStrip(card) : slices(card));

async function device([uuid], query, go) {
  const [card, trend] = await Promise.all([api(`devices/${encodeURIComponent(uuid)}`), trends(`device/${uuid}`, query, ["temperatureCelsius", "powerWatts"])]);
  return [
    h("h1", {}, card.uuid),
    facts([["node", link("nodes", [card.node], card.node)], ["type", `${card.vendor} ${card.type}`], ["mode", card.mode], ["status", health(card)], ["cordoned", card.cordoned ? t("yes") : t("no")],
      ["slots", granted(card.slots)], ["memory", h("div", {}, granted(card.memoryMiB, MEMORY), overcommit(card))], ["memoryUsed", used(card.memoryMiB, MEMORY)], ["cores", granted(card.cores)],
      ["busy", used(card.cores, "%")], ["temperatureCelsius", number(card.temperatureCelsius, "°C")], ["powerWatts", number(card.powerWatts, "W")]]),
    cardBar(card),
    table(t("containers"), [{ key: "pod", shown: (row) => (row.other ? t("otherPod") : podLink(row)) }, { key: "container", shown: (row) => row.container }, { key: "memory", number: true, shown: (row) => number(row.memoryMiB, MEMORY) }, { key: "memoryUsed", number: true, shown: (row) => number(row.usedMemoryMiB, MEMORY) }, { key: "cores", number: true, shown: (row) => number(row.cores) }], card.containers),
    card.migInstances.length ? table(t("mig"), [{ key: "profile", shown: (row) => row.profile }, { key: "place", shown: (row) => `${row.start}–${row.start + row.size - 1}` }, { key: "pod", shown: (row) => (row.other ? t("otherPod") : podLink(row)) }], card.migInstances) : null,
    h("h2", {}, t("trends")), ranges(query, go), h("div", { class: "tiles" }, trend),
  ];
}

async function workload([namespace, name]) {
  const pod = await api(`workloads/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`);
  const flag = (value) => (value == null ? missing("noSample") : t(value ? "yes" : "no"));
  const rows = pod.containers.flatMap((one) => (one.devices.length ? one.devices.map((held) => ({ one, held })) : [{ one, held: null }]));
  const of = (get) => (row) => (row.held ? get(row.held) : "");
  return [
    h("h1", {}, `${pod.namespace}/${pod.pod}`), pod.problems.map((text) => h("p", { class: "note" }, text)),
    facts([["status", status(pod.status)], ["node", pod.node ? link("nodes", [pod.node], pod.node) : ""], ["scheduler", pod.scheduler], ["priority", pod.priority], ["bindPhase", pod.bindPhase],
      ["created", time(pod.created)], ["scheduled", time(pod.scheduled)], ["bound", time(pod.bound)], ["started", time(pod.started)]]),
    table(t("containers"), [
      { key: "container", shown: (row) => `${row.one.name}${row.one.init ? ` (${t("init")})` : ""}` },
      { key: "uuid", shown: of((held) => link("devices", [held.uuid], held.uuid)) },
      { key: "type", shown: of((held) => held.type) },
      { key: "memory", number: true, shown: of((held) => number(held.memoryMiB, MEMORY)) },
      { key: "memoryUsed", number: true, shown: of((held) => number(held.usedMemoryMiB, MEMORY)) },
      { key: "cores", number: true, shown: of((held) => number(held.cores)) },
      { key: "busy", number: true, shown: of((held) => number(held.utilizationPercent, "%")) },
      { key: "hookActive", shown: of((held) => flag(held.hookActive)) },
      { key: "limitEnforced", shown: (row) => flag(row.one.limitEnforced) },
      { key: "blockedNow", shown: (row) => flag(row.one.blocked) },
    ], rows),
    h("h2", {}, t("commands")),
    ["describe pod", "logs"].map((verb) => h("p", {}, h("code", {}, `kubectl -n ${pod.namespace} ${verb} ${pod.pod}`))),
    h("p", {}, h("code", {}, `hami explain -n ${pod.namespace} ${pod.pod}`)),
    pod.status === "pending" && !pod.node ? h("p", {}, link("pending", [pod.namespace, pod.pod], t("why"))) : null,
  ];
}

async function pendingPod([namespace, name]) {
  const found = await api(`pending/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`);
  const points = (key, lines) => (lines.length ? [h("h2", {}, t(key)), h("ul", {}, lines.map((one) => h("li", {}, one)))] : null);
  return [
    h("h1", {}, `${found.namespace}/${found.pod}`),
    found.note ? h("p", { class: "note" }, found.note) : null, h("p", {}, h("strong", {}, found.summary)),
    facts([["status", found.beingBound ? t("beingBound") : t("pending")], ["scheduler", found.scheduler], ["patched", t(found.patched ? "yes" : "no")], ["asks", found.asks.join("; ")], ["lastWord", found.lastWord]]),
    h("h2", {}, t("reasons")),
    table("", [{ key: "nodes", shown: (row) => `${row.nodeCount}: ${row.nodes.slice(0, 5).join(", ")}${row.nodeCount > 5 ? " …" : ""}` }, { key: "reason", shown: (row) => row.text }, { key: "meaning", shown: (row) => row.reasons.map((one) => h("div", {}, h("code", {}, one.code), ` ${one.sentence}`)) }], found.nodes),
    points("suggestions", [...found.suggestions, ...found.changes]), points("notes", found.notes),
    h("h2", {}, t("events")),
    table("", [{ key: "reason", shown: (row) => row.reason }, { key: "message", shown: (row) => row.message }, { key: "count", number: true, shown: (row) => number(row.count) }, { key: "age", shown: (row) => row.last }], found.events),
  ];
}

const DETAILS = { nodes: node, devices: device, workloads: workload, pending: pendingPod };
export const PAGES = ["overview", ...Object.keys(LISTS)];

export async function render(page, parts, query, go) {
  if (page === "overview") return overview(query, go);
  if (parts.length && DETAILS[page]) return DETAILS[page](parts, query, go);
  return list(page, query, go);
}

