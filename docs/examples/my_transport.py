"""A transport of your own, in a contract `transport: {kind: "my_transport:UdpConfig"}`: datagrams [topic, fields]."""

import contextlib
import socketserver
import threading
from collections import Counter, defaultdict

import msgpack
from pydantic import Field

from real_robot.transports.base import TransportConfig, TransportError


class UdpConfig(TransportConfig):
    kind: str = "my_transport:UdpConfig"
    listen: int = Field(ge=1024, le=65535, description="The port on this machine that the robot sends to.")
    robot: tuple[str, int] = Field(description="The robot's address and port.")

    def open(self):
        try:
            return UdpTransport(self)
        except OSError as error:
            raise TransportError(f"port {self.listen}: {error}; choose another for transport.listen") from error


class UdpTransport(socketserver.UDPServer):
    max_packet_size = 65507
    has_listener = staticmethod(lambda topic: True)  # UDP does not say.
    joints_of = staticmethod(lambda topic: None)  # Nor which joints a topic has; its messages name them.

    def __init__(self, config: UdpConfig):
        super().__init__(("127.0.0.1", config.listen), socketserver.BaseRequestHandler)
        self.robot, self.fault, self.unreadable, self._handlers = config.robot, None, Counter(), defaultdict(list)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def subscribe(self, topic, message_type, qos, handler):
        self._handlers[topic].append((message_type, handler))

    def advertise(self, topic, message_type, qos):
        def publish(message):
            with contextlib.suppress(OSError):  # Nobody listens. A link that can tell says so in `fault`.
                self.socket.sendto(msgpack.packb([topic, message.tree()], default=lambda a: a.tolist()), self.robot)

        return publish

    def finish_request(self, request, client_address):  # In the receiving thread, for each datagram.
        topic = "?"
        try:
            topic, tree = msgpack.unpackb(request[0])
            messages = [(handler, kind.from_tree(tree)) for kind, handler in self._handlers.get(topic, ())]
        except (ValueError, TypeError):  # A MessageError too is a ValueError.
            self.unreadable[str(topic)] += 1
        else:
            for handler, message in messages:
                handler(message)

    def close(self):
        self.shutdown()
        self.server_close()
