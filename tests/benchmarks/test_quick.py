"""Run every claim's quick form, as `benchmarks/README.md` says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import testbed
from benchmarks.harness.children import ROOT, module_command
from benchmarks.server.__main__ import QUICK as SERVER_CLAIMS

SOON = ("plan_time",)
"""Claims whose quick form `make test` runs, too."""

LATER = (
    "admission_time",
    "cold_calls",
    "decision_time",
    "device_mix",
    "faster_prefix",
    "first_batch",
    "kills",
    "latency_models",
    "link_change",
    "memory_model",
    "plain",
    "plan_quality",
    "proof_steps",
    "published_runs",
    "speedup",
    "split_overhead",
    "strangers",
)

OWN = (
    "cold_accelerator",
    "cold_connections",
    "cold_start",
    "input_pipeline",
    "kept_features",
    "load_aware",
    "wire",
)
"""Claims whose own tests run the quick form, and look closer at what it makes."""

LINKED = ("device_mix", "first_batch", "link_change", "plan_quality", "speedup")
"""Claims that need network namespaces."""


def test_every_claim_has_a_quick_form_that_is_run() -> None:
    claims = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert claims == {*SOON, *LATER, *OWN, "server"}
    for claim in OWN:
        tests = Path(__file__).parent / claim / f"test_{claim}.py"
        assert '"--quick", "--out"' in tests.read_text(encoding="utf-8"), claim


CASES = (
    *(pytest.param(claim, (), id=claim) for claim in SOON),
    *(pytest.param(claim, (), id=claim, marks=pytest.mark.full) for claim in LATER),
    pytest.param("split_overhead", ("--steps",), id="split_overhead-steps", marks=pytest.mark.full),
    *(
        pytest.param("server", ("--only", each.name), id=f"server-{each.name}", marks=pytest.mark.full)
        for each in SERVER_CLAIMS
    ),
)


@pytest.mark.parametrize(("claim", "options"), CASES)
def test_the_quick_form_runs_and_writes_its_report(
    claim: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    if claim in LINKED:
        try:
            with testbed.Testbed(check=False):
                pass
        except testbed.Unavailable as error:
            pytest.skip(str(error))
    command = module_command(claim, "--quick", "--out", tmp_path, *options)
    env = {**os.environ, "UPRIVER_CACHE": str(tmp_path / "cache")}  # plain keeps its photographs there
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=840, check=False, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr
    [report] = tmp_path.glob("*_quick.md")
    assert report.read_text(encoding="utf-8").strip() in done.stdout
    for records in tmp_path.glob("*_quick.jsonl"):
        rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
        assert rows and not [row["error"] for row in rows if row.get("error")]
