"""Serve vla-rl on other machines: a host for each connection that knows the token.

Copy this file and `host.py`, side by side, to the simulator's machine, and start it with the simulator's Python:

    python listen.py 0.0.0.0:5555 --env my_lab.bench:Bench --token-file token.txt

Both sides prove that they know the token without sending it. What follows is neither encrypted nor
signed: use it in a network you trust, or through `ssh -L`.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from host import PROTOCOL, proof, recv_message, send_message  # the file beside this one

AUTH_SECONDS = 10.0
HOST = Path(__file__).resolve().with_name("host.py")
MIN_TOKEN = 16  # characters


def admit(sock: socket.socket, token: bytes) -> bool:
    """Let the other side prove that it knows the token, and prove it too. The token itself is not sent."""
    sock.settimeout(AUTH_SECONDS)
    challenge = os.urandom(32)
    send_message(sock, {"protocol": PROTOCOL, "challenge": challenge})
    answer = recv_message(sock, limit=1024)
    if not hmac.compare_digest(answer["proof"], proof(token, "client", challenge)):
        return False
    send_message(sock, {"proof": proof(token, "host", answer["challenge"])})
    sock.settimeout(None)
    return True


def listen(name: str, port: int, token: bytes, env: str, max_hosts: int) -> None:
    """Start one host for each connection that knows the token, until ended."""
    server = socket.create_server((name, port))
    print(f"listening on {name}:{server.getsockname()[1]} for {env}", flush=True)
    children: list[subprocess.Popen[bytes]] = []
    counting = threading.Lock()

    def meet(sock: socket.socket, peer: Any) -> None:
        with sock:
            try:
                known = admit(sock, token)
            except (OSError, EOFError, KeyError, TypeError) as error:
                known, peer = False, f"{peer} ({type(error).__name__})"
            with counting:  # of several that come at once, each counts those before it
                children[:] = [child for child in children if child.poll() is None]
                if not known or len(children) >= max_hosts:
                    print(f"refused {peer}: " + ("too many hosts" if known else "no valid token"), flush=True)
                    return
                command = [sys.executable, "-u", str(HOST), "--fd", str(sock.fileno()), "--env", env]
                children.append(subprocess.Popen(command, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL))

    try:
        while True:
            sock, peer = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if threading.active_count() <= max_hosts:
                threading.Thread(target=meet, args=(sock, peer), daemon=True).start()
            else:
                sock.close()
    finally:
        for child in children:
            child.kill()  # its guard ends what it has started


def main() -> None:
    """Command line of `python listen.py`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "address", metavar="ADDRESS:PORT", help="where to listen; 127.0.0.1:5555 for this machine alone"
    )
    parser.add_argument("--env", required=True, metavar="MODULE:CLASS", help="the only environment it gives")
    parser.add_argument("--token-file", required=True, help=f"file with a secret of {MIN_TOKEN} characters or more")
    parser.add_argument("--max-hosts", type=int, default=16, help="connections served at once (16)")
    args = parser.parse_args()
    name, _, port = args.address.rpartition(":")
    if not name or not port.isdigit():
        parser.error(f"got {args.address!r}, expected ADDRESS:PORT, for example 127.0.0.1:5555")
    token = Path(args.token_file).read_text(encoding="utf-8").strip().encode()
    if len(token) < MIN_TOKEN:
        parser.error(f"--token-file: the secret has {len(token)} characters, {MIN_TOKEN} are the least")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        listen(name, int(port), token, args.env, args.max_hosts)


if __name__ == "__main__":
    main()
