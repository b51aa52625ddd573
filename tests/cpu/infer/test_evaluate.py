"""The measuring command: settings by mode, turns, interruption, and a `results.json` whose numbers fit together."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base.errors import EXIT_INTERRUPTED, UserError, run_command
from drafters.eagle3_ssd.speed import PairedTokens
from infer import evaluate
from infer.config import EngineSettings, Mode
from infer.console import Interrupt
from infer.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from infer.evaluation import retention
from infer.evaluation.results import Measured, logit_margin, write_json
from tests.cpu.infer.recipe import target_of, write_recipe
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def run(*arguments: object) -> int:
    return run_command(evaluate.main, [str(argument) for argument in arguments])


def plan(recipe: Path, *arguments: str) -> list[evaluate.Run]:
    return evaluate.plan_runs(
        evaluate.parse(["--recipe", str(recipe), "--prompts", "p.jsonl", "--out", "o", *arguments])
    )


@pytest.fixture(scope="module")
def results(recipe: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out")
    arguments = ["--num-prompts", 3, "--max-new-tokens", 16, "--out", out, "--baseline"]
    arguments += ["--set", "sd:lookahead=2", "--beside", "ar target_threads=1"]
    assert run("--recipe", recipe, "--prompts", prompts, *arguments) == 0
    assert (out / "report.html").is_file()
    assert not list(out.glob("*.partial"))
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_results_hold_the_documented_fields(results: dict[str, Any]) -> None:
    assert {"machine", "target", "drafter", "runs", "ratios"} <= results.keys()
    fields = """mode settings prompts new_tokens seconds prefill_seconds tokens_per_second tokens_per_round
        acceptance_by_position hit_rate exposed_share tokens_per_round_hit tokens_per_round_miss retention
        verify_ms draft_ms wait_ms outputs"""
    for record in results["runs"]:
        assert set(fields.split()) <= record.keys()
        if record["label"] != "transformers":  # which has no rounds
            assert all(record[name].keys() == {"p50", "p90"} for name in ("verify_ms", "draft_ms", "wait_ms"))
        assert set(record["settings"]) == set(EngineSettings.model_fields)
    assert {"cpu", "cores", "torch", "transformers"} <= results["machine"].keys()


def test_results_fit_together(results: dict[str, Any]) -> None:
    ar, sd, ssd, beside, _ = results["runs"]
    assert [record["label"] for record in results["runs"]] == [
        "ar",
        "sd",
        "ssd",
        "ar target_threads=1",
        "transformers",
    ]
    assert (sd["settings"]["lookahead"], ssd["settings"]["lookahead"]) == (2, 3)
    for record in results["runs"]:
        assert [output["id"] for output in record["outputs"]] == ["p0", "p1", "p2"]
        assert record["prompts"] == 3
        assert record["new_tokens"] == sum(len(output["token_ids"]) for output in record["outputs"])
        assert record["seconds"] == pytest.approx(sum(output["seconds"] for output in record["outputs"]))
        assert record["tokens_per_second"] == pytest.approx((record["new_tokens"] - 3) / record["seconds"])
        assert record["outputs"][0]["token_ids"] == ar["outputs"][0]["token_ids"]
    assert results["ratios"].keys() == {"ssd/ar", "ssd/sd", "sd/ar", "ar/transformers"}
    assert results["ratios"]["ssd/ar"] == pytest.approx(ssd["tokens_per_second"] / ar["tokens_per_second"])
    for name, interval in results["ratio_intervals"].items():
        assert interval["low"] <= interval["value"] == results["ratios"][name] <= interval["high"]
    assert ar["tokens_per_round"] == beside["tokens_per_round"] == 1.0
    assert ar["hit_rate"] is sd["hit_rate"] is ar["retention"] is sd["retention"] is None
    assert 0 <= ssd["hit_rate"] <= 1
    assert (len(sd["acceptance_by_position"]), len(ssd["acceptance_by_position"])) == (2, 3)
    looked_up = sum(ssd["sources"][name] for name in ("hit", "jit", "ngram", "none"))
    assert looked_up == sum(output["looked_up"] for output in ssd["outputs"])
    assert ssd["sources"]["first"] == 3


def test_in_fp32_all_modes_agree(results: dict[str, Any]) -> None:
    assert [(pair["pair"], pair["equal"], pair["partings"]) for pair in results["agreement"]] == [
        ("ar/sd", 3, []),
        ("ar/ssd", 3, []),
        ("ar/transformers", 3, []),
        ("sd/ssd", 3, []),
        ("sd/transformers", 3, []),
        ("ssd/transformers", 3, []),
    ]


def test_the_prediction_stands_beside_the_measured_ratios(results: dict[str, Any]) -> None:
    for name, entry in results["prediction"]["ratios"].items():
        assert entry["measured"] == results["ratios"][name]
        assert entry["share"] == pytest.approx(entry["measured"] / entry["predicted"])


def test_logit_margin_is_the_distance_of_two_logits_of_a_plain_forward(recipe: Path) -> None:
    target, prefix = target_of(recipe), [5, 80, 33, 120, 7]
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([prefix])).logits[0, -1]
    margin = logit_margin(target, prefix, 40, 41)
    assert margin == pytest.approx(abs(float(logits[40] - logits[41])), rel=1e-4)
    assert logit_margin(target, prefix, 40, None) is None


def test_the_more_particular_setting_wins(recipe: Path, tmp_path: Path) -> None:
    content = recipe.read_text(encoding="utf-8")
    with_modes = tmp_path / "modes.yaml"
    with_modes.write_text(content + "modes:\n  sd: {lookahead: 7, budget: 70}\n", encoding="utf-8")

    def lookaheads(*arguments: str) -> list[int]:
        return [entry.settings.lookahead for entry in plan(with_modes, *arguments)]

    assert lookaheads() == [3, 7, 3]
    assert lookaheads("lookahead=5") == [5, 5, 5]
    assert lookaheads("lookahead=5", "--set", "ssd:lookahead=9") == [5, 5, 9]
    assert lookaheads("--modes", "sd", "--beside", "sd lookahead=1") == [7, 1]
    assert plan(with_modes)[1].settings.budget == 70
    assert plan(with_modes, "batch_size=4", "--dtype", "bfloat16")[0].settings.model_dump(
        include={"batch_size", "dtype"}
    ) == {
        "batch_size": 1,  # one request at a time is what is measured
        "dtype": "bfloat16",
    }
    assert plan(recipe, "--modes", "ar", "drafter=null")[0].settings.drafter is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "ar,ssdd"], "--modes: unknown mode 'ssdd': did you mean 'ssd'?"),
        (["--modes", "ar,ar"], "twice"),
        (["--set", "lookahead=2"], "cannot read --set lookahead=2"),
        (["--set", "ds:lookahead=2"], "unknown mode 'ds'"),
        (["--set", "sd:lookahed=2"], "unknown setting 'lookahed'"),
        (["--beside", "ar"], "what differs"),
        (["--beside", "ar dtype=bfloat16"], "dtype differs"),
        (["drafter=null"], "mode sd needs a drafter"),
    ],
)
def test_a_wrong_plan_is_refused(recipe: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        plan(recipe, *arguments)


def test_settings_may_stand_behind_the_prompt_files(recipe: Path) -> None:
    options = evaluate.parse(["--recipe", str(recipe), "--out", "o", "--prompts", "a.jsonl", "b.jsonl", "lookahead=2"])
    assert (options.prompts, options.overrides) == (["a.jsonl", "b.jsonl"], ["lookahead=2"])


@pytest.mark.parametrize("bad", ["modes: [sd]\n", "modes: {sd: 3}\n"])
def test_a_wrong_modes_part_names_the_recipe(recipe: Path, tmp_path: Path, bad: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(recipe.read_text(encoding="utf-8") + bad, encoding="utf-8")
    with pytest.raises(UserError, match=r"wrong\.yaml: `modes:`"):
        plan(wrong)


def test_mistakes_end_the_command_with_one_line(
    recipe: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for arguments, message in (
        (["--prompts", "nowhere.jsonl", "--out", tmp_path], "nowhere.jsonl"),
        (["--prompts", prompts, "--out", tmp_path / "file"], "cannot make that directory"),
        (["--prompts", prompts, "--out", tmp_path, "max_model_len=20"], "prompt 'p0' has"),
    ):
        assert run("--recipe", recipe, "--modes", "ar", *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


class FakeEngine:
    """Answers each request in two steps; `log` gets its name at each submission."""

    def __init__(self, name: str, log: list[str], on_step: Any = lambda: None) -> None:
        self.name, self.log, self.on_step = name, log, on_step
        self.settings = EngineSettings.model_validate({"target": "t", "target_devices": ("cpu",)})

    def submit(self, prompt_ids: list[int], params: SamplingParams) -> str:
        self.log.append(self.name)
        self.request = Request("r", tuple(prompt_ids), params, frozenset(), 100, list(prompt_ids))
        return "r"

    def step(self) -> list[RequestOutput]:
        self.on_step()
        self.request.tokens.append(1)
        reason = FinishReason.LENGTH if len(self.request.new_tokens) == 2 else None
        return [RequestOutput("r", (1,), reason, self.request)]

    def cancel(self, request_id: str) -> None:
        self.log.append(f"cancel {self.name}")


def measured_by(engines: list[FakeEngine], interrupt: Interrupt) -> list[Measured]:
    measured = [Measured(engine.name, Mode.AR, engine.settings, [], []) for engine in engines]
    prompts = [evaluate.TokenizedPrompt(f"q{n}", [n]) for n in range(4)]
    evaluate.measure(engines, measured, prompts, SamplingParams(), interrupt, lambda: None)  # type: ignore[arg-type]
    return measured


def test_the_modes_take_turns_and_who_goes_first_rotates() -> None:
    log: list[str] = []
    measured = measured_by([FakeEngine(name, log) for name in "abc"], Interrupt())
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"
    assert [[answer.prompt_ids for answer in run.answers] for run in measured] == [[(0,), (1,), (2,), (3,)]] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_the_prompts_that_every_mode_has_answered(number: signal.Signals) -> None:
    log: list[str] = []
    steps: list[int] = []

    def interrupt_in_the_second_prompt() -> None:
        steps.append(1)
        if len(steps) == 3:  # two steps a prompt
            signal.raise_signal(number)

    with evaluate.interruptible() as interrupt:
        measured = measured_by([FakeEngine("a", log), FakeEngine("b", log, interrupt_in_the_second_prompt)], interrupt)
    assert [run.prompt_ids for run in measured] == [["q0"], ["q0"]]
    assert log == ["a", "b", "b", "cancel b", "a", "cancel a"]  # q0 by both; q1, where b is first


def test_ctrl_c_in_the_replay_costs_retention_and_nothing_else(
    recipe: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(answers: list[Request], *_: object) -> Iterator[PairedTokens]:
        yield PairedTokens(1, 1, 1)
        signal.raise_signal(signal.SIGINT)
        yield from [PairedTokens(1, 1, 1)] * (len(answers) - 1)

    monkeypatch.setattr(retention, "paired_tokens", interrupted)
    arguments = ["--modes", "ssd", "--num-prompts", 2, "--max-new-tokens", 12, "--out", tmp_path]
    assert run("--recipe", recipe, "--prompts", prompts, *arguments) == EXIT_INTERRUPTED
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"][0]
    assert record["retention"] is None and record["prompts"] == 2 and record["new_tokens"] == 24
    assert "retention is left out" in capsys.readouterr().err


def test_nothing_is_replayed_after_an_interrupted_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be thrown away, and who pressed Ctrl-C waits for it."""
    replayed: list[str] = []

    def replay(*_: object) -> Iterator[PairedTokens]:
        replayed.append("an answer")
        yield PairedTokens(1, 1, 1)

    monkeypatch.setattr(retention, "paired_tokens", replay)
    engine = FakeEngine("a", [])
    measured = [Measured("ssd", Mode.SSD, engine.settings, ["q0"], [])]
    interrupt = Interrupt()
    interrupt.pressed = True
    assert evaluate.replay_hits(measured, None, interrupt) == {} and not replayed  # type: ignore[arg-type]


def test_a_long_label_costs_no_figure(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    label = "ssd lookahead=5 budget=18 fallback_lookahead=5 draft_threads=2 target_devices=[cpu:0]"
    runs = [{**record, "label": label, "tokens_per_second": 1234.5} for record in results["runs"]]
    evaluate.print_table({**results, "runs": runs})
    table = capsys.readouterr().out.split("95 %")[0]
    assert table.count("1234.5") == len(runs) and "…" not in table
    cells = [line.split("│")[1].strip() for line in table.splitlines() if line.count("│") > 2]
    assert label.replace(" ", "") in "".join(cells).replace(" ", "")


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
