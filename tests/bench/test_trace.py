"""Tests for `bench.trace`."""

import json
import threading
from pathlib import Path

import pytest

from bench import trace
from bench.__main__ import main
from fastvid.runtime import names
from fastvid.runtime.processes import available_cores


def test_only_calls_of_fastvid_are_counted_in_all_threads() -> None:
    with trace.Trace() as traced:
        thread = threading.Thread(target=available_cores)
        thread.start()
        thread.join()
        json.dumps({})
        names.encode_name("a b")
        found = traced.take()
    assert set(found["calls_by_file"]) == {"runtime.processes", "runtime.names"}
    assert found["files"] == 2


@pytest.mark.soak
def test_a_clip_and_a_source_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_BATCH", 1)
    monkeypatch.setattr(trace, "_VIDEOS", 6)
    assert main(["trace", "--json", str(tmp_path / "trace.json")]) == 0
    traces = json.loads((tmp_path / "trace.json").read_text())["traces"]
    assert set(traces) == {"source", "constructor", "first batch", "clip"}
    assert "load.loader" in traces["constructor"]["calls_by_file"]
    for found in traces.values():
        assert 0 < found["files"] <= found["edges"] <= found["calls"]
        assert len(found["calls_by_file"]) == found["files"]
