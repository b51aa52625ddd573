"""The convert command: in, out and back on tiny models; a wrong tap convention shows; errors are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from drafters import convert
from drafters.base.errors import run_command
from drafters.eagle3_ssd.checkpoint import load_drafter, read_files
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.tap_probe import (
    GreedyAnswer,
    TapAgreement,
    correct_by_depth,
    greedy_answers,
    probe_taps,
    read_chats,
    tap_warnings,
)
from drafters.targets.target import Target, load_target
from tests.cpu.train.small import HIDDEN, VOCAB, small_config
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model, tiny_tokenizer
from tests.trained import random_prompts

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Why is the sky blue?", "Count to five.", "abc", "Tell me a story about a cat.")
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Target]:
    """A tiny target, a random drafter of it, and the loaded target."""
    folder = tmp_path_factory.mktemp("pair")
    target = load_target(str(save_tiny_target(folder / "target")), "float32")
    return folder / "target", save_tiny_drafter(folder / "tiny-eagle3", target), target


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target whose next token is a fixed permutation of the last one, and a drafter that reads the token after the
    next off `hidden_states[4]`: attention is off on both sides, so that a token's states are the same everywhere.
    """
    folder = tmp_path_factory.mktemp("exact")
    model: Any = tiny_model()
    vocab_size = model.config.vocab_size
    after = torch.cat(
        (torch.arange(3), 3 + torch.randperm(vocab_size - 3, generator=torch.Generator().manual_seed(0)))
    )
    with torch.no_grad():
        for depth, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.mul_(
                10.0**depth
            )  # what a layer adds drowns its input: neighbouring states have little in common
        states = model(torch.arange(vocab_size)[:, None], output_hidden_states=True).hidden_states
        model.lm_head.weight[after] = F.normalize(states[-1][:, 0], dim=-1)
        model.lm_head.weight[:3] = 0.0
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = load_target(str(folder / "target"), "float32")
    drafter = save_tiny_drafter(folder / "exact-eagle3", target, draft_vocab_size=vocab_size)
    tensors = load_file(drafter / "model.safetensors")
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name].zero_()
    tensors["fc.weight"] = torch.cat((torch.zeros(32, 64), torch.eye(32)), dim=1).bfloat16()
    tensors["lm_head.weight"][after[after]] = F.normalize(states[4][:, 0], dim=-1).bfloat16()
    save_file(tensors, drafter / "model.safetensors")
    return target, drafter


def run(*argv: object) -> int:
    return run_command(convert.main, [str(part) for part in argv])


def same(first: Path, second: Path) -> None:
    one, two = read_files(first), read_files(second)
    assert one.config == two.config and one.card == two.card and one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())
    assert torch.equal(one.vocab.draft_to_target, two.vocab.draft_to_target)


@pytest.mark.parametrize("kind", ["sglang", "vllm", "speculators"])
def test_out_and_in_again_is_the_same_drafter(tmp_path: Path, pair: tuple[Path, Path, Target], kind: str) -> None:
    target, drafter, loaded = pair
    assert run("export", drafter, "--to", kind, "--out", tmp_path / "out", "--target", target) == 0
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"], loaded.embed_weight.bfloat16()
    )
    assert (
        run(
            "import",
            tmp_path / "out",
            "--out",
            tmp_path / "in",
            "--target",
            target,
            "--dtype",
            "float32",
            "--num-prompts",
            0,
        )
        == 0
    )
    drafted = read_files(tmp_path / "in").tensors.get("embed_tokens.weight")
    assert drafted is not None  # kept: rounded to bf16 they are not the fp32 target's any more
    assert run("import", tmp_path / "out", "--out", tmp_path / "in2", "--target", target, "--num-prompts", 0) == 0
    same(tmp_path / "in2", drafter)


