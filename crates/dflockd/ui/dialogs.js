// Questions to the person: sign in, take a hold away, end a session, help.

import { button, called, el, EXACT, many, name, say, span } from "./dom.js";
import { command, Failure, get, isDots, session, trouble, wake } from "./api.js";

/** Opens a dialog; `send()` throws a `Failure` to keep it open. Resolves to whether it was sent. */
function ask({ title, content, fields = [], submit, tone = "", send }) {
	return new Promise((done) => {
		let sent = false;
		const wrong = el("p.wrong", { role: "alert", hidden: true });
		const go = el(`button.primary${tone}`, { type: "submit" }, submit);
		const complain = (text, input) => {
			say(wrong, text);
			wrong.hidden = false;
			input?.focus();
		};
		const sheet = el("form", { novalidate: true, onsubmit: async (event) => {
			event.preventDefault();
			wrong.hidden = true;
			const empty = fields.find(({ input }) => !input.value.trim());
			if (empty) return complain(`${empty.label} is needed.`, empty.input);
			go.disabled = true;
			try {
				await send?.();
				sent = true;
				dialog.close();
			} catch (error) {
				if (!(error instanceof Failure)) throw error;
				complain(trouble(error)[1], fields.at(-1).input);
			} finally {
				go.disabled = false;
			}
		} },
		el("h2", title), content,
		fields.map(({ input, label, hint }) => el("label.field", el("span", label), input, el("small", hint))),
		wrong, el("div.buttons", send && button("Cancel", () => dialog.close()), go));
		const dialog = el("dialog", { "aria-label": title, onclose: () => {
			// Secrets do not stay in the document.
			for (const { input } of fields) input.value = "";
			dialog.remove();
			done(sent);
		} }, sheet);
		document.body.append(dialog);
		dialog.showModal();
		(fields[0]?.input ?? go).focus();
	});
}

const field = (label, type, hint) => ({
	label, hint, input: el("input", { type, ...EXACT }),
});
const secret = (label) => field(label, "password", "Kept in the memory of this tab only; a reload forgets it.");

let asking = null;

/** Asks for the token of the API, once at a time. */
export function signIn() {
	const token = secret("Token");
	asking ??= ask({
		title: "Sign in",
		content: el("p", "This server wants a token before it tells anything."),
		fields: [token],
		submit: "Sign in",
		async send() {
			session.signIn(token.input.value.trim());
			await get("/v1/overview");
			wake();
		},
	}).finally(() => { asking = null; });
	return asking;
}

/** Sends a command with a reason, and with the admin token, which is asked for unless it is known. */
function administer({ title, content, path, body }) {
	const fields = [field("Reason", "text", "It goes into the log of the server.")];
	if (!session.isAdmin) fields.push(secret("Admin token"));
	return ask({
		title, content, fields, submit: title, tone: ".danger",
		async send() {
			if (fields[1]) session.beAdmin(fields[1].input.value.trim());
			try {
				await command(path, { ...body, reason: fields[0].input.value.trim() });
			} catch (error) {
				// This dialog has a field for it, and the next will ask again.
				if (fields[1]) session.beAdmin(null);
				throw error;
			}
		},
	});
}

const bold = (who) => el("b", el("bdi", name(called(who))));

export function forceRelease({ lock, holder }) {
	// No address leads to these two.
	if (isDots(lock.key)) return Promise.resolve(false);
	const next = lock.queue[0];
	return administer({
		title: "Force-release",
		path: `/v1/admin/locks/${encodeURIComponent(lock.key)}/force-release`,
		body: { space: lock.kind === "semaphore" ? "sem" : "lock", fence: holder.fence },
		content: [
			el("p.subject.mono", el("bdi", name(lock.key))),
			el("p", bold(holder), ` has held it for ${span(holder.held_ms)}. `,
				next ? ["It passes to ", bold(next), `, the first of ${many(lock.waiters_total, "waiter")}.`]
					: "Nobody waits for it."),
			el("p.hint", "The holder may go on working until it notices. Only storage that checks fences is safe from it."),
		],
	});
}

export const endSession = (ended) => administer({
	title: "End session",
	path: `/v1/admin/sessions/${ended.id}/end`,
	body: {},
	content: [
		el("p.subject.mono", el("bdi", name(called(ended)))),
		el("p", `Its ${many(ended.holds, "hold")} and ${many(ended.waits, "place")} in queues end at once.`),
	],
});

const SHORTCUTS = [
	["/", "search"], ["1 – 5", "the views"], ["↑ ↓", "from row to row of a table"],
	["Enter", "in the search of locks: open that key"], ["p", "pause or go on, in events"],
	["t", "theme: as the system, light, dark"],
	["Esc", "close a dialog, leave a field, go back to the table"], ["?", "this help"],
];

export const help = () => ask({
	title: "Help",
	submit: "Close",
	content: [
		el("dl.pairs", SHORTCUTS.map(([keys, what]) => [el("dt", el("kbd", keys)), el("dd", what)])),
		el("p.hint", "A fence is the number of a grant and only grows: storage that refuses smaller ones is safe from a " +
			"holder that overslept its lease. How long a lease is in all is guessed from what was seen of it."),
	],
});
