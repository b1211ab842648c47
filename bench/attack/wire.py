"""What attackers and bystanders speak: the line protocol, HTTP/1.1 and HTTP/2, as raw bytes over sockets.

Nothing here trusts the server to behave: every socket has a timeout, and a closed connection is an answer.
"""

import socket
import struct

HOST = "127.0.0.1"
PATIENCE_S = 15.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 2, 4, 6, 8
END_STREAM, END_HEADERS = 1, 4


class Closed(Exception):
    """The server closed the connection, reset it, or does not accept it."""


def dial(port, source=None, receive_bytes=None, patience=PATIENCE_S):
    """A connection from `source`, another loopback address if given, with a small receive buffer if asked for."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(patience)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if source:
            sock.bind((source, 0))
        sock.connect((HOST, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        sock.close()
        raise Closed(str(error)) from error
    return sock


def send(sock, data):
    try:
        sock.sendall(data)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(sock, size=65536):
    try:
        data = sock.recv(size)
    except socket.timeout as error:
        raise Closed("no answer in time") from error
    except OSError as error:
        raise Closed(str(error)) from error
    if not data:
        raise Closed("closed by the server")
    return data


def is_closed(sock, patience):
    """Whether the server ends the connection within `patience` seconds; whatever else it says is thrown away."""
    sock.settimeout(patience)
    try:
        while True:
            if not sock.recv(1 << 20):
                return True
    except socket.timeout:
        return False
    except OSError:
        return True


class Line:
    """A connection of the line protocol that waits for each answer."""

    def __init__(self, port, token=None, source=None, receive_bytes=None, patience=PATIENCE_S):
        self.sock = dial(port, source, receive_bytes, patience)
        self.rest = b""
        if token and self.ask("auth", "_", token) != "ok":
            raise Closed("the token was refused")

    def send(self, command, key="_", argument=""):
        data = request(command, key, argument)
        send(self.sock, data)
        return len(data)

    def answer(self):
        while b"\n" not in self.rest:
            self.rest += receive(self.sock)
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode("utf-8", "replace")

    def ask(self, command, key="_", argument=""):
        self.send(command, key, argument)
        return self.answer()

    def close(self):
        self.sock.close()


def request(command, key="_", argument=""):
    """Three lines. Text or bytes."""
    parts = [part if isinstance(part, bytes) else part.encode() for part in (command, key, argument)]
    return b"\n".join(parts) + b"\n"


def http(port, method, path, headers=(), body=b"", source=None):
    """One HTTP/1.1 request on a connection of its own: status and body."""
    sock = dial(port, source)
    lines = [f"{method} {path} HTTP/1.1"]
    given = {name.lower() for name, _ in headers}
    if "host" not in given:
        lines.append(f"Host: {HOST}:{port}")
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    try:
        send(sock, "\r\n".join(lines).encode() + body)
        data = b""
        while True:
            try:
                data += receive(sock)
            except Closed:
                break
    finally:
        sock.close()
    head, _, content = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise Closed("no HTTP answer")
    return int(words[1]), content


def frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class Headers:
    """Header blocks of HTTP/2 without Huffman code: names and values go into the table once, then they are a byte."""

    # The entries of the static table that are used here.
    STATIC = {
        (":method", "GET"): 2,
        (":method", "POST"): 3,
        (":scheme", "http"): 6,
    }
    STATIC_NAMES = {":authority": 1, ":path": 4, "authorization": 23, "content-type": 31}

    def __init__(self):
        self.table = []

    def block(self, fields):
        out = b""
        for field in fields:
            if field in self.STATIC:
                out += bytes([0x80 | self.STATIC[field]])
            elif field in self.table:
                # The newest entry is number 62.
                out += bytes([0x80 | 62 + self.table[::-1].index(field)])
            else:
                name, value = field
                number = self.STATIC_NAMES.get(name)
                out += bytes([0x40 | number]) if number else b"\x40" + text(name)
                out += text(value)
                self.table.append(field)
        return out


def text(value):
    """A string of a header block, at most 126 bytes of it."""
    data = value.encode()
    assert len(data) < 127, "longer strings need more than one byte of length"
    return bytes([len(data)]) + data
