// The first look: does it move, and if not, where does it stand?

import { called, count, el, keyLink, many, name, rate, say, sessionHref, span, teller } from "./dom.js";
import { get, isDots, poll, query } from "./api.js";
import { changeList, heading, keyColumn, panel, sparkline, table, textColumn } from "./parts.js";

const SAMPLES_MAX = 120;

// Kept over changes of the view: the past of the sparklines.
const past = new Map();
let latest = null;

// What is rare shows its total as well.
const TILES = [
	{ label: "Held", value: (o) => o.held, tone: ".good" },
	{ label: "Waiting", value: (o) => o.waiting, tone: ".warm" },
	{ label: "Connections", value: (o) => o.connections },
	{ label: "Requests", total: "requests" },
	{ label: "Grants", total: "grants" },
	{ label: "Releases", total: "releases" },
	{ label: "Timeouts", total: "timeouts", tone: ".warm", rare: true },
	{ label: "Expiries", total: "expiries", tone: ".warm", rare: true },
];

/** Takes the latest numbers; rates come from two totals and the server's own clock. */
export function note(overview) {
	if (latest && overview.uptime_ms < latest.uptime_ms) {
		past.clear();
		latest = null;
	}
	const seconds = latest ? (overview.uptime_ms - latest.uptime_ms) / 1000 : 0;
	if (latest && seconds <= 0) return;
	for (const { label, value, total } of TILES) {
		if (total && !latest) continue;
		const values = past.get(label) ?? [];
		values.push(value ? value(overview) : Math.max(0, overview.totals[total] - latest.totals[total]) / seconds);
		if (values.length > SAMPLES_MAX) values.shift();
		past.set(label, values);
	}
	latest = overview;
}

export function overview(root, _route, { signal, news }) {
	const verdict = el("p.verdict", "Looking…");
	const reason = el("p.reason");
	const tiles = TILES.map((tile) => {
		const value = el("b");
		const small = el("small");
		const spark = sparkline(tile.label);
		const node = el(`section.tile${tile.tone ?? ""}`, { "aria-label": tile.label },
			el("h2", tile.label), el("p", value, small), spark.node);
		return { tile, node, value, small, spark };
	});
	const queues = table("Most contended", contentionColumns, "Nobody waits for a lock.", signal);
	const recent = changeList({ max: 8, signal });
	const cluster = clusterPanel(signal);

	root.append(
		heading("Overview"),
		el("section.lead", { "aria-label": "In short" }, verdict, reason),
		el("div.tiles", tiles.map(({ node }) => node)),
		el("div.pair",
			panel("Most contended", el("a", { href: "#/contention" }, "all"), queues.node),
			panel("Latest changes", el("a", { href: "#/events" }, "all"), recent.node)),
		cluster.node);

	const show = () => {
		if (!latest) return;
		for (const { tile, value, small, spark } of tiles) {
			const values = past.get(tile.label) ?? [];
			const now = values.at(-1);
			const unit = tile.total ? "/s" : "";
			const text = now === undefined ? "–" : unit ? rate(now) : count(now);
			say(value, text);
			say(small, tile.rare ? `${unit} · ${count(latest.totals[tile.total])} in all` : unit);
			spark.set(values, text + unit);
		}
		cluster.set(latest);
	};
	news.addEventListener("overview", show, { signal });
	show();

	const tell = teller();
	poll(async () => {
		const keys = await contended(queues, 6, signal);
		const worst = keys.reduce((a, b) => (b.longest_wait_ms > (a?.longest_wait_ms ?? -1) ? b : a), null);
		if (!worst) {
			say(verdict, "Nobody waits.");
			say(reason, latest ? `${many(latest.held, "hold")} on ${many(latest.lock_keys, "key")}.` : "");
			return tell("Nobody waits");
		}
		let lock;
		if (!isDots(worst.key)) {
			const view = await get(`/v1/locks/${encodeURIComponent(worst.key)}`, signal).catch(gone);
			lock = view?.locks.find(({ kind }) => kind === worst.kind);
		}
		const waiting = many(Math.max(latest?.waiting ?? 0, worst.waiters), "waits", "wait");
		say(verdict, `${waiting}, the longest for ${span(worst.longest_wait_ms)}.`);
		const holder = lock?.holders[0];
		const others = lock?.holders_total > 1 ? ` and ${many(lock.holders_total - 1, "other")}` : "";
		reason.replaceChildren(keyLink(worst.key), ...(holder
			? [" is held by ", el("a.client", { href: sessionHref(holder.session) }, el("bdi", name(called(holder)))),
				`${others} for ${span(holder.held_ms)}; the lease has ${span(holder.lease_left_ms)} left.`]
			: [" is free at the moment."]));
		tell(waiting);
	}, 1500, signal);

	let seen;
	poll(async () => {
		// Not a stream: whoever only looks must not cost a busy server much.
		const { events } = await get("/v1/events?limit=8", signal);
		const news = events.slice(events.findIndex(({ revision }) => revision === seen) + 1);
		recent.add(news.map((change) => ({ ...change, at: seen && new Date() })));
		seen = events.at(-1)?.revision ?? "";
	}, 1000, signal);
}

