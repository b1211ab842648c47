// What several views are made of: tables, sparklines, leases.

import {
	announce, button, called, count, el, EXACT, icon, keyed, keyLink, name, plain, say, sessionHref, span, svg,
} from "./dom.js";
import { follow, get, query, ticking } from "./api.js";

/**
 * A table. `cell(td)` of a column builds a cell once and returns what fills it with an item, and perhaps has a
 * `beat(now)` for what grows older. On a narrow screen rows become cards; the roles keep it a table for readers.
 */
export function table(caption, columns, empty, signal) {
	const of = (tag, { cls }) => [tag, ...cls.split(" ")].join(".");
	const body = el("tbody", { role: "rowgroup" });
	const head = el("tr", { role: "row" }, columns.map((column) =>
		el(of("th", column), { role: "columnheader", scope: "col" },
			column.bare ? el("span.away", column.label) : column.label)));
	const none = el("p.empty", { hidden: true }, empty);
	const grid = el("table", { role: "table" },
		el("caption.away", caption), el("thead", { role: "rowgroup" }, head), body);
	let rows = new Map();
	const sync = keyed(body, () => {
		const node = el("tr", { role: "row" });
		const cells = columns.map((column) => {
			const cell = el(of("td", column), { role: "cell", "data-label": column.bare ? "" : column.label });
			node.append(cell);
			return column.cell(cell);
		});
		const beat = (now) => cells.forEach((set) => set.beat?.(now));
		return { node, beat, set: (item) => cells.forEach((set) => set(item)) };
	});
	ticking((now) => rows.forEach((row) => row.beat(now)), signal);
	body.addEventListener("keydown", (event) => {
		const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
		const row = event.target.closest("tr");
		if (!step || !row || event.altKey || event.ctrlKey || event.metaKey) return;
		row[step]?.querySelector("a, button")?.focus();
		event.preventDefault();
	});
	return {
		node: el("div.table", grid, none),
		set(items, idOf) {
			none.hidden = items.length > 0;
			grid.hidden = items.length === 0;
			rows = sync(items, idOf);
		},
		focusFirst() { body.querySelector("a, button")?.focus(); },
	};
}

export const textColumn = (label, cls, text) => ({ label, cls, cell: (td) => (item) => say(td, text(item)) });

/** A key and its kind. */
export const keyColumn = () => ({
	label: "Key", cls: "keys",
	cell(td) {
		let known;
		const tag = el("span.tag");
		return (item) => {
			if (known !== item.key) td.replaceChildren(keyLink((known = item.key)), tag);
			say(tag, kindText(item));
		};
	},
});

export function kindText(lock) {
	if (lock.kind === "semaphore") return lock.limit ? `semaphore of ${count(lock.limit)}` : "semaphore";
	return lock.kind;
}

/** Who: the name that a client gave itself, leading to its session. `pick` gives `{ session, client, note }`. */
export const whoColumn = (label, cls, pick) => ({
	label, cls,
	cell(td) {
		const link = el("a.client");
		const tag = el("span.tag");
		td.append(link, tag);
		return (item) => {
			const it = pick(item);
			link.hidden = !it.session;
			say(tag, it.note ?? "");
			const title = it.session && `${plain(called(it))} (session ${it.session})`;
			if (!title || title === link.title) return;
			link.href = sessionHref(it.session);
			link.title = title;
			link.replaceChildren(el("bdi", name(called(it))));
		};
	},
});

/** How old something is; `pick` gives its age now, or undefined. */
export const ageColumn = (label, pick) => ({
	label, cls: "num",
	cell(td) {
		let since;
		const set = (item) => {
			const age = pick(item);
			const now = performance.now();
			since = age === undefined ? undefined : now - age;
			set.beat(now);
		};
		set.beat = (now) => say(td, since === undefined ? "" : span(now - since));
		return set;
	},
});

