"""Each attack once: what it needs, what it sends, and what must hold whatever the server answers.

An attack that is refused has failed, which is what a server is for; so nothing here minds a closed connection. What is
required is declared with `run.require`, in numbers that do not depend on how fast the machine is; what depends on it is
only noted.
"""

import threading
import time

from attack import wire

MIB = 1 << 20
# The longest time the line protocol can say: 292 years.
FOR_EVER_S = 9_223_372_036

ATTACKS = []


def attack(name, growth_mib, what, **server):
    """Declares an attack: its name, by how much it may make the server grow, and how the server is started.

    The function returns the connections that stay open while the server is watched to its highest memory.
    """

    def declare(function):
        ATTACKS.append(Attack(name, growth_mib, what, server, function))
        return function

    return declare


class Attack:
    def __init__(self, name, growth_mib, what, server, function):
        self.name, self.growth_mib, self.what = name, growth_mib, what
        self.server, self.function = server, function


# Subscriptions


def subscribe(run, command, count, pattern):
    """Subscribes on one connection until all is done or it is closed; notes how many were taken."""
    taken = 0
    client = run.line()
    try:
        for number in range(count):
            run.sent += client.send(command, pattern(number))
            taken += client.answer() == "ok"
    except wire.Closed as closed:
        run.note(f"closed: {closed}")
    run.note(f"{taken:,} of {count:,} taken")
    return client


def many_tokens(number):
    return f"{number:x}" + ".*" * 126


def sixteen_tokens(number):
    """As long as a pattern may be, with a literal in front so that no two are alike."""
    return f"{number:x}".rjust(100, "x") + ".*" + ".xxxxxxx" * 14


@attack("watch", 32, "100 `watch`, 127 tokens each")
def watch(run):
    return subscribe(run, "watch", 100, many_tokens)


@attack("listen", 32, "2,000 `listen`, 127 tokens each")
def listen(run):
    return subscribe(run, "listen", run.scale(2000, 500), many_tokens)


@attack("watch-durable", 32, "2,000 `watch`, 127 tokens each; durable mode, then a restart", durable=True)
def watch_durable(run):
    client = subscribe(run, "watch", run.scale(2000, 500), many_tokens)
    run.settle()
    client.close()
    run.restart()


@attack("subscriptions", 64, "16 connections, each up to 5,000 `watch` of 16 tokens")
def subscriptions(run):
    connections, count = 16, run.scale(5000, 1500)
    taken = 0
    clients = []
    for connection in range(connections):
        try:
            client = run.line()
            clients.append(client)
            for number in range(count):
                run.sent += client.send("watch", sixteen_tokens(connection * count + number))
                if client.answer() != "ok":
                    break
                taken += 1
        except wire.Closed:
            pass
        if not run.server.is_alive():
            break
    run.note(f"{taken:,} taken")
    return clients


@attack("groups", 64, "100,000 `listen > gN` on a kept session with a lease of 292 years, then gone")
def groups(run):
    count = run.scale(100_000, 20_000)
    taken = 0
    try:
        client = run.line()
        client.ask("hello", "attacker", "keep")
        client.ask("l", "hold", f"0 {FOR_EVER_S}")
        for begin in range(0, count, 500):
            batch = b"".join(wire.request("listen", ">", f"g{number}") for number in range(begin, begin + 500))
            run.sent += len(batch)
            wire.send(client.sock, batch)
            taken += [client.answer() for _ in range(500)].count("ok")
        client.close()
    except wire.Closed:
        pass
    other = run.line()
    # The end of the connection may be noticed a moment later.
    time.sleep(0.5)
    worst = 0.0
    for _ in range(20):
        begun = time.monotonic()
        answer = other.ask("signal", "channel", "payload")
        worst = max(worst, time.monotonic() - begun)
    run.note(f"{taken:,} taken, then `signal` answers `{answer}` and takes up to {worst * 1000:.0f} ms")
    run.require(answer == "ok 0", "a session without a connection does not listen")


# Answers that nobody reads


def control_bytes(count):
    """Bytes that are legal in a value and six bytes each in JSON."""
    return b"\x01" * count


def make_keys(run, count):
    """10,000 keys with names as long as they may be, so that a list of them is as long as it can be."""
    client = run.line()
    for begin in range(0, count, 100):
        wire.send(client.sock, b"".join(
            wire.request("kset", f"{number:06}".encode() + control_bytes(249), "v")
            for number in range(begin, begin + 100)
        ))
        for _ in range(100):
            client.answer()
    client.close()


