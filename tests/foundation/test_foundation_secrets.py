"""Secrets do not reach errors, logs or recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.foundation.errors import Problem
from armillary.foundation.secrets import holds_a_secret, names_a_secret, without_secrets
from armillary.recipe.problems import problems
from armillary.recipe.registry import get
from armillary.telemetry.events import EventLog

HIDDEN = "s3://me:hunter2@bucket/run"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD", "my_apikey"]
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"])
def test_other_names_are_not(name: str) -> None:
    assert not names_a_secret(name)


def test_user_and_password_of_a_url_are_hidden_and_the_rest_is_kept() -> None:
    text = f"cannot write {HIDDEN}: try https://token@host/a@b, not mail@host"
    assert without_secrets(text) == (
        "cannot write s3://***@bucket/run: try https://***@host/a@b, not mail@host"
    )
    assert holds_a_secret(HIDDEN)
    assert not holds_a_secret("s3://bucket/a@b and mail@host")


def test_an_error_for_people_shows_no_password() -> None:
    assert "hunter2" not in Problem(f"no {HIDDEN}", HIDDEN, f"--x {HIDDEN}").render()


def test_an_event_shows_no_password(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", rank=0) as log:
        log.warn(f"no {HIDDEN}", where=HIDDEN, hint=HIDDEN)
    text = (tmp_path / "events.jsonl").read_text()
    assert "hunter2" not in text and text.count("s3://***@bucket/run") == 3


def test_a_recipe_holds_no_password() -> None:
    recipe = get("debug")
    secret = replace(recipe, data=replace(recipe.data, cache="http://me:hunter2@host/"))
    words = [problem.render() for problem in problems(secret, data=False)]
    assert any("data.cache holds a URL with a user or a password" in each for each in words)
    assert "hunter2" not in "".join(words)
