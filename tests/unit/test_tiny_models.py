"""Tiny checkpoints: same bytes every time, whole or absent, and readable by transformers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from wmtp_vllm.tiny_models import GENERATORS, MANIFEST, Name, build
from wmtp_vllm.tiny_models.__main__ import main
from wmtp_vllm.tiny_models.checkpoint import (
    EOS,
    FILES,
    FIRST_TEXT_TOKEN,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    text_tokens,
    tokenizer,
)
from wmtp_vllm.tiny_models.induction import CODE_SIZE, bit_codes
from wmtp_vllm.tiny_models.pointer import Pointer, token_codes
from wmtp_vllm.tiny_models.rotary import content_channels, frequencies, landmark, look_back

pytestmark = pytest.mark.unit

NAMES: tuple[Name, ...] = ("dense", "hybrid", "induction", "mla", "glm", "llama")
MAX_BYTES = 20 * 10**6

printable_text = st.text(st.sampled_from([chr(code) for code in range(0x20, 0x7F)] + ["\n"]))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: Name = request.param
    return build(name, tmp_path_factory.mktemp("tiny") / name)


@pytest.fixture(scope="module")
def loaded_tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(checkpoint)
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded


class TestBuild:
    def test_same_options_give_the_same_bytes(self, checkpoint: Path, tmp_path: Path) -> None:
        name = json.loads((checkpoint / MANIFEST).read_text())["name"]
        again = build(name, tmp_path / "again")
        assert contents(again) == contents(checkpoint)

    @pytest.mark.parametrize("name", ["dense", "hybrid"])
    def test_another_seed_gives_other_weights(self, name: Name, tmp_path: Path) -> None:
        first, second = (build(name, tmp_path / str(seed), seed=seed) for seed in (0, 1))
        weights = "model.safetensors"
        assert (first / weights).read_bytes() != (second / weights).read_bytes()

    def test_is_whole_and_small(self, checkpoint: Path) -> None:
        files = contents(checkpoint)
        assert files.keys() == {*FILES, MANIFEST}
        assert sum(map(len, files.values())) < MAX_BYTES

    def test_names_no_folder_of_this_machine(self, checkpoint: Path) -> None:
        assert all(
            str(checkpoint.parent).encode() not in text for text in contents(checkpoint).values()
        )

    def test_reuses_a_complete_checkpoint(self, tmp_path: Path) -> None:
        path = build("induction", tmp_path / "model")
        before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
        assert build("induction", path, pad_layers=0) == path
        assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before

    def test_replaces_other_options(self, tmp_path: Path) -> None:
        path = build("induction", tmp_path / "model")
        build("induction", path, pad_layers=3)
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 5
        assert [entry.name for entry in tmp_path.iterdir()] == ["model"]

    def test_mends_an_incomplete_checkpoint(self, tmp_path: Path) -> None:
        path = build("induction", tmp_path / "model")
        (path / "model.safetensors").unlink()
        build("induction", path)
        assert contents(path).keys() == {*FILES, MANIFEST}

    def test_fills_an_empty_folder(self, tmp_path: Path) -> None:
        assert build("induction", tmp_path) == tmp_path
        assert contents(tmp_path).keys() == {*FILES, MANIFEST}

    def test_leaves_foreign_files_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(FileExistsError, match="not a tiny model"):
            build("dense", tmp_path)
        with pytest.raises(FileExistsError, match="not a tiny model"):
            build("dense", tmp_path / "thesis.txt")
        assert contents(tmp_path) == {"thesis.txt": b"years of work"}

    def test_many_may_build_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "model"
        build("induction", path, pad_layers=1)  # stale for all of them
        with ThreadPoolExecutor(4) as pool:
            built = list(pool.map(lambda _: build("induction", path), range(8)))
        assert built == [path] * 8
        assert [entry.name for entry in path.parent.iterdir()] == ["model"]
        assert contents(path) == contents(build("induction", tmp_path / "reference"))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("dense", {"layers": 0}),
            ("dense", {"reach": 0}),
            ("hybrid", {"reach": 0}),
            ("induction", {"draft_match": 4}),
            ("induction", {"target_match": 0}),
            ("induction", {"pad_layers": -1}),
            ("giant", {}),
        ],
    )
    def test_rejects_what_is_out_of_range(
        self, name: Name, options: dict[str, int], tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=r"must be|unknown tiny model"):
            build(name, tmp_path / "model", **options)
        assert not list(tmp_path.iterdir())

    def test_rejects_unknown_options(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="width"):
            build("dense", tmp_path / "model", width=1)

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "model"
        assert main(["dense", str(path), "layers=1", "seed=3"]) == 0
        assert capsys.readouterr().out.strip() == str(path)
        options = json.loads((path / MANIFEST).read_text())["options"]
        assert (options["layers"], options["seed"]) == (1, 3)
        with pytest.raises(SystemExit):
            main(["dense", str(path), "layers=many"])

    def test_all_generators_are_tested(self) -> None:
        others = {"trained", "eagle3"}  # have engine tests of their own
        assert {*NAMES, *others} == set(GENERATORS)


class TestTokenizer:
    def test_every_id_has_its_own_text(self) -> None:
        texts = text_tokens()
        assert len(set(texts)) == len(texts) == VOCAB_SIZE - FIRST_TEXT_TOKEN
        made = tokenizer()
        for index, text in enumerate(texts, start=FIRST_TEXT_TOKEN):
            assert made.decode([index]) == text
            assert made.encode(text).ids == [index]

    @given(printable_text)
    def test_text_round_trips(self, text: str) -> None:
        made = tokenizer()
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text

    @given(st.lists(st.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE - 1)))
    def test_decoding_concatenates(self, ids: list[int]) -> None:
        texts = [text_tokens()[index - FIRST_TEXT_TOKEN] for index in ids]
        assert tokenizer().decode(ids) == "".join(texts)

    def test_special_tokens(self, loaded_tokenizer: PreTrainedTokenizerBase) -> None:
        assert loaded_tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
        assert loaded_tokenizer.eos_token_id == EOS
        assert len(loaded_tokenizer) == VOCAB_SIZE

    @given(text=printable_text)
    def test_transformers_agrees(
        self, loaded_tokenizer: PreTrainedTokenizerBase, text: str
    ) -> None:
        ids = loaded_tokenizer(text)["input_ids"]
        assert ids == tokenizer().encode(text).ids
        assert loaded_tokenizer.decode(ids) == text

    def test_chat_template(self, loaded_tokenizer: PreTrainedTokenizerBase) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
        rendered = loaded_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert rendered == "system: Be brief.\nuser: Hi!\nassistant: "


class TestWeights:
    @given(distance=st.integers(0, 4096), context=st.integers(4097, 8192))
    def test_look_back_scores_highest_at_its_distance(self, distance: int, context: int) -> None:
        query = look_back(torch.tensor([distance]), 64)[0].double()
        distances = torch.arange(context, dtype=torch.float64)
        # The query turned by the distance, as rotary embedding does, against the landmark.
        angles = distances[:, None] * frequencies(64)
        turned = query[:32] * angles.cos() - query[32:] * angles.sin()
        scores = turned @ landmark(64)[:32].double()
        assert scores.argmax() == distance
        runner_up = scores[distances != distance].max()
        assert scores[distance] - runner_up > 0.5

    def test_rotary_channels_are_shared_out(self) -> None:
        content = content_channels(64)
        assert len(content) >= 3 * CODE_SIZE
        assert landmark(64)[content].count_nonzero() == 0

    def test_pointer_tables(self) -> None:
        pointer = Pointer.draw(torch.Generator().manual_seed(0), reach=192)
        assert 0 <= pointer.distance.min() <= pointer.distance.max() < 192
        assert (pointer.distance < 64).float().mean() > 0.85
        assert pointer.successor.min() >= FIRST_TEXT_TOKEN
        token, seen = FIRST_TEXT_TOKEN, set()
        while token not in seen:
            seen.add(token)
            token = int(pointer.successor[token])
        assert len(seen) == VOCAB_SIZE - FIRST_TEXT_TOKEN

    def test_special_tokens_get_no_logit(self) -> None:
        head = Pointer.draw(torch.Generator().manual_seed(0), reach=192).unembedding(1.0)
        assert head[:FIRST_TEXT_TOKEN].count_nonzero() == 0

    def test_token_codes_are_orthonormal(self) -> None:
        codes = token_codes(128, torch.Generator().manual_seed(0))
        assert torch.equal(codes @ codes.T, torch.eye(128))

    def test_bit_codes_differ_in_two_places(self) -> None:
        codes = bit_codes()
        agreement = codes @ codes.T - 2 * CODE_SIZE * torch.eye(VOCAB_SIZE)
        assert agreement.max() <= CODE_SIZE - 4
