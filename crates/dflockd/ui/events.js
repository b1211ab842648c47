// Changes as they happen.

import { announce, button, el, EXACT, many, say } from "./dom.js";
import { query } from "./api.js";
import { changeList, heading, toolbar } from "./parts.js";

export function events(root, route, { signal }) {
	const wanted = route.query.get("pattern") || ">";
	const input = el("input.mono", {
		type: "text", id: "search", value: wanted, "aria-label": "Pattern", "aria-describedby": "pattern-help", ...EXACT,
	});
	const pause = button("Pause", toggle);
	pause.id = "pause";
	const clear = button("Clear", () => { list.clear(); show(); });
	const found = el("p.sub", { role: "status" }, "connecting");
	const list = changeList({ max: 400, signal, changed: show });

	function show(_, refused) {
		say(found, refused ? "not following" : list.paused ? `paused, ${many(list.since, "change")} since`
			: list.up ? `live, ${many(list.total, "change")}` : "not connected, trying again");
	}

	function toggle() {
		list.paused = !list.paused;
		pause.setAttribute("aria-pressed", String(list.paused));
		say(pause, list.paused ? "Go on" : "Pause");
		announce(list.paused ? "Paused" : "Live");
		list.flush();
		show();
	}

	function start() {
		const pattern = input.value.trim() || ">";
		history.replaceState(null, "", query("#/events", { pattern: pattern === ">" ? "" : pattern }));
		list.start(pattern);
	}

	root.append(heading("Events", found),
		toolbar(start, el("label.search", el("span", "pattern"), input),
			el("button", { type: "submit" }, "Follow"), pause, clear),
		el("p.hint", { id: "pattern-help" }, "Words between dots: ", el("code", "*"), " is any one word, ",
			el("code", ">"), " at the end is all the rest: ", el("code", "orders.*.done"), ", ", el("code", "orders.>")),
		el("section.panel.stream", { "aria-label": "Changes, newest first" }, list.node));
	start();
}
