// Routing, refreshing, language and the token: the address holds everything that a view depends on.

import { ApiError, h, setTexts, setToken, t } from "./parts.js";
import { PAGES, render } from "./pages.js";

const EVERY_MS = 15000;
const EXPLANATION_EVERY_MS = 60000; // costs the server more than a list
const main = document.getElementById("main");
const state = document.getElementById("state");
let paused = false;
let turn = 0; // of the view that was asked for last: an older answer that comes late is dropped
let timer = 0;

function where() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page = "", ...parts] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { page: PAGES.includes(page) ? page : "overview", parts, query: Object.fromEntries(new URLSearchParams(search)) };
}
function go(page, query) {
  const kept = Object.entries(query).filter(([, value]) => value !== "");
  const hash = `#/${page}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
  if (location.hash === hash) show(); else location.hash = hash;
}

function menu(current) {
  const links = PAGES.map((page) => h("a", { href: `#/${page}`, "aria-current": page === current ? "page" : null }, t(page)));
  document.getElementById("pages").replaceChildren(...links);
  const other = document.documentElement.lang === "zh" ? "en" : "zh";
  document.getElementById("tools").replaceChildren(
    h("button", { type: "button", "aria-pressed": String(paused), onclick: () => { paused = !paused; show(); } }, t(paused ? "resume" : "pause")), " ",
    h("button", { type: "button", onclick: () => start(other) }, t("language")));
  document.getElementById("skip").textContent = t("skip");
}
function say(text, bad = false) {
  state.textContent = text;
  state.className = bad ? "bad" : "";
}
function askToken(message) {
  const field = h("input", { type: "password", name: "token", autocomplete: "off", required: true });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); setToken(field.value.trim()); show(); } },
    h("label", {}, t("token"), field), h("button", { type: "submit" }, t("signIn")));
  main.replaceChildren(h("h1", {}, t("signIn")), h("p", {}, message), h("p", { class: "soft" }, t("tokenHelp")), form);
}

async function show({ fresh = true } = {}) {
  clearTimeout(timer);
  const mine = ++turn;
  const { page, parts, query } = where();
  menu(page);
  document.title = `${t(page)} – HAMi`;
  try {
    const elements = await render(page, parts, query, (next) => go([page, ...parts.map(encodeURIComponent)].join("/"), next));
    if (mine !== turn) return;
    const scroll = window.scrollY;
    main.replaceChildren(...elements.flat(Infinity).filter((one) => one != null && one !== false));
    if (!fresh) window.scrollTo(0, scroll);
    say(`${t("updated")} ${new Date().toLocaleTimeString()}`);
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof ApiError && error.status === 401) { askToken(error.message); say(""); return; }
    say(`${t("failed")}: ${error.message}`, true);
    if (fresh) main.replaceChildren(h("p", { class: "note" }, error.message));
  }
  const typing = () => main.contains(document.activeElement) && /INPUT|SELECT/.test(document.activeElement.tagName);
  const again = () => { if (paused || typing() || document.hidden) timer = setTimeout(again, 1000); else show({ fresh: false }); };
  timer = setTimeout(again, page === "pending" && parts.length ? EXPLANATION_EVERY_MS : EVERY_MS);
}

async function texts(language) { return (await fetch(`/static/texts.${language}.json`)).json(); }
async function start(language) {
  const [chosen, english] = await Promise.all([texts(language), texts("en")]);
  setTexts(chosen, english);
  document.documentElement.lang = language;
  await show();
}

window.addEventListener("hashchange", () => { show(); main.focus(); });
start((navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en");
