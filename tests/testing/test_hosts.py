from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from reshard.errors import ConfigError, EnvironmentNotSupported, LayoutError, RefitTimeout
from reshard.testing.hosts import Cluster, LinkCount, TaskFailed, hear, parse_rate, supported

SECONDS = 30.0


@pytest.fixture(scope="session")
def allowed():
    reason = supported()
    if reason is not None:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture
def world(allowed):
    with Cluster({"A": None, "B": "50Mbit"}, rate="200Mbit") as cluster:
        yield cluster


# -- what runs on hosts ------------------------------------------------------------------------------------------------


def listen(talk, nbytes, address):
    with socket.create_server((address, 0)) as server:
        talk.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            got = 0
            while got < nbytes:
                got += len(connection.recv(1 << 16))
            return time.monotonic()


def feed(talk, nbytes, address, port):
    with socket.create_connection((address, port)) as connection:
        start = time.monotonic()
        connection.sendall(bytes(nbytes))
        talk.recv()  # the other has it all
        return start


def move(cluster, sender, receiver, nbytes):
    """Send bytes over a socket; returns the seconds it took."""
    address = cluster.address(receiver)
    listener = cluster.start(receiver, listen, nbytes, address)
    feeder = cluster.start(sender, feed, nbytes, address, listener.recv(SECONDS))
    end = listener.recv(SECONDS)
    feeder.send("done")
    return end - feeder.recv(SECONDS)


def make_shared_memory(talk):
    memory = shared_memory.SharedMemory("reshard-test", create=True, size=4096)
    talk.send(sorted(set(os.listdir("/dev/shm")) - {"tmp"}))
    talk.recv()
    memory.close()
    memory.unlink()


def bind_abstract_socket(talk):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0reshard-test")
        talk.send("bound")
        talk.recv()


def facts():
    inodes = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "mnt", "ipc", "uts", "pid")}
    return inodes, socket.gethostname(), [name for _, name in socket.if_nameindex()], os.environ["TMPDIR"]


def refuse():
    raise LayoutError("3 rows cannot be cut into 2.", tensor="w")


def stumble():
    print("a last word")
    raise ValueError("stumbled")


def wait_forever(talk):
    talk.send("waiting")
    talk.recv()


def leave(talk):
    os._exit(3)


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_hosts_share_no_namespace_with_each_other_or_with_this_machine(world):
    (a, name, devices, folder), (b, *_), here = world.run("A", facts), world.run("B", facts), facts_here()
    assert name == "A"
    assert sorted(devices) == ["eth0", "lo"]
    assert folder == "/dev/shm/tmp"
    for kind in a:
        assert len({a[kind], b[kind], here[kind]}) == 3, kind


def facts_here():
    return {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "mnt", "ipc", "uts", "pid")}


def test_shared_memory_of_one_host_is_not_there_on_another(world):
    first, second = (world.start(host, make_shared_memory) for host in "AB")
    assert hear([first, second], SECONDS) == [["reshard-test"], ["reshard-test"]]  # the same name, twice
    for task in (first, second):
        task.send("enough")
    hear([first, second], SECONDS)


def test_sockets_without_a_file_are_a_hosts_own(world):
    tasks = [world.start(host, bind_abstract_socket) for host in "AB"]
    assert hear(tasks, SECONDS) == ["bound", "bound"]


def test_a_hosts_name_leads_to_its_address_from_every_host(world):
    assert world.run("A", socket.gethostbyname, "B") == world.address("B")


def test_a_link_carries_no_more_than_its_rate_and_counts_what_it_carries(world):
    nbytes = 1 << 20
    before = {host: world.link_count(host) for host in world.hosts}
    seconds = move(world, "B", "A", nbytes)  # from the slow link to the fast one: nothing has to be sent twice
    moved = {host: world.link_count(host) - before[host] for host in world.hosts}
    burst = 256 << 10  # what a link that was idle lets pass at once, on its two ends
    assert seconds >= (nbytes - 2 * burst) / world.bytes_per_second("B")
    assert 0.99 * nbytes <= moved["B"].out_payload_nbytes <= 1.01 * nbytes
    assert 0.99 * nbytes <= moved["A"].in_payload_nbytes <= 1.01 * nbytes
    assert moved["B"].in_payload_nbytes < 0.01 * nbytes
    out, into = world.link_nbytes("A")
    assert out >= moved["A"].out_nbytes > 0
    assert into >= moved["A"].in_nbytes > nbytes


@pytest.mark.usefixtures("allowed")
def test_a_link_has_its_own_rate_or_that_of_all_or_none():
    assert Cluster({"A": None, "B": "1Gbit"}, rate="2Gbit").bytes_per_second("A") == 250e6
    assert Cluster({"A": None, "B": "1Gbit"}, rate="2Gbit").bytes_per_second("B") == 125e6
    with Cluster(["A", "B"]) as cluster:
        assert cluster.bytes_per_second("A") is None
        move(cluster, "A", "B", 1 << 20)


