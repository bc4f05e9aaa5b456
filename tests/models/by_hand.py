"""What a Megatron-like trainer and a vLLM-like engine really do to the tensors of a checkpoint, rank by rank, in torch.

Each function builds the local tensors of one rank the way its framework does: fuse, pad, chunk, drop. Padding is -1.
Nothing here uses the library.
"""

from __future__ import annotations

import re

import torch

PADDING = -1


def layer_tensors(tensors, layer):
    """The tensors of a layer, by what follows ``layers.N.`` in their names."""
    matches = {name: re.search(rf"layers\.{layer}\.(.*)", name) for name in tensors}
    return {match[1]: tensors[name] for name, match in matches.items() if match}


def pad_rows(tensor, multiple):
    rows = -(-len(tensor) // multiple) * multiple
    return torch.cat([tensor, torch.full((rows - len(tensor), *tensor.shape[1:]), PADDING)])


def sections(tensor, sizes, tp, rank):
    """Each section cut for itself, the parts put together again."""
    return torch.cat([part.chunk(tp)[rank] for part in tensor.split(sizes)])


def mamba_sizes(config):
    inner, groups = config["mamba_num_heads"] * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    return [inner, inner, groups, groups, config["mamba_num_heads"]]


def megatron_qkv(q, k, v, groups, tp, rank):
    """All q heads of a group, its k, its v; then the next group. The common matrix is cut evenly, wherever that is."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    fused = torch.cat(parts, 1).flatten(0, 1)
    assert len(fused) % tp == 0
    return fused.chunk(tp)[rank]


def vllm_qkv(q, k, v, kv_heads, tp, rank):
    """q by ranks; k and v by ranks, or a head for several ranks where there are fewer heads."""
    if tp >= kv_heads:
        index, parts = rank // (tp // kv_heads), kv_heads
    else:
        index, parts = rank, tp
    return torch.cat([q.chunk(tp)[rank], k.chunk(parts)[index], v.chunk(parts)[index]])


def attention(layer, config, tp, rank, style):
    """The local tensors of a layer's attention, whatever its kind."""
    start = "self_attn." if any(name.startswith("self_attn.") for name in layer) else "mixer."
    mine = {name.removeprefix(start): tensor for name, tensor in layer.items() if name.startswith(start)}
    if "q_proj.weight" in mine:
        qkv = [mine.pop(f"{part}_proj.weight") for part in "qkv"]
        kv = config["num_key_value_heads"]
        yield megatron_qkv(*qkv, kv, tp, rank) if style == "megatron" else vllm_qkv(*qkv, kv, tp, rank)
        yield mine.pop("o_proj.weight").chunk(tp, 1)[rank]
    elif "kv_b_proj.weight" in mine:
        heads = config["num_attention_heads"]
        for name in ("q_b_proj.weight", "kv_b_proj.weight"):
            by_head = mine.pop(name).unflatten(0, (heads, -1))
            yield by_head.chunk(tp)[rank].flatten(0, 1)
        yield mine.pop("o_proj.weight").unflatten(1, (heads, -1)).chunk(tp, 1)[rank]
    elif "in_proj.weight" in mine:
        sizes = mamba_sizes(config)
        yield sections(mine.pop("in_proj.weight"), sizes, tp, rank)
        for name in ("conv1d.weight", "conv1d.bias"):
            yield sections(mine.pop(name), sizes[1:4], tp, rank)
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield mine.pop(name).chunk(tp)[rank]
        yield mine.pop("out_proj.weight").chunk(tp, 1)[rank]
    else:
        return
    yield from mine.values()  # norms and what multi-head latent attention compresses with: whole


def feed_forward(layer, start, tp, rank):
    """A block without experts: gate and up of a rank side by side, and its columns of down."""
    names = [f"{start}{part}_proj.weight" for part in ("gate", "up") if f"{start}{part}_proj.weight" in layer]
    if names:
        yield torch.cat([layer[name].chunk(tp)[rank] for name in names])
        yield layer[f"{start}down_proj.weight"].chunk(tp, 1)[rank]


def one_expert(layer, expert, etp, rank):
    """The two matrices of an expert (w13 and w2), from single tensors or from the stack."""
    start = "mlp.experts" if any(name.startswith("mlp.experts") for name in layer) else "mixer.experts"
    if f"{start}.down_proj" in layer:
        rows = layer.get(f"{start}.gate_up_proj", layer.get(f"{start}.up_proj"))[expert]
        halves = rows.chunk(2) if f"{start}.gate_up_proj" in layer else [rows]
        down = layer[f"{start}.down_proj"][expert]
    else:
        names = [f"{start}.{expert}.{part}_proj.weight" for part in ("gate", "up")]
        halves = [layer[name] for name in names if name in layer]
        down = layer[f"{start}.{expert}.down_proj.weight"]
    yield torch.cat([half.chunk(etp)[rank] for half in halves])
    yield down.chunk(etp, 1)[rank]


def layer_parts(layer, config, *, tp, rank, experts, etp, etp_rank, style):
    """All local tensors of a layer on one rank; ``experts`` are those that the rank has."""
    yield from attention(layer, config, tp, rank, style)
    for start in ("mlp.", "mlp.shared_experts.", "mixer.", "mixer.shared_experts."):
        yield from feed_forward(layer, start, tp, rank)
    for expert in experts if any(".experts" in name for name in layer) else ():
        yield from one_expert(layer, expert, etp, etp_rank)
    for name, tensor in layer.items():
        if re.fullmatch(r"(input_layernorm|post_attention_layernorm|norm)\.weight", name) or ".gate." in name:
            yield tensor
        if "latent_proj" in name and "in_proj.weight" not in layer:
            yield tensor


def ends(tensors, *, is_first, is_last, tp, rank, multiple, is_tied):
    """Embedding, last norm and output head, on the first and the last pipeline stage."""
    embedding = next(name for name in tensors if "embed" in name)
    if is_first or (is_last and is_tied):
        yield pad_rows(tensors[embedding], multiple).chunk(tp)[rank]
    if is_last:
        yield next(tensor for name, tensor in tensors.items() if re.search(r"(model\.norm|norm_f)\.weight", name))
        if not is_tied:
            yield pad_rows(tensors["lm_head.weight"], multiple).chunk(tp)[rank]


def joined(parts):
    """The sorted elements of some local tensors, without padding."""
    flat = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
    return flat[flat != PADDING].sort().values
