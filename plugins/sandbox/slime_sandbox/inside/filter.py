"""The system-call filter: the calls that no program in the sandbox may make.

A filter is a program for the kernel's packet-filter machine (seccomp(2), mode FILTER). It cannot follow pointers, so it
decides by the number of the call and by plain arguments.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from slime_sandbox.inside import kernel

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
#: calls that are refused -> their numbers on (x86_64, aarch64)
_REFUSED = {
    # the network, and rings that would reach it behind the filter's back
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the user's existing shared memory, semaphores and queues, whose ids can be guessed
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    # namespaces, mounts and handles to files elsewhere
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # large and seldom used parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
}
#: refused if the program can see processes and files outside; None: the architecture lacks the call
_REFUSED_OUTSIDE: dict[str, tuple[int | None, int | None]] = {
    # signals to others
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    # priority of the user's other processes
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # rights, owner, times and attributes of the user's files, all of which Landlock permits
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
#: permitted only for the calling thread, which is process 0
_OWN_THREAD_ONLY = {
    "prlimit": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
_TGKILL = (234, 131)
#: (x86_64, aarch64) -> second arguments that are refused if the program can see processes and files outside
_REFUSED_COMMANDS: dict[tuple[int, int], tuple[int, ...]] = {
    # F_SETOWN, F_SETOWN_EX: the process to signal when data arrives; F_SETLEASE: delays others that open the file
    (72, 25): (8, 15, 1024),
    # FIOSETOWN, SIOCSPGRP: the process to signal; FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR: attributes of a file
    (16, 29): (0x8901, 0x8902, 0x4008_6602, 0x401C_5820),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_NEW_NAMESPACES = 0x7E02_0000

#: offsets of the first and the second argument, of which 32 bits count
_FIRST, _SECOND = 16, 24

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF_0000
_KILL = 0x8000_0000
_X32 = 0x4000_0000


def filter_program(machine: str, *, signals_of: int | None) -> bytes:
    """The filter's instructions.

    Args:
        machine: `platform.machine()`.
        signals_of: The only process that may be signalled, for a program that can see the machine's processes and
            files; None for a program in namespaces of its own.

    Raises:
        OSError: If the architecture's numbers are not known.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(f"no system-call filter for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    refused = {**_REFUSED, **({} if signals_of is None else _REFUSED_OUTSIDE)}
    deny = _RETURN, 0, 0, _refuse(errno.EPERM)
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
        (_JUMP_ABOVE, 0, 1, _X32),  # x86's second set of numbers
        deny,
    ]
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), deny]
    if signals_of is not None:
        program += [
            (_JUMP_EQUAL, 0, 4, _TGKILL[column]),
            (_LOAD, 0, 0, _FIRST),  # whose thread: a program that aborts signals itself
            (_JUMP_EQUAL, 1, 0, signals_of),
            deny,
            (_LOAD, 0, 0, 0),
        ]
        for numbers_of_call, wanted in _REFUSED_COMMANDS.items():
            program += [(_JUMP_EQUAL, 0, 2 * len(wanted) + 2, numbers_of_call[column]), (_LOAD, 0, 0, _SECOND)]
            for argument in wanted:
                program += [(_JUMP_EQUAL, 0, 1, argument), deny]
            program.append((_LOAD, 0, 0, 0))
    program += [
        # its flags lie behind a pointer; the C library then falls back to `clone`
        (_JUMP_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _refuse(errno.ENOSYS)),
        (_JUMP_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST),  # flags
        (_JUMP_ANY, 0, 1, _NEW_NAMESPACES),
        deny,
        (_LOAD, 0, 0, 0),
    ]
    for numbers_of_call in _OWN_THREAD_ONLY.values():
        program += [
            (_JUMP_EQUAL, 0, 4, numbers_of_call[column]),
            (_LOAD, 0, 0, _FIRST),  # whose
            (_JUMP_EQUAL, 1, 0, 0),
            deny,
            (_LOAD, 0, 0, 0),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def refuse_calls(*, signals_of: int | None) -> None:
    """Apply the filter to this process and its descendants, irrevocably; see `filter_program`. Raises `OSError`."""
    program = filter_program(platform.machine(), signals_of=signals_of)
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program) // 8, ctypes.addressof(instructions))))


def _refuse(number: int) -> int:
    return 0x0005_0000 | number
