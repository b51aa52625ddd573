"""The terminal command on a tiny target: one answer, one JSON object, a chat, and what a mistake says."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from data.chat.render import render_prompt
from drafters.base.errors import run_command
from infer import generate
from infer.config import EngineSettings
from tests.cpu.infer.recipe import target_of, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def run(*arguments: object) -> int:
    return run_command(generate.main, [str(argument) for argument in arguments])


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)  # fails on anything beside the object


def test_json_is_one_object_and_modes_agree(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("--recipe", recipe, "--prompt", "Hello", "--max-new-tokens", 20)
    alone = json_of(capsys, *ask, "--mode", "ar")
    synchronous = json_of(capsys, *ask, "--mode", "sd", "lookahead=2")
    fields = "text token_ids prompt_tokens new_tokens seconds tokens_per_second rounds tokens_per_round hit_rate"
    fields += " finish_reason"
    assert list(alone) == fields.split()
    target = target_of(recipe)
    assert alone["prompt_tokens"] == len(render_prompt([{"role": "user", "content": "Hello"}], target.tokenizer))
    assert alone["new_tokens"] == len(alone["token_ids"])
    assert alone["text"] == target.tokenizer.decode(alone["token_ids"], skip_special_tokens=True)
    assert alone["rounds"] == alone["new_tokens"] - 1
    assert alone["tokens_per_round"] == 1.0
    assert alone["tokens_per_second"] == pytest.approx((alone["new_tokens"] - 1) / alone["seconds"])
    assert alone["hit_rate"] is None
    assert synchronous["token_ids"] == alone["token_ids"]
    assert synchronous["hit_rate"] is None


def test_text_is_printed_and_figures_go_to_stderr(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json_of(capsys, "--recipe", recipe, "--prompt", "Hi", "--max-new-tokens", 12, "--mode", "ar")["text"]
    assert run("--recipe", recipe, "--prompt", "Hi", "--max-new-tokens", 12, "--mode", "ar") == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert "12 tokens" in captured.err


def test_a_seed_repeats_a_sampled_answer_and_another_does_not(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("--recipe", recipe, "--prompt", "Hi", "--max-new-tokens", 12, "--mode", "ar", "--temperature", 1, "--seed")
    first, again, other = (json_of(capsys, *ask, seed)["token_ids"] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_several_answers_have_seeds_of_their_own(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = (
        "--recipe",
        recipe,
        "--prompt",
        "Hi",
        "--max-new-tokens",
        8,
        "--mode",
        "sd",
        "--temperature",
        1,
        "--seed",
        5,
    )
    answers = json_of(capsys, *ask, "--n", 3)["answers"]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 3
    assert answers[0]["token_ids"] == json_of(capsys, *ask)["token_ids"]


def test_penalties_bias_stop_strings_and_log_probabilities_are_heeded(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("--recipe", recipe, "--prompt", "Hi", "--max-new-tokens", 8, "--mode", "ar")
    letter = target_of(recipe).tokenizer.convert_tokens_to_ids("x")
    assert json_of(capsys, *ask, "--logit-bias", f"{letter}:100")["text"] == "xxxxxxxx"
    penalised = json_of(
        capsys, *ask, "--logit-bias", f"{letter}:20", "--presence-penalty", 2, "--frequency-penalty", 2
    )["text"]
    assert penalised.startswith("x") and penalised != "xxxxxxxx"
    cut = json_of(capsys, *ask, "--logit-bias", f"{letter}:100", "--stop", "never", "--stop", "xxx", "--logprobs", 2)
    assert (cut["text"], cut["new_tokens"], cut["finish_reason"]) == ("", 3, "stop")
    assert [(own["token"], len(own["top"])) for own in cut["logprobs"]] == [(letter, 2)] * 3


def test_answers_follow_a_regular_expression_or_a_schema(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("--recipe", recipe, "--prompt", "Hi", "--max-new-tokens", 60, "--mode", "sd")
    assert re.fullmatch("[ab]{5}", json_of(capsys, *ask, "--regex", "[ab]{5}")["text"])
    properties = '"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false'
    schema = f'{{"type": "object", {properties}}}'
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, tmp_path / "schema.json"):
        assert isinstance(json.loads(json_of(capsys, *ask, "--json-schema", given)["text"])["ok"], bool)


class Conversation:
    """Runs a chat over given lines and keeps the conversations that were asked to be answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.monkeypatch = monkeypatch
        complete = generate.complete

        def spy(engine, messages, *rest):
            self.asked.append([(message["role"], message["content"]) for message in messages])
            return complete(engine, messages, *rest)

        monkeypatch.setattr(generate, "complete", spy)

    def __call__(self, recipe: Path, lines: str, *overrides: str) -> None:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert run("--recipe", recipe, "--mode", "ar", "--max-new-tokens", 8, *overrides) == 0


