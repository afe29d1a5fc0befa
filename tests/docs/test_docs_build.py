"""The documentation builds without warnings and without a network, and every referenced page and name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]


def test_the_documentation_builds_without_warnings_or_network(tmp_path):
    site = tmp_path / "site"
    # A dead proxy, so that any download fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=560, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for page in (ROOT / "docs").rglob("*.md"):
        text = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', text), page
    reference = (site / "reference" / "loading.html").read_text()
    for name in ("ClipLoader", "load_state_dict", "RandomResizedCrop", "global_batch_size"):
        assert name in reference
