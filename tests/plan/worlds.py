"""Random refits over clusters, for the tests of domains: layouts on both sides and a topology that fits them."""

import random
from fractions import Fraction

from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.topology import presets
from reshard.topology.topology import Domain, Port, Topology

GB = 10**9


def random_refit(seed):
    """(source, destination, topology) of up to 5 hosts of any sizes, with replicas, TP, and uneven rates."""
    r = random.Random(seed)
    sources, hosts, each = r.randint(1, 4), r.randint(1, 4), r.randint(1, 4)
    ranks = list(range(sources, sources + hosts * each))
    split = Mesh({"f": sources}, range(sources))
    copies = Mesh({"dp": sources}, range(sources))
    shuffled = r.sample(ranks, len(ranks))
    tp = r.choice([t for t in range(1, len(ranks) + 1) if len(ranks) % t == 0])
    wanted = Mesh({"dp": len(ranks) // tp, "tp": tp}, shuffled)
    src, dst = {}, {}
    for at in range(r.randint(1, 5)):
        shape = (r.randint(1, 200), r.randint(1, 200))
        held = Layout(shape, "float32", split, ("f",), "ceil") if r.random() < 0.6 else Layout(shape, "float32", copies)
        src[f"t{at}"] = held
        placement = r.choice([("tp", None), (None, "tp"), ()])
        dst[f"t{at}"] = Layout(shape, "float32", wanted, placement, "ceil")
    domains = [list(range(sources)), *(ranks[k * each : (k + 1) * each] for k in range(hosts))]
    if sources > 1 and r.random() < 0.3:
        domains[:1] = [[0], list(range(1, sources))]
    if len(domains) > 2 and r.random() < 0.3:
        domains[:2] = [domains[0] + domains[1]]
    if r.random() < 0.4:  # sources and destinations in the same domains
        everyone = r.sample(range(sources + len(ranks)), sources + len(ranks))
        edges = sorted(r.sample(range(1, len(everyone)), min(len(everyone) - 1, r.randint(1, 4))))
        domains = [everyone[lo:hi] for lo, hi in zip([0, *edges], [*edges, None], strict=True)]
    local = r.choice([2, 40]) * GB
    if r.random() < 0.5:
        rates = [r.choice([GB, 2 * GB]) for _ in domains]
        topology = presets.hosts(domains, port_bytes_per_second=rates, local_bytes_per_second=local)
    else:  # a NIC for each rank
        topology = Topology(
            "nics",
            tuple(Domain(f"d{at}", tuple(members), local) for at, members in enumerate(domains)),
            tuple(Port(f"nic{k}", (k,), r.choice([GB, 2 * GB]), GB) for members in domains for k in members),
        )
    return Manifest.from_layouts(src), Manifest.from_layouts(dst), topology


def copies_of_each_byte_into_each_domain(plan):
    """For each class and domain that it enters: the bytes that cross into it, which must be the class's, once."""
    into = {}
    for route in plan.routes:
        for a, b in route.edges:
            domain = plan.topology.domain_of(b)
            if plan.topology.domain_of(a) != domain:
                into.setdefault((route.route_class, domain), []).append((route.start, route.stop))
    return into


def port_seconds(plan):
    """The busiest port's time, added up edge by edge."""
    loads = {}
    for route in plan.routes:
        for a, b in route.edges:
            if plan.topology.domain_of(a) != plan.topology.domain_of(b):
                out, inn = plan.topology.ports[plan.topology.port_of(a)], plan.topology.ports[plan.topology.port_of(b)]
                key = (out.name, "out")
                loads[key] = loads.get(key, 0) + Fraction(route.nbytes, out.out_bytes_per_second)
                key = (inn.name, "in")
                loads[key] = loads.get(key, 0) + Fraction(route.nbytes, inn.in_bytes_per_second)
    return max(loads.values(), default=Fraction(0))
