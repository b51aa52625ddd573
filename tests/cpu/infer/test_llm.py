"""The offline API on a tiny target: what the engine says, in order; streams; figures; mistakes by number; the example
of the docstring.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import infer.llm
from drafters.base.errors import UserError
from infer.llm import LLM, Answer, Prompt, SamplingParams
from tests.cpu.infer.recipe import write_recipe

SHORT = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(recipe: Path) -> Iterator[LLM]:
    with LLM(recipe, mode="sd", batch_size=4) as llm:
        yield llm


def test_many_prompts_are_answered_in_order_as_each_alone(llm: LLM) -> None:
    prompts: list[Prompt] = ["abc", "the second prompt", [70, 71, 72], "d"] * 3
    answers = llm.generate(prompts, SHORT)
    assert [answer.token_ids for answer in answers] == [
        llm.generate([prompt], SHORT)[0].token_ids for prompt in prompts
    ]
    assert answers[2].prompt_ids == (70, 71, 72)
    assert answers[0].text == llm.engine.target.tokenizer.decode(answers[0].token_ids, skip_special_tokens=True)
    assert llm.generate([], SHORT) == []


def test_one_prompt_gives_one_answer_with_its_figures(llm: LLM) -> None:
    answer = llm.generate("abc", SHORT)
    assert isinstance(answer, Answer) and len(answer.token_ids) == 12 and answer.finish_reason == "length"
    assert answer.rounds > 0 and answer.tokens_per_round is not None and answer.tokens_per_round >= 1
    assert answer.decode_seconds > 0 and answer.tokens_per_second == pytest.approx(11 / answer.decode_seconds)
    assert answer.hit_rate is None, "mode sd looks nothing up"


def test_a_chat_is_rendered_by_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat(chat, SHORT).token_ids == llm.generate(rendered, SHORT).token_ids
    assert [a.token_ids for a in llm.chat([chat, chat], SHORT)] == [llm.generate(rendered, SHORT).token_ids] * 2


def test_pieces_make_the_answer_and_the_last_one_brings_it(llm: LLM) -> None:
    whole = llm.generate(["abc", "xyz"], SHORT)
    pieces = list(llm.stream(["abc", "xyz"], SHORT))
    for index in (0, 1):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == whole[index].text
        assert sum((piece.token_ids for piece in own), ()) == whole[index].token_ids
        assert [piece.answer is not None for piece in own] == [False] * (len(own) - 1) + [True]
        assert len(own[0].token_ids) == 1, "the first token is not held back"
    chats = list(llm.stream_chat([{"role": "user", "content": "hi"}], SHORT))
    assert (
        chats[-1].answer is not None
        and chats[-1].answer.token_ids == llm.chat([{"role": "user", "content": "hi"}], SHORT).token_ids
    )


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    expected = [llm.generate(prompt, SHORT).text for prompt in ("abc", "xyz")]
    streams = [llm.stream(prompt, SHORT) for prompt in ("abc", "xyz")]
    texts = ["", ""]
    for _ in range(12):
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            texts[i] += piece.text if piece else ""
    assert texts == expected


def test_who_closes_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(["abc", "xyz"], SHORT)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting
    llm.generate("abc", SHORT)
    llm.engine.check()
    assert llm._inboxes == {}


def test_mistakes_name_the_prompt_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(UserError, match="prompt 1: the prompt is empty"):
        llm.generate(["abc", ""], SHORT)
    with pytest.raises(UserError, match=r"params: 3 were given for 2 prompts"):
        llm.generate(["a", "b"], [SHORT] * 3)
    with pytest.raises(UserError, match="did you mean 'batch_size'"):
        LLM(target="x", batch_sise=3)
    with pytest.raises(UserError, match="mode"):
        LLM(target="x", mode="sds")
    llm.engine.step()
    assert not llm.engine.has_work
    llm.engine.check()


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    answers = llm.generate(["abc", "abc"], [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=5)])
    assert [len(answer.token_ids) for answer in answers] == [3, 5]


def test_a_bar_counts_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["abc"] * 3, SHORT, progress=True)
    assert "prompts" in (error := capsys.readouterr().err) and "3/3" in error
    llm.generate(["abc"] * 3, SHORT)
    assert capsys.readouterr().err == "", "not in a terminal"


def test_the_example_of_the_docstring_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc = infer.llm.__doc__ or ""
    example = "\n".join(line[4:] for line in doc.splitlines() if line.startswith("    "))
    example = re.sub(r"recipes/\S+\.yaml", str(recipe), example)
    assert "llm.generate" in example and "llm.chat" in example and "llm.stream" in example
    exec(compile(example, "the example", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4


def test_a_stop_string_cuts_text_tokens_and_log_probabilities(llm: LLM) -> None:
    letter = llm.engine.target.tokenizer.convert_tokens_to_ids("x")
    params = SamplingParams(max_new_tokens=12, logit_bias=((letter, 100.0),), stop=("never", "xxx"), logprobs=1)
    answer = llm.generate("abc", params)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (letter,) * 3, "stop")
    assert [own.token for own in answer.logprobs] == [letter] * 3 and all(own.logprob < 0 for own in answer.logprobs)
    assert "".join(piece.text for piece in llm.stream("abc", params)) == ""
