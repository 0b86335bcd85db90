"""What programs may reach: names by the operator's list, addresses by what they are."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tool_runtime.config import EgressSettings
from tool_runtime.egress import EgressPolicy, Refusal

POLICY = EgressPolicy(
    ["pypi.test", "*.example.test", "build.test:8443", "münchen.test"], ["10.20.0.0/16", "fd00:7::/32"]
)


@pytest.mark.parametrize(
    ("host", "port", "refusal"),
    [
        ("pypi.test", 443, None),
        ("PyPI.Test.", 80, None),
        ("a.example.test", 443, None),
        ("a.b.example.test", 443, None),
        ("build.test", 8443, None),
        ("xn--mnchen-3ya.test", 443, None),
        ("MÜNCHEN.test", 443, None),
        ("example.test", 443, Refusal.HOST),
        ("badexample.test", 443, Refusal.HOST),
        ("pypi.test.evil.test", 443, Refusal.HOST),
        ("evil.test", 443, Refusal.HOST),
        ("pypi.test", 22, Refusal.PORT),
        ("pypi.test", 6379, Refusal.PORT),
        ("build.test", 443, Refusal.PORT),
        ("", 443, Refusal.NOT_A_HOST),
        ("pypi.test\0.evil.test", 443, Refusal.NOT_A_HOST),
        ("pypi.test/x", 443, Refusal.NOT_A_HOST),
        ("user@pypi.test", 443, Refusal.NOT_A_HOST),
        ("a" * 300 + ".test", 443, Refusal.NOT_A_HOST),
        ("pypi..test", 443, Refusal.NOT_A_HOST),
        ("127.0.0.1", 80, Refusal.NUMERIC),
        ("2130706433", 80, Refusal.NUMERIC),
        ("0x7f000001", 80, Refusal.NUMERIC),
        ("0177.0.0.1", 80, Refusal.NUMERIC),
        ("127.1", 80, Refusal.NUMERIC),
        ("169.254.169.254", 80, Refusal.NUMERIC),
        ("::1", 80, Refusal.NUMERIC),
        ("[::ffff:169.254.169.254]", 80, Refusal.NUMERIC),
        ("evil.test.0x7f", 80, Refusal.NUMERIC),
    ],
)
def test_a_name_passes_if_the_operator_named_it(host: str, port: int, refusal: Refusal | None) -> None:
    assert POLICY.refuse_host(host, port) is refusal


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"])
def test_public_addresses_pass(address: str) -> None:
    assert POLICY.refuse_address(address) is None


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
        ),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
        *("2001:0:0:0:0:0:80ff:fffe", "nonsense", "", "1.2.3"),
    ],
)
def test_addresses_that_are_not_public_do_not_in_whatever_wrapping(address: str) -> None:
    assert POLICY.refuse_address(address) is Refusal.ADDRESS


def test_networks_that_the_operator_named_pass() -> None:
    assert POLICY.refuse_address("10.20.3.4") is None
    assert POLICY.refuse_address("fd00:7::1") is None
    assert POLICY.refuse_address("10.21.0.1") is Refusal.ADDRESS


def test_without_rules_there_is_no_network() -> None:
    assert EgressPolicy([]).allows_nothing
    assert EgressPolicy([]).refuse_host("pypi.test", 443) is Refusal.HOST


@pytest.mark.parametrize(
    "rule", ["", "*", "http://pypi.test", "pypi.test:", "pypi.test:0", "pypi.test:70000", "1.2.3.4", "*.*.x"]
)
def test_a_rule_that_cannot_be_read_stops_the_start(rule: str) -> None:
    with pytest.raises(ValidationError):
        EgressSettings(allow_hosts=(rule,))


def test_a_network_that_cannot_be_read_stops_the_start() -> None:
    with pytest.raises(ValidationError):
        EgressSettings(allow_addresses=("10.0.0.0/99",))
