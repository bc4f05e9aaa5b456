"""Small plans for the tests of the report, by name."""

from reshard import Layout, Manifest, Mesh, plan_refit
from reshard.topology import presets


def world(name, mesh, placements, shape=(8, 8), layers=1):
    """A manifest of ``layers.N.<tensor>.weight``, one for each placement."""
    layouts = {
        f"layers.{at}.{tensor}.weight": Layout(shape, "bfloat16", mesh, placement, "ceil")
        for at in range(layers)
        for tensor, placement in placements.items()
    }
    return Manifest.from_layouts(layouts, world=name)


def rows_to_columns(strategy="reshard"):
    """The example of the docs: 8 x 8, two trainers by rows, four generators by columns."""
    held = world("trainer", Mesh({"fsdp": 2}), {"up": ("fsdp",)})
    return plan_refit(held, world("gen0", Mesh({"tp": 4}), {"up": (None, "tp")}), strategy=strategy)


def two_engines(tp=2, hosts=None):
    """Four trainers; gen0 has four ranks at the given TP, gen1 two at TP2; with ``hosts``, two ranks a host."""
    held = world("trainer", Mesh({"fsdp": 4}), {"up": ("fsdp",), "norm": ()}, (64, 64), 3)
    gen0 = world("gen0", Mesh({"dp": 4 // tp, "tp": tp}), {"up": ("tp",), "norm": ()}, (64, 64), 3)
    gen1 = world("gen1", Mesh({"tp": 2}), {"up": ("tp",), "norm": ()}, (64, 64), 3)
    topology = hosts and presets.hosts([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], port_bytes_per_second=10**9)
    return plan_refit(held, [gen0, gen1], topology)


def on_leaves(oversubscription=1.0, domains=2, cross_rail="spine"):
    """Four trainers on two hosts, four generators on two others; two rails over each ``domains`` hosts."""
    held = world("trainer", Mesh({"fsdp": 4}), {"up": ("fsdp",)}, (64, 64))
    wanted = world("gen0", Mesh({"tp": 4}), {"up": (None, "tp")}, (64, 64))
    pod = presets.grid("pod", 8, 2, local_bytes_per_second=10**10, port_bytes_per_second=10**9)
    railed = presets.with_leaves(
        pod, rails=2, domains=domains, oversubscription=oversubscription, cross_rail=cross_rail
    )
    return plan_refit(held, wanted, railed)


def many_experts(layers=4, experts=32, ranks=128):
    """A mixture of experts over many ranks on both sides, as routes between domains."""
    src, dst, each = {}, {}, experts // 16
    engine = Mesh({"dp": ranks // 8, "tp": 8}, range(ranks, 2 * ranks))
    owners = {
        (stage, part): Mesh({"dp": 2}, [stage * ranks // 4 + part, stage * ranks // 4 + 16 + part])
        for stage in range(4)
        for part in range(16)
    }
    for layer in range(layers):
        for expert in range(experts):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            src[name] = Layout((2048, 7168), "bfloat16", owners[layer % 4, expert // each], ())
            dst[name] = Layout((2048, 7168), "bfloat16", engine, ("tp",))
    topology = presets.gb200_nvl72(2 * ranks)
    return plan_refit(Manifest.from_layouts(src), Manifest.from_layouts(dst), topology)
