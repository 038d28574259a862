"""What people write for a server, and the names by which a server lets itself be called."""

from __future__ import annotations

import http.client
import socket

import pytest
from toy_server import toy_thread

from real_robot.serving.client import PolicyClient
from real_robot.serving.network import AddressError, HostNames, is_loopback, server_url
from real_robot.serving.server import ServeConfig


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("gpu-box", "ws://gpu-box:8000"),
        ("gpu-box:9000", "ws://gpu-box:9000"),
        (" 10.0.0.5 ", "ws://10.0.0.5:8000"),
        ("[::1]", "ws://[::1]:8000"),
        ("[fe80::1]:9000", "ws://[fe80::1]:9000"),
        ("ws://gpu-box", "ws://gpu-box:8000"),
        ("wss://gpu-box", "wss://gpu-box:8000"),
        ("wss://gpu-box.lab:443/policy/1", "wss://gpu-box.lab:443/policy/1"),
        ("ws://[::1]:9", "ws://[::1]:9"),
    ],
)
def test_addresses_that_people_write(text: str, url: str) -> None:
    assert server_url(text) == url == PolicyClient(text).address


def test_what_has_no_scheme_is_encrypted_where_an_authority_is_given() -> None:
    assert server_url("gpu-box", encrypted=True) == "wss://gpu-box:8000"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the host is missing"),
        (":8000", "the host is missing"),
        ("ws://", "the host is missing"),
        ("::1", r"an IPv6 address stands in brackets, such as \[::1\]:8000"),
        ("fe80::1:8000", "in brackets"),
        ("[::1", "Invalid IPv6"),
        ("[gpu-box]:8000", "gpu-box"),
        ("gpu-box:", "the port is missing: 1 to 65535"),
        ("gpu-box:0", "the port is missing"),
        ("gpu-box:99999", "out of range"),
        ("gpu-box:http", "'http'"),
        ("http://gpu-box:8000", "http:// is not spoken here"),
        ("gpu box", "not a host's name"),
        ("me:secret@gpu-box", "not a host's name"),
        ("gpu-box?x=1", "not a host's name"),
    ],
)
def test_what_is_none_is_told_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as told:
        PolicyClient(text)
    assert repr(text) in str(told.value) and "[IPv6]:port" in str(told.value) and "8000" in str(told.value)


def test_a_server_on_ipv6_is_found_in_brackets() -> None:
    assert ServeConfig(host="[::1]").host == "::1"
    with toy_thread(host="::1") as server, PolicyClient(f"[::1]:{server.port}") as client:
        assert client.metadata["server"] == "vla-rl"


MACHINE = socket.gethostname().lower()


@pytest.mark.parametrize(
    ("listening", "host", "accepted"),
    [
        ("127.0.0.1", "localhost:8080", True),
        ("127.0.0.1", "[::1]:8080", True),
        ("127.0.0.1", "10.0.0.5:8080", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "robot.lab", True),
        ("0.0.0.0", "127.0.0.1:8080", True),
        ("0.0.0.0", "10.0.0.5:8080", True),  # by which the request came in
        ("::", "10.0.0.5:8080", True),
        ("0.0.0.0", "10.0.0.6:8080", False),
        ("0.0.0.0", f"{MACHINE}:8080", True),
        ("0.0.0.0", f"{MACHINE.upper()}.:8080", True),
        ("0.0.0.0", "evil.example:8080", False),
        ("0.0.0.0", "127.0.0.1.evil.example", False),
        ("0.0.0.0", "ROBOT.lab", True),
        ("0.0.0.0", "", False),
        ("0.0.0.0", "[::1", False),
        ("bench1.lab", "bench1.lab:8080", True),
    ],
)
def test_a_server_answers_to_names_of_its_own(listening: str, host: str, accepted: bool) -> None:
    local = ("::ffff:10.0.0.5", 8080, 0, 0) if listening == "::" else ("10.0.0.5", 8080)
    refusal = HostNames(listening, ["robot.lab"]).refusal([host], local)
    assert (refusal is None) is accepted, refusal
    if refusal:
        assert repr(host) in refusal and "--allow-host" in refusal


def test_a_host_is_said_once_and_an_allowed_one_is_a_name() -> None:
    names = HostNames("127.0.0.1")
    assert "got 0" in str(names.refusal([], ("127.0.0.1", 1))) and "got 2" in str(names.refusal(["a", "b"], ()))
    for wrong in ("robot.lab:8080", "http://robot.lab", "", "*"):
        with pytest.raises(AddressError, match="--allow-host"):
            HostNames("0.0.0.0", [wrong])
    assert not is_loopback("localhost.evil.example")


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
def test_health_is_not_told_to_a_rebound_name(listening: str) -> None:
    """DNS rebinding: the browser connects to us under a name of the page's."""
    token = "0123456789abcdef"
    with toy_thread(host=listening, token=token, allow_host=("robot.lab",)) as server:
        for name, status in (("evil.example", 403), ("127.0.0.1", 200), ("robot.lab:8000", 200)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request("GET", "/healthz", headers={"Host": name})
            response = connection.getresponse()
            text = response.read().decode()
            connection.close()
            assert response.status == status, text
            assert status == 200 or "'evil.example'" in text
        with PolicyClient(server.address, token) as client:
            assert client.metadata["server"] == "vla-rl"
