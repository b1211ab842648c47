// The table of locks: search, filter, pages; every row lives.

import { count, el, keyHref, many, say, span } from "./dom.js";
import { get, poll, query } from "./api.js";
import {
	ageColumn, heading, keyColumn, leaseColumn, noteLease, pager, searchField, table, textColumn, toolbar, whoColumn,
} from "./parts.js";

const PAGE = 100;
const SEARCHED = 1000;
const SHOWN = [["held", "Held"], ["waiting", "Waiting"], ["all", "All"]];

export function locks(root, route, { signal }) {
	const wanted = {
		text: route.query.get("q") ?? "",
		inside: route.query.get("in") === "contains",
		only: SHOWN.find(([value]) => value === route.query.get("only"))?.[0] ?? "held",
	};
	let asked = 0;

	const { input, node: field } = searchField("Find a key", wanted.text);
	const how = el("select", { "aria-label": "How to search" },
		el("option", { value: "prefix" }, "starts with"), el("option", { value: "contains" }, "contains"));
	how.value = wanted.inside ? "contains" : "prefix";
	const only = el("fieldset.choice", el("legend.away", "Show"),
		SHOWN.map(([value, label]) =>
			el("label", el("input", { type: "radio", name: "only", value, checked: value === wanted.only }),
				el("span", label))));
	const found = el("p.sub", { role: "status" });
	const list = table("Locks", columns, "No lock matches.", signal);
	const pages = pager(renew);

	root.append(heading("Locks", found), toolbar(null, field, how, only), list.node, pages.node);

	function renew() {
		asked += 1;
		nudge();
	}

	function change() {
		Object.assign(wanted, {
			text: input.value.trim(),
			inside: how.value === "contains",
			only: only.querySelector("input:checked").value,
		});
		pages.reset();
		const address = { q: wanted.text, in: wanted.inside ? "contains" : "", only: wanted.only };
		history.replaceState(null, "", query("#/locks", address));
		renew();
	}
	let typing = 0;
	input.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(change, 120); });
	how.addEventListener("change", change);
	only.addEventListener("change", change);
	input.addEventListener("keydown", (event) => {
		if (event.key === "Enter" && input.value.trim()) location.hash = keyHref(input.value.trim());
		else if (event.key === "ArrowDown") list.focusFirst();
		else return;
		event.preventDefault();
	});
	signal.addEventListener("abort", () => clearTimeout(typing));

	const nudge = poll(async () => {
		const question = asked;
		const { text, inside, only: some } = wanted;
		const within = inside && text !== "";
		const answer = await get(query("/v1/locks", {
			prefix: inside ? "" : text, only: some === "all" ? "" : some, after: pages.after, limit: within ? SEARCHED : PAGE,
		}), signal);
		// Meanwhile somebody typed on; the answer to the newer question is on its way.
		if (question !== asked) return;
		const all = answer.locks;
		const shown = within ? all.filter((lock) => lock.key.includes(text)) : all;
		list.set(shown, (lock) => `${lock.kind}\n${lock.key}`);
		const page = pages.set(answer.next);
		say(found, within ? `${many(shown.length, "match", "matches")} among ${many(all.length, "key")}${page}`
			: `${many(shown.length, "key")}${page}`);
	}, 1000, signal);
}

const columns = [
	keyColumn(),
	whoColumn("Holder", "people", ({ holders: [first], holders_total: total }) =>
		({ ...first, note: first ? (total > 1 ? `+ ${count(total - 1)}` : first.leader ? "leader" : "") : "free" })),
	ageColumn("Held for", (lock) => lock.holders[0]?.held_ms),
	leaseColumn((lock) => lock.holders[0] && noteLease(lock.key, lock.holders[0])),
	{ label: "Queue", cls: "num", cell(td) {
		const number = el("b");
		const first = el("small", { title: "how long the first has waited" });
		td.append(number, first);
		return (lock) => {
			td.classList.toggle("waiting", lock.waiters_total > 0);
			say(number, lock.waiters_total ? count(lock.waiters_total) : "–");
			say(first, lock.queue[0] ? span(lock.queue[0].waiting_ms) : "");
		};
	} },
	textColumn("Fence", "num fence", (lock) => lock.holders[0]?.fence ?? ""),
];
