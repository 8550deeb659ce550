"""The files of .github are what GitHub reads: by its schemas, which check-jsonschema has with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from pages import ROOT

GITHUB = ROOT / ".github"
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
SCHEMAS = {
    "vendor.github-workflows": sorted((GITHUB / "workflows").glob("*.yml")),
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_it_follows_the_schema(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature", "question"]


def test_the_workflow_runs_what_ci_runs_and_nothing_else() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