const gone = (failure) => {
	if (failure.status === 404) return null;
	throw failure;
};

const contentionColumns = [
	keyColumn(),
	{ label: "Waiting", cls: "wide", cell(td) {
		const bar = el("i");
		const number = el("b");
		td.append(el("span.gauge", el("span.bar", { "aria-hidden": "true" }, bar), number));
		return ({ waiters, most }) => {
			bar.style.transform = `scaleX(${(waiters / most).toFixed(3)})`;
			say(number, count(waiters));
		};
	} },
	textColumn("Longest wait", "num", (item) => span(item.longest_wait_ms)),
];

/** The keys with the longest queues, shown in a table. */
async function contended(list, limit, signal) {
	const { keys } = await get(query("/v1/contention", { limit }), signal);
	const most = Math.max(1, ...keys.map((key) => key.waiters));
	list.set(keys.map((key) => ({ ...key, most })), (key) => `${key.kind}\n${key.key}`);
	return keys;
}

export function contention(root, _route, { signal }) {
	const list = table("Keys with the most waiters",
		[...contentionColumns, textColumn("Holders", "num", (item) => count(item.holders))],
		"Nobody waits for a lock.", signal);
	root.append(heading("Contention", el("p.sub", "Keys with the most waiters first.")), list.node);
	poll(() => contended(list, 100, signal), 1500, signal);
}

function clusterPanel(signal) {
	const facts = el("p.facts");
	const list = table("Members of the cluster", [
		{ label: "Member", cls: "", cell(td) {
			const node = el("b.mono");
			const here = el("span.tag");
			td.append(node, here);
			return (item) => { say(node, item.node_id); say(here, item.here ? "this one" : ""); };
		} },
		{ label: "Role", cls: "", cell: (td) => (item) => {
			say(td, item.role);
			td.classList.toggle("strong", item.role === "leader");
		} },
		textColumn("Clients", "mono", (item) => item.client_addr),
		textColumn("Peers", "mono", (item) => item.peer_addr),
		textColumn("Behind by", "num", ({ lag }) => (lag === undefined ? "–" : many(lag, "entry", "entries"))),
	], "No members are known.", signal);
	const node = panel("Cluster", facts, list.node);
	node.hidden = true;
	return {
		node,
		set({ cluster }) {
			node.hidden = !cluster;
			if (!cluster) return;
			const leader = cluster.leader_id ? `leader ${cluster.leader_id}` : "no leader";
			say(facts, `${leader} · term ${count(cluster.term)} · committed ${count(cluster.commit_index)}`);
			facts.classList.toggle("bad", !cluster.leader_id);
			list.set(cluster.members.map((member) => ({ ...member, ...partOf(member, cluster) })), (member) => member.node_id);
		},
	};
}

/** What a member is in the cluster, and how far it is behind, as far as this one knows. */
function partOf({ node_id: id, lag }, cluster) {
	const here = id === cluster.node_id;
	const role = [["witness", cluster.witnesses], ["learner", cluster.learners], ["voter", cluster.voters]]
		.find(([, ids]) => ids.includes(id))?.[0] ?? "leaving";
	return {
		here,
		role: id === cluster.leader_id ? "leader" : role,
		lag: lag ?? (here ? Math.max(0, cluster.commit_index - cluster.applied_index) : undefined),
	};
}