def make_list(run, items, item_bytes=65_000):
    client = run.line()
    for _ in range(items):
        client.ask("rpush", "big", control_bytes(item_bytes))
    client.close()


@attack("ls", 64, "1 mux connection, 100 `ls` of 10,000 keys, unread")
def ls(run):
    make_keys(run, 10_000)
    run.begin()
    sock = wire.dial(run.server.port, receive_bytes=4096)
    run.send(sock, wire.request("hello", "attacker", "mux"))
    run.send(sock, b"".join(wire.request(f"{number} ls", "_", "10000") for number in range(1, 101)))
    return sock


@attack("lrange", 64, "20 connections, 1 `lrange` each of a list of 19.5 MB, unread")
def lrange(run):
    make_list(run, run.scale(300, 100))
    run.begin()
    socks = [wire.dial(run.server.port, receive_bytes=4096) for _ in range(20)]
    for sock in socks:
        run.send(sock, wire.request("lrange", "big", "0 -1"))
    return socks


@attack("http-lists", 128, "30 connections, 1 `GET /v1/lists/big` each, unread")
def http_lists(run):
    make_list(run, run.scale(300, 100))
    run.begin()
    socks = [wire.dial(run.server.http_port, receive_bytes=4096) for _ in range(30)]
    for sock in socks:
        run.send(sock, f"GET /v1/lists/big HTTP/1.1\r\nHost: {wire.HOST}\r\n\r\n".encode())
    return socks


@attack("http2-lists", 96, "1 HTTP/2 connection without TLS, 30 `GET /v1/lists/big`, unread", h2c=True)
def http2_lists(run):
    make_list(run, run.scale(300, 100))
    run.begin()
    sock = wire.dial(run.server.http_port, receive_bytes=4096)
    headers = wire.Headers()
    data = wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0)
    for number in range(30):
        block = headers.block([
            (":method", "GET"), (":scheme", "http"), (":path", "/v1/lists/big"),
            (":authority", f"{wire.HOST}:{run.server.http_port}"),
        ])
        data += wire.frame(wire.HEADERS, wire.END_STREAM | wire.END_HEADERS, 2 * number + 1, block)
    run.send(sock, data)
    return sock


@attack("pushes", 128, "200 connections that listen and do not read, 60 signals of 65,000 bytes")
def pushes(run):
    count = run.scale(200, 100)
    socks = [wire.dial(run.server.port, receive_bytes=4096) for _ in range(count)]
    for sock in socks:
        run.send(sock, wire.request("listen", "flood"))
        try:
            wire.receive(sock)
        except wire.Closed:
            pass
    run.begin()
    publisher = run.line()
    for _ in range(60):
        run.sent += publisher.send("signal", "flood", b"x" * 65_000)
        publisher.answer()
    return socks


@attack("results", 32, "1 kept session that pushes and pops 1,500 items of 60,000 bytes and acknowledges none")
def results(run):
    count = run.scale(1500, 800)
    client = run.line()
    client.ask("hello", "attacker", "mux keep")
    run.begin()
    item = b"x" * 60_000
    for number in range(count):
        # A key for each, so that the items spread over all parts of the state.
        key = f"list{number}"
        run.sent += client.send(f"{2 * number + 1} rpush", key, item)
        client.answer()
        run.sent += client.send(f"{2 * number + 2} lpop", key)
        client.answer()
    return client


# gRPC and HTTP/2


@attack("grpc-half", 64, "1,000 gRPC calls that announce 2 MiB and send 8 bytes")
def grpc_half(run):
    sock = wire.dial(run.server.grpc_port)
    headers = wire.Headers()
    run.send(sock, wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0))
    begun = (2 * MIB).to_bytes(5, "big") + b"\x00" * 8
    for number in range(1000):
        block = headers.block([
            (":method", "POST"), (":scheme", "http"), (":path", "/dflockd.v1.Kv/Set"),
            (":authority", wire.HOST), ("content-type", "application/grpc"), ("te", "trailers"),
        ])
        stream = 2 * number + 1
        run.send(sock, wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block)
                 + wire.frame(wire.DATA, 0, stream, begun))
    return sock


