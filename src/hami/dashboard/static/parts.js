// Building blocks. Everything that comes from the cluster becomes a text node or an attribute's value: there is
// no place here where text turns into markup.

const SVG = "http://www.w3.org/2000/svg";
let texts = {};
let fallback = {};
let token = ""; // of auth mode kubernetes; kept in this variable only

export function setTexts(chosen, english) { texts = chosen; fallback = english; }
export function setToken(value) { token = value; }
export function t(key) { return texts[key] ?? fallback[key] ?? key; }

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function api(path, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value !== "" && value != null) search.set(name, value);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const tail = search.size ? `?${search}` : "";
  const answer = await fetch(`/api/v1/${path}${tail}`, { headers, signal: AbortSignal.timeout(30000) });
  if (answer.ok) return answer.json();
  let message = answer.statusText;
  try { message = (await answer.json()).error.message; } catch { /* not from us */ }
  throw new ApiError(answer.status, message);
}

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((one) => one != null && one !== false));
  return element;
}

export function link(page, parts, shown) {
  return h("a", { href: `#/${[page, ...parts].map(encodeURIComponent).join("/")}` }, shown);
}
export function filtered(page, query, shown) {
  return h("a", { href: `#/${page}?${new URLSearchParams(query)}` }, shown);
}

// --- numbers ---

export function number(value, unit = "") {
  if (value == null) return missing("noSample");
  const shown = new Intl.NumberFormat(document.documentElement.lang, { maximumFractionDigits: 1 }).format(value);
  return unit ? `${shown} ${unit}` : shown;
}
export function missing(why) { return h("span", { title: t(why), class: "soft" }, "–"); }
export function time(seconds) {
  if (seconds == null) return missing("noTime");
  const moment = new Date(seconds * 1000);
  return h("time", { datetime: moment.toISOString(), title: moment.toISOString() }, moment.toLocaleString());
}
export function age(seconds) {
  if (seconds == null) return missing("noTime");
  const steps = [["d", 86400], ["h", 3600], ["min", 60]];
  const step = steps.find(([, size]) => seconds >= size);
  return step ? `${Math.floor(seconds / step[1])} ${step[0]}` : `${Math.floor(seconds)} s`;
}
export function percent(part, whole) { return whole ? Math.round((1000 * part) / whole) / 10 : 0; }
function level(value) { return value >= 80 ? "bad" : value >= 50 ? "mid" : "good"; }

// What is granted of a total, in words, percent and as a bar; more than all is printed as it is.
export function granted(amount, unit = "") {
  if (!amount.total) return missing("notCounted");
  const share = percent(amount.allocated, amount.total);
  return h("div", {},
    h("span", {}, `${number(amount.allocated)} / ${number(amount.total, unit)} `),
    h("span", { class: level(share) }, `${share} %`),
    s("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "track", width: 100, height: 6 }),
      s("rect", { class: `fill-${level(share)}`, width: Math.min(100, share), height: 6 })));
}

// --- bars of cards ---

