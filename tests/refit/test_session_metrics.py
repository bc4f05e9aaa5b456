"""Metrics: what Prometheus is told of a session, by its own parser where it is installed."""

from __future__ import annotations

import pytest
import torch
from tests.refit.sessions import error_of, run

from reshard.errors import EnvironmentNotSupported
from reshard.refit.machine import Serving
from reshard.refit.metrics import Metrics
from reshard.topology import presets

EXPECT = {"trainer": 1, "gen0": 2}


def body(me, session):
    me.train(1)
    session.refit(1)
    me.train(2)
    session.refit(2)
    assert error_of(lambda: session.refit(1)) is not None
    return session.metrics


def value(metrics, name, **labels):
    """The one value of a sample whose labels include these."""
    found = [
        sample.value
        for family in metrics.families()
        for sample in family.samples
        if family.name + sample.suffix == name and labels.items() <= dict(sample.labels).items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_version_refits_bytes_phases_and_failures_are_counted_on_each_rank():
    for metrics in run(EXPECT, body):
        assert value(metrics, "reshard_version_served") == 2
        assert value(metrics, "reshard_torn") == 0
        assert value(metrics, "reshard_refits_total") == 2
        assert value(metrics, "reshard_refit_failures_total", error="VersionError") == 1
        assert value(metrics, "reshard_refit_seconds_count", phase="moving") == 2
        assert 0 < value(metrics, "reshard_refit_seconds_sum", phase="moving") < 40
    sent, received = run(EXPECT, body)[0:2]
    nbytes = 2 * 3 * 12 * 24 * 4  # two refits of three tensors
    assert value(sent, "reshard_refit_bytes_total", direction="sent") in (0, nbytes)  # 0 where they are read in place
    assert value(received, "reshard_refit_bytes_total", direction="received") == nbytes / 2


def test_the_text_names_session_world_and_rank_and_escapes_them():
    metrics = Metrics('a"b\\c\nd', "gen0", 3)
    metrics.failed(ValueError("x"), Serving(7, torn=True))
    lines = metrics.text().splitlines()
    assert 'reshard_version_served{session="a\\"b\\\\c\\nd",world="gen0",rank="3"} 7' in lines
    assert any(line.startswith("reshard_torn{") and line.endswith(" 1") for line in lines)
    assert "# TYPE reshard_refits_total counter" in lines


def test_before_the_first_refit_no_version_is_told():
    assert "reshard_version_served{" not in Metrics("default", "gen0", 0).text()


def test_a_file_for_the_node_exporter_is_replaced_as_a_whole(tmp_path):
    metrics = Metrics("default", "gen0", 0)
    file = tmp_path / "reshard.prom"
    metrics.write(file)
    before = file.read_text()
    metrics.failed(ValueError("x"), Serving())
    metrics.write(str(file))
    assert before != file.read_text() == metrics.text()
    assert [path.name for path in tmp_path.iterdir()] == ["reshard.prom"]


def test_the_text_is_read_by_prometheus_own_parser():
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = run(EXPECT, body)[2]
    read = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }
    ours = {
        (family.name + sample.suffix, tuple(sorted(sample.labels))): sample.value
        for family in metrics.families()
        for sample in family.samples
    }
    assert read == ours


def test_a_registry_collects_what_is_true_at_that_moment():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    metrics = Metrics("default", "gen0", 1)
    metrics.register(registry)
    labels = {"session": "default", "world": "gen0", "rank": "1"}
    assert registry.get_sample_value("reshard_version_served", labels) is None
    metrics.failed(ValueError("x"), Serving(5))
    assert registry.get_sample_value("reshard_version_served", labels) == 5
    assert registry.get_sample_value("reshard_refit_failures_total", {**labels, "error": "ValueError"}) == 1


def test_without_the_client_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(EnvironmentNotSupported, match=r"reshard\[metrics\].*metrics.write"):
        Metrics("default", "gen0", 0).register()


def test_the_report_says_how_many_copies_enter_each_domain():
    """Two engine ranks of one host, each with the whole model: one copy comes in over the network, not two."""
    topology = presets.hosts([[0], [1, 2]], port_bytes_per_second=10**9)

    def whole(me, session):
        if me.is_source:
            session.offer({"w": torch.arange(64.0)})
        else:
            session.accept({"w": torch.zeros(64)})
        return session.refit(1)

    for report in run(EXPECT, whole, topology=topology):
        assert list(report.copies_into.values()) == [1.0]
        assert report.bound_fraction == 1.0
    assert [report.copies_into for report in run(EXPECT, whole)] == [{}] * 3, "threads of one host"