/** What is left of a lease, as a bar; `pick` gives what `noteLease` gave, or undefined. */
export const leaseColumn = (pick) => ({
	label: "Lease left", cls: "wide",
	cell(td) {
		const bar = el("i");
		const text = el("span.left");
		const meter = el("span", { role: "meter", "aria-label": "lease left", "aria-valuemin": 0 }, bar);
		const both = el("span.lease", meter, text);
		td.append(both);
		let lease;
		const set = (item) => {
			lease = pick(item);
			set.beat(performance.now());
		};
		set.beat = (now) => {
			both.hidden = !lease;
			if (!lease) return;
			const left = Math.max(0, lease.endAt - now);
			const part = Math.min(1, left / lease.length);
			bar.style.transform = `scaleX(${part.toFixed(4)})`;
			meter.className = part < 0.25 ? "meter low" : "meter";
			meter.ariaValueMax = Math.round(lease.length / 1000);
			meter.ariaValueNow = Math.round(left / 1000);
			meter.ariaValueText = span(left);
			say(text, left > 0 ? span(left, true) : "ending");
		};
		return set;
	},
});

/** Previous and next. */
export function pager(turned) {
	let pages = [""];
	let next = null;
	const turn = (by) => {
		if (by > 0) pages.push(next);
		else pages.pop();
		announce(`Page ${pages.length}`);
		turned();
		scrollTo({ top: 0 });
	};
	const back = button("Previous", () => turn(-1));
	const on = button("Next", () => turn(1));
	const number = el("span");
	const node = el("div.pager", { hidden: true }, back, number, on);
	return {
		node,
		get after() { return pages.at(-1); },
		reset() { pages = [""]; },
		/** Takes the beginning of the next page; says which page this is, unless it is the only one. */
		set(following) {
			next = following;
			const more = next !== null || pages.length > 1;
			node.hidden = !more;
			back.disabled = pages.length === 1;
			on.disabled = next === null;
			say(number, `page ${count(pages.length)}`);
			return more ? ` on page ${count(pages.length)}` : "";
		},
	};
}

// What was seen of each lease, because a server tells only what is left: by key and fence.
const leases = new Map();
const LEASES_MAX = 5000;
const USUAL_MS = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600].map((seconds) => seconds * 1000);

/** Takes note of a hold: when its lease ends, how long it probably is, whether it was renewed meanwhile. */
export function noteLease(key, holder, now = performance.now()) {
	const id = `${holder.fence}\n${key}`;
	let lease = leases.get(id);
	if (!lease) {
		if (leases.size >= LEASES_MAX) leases.delete(leases.keys().next().value);
		leases.set(id, (lease = { endAt: 0, longest: 0, seenAt: now, renewedAt: null }));
	}
	const endAt = now + holder.lease_left_ms;
	if (lease.endAt && endAt > lease.endAt + 900) lease.renewedAt = now;
	lease.endAt = endAt;
	lease.longest = Math.max(lease.longest, holder.lease_left_ms);
	// The lease is at least as long as what was ever left of it, at most as long as held and left together; between
	// these it is taken to be a usual length.
	const usual = USUAL_MS.find((ms) => ms >= lease.longest) ?? lease.longest;
	lease.length = Math.max(lease.longest, Math.min(usual, holder.held_ms + holder.lease_left_ms), 1);
	return lease;
}

/** A line through the last values, lowest at 0. */
export function sparkline(label) {
	const area = svg("path", { class: "area" });
	const line = svg("path", { class: "line" });
	const node = svg("svg", { viewBox: "0 0 100 32", preserveAspectRatio: "none", role: "img" }, area, line);
	// So few values do not look like the whole past.
	const places = 30;
	return {
		node,
		set(values, text) {
			const top = 1.15 * Math.max(...values, 1e-9);
			const step = 100 / (Math.max(values.length, places) - 1);
			const points = values.map((value, index) => {
				const x = 100 - (values.length - 1 - index) * step;
				return `${x.toFixed(2)},${(30.5 - (value / top) * 28).toFixed(2)}`;
			});
			const path = points.join("L");
			line.setAttribute("d", points.length > 1 ? `M${path}` : "");
			area.setAttribute("d", points.length > 1 ? `M${100 - (points.length - 1) * step},32L${path}L100,32Z` : "");
			node.setAttribute("aria-label", `${label}: ${text}`);
			node.style.visibility = values.some(Boolean) ? "" : "hidden";
		},
	};
}