def flood(run, port, name, frames):
    """Sends these frames for three seconds, reading what comes; the server has to cut the connection."""
    sock = wire.dial(port)
    cut = threading.Event()
    thread = threading.Thread(target=lambda: wire.is_closed(sock, 5) and cut.set(), daemon=True)
    cpu = run.server.cpu_seconds()
    begun = time.monotonic()
    run.send(sock, wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0))
    thread.start()
    sent = 0
    while time.monotonic() < begun + 3 and not cut.is_set():
        try:
            wire.send(sock, frames)
        except wire.Closed:
            cut.set()
        sent += len(frames)
    run.sent += sent
    took = time.monotonic() - begun
    cpu = run.server.cpu_seconds() - cpu
    # What the end of our own making would set as well.
    was_cut = cut.is_set()
    sock.close()
    thread.join(6)
    run.note(f"{name}: {'cut off after' if was_cut else 'still served after'} {took:.1f} s, {cpu:.1f} s of CPU")
    run.require(was_cut, f"a flood of {name} is cut off")


PINGS = wire.frame(wire.PING, 0, 0, b"attacker") * 1000
WINDOWS = wire.frame(wire.WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01") * 1000
EMPTY_SETTINGS = wire.frame(wire.SETTINGS, 0, 0) * 1000
PRIORITIES = wire.frame(wire.PRIORITY, 0, 1, b"\x00\x00\x00\x00\x10") * 1000


@attack("http2-pings", 32, "HTTP port: PING, SETTINGS, PRIORITY and WINDOW_UPDATE without end, no token", h2c=True,
        token="token-of-the-attack-load-tests")
def http2_pings(run):
    for name, frames in [
        ("PING", PINGS), ("SETTINGS", EMPTY_SETTINGS), ("PRIORITY", PRIORITIES), ("WINDOW_UPDATE", WINDOWS),
    ]:
        flood(run, run.server.http_port, name, frames)


@attack("grpc-pings", 32, "gRPC port: PING and SETTINGS without end, no token", token="token-of-the-attack-load-tests")
def grpc_pings(run):
    for name, frames in [("PING", PINGS), ("SETTINGS", EMPTY_SETTINGS)]:
        flood(run, run.server.grpc_port, name, frames)


@attack("descriptors", 128, "400 gRPC and 400 HTTP connections, no token, a limit of 300 descriptors; durable mode",
        durable=True, descriptors=300, token="token-of-the-attack-load-tests")
def descriptors(run):
    writer = run.line()
    run.begin()
    held = []
    for number in range(800):
        port = run.server.grpc_port if number % 2 else run.server.http_port
        try:
            sock = wire.dial(port, source=f"127.0.0.{2 + number % 8}", patience=2)
            held.append(sock)
            if number % 2:
                run.send(sock, wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0))
            else:
                run.send(sock, b"GET /v1/")
        except wire.Closed:
            pass
    # Enough for several new files of the log.
    answered = 0
    value = b"x" * 60_000
    try:
        for _ in range(800):
            answered += writer.ask("kset", "value", value) == "ok"
    except wire.Closed:
        pass
    run.require(answered == 800, f"an old client goes on writing, over new files of the log ({answered} of 800)")
    try:
        fresh = wire.Line(run.server.port, run.server.token, patience=5)
        run.require(fresh.ask("ping") == "ok", "a new client is served")
    except wire.Closed as closed:
        run.require(False, f"a new client is served ({closed})")
    for sock in held:
        sock.close()


# Strangers and shared limits


@attack("strangers", 24, "2,000 connections without a token, 64 KiB of an `auth` line each",
        token="token-of-the-attack-load-tests")
def strangers(run):
    count = run.scale(2000, 500)
    socks = []
    for number in range(count):
        try:
            sock = wire.dial(run.server.port, source=f"127.0.0.{2 + number % 8}", patience=5)
            socks.append(sock)
            run.send(sock, b"auth\n_\n" + b"x" * 65_000)
        except wire.Closed:
            pass
    return socks


@attack("guesses", 32, "3 s of wrong tokens from 20 threads, line and HTTP", token="token-of-the-attack-load-tests")
def guesses(run):
    counts = {"line": 0, "HTTP": 0}
    ends = time.monotonic() + 3

    def line():
        while time.monotonic() < ends:
            try:
                sock = wire.dial(run.server.port, source="127.0.0.7", patience=5)
                data = wire.request("auth", "_", "wrong")
                run.sent += len(data)
                wire.send(sock, data)
                counts["line"] += wire.receive(sock).startswith(b"error_auth")
                sock.close()
            except wire.Closed:
                time.sleep(0.001)

    def http():
        while time.monotonic() < ends:
            try:
                status, _ = wire.http(run.server.http_port, "GET", "/v1/stats",
                                      [("Authorization", "Bearer wrong")], source="127.0.0.7")
                run.sent += 100
                counts["HTTP"] += status == 401
            except wire.Closed:
                time.sleep(0.001)

    threads = [threading.Thread(target=work) for work in [line, http] * 10]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.note(f"compared: {counts['line']:,} by line, {counts['HTTP']:,} over HTTP")
    run.require(sum(counts.values()) <= 300, "at most 300 guesses of one address are compared in 3 s")


