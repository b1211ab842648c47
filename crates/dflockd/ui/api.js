// Questions to the server: tokens, failures, patience, streams.

// Tokens live in these variables and nowhere else: a reload forgets them.
let token = null;
let adminToken = null;

export const session = {
	get signedIn() { return token !== null; },
	get isAdmin() { return adminToken !== null; },
	signIn(value) { token = value; },
	signOut() { token = null; adminToken = null; wake(); },
	beAdmin(value) { adminToken = value; },
};

/** The server said no, or nothing. */
export class Failure extends Error {
	constructor(status, code, detail = "", leader = null, wait = 0) {
		super(detail || code);
		Object.assign(this, { status, code, detail, leader, wait });
	}
}

async function ask(method, path, { body, signal }) {
	const headers = {};
	if (token !== null) headers.Authorization = `Bearer ${token}`;
	if (body) Object.assign(headers, { "Content-Type": "application/json", "X-Dflockd-Admin": adminToken });
	const used = token;
	let response;
	try {
		// Relative: a proxy may serve all this under a path of its own.
		response = await fetch(`..${path}`, {
			method, headers, signal, body: body && JSON.stringify(body),
			cache: "no-store", credentials: "omit", redirect: "error",
		});
	} catch (error) {
		if (signal?.aborted) throw error;
		// A token with characters that no header can carry is a wrong token, not a lost connection.
		if (/[^\x20-\x7e]/.test(body ? adminToken : token)) {
			token = body ? token : null;
			throw new Failure(401, body ? "admin_unauthorized" : "unauthorized");
		}
		throw new Failure(0, "unreachable");
	}
	if (response.ok) return response;
	let said = {};
	try { said = await response.json(); } catch { /* not ours; the status says enough */ }
	const code = typeof said.error === "string" ? said.error : "";
	if (response.status === 401 && code !== "admin_unauthorized" && used === token) token = null;
	if (code === "admin_unauthorized") adminToken = null;
	const wait = Number(response.headers.get("Retry-After")) * 1000 || 0;
	throw new Failure(response.status, code, said.detail ?? "", response.headers.get("X-Dflockd-Leader-Http"), wait);
}

const QUESTION_MS = 15000;

/** What a route says, as an object. */
export async function get(path, signal) {
	const limit = AbortSignal.timeout(QUESTION_MS);
	try {
		const response = await ask("GET", path, { signal: signal ? AbortSignal.any([signal, limit]) : limit });
		return await response.json();
	} catch (error) {
		if (error instanceof Failure || signal?.aborted) throw error;
		throw new Failure(0, "unreachable");
	}
}

/** An order of an operator. */
export const command = (path, body) => ask("POST", path, { body });

export function query(path, parts) {
	const known = Object.entries(parts).filter(([, value]) => (value ?? "") !== "");
	const text = new URLSearchParams(known).toString();
	return text ? `${path}?${text}` : path;
}

/** Browsers take these two for directions, also when they are escaped: they can not be a part of a path. */
export const isDots = (key) => key === "." || key === "..";

// How things stand for the whole page: no failure, or one of those that are left and when it is tried again.
export const link = Object.assign(new EventTarget(), { failure: null, nextAt: 0, answeredAt: 0 });
const troubles = new Map();

/** A failure in a word and in a sentence. */
export function trouble({ status, code, detail }) {
	switch (code) {
		case "unreachable": return ["offline", "The server does not answer."];
		case "draining": return ["draining", "The server is shutting down."];
		case "rate_limited": return ["slowed", "Too many requests from this address; asking less often."];
		case "unauthorized": return ["signed out", "This server wants its token."];
		case "admin_unauthorized": return ["refused", "That is not the admin token of this server."];
		case "admin_disabled": return ["refused", "This server has no admin token; start it with --admin-token-file."];
		case "forbidden": return ["denied", "This token may not do that."];
		case "not_held": return ["gone", "This hold has already ended."];
		case "not_found": return ["gone", "This has already ended."];
		case "not_leader": return ["not leader", "This member can not answer, the leader can."];
		case "unavailable": return ["no leader", "Nobody can answer: the cluster has no leader, or this member lost it."];
		default: return ["error", `The server answered ${status} ${code} ${detail}`.trim()];
	}
}

