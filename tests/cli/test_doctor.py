from __future__ import annotations

import json
import tempfile
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from reshard.cli import doctor
from reshard.cli.doctor import Finding
from reshard.cli.main import main

NOTED = Finding("cuda devices", "note", "none", "Buy one.")
FINE = Finding("python", "ok", "3.11.7")
LACKING = Finding("torch", "missing", "is not installed", "pip install torch")


def run(*args):
    return CliRunner().invoke(main, ["doctor", *args])


def test_this_machine_can_run_the_tests_that_run_on_it():
    result = run("--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["can_run"]) == (0, True), answer
    core = [finding for finding in answer["findings"] if finding["subject"] in ("python", "torch", "gloo")]
    assert [finding["status"] for finding in core] == ["ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("findings", "exit_code"),
    [
        ([FINE], 0),
        ([FINE, NOTED], 0),  # what is only slower or not offered is no reason to say no
        ([FINE, LACKING, NOTED], 1),
    ],
)
def test_only_what_a_refit_needs_makes_the_answer_no(monkeypatch, findings, exit_code):
    monkeypatch.setattr(doctor, "PROBES", [lambda finding=finding: finding for finding in findings])
    assert run().exit_code == exit_code
    as_json = run("--json")
    assert as_json.exit_code == exit_code
    assert json.loads(as_json.stdout)["can_run"] is (exit_code == 0)


def test_each_fix_stands_below_its_finding_and_the_verdict_last():
    assert doctor.format_findings([FINE, LACKING, NOTED]).splitlines() == [
        "ok       python        3.11.7",
        "missing  torch         is not installed",
        "                       -> pip install torch",
        "note     cuda devices  none",
        "                       -> Buy one.",
        "reshard cannot run here without: torch",
    ]


def test_without_torch_the_core_is_missing_and_nothing_breaks(monkeypatch):
    monkeypatch.setattr(doctor, "_import_torch", lambda: None)
    answer = {probe().subject: probe().status for probe in doctor.PROBES[:5]}
    assert answer == {"python": "ok", "torch": "missing", "gloo": "missing", "nccl": "note", "cuda devices": "note"}


def test_a_torch_that_is_too_old_is_missing(monkeypatch):
    old = SimpleNamespace(__version__="2.5.1", version=SimpleNamespace(cuda="12.4", hip=None))
    monkeypatch.setattr(doctor, "_import_torch", lambda: old)
    finding = doctor.find_torch()
    assert finding.status == "missing"
    assert "2.5.1, CUDA 12.4 build; reshard needs 2.6 or newer" in finding.detail


def test_gloo_on_an_interface_that_does_not_exist_says_how_to_choose_one(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    finding = doctor.find_gloo()
    assert finding.status == "missing"
    assert "nosuchinterface" in finding.detail
    assert "GLOO_SOCKET_IFNAME" in finding.fix


def test_memory_passes_over_a_unix_socket():
    assert doctor.find_memory_passing().status == "ok"


def test_a_temporary_folder_too_deep_for_a_socket_is_noted_with_its_reason(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    finding = doctor.find_memory_passing()
    assert finding.status == "note"
    assert "path too long" in finding.detail
    assert "TMPDIR" in finding.fix


def test_a_shared_folder_that_is_absent_or_small_is_noted(monkeypatch, tmp_path):
    assert doctor.find_shared_folder(tmp_path / "absent").status == "note"
    usage = SimpleNamespace(total=64 * 2**20, free=64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    finding = doctor.find_shared_folder(tmp_path)
    assert (finding.status, finding.detail) == ("note", "64 MiB free of 64 MiB")


def test_a_tool_that_is_absent_is_noted(monkeypatch):
    monkeypatch.setenv("PATH", "")
    finding = doctor.find_network_namespaces()
    assert (finding.status, finding.detail) == ("note", "without unshare, ip, tc")


def test_a_package_that_is_absent_is_noted_with_how_to_get_it():
    assert doctor._find_package("demo model", "no_such_module", "pip install it") == Finding(
        "demo model", "note", "not installed; only the demo's real model needs it", "pip install it"
    )
