"""What a release is made of: its version, its changelog, and the files for those who take part."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

import service_streamer

ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_changelog_has_this_version_behind_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    version, _, date = headings[1].partition(" - ")
    assert version == service_streamer.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_each_version_of_python_that_is_named_is_one_that_the_tests_run_with() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r":: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE))
    script = (ROOT / "scripts" / "other_pythons.sh").read_text()
    [others] = re.findall(r"^for version in (.*); do$", script, re.MULTILINE)
    oldest = setup["options"]["python_requires"].removeprefix(">=")
    assert oldest in named
    assert named <= {oldest, *others.split()}
    pages = (ROOT / "docs" / "platforms.md").read_text()
    for version in {oldest, *others.split()}:
        assert version in pages


@pytest.mark.parametrize("kind", ["config", "forms"])
def test_forms_for_issues_have_the_form_that_is_published_for_them(kind: str) -> None:
    forms = [str(form) for form in FORMS if (form.stem == "config") == (kind == "config")]
    command = ["--builtin-schema", f"vendor.github-issue-{kind}", *forms]
    done = CliRunner().invoke(check_jsonschema.main, command)
    assert done.exit_code == 0, done.output


def test_ids_and_names_of_forms_are_unique() -> None:
    # The published schema cannot say so; such a form is not shown.
    forms = [yaml.safe_load(form.read_text()) for form in FORMS if form.stem != "config"]
    assert len({form["name"] for form in forms}) == len(forms) == 2
    for form in forms:
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        for key in ("id", "label"):
            values = [field.get(key) or field["attributes"][key] for field in fields]
            assert len(set(values)) == len(values)


def test_files_for_those_who_take_part_lead_to_pages_that_exist() -> None:
    names = (".github/PULL_REQUEST_TEMPLATE.md", "SECURITY.md", "CONTRIBUTING.md")
    for page in (*FORMS, *(ROOT / name for name in names)):
        text = page.read_text()
        assert "@" not in text  # there is no address to write to
        for path in re.findall(r"\bdocs/[\w/]+\.md\b", text):
            assert (ROOT / path).exists(), path


def test_every_check_of_ci_is_a_target_of_make() -> None:
    steps = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert "release-check" in steps
    for step in steps:
        assert re.search(rf"^{step}:", makefile, re.MULTILINE), step