def test_ssd_and_eagle_hold_a_drafter_with_default_taps(tmp_path: Path) -> None:
    target_path = save_tiny_target(tmp_path / "target", layers=8)
    target = load_target(str(target_path), "bfloat16")
    drafter = save_tiny_drafter(tmp_path / "tiny-eagle3", target)
    config = json.loads((drafter / "config.json").read_text())
    config |= {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    (drafter / "config.json").write_text(json.dumps(config))
    for kind in ("ssd", "eagle"):
        out = tmp_path / f"{kind}-eagle3"
        assert run("export", drafter, "--to", kind, "--out", out, "--target", target_path) == 0
        assert ("embed_tokens.weight" in load_file(out / "model.safetensors")) == (kind == "eagle")
        assert run("import", out, "--out", tmp_path / f"{kind}-back", "--target", target_path, "--num-prompts", 0) == 0
        same(tmp_path / f"{kind}-back", drafter)


def test_mistakes_are_one_line(
    tmp_path: Path, pair: tuple[Path, Path, Target], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, _ = pair
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"question": "?"}\n')
    for argv, message in (
        (("export", drafter, "--to", "vllm", "--out", tmp_path), f"--out {tmp_path} exists"),
        (
            ("export", drafter, "--to", "vllm", "--out", out),
            "leaves the embeddings to its target, vllm files hold them: add --target",
        ),
        (("export", drafter, "--to", "ssd", "--out", out, "--target", target), "by 'eagle' in the directory's name"),
        (("export", drafter, "--to", "gguf", "--out", out), "invalid choice: 'gguf'"),
        (("export", tmp_path / "none", "--to", "vllm", "--out", out), "no such file"),
        (("import", tmp_path / "none", "--out", out), "is no directory and no hub id"),
        (("import", "owner/no-such-head", "--out", out), "owner/no-such-head could not be fetched from the hub"),
        (("import", drafter, "--out", out, "--target", tmp_path / "none"), "is neither a directory"),
        (("import", drafter, "--out", out, "--taps", 1, 2), "expected 3 arguments"),
        (("import", drafter, "--out", out, "--target", target, "--prompts", tmp_path / "none"), "no such file"),
        (
            ("import", drafter, "--out", out, "--target", target, "--prompts", bad),
            f"{bad}:2 is no JSON object with 'messages' or 'prompt'",
        ),
        (("lend",), "invalid choice: 'lend'"),
    ):
        assert run(*argv) == 2, argv
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_without_its_target_a_head_is_taken_with_a_warning(tmp_path: Path, pair: tuple[Path, Path, Target]) -> None:
    _, drafter, target = pair
    (tmp_path / "head").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "head" / name).write_bytes((drafter / name).read_bytes())
    assert run("import", tmp_path / "head", "--out", tmp_path / "in", "--trained-depth", 5) == 0
    loaded = load_drafter(tmp_path / "in", target.facts, target.embed_weight)
    assert len(loaded.warnings) == 1 and "nobody compared its tokenizer" in loaded.warnings[0]
    assert (loaded.card.trained_depth, loaded.card.lookahead, loaded.card.tokenizer_hash) == (5, 2, None)
    assert loaded.card.training == {"imported_from": str(tmp_path / "head"), "format": "sglang"}
    assert run("import", tmp_path / "head", "--out", tmp_path / "with", "--target", pair[0], "--num-prompts", 0) == 0
    card = read_files(tmp_path / "with").card
    assert (card.tokenizer_hash, card.template_hash) == (target.facts.tokenizer_hash, target.facts.template_hash)


def test_a_head_for_another_vocabulary_is_refused(
    tmp_path: Path, pair: tuple[Path, Path, Target], capsys: pytest.CaptureFixture[str]
) -> None:
    _, drafter, _ = pair
    padded = save_tiny_target(tmp_path / "padded", vocab_size=264)
    assert run("import", drafter, "--out", tmp_path / "in", "--target", padded, "--num-prompts", 0) == 2
    assert "made for vocabulary size 259" in capsys.readouterr().err
    assert not (tmp_path / "in").exists()


