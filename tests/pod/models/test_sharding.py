"""Every head, column and row is some rank's, once; and each rank's heads are laid out as the attention kernels want them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.errors import ModelError
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.models.sharding import TILE, Span, cut, max_ranks, shard
from support.tiny_model import write_tiny_model


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    kv_heads, group, experts = draw(st.integers(1, 16)), draw(st.integers(1, 12)), draw(st.booleans())
    sizes = st.integers(64, 5000)
    model = base()
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    mixture = None
    if experts:
        from npufleet_pod.models.config import ExpertsConfig

        mixture = ExpertsConfig(4, 2, draw(sizes), True, draw(st.none() | sizes), frozenset({0}))
    changed = {
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "intermediate_size": draw(sizes),
        "vocab_size": draw(st.integers(200, 200000)),
        "experts": mixture,
    }
    return DecoderConfig(**{**fields, **changed})


_base: list[DecoderConfig] = []


def base() -> DecoderConfig:
    return _base[0]


@pytest.fixture(scope="module", autouse=True)
def _write(tmp_path_factory: pytest.TempPathFactory) -> None:
    _base[:] = [load_config(write_tiny_model(tmp_path_factory.mktemp("sharding") / "model"))]


def covered(spans: list[Span]) -> bool:
    """Whether the spans follow each other from the first element to the last, none of them empty."""
    ends = [0, *(span.stop for span in spans)]
    return all(span.start == end < span.stop for span, end in zip(spans, ends, strict=False)) and ends[-1] == spans[0].whole


@given(data=st.data())
def test_every_head_column_and_row_is_held_exactly_once(data: st.DataObject) -> None:
    config = data.draw(configs())
    ranks = data.draw(st.integers(1, max_ranks(config)))
    parts = [shard(config, rank, ranks) for rank in range(ranks)]
    assert covered([part.heads for part in parts])
    assert covered([part.intermediate for part in parts])
    assert covered([part.vocabulary for part in parts])
    for spans in ([part.expert_intermediate for part in parts], [part.shared_intermediate for part in parts]):
        present = [span for span in spans if span is not None]
        assert present in ([], spans)
        assert not present or covered(present)
    assert {part.vocabulary_sizes for part in parts} == {tuple(part.vocabulary.count for part in parts)}
    assert sum(part.adds_bias for part in parts) == 1


@given(data=st.data())
def test_local_heads_keep_the_contract_of_attention(data: st.DataObject) -> None:
    config = data.draw(configs())
    ranks = data.draw(st.integers(1, max_ranks(config)))
    group = config.heads // config.kv_heads
    for rank in range(ranks):
        part = shard(config, rank, ranks)
        assert part.heads.count % part.kv_heads.count == 0
        local_group = part.heads.count // part.kv_heads.count
        for index, head in enumerate(range(part.heads.start, part.heads.stop)):
            assert part.kv_heads.start + index // local_group == head // group, "a query head meets the key/value head that is its own"
        if ranks <= config.kv_heads:
            assert local_group == group, "while there are enough key/value heads, no group is cut"
        else:
            assert part.kv_heads.count == 1, "no rank keeps more than one key/value head where there are fewer than ranks"


@given(size=st.integers(1, 100000), ranks=st.integers(1, 64), tile=st.sampled_from([1, TILE]))
def test_parts_are_even_to_a_tile(size: int, ranks: int, tile: int) -> None:
    counts = [cut(size, rank, ranks, tile).count for rank in range(ranks)]
    used = tile if -(-size // tile) >= ranks else 1
    assert sum(counts) == size
    assert max(counts) - min(counts) < 2 * used
    assert all(cut(size, rank, ranks, tile).start % used == 0 for rank in range(ranks) if counts[rank])


def test_more_ranks_than_heads_are_refused() -> None:
    assert max_ranks(base()) == 4
    with pytest.raises(ModelError, match=re.escape("tensorParallel: 5 ranks are more than the 4 that a model of 4 heads can be cut into")):
        shard(base(), 0, 5)


def test_the_parts_of_a_model_of_three_groups_on_four_ranks(tmp_path: Path) -> None:
    config = load_config(write_tiny_model(tmp_path / "model", hidden_size=72, heads=9, kv_heads=3))
    parts = [shard(config, rank, 4) for rank in range(4)]
    assert [(part.heads.start, part.heads.stop) for part in parts] == [(0, 2), (2, 3), (3, 6), (6, 9)]
    assert [part.kv_heads.start for part in parts] == [0, 0, 1, 2]
