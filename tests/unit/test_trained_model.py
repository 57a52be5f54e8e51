"""The trained model: what ships, what it was trained on and what it was not, and its prompts."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wmtp_vllm.bench.workloads import Chance
from wmtp_vllm.tiny_models import build, heldout
from wmtp_vllm.tiny_models.checkpoint import VOCAB_SIZE, tokenizer
from wmtp_vllm.tiny_models.shipped import FOLDER
from wmtp_vllm.tiny_models.start import LANES, initialise, lane
from wmtp_vllm.tiny_models.tasks import TASKS
from wmtp_vllm.tiny_models.texts import Corpus, documents, is_held_out
from wmtp_vllm.tiny_models.training import DEPTH, Rows, losses, main, make_optimizers
from wmtp_vllm.tiny_models.transformer import Sizes, Transformer

pytestmark = pytest.mark.unit

CHECKSUMS = {
    ("needles", 0): "dde72a50d12af563",
    ("needles", 1): "e45b377ee09f7343",
    ("copy", 0): "7a187c719e7d9233",
    ("copy", 1): "5f3063e82ea2c680",
}
"""Of all parts of a task of eight lines, by task and seed."""


@pytest.fixture(scope="module")
def fresh() -> Transformer:
    model = Transformer(Sizes())
    initialise(model, torch.Generator().manual_seed(0))
    return model


class TestShipped:
    def test_it_is_small_and_says_where_it_is_from(self):
        weights = FOLDER / "model.safetensors"
        assert weights.stat().st_size < 4_000_000
        assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
        provenance = json.loads((FOLDER / "provenance.json").read_text())
        assert provenance["licence_of_the_text"] == "PSF-2.0"
        assert {"python", "training_text", "seed", "steps", "minutes", "held_out"} <= set(
            provenance
        )
        assert "/" not in provenance["machine"]

    def test_build_makes_a_checkpoint_of_it(self, tmp_path):
        path = build("trained", tmp_path / "model")
        assert json.loads((path / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
        weights = load_file(path / "model.safetensors")
        assert weights.keys() == Transformer(Sizes()).state_dict().keys()
        assert "model.mtp_layers.0.input_proj.weight" in weights


class TestText:
    def test_names_alone_decide_and_will_decide_alike_for_ever(self):
        held_out = ("pathlib.py", "enum.py", "uuid.py", "pydoc_data/topics.py:return")
        trained_on = ("os.py", "json/decoder.py", "abc.py", "pydoc_data/topics.py:class")
        assert all(map(is_held_out, held_out))
        assert not any(map(is_held_out, trained_on))

    def test_the_parts_share_nothing(self):
        training, held_out = documents("training"), documents("held-out")
        assert not training.keys() & held_out.keys()
        assert 10 < len(held_out) < len(training) / 8
        assert "pathlib.py" in held_out

    def test_every_character_has_a_token(self):
        text = Corpus("held-out").passage(Chance("0"), 5000)
        assert len(text) == 5000
        assert tokenizer().decode(tokenizer().encode(text).ids) == text

    def test_more_text_than_there_is_is_refused(self):
        with pytest.raises(ValueError, match="no running text of"):
            Corpus("held-out").passage(Chance("0"), 10**8)


class TestTasks:
    @pytest.mark.parametrize(("task", "seed"), CHECKSUMS)
    def test_a_task_is_the_same_bytes_on_every_machine(self, task, seed):
        made = TASKS[task](Chance(f"{seed}"), 8)
        text = "".join([made.source, made.question, made.answer])
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == CHECKSUMS[task, seed]

    def test_needles_are_answered_in_the_order_asked(self):
        made = TASKS["needles"](Chance("0"), 8)
        source = dict(line.split(" = ") for line in made.source.split("\n") if line)
        asked = made.question.split()[1:]
        assert made.answer == "".join(f"{key} = {source[key]}\n" for key in asked)
        assert sorted(asked) == sorted(source)

    def test_a_copy_is_the_passage(self):
        made = TASKS["copy"](Chance("0"), 8)
        assert made.source == made.question + made.answer


class TestHeldOut:
    @pytest.mark.parametrize("kind", heldout.KINDS)
    def test_a_prompt_has_the_length_asked_for_and_another_seed_is_another(self, kind):
        first, again, other = (heldout.make(kind, 2000, seed) for seed in (3, 3, 4))
        assert first == again != other
        assert len(first.prompt.encode()) == 2000

    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("distance", [700, 2000])
    def test_the_source_is_at_its_distance(self, task, distance):
        made = heldout.make(task, 2000, 0, distance)
        source = made.prompt[-distance:]
        assert source.startswith("\ncopy:\n" if task == "copy" else "\n")
        lines = [line for line in made.answer.split("\n") if line]
        assert all(line in source[: len(made.answer) + 10] for line in lines)
        assert made.prompt.count(lines[0]) == 1

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"must be from \d+ to the length, 2000, not 50"):
            heldout.make("copy", 2000, 0, 50)
        with pytest.raises(ValueError, match="not 2001"):
            heldout.make("copy", 2000, 0, 2001)
        with pytest.raises(ValueError, match="no source"):
            heldout.make("text", 2000, 0, 500)
        with pytest.raises(ValueError, match="unknown kind 'nope'"):
            heldout.make("nope", 2000, 0)

    def test_command_line(self, tmp_path: Path, capsys):
        out = tmp_path / "prompts.jsonl"
        arguments = ["--kind", "needles", "--length", "1500", "--out", str(out)]
        assert heldout.main([*arguments, "--count", "2", "--seed", "5"]) == 0
        prompts = [json.loads(line) for line in out.read_text().splitlines()]
        assert prompts == [
            {"prompt": heldout.make("needles", 1500, seed).prompt} for seed in (5, 6)
        ]
        with pytest.raises(SystemExit):
            heldout.main([*arguments, "--distance", "10"])
        assert "must be from" in capsys.readouterr().err


class TestTraining:
    def test_the_targets_layers_learn_nothing_from_the_draft(self, fresh):
        tokens = torch.randint(4, 256, (2, 65), generator=torch.Generator().manual_seed(0))
        starts = torch.tensor([3, 20, 50])
        found = losses(fresh, tokens, torch.arange(64).repeat(2, 1), starts)
        sum(found.draft).backward()
        learned = {name for name, p in fresh.named_parameters() if p.grad is not None}
        fresh.zero_grad(set_to_none=True)
        # The embeddings and the output head are both's.
        assert not any(name.startswith("model.layers.") for name in learned)
        assert any(name.startswith("model.mtp_layers.") for name in learned)

    def test_lanes_hold_the_last_tokens_whatever_is_learned(self):
        rng = torch.Generator().manual_seed(0)
        model = Transformer(Sizes())
        initialise(model, rng)
        tokens = torch.randint(4, 256, (2, 65), generator=rng)
        positions, starts = torch.arange(64).repeat(2, 1), torch.tensor([3, 20, 50])
        before = model.model.layers[1].mlp.down_proj.weight.clone()
        for _ in range(3):
            found = losses(model, tokens, positions, starts)
            (found.target + sum(found.draft)).backward()
            for optimizer in make_optimizers(model):
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"]
                optimizer.step()
                optimizer.zero_grad()
        assert not torch.equal(before, model.model.layers[1].mlp.down_proj.weight)
        with torch.no_grad():
            _, hidden = model.target(tokens[:, :-1], positions)
            embedded = model.model.embed_tokens(tokens)
            (head,) = model.model.mtp_layers
            entered = head.enter(hidden, embedded[:, 1:], positions)

        def alike(here, there):
            return torch.cosine_similarity(here, there, dim=-1).min() > 0.97

        torch.testing.assert_close(hidden[..., lane(0)], embedded[:, :-1, lane(0)])
        assert alike(entered[:, 1:, lane(0)], embedded[:, 2:, lane(0)])
        for distance in range(1, LANES):
            written = (hidden - embedded[:, :-1])[:, LANES:, lane(distance)]
            assert alike(written, embedded[:, LANES - distance : -1 - distance, lane(0)])
            # In the draft, whose own token is the next, every token is one further back.
            assert alike(entered[..., lane(distance)], hidden[..., lane(distance - 1)])

    @torch.no_grad()
    def test_a_chain_reads_its_own_steps_and_of_the_rest_what_is_before_it(self, fresh):
        """Against the same head, run on a sequence that is put together for one chain."""
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(4, 256, (1, 40), generator=rng)
        hidden = torch.randn(1, 40, Sizes().hidden, generator=rng)
        positions, start = torch.arange(40)[None], 17
        chained = fresh.draft(hidden, tokens, positions, torch.tensor([start]), DEPTH)
        spoken = hidden[:, : start + 1]
        (head,) = fresh.model.mtp_layers
        for step in range(DEPTH):
            end = start + 1 + step
            embedded = fresh.model.embed_tokens(tokens[:, :end])
            entered = head.enter(spoken, embedded, positions[:, :end])
            x = head.final_layernorm(head(entered, fresh.rotary(positions[:, :end]))[0])
            expected = fresh.lm_head(x[:, -1])
            said = chained[step][:, start] if step == 0 else chained[step][:, 0]
            torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
            spoken = torch.cat([spoken, x[:, -1:]], dim=1)

    def test_rows_repeat_by_seed_and_fit(self):
        first, again = (Rows("training", 7).batch(256) for _ in range(2))
        assert torch.equal(first, again)
        assert first.shape[1] == 257
        positions = Rows("training", 7).positions(8, 256, 8192)
        assert (positions.diff() >= 1).all()
        assert positions.max() < 8192

    def test_a_step_of_training_writes_what_ships(self, tmp_path):
        assert main(["--out", str(tmp_path), "--steps", "1"]) == 0
        written = {file.name for file in tmp_path.iterdir()}
        assert written == {file.name for file in FOLDER.iterdir()}
        assert (tmp_path / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()