def misdeclared(drafter: Path, place: Path, shift: int) -> Path:
    """The same head with taps moved by `shift`, and no card."""
    place.mkdir()
    content = json.loads((drafter / "config.json").read_text())
    content["eagle_aux_hidden_state_layer_ids"] = [tap + shift for tap in content["eagle_aux_hidden_state_layer_ids"]]
    del content["eagle_config"]
    (place / "config.json").write_text(json.dumps(content))
    (place / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
    return place


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_probe_tells_a_wrong_tap_convention(
    tmp_path: Path, exact: tuple[Target, Path], shift: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = exact
    head = misdeclared(drafter, tmp_path / "head", shift)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    options = ("--target", target.facts.name, "--dtype", "float32", "--prompts", prompts, "--new-tokens", 40)
    assert run("import", head, "--out", tmp_path / "in", *options) == 0
    said = capsys.readouterr()
    agreed = {
        line.split("  ")[1]: float(line.split()[-2])
        for line in said.out.splitlines()
        if "declared" in line or "one layer" in line
    }
    assert agreed.pop("2, 3, 4") > 0.96, "all but the first token of each answer, which follows from the prompt"
    assert agreed and all(share < 0.3 for share in agreed.values()), said.out
    assert f"probe: {len(CHATS)} prompts, {40 * len(CHATS)} tokens" in said.out
    warnings = [line for line in said.err.splitlines() if "warning" in line]
    if not shift:
        assert not warnings
        return
    assert len(warnings) == 1 and warnings[0].endswith("the other side of a layer; import again with --taps 2 3 4")
    assert run("import", head, "--out", tmp_path / "again", "--taps", 2, 3, 4, *options) == 0
    assert read_files(tmp_path / "again").config == read_files(drafter).config


def test_agreement_is_what_a_plain_drafting_loop_counts() -> None:
    """One anchor at a time, each with its own keys, against all in parallel; two layers, three draft tokens, so that a
    third is right.
    """
    torch.manual_seed(0)
    vocab = VocabMap(torch.tensor([3, 7, 31]), VOCAB)
    model = Eagle3Drafter(small_config(2).model_copy(update={"draft_vocab_size": 3}))
    model.embed_tokens.weight.data.normal_()
    model.requires_grad_(False)
    ids = vocab.to_target(torch.randint(0, 3, (1, 40)))
    taps, answer = torch.randn(1, 40, 3 * HIDDEN), GreedyAnswer(ids[0].tolist(), answer_start=9)
    fused, places = model.fuse(taps), torch.arange(40)[None]
    want = [0.0, 0.0]
    for anchor in range(38):
        hidden, keys = fused[:, : anchor + 1], {}
        for depth in range(min(2, 38 - anchor)):
            start = anchor if depth else 0
            embeds = model.embed(ids[:, start + 1 + depth : anchor + 2 + depth])
            out = model(embeds, hidden, places[:, start + depth : anchor + 1 + depth], grown(keys))
            guess = vocab.to_target(model.logits(out[0, -1]).argmax(-1))
            want[depth] += float(anchor + 2 + depth >= answer.answer_start and guess == ids[0, anchor + 2 + depth])
            hidden = out[:, -1:]
    assert correct_by_depth(model, vocab, taps, answer) == want
    assert min(want) > 4, want


def grown(keys: dict[int, list[tuple[Tensor, Tensor]]]) -> Any:
    """Causal attention over all keys so far and the new ones."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.setdefault(layer, []).append((k, v))
        whole_k, whole_v = (torch.cat([step[i] for step in keys[layer]], dim=1) for i in (0, 1))
        whole_k, whole_v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (whole_k, whole_v))
        scores = torch.einsum("bqnd,bknd->bnqk", q, whole_k) * q.shape[-1] ** -0.5
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns).triu(columns - rows + 1).bool(), -torch.inf)
        return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), whole_v)

    return attend


def test_greedy_answers_are_transformers_own(pair: tuple[Path, Path, Target]) -> None:
    from transformers import AutoModelForCausalLM

    path, _, target = pair
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [
        prompt[:length]
        for prompt, length in zip(random_prompts(3, 9, target.facts.vocab_size, seed=3), (9, 4, 6), strict=True)
    ]
    for prompt, written in zip(prompts, greedy_answers(target, prompts, 10), strict=True):
        want = plain.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0].tolist()
        assert written == GreedyAnswer(want, len(prompt))


def test_a_drafter_that_agrees_with_nothing_is_said() -> None:
    nothing = [TapAgreement(shift, (2, 3, 4), (0.01, 0.0), 200) for shift in (0, -1, 1)]
    [warning] = tap_warnings(nothing)
    assert "agrees with the target on 1% of the tokens" in warning
    assert (
        tap_warnings([TapAgreement(0, (2, 3, 4), (0.5, 0.4), 200), TapAgreement(1, (3, 4, 5), (0.52, 0.4), 200)]) == []
    )


def test_prompts_are_read_in_turns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a1"}\n{"prompt": "a2"}\n\n')
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "b1"}]}\n')
    chats = read_chats([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], 3)
    assert [chat[0]["content"] for chat in chats] == ["a1", "b1", "a2"]


def test_embeddings_of_another_model_are_kept_and_said(
    tmp_path: Path, pair: tuple[Path, Path, Target], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, _ = pair
    assert run("export", drafter, "--to", "vllm", "--out", tmp_path / "out", "--target", target) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.randn_like(tensors["embed_tokens.weight"])
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert run("import", tmp_path / "out", "--out", tmp_path / "in", "--target", target, "--num-prompts", 0) == 0
    assert "note: embed_tokens.weight differs from the target's and is kept" in capsys.readouterr().out
    assert torch.equal(read_files(tmp_path / "in").tensors["embed_tokens.weight"], tensors["embed_tokens.weight"])


def test_the_probe_needs_no_shift_that_does_not_exist(pair: tuple[Path, Path, Target]) -> None:
    _, path, target = pair
    loaded = load_drafter(path, target.facts, target.embed_weight)
    config = loaded.config.model_copy(update={"tap_hidden_states_ids": (0, 3, 5)})
    model = Eagle3Drafter(config)
    model.load_state_dict(loaded.model.state_dict())
    assert [agreement.shift for agreement in probe_taps(model, loaded.vocab, target, CHATS[:1], 3)] == [0]
