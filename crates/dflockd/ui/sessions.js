// Who is connected, and what each of them holds and waits for.

import { button, called, count, el, many, name, say } from "./dom.js";
import { get, poll, query } from "./api.js";
import {
	ageColumn, crumbs, heading, keyColumn, leaseColumn, noteLease, pager, panel, searchField, table, textColumn, toolbar,
	whoColumn,
} from "./parts.js";
import { endSession } from "./dialogs.js";

const PAGE = 200;
const APIS = { line: "line protocol", http: "HTTP", grpc: "gRPC" };
// Without an API its client speaks to another member, or to nobody now.
const apiName = (session) => APIS[session.api] ?? "elsewhere";

export function sessions(root, _route, { signal }) {
	let loaded = [];
	let next = null;
	const { input, node: field } = searchField("Find a client");
	const busy = el("input", { type: "checkbox" });
	const found = el("p.sub", { role: "status" });
	const list = table("Sessions", [
		whoColumn("Client", "keys", (session) => ({ session: session.id, client: session.client, note: apiName(session) })),
		textColumn("Holds", "num", (session) => figure(session.holds)),
		textColumn("Waits", "num", (session) => figure(session.waits)),
		textColumn("Subscriptions", "num", (session) => figure(session.subscriptions)),
		textColumn("Session", "num id", (session) => session.id),
	], "No session matches.", signal);
	const pages = pager(() => nudge());
	root.append(heading("Sessions", found),
		toolbar(null, field, el("label.check", busy, "only those that hold or wait")), list.node, pages.node);

	function show() {
		const text = input.value.trim();
		const shown = loaded.filter((session) =>
			(!text || session.client.includes(text) || session.id === text) &&
			(!busy.checked || session.holds + session.waits > 0));
		list.set(shown, (session) => session.id);
		say(found, `${many(shown.length, "session")}${pages.set(next)}`);
	}
	input.addEventListener("input", show);
	busy.addEventListener("change", show);
	input.addEventListener("keydown", (event) => {
		if (event.key !== "ArrowDown" && event.key !== "Enter") return;
		list.focusFirst();
		event.preventDefault();
	});
	const nudge = poll(async () => {
		const { after } = pages;
		const answer = await get(query("/v1/sessions", { after, limit: PAGE }), signal);
		if (after !== pages.after) return;
		({ sessions: loaded, next } = answer);
		show();
	}, 2000, signal);
}

const figure = (number) => (number ? count(number) : "–");

// Locks that are looked through for those of one session.
const SCANNED_MAX = 5000;

export function session(root, route, { signal, toast }) {
	const id = route.rest;
	const title = el("bdi", `session ${id}`);
	const about = el("p.reason", "Looking…");
	let known;
	const end = button("End session…", async () => {
		if (!await endSession(known)) return;
		toast(`Ended session ${id}.`);
		nudge();
	}, "button.danger");
	end.hidden = true;
	const holds = table("Holds", [
		keyColumn(),
		ageColumn("Held for", ({ holder }) => holder.held_ms),
		leaseColumn(({ key, holder }) => noteLease(key, holder)),
		textColumn("Waiting behind", "num", (item) => figure(item.waiters_total)),
		textColumn("Fence", "num fence", ({ holder }) => holder.fence),
	], "Nothing.", signal);
	const waits = table("Waits", [
		keyColumn(),
		textColumn("Place", "num", ({ place, waiters_total }) => `${count(place)} of ${count(waiters_total)}`),
		ageColumn("Waiting for", ({ waiter }) => waiter.waiting_ms),
	], "Nothing.", signal);
	const bound = el("p.empty", { hidden: true });
	root.append(
		crumbs("Sessions"), heading(title, end), about,
		panel("Holds", null, holds.node), panel("Waits", null, waits.node), bound);

	const nudge = poll(async () => {
		const after = /^[1-9]\d{0,19}$/.test(id) ? String(BigInt(id) - 1n) : "";
		const { sessions: [first] } = await get(query("/v1/sessions", { after, limit: 1 }), signal);
		const mine = first?.id === id ? first : null;
		if (mine) {
			known = mine;
			title.replaceChildren(...name(called(mine)));
			say(about, `Session ${id} (${apiName(mine)}): ${many(mine.holds, "hold")}, ${many(mine.waits, "wait")}, ` +
				`${many(mine.subscriptions, "subscription")}.`);
		} else say(about, "There is no such session now; it has ended.");
		end.hidden = !mine;
		const { held, queued, all } = mine ? await scan(id, mine, signal) : { held: [], queued: [], all: true };
		holds.set(held, (item) => `${item.kind}\n${item.holder.fence}\n${item.key}`);
		waits.set(queued, (item) => `${item.kind}\n${item.place}\n${item.key}`);
		bound.hidden = all;
		say(bound, `Looked through the first ${count(SCANNED_MAX)} locks only.`);
	}, 3000, signal);
}

/** Where a session stands, out of the list of all locks; ends early when all is found. */
async function scan(id, { holds, waits }, signal) {
	const held = [];
	const queued = [];
	let after = "";
	for (let seen = 0; seen < SCANNED_MAX && (held.length < holds || queued.length < waits);) {
		const only = holds ? "held" : "waiting";
		const { locks, next } = await get(query("/v1/locks", { after, limit: 1000, only }), signal);
		for (const lock of locks) {
			for (const holder of lock.holders) if (holder.session === id) held.push({ ...lock, holder });
			lock.queue.forEach((waiter, index) => {
				if (waiter.session === id) queued.push({ ...lock, waiter, place: index + 1 });
			});
		}
		seen += locks.length;
		if (next === null) return { held, queued, all: true };
		after = next;
	}
	return { held, queued, all: held.length >= holds && queued.length >= waits };
}
