import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.report.plans import many_experts, on_leaves, rows_to_columns, two_engines

from reshard import Layout, Manifest, Mesh, plan_refit
from reshard.errors import PlanError, ProofError
from reshard.report.html import make_page, render_page
from reshard.schedule.trace import Trace, TraceEvent

STRATEGIES = ("reshard", "point-to-point", "gather-broadcast")
TRACE = Trace((TraceEvent(0, "send", 2, 0, 0.0, 1.0, 16), TraceEvent(2, "recv", 0, 0, 0.0, 1.0, 16)), "made up")

VOID = {"meta", "input", "br"}


class Document(HTMLParser):
    """The page without its scripts: every tag closed in order, the text, ids, and addresses that anything refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.ids, self.addresses, self.data = [], [], [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.addresses += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "data"):
            self.data = json.loads(data)
        elif not self.open or self.open[-1][0] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).replace("\u200b", "").split())


def example(**options):
    first, *others = (rows_to_columns(strategy) for strategy in STRATEGIES)
    return make_page(first, others=others, **options)


def test_the_page_says_without_scripts_what_the_plan_does():
    page = Document(render_page(example(staging_nbytes=1 << 20)))
    for text in (
        "trainer → gen0",
        "128 B in one copy 1 tensor",
        "Proved: every wanted byte is written exactly once",
        "16 B from trainer 0: [0:4, 2:4) 16 B from trainer 1: [4:8, 2:4)",
        "On the wire 128 B 128 B 512 B",
        "Busiest sender 64 B (trainer 0) 64 B (trainer 0) 256 B (trainer 0)",
        "Rounds 4 4 4",
        "layers.0.up.weight 1 bfloat16 [8, 8] 128 B 128 B 2 → 4 drawn",
    ):
        assert text in page.words


def test_equal_plans_give_equal_pages():
    assert render_page(example()) == render_page(example())


def test_nothing_in_the_page_refers_to_anything_outside_of_it():
    page = render_page(example(trace=TRACE))
    document = Document(page)
    assert all(address.startswith(("#", "data:")) for address in document.addresses)
    assert {address[1:] for address in document.addresses if address.startswith("#")} <= set(document.ids)
    assert len(document.ids) == len(set(document.ids))
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(", page.split("</style>")[0])


def test_the_licences_of_the_scripts_are_in_the_page():
    words = Document(render_page(example())).words
    assert "Copyright 2010-2026 Mike Bostock" in words
    assert "Copyright 2020-2025 Observable, Inc." in words


def test_a_timeline_is_there_only_where_there_is_a_trace():
    assert 'id="timeline"' not in render_page(example())
    page = render_page(example(trace=TRACE))
    assert 'id="timeline"' in page
    assert "Made up. 2 events in 1 s" in Document(page).words


def test_names_cannot_become_markup():
    name = "</script><img src=x onerror=alert(x)>&\"'"
    layout = Layout((4,), "float32", Mesh({"f": 2}), ("f",))
    held = Manifest.from_layouts({name: layout}, world="<b>src</b>")
    wanted = Manifest.from_layouts({name: layout}, world="d&st")
    text = render_page(make_page(plan_refit(held, wanted)))
    document = Document(text)
    assert "<img" not in text
    assert "<b>src" not in text
    assert name in document.words
    assert document.data["parts"] == [[name]]


def test_the_page_of_many_ranks_stays_small():
    plan = many_experts(layers=8)
    events = [TraceEvent(r, "send", None, k, k, k + 0.5, 1) for r in range(plan.size) for k in range(40)]
    page = make_page(plan, trace=Trace(tuple(events)))
    assert len(page.matrix.cells) > 5000
    assert len(render_page(page).encode()) < 1_500_000


def test_tensors_are_drawn_by_kind_or_by_name():
    plan = two_engines()
    assert [figure.name for figure in make_page(plan).figures] == ["layers.0.norm.weight", "layers.0.up.weight"]
    named = make_page(plan, tensors=["layers.2.up.weight"])
    assert [(figure.name, figure.others) for figure in named.figures] == [("layers.2.up.weight", 2)]
    assert named.undrawn == 1
    with pytest.raises(PlanError, match="no tensor 'up'"):
        make_page(plan, tensors=["up"])


def test_a_plan_that_is_not_proved_gets_no_page():
    plan = rows_to_columns()
    broken = replace(plan, routes=plan.routes[:-1])
    with pytest.raises(ProofError):
        make_page(broken)
    with pytest.raises(ProofError):
        make_page(plan, others=[broken])


def test_the_ports_stand_against_the_bound_where_there_are_domains():
    words = Document(render_page(make_page(two_engines(hosts=True)))).words
    assert "Ports against the bound" in words
    assert "The line is the bound" in words
    assert "What each rank sends and receives" in Document(render_page(example())).words


def test_leaf_switches_stand_below_the_ports_where_the_topology_has_them():
    slow, full = (Document(render_page(make_page(on_leaves(ratio)))).words for ratio in (4, 1))
    assert "8 KiB go from leaf to leaf over the spine." in slow
    assert "the spine has less than full bisection" in slow
    assert "at the busiest leaf" in slow
    assert "The spine has full bisection" in full
    assert "at the busiest port" in full
    near = Document(render_page(make_page(on_leaves(4, domains=4, cross_rail="local")))).words
    assert "Nothing crosses the spine" in near
    assert "leaf to leaf" not in Document(render_page(make_page(two_engines(hosts=True)))).words
