"""One vLLM engine over HTTP: each phase in order, each failure by name, back to whole weights; vLLM is not needed."""

from __future__ import annotations

import os
import resource
import time

import pytest
from tests.integrations.fake_vllm import FakeVLLM, WorkerError

from reshard.errors import ConfigError, EnvironmentNotSupported, PeerError, RefitTimeout, TransportError
from reshard.integrations.vllm.control import HTTPControl
from reshard.integrations.vllm.drive import EngineDrive
from reshard.integrations.vllm.routes import Routes, _is_readable
from reshard.refit.engines import SessionFacts
from reshard.transports.base import Deadline

JOIN = ["POST init_weight_transfer_engine", "POST start_weight_update"]


def facts_of(size=1, **asked):
    """A session of one trainer rank and an engine of so many workers."""
    expect = {"trainer": 1, "engine": size}
    options = ("staged", "sum", "reshard", "auto", 1 << 20, 10.0, ("engine",))
    return SessionFacts("tcp://127.0.0.1:1", "default", "trainer", expect, *options, **asked)


@pytest.fixture
def server():
    with FakeVLLM() as fake:
        yield fake


def drive_of(server, *, pause="keep", clear_cache=True, timeout=5.0):
    return EngineDrive("engine", HTTPControl(Routes(server.url, timeout)), pause=pause, clear_cache=clear_cache)


def refit(drive, version, size=1):
    """All phases of a refit that goes well."""
    deadline = Deadline(10.0)
    drive.begin(facts_of(size), "me", version, deadline)
    drive.pause(deadline)
    drive.install(deadline)
    drive.finish(deadline)


# -- phases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_refit_receives_before_the_pause_and_installs_within_it(mode, clear_cache, server):
    drive = drive_of(server, pause=mode, clear_cache=clear_cache)
    refit(drive, 7)
    assert server.asked() == [
        *JOIN,
        "POST update_weights action=receive version=7",
        f"POST pause clear_cache={str(clear_cache).lower()} mode={mode}",
        "POST update_weights action=install version=7",
        "POST finish_weight_update weight_version=7",
        "POST resume",
    ]
    assert (server.label, server.paused, server.active) == ("7", False, False)
    assert drive.serves == "engine serves version 7"
    assert drive.pause_seconds > 0
    assert {"joining", "pausing", "installing", "finishing", "resuming"} <= set(drive.seconds)
    steps = drive.seconds["calling"] + drive.seconds["waiting"] + drive.seconds["copying"]
    assert steps == pytest.approx(drive.seconds["installing"])


def test_a_server_that_cannot_say_what_its_install_took_is_refitted_all_the_same(server):
    server.missing.add("/collective_rpc")
    drive = drive_of(server)
    refit(drive, 7)
    assert drive.serves == "engine serves version 7"
    assert "calling" not in drive.seconds


def test_the_state_of_a_server_is_read_once_and_its_workers_are_told_of_the_session_each_time(server):
    drive = drive_of(server)
    refit(drive, 1)
    assert [c for c in server.calls if c.startswith("GET")] == [
        "GET health",
        "GET version",
        "GET get_world_size include_dp=true",
        "GET weight_info",
        "GET is_paused",
    ]
    seen = len(server.calls)
    refit(drive, 2)
    assert server.asked(seen)[:2] == JOIN
    assert not any(call.startswith("GET") for call in server.calls[seen:])


def test_the_calls_of_a_refit_share_a_connection(server):
    refit(drive_of(server), 1)
    assert server.connections == 1


