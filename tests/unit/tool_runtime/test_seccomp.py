"""The system-call filter, run by a small interpreter of classic BPF instead of the kernel."""

from __future__ import annotations

import struct

import pytest

from tool_runtime import seccomp
from tool_runtime.seccomp import Architecture, UnsupportedArchitecture, architecture, filter_program

ALLOW, EPERM, ENOSYS, KILL = "allow", "EPERM", "ENOSYS", "kill"
MACHINES = ["x86_64", "aarch64"]


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> str:
    """What the filter says to one system call."""
    arch = architecture(machine)
    padded = [argument & 0xFFFFFFFFFFFFFFFF for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("=IIQ6Q", number, arch.audit if audit is None else audit, 0, *padded)
    result = interpret(filter_program(arch), data)
    return {
        0x7FFF0000: ALLOW,
        0x00050001: EPERM,
        0x00050026: ENOSYS,
        0x80000000: KILL,
    }[result]


def interpret(program: bytes, data: bytes) -> int:
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[
                code
            ]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
class TestEveryArchitecture:
    def test_it_fits_the_kernels_limit(self, machine: str) -> None:
        assert len(filter_program(architecture(machine))) // 8 < 4096

    def test_every_denied_call_fails_with_eperm(self, machine: str) -> None:
        assert {verdict(machine, number) for number in architecture(machine).denied} == {EPERM}

    def test_ordinary_calls_pass(self, machine: str) -> None:
        ordinary = {"x86_64": [0, 1, 2, 9, 39, 59, 60, 186, 231, 257], "aarch64": [56, 57, 63, 64, 93, 172, 221, 222]}
        assert {verdict(machine, number) for number in ordinary[machine]} == {ALLOW}

    def test_a_foreign_architecture_is_killed(self, machine: str) -> None:
        i386 = 0x40000003
        assert verdict(machine, 1, audit=i386) == KILL

    def test_clone3_is_said_not_to_exist_so_that_libraries_use_clone(self, machine: str) -> None:
        assert verdict(machine, architecture(machine).clone3) == ENOSYS

    @pytest.mark.parametrize("flag", [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
    def test_clone_makes_no_namespace_in_any_company(self, machine: str, flag: int) -> None:
        arch = architecture(machine)
        assert verdict(machine, arch.clone, flag) == EPERM
        assert verdict(machine, arch.clone, 0x3D0F00 | flag) == EPERM

    def test_clone_makes_processes_and_threads(self, machine: str) -> None:
        arch = architecture(machine)
        assert verdict(machine, arch.clone, 0x1200011) == ALLOW  # fork as glibc does it
        assert verdict(machine, arch.clone, 0x3D0F00) == ALLOW  # pthread_create

    @pytest.mark.parametrize("command", [0x5412, 0x541C, 0xFFFFFFFF00005412, 0x1_0000_541C])
    def test_terminal_injection_is_refused_whatever_the_high_bits(self, machine: str, command: int) -> None:
        assert verdict(machine, architecture(machine).ioctl, 0, command) == EPERM

    def test_other_ioctls_pass(self, machine: str) -> None:
        assert verdict(machine, architecture(machine).ioctl, 0, 0x5401) == ALLOW

    @pytest.mark.parametrize(
        ("family", "answer"),
        [
            (2, ALLOW),
            (10, ALLOW),
            (16, ALLOW),
            (1, EPERM),
            (17, EPERM),
            (38, EPERM),
            (40, EPERM),
            (0x1_0000_0002, ALLOW),
        ],
    )
    def test_sockets_open_for_the_named_families_only(self, machine: str, family: int, answer: str) -> None:
        # The kernel takes the family as an int: its high half means nothing.
        assert verdict(machine, architecture(machine).socket, family) == answer


def test_x32_calls_do_not_exist() -> None:
    assert verdict("x86_64", 0x40000000 | 165) == ENOSYS
    assert verdict("x86_64", 0x40000000 | 1) == ENOSYS


def test_no_socket_at_all_can_be_asked_for() -> None:
    arch = architecture("x86_64")
    data = struct.pack("=IIQ6Q", arch.socket, arch.audit, 0, 2, 0, 0, 0, 0, 0)
    assert interpret(filter_program(arch, families=()), data) == 0x00050001


def test_an_unknown_processor_has_no_filter() -> None:
    with pytest.raises(UnsupportedArchitecture):
        architecture("s390x")


def test_the_tables_name_each_call_once() -> None:
    tables: list[Architecture] = [architecture(machine) for machine in MACHINES]
    for arch in tables:
        assert len(set(arch.denied)) == len(arch.denied)
        assert not {arch.clone, arch.clone3, arch.ioctl, arch.socket} & set(arch.denied)
    assert seccomp.Family.INET == 2
