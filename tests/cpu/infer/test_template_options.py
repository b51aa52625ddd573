"""Options of the chat template reach what serving feeds the target; a drafter trained with others, or on shorter
texts, is warned of.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from data.chat.render import render_prompt
from drafters.base.errors import UserError
from drafters.base.settings import load_settings
from drafters.eagle3_ssd.card import read_card, write_card
from drafters.targets.template import TemplateOptions
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.generate import complete
from infer.launch import launch
from infer.server.app import create_app
from infer.server.engine_thread import EngineThread
from tests.chat_templates import QWEN3
from tests.cpu.infer.recipe import target_of, write_recipe

HELLO = [{"role": "user", "content": "hello"}]
NOT_THINKING = TemplateOptions(enable_thinking=False)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and drafter that were made for a template with a thinking mode, the drafter trained without thinking."""
    path = write_recipe(tmp_path_factory.mktemp("recipe"))
    (path.parent / "target" / "chat_template.jinja").write_text(QWEN3)
    drafter = path.parent / "tiny-eagle3"
    facts = target_of(path).facts
    update = {
        "template_options": {"enable_thinking": False},
        "template_hash": facts.template_hash,
        "trained_length": 100,
    }
    write_card(drafter, read_card(drafter).model_copy(update=update))
    return path


def test_serving_with_other_options_than_training_warns(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, warns in (("template.enable_thinking=true", True), ("template.enable_thinking=false", False)):
        launch(load_settings(EngineSettings, recipe, [option]), Mode.SD, target_of(recipe)).close()
        assert (
            "template.enable_thinking was False, is True now): expect lower acceptance" in capsys.readouterr().err
        ) == warns


def test_a_request_that_may_grow_longer_than_texts_of_training_warns_once(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault 3."""
    with launch(load_settings(EngineSettings, recipe, ["max_model_len=200"]), Mode.SD, target_of(recipe)) as engine:
        engine.submit([1] * 60, SamplingParams(40))
        with pytest.raises(UserError, match="grammar"):
            engine.submit([1] * 60, SamplingParams(41, grammar="no grammar"))
        assert "trained on texts" not in capsys.readouterr().err
        for _ in range(2):
            engine.submit([1] * 60, SamplingParams(41))
        warned = "was trained on texts of at most 100 tokens, a request may reach 101: expect lower acceptance beyond"
        assert capsys.readouterr().err.count(warned) == 1


def test_commands_and_server_feed_the_prompt_that_training_rendered(recipe: Path) -> None:
    settings = load_settings(EngineSettings, recipe, ["template.enable_thinking=false"])
    target = target_of(recipe)
    prompt = render_prompt(HELLO, target.tokenizer, NOT_THINKING)
    assert str(target.tokenizer.decode(prompt)).endswith("assistant\n<think>\n\n</think>\n\n")
    engine = launch(settings, Mode.AR, target)
    assert list(complete(engine, HELLO, SamplingParams(2), lambda piece: None).request.prompt_ids) == prompt
    thread = EngineThread(lambda: engine)
    with TestClient(create_app(thread, thread.start(), "tiny")) as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}).json()
    thread.close()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