def test_programs_run_on_hosts_too(world):
    done = world.popen("B", ["sh", "-c", "read line; echo $line from $(cat /proc/sys/kernel/hostname) in $PWD"],
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    out, _ = done.communicate(b"greetings\n", SECONDS)
    assert (done.returncode, out.decode()) == (0, f"greetings from B in {os.getcwd()}\n")


def test_a_program_that_is_killed_at_once_ends_at_once(world):
    program = world.popen("B", ["sleep", "1000"])
    program.kill()
    assert program.wait(SECONDS) == -signal.SIGKILL


# -- functions ---------------------------------------------------------------------------------------------------------


def test_an_error_of_ours_arrives_as_it_was_raised(world):
    with pytest.raises(LayoutError, match="3 rows cannot be cut") as caught:
        world.run("A", refuse)
    assert caught.value.tensor == "w"
    assert "refuse on host A" in caught.value.__notes__[0]


def test_a_foreign_error_comes_with_its_traceback_and_log(world):
    with pytest.raises(TaskFailed, match=r"(?s)stumble on host B: ValueError: stumbled.*in stumble.*a last word"):
        world.run("B", stumble)


def test_an_error_of_ours_is_heard_before_those_who_only_lost_their_peer(world):
    with pytest.raises(LayoutError):
        hear([world.start("A", leave), world.start("B", call, refuse)], SECONDS)


def call(talk, function):
    return function()


def test_a_function_that_says_nothing_is_named(world):
    task = world.start("A", wait_forever, label="rank 7")
    assert task.recv(SECONDS) == "waiting"
    with pytest.raises(RefitTimeout, match=r"0\.1 s of: rank 7") as caught:
        task.recv(0.1)
    assert caught.value.labels == ("rank 7",)


def test_a_host_whose_power_has_gone_takes_its_tasks_with_it_and_no_others(world):
    ours, theirs = (world.start(host, wait_forever) for host in "AB")
    hear([ours, theirs], SECONDS)
    world.kill("B")
    with pytest.raises(TaskFailed, match="wait_forever on host B: the process died by signal SIGKILL"):
        theirs.recv(SECONDS)
    ours.send("go")
    assert ours.recv(SECONDS) is None


def test_a_function_that_no_other_process_can_find_is_refused(world):
    with pytest.raises(ConfigError, match="Define the function at the top of an importable module"):
        world.start("A", lambda talk: None)


# -- the end -----------------------------------------------------------------------------------------------------------


def left_in(nets):
    """Processes that still live in one of these network namespaces."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found += [link.parts[2]] if link.stat().st_ino in nets else []
        except OSError:  # it has ended
            continue
    return found


def machine():
    """What this machine has of its own: network devices, named namespaces, mounts."""
    devices = sorted(name for _, name in socket.if_nameindex())
    named = sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []
    return devices, named, Path("/proc/self/mountinfo").read_text()


@pytest.mark.usefixtures("allowed")
def test_a_cluster_is_not_seen_on_the_machine_and_leaves_nothing_there():
    before = machine()
    with pytest.raises(ZeroDivisionError), Cluster(["A", "B"], rate="1Gbit") as cluster:  # noqa: PT012
        task = cluster.start("B", wait_forever)
        task.recv(SECONDS)
        nets = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in cluster.pids()}
        assert len(nets) == 3
        assert left_in(nets)
        assert machine() == before
        raise ZeroDivisionError
    assert left_in(nets) == []
    assert machine() == before


SCRIPT = textwrap.dedent("""
    import signal, sys
    from reshard.testing.hosts import Cluster

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
    with Cluster(["A", "B"], rate="1Gbit") as cluster:
        sleeper = cluster.popen("B", ["sleep", "1000"])
        task = cluster.start("A", breakpoint)
        print(*cluster.pids(), flush=True)
        sys.stdin.read()
""")


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_ends_with_the_process_that_made_it(end):
    before = machine()
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], **options) as maker:
        watched = {}
        try:
            pids = [int(pid) for pid in maker.stdout.readline().split()]
            nets = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
            watched = {os.pidfd_open(int(pid)): pid for pid in left_in(nets)}
            assert len(watched) >= 4
            maker.send_signal(end)
            expiry = time.monotonic() + SECONDS
            for descriptor, pid in watched.items():
                assert select.select([descriptor], [], [], max(0.0, expiry - time.monotonic()))[0], f"{pid} lives on"
        finally:
            maker.kill()
            for descriptor in watched:
                os.close(descriptor)
    assert left_in(nets) == []
    assert machine() == before


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_machine_without_the_programs_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentNotSupported, match=r"missing here: ip, tc, .*apt-get install iproute2 util-linux"):
        Cluster(["A"]).__enter__()


def test_a_process_that_may_not_is_told_what_the_kernel_said(tmp_path, monkeypatch):
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(stat.S_IRWXU)
    for tool in ("ip", "tc", "nsenter", "mount"):
        (tmp_path / tool).symlink_to(fake)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EnvironmentNotSupported, match=r"told: unshare: unshare failed: Operation not permitted\. It"):
        Cluster(["A"]).__enter__()


@pytest.mark.parametrize("name", ["", "two words", "1st", "a/b"])
def test_a_host_has_a_name_that_a_host_can_have(name):
    with pytest.raises(ConfigError, match="no name for a host"):
        Cluster([name])


@pytest.mark.parametrize(
    ("text", "bits"), [("2Gbit", 2 * 10**9), ("500Mbit", 5 * 10**8), ("1.5 kbit/s", 1500), ("1 Tbitps", 10**12)]
)
def test_a_rate_is_a_number_of_bits_a_second(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["2", "2GB", "fast", "0Gbit", "-1Mbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_rate(text)


def test_the_header_of_every_packet_is_taken_off_the_count():
    count = LinkCount(1000, 660, 10, 10) - LinkCount(0, 0, 0, 0)
    assert (count.out_payload_nbytes, count.in_payload_nbytes) == (340, 0)
