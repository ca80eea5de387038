"""What editors and shells get: the JSON schema of recipes, and completion."""

import json
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.train.config import shipped_recipes


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found = CliRunner().invoke(app, ["train", "--schema"])
    assert found.exit_code == 0, found.output
    return dict(json.loads(found.stdout))


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_follow_the_schema(name: str, schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    content = yaml.safe_load(shipped_recipes()[name].read_text())
    problems = jsonschema.Draft202012Validator(schema).iter_errors(content)
    # YAML 1.1, which this reader follows, takes 1e-3 for text; ours takes it for a number
    assert not [p for p in problems if not (p.validator in ("type", "anyOf") and isinstance(p.instance, str))]


@pytest.mark.parametrize(
    "content",
    [{}, {"train": {"step": 3}}, {"train": {"steps": 0}}, {"train": {"steps": 3}, "mixer": {"nam": "chasm"}}],
    ids=str,
)
def test_mistakes_do_not(content: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert not jsonschema.Draft202012Validator(schema).is_valid(content)


def test_known_names_are_offered(schema: dict[str, Any]) -> None:
    assert {"chasm", "gfnet"} <= set(schema["properties"]["mixer"]["properties"]["name"]["examples"])
    assert "unet" in schema["properties"]["backbone"]["properties"]["name"]["examples"]


def test_the_shell_completes_commands() -> None:
    asked = {"_CHASM_COMPLETE": "complete_bash", "COMP_WORDS": "chasm re", "COMP_CWORD": "1"}
    found = CliRunner(env=asked).invoke(app, prog_name="chasm")
    assert {"reconstruct", "report"} <= set(found.output.split())
