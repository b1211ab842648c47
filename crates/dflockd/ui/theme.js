// Runs before the first paint, so that a chosen theme does not flash.
"use strict";
try {
	const theme = localStorage.getItem("dflockd.theme");
	if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
	// Storage may be forbidden.
}