function stands(who, failure, nextAt = 0) {
	if (failure) troubles.set(who, { failure, nextAt });
	else troubles.delete(who);
	const [trouble] = troubles.values();
	link.failure = trouble?.failure ?? null;
	link.nextAt = trouble?.nextAt ?? 0;
	link.dispatchEvent(new Event("change"));
}

const sleepers = new Set();

/** Everything that waits for its next try tries now. */
export function wake() {
	for (const sleeper of [...sleepers]) sleeper();
}

/** Sleeps until the time is over or it is woken; `begun` gets what wakes it. */
function sleep(ms, signal, begun = () => {}) {
	return new Promise((done) => {
		const end = () => {
			clearTimeout(timer);
			sleepers.delete(end);
			signal.removeEventListener("abort", end);
			done();
		};
		const timer = ms === Infinity ? 0 : setTimeout(end, ms);
		sleepers.add(end);
		signal.addEventListener("abort", end);
		begun(end);
	});
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) wake(); });
addEventListener("online", wake);

const BACKOFF_MAX_MS = 30000;

/** How long to wait after so many failures in a row, not all pages alike. */
function patience(failures, failure) {
	if (failure.status === 401) return Infinity;
	const base = Math.min(BACKOFF_MAX_MS, 1000 * 2 ** Math.min(failures - 1, 5));
	return Math.max(failure.wait, base) * (0.85 + 0.3 * Math.random());
}

/**
 * Runs `task` now and every so often, less often while it fails, not at all while nobody looks. Returns what makes it
 * run at once, unless it is waiting after a failure.
 */
export function poll(task, everyMs, signal) {
	let nudge = () => {};
	let again = false;
	const run = async () => {
		let failures = 0;
		while (!signal.aborted) {
			if (document.hidden && link.answeredAt) {
				await sleep(Infinity, signal);
				continue;
			}
			let pause = everyMs;
			again = false;
			try {
				await task();
				failures = 0;
				link.answeredAt = performance.now();
				stands(task, null);
			} catch (error) {
				if (signal.aborted) return;
				if (!(error instanceof Failure)) throw error;
				failures += 1;
				pause = patience(failures, error);
				stands(task, error, performance.now() + pause);
			}
			if (failures || !again) await sleep(pause, signal, (end) => { nudge = failures ? () => {} : end; });
			nudge = () => {};
		}
	};
	signal.addEventListener("abort", () => stands(task, null));
	run();
	return () => {
		again = true;
		nudge();
	};
}

/**
 * Follows the changes of keys that match a pattern, from `after` on, over broken connections. `heard` gets
 * `{ revision, event, key }`, or `{ gap: true }` where the history no longer reaches back.
 */
export async function follow(pattern, after, heard, standing, signal) {
	let failures = 0;
	while (!signal.aborted) {
		let failure = new Failure(0, "unreachable");
		try {
			const response = await ask("GET", query("/v1/watch", { pattern, after }), { signal });
			standing(true);
			const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
			const parse = parser((message) => {
				failures = 0;
				const data = JSON.parse(message.data);
				if (message.event !== "change" && message.event !== "compacted") return;
				after = data.revision;
				heard(message.event === "change" ? data : { gap: true });
			});
			for (;;) {
				const { done, value } = await reader.read();
				if (done) break;
				parse(value);
			}
		} catch (error) {
			if (signal.aborted) return;
			if (error instanceof Failure) failure = error;
			if (failure.status === 400) return standing(false, failure);
		}
		failures += 1;
		standing(false, failure);
		await sleep(patience(failures, failure), signal);
	}
}

/** Server-sent events out of pieces of text. */
function parser(emit) {
	let rest = "";
	let message = { event: "message", data: [] };
	return (piece) => {
		const lines = (rest + piece).split(/\r\n|\n|\r(?!$)/);
		rest = lines.pop();
		for (const line of lines) {
			if (line === "") {
				if (message.data.length) emit({ event: message.event, data: message.data.join("\n") });
				message = { event: "message", data: [] };
				continue;
			}
			const [, field, value = ""] = /^([^:]*)(?:: ?(.*))?/.exec(line);
			if (field === "data") message.data.push(value);
			else if (field === "event") message.event = value;
		}
	};
}

/** Calls `beat` every so often while somebody looks. */
export function ticking(beat, signal, everyMs = 500) {
	const timer = setInterval(() => { if (!document.hidden) beat(performance.now()); }, everyMs);
	signal.addEventListener("abort", () => clearInterval(timer));
}
