"""The verdicts of the system-call filter, by executing its instructions for both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from slime_sandbox.inside.filter import filter_program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED = 0x00050000 | errno.EPERM
OWN = 4711
#: name -> number on (x86_64, aarch64)
CALLS = {
    "write": (1, 64), "socket": (41, 198), "ptrace": (101, 117), "mount": (165, 40), "kill": (62, 129),
    "tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29), "clone": (56, 220), "clone3": (435, 435),
    "prlimit": (302, 261), "io_uring_setup": (425, 425), "fchmodat": (268, 53), "fchown": (93, 55),
    "utimensat": (280, 88), "fsetxattr": (190, 7), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "shmat": (30, 196), "semop": (65, 193),
}  # fmt: skip


def verdict(machine: str, call: str, *arguments: int, signals_of: int | None = OWN) -> int:
    """The kernel's packet-filter machine on `seccomp_data`: number, architecture, instruction pointer, arguments."""
    numbers = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", CALLS[call][list(ARCHITECTURES).index(machine)], ARCHITECTURES[machine], 0, *numbers)
    return execute(filter_program(machine, signals_of=signals_of), data)


def execute(program: bytes, data: bytes) -> int:
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, yes, no, operand = instructions[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            [value] = struct.unpack_from("=I", data, operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_are_refused_by_number_and_arguments(machine: str) -> None:
    for call in ("socket", "ptrace", "mount", "io_uring_setup", "kill", "shmat", "semop"):
        assert verdict(machine, call) == REFUSED
    assert verdict(machine, "write", 1) == ALLOWED
    assert verdict(machine, "clone", 17) == ALLOWED
    assert verdict(machine, "clone", 0x1000_0000 | 17) == REFUSED  # a user namespace
    assert verdict(machine, "clone3") == 0x00050000 | errno.ENOSYS
    for call in ("prlimit", "sched_setaffinity", "sched_setscheduler"):
        assert verdict(machine, call, 0) == ALLOWED
        assert verdict(machine, call, 1) == REFUSED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_without_namespaces_files_and_priorities_outside_are_safe(machine: str) -> None:
    for call in ("fchmodat", "fchown", "utimensat", "fsetxattr", "setpriority", "ioprio_set"):
        assert verdict(machine, call) == REFUSED
        assert verdict(machine, call, signals_of=None) == ALLOWED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_without_namespaces_signals_and_file_controls_are_restricted(machine: str) -> None:
    assert verdict(machine, "tgkill", OWN, OWN, 6) == ALLOWED
    assert verdict(machine, "tgkill", OWN + 1, OWN + 1, 9) == REFUSED
    assert verdict(machine, "tgkill", (7 << 32) | OWN, OWN, 6) == ALLOWED  # the kernel reads 32 bits as well
    for call, refused, allowed in (
        ("fcntl", (8, 15, 1024), (1, 3, 10)),
        ("ioctl", (0x8901, 0x8902, 0x4008_6602, 0x401C_5820), (0x5401,)),
    ):
        assert [verdict(machine, call, 0, argument) for argument in refused] == [REFUSED] * len(refused)
        assert {verdict(machine, call, 0, argument) for argument in allowed} == {ALLOWED}
    for call in ("kill", "tgkill", "fcntl", "ioctl"):
        assert verdict(machine, call, 1, 8, signals_of=None) == ALLOWED  # in namespaces there are no others


def test_system_calls_of_another_architecture_kill_the_process() -> None:
    data = struct.pack("=IIQ6Q", 1, 0x4000_0003, 0, *[0] * 6)  # x86 in 32 bits
    assert execute(filter_program("x86_64", signals_of=None), data) == KILLED
    data = struct.pack("=IIQ6Q", 0x4000_0001, ARCHITECTURES["x86_64"], 0, *[0] * 6)  # its x32 numbers
    assert execute(filter_program("x86_64", signals_of=None), data) == REFUSED


def test_other_architectures_have_no_filter() -> None:
    with pytest.raises(OSError, match="riscv64"):
        filter_program("riscv64", signals_of=None)
