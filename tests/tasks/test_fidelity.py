"""Fidelity: every figure against its definition, spelled out head by head; prompts of every kind, and bad ones."""

import csv
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.evals import models, runner
from kvbench.evals.screen.table import sheet
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.dropping.h2o import H2O
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.clusterkv import ClusterKV
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.results import read_runs
from kvbench.tasks.fidelity import BY_LAYER, Comparison, Fidelity, recall
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import CONF, WINDOW, cell, run, save_tiny, sweep
from kvbench.tests.vectors import built, row_for

S, STEPS = 90, 5
TASK = ["task=fidelity", "task.prompt_tokens=120", "task.windows=2", "task.steps=6"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def words(checkpoint: Path, *more: str) -> list[str]:
    return ["model=any", f"model.id={checkpoint}", *TASK, *more]


def values(**changes: Any) -> Any:
    given = yaml.safe_load((CONF / "task" / "fidelity.yaml").read_text())
    assert given.pop("_target_") == "kvbench.tasks.fidelity.Fidelity"
    return build_params(Fidelity, given | changes, "task")


def shape(window: int = WINDOW) -> ModelShape:
    return ModelShape("tiny", 3, 6, 2, 8, window, (0, 1, 2))


# --- the figures ---


class Recording(Comparison):
    """A comparison that also keeps what it was shown."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shown: list[tuple[int, int, int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.logits: list[Tensor] = []  # of each step, in the order of the rows

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attended(layer, order, q, k, v, out)
        for place, row in enumerate(order):
            if row < len(self.rows):
                seen = self.rows[row].store.attended(layer).clone()
                at_q, at_k, at_v, at_out = (x[place].clone() for x in (q, k, v, out))
                self.shown.append((self.step, layer, row, at_q, at_k, at_v, at_out, seen))

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        super().predicted(order, logits)
        self.logits.append(logits[torch.tensor(order).argsort()].clone())


def params_of(kind: type[SelectiveAttention], method: str) -> Any:
    given = yaml.safe_load((CONF / "method" / f"{method}.yaml").read_text())
    return build_params(kind, {k: v for k, v in given.items() if k not in ("_target_", "seed")}
                        | ({"seed": 0} if "seed" in given else {}), "method")  # fmt: skip


def watched_decoding(k: int | None = None) -> tuple[Model, Trace, Recording, list[int]]:
    """Four variants read what a tiny model's prompt goes on with, and full attention beside them."""
    model, ids = tiny(), prompt(S + STEPS)
    kinds: list[tuple[type[SelectiveAttention], str]] = [
        (Oracle, "oracle"), (ClusterKV, "clusterkv"), (H2O, "h2o"), (StreamingLLM, "streamingllm"),
    ]  # fmt: skip
    asked = BudgetRequest(Fraction("0.3"), None, Fraction("1/8"))
    made = [(kind, params_of(kind, name)) for kind, name in kinds]
    observations = [
        what
        for kind, params in made
        for what in kind.observations(params, kind.plan_for(params, kind.budget_for(params, asked, S), model.shape))
    ]
    with model.hooked():
        trace = prefill(model, ids[:S], observations)
        rows = [built(row_for(kind, params, asked, trace, STEPS)) for kind, params in made]
        full = built(row_for(Full, Full.Params(), BudgetRequest(Fraction(1), None, Fraction(0)), trace, STEPS))
        watch = Recording(trace, rows, STEPS, values(k=k))
        decode(model, trace, [*rows, full], max_new_tokens=0, feed=ids[S:], watch=watch)
    return model, trace, watch, ids


def share_of_best(logits: Tensor, seen: Tensor, k: int) -> float:
    """How many of the k largest were seen, equal ones in favour of the seen; by sorting in plain Python."""
    best = sorted(zip(logits.tolist(), seen.tolist(), strict=True), reverse=True)[:k]
    return sum(was_seen for _, was_seen in best) / k


@pytest.mark.parametrize("k", [None, 20])
def test_every_figure_of_a_layer_is_what_its_definition_says(k: int | None) -> None:
    _, trace, watch, _ = watched_decoding(k)
    assert len(watch.shown) == STEPS * 3 * 4
    for step, layer, row, q, _, _, out, seen in watch.shown:
        # K and V as the prompt left them, and the variant's own of the tokens fed so far.
        own = [s for s in watch.shown if s[1:3] == (layer, row) and s[0] <= step]
        keys = torch.cat([trace.keys(layer)[0], *(s[4] for s in own)], 1).double()
        vals = torch.cat([trace.values(layer)[0], *(s[5] for s in own)], 1).double()
        recalls, masses, outs = [], [], []
        for head in range(6):
            logits = keys[head // 3] @ q[head, 0].double() * trace.softmax[layer].scale
            weights = logits.softmax(0)
            n = int(seen[head, :S].sum()) if k is None else k
            recalls.append(share_of_best(logits[:S], seen[head, :S], n))
            masses.append(weights[seen[head]].sum().item())
            outs.append(weights @ vals[head // 3])
        exact = torch.stack(outs).unsqueeze(1)
        error = (out.double() - exact).norm() / exact.norm()
        found = {name: watch.by_layer[name][layer, step, row].item() for name in BY_LAYER}
        assert found["recall"] == pytest.approx(sum(recalls) / 6, abs=1e-6)
        assert found["mass"] == pytest.approx(sum(masses) / 6, abs=1e-5)
        assert found["output_error"] == pytest.approx(error.item(), abs=1e-5)


def test_divergence_and_agreement_are_from_one_plain_pass_over_the_same_tokens() -> None:
    model, _, watch, ids = watched_decoding()
    with torch.inference_mode():
        full = model.hf(torch.tensor([ids])).logits[0, S:].double().log_softmax(-1)
    for step, logits in enumerate(watch.logits):
        own = logits.double().log_softmax(-1)
        assert torch.allclose(own[4], full[step], atol=1e-4)
        for row in range(4):
            kl = sum(math.exp(p) * (p - q) for p, q in zip(full[step].tolist(), own[row].tolist(), strict=True))
            assert watch.by_step["kl"][step, row].item() == pytest.approx(kl, abs=1e-4)
            agrees = own[row].argmax() == full[step].argmax()
            assert watch.by_step["agreement"][step, row] == agrees


def test_a_sample_is_marked_with_means_over_the_layers_that_count() -> None:
    _, _, watch, _ = watched_decoding()
    oracle, clusters, *_ = watch.outcomes()
    assert clusters.fields["layers_skipped"] == [0, 1]  # which ClusterKV leaves whole
    assert oracle.fields["layers_skipped"] == []
    recalls = watch.by_layer["recall"]
    assert clusters.score == pytest.approx(recalls[2, :, 1].mean().item(), abs=1e-6)
    assert oracle.score == pytest.approx(recalls[:, :, 0].mean().item(), abs=1e-6)
    assert clusters.fields["by_layer"]["recall"][:2] == [1, 1]
    assert oracle.fields["by_step"]["recall"] == pytest.approx(recalls[:, :, 0].mean(0).tolist(), abs=1e-6)
    watch.params = values(skip_layers=[0])
    assert watch.outcomes()[0].score == pytest.approx(recalls[1:, :, 0].mean().item(), abs=1e-6)


@pytest.mark.parametrize("k", [None, 1, 7, 40])
def test_equal_logits_at_the_border_count_for_the_variant(k: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randint(0, 4, (3, 30), generator=generator).float()
        seen = torch.rand(3, 30, generator=generator) < 0.4
        wanted = [
            share_of_best(row, mask, min(k or int(mask.sum()), 30)) for row, mask in zip(logits, seen, strict=True)
        ]
        assert recall(logits, seen, k).item() == pytest.approx(sum(wanted) / 3)


# --- whole runs ---


def test_full_attention_and_the_whole_prompt_are_perfect_and_less_is_not(checkpoint: Path, tmp_path: Path) -> None:
    perfect = [["method=full"], *([f"method={name}", "ratio=1"] for name in ("oracle", "snapkv"))]
    less = [["method=oracle"], ["method=streamingllm"], ["method=pyramidinfer", "ratio=0.7"]]
    done = sweep(words(checkpoint), [*perfect, *less], tmp_path / "sweep")
    for result, rows in done[:3]:
        assert result.metric == "recall" and result.score == 1
        measures = result.measures or {}
        perfect = {"recall": 1, "mass": 1, "output_error": 0, "kl": 0, "agreement": 1, "acceptance": 1}
        perfect |= {"expected_length_4": 5, "expected_length_6": 7}
        assert measures == pytest.approx(perfect, abs=1e-5)
        assert len(rows) == 2
    for result, rows in done[3:]:
        assert result.score == pytest.approx(number(result, "recall"))
        assert number(result, "recall") < 0.999 and number(result, "mass") < 0.999
        assert number(result, "output_error") > 0.01 and number(result, "kl") > 1e-4
        for row in rows:
            assert {*row.fields["by_layer"]} == {*BY_LAYER}
            assert all(len(each) == 3 for each in row.fields["by_layer"].values())
            assert all(len(each) == 6 for each in row.fields["by_step"].values())
            assert row.ledger["steps"] == 6
    # The bound of all methods beats a method that never looks.
    (best, _), (ends, _) = done[3:5]
    assert number(best, "recall") > number(ends, "recall")
    shown = sheet([(tmp_path, result) for result, _ in done])
    headers = list(shown.heads)
    assert "n = 2" in shown.about
    assert headers[headers.index("recall") :][:6] == ["recall", "95 %", "mass", "output_error", "kl", "agreement"]
    assert "fidelity pydoc-" in shown.about


def test_the_true_top_tokens_have_a_recall_of_one(checkpoint: Path, tmp_path: Path) -> None:
    """The oracle without protected ends, each head for itself: all of the truth, and not all of the mass."""
    bare = ["method=oracle", "method.n_sink=0", "method.local_share=0", "method.generated=on_top"]
    each, shared = sweep(
        words(checkpoint, *bare),
        [["method.agg=query_head"], ["method.agg=group_sum"]],
        tmp_path / "sweep",
    )
    assert number(each[0], "recall") == 1 and number(each[0], "mass") < 0.999
    assert number(shared[0], "recall") < 0.999


def test_variants_side_by_side_are_measured_as_alone(checkpoint: Path, tmp_path: Path) -> None:
    """With a method in between whose prompt is read in a pass of its own."""
    variants = [["method=pyramidinfer", "ratio=0.7"], ["method=streamingllm"], ["method=clusterkv"]]
    together = sweep(words(checkpoint), variants, tmp_path / "sweep")
    for i, variant in enumerate(variants):
        alone, _ = run(words(checkpoint, *variant), tmp_path / str(i))
        # Other rows in the batch change the last digits of a product, and what is written has six.
        assert alone.measures == pytest.approx(together[i][0].measures, abs=2e-5)


def test_a_finished_run_is_read_again_and_has_a_table_of_its_layers(checkpoint: Path, tmp_path: Path) -> None:
    result, rows = run(words(checkpoint, "method=quest", "comm=1/8"), tmp_path / "run")
    assert read_runs(tmp_path) == [(tmp_path / "run", result)]
    with (tmp_path / "run" / "layers.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [each["layer"] for each in found] == ["0", "1", "2"]
    for i, each in enumerate(found):
        for name in BY_LAYER:
            mean = sum(row.fields["by_layer"][name][i] for row in rows) / 2
            assert float(each[name]) == pytest.approx(mean, abs=1e-6)


def test_results_from_before_there_were_metrics_are_read(checkpoint: Path, tmp_path: Path) -> None:
    result, _ = run(words(checkpoint, "method=full"), tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    data = json.loads(file.read_text())
    del data["crc32"], data["samples_crc32"]  # a run of that time has no seals
    lines = [json.loads(line) for line in (file.parent / "samples.jsonl").read_text().splitlines()]
    write(file.parent / "samples.jsonl", *({key: x for key, x in line.items() if key != "crc32"} for line in lines))
    assert (data.pop("metric"), {*data.pop("measures")}) == ("recall", {*(result.measures or ())})
    file.write_text(json.dumps(data))
    ((_, old),) = read_runs(tmp_path)
    assert (old.metric, old.measures, old.score) == (None, None, 1)
    del data["score"]
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="key 'score' is missing"):
        read_runs(tmp_path)


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_lines_hold_texts_prompts_and_prompts_with_a_continuation(checkpoint: Path, tmp_path: Path) -> None:
    prose = embedded_prose()
    file = write(
        tmp_path / "my.jsonl",
        {"id": 7, "text": prose[:900]},
        {"prompt": prose[:300], "continuation": prose[300:400]},
        {"prompt": prose[400:700], "continuation": None},
    )
    methods = [["method=full"], ["method=streamingllm"]]
    given = words(checkpoint, f"task.path={file}")
    (full, rows), (_, less) = sweep(given, methods, tmp_path / "auto")
    assert (full.dataset, full.data_source, full.n_samples) == ("my", "local", 3)
    assert [row.id for row in rows] == ["7", "line-2", "line-3"]
    assert rows[0].prompt_tokens == 120
    assert all(row.fields["steps"] == 6 for row in rows[:2])
    # Full attention's own answer is fed where nothing else is there: it agrees with itself.
    assert rows[2].fields["measures"]["agreement"] == 1
    (greedy, own), _ = sweep([*given, "task.continuation=greedy"], methods, tmp_path / "greedy")
    assert own[2].fields["measures"] == rows[2].fields["measures"]
    assert (greedy.measures or {})["agreement"] == 1
    assert less[2].fields["measures"]["agreement"] <= 1
    with pytest.raises(ConfigError, match=r"my\.jsonl, line 3: field 'continuation' is missing"):
        run([*given, "method=full", "task.continuation=text"], tmp_path / "text")
    with pytest.raises(ConfigError, match=r"my\.jsonl, line 1: the text has \d+ tokens, too few"):
        run([*given, "method=full", "task.steps=900"], tmp_path / "long")


def test_a_text_file_is_cut_into_windows(checkpoint: Path, tmp_path: Path) -> None:
    from kvbench.tests.tiny_tokenizer import tiny_tokenizer

    file = tmp_path / "own.txt"
    file.write_text(embedded_prose()[:2000])
    made = Fidelity(values(path=str(file), prompt_tokens=50, windows=3, steps=4), None, 0)
    made.check(shape())
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    bos, *ids = tokenizer.encode(file.read_text())
    samples = made.samples(tokenizer)
    assert [(len(s.ids or ()), len(s.forced or ())) for s in samples] == [(50, 5)] * 3
    windows = [[*(s.ids or ()), *(s.forced or ())] for s in samples]
    assert [window[0] for window in windows] == [bos] * 3
    assert windows[0][1:] == ids[:54] and windows[2][1:] == ids[-54:]
    assert (made.dataset, made.data_source) == ("own", "local")


GOOD = json.dumps({"prompt": "A prompt that can be read.", "id": 1}).encode()
BAD = [
    (GOOD[:-9], "no whole JSON object"),
    (b"[1]", "no JSON object"),
    (b'{"id": 2}', "give one of the fields 'text' and 'prompt'"),
    (b'{"text": "a", "prompt": "b"}', "give one of the fields 'text' and 'prompt'"),
    (b'{"prompt": ["a"]}', "field 'prompt' is no text or an empty one"),
    (b'{"prompt": "a", "continuation": 3}', "field 'continuation' is no text"),
    (GOOD.replace(b"can", b"c\xe4n"), "no UTF-8"),
    (GOOD, "id=1 stands in an earlier line already"),
    (GOOD.replace(b"1", b'"1"'), "id='1' stands in an earlier line already"),
    (b"", "the line is empty"),
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_refused_or_skipped_as_asked(
    checkpoint: Path, tmp_path: Path, bad: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my.jsonl"
    file.write_bytes(b"\n".join([GOOD, bad, b'{"prompt": "Another one.", "id": 2}']) + b"\n")
    given = words(checkpoint, f"task.path={file}", "method=full", "task.steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        with pytest.raises(ConfigError, match=rf"my\.jsonl, line 2: .*{said}"):
            run(given, tmp_path / "refused")
    result, rows = run([*given, "task.on_bad_row=skip"], tmp_path / "skipped")
    assert [row.id for row in rows] == ["1", "2"]
    assert len(result.notes) == 1 and said in result.notes[0] and "line 2" in result.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b"nothing\n", r"a\.jsonl, line 1: the line is no whole JSON"),
        ("a.txt", b"", r"a\.txt: the file is empty"),
        ("a.txt", b"\xff\xfea\x00", r"a\.txt, line 1: the file is UTF-16"),
        ("a.txt", None, r"a\.txt is no file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        Fidelity(values(path=str(tmp_path / name)), None, 0)


def test_ids_that_meet_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "my.jsonl", {"prompt": "One."}, {"prompt": "Two.", "id": "line-1"})
    with pytest.raises(ConfigError, match="two samples are called 'line-1'"):
        run(words(checkpoint, f"task.path={file}", "method=full"), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "task.steps=0 is out of range"),
        ({"k": 0}, "task.k=0 is out of range"),
        ({"continuation": "none"}, "task.continuation"),
        ({"on_bad_row": "drop"}, "task.on_bad_row"),
        ({"prompt_tokens": 1000}, "give 991 or fewer"),
        ({"draft": [4, 0]}, "task.draft"),
        ({"draft": [4, 4]}, "task.draft"),
        ({"top_p": 0}, "task.top_p=0 is out of range"),
        ({"skip_layers": [3]}, "must leave some of the compressed layers"),
        ({"skip_layers": [0, 1, 2]}, "must leave some of the compressed layers"),
    ],
)
def test_parameters_that_cannot_be_met_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fidelity(values(**{"prompt_tokens": 500} | changes), None, 0).check(shape())


def test_a_file_that_changed_is_another_run(checkpoint: Path, tmp_path: Path) -> None:
    places = []
    for text in ("One.", "Two."):
        file = write(tmp_path / "my.jsonl", {"prompt": text})
        given = words(checkpoint, f"task.path={file}", "method=full")
        places.append(runner.prepare([cell(given, tmp_path, True)])[0].path)
    assert places[0] != places[1]


def test_on_the_embedded_model_clusters_find_more_than_pages(tmp_path: Path) -> None:
    """At one budget: recall and mass by ClusterKV over Quest, and the oracle's least divergence."""
    given = [
        "task=fidelity",
        "task.prompt_tokens=600",
        "task.windows=1",
        "task.steps=4",
        "ratio=0.25",
    ]
    methods = [["method=oracle"], ["method=clusterkv"], ["method=quest"]]
    (oracle, _), (clusters, _), (pages, _) = sweep(given, methods, tmp_path)
    for name in ("recall", "mass"):
        assert number(clusters, name) > number(pages, name)
    assert number(oracle, "kl") < number(clusters, "kl") < number(pages, "kl")


def number(result: Any, name: str) -> float:
    value = result.measures[name]
    assert value is not None
    return value
