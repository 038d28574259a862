"""A chain of Feetech STS3215 servos at the end of a serial line (a pseudo-terminal), as an SO-101's bus sees it.

Packets: FF FF, id, length, instruction (or error), parameters, checksum (the complement of the sum from the id on).
A servo here is its table of registers; with its torque on it is at once where a goal says, unless something holds it.
"""

from __future__ import annotations

import os
import pty
import select
import threading
import tty

MODEL = 777  # of the STS3215
LIMITS, HOMING, TORQUE, GOAL, PRESENT = 9, 31, 40, 42, 56  # addresses; positions have two bytes, the low one first
PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 1, 2, 3, 0x82, 0x83
EVERYONE = 0xFE


class FeetechBus:
    """`port`: where to open it. `answers` false: it hears and says nothing, as with the power cut."""

    def __init__(self, ids: range = range(1, 7), low: int = 1024, high: int = 3072) -> None:
        self._line, self._end = pty.openpty()
        tty.setraw(self._end)
        self.port = os.ttyname(self._end)
        self.servos = {i: bytearray(256) for i in ids}
        for servo in self.servos.values():
            servo[0:2] = bytes((3, 10))  # firmware
            self._put(servo, 3, MODEL)
            self._put(servo, LIMITS, low)
            self._put(servo, LIMITS + 2, high)
            self._put(servo, PRESENT, 2048)
            self._put(servo, GOAL, 2048)
        self.answers = True
        self.held: set[int] = set()  # servos that a hand holds fast
        self.goals: list[dict[int, int]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _put(servo: bytearray, address: int, value: int) -> None:
        servo[address : address + 2] = value.to_bytes(2, "little")

    def value(self, number: int, address: int, length: int = 2) -> int:
        return int.from_bytes(self.servos[number][address : address + length], "little")

    def place(self, number: int, position: int) -> None:
        """A hand moves a joint."""
        self._put(self.servos[number], PRESENT, position)

    @property
    def torque(self) -> list[int]:
        return [servo[TORQUE] for servo in self.servos.values()]

    def unplug(self) -> None:
        """Ends the line."""
        self._closing.set()
        self._thread.join(5)
        os.close(self._line)
        os.close(self._end)

    def _run(self) -> None:
        heard = bytearray()
        while not self._closing.is_set():
            if select.select([self._line], [], [], 0.05)[0]:
                heard += os.read(self._line, 4096)
            while len(heard) >= 4 and len(heard) >= heard[3] + 4:
                packet, heard = heard[: heard[3] + 4], heard[heard[3] + 4 :]
                assert packet[:2] == b"\xff\xff" and packet[-1] == ~sum(packet[2:-1]) & 0xFF
                self._obey(packet[2], packet[4], packet[5:-1])

    def _obey(self, number: int, instruction: int, parameters: bytearray) -> None:
        if not self.answers:
            return
        if instruction == SYNC_WRITE:
            address, length = parameters[:2]
            rows = [parameters[i : i + 1 + length] for i in range(2, len(parameters), 1 + length)]
            if address == GOAL:
                self.goals.append({row[0]: int.from_bytes(row[1:3], "little") for row in rows})
            for row in rows:
                self._write(row[0], address, row[1:])
        elif instruction == SYNC_READ:
            for one in parameters[2:]:
                self._answer(one, self.servos[one][parameters[0] : parameters[0] + parameters[1]])
        elif number in self.servos:
            if instruction == WRITE:
                self._write(number, parameters[0], parameters[1:])
            reads = instruction == READ
            self._answer(number, self.servos[number][parameters[0] : parameters[0] + parameters[1]] if reads else b"")

    def _write(self, number: int, address: int, data: bytes | bytearray) -> None:
        servo = self.servos[number]
        servo[address : address + len(data)] = data
        if servo[TORQUE] and address == GOAL and number not in self.held:
            servo[PRESENT : PRESENT + 2] = servo[GOAL : GOAL + 2]

    def _answer(self, number: int, data: bytes | bytearray) -> None:
        body = bytes((number, len(data) + 2, 0)) + bytes(data)
        os.write(self._line, b"\xff\xff" + body + bytes((~sum(body) & 0xFF,)))
