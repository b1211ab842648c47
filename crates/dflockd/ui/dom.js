// Elements and words. All text goes through text nodes: keys and client names are written by strangers.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `el("a.key", { href }, child, ...)`. Attributes may be left out; those that begin with `on` listen. */
export function el(spec, ...children) {
	const [tag, ...classes] = spec.split(".");
	const node = document.createElement(tag);
	if (classes.length) node.className = classes.join(" ").trim();
	const attributes = children[0]?.constructor === Object ? children.shift() : {};
	for (const [name, value] of Object.entries(attributes)) {
		if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
		else if (value !== false) node.setAttribute(name, value === true ? "" : value);
	}
	node.append(...children.flat(2).filter((child) => (child ?? null) !== null));
	return node;
}

/** For fields in which each letter counts. */
export const EXACT = { maxlength: 256, autocomplete: "off", autocapitalize: "off", spellcheck: "false" };

export const button = (label, onclick, spec = "button") => el(spec, { type: "button", onclick }, label);

export function svg(tag, props = {}, ...children) {
	const node = document.createElementNS(SVG, tag);
	for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
	node.append(...children);
	return node;
}

export function icon(name) {
	return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** Writes only what is different, so that a selection or a screen reader is not disturbed. */
export function say(node, text) {
	if (node.textContent !== text) node.textContent = text;
}

/** Keeps the children of a node equal to a list, and a child that stays is the same node as before. */
export function keyed(parent, create) {
	const rows = new Map();
	return (items, idOf) => {
		const wanted = new Map(items.map((item) => [idOf(item), item]));
		for (const [id, row] of rows) {
			if (wanted.has(id)) continue;
			row.node.remove();
			rows.delete(id);
		}
		let next = parent.firstChild;
		for (const [id, item] of wanted) {
			let row = rows.get(id);
			if (!row) rows.set(id, (row = create(item)));
			row.set(item);
			if (row.node === next) next = next.nextSibling;
			else parent.insertBefore(row.node, next);
		}
		return rows;
	};
}

// Control characters, and those that turn the direction of text or take no room: a name must not look like another.
const HIDDEN = /[\p{C}\u115f\u1160\u3164\uffa0]|(?! )\p{Z}/gu;
const spelled = (found) => `\\u{${found.codePointAt(0).toString(16).padStart(4, "0")}}`;

/** A name as nodes, in which what could not be seen is spelled out. */
export function name(text) {
	const nodes = [];
	let from = 0;
	for (const match of text.matchAll(HIDDEN)) {
		if (match.index > from) nodes.push(text.slice(from, match.index));
		nodes.push(el("span.esc", { title: "a character that can not be seen" }, spelled(match[0])));
		from = match.index + match[0].length;
	}
	if (from < text.length) nodes.push(text.slice(from));
	return nodes;
}

/** The name again, as plain text for titles and announcements. */
export const plain = (text) => text.replace(HIDDEN, spelled);

export const keyHref = (key) => `#/key/${encodeURIComponent(key)}`;
/** The name that a client gave itself, or its number. */
export const called = (who) => who.client || `session ${who.session ?? who.id}`;

export const sessionHref = (id) => `#/session/${id}`;

export function keyLink(key) {
	return el("a.key", { href: keyHref(key), title: plain(key) }, el("bdi", name(key)));
}

/** 0.4 s, 12 s, 4 m 14 s, 3 h 02 m, 2 d 4 h */
export function span(ms, fine = false) {
	const seconds = Math.max(0, ms) / 1000;
	if (seconds < (fine ? 10 : 1)) return `${(Math.floor(seconds * 10) / 10).toFixed(1)} s`;
	if (seconds < 60) return `${Math.floor(seconds)} s`;
	const two = (number) => String(Math.floor(number)).padStart(2, "0");
	if (seconds < 3600) return `${Math.floor(seconds / 60)} m ${two(seconds % 60)} s`;
	if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${two((seconds % 3600) / 60)} m`;
	return `${count(Math.floor(seconds / 86400))} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);
export const rate = (number) => (number > 0 && number < 99.95 ? tenth.format(number) : whole.format(number));

/** `3 keys`, `1 key` */
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

/** Tells those who listen instead of look. */
export function announce(text) {
	document.getElementById("news").textContent = text;
}

/** Announces what it is told, from the second time on and if it is new. */
export function teller() {
	let told = null;
	return (text) => {
		if (told !== null && told !== text) announce(text);
		told = text;
	};
}