def test_a_chat_keeps_its_history_until_it_is_cleared(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(monkeypatch)
    conversation(recipe, "one\n\ntwo\n/clear\nthree\n/quit\nnever\n")
    first, second, third = conversation.asked
    assert first == [("user", "one")]
    assert [role for role, _ in second] == ["user", "assistant", "user"]
    assert second[1][1] in capsys.readouterr().out
    assert third == [("user", "three")]


def test_a_chat_that_grows_too_long_says_so_and_goes_on(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(monkeypatch)
    conversation(recipe, f"{'long ' * 60}\nshort\n")  # the end of the input ends the chat too
    assert "max_model_len is 160" in capsys.readouterr().err
    assert conversation.asked[1] == [("user", "short")]


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation, show, shown = Conversation(monkeypatch), generate.show, []

    def show_and_interrupt(piece: str) -> None:
        shown.append(piece)
        show(piece)
        if len(shown) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate, "show", show_and_interrupt)
    conversation(recipe, "one\ntwo\n")
    first, second = conversation.asked
    cut = "".join(shown[:3])  # the first token, a round, and what was held back
    assert second == [*first, ("assistant", cut), ("user", "two")]
    assert "2 tokens" in (err := capsys.readouterr().err)
    assert "8 tokens" in err  # the second answer is whole


def test_ctrl_c_without_a_chat_ends_the_command(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "show", lambda piece: signal.raise_signal(signal.SIGINT))
    assert run("--recipe", recipe, "--mode", "ar", "--prompt", "Hi", "--max-new-tokens", 100) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "  "], "--prompt is empty"),
        (["--prompt", "x " * 200, "--mode", "ar"], "max_model_len is 160"),
        (["--prompt", "x", "lookahed=4"], "unknown setting 'lookahed': did you mean 'lookahead'?"),
        (["--prompt", "x", "lookahead=0"], "setting 'lookahead' = 0"),
        (["--prompt", "x", "drafter=nowhere"], "no such file: nowhere/config.json"),
        (["--prompt", "x", "drafter=null"], "setting 'drafter' is missing"),
        (["--prompt", "x", "--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        (
            ["--prompt", "x", "--max-new-token", "4"],
            "unknown option '--max-new-token': did you mean '--max-new-tokens'?",
        ),
        (["--prompt", "x", "--max-new-tokens", "0", "--mode", "ar"], "max_new_tokens = 0"),
        (["--prompt", "x", "--temperature", "-1", "--mode", "ar"], "temperature = -1.0"),
        (["--json"], "--json needs a --prompt"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["--prompt", "x", "--n", "0"], "--n 0: give at least 1"),
        (["--prompt", "x", "--logit-bias", "a:b"], "--logit-bias a:b: write it as ID:BIAS"),
        (["--prompt", "x", "--regex", "(a"], "the regular expression"),
        (["--prompt", "x", "--json-schema", "nowhere.json"], "--json-schema nowhere.json: cannot read that file"),
        (["--prompt", "x", "--mode", "ar", "target=nowhere"], "nowhere"),
    ],
)
def test_a_mistake_gets_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    mode = [] if "--mode" in arguments else ["--mode", "sd"]
    assert run("--recipe", recipe, *mode, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_missing_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--recipe", "no/such.yaml", "--prompt", "x") == 2
    assert "no such file: no/such.yaml" in capsys.readouterr().err
    assert run("--prompt", "x") == 2
    assert "--recipe" in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        generate.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in EngineSettings.model_fields)