/** A list of changes, newest first, that never grows beyond `max`. `changed` is told of all, `moved` of news. */
export function changeList({ max, signal, withKey = true, only = () => true, changed = () => {}, moved = () => {} }) {
	const body = el("ol.events");
	const none = el("p.empty");
	let follower = null;
	let waiting = [];
	const list = {
		add,
		node: el("div", none, body),
		up: false, total: 0, paused: false, since: 0,
		clear() {
			body.replaceChildren();
			say(none, "No change yet.");
			none.hidden = false;
			list.total = 0;
		},
		flush() {
			if (list.paused || !waiting.length) return;
			add(waiting.splice(0));
			list.since = 0;
			changed(list);
			moved();
		},
		async start(pattern) {
			follower?.abort();
			follower = new AbortController();
			const own = AbortSignal.any([signal, follower.signal]);
			const refuse = () => {
				say(none, "This is no pattern: * and > stand alone between dots, and > comes last.");
				list.up = false;
				changed(list, true);
			};
			waiting = [];
			list.since = 0;
			list.clear();
			let past = [];
			try {
				({ events: past } = await get(query("/v1/events", { pattern, limit: Math.min(max, 100) }), own));
			} catch (error) {
				if (own.aborted) return;
				if (error.status === 400) return refuse();
			}
			add(past.filter(only));
			changed(list);
			follow(pattern, past.at(-1)?.revision, (change) => {
				if (!change.gap && !only(change)) return;
				list.since += 1;
				waiting.push({ ...change, at: new Date() });
				// What nobody can read at this pace is counted, not kept.
				if (waiting.length > max) waiting.splice(0, waiting.length - max, { gap: true });
				if (list.paused) changed(list);
			}, (up, failure) => {
				list.up = up;
				if (failure?.status === 400) refuse();
				else changed(list);
			}, own);
		},
	};
	function add(changes) {
		if (!changes.length) return;
		none.hidden = true;
		list.total += changes.length;
		body.prepend(...changes.slice(-max).reverse().map((change) => changeRow(change, withKey)));
		while (body.childElementCount > max) body.lastChild.remove();
	}
	list.clear();
	ticking(list.flush, signal, 200);
	return list;
}

const KINDS = { acquire: "good", elect: "good", release: "calm", resign: "calm" };

function changeRow(change, withKey) {
	if (change.gap) return el("li.gap", "Some changes are missing here.");
	return el("li",
		el("time", change.at ? change.at.toTimeString().slice(0, 8) : "earlier"),
		el(`span.event.${KINDS[change.event] ?? "other"}`, change.event),
		withKey ? keyLink(change.key) : null,
		el("span.rev", change.revision));
}

export const heading = (title, ...rest) => el("div.heading", el("h1", { tabindex: -1 }, title), ...rest);

/** A part of a view with a heading of its own. */
export const panel = (title, beside, ...rest) =>
	el("section.panel", el("header", title.append ? title : el("h2", title), beside), ...rest);

export const crumbs = (view) => el("p.crumbs", el("a", { href: `#/${view.toLowerCase()}` }, view));

/** The field that `/` leads to. */
export function searchField(label, value = "") {
	const input = el("input", {
		type: "search", id: "search", value, placeholder: `${label}   ( / )`, "aria-label": label, ...EXACT,
	});
	return { input, node: el("label.search", icon("search"), input) };
}

export const toolbar = (submit, ...children) =>
	el("form.row", { role: "search", onsubmit: (event) => { event.preventDefault(); submit?.(); } }, children);