@attack("log", 32, "1 MB of unknown commands, 4 bytes each")
def log(run):
    before = run.server.log_bytes()
    client = run.line()
    data = wire.request("x", "", "") * 256
    drained = threading.Thread(target=lambda: wire.is_closed(client.sock, 3), daemon=True)
    drained.start()
    try:
        while run.sent < 1_000_000:
            run.sent += len(data)
            wire.send(client.sock, data)
    except wire.Closed:
        pass
    drained.join(30)
    written = run.server.log_bytes() - before
    run.note(f"{written:,} bytes of log")
    run.require(written <= 1_000_000, "the log grows by less than what was sent")


@attack("lockout", 32, "1 client takes locks as long as it gets any, and leaves")
def lockout(run):
    client = run.line()
    taken = 0
    try:
        for number in range(1500):
            run.sent += client.send("l", f"hog{number}", "0 30")
            taken += client.answer().startswith("ok")
        other = run.line()
        meanwhile = other.ask("l", "meanwhile", "0 30").split(" ")[0]
        client.close()
        time.sleep(0.5)
        after = other.ask("l", "afterwards", "0 30").split(" ")[0]
        run.note(f"{taken:,} taken, then others get `{meanwhile}`, after it left `{after}`")
        # While all of them are held, nobody can be given one more; once they are idle they make room.
        run.require(after == "ok", "others get locks once it has left")
    except wire.Closed as closed:
        run.require(False, f"others are served ({closed})")


@attack("lease", 32, "1 refused renewal with a lease of 292 years, then a restart that waits for the longest lease",
        flags=["--startup-grant-delay", "auto"], fence_file=True)
def lease(run):
    client = run.line()
    run.sent += client.send("n", "nosuch", f"{'0' * 32} {FOR_EVER_S}")
    run.note(f"answered `{client.answer()}`")
    run.restart()
    granted = run.line().ask("l", "key", "5 10")
    run.note(f"after the restart `{granted.split(' ')[0]}`")
    run.require(granted.startswith("ok"), "locks are granted after the restart")


@attack("long-lease", 32, "1 lock with a lease of 292 years")
def long_lease(run):
    client = run.line()
    run.sent += client.send("l", "key", f"0 {FOR_EVER_S}")
    words = client.answer().split(" ")
    granted = int(words[2]) if len(words) > 2 else 0
    run.note(f"granted for {granted:,} s")
    run.require(granted <= 86_400, "a lease lasts a day at most")


# Web pages


@attack("page-line", 32, "a web page posts lines to the line port")
def page_line(run):
    for pad in [b"", b"\n", b"\n\n"]:
        body = pad + b"kset\nevil\nowned\n"
        head = (f"POST / HTTP/1.1\r\nHost: {wire.HOST}:{run.server.port}\r\nOrigin: http://evil.example\r\n"
                f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n")
        sock = wire.dial(run.server.port)
        run.send(sock, head.encode() + body)
        wire.is_closed(sock, 1)
        sock.close()
    value = run.line().ask("kget", "evil")
    run.note(f"the value afterwards: `{value}`")
    run.require(value == "nil", "nothing of it is executed")


@attack("page-http", 32, "a web page posts to HTTP from another origin, as plain text, and by a rebound name")
def page_http(run):
    port = run.server.http_port
    tries = [
        ("foreign origin", "POST", "/v1/counters/c/add", [("Origin", "http://evil.example")]),
        ("cross-site", "POST", "/v1/counters/c/add", [("Sec-Fetch-Site", "cross-site")]),
        ("plain text", "POST", "/v1/counters/c/add",
         [("Origin", f"http://{wire.HOST}:{port}"), ("Content-Type", "text/plain")]),
        ("rebound name", "POST", "/v1/counters/c/add", [("Host", "evil.example")]),
        ("rebound name, read", "GET", "/v1/counters/c", [("Host", "evil.example")]),
    ]
    for name, method, path, headers in tries:
        body = b'{"delta":1}' if method == "POST" else b""
        if body and not any(header == "Content-Type" for header, _ in headers):
            headers = headers + [("Content-Type", "application/json")]
        run.sent += 200
        try:
            status, _ = wire.http(port, method, path, headers, body)
        except wire.Closed:
            status = 0
        run.require(not 200 <= status < 300, f"{name} is refused ({status or 'closed'})")
    value = run.line().ask("get", "c")
    run.note(f"the counter afterwards: `{value}`")
