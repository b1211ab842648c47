// One key: who holds it, who is next, what happened last, and why nothing moves.

import { button, called, count, el, keyed, many, name, plain, say, span, teller } from "./dom.js";
import { Failure, get, isDots, poll, query } from "./api.js";
import {
	ageColumn, changeList, crumbs, heading, kindText, leaseColumn, noteLease, panel, table, textColumn, whoColumn,
} from "./parts.js";
import { forceRelease } from "./dialogs.js";

export function key(root, route, { signal, toast }) {
	const wanted = route.rest;
	const body = el("div");
	const nothing = el("p.empty", { hidden: true });
	const state = el("p.facts");
	const values = el("dl.pairs", { hidden: true });
	const changes = changeList({
		max: 60, signal, withKey: false, only: (change) => change.key === wanted, moved: () => nudge(),
		changed: ({ up }) => say(state, up ? "live" : "not connected"),
	});

	root.append(
		crumbs("Locks"),
		heading(el("bdi.mono", name(wanted))),
		body, nothing, values,
		panel("Recent changes", state, changes.node));

	async function ask() {
		if (!isDots(wanted)) return get(`/v1/locks/${encodeURIComponent(wanted)}`, signal);
		const { locks } = await get(query("/v1/locks", { prefix: wanted, limit: 2 }), signal);
		const own = locks.filter((lock) => lock.key === wanted);
		if (!own.length) throw new Failure(404, "not_found");
		return { key: wanted, locks: own };
	}

	const sync = keyed(body, () => lockSection(signal, async ({ lock, holder }) => {
		if (!await forceRelease({ lock, holder })) return;
		toast(`Released: ${plain(called(holder))} no longer holds ${plain(wanted)}.`);
		nudge();
	}));
	const tell = teller();
	const nudge = poll(async () => {
		let view;
		try {
			view = await ask();
		} catch (error) {
			if (!(error instanceof Failure) || error.status !== 404) throw error;
			view = { locks: [] };
		}
		sync(view.locks, (lock) => lock.kind);
		const rest = showValues(values, view);
		nothing.hidden = view.locks.length > 0 || rest > 0;
		say(nothing, wanted.includes("\ufffd")
			? "Nothing found: a name with bytes that are no text can not be asked for from here."
			: "Nothing is known under this name right now.");
		const now = view.locks.map((lock) => lock.holders.map((h) => plain(called(h))).join(", ") || "nobody").join("; ");
		tell(`Held by ${now || "nobody"}`);
	}, 1000, signal);

	changes.start(wanted);
}

function lockSection(signal, release) {
	const title = el("h2");
	const number = el("p.facts");
	const why = el("p.reason");
	const holders = table("Holders", [
		whoColumn("Holder", "keys", ({ holder, lock }) => ({
			...holder, note: holder.leader ? "leader" : lock.kind === "rwlock" ? (holder.writer ? "writes" : "reads") : "",
		})),
		ageColumn("Held for", ({ holder }) => holder.held_ms),
		leaseColumn(({ lease }) => lease),
		textColumn("Fence", "num fence", ({ holder }) => holder.fence),
		textColumn("Session", "num id", ({ holder }) => holder.session),
		{ label: "Action", cls: "end", bare: true, cell(td) {
			let current;
			const end = button("Force-release…", () => release(current), "button.danger");
			td.append(end);
			return (item) => {
				current = item;
				end.setAttribute("aria-label", `Force-release the hold of ${plain(called(item.holder))}`);
			};
		} },
	], "Nobody holds it.", signal);
	const queue = table("Queue, in order", [
		textColumn("Place", "place", ({ place }) => count(place)),
		whoColumn("Waiter", "keys", ({ waiter, lock }) => ({
			...waiter, note: lock.kind === "rwlock" ? (waiter.writer ? "wants to write" : "wants to read") : "",
		})),
		ageColumn("Waiting for", ({ waiter }) => waiter.waiting_ms),
		textColumn("Session", "num id", ({ waiter }) => waiter.session),
	], "Nobody waits.", signal);
	const more = el("p.empty", { hidden: true });
	const queueTitle = el("h3");
	const node = panel(title, number, why, el("h3", "Holders"), holders.node, queueTitle, queue.node, more);
	return {
		node,
		set(lock) {
			say(title, kindText(lock));
			node.setAttribute("aria-label", kindText(lock));
			say(number, `revision ${lock.revision}`);
			const now = performance.now();
			const held = lock.holders.map((holder) => ({ lock, holder, lease: noteLease(lock.key, holder, now) }));
			const seen = new Map();
			holders.set(held, ({ holder }) => holder.fence);
			queue.set(lock.queue.map((waiter, index) => {
				// A session may stand in the queue more than once.
				const times = (seen.get(waiter.session) ?? 0) + 1;
				seen.set(waiter.session, times);
				return { lock, waiter, place: index + 1, id: `${waiter.session}.${times}` };
			}), ({ id }) => id);
			say(queueTitle, lock.waiters_total ? `Queue: ${count(lock.waiters_total)}` : "Queue");
			const hidden = lock.waiters_total - lock.queue.length + lock.holders_total - lock.holders.length;
			more.hidden = hidden <= 0;
			say(more, `${count(hidden)} more are not shown.`);
			why.replaceChildren(...diagnosis(lock, held, now));
		},
	};
}

/** The state of a lock in a sentence or two, with what its holders did while somebody looked. */
function diagnosis(lock, held, now) {
	const waits = lock.waiters_total
		? `${many(lock.waiters_total, "waits", "wait")}, the first for ${span(lock.queue[0]?.waiting_ms ?? 0)}.`
		: "Nobody waits.";
	if (!held.length) return [`It is free. ${waits}`];
	if (held.length > 1 || lock.kind === "semaphore") {
		const room = lock.limit ? ` of ${count(lock.limit)}` : "";
		return [`${count(lock.holders_total)}${room} hold it. ${waits}`];
	}
	const [{ holder, lease }] = held;
	const client = el("b", el("bdi", name(called(holder))));
	let renewal = "";
	if (lease.renewedAt !== null) renewal = ` It renewed its lease ${span(now - lease.renewedAt)} ago: it is alive.`;
	else if (now - lease.seenAt > 5000) {
		renewal = ` Not renewed in the ${span(now - lease.seenAt)} you have been looking; it passes on in ` +
			`${span(holder.lease_left_ms)} unless it is.`;
	}
	return ["Held by ", client, ` for ${span(holder.held_ms)}. ${waits}${renewal}`];
}

/** What else has this name: a counter, a value, a list, a barrier. */
function showValues(node, view) {
	const found = ["counter", "kv", "list", "barrier"].filter((kind) => view[kind]);
	node.hidden = !found.length;
	node.replaceChildren(...found.flatMap((kind) => {
		const facts = Object.entries(view[kind]).filter(([what, fact]) => fact !== null && what !== "value_s");
		const text = facts.map(([what, fact]) =>
			(what.endsWith("_ms") ? `${what.slice(0, -3)} ${span(fact)}` : `${what} ${fact}`));
		return [el("dt", kind), el("dd", text.join(" · ").replaceAll("_", " "))];
	}));
	return found.length;
}
