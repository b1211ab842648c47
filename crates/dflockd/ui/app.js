// The page: routes, theme, keys, and how the connection to the server stands.

import { announce, button, el, icon, many, plain, say, span } from "./dom.js";
import { get, link, poll, session, trouble, wake } from "./api.js";
import { contention, note, overview } from "./overview.js";
import { events } from "./events.js";
import { help, signIn } from "./dialogs.js";
import { key } from "./key.js";
import { locks } from "./locks.js";
import { session as oneSession, sessions } from "./sessions.js";

const VIEWS = {
	"": { view: overview, title: "Overview" },
	locks: { view: locks, title: "Locks" },
	contention: { view: contention, title: "Contention" },
	sessions: { view: sessions, title: "Sessions" },
	events: { view: events, title: "Events" },
	session: { view: oneSession, up: "sessions" },
	key: { view: key, up: "locks" },
};

const byId = (id) => document.getElementById(id);
const main = byId("main");
const news = new EventTarget();
let server = null;
let current = null;
let latestView = null;

/** What the part of the address after `#` means; anything strange is the overview. */
function routeOf(hash) {
	const [path, search = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
	const at = path.indexOf("/");
	const kind = at < 0 ? path : path.slice(0, at);
	let rest = at < 0 ? "" : path.slice(at + 1);
	try { rest = decodeURIComponent(rest); } catch { /* taken as it is */ }
	const known = Object.hasOwn(VIEWS, kind) && (rest !== "" || !VIEWS[kind].up);
	return { kind: known ? kind : "", rest, query: new URLSearchParams(search) };
}

function show(focus = true) {
	const route = routeOf(location.hash);
	latestView = VIEWS[route.kind];
	current?.abort();
	current = new AbortController();
	for (const tab of byId("nav").children) {
		tab.ariaCurrent = tab.hash === `#/${latestView.up ?? route.kind}` ? "page" : null;
	}
	const root = el(`div.view.v-${route.kind || "overview"}`);
	main.replaceChildren(root);
	latestView.view(root, route, { signal: current.signal, news, toast });
	document.title = `${latestView.title ?? plain(route.rest)} · dflockd ${server?.node ?? ""}`.trim();
	scrollTo({ top: 0 });
	if (focus) root.querySelector("h1")?.focus({ preventScroll: true });
}

function toast(text) {
	document.querySelector(".toast")?.remove();
	const node = el("p.toast", text);
	document.body.append(node);
	announce(text);
	setTimeout(() => node.remove(), 6000);
}

// How it stands with the server, in a word at the top and in a sentence when something is wrong.

const left = el("span.left");
const retry = button("Try now", wake);
const enter = button("Sign in", signIn);
let shown = null;

function stand() {
	const { failure } = link;
	const [word, sentence] = failure ? trouble(failure) : link.answeredAt ? ["live", ""] : ["connecting", ""];
	const pill = byId("state");
	say(pill, word);
	pill.className = `pill ${failure ? "bad" : link.answeredAt ? "good" : ""}`;
	document.body.classList.toggle("stale", failure !== null);
	byId("out").hidden = !session.signedIn;
	const notice = byId("notice");
	notice.hidden = !failure;
	const asked = failure?.status === 401;
	// Built anew only when the trouble changes, so that a reader hears it once.
	const id = failure && `${word} ${sentence} ${failure.leader}`;
	if (id && id !== shown) {
		const to = failure.leader && el("a", { href: `//${failure.leader}/ui/` }, `Open the page of ${failure.leader}`);
		notice.replaceChildren(el("span", sentence), ...(to ? [to] : []), ...(asked ? [enter] : [left, retry]));
		if (asked) signIn();
	}
	shown = id;
	countDown();
}

function countDown() {
	if (!link.failure || link.nextAt === Infinity) return say(left, "");
	const ms = link.nextAt - performance.now();
	const age = link.answeredAt ? `What is shown is ${span(performance.now() - link.answeredAt)} old. ` : "";
	say(left, ms > 500 ? `${age}Next try in ${span(ms)}.` : `${age}Trying…`);
}

link.addEventListener("change", stand);
setInterval(countDown, 500);
byId("out").append(icon("out"));
byId("out").addEventListener("click", session.signOut);

function footer() {
	say(byId("node"), server.node ?? "");
	say(byId("foot"), `dflockd ${server.version} · ${server.mode === "memory" ? "in memory" : server.mode} · ` +
		`up ${span(server.uptime_ms)} · ${many(server.lock_keys, "lock key")} · ${many(server.value_keys, "value")} · ` +
		many(server.http_sessions, "HTTP session"));
}

// Theme: as the system, or as chosen here.

const THEMES = ["auto", "light", "dark"];
const theme = () => document.documentElement.dataset.theme ?? "auto";

function turnTheme() {
	const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
	if (next === "auto") delete document.documentElement.dataset.theme;
	else document.documentElement.dataset.theme = next;
	try { localStorage.setItem("dflockd.theme", next); } catch { /* then it lasts until the next reload */ }
	labelTheme();
}

function labelTheme() {
	const label = `Theme: ${theme() === "auto" ? "as the system" : theme()}`;
	Object.assign(byId("theme"), { ariaLabel: label, title: `${label} (t)` }).replaceChildren(icon(theme()));
}

byId("theme").addEventListener("click", turnTheme);
byId("help").addEventListener("click", help);
byId("skip").addEventListener("click", () => main.focus());

// Keys.

function search() {
	const field = byId("search");
	if (field) return field.select();
	location.hash = "#/locks";
	addEventListener("hashchange", () => byId("search")?.focus(), { once: true });
}

addEventListener("keydown", (event) => {
	if (event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
	const typing = event.target.closest("input:not([type=radio], [type=checkbox]), select, textarea");
	if (event.key === "Escape") {
		if (typing) typing.blur();
		else if (latestView.up) location.hash = `#/${latestView.up}`;
		return;
	}
	if (typing) return;
	const tab = byId("nav").children[Number(event.key) - 1];
	if (event.key === "/") search();
	else if (event.key === "?") help();
	else if (event.key === "t") turnTheme();
	else if (event.key === "p" && byId("pause")) byId("pause").click();
	else if (tab) location.hash = tab.hash;
	else return;
	event.preventDefault();
});

byId("nav").append(...Object.entries(VIEWS).filter(([, { title: label }]) => label).map(([kind, { title: label }]) =>
	el("a", { href: `#/${kind}` }, icon(label.toLowerCase()), label)));
labelTheme();
addEventListener("hashchange", () => show());
poll(async () => {
	server = await get("/v1/overview");
	note(server);
	footer();
	news.dispatchEvent(new Event("overview"));
}, 1000, new AbortController().signal);
show(false);