export function slices(card) {
  const whole = Math.max(card.memoryMiB.total, card.memoryMiB.allocated, 1);
  let at = 0;
  const parts = card.containers.map((one) => {
    const width = (1000 * one.memoryMiB) / whole;
    const who = one.other ? t("otherPod") : `${one.namespace}/${one.pod} ${one.container}`;
    const part = s("rect", { class: one.other ? "other" : "own", x: at, width, height: 20 },
      s("title", {}, `${who}: ${one.memoryMiB} MiB, ${one.cores} ${t("cores")}`));
    at += width;
    return part;
  });
  const named = card.containers.map((one) => (one.other ? t("otherPod") : `${one.namespace}/${one.pod}`));
  const label = `${card.uuid}: ${named.join(", ") || t("free")}`;
  return s("svg", { class: "slices", viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("rect", { class: "free", width: 1000, height: 20 }), parts);
}
export function migStrip(card) {
  const width = Math.max(8, ...card.migInstances.map((one) => one.start + one.size));
  const cells = Array.from({ length: width }, (_, at) => s("rect", { class: "free", x: at * 100, width: 100, height: 20 }));
  const held = card.migInstances.map((one) => {
    const who = one.other ? t("otherPod") : `${one.namespace}/${one.pod}`;
    return s("rect", { class: one.other ? "other" : "own", x: one.start * 100, width: one.size * 100, height: 20 },
      s("title", {}, `${one.profile} ${one.start}–${one.start + one.size - 1}: ${who}`));
  });
  return s("svg", { class: "slices", viewBox: `0 0 ${width * 100} 20`, preserveAspectRatio: "none", role: "img",
    "aria-label": t("mig") }, cells, held);
}

// --- charts: a line per series, broken where there is no sample ---

export function chart(title, unit, series) {
  const all = series.flatMap((one) => one.points);
  const values = all.map((one) => one[1]).filter((one) => one != null);
  if (!values.length) return h("figure", { class: "panel" }, h("figcaption", {}, title), missing("noSample"));
  const [from, to] = [Math.min(...all.map((one) => one[0])), Math.max(...all.map((one) => one[0]))];
  const top = Math.max(...values, 1);
  const x = (at) => (to > from ? (1000 * (at - from)) / (to - from) : 500);
  const y = (value) => 100 - (96 * value) / top;
  const lines = series.map((one) => s("path", { class: `line-${one.kind}`, d: pathOf(one.points, x, y) }));
  const words = series.map((one) => `${t(one.kind)}: ${number(lastOf(one.points)) instanceof Node ? "–" : number(lastOf(one.points), unit)}`);
  return h("figure", { class: "panel" },
    h("figcaption", {}, `${title} (0–${number(top, unit)}) · ${words.join(" · ")}`),
    s("svg", { class: "chart", viewBox: "0 0 1000 102", preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${words.join(", ")}` }, s("path", { class: "axis", d: "M0 100H1000" }), lines),
    h("small", { class: "soft" }, time(from), " – ", time(to)));
}
function pathOf(points, x, y) {
  let path = "";
  let open = false;
  for (const [at, value] of points) {
    if (value == null) { open = false; continue; }
    const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    path += open ? `L${place}` : `M${place}h1L${place}`;
    open = true;
  }
  return path;
}
function lastOf(points) { return points.length ? points[points.length - 1][1] : null; }

// --- tables ---

// columns: {key, shown(row), sort?, number?, csv?(row)}
export function table(caption, columns, rows, order = {}, onSort = null) {
  const heads = columns.map((one) => {
    const sorted = one.sort && order.sort === one.sort ? (order.order === "desc" ? "descending" : "ascending") : null;
    const head = one.sort && onSort
      ? h("button", { type: "button", onclick: () => onSort(one.sort) }, t(one.key), sorted ? (sorted === "ascending" ? " ▲" : " ▼") : "")
      : t(one.key);
    return h("th", { scope: "col", "aria-sort": sorted }, head);
  });
  const body = rows.map((row) => h("tr", {}, columns.map((one) => h("td", { class: one.number ? "number" : null }, one.shown(row)))));
  const empty = rows.length ? null : h("tr", {}, h("td", { colspan: columns.length, class: "soft" }, t("nothing")));
  return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body, empty)));
}
export function facts(pairs) {
  return h("dl", {}, pairs.map(([key, value]) => [h("dt", {}, t(key)), h("dd", {}, value === "" || value == null ? missing("noSample") : value)]));
}

export function csv(name, columns, rows) {
  const lines = [columns.map((one) => t(one.key)), ...rows.map((row) => columns.map((one) => (one.csv ?? one.shown)(row)))];
  const text = lines.map((line) => line.map(csvCell).join(",")).join("\r\n");
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const anchor = h("a", { href: url, download: `${name}.csv` });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
// A cell that begins like a formula would be run by a spreadsheet.
function csvCell(value) {
  const text = value instanceof Node ? value.textContent : String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}
