"""The servers of ``internet.py``: ``serve`` prints the greeting's port; ``asked`` prints what names were asked for."""

import json
import socket
import socketserver
import sys
import threading
from typing import ClassVar

ADDRESS = "11.22.33.10"
BANNER = b"this is the internet\n"
_ASKED_PORT = 5353


class Greeting(socketserver.BaseRequestHandler):
    """Says who it is, then repeats what it is told."""

    def handle(self):
        self.request.sendall(BANNER)
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Web(socketserver.StreamRequestHandler):
    """Answers any request with what it got, head and body, and its address."""

    def handle(self):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ),
            0,
        )
        body = head + self.rfile.read(length)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


class Names(socketserver.BaseRequestHandler):
    """Answers every question for an address with the internet's."""

    asked: ClassVar[list[str]] = []

    def handle(self):
        data, reply = self.request
        labels, at = [], 12
        while length := data[at]:
            labels.append(data[at + 1 : at + 1 + length].decode())
            at += 1 + length
        question = data[12 : at + 5]
        self.asked.append(".".join(labels))
        wanted = question[-4:] == b"\x00\x01\x00\x01"
        answer = (
            b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04" + socket.inet_aton(ADDRESS) if wanted else b""
        )
        head = data[:2] + b"\x81\x80\x00\x01" + (b"\x00\x01" if wanted else b"\x00\x00") + b"\x00" * 4
        reply.sendto(head + question + answer, self.client_address)


class Asked(socketserver.BaseRequestHandler):
    """Tells what names were asked for."""

    def handle(self):
        self.request.sendall(json.dumps(Names.asked).encode())


class Server(socketserver.ThreadingTCPServer):
    """Serves each caller on a thread."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024


def serve():
    """Serve for ever."""
    greeting = Server(("0.0.0.0", 0), Greeting)
    others = [
        Server(("0.0.0.0", 80), Web),
        Server(("0.0.0.0", 443), Greeting),
        Server(("0.0.0.0", 25), Greeting),
        Server(("127.0.0.1", _ASKED_PORT), Asked),
        socketserver.ThreadingUDPServer(("0.0.0.0", 53), Names),
    ]
    for server in others:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(greeting.server_address[1], flush=True)
    greeting.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        with socket.create_connection(("127.0.0.1", _ASKED_PORT), 10) as connection:
            print(b"".join(iter(lambda: connection.recv(65536), b"")).decode())
