"""The server under attack: started, measured and ended here, never by name.

`Monitor` is a process of its own (`bench/attacks --monitor`), so that what the attacker computes delays neither the
bystander nor the watchdog that ends a server before it takes the machine's memory.
"""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from attack import wire

RSS_BYTES_MAX = 6 << 30
START_S = 30
SAMPLE_S = 0.02
PING_S = 0.005


def free_port():
    with socket.socket() as sock:
        sock.bind((wire.HOST, 0))
        return sock.getsockname()[1]


def memory_of(pid):
    """Resident memory now and its highest since the mark was reset, in bytes; `None` once the process is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status if line.startswith(("VmRSS", "VmHWM")))
        return tuple(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        return None


class Server:
    """One dflockd process on free loopback ports, with what the system says about it."""

    def __init__(self, binary, flags=(), durable=False, descriptors=None, token=None, fence_file=False,
                 directory=None):
        self.binary, self.token = binary, token
        self.directory = directory or tempfile.mkdtemp(prefix="dflockd-attack-")
        self.owns_directory = directory is None
        self.port, self.http_port, self.grpc_port = free_port(), free_port(), free_port()
        self.log = os.path.join(self.directory, "stderr")
        arguments = [binary, "--port", self.port, "--http-port", self.http_port, "--grpc-port", self.grpc_port]
        if durable:
            arguments += ["--raft-dir", os.path.join(self.directory, "raft"), "--node-id", "n1"]
            arguments += ["--raft-addr", f"{wire.HOST}:{free_port()}", "--cluster-bootstrap"]
        if fence_file:
            arguments += ["--fence-state-file", os.path.join(self.directory, "fences")]
        if token:
            arguments += ["--auth-token", token]
        arguments += flags
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLOCKD_")}

        def limit():
            if descriptors:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=limit,
            )
        self.pid = self.process.pid
        self.wait_until_ready()

    def wait_until_ready(self):
        deadline = time.monotonic() + START_S
        while True:
            try:
                client = wire.Line(self.port, self.token, patience=2)
                ready = client.ask("kget", "ready") == "nil"
                client.close()
                if ready:
                    return
            except wire.Closed:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.said()[-2000:]
                self.stop()
                raise RuntimeError(f"the server did not start:\n{said}")
            time.sleep(0.05)

    def said(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def log_bytes(self):
        return os.path.getsize(self.log)

    def cpu_seconds(self):
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_alive(self):
        return self.process.poll() is None

    def stop(self, keep=False):
        if self.is_alive():
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.owns_directory and not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


class Monitor:
    """A bystander that pings without pause, and the watchdog over the server's memory."""

    def __init__(self, server):
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--monitor", str(server.pid), str(server.port), server.token or ""],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        # The first line says that the bystander is connected and that the mark of memory is reset.
        self.before = json.loads(self.process.stdout.readline())["rss"]

    def stop(self):
        """What was seen: `rss_max`, `worst_s`, `pings`, `lost`, `ended` (by the watchdog)."""
        try:
            out, _ = self.process.communicate("stop\n", timeout=60)
            return json.loads(out)
        except (subprocess.TimeoutExpired, ValueError):
            self.process.kill()
            self.process.wait()
            raise


def monitor(pid, port, token):
    """The process behind `Monitor`: says one line when it has begun, and one at the end of its input."""
    seen = {"rss_max": 0, "worst_s": 0.0, "pings": 0, "lost": 0, "ended": False}
    bystander = Bystander(port, token)
    # Resets the mark of the highest memory, where the system lets us; sampling finds what it does not.
    try:
        with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
    except OSError:
        pass
    rss, _ = memory_of(pid) or (0, 0)
    print(json.dumps({"rss": rss}), flush=True)
    bystander.start()
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    while not stop.wait(SAMPLE_S):
        memory = memory_of(pid)
        if memory is None:
            continue
        seen["rss_max"] = max(seen["rss_max"], *memory)
        if memory[0] > RSS_BYTES_MAX and not seen["ended"]:
            os.kill(pid, signal.SIGKILL)
            seen["ended"] = True
    bystander.stop()
    memory = memory_of(pid)
    if memory:
        seen["rss_max"] = max(seen["rss_max"], *memory)
    seen.update(worst_s=bystander.worst_s, pings=bystander.pings, lost=bystander.lost)
    print(json.dumps(seen), flush=True)


class Bystander(threading.Thread):
    """A client that did nothing wrong: a ping each few milliseconds on a connection it has had all along."""

    def __init__(self, port, token):
        super().__init__(daemon=True)
        self.port, self.token = port, token
        self.worst_s, self.pings, self.lost = 0.0, 0, 0
        self.begun = None
        self.ends = threading.Event()
        self.client = wire.Line(port, token, patience=30)

    def run(self):
        while not self.ends.is_set():
            self.begun = time.monotonic()
            try:
                if self.client is None:
                    self.client = wire.Line(self.port, self.token, patience=5)
                self.client.ask("ping")
                self.pings += 1
                self.worst_s = max(self.worst_s, time.monotonic() - self.begun)
            except wire.Closed:
                self.lost += 1
                self.client = None
                self.ends.wait(0.1)
            self.begun = None
            self.ends.wait(PING_S)

    def stop(self):
        self.ends.set()
        # A ping that is not answered yet counts with what it has waited.
        self.join(1)
        begun = self.begun
        if begun is not None:
            self.worst_s = max(self.worst_s, time.monotonic() - begun)