def test_a_process_with_many_open_files_shares_a_connection_too(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        refit(drive_of(server), 1)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert server.connections == 1


def test_a_connection_that_the_server_has_closed_is_not_used_again(server):
    server.hangs_up = True
    routes = Routes(server.url, 5.0)
    for count in (1, 2, 3):
        assert routes.get("/version", Deadline(5.0)) == {"version": "0.32.0"}
        assert server.connections == count
        connection, _ = routes._kept
        assert _is_readable(connection.sock, 10.0)  # the server's end has arrived


def test_another_trainer_ends_the_update_that_one_before_left_open(server):
    drive_of(server).begin(facts_of(), "me", 3, Deadline(10.0))  # and dies
    seen = len(server.calls)
    refit(drive_of(server), 4)
    assert server.asked(seen)[:4] == [
        "POST init_weight_transfer_engine",
        "POST finish_weight_update",
        "POST start_weight_update",
        "POST update_weights action=receive version=4",
    ]
    assert server.label == "4"


def test_a_server_that_was_found_paused_is_not_let_go_on_before_it_has_new_weights(server):
    server.paused = True
    drive = drive_of(server, pause="wait")
    drive.begin(facts_of(), "me", 3, Deadline(10.0))
    drive.give_up(Deadline(10.0))
    assert server.paused
    assert drive.serves == "engine stays paused, as this trainer found it, until a refit completes"
    refit(drive, 3)
    assert "POST pause clear_cache=true mode=keep" in server.calls  # "wait" would let kept requests go on
    assert not server.paused


# -- what goes wrong ------------------------------------------------------------------------------------------------

PHASES = {
    "reading": "/health",
    "joining": "/init_weight_transfer_engine",
    "starting": "/update_weights receive",
    "pausing": "/pause",
    "installing": "/update_weights install",
    "finishing": "/finish_weight_update",
    "resuming": "/resume",
}
FAULTS = {
    "error": ((500, {"error": {"message": "worker 1 is out of memory", "type": "x", "code": 500}}), PeerError),
    "dead": ((503, "engine is dead"), PeerError),
    "closed": ("close", TransportError),
    "silent": ("hang", RefitTimeout),
    "slow": ("drip", RefitTimeout),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_names_the_engine_and_the_phase_and_the_answer(phase, fault, server):
    answer, kind = FAULTS[fault]
    server.faults[PHASES[phase]] = answer
    drive = drive_of(server, timeout=0.3)
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        refit(drive, 3)
    assert time.monotonic() - began < 5
    error = raised.value
    assert f"engine 'engine' ({server.url}) while {phase}" in error.message
    assert PHASES[phase].split()[0] in error.message
    assert (error.engine, error.engine_phase, error.url) == ("engine", phase, server.url)
    if kind is PeerError:
        assert f"answered {answer[0]}" in error.message
        assert error.status == answer[0]
        assert ("worker 1 is out of memory" if fault == "error" else "engine is dead") in error.message


@pytest.mark.parametrize("phase", PHASES)
def test_after_a_failure_an_engine_serves_whole_weights_or_stays_paused(phase, server):
    drive = drive_of(server)
    refit(drive, 2)
    server.faults[PHASES[phase]] = FAULTS["error"][0]
    if phase == "reading":
        drive.give_up(Deadline(1.0))  # it is read again after a failure
    with pytest.raises(PeerError):
        refit(drive, 3)
    server.faults.clear()
    drive.give_up(Deadline(10.0))
    installed = phase in ("finishing", "resuming")
    assert server.label == ("3" if installed else "2")
    if phase == "installing":
        assert server.paused
        assert drive.serves == "engine stays paused, its weights may be a mix of 2 and 3, until a refit completes"
    else:
        assert not server.paused
        assert drive.serves == f"engine serves version {'3' if installed else '2'}"
    refit(drive, 4)
    assert (server.label, server.paused, server.active) == ("4", False, False)
    assert drive.serves == "engine serves version 4"


def test_an_engine_that_is_torn_stays_paused_through_refits_that_fail_before_their_install(server):
    drive = drive_of(server)
    server.faults["/update_weights install"] = FAULTS["error"][0]
    with pytest.raises(PeerError):
        refit(drive, 3)
    drive.give_up(Deadline(10.0))
    server.faults = {"/update_weights receive": FAULTS["error"][0]}
    with pytest.raises(PeerError):
        refit(drive, 4)
    drive.give_up(Deadline(10.0))
    assert server.paused


def test_a_server_without_the_routes_or_the_engine_says_how_to_start_it():
    for needs, answer in [
        (FakeVLLM(dev_mode=False), "GET /get_world_size answered 404"),
        (FakeVLLM(backend=None), "was started without a weight transfer engine"),
        (FakeVLLM(backend="NCCLWeightTransferEngine"), "Its weight transfer engine is NCCLWeightTransferEngine"),
    ]:
        with needs as server, pytest.raises(EnvironmentNotSupported) as raised:
            refit(drive_of(server), 1)
        assert answer in raised.value.message
        assert "VLLM_SERVER_DEV_MODE=1" in raised.value.message
        assert """--weight-transfer-config '{"backend": "reshard"}'""" in raised.value.message


def test_a_server_of_another_release_or_size_is_refused_before_its_workers_are_told():
    for server, size, why in [
        (FakeVLLM(version="0.29.1"), 1, "it runs vLLM 0.29.1; the routes of 0.30 to 0.33 are known"),
        (FakeVLLM(workers=4), 2, "it has 4 workers .* expect={..., 'engine': 4}"),
    ]:
        with server, pytest.raises(ConfigError, match=why):
            refit(drive_of(server), 1, size)
        assert server.asked() == []


def test_nobody_at_the_address_is_an_error_with_the_address():
    with FakeVLLM() as gone:
        pass
    with pytest.raises(TransportError, match=r"GET /health failed: ConnectionRefusedError.*must run and be reachable"):
        refit(drive_of(gone), 1)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a:1", "http://", "http://a:port", "http://a:1/?q=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="use http://host:port"):
        Routes(url, 1.0)


def test_a_path_and_headers_are_kept_for_a_proxy(server):
    seen = []
    server.on_init = lambda info: seen.append(info)
    control = HTTPControl(Routes(f"{server.url}/", 5.0, {"Authorization": "Bearer x"}))
    control.init({"world": "engine"}, Deadline(5.0))
    assert seen == [{"world": "engine"}]
    with pytest.raises(EnvironmentNotSupported):
        HTTPControl(Routes(f"{server.url}/gpu0", 5.0)).init({}, Deadline(5.0))
    assert server.calls[-1] == "POST gpu0/init_weight_transfer_engine"


def test_what_a_worker_raises_is_in_the_error(server):
    def fail(_version):
        raise WorkerError("RefitTimeout: trainer rank 1 did not answer")

    server.on_install = fail
    with pytest.raises(PeerError, match="trainer rank 1 did not answer"):
        refit(drive_of(server), 1)
    assert not server.active


def test_workers_are_told_what_the_source_passes_to_refit(server):
    told = []
    server.on_receive = lambda **info: told.append(info)
    server.on_init = told.append
    drive_of(server).begin(facts_of(names=("layers.0.*",), allow_rollback=True), "me", 3, Deadline(10.0))
    assert told[0]["expect"] == {"trainer": 1, "engine": 1}
    assert told[0]["trainer"] == "me"
    assert told[0]["address"] == "tcp://127.0.0.1:1"
    assert told[1] == {"version": 3, "to": ["engine"], "names": ["layers.0.*"], "allow_rollback": True}


def test_a_server_that_was_started_anew_is_no_longer_taken_for_mixed(server):
    drive = drive_of(server)
    server.faults["/update_weights install"] = FAULTS["error"][0]
    with pytest.raises(PeerError):
        refit(drive, 3)
    drive.give_up(Deadline(10.0))
    assert "may be a mix" in drive.serves
    server.faults, server.paused, server.active, server.label = {}, False, False, "default"  # another process
    drive.begin(facts_of(), "me", 4, Deadline(10.0))
    assert drive.serves == "engine serves version default"


def test_an_engine_that_cannot_be_told_to_leave_is_resumed_all_the_same(server):
    drive = drive_of(server)
    drive.begin(facts_of(), "me", 3, Deadline(10.0))
    drive.pause(Deadline(10.0))
    server.faults["/finish_weight_update"] = FAULTS["error"][0]
    with pytest.raises(PeerError, match="while leaving the refit"):
        drive.give_up(Deadline(10.0))
    assert not server.paused
