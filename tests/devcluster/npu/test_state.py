"""The state of the cards survives processes that change it at the same time, and refuses what makes no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster.errors import ConfigError
from devcluster.npu.state import NpuState, read

cards = st.integers(0, 63)


@given(st.lists(st.tuples(st.booleans(), cards)))
def test_failing_and_healing_end_where_the_last_word_for_each_card_says(history: list[tuple[bool, int]]) -> None:
    state = NpuState()
    for fails, card in history:
        state = state.with_failed(card) if fails else state.with_healed(card)
    last = {card: fails for fails, card in history}
    assert state.failed == tuple(sorted(card for card, fails in last.items() if fails))


CHANGER = """
import sys
from pathlib import Path
from devcluster.npu.state import change
for card in range(int(sys.argv[2]), int(sys.argv[2]) + 8):
    change(Path(sys.argv[1]), lambda state: state.with_failed(card))
"""


def test_changes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "npu.json"
    changers = [subprocess.Popen([sys.executable, "-c", CHANGER, file, str(8 * n)]) for n in range(3)]
    assert [changer.wait() for changer in changers] == [0, 0, 0]
    assert read(file).failed == tuple(range(24))


def test_unknown_metrics_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no metric 'npu_speed'; the exporter has npu_chip_info_aicore_current_freq"):
        NpuState().with_value("npu_speed", 0, 1.0)
    file = tmp_path / "npu.json"
    assert read(file) == NpuState()
    file.write_text('{"failed": "all"}')
    with pytest.raises(ConfigError, match="delete it to have all cards healthy"):
        read(file)
