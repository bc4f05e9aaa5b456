from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.demo.architecture import Architecture
from reshard.demo.worlds import DestinationWorld, Share, SourceWorld, check_ranks
from reshard.errors import ConfigError, LayoutError

SMOL = Architecture.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
)


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"),
    [
        (1, [(0, 9)], [(0, 3)]),
        (2, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),  # uneven: whole KV heads, with their query heads
        (3, [(0, 3), (3, 6), (6, 9)], [(0, 1), (1, 2), (2, 3)]),
        (4, [(0, 2), (2, 3), (3, 6), (6, 9)], [(0, 1), (0, 1), (1, 2), (2, 3)]),  # one KV head is held twice
    ],
)
def test_heads_are_shared_out_whole(tp, heads, kv_heads):
    shares = [Share.of(SMOL, t, tp) for t in range(tp)]
    assert [share.heads for share in shares] == heads
    assert [share.kv_heads for share in shares] == kv_heads


@pytest.mark.parametrize("tp", range(1, 10))
def test_every_query_head_row_and_word_is_served_once_beside_its_kv_head(tp):
    shares = [Share.of(SMOL, t, tp) for t in range(tp)]
    assert [h for share in shares for h in range(*share.heads)] == list(range(9))
    assert [r for share in shares for r in range(*share.mlp)] == list(range(1536))
    assert [v for share in shares for v in range(*share.vocab)] == list(range(49152))
    for share in shares:
        assert {h // 3 for h in range(*share.heads)} == set(range(*share.kv_heads))
        assert share.vocab_rows % 64 == 0
        assert share.vocab_rows >= share.vocab[1] - share.vocab[0]


def test_the_last_ranks_of_a_small_vocabulary_hold_padding_only():
    shares = [Share.of(replace(SMOL, vocab=100), t, 4) for t in range(4)]
    assert [share.vocab for share in shares] == [(0, 64), (64, 100), (100, 100), (100, 100)]
    assert {share.vocab_rows for share in shares} == {64}


def test_more_ranks_than_query_heads_are_refused_with_the_reason():
    with pytest.raises(LayoutError, match=r"9 query heads and the destination's tp is 10.*Use tp9 or less"):
        DestinationWorld(tp=10).check(SMOL)


def test_a_trainer_cut_that_torch_cannot_compute_with_is_refused_with_the_reason():
    with pytest.raises(LayoutError, match=r"1536 columns .* \(size 5\).*divisible by 5"):
        SourceWorld(fsdp=1, tp=5).check(SMOL)


def test_layouts_are_read_as_they_are_printed():
    assert SourceWorld.parse("fsdp2") == SourceWorld(fsdp=2, tp=1)
    assert SourceWorld.parse("tp2  FSDP3") == SourceWorld(fsdp=3, tp=2)
    assert DestinationWorld.parse("tp4 dp2") == DestinationWorld(tp=4, dp=2)
    for world in (SourceWorld(2), SourceWorld(2, 2), DestinationWorld(4), DestinationWorld(2, 2)):
        assert type(world).parse(str(world)) == world


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("pp2", "'pp2' is not an axis"),
        ("fsdp", "'fsdp' is not an axis and its size"),
        ("fsdp0", "'fsdp' has no rank"),
        ("fsdp2 fsdp2", "'fsdp' is given twice"),
        ("fsdp-1", "'fsdp-1' is not an axis"),
    ],
)
def test_a_layout_that_says_nothing_clear_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        SourceWorld.parse(text)


def test_too_many_processes_are_refused_before_any_starts():
    with pytest.raises(ConfigError, match="are 40 processes"):
        check_ranks(SourceWorld(8), DestinationWorld(tp=8, dp=4))
