#!/usr/bin/env python3
"""Writes benchmarks.md and its plots from the JSON files of one bench/run.

    render.py DIRECTORY-WITH-JSON OUTPUT-DIRECTORY
"""

import html
import json
import pathlib
import re
import statistics
import sys
import textwrap

# Redis has no queue, so a client that finds the lock taken tries again after a pause. What the targets of w2 and
# w3 are measured by is the pause of redis-py, whose `Lock` has `sleep=0.1`; the others are shown beside it.
REFERENCE_PAUSE_MS = 100
PAUSES_MS = (100, 10, 1)

COLOURS = {"dflockd": "#1f77b4", "redis": "#d62728", "etcd": "#2ca02c", "echo": "#8c8c8c"}


def natural(name):
    """Numbers within names in the order of numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def median(side, figure):
    """The median over the rounds, or None where it was not measured."""
    found = [value for value in (one.get(figure) for one in side["rounds"]) if value is not None]
    return statistics.median(found) if found else None


def number(value, digits=0):
    return "–" if value is None else f"{value:,.{digits}f}"


def spread(value):
    if value is None:
        return "–"
    return f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"


def ratio(race, other, figure):
    for one in race["ratios"]:
        if one["to"] == other:
            return one[figure]
    return None


class Targets:
    """The table of what must be reached and what was."""

    def __init__(self, races):
        self.races = races
        self.rows = []

    def add(self, workload, what, other, figure, limit, at_least=True):
        race = self.races.get(workload)
        measured = ratio(race, other, figure) if race else None
        if measured is None:
            return
        middle = measured["median"]
        reached = middle >= limit if at_least else middle <= limit
        sign = "≥" if at_least else "≤"
        self.row(workload, what, f"{sign} {limit}", spread(measured), reached)

    def row(self, workload, what, target, measured, reached):
        verdict = "yes" if reached else "**no**"
        self.rows.append(f"| {workload} | {what} | {target} | {measured} | {verdict} |")


def targets(races):
    table = Targets(races)
    table.add("w1", "ops/s ÷ Redis", "redis", "ops", 1.15)
    table.add("w1", "ops/s ÷ echo (tokio)", "echo-tokio", "ops", 0.9)
    table.add("w1", "ops/s ÷ echo (epoll)", "echo-epoll", "ops", 0.9)
    table.add("w1", "server CPU per op ÷ echo (tokio)", "echo-tokio", "server_cpu", 1.15, False)
    table.add("w1", "server CPU per op ÷ echo (epoll)", "echo-epoll", "server_cpu", 1.15, False)
    table.add("w1", "server CPU per op ÷ Redis", "redis", "server_cpu", 0.87, False)
    for pause in PAUSES_MS:
        redis = f"redis-{pause}ms"
        role = "**the reference**" if pause == REFERENCE_PAUSE_MS else "beside it"
        again = f"Redis that tries again after {pause} ms ({role})"
        table.add("w2", f"hand-overs/s ÷ {again}", redis, "hand_overs", 2.5)
        table.add("w2", f"ops/s ÷ {again}", redis, "ops", 2.5)
        table.add("w3", f"ops/s ÷ {again}", redis, "ops", 1.5)
    table.add("w5", "ops/s ÷ Redis", "redis", "ops", 2.0)
    table.add("w5-mux", "numbered requests, ops/s ÷ Redis", "redis", "ops", 2.0)
    if "w4" in races:
        held = races["w4"]["sides"][0]["rounds"][0]["bytes_per_holder"]
        if held is not None:
            table.row("w4", "bytes per holder", "≤ 1536", number(held), held <= 1536)
    table.add("w4", "server CPU per renewal ÷ Redis", "redis", "server_cpu", 0.7, False)
    table.add("http", "HTTP/1.1, kept connections, ops/s ÷ line protocol", "dflockd", "ops", 0.3)
    table.add("grpc", "gRPC, a session and a connection each, ops/s ÷ line protocol", "dflockd", "ops", 0.3)
    table.add("durable", "one node on disk, ops/s ÷ Redis (AOF, always)", "redis-aof", "ops", 1.5)
    # The line protocol has no counterpart in etcd; gRPC is its fastest API.
    for connections, lines, grpc in ((1, 2.5, 2.0), (64, 5.0, 4.0), (256, 6.0, 4.0)):
        what = f"three nodes on disk, {connections} connections, ops/s ÷ etcd by gRPC"
        table.add(f"w6-{connections}", what, "etcd-grpc", "ops", lines)
        what = f"three nodes on disk by gRPC, {connections} sessions, ops/s ÷ etcd by gRPC"
        table.add(f"grpc6-{connections}", what, "etcd-grpc", "ops", grpc)
    table.add("grow-held", "ops/s, many other locks held ÷ none", "empty", "ops", 0.95)
    table.add("grow-waiters", "hand-overs/s, long queue ÷ ten waiters", "10 waiters", "ops", 0.95)
    rows = sorted(table.rows, key=lambda row: natural(row.split("|")[1].strip()))
    return ["| Workload | What | Target | Measured | Reached |", "|---|---|---|---|---|", *rows]


def section(name, race):
    ours = race["sides"][0]["name"]
    overs = any(median(side, "hand_overs_per_s") for side in race["sides"])
    held = any(side["rounds"][0].get("bytes_per_holder") is not None for side in race["sides"])
    head = ["", "ops/s", "p50 µs", "p99 µs", "p99.9 µs", "server CPU µs/op", "generator CPU µs/op"]
    head += ["memory MB", f"{ours} ÷ it: ops", f"{ours} ÷ it: server CPU"]
    if overs:
        head[2:2] = ["hand-overs/s"]
        head.append(f"{ours} ÷ it: hand-overs")
    if held:
        head.append("bytes per holder")
    if any(side["rounds"][0]["grants_checked"] for side in race["sides"]):
        head.append("Jain")
    lines = [f"## {name}", "", race["description"] + ".", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for side in race["sides"]:
        memory = median(side, "memory_bytes")
        row = [side["name"], number(median(side, "ops_per_s"))]
        if overs:
            row.append(number(median(side, "hand_overs_per_s")))
        row += [number(median(side, one)) for one in ("p50_us", "p99_us", "p999_us")]
        row += [number(median(side, one), 2) for one in ("server_us_per_op", "generator_us_per_op")]
        row.append(number(memory / 1e6 if memory else None, 1))
        row += [spread(ratio(race, side["name"], one)) for one in ("ops", "server_cpu")]
        if overs:
            row.append(spread(ratio(race, side["name"], "hand_overs")))
        if held:
            # Later rounds start from a server that has had holders before.
            row.append(number(side["rounds"][0].get("bytes_per_holder")))
        if head[-1] == "Jain":
            checked = side["rounds"][0]["grants_checked"]
            row.append(number(median(side, "jain"), 3) if checked else "–")
        lines.append("| " + " | ".join(row) + " |")
    wrong = [text for side in race["sides"] for one in side["rounds"] for text in one["violations"]]
    lines += ["", f"**Violations: {'; '.join(wrong)}**"] if wrong else []
    return lines


def colour(name, place):
    for word, value in COLOURS.items():
        if name.startswith(word):
            return value
    return ["#1f77b4", "#8c8c8c"][place % 2]


def plot(path, title, unit, groups):
    """Bars in groups, each group on its own scale: the median, with the spread of the rounds."""
    left, width, bar, right = 150, 420, 18, 150
    body, y = [], 40
    for name, bars in groups:
        body.append(f'<text x="8" y="{y + 12}" font-weight="bold">{html.escape(name)}</text>')
        y += 20
        top = max(max(values) for _, values in bars) or 1
        for place, (label, values) in enumerate(bars):
            at = [value / top * width for value in (min(values), statistics.median(values), max(values))]
            middle = y + bar / 2
            body += [
                f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>',
                f'<rect x="{left}" y="{y + 2}" width="{at[1]:.1f}" height="{bar - 4}" '
                f'fill="{colour(label, place)}"/>',
                f'<path d="M{left + at[0]:.1f} {middle}H{left + at[2]:.1f}" stroke="#000"/>',
                f'<text x="{left + max(at) + 6:.1f}" y="{y + 13}">'
                f"{number(statistics.median(values), 0 if top >= 100 else 2)}</text>",
            ]
            y += bar
        y += 14
    size = f'width="{left + width + right}" height="{y}"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {left + width + right} {y}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="8" y="22" font-size="15">{html.escape(title)} ({html.escape(unit)})</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def groups(races, figure):
    for name, race in races.items():
        bars = []
        for side in race["sides"]:
            values = [one[figure] for one in side["rounds"] if one.get(figure) is not None]
            if values:
                bars.append((side["name"], values))
        if bars:
            yield name, bars


def wrapped(lines):
    """Breaks long prose; tables and what stands in code blocks stay as they are."""
    code = False
    for line in lines:
        code ^= line.startswith("```")
        if code or line.startswith("|") or len(line) <= 110:
            yield line
        else:
            yield from textwrap.wrap(line, 110)


def main():
    source, out = map(pathlib.Path, sys.argv[1:3])
    races, commands = {}, []
    failed = [
        f"**{path.stem} failed: {path.read_text().strip()}**" for path in sorted(source.glob("*.failed"))
    ]
    for path in sorted(source.glob("*.json"), key=lambda path: (path.stem == "grow", natural(path.stem))):
        command = path.with_suffix(".cmd")
        if command.exists():
            commands.append(command.read_text().strip())
        if path.stat().st_size == 0:
            continue
        found = json.loads(path.read_text())
        for race in found:
            races[race["workload"] if len(found) > 1 else path.stem] = race
    machine = dict(line.split("=", 1) for line in (source / "machine").read_text().splitlines())
    images = out / "images"
    images.mkdir(exist_ok=True)
    rate = {name: race for name, race in races.items() if name != "w4"}
    plot(images / "bench-ops.svg", "Operations per second", "more is better", list(groups(rate, "ops_per_s")))
    plot(
        images / "bench-cpu.svg",
        "Server processor time per operation",
        "µs, less is better",
        list(groups(races, "server_us_per_op")),
    )
    versions = ", ".join(f"{one} {machine[one]}" for one in ("redis", "etcd") if one in machine)
    lines = [
        "# Benchmarks",
        "",
        "Written by `bench/run`; do not edit. One operation is one acquire and one release of one lock, closed",
        "loop, over loopback, with the load generator on the same machine. Rounds of the sides alternate. Figures",
        "are medians over the rounds; a ratio is taken round by round and shown as median (smallest to largest).",
        "Compare within one table only: absolute figures are those of this machine on this day.",
        "",
        f"- {machine['dflockd']}, memory mode but for durable, w6 and grpc6; {versions}; {machine['date']}",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory']}, {machine['kernel']}",
        "",
    ]
    if machine.get("quick") == "yes":
        lines += ["**A quick run: rounds too short for the figures to mean much.**", ""]
    for text in failed:
        lines += [text, ""]
    lines += ["## Targets", "", *targets(races), ""]
    lines += ["![Operations per second](images/bench-ops.svg)", ""]
    lines += ["![Server processor time per operation](images/bench-cpu.svg)", ""]
    for name, race in races.items():
        lines += [*section(name, race), ""]
    state = source / "state.txt"
    if state.exists():
        what = "One durable node, as `bench/durable` prints it. Targets: ready after at most 3 s, all leases ended"
        what += " within 2 s, no pause of more than 10 ms because of a snapshot."
        lines += ["## state", "", what, "", "```", *state.read_text().splitlines(), "```", ""]
        commands.append("bench/durable")
    lines += [
        "## How to read it",
        "",
        "- **Redis**: one instance without persistence, `SET key token NX PX lease`, released by a script that",
        "  compares the token (EVALSHA), as its lock clients do. Redis has no queue: a client that finds the lock",
        "  taken tries again after a pause, drawn evenly between half and one and a half times the mean in its",
        f"  name. The reference is {REFERENCE_PAUSE_MS} ms, what the lock of redis-py waits unless told otherwise",
        "  (`sleep=0.1`); shorter pauses stand beside it. The pause decides the outcome of w2 and w3: short ones",
        "  load the server, long ones let the last holder take the lock again at once, which counts as an",
        "  operation but not as a hand-over. So the target of w2 is one of hand-overs; the ratio of operations is",
        "  shown as well, and includes a lock that Redis gives to the same client again and again.",
        "- **etcd**: one node (three in w6 and grpc6), the v3lock service over the JSON gateway of the client port",
        "  (HTTP/1.1), which costs etcd more than gRPC does; it syncs every change to disk. **etcd-grpc** is the same",
        "  by gRPC, with the frames that dflockd is sent, too.",
        "- **echo**: `dflockd-bench echo` reads the same requests and answers without deciding anything, on a",
        "  bare epoll loop with one thread and on tokio with a task per connection.",
        "- **w4**: memory is the growth of the server's resident memory from before the first holder connected, in",
        "  the first round; an operation is a renewal.",
        "- **http**: w1 by the HTTP API, one session and one kept connection per client; the other side is the line",
        "  protocol of the same server in the same run.",
        "- **grpc**: w1 by the gRPC API, one session and one connection per client, HTTP/2 frames by hand; the other",
        "  side is the line protocol of the same server in the same run.",
        "- **crowd**: w1 with two connections of the line protocol while slow HTTP clients (silent, heads and bodies",
        "  that never end, streams nobody reads) are connected, 5,000 unless the run was quick or descriptors are few;",
        "  quiet is a second server without them. What counts is p99.",
        "- **durable**: w1 against one node with `--raft-dir`, Redis with `appendfsync always`, one etcd; **w6**: the",
        "  same against three nodes of one cluster each, on one disk, connections spread over the nodes.",
        "- **grpc6**: as w6 by the gRPC APIs, one session (etcd: one lease) and one connection per client, one call",
        "  at a time. Where the description says so, all connections of each side go to the leader of its cluster,",
        "  which is asked for before each round; w6 spreads them.",
        "- **state**: recovery with a million locks, a snapshot alone and beside a flood of writes, many leases that",
        "  end at once. The other connection asks from a process of its own.",
        "- **grow**: the two servers of `grow-held` are two processes, one filled; in `grow-waiters` both sides use",
        "  the same connections, all on one key or eleven on each of many, and hand over one lock at a time.",
        "- **Checks**: while it runs the generator checks that no key has two holders and that fences grow; every",
        "  64th grant is held until all sockets were looked at again. Jain is the index of fairness over clients.",
        "",
        "## Commands",
        "",
        "`dflockd-bench` is made from `bench/`: `cargo build --release -p dflockd-bench`. `dflockctl bench` has the",
        "same workloads for dflockd alone, also to compare two of them: `--compare dflockd=HOST:PORT,name=old`.",
        "",
        "```",
        *commands,
        "```",
        "",
    ]
    (out / "benchmarks.md").write_text("\n".join(wrapped("\n".join(lines).split("\n"))))


if __name__ == "__main__":
    main()
