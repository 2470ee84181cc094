"""LongMemEval: the rules of its scores, drawn and published rows, sessions that are read one by one, and its judge."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals import rescore
from kvbench.results import read_samples
from kvbench.results.read import read_run
from kvbench.run import main
from kvbench.tasks.longmemeval import chat_judge, made
from kvbench.tasks.longmemeval.chat_judge import KEY, ChatJudge, check_address
from kvbench.tasks.longmemeval.scores import accepted, head, score
from kvbench.tasks.longmemeval.task import FILES, TYPES, LongMemEval
from kvbench.tasks.turns.encode import TalkPrompt, prompt_of
from kvbench.tests.tiny_run import run, save_tiny
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


def task(folder: Path | None, window: int = 8192, seed: int = 0, **given: Any) -> LongMemEval:
    values = yaml.safe_load((REPO / "conf" / "task" / "longmemeval.yaml").read_text())
    del values["_target_"]
    found = LongMemEval(
        build_params(LongMemEval, values | given, "task"), None if folder is None else str(folder), seed
    )
    found.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return found


# --- rules -------------------------------------------------------------------------------------

ABSTAINS = ["You did not mention this information."]


@pytest.mark.parametrize(
    ("answer", "references", "right"),
    [
        ("GPS system", ["GPS system"], 1),
        ("It was the *gps-system* of your car.", ["GPS system"], 1),
        ("The system of the GPS", ["GPS system"], 0),
        ("Bruno's", ["Bruno"], 1),
        ("Brunos", ["Bruno"], 0),
        ("not Bruno", ["Bruno"], 0),
        ("It isn\N{RIGHT SINGLE QUOTATION MARK}t Bruno, it is Rex.", ["Bruno"], 0),
        ("No, Bruno.", ["Bruno"], 1),
        ("Let me see: I think of Rex.</think>Bruno", ["Bruno"], 1),
        ("Bruno</think>Rex", ["Bruno"], 0),
        ("\n\n  \nBruno\nRex", ["Bruno"], 1),
        ("Rex\nBruno", ["Bruno"], 0),
        ("Your dog is called:\n\nBruno", ["Bruno"], 1),
        ("I don't know, perhaps Bruno.", ["Bruno"], 0),
        ("\uff22runo", ["Bruno"], 1),  # a wide letter
        ("", ["Bruno"], 0),
        ("3", ["Three"], 1),
        ("You have three kites.", ["3"], 1),
        ("13", ["3"], 0),
        ("3.0", ["3"], 1),
        ("3.5", ["3"], 0),
        ("3 or 4", ["3"], 0),
        ("2-3", ["3"], 0),
        ("1, 2, 3, 4", ["3"], 0),
        ("between 3 and 5", ["3"], 0),
        ("In 2023 you bought 3.", ["3"], 1),
        ("In 2023.", ["2023"], 1),
        ("not 3 but 4", ["3"], 0),
        ("not 3 but 4", ["4"], 1),
        ("4 (before that 3)", ["3"], 0),
        ("twenty-one", ["21"], 1),
        ("You spent $1,200.50 in all.", ["$1200.5"], 1),
        ("$12", ["$1,200"], 0),
        ("25:50", ["25:50"], 1),
        ("25", ["25:50"], 0),
        ("7 days", ["7 days"], 1),
        ("7", ["7 days"], 1),
        ("A day is short, but it was seven of them", ["7 days"], 1),
        ("7 weeks", ["7 days"], 0),
        ("From the 3rd of May to the 10th: 7 days", ["7 days"], 1),
        ("7 days, or 9 days", ["7 days"], 0),
        ("8 days", ["7 days", "8 days"], 1),
        ("1 day", ["1 days"], 1),
        ("\u0663", ["3"], 0),
        ("9" * 5000, ["3"], 0),
        ("9" * 5000, ["9" * 5000], 1),
    ],
)  # fmt: skip
def test_an_answer_is_right_by_its_words_or_its_number(answer: str, references: list[str], right: int) -> None:
    assert score(answer, references, [], False) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("I don't know.", 1),
        ("You didn't tell me that.", 1),
        ("You never mentioned a cat.", 1),
        ("It is not mentioned in our conversations.", 1),
        ("That hasn't been discussed.", 1),
        ("There is no information about it.", 1),
        ("This cannot be determined from what you said.", 1),
        ("I\N{RIGHT SINGLE QUOTATION MARK}m not sure.", 1),
        ("Unknown", 1),
        (" not known", 1),
        ("I don't know, maybe Rex.", 0),
        ("I don't know, but it isn't Rex.", 1),
        ("Rex\nI don't know.", 0),
        ("Your dog is called Fido.", 0),
        ("I know it well.", 0),
        ("", 0),
    ],
)
def test_what_was_not_told_is_right_when_an_answer_says_so(answer: str, right: int) -> None:
    assert score(answer, ABSTAINS, ["Rex", "Bruno"], True) == right


def test_nobody_is_right_who_lists_what_was_told() -> None:
    assert score("Leer", ["Leer"], ["Emden"], False) == 1
    assert score("Leer, Emden", ["Leer"], ["Emden"], False) == 0
    assert score("Leer, and no longer Emden", ["Leer"], ["Emden"], False) == 0
    assert score("Leer, not Emden", ["Leer"], ["Emden"], False) == 1
    assert score("a red car", ["red car"], ["car", "Red car"], False) == 0  # a rival within the answer is one


def test_a_published_answer_may_allow_two() -> None:
    both = accepted("7 days. 8 days (including the last day) is also acceptable.")
    assert both == ("7 days", "8 days")
    assert accepted("a. b") == ("a. b",)
    assert head("One:\nTwo:\nThree:\nFour") == "One:\nTwo:\nThree:"


# --- drawn rows --------------------------------------------------------------------------------


def test_every_type_is_solved_and_guessing_is_at_chance() -> None:
    """Whoever guesses among the values that were told, or the numbers that there are."""
    rng, right, guessed = random.Random(1), Counter[str](), Counter[str]()
    n = 400
    for kind in made.TYPES:
        for i in range(n):
            plan = made.plan(random.Random(f"{kind} {i}"), kind, 8)
            said = "I don't know." if kind == "abstention" else plan.answer
            right[kind] += score(said, [plan.answer], plan.rivals, kind == "abstention") == 1
            numbers = {"multi-session": made.COUNTS, "temporal-reasoning": made.DAYS}.get(kind)
            told = [plan.answer, *plan.rivals][kind == "abstention" :]
            guess = rng.choice(told) if numbers is None else f"{rng.randint(*numbers)}"
            guessed[kind] += score(guess, [plan.answer], plan.rivals, kind == "abstention") == 1
    assert right == dict.fromkeys(made.TYPES, n)
    chances = {**dict.fromkeys(made.TYPES[:3], 0.25), "temporal-reasoning": 0.05, "abstention": 0}
    for kind, chance in chances.items():
        assert guessed[kind] / n == pytest.approx(chance, abs=0.08), kind
    assert guessed["abstention"] == 0


@pytest.mark.parametrize("kind", made.TYPES)
def test_drawn_rows_have_the_published_layout_and_say_where_their_answer_stands(kind: str) -> None:
    for i in range(20):
        plan = made.plan(random.Random(i), kind, 9)
        row = made.row(f"r{i}", kind, plan, ["Some talk."] * 30)
        task(None, source="embedded").check_row("", row)
        assert len({*row["haystack_dates"]}) == len(row["haystack_sessions"]) == 9
        told = [one["content"] for each in row["haystack_sessions"] for one in each if one["has_answer"]]
        own = [at for at, each in enumerate(row["haystack_sessions"]) if any(one["has_answer"] for one in each)]
        assert [row["haystack_session_ids"][at] for at in own] == row["answer_session_ids"]
        n_told = {"multi-session": int(plan.answer) if kind == "multi-session" else 0, "temporal-reasoning": 2}
        assert len(told) == (0 if kind == "abstention" else n_told.get(kind, 1))
        if kind in ("single-session-user", "knowledge-update"):
            assert plan.answer in told[0] and not any(rival in told[0].split() for rival in plan.rivals)
        if kind == "temporal-reasoning":
            days = [plan.dates[at] for at in own]
            assert f"{(days[1] - days[0]).days} days" == plan.answer


@pytest.mark.parametrize("kind", made.TYPES)
def test_without_others_nobody_else_has_such_facts(kind: str) -> None:
    for i in range(20):
        alone, among = (made.plan(random.Random(i), kind, 8, n) for n in (0, 3))
        own, everybody = ([one.text for one in plan.told] for plan in (alone, among))
        assert (alone.question, alone.answer, alone.rivals) == (among.question, among.answer, among.rivals)
        assert not any(f"my {other}" in text for text in own for other in made.OTHERS)
        assert sorted(own) == sorted(one for one in everybody if not any(f"my {x}" in one for x in made.OTHERS))
        assert len(everybody) == {"multi-session": 6, "temporal-reasoning": 3}.get(kind, 4)


def test_age_counts_sessions_to_the_oldest_thing_that_is_needed() -> None:
    few = task(None, source="embedded", lengths=[6000], rows=2)
    samples = few.samples(TOKENIZER)
    assert [sample.fields["question_type"] for sample in samples] == [*made.TYPES] * 2
    for sample in samples:
        assert sample.conversation is not None
        (turn,) = sample.conversation.turns
        holding = [at for at, text in enumerate(turn.reads) if any(one in text for one in sample.evidence)]
        assert sample.fields["sessions"] == len(turn.reads) == 12
        assert sample.fields["age"] == (len(turn.reads) - holding[0] if holding else None)
        assert (sample.fields["age"] is None) == (sample.fields["question_type"] == "abstention")


def test_every_session_is_a_feed_of_its_own_and_the_question_comes_last() -> None:
    sample = task(None, source="embedded", lengths=[6000], sessions=7, rows=1).samples(TOKENIZER)[0]
    prompt = prompt_of(TOKENIZER, sample, chat="auto", system_prompt="", scope="full_prompt")
    assert isinstance(prompt, TalkPrompt) and sample.conversation is not None
    pieces = [TOKENIZER.decode(piece) for piece in prompt.pieces(0, prompt.feeds[0])]
    assert len(pieces) == 7 and all(piece.startswith("Conversation of 20") for piece in pieces[:-1])
    assert pieces[-1].startswith("Today is ") and pieces[-1].endswith(
        "assistant\n" + "Answer: Your " + sample.fields["question"][11:-1] + " is"
    )
    assert TOKENIZER.decode(prompt.context_ids).count("Conversation of") == 1
    assert len(prompt) + 64 == sample.fields["tokens"] <= 6000


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"source": "local"}, "longmemeval/longmemeval_s_cleaned.json is missing"),
        ({"source": "auto"}, "(kvbench fetch longmemeval)"),
        ({"types": [TYPES[-1]]}, "needs a judge"),
        ({"types": ["small-talk"]}, "no task.types 'small-talk'"),
        ({"judge": "http://localhost:8000/v1"}, "task.judge_model go together"),
        ({"judge_model": "big"}, "task.judge_model go together"),
        ({"judge": "localhost:8000", "judge_model": "big"}, "is no plain address of a server"),
        ({"judge": "http://me:secret@x/v1", "judge_model": "big"}, "is no plain address of a server"),
        ({"judge": "http://x:y/v1", "judge_model": "big"}, "is no plain address of a server"),
        ({"source": "embedded", "types": ["single-session-assistant"]}, "not single-session-assistant"),
        ({"source": "embedded", "sessions": 5}, "too few for drawn rows; give 6 or more"),
        ({"source": "embedded", "others": 4}, "task.others=4 is out of range"),
        ({"source": "embedded", "lengths": [9000]}, "more than the 8192 tokens"),
        ({"mode": "dialogue"}, "task.mode=dialogue is not allowed"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        task(tmp_path, **given)
    assert says in str(caught.value) and "secret" not in str(caught.value)


def test_too_short_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too short for its facts"):
        task(None, source="embedded", lengths=[500]).samples(TOKENIZER)[0]


def test_without_its_file_the_command_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=longmemeval", "method=full", f"data_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "kvbench fetch longmemeval" in said and "task.source=embedded" in said and "\n" not in said


# --- published rows ----------------------------------------------------------------------------


def chat(*texts: str, has_answer: bool = False) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text, "has_answer": has_answer} for role, text in zip(roles, texts, strict=False)]


def published(id: str, kind: str, answer: str | int, n: int = 6, at: int = 2) -> dict[str, Any]:
    """A row in the layout of the file, whose answer stands in session number `at`."""
    sessions = [chat(f"I have question {i} on tea.", "Green tea is picked in spring.") for i in range(n)]
    sessions[at] = chat("My tea came from Uji.", "That is a fine place.", has_answer=True)
    return {
        "question_id": id, "question_type": kind, "question": "Where did my tea come from?", "answer": answer,
        "question_date": "2023/05/30 (Tue) 23:40", "haystack_session_ids": [f"{id}-{i}" for i in range(n)],
        "haystack_dates": [f"2023/05/{20 + i} (Sat) 02:21" for i in range(n)], "haystack_sessions": sessions,
        "answer_session_ids": [f"{id}-{at}"],
    }  # fmt: skip


LONG = "They want tips on tea that build on what they said of Uji, and no general ones."
ROWS = [
    published("u1", "single-session-user", "Uji"),
    published("u2", "single-session-user", "Uji", at=5),
    published("u3_abs", "single-session-user", "You did not mention coffee."),
    published("p1", "single-session-preference", LONG),
    published("m1", "multi-session", 3),
    published("t1", "temporal-reasoning", "7 days. 8 days (including the last day) is also acceptable."),
    published("a1", "single-session-assistant", "It said that green tea is picked in spring"),
]


def put(folder: Path, rows: list[dict[str, Any]], name: str = FILES[0]) -> Path:
    (folder / "longmemeval").mkdir(exist_ok=True)
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "longmemeval" / name).write_text(lines if name.endswith("l") else json.dumps(rows))
    return folder


def test_published_rows_come_by_type_and_those_that_need_a_judge_are_counted(tmp_path: Path) -> None:
    asked = task(put(tmp_path, ROWS))
    samples = [*asked.samples(TOKENIZER)]
    assert [sample.id for sample in samples] == ["u1", "m1", "t1", "u3_abs", "u2"]
    kinds = [sample.fields["question_type"] for sample in samples]
    assert kinds == ["single-session-user", "multi-session", "temporal-reasoning", "abstention", "single-session-user"]
    assert [sample.fields["age"] for sample in samples] == [4, 4, 4, 4, 1]
    notes = "\n".join(asked.notes)
    assert "1 rows of single-session-assistant left out whose answer is a sentence: they need task.judge" in notes
    assert "1 rows of single-session-preference left out, whose answer is a rubric: they need task.judge" in notes
    for sample in samples:
        (turn,) = sample.turns
        line = type(sample)(sample.id, "", "", references=turn.references, fields=dict(sample.fields))
        assert asked.verdict(line, asked.right_answer(line)) == (1.0, {"refused": float("_abs" in sample.id)})
    by_judge = task(tmp_path, judge="http://localhost:1/v1", judge_model="big")
    assert {one.id for one in by_judge.samples(TOKENIZER)} == {row["question_id"] for row in ROWS}
    assert by_judge.scores_later and not asked.scores_later


@pytest.mark.parametrize("name", FILES)
def test_the_file_may_have_any_of_its_names(name: str, tmp_path: Path) -> None:
    assert len(task(put(tmp_path, ROWS, name)).samples(TOKENIZER)) == 5


def test_fewer_sessions_keep_the_answer_and_their_order(tmp_path: Path) -> None:
    put(tmp_path, [published("u1", "single-session-user", "Uji", n=9, at=7)])
    seen = set[tuple[str, ...]]()
    for seed in range(5):
        (sample,) = task(tmp_path, seed=seed, sessions=3).samples(TOKENIZER)
        (turn,) = sample.turns
        dates = tuple(re.findall(r"Conversation of (\S+)", "".join(turn.reads)))
        assert len(dates) == 3 and list(dates) == sorted(dates) and "2023/05/27" in dates
        assert sample.evidence == ("My tea came from Uji.", "That is a fine place.")
        assert sample.fields["sessions"] == 3 and sample.fields["age"] == 3 - dates.index("2023/05/27")
        seen.add(dates)
    assert len(seen) > 1
    (sample,) = task(tmp_path, sessions=1).samples(TOKENIZER)
    assert sample.fields["age"] == 1 and len(sample.turns[0].reads) == 1


def test_rows_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    put(tmp_path, [published("u1", "single-session-user", "Uji"), published("u2", "single-session-user", "Uji", n=9)])
    whole = task(tmp_path).samples(TOKENIZER)
    window = min(sample.fields["tokens"] for sample in whole)
    asked = task(tmp_path, window=window)
    assert [one.id for one in asked.samples(TOKENIZER)] == ["u1"]
    assert f"single-session-user: 1 rows left out that do not fit {window} tokens" in asked.notes
    with pytest.raises(ConfigError, match="=10 or fewer"):
        task(tmp_path, window=window - 1).samples(TOKENIZER)


# --- runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return ["model=any", f"model.id={folder}", "task=longmemeval", "task.max_new_tokens=4"]


def test_a_run_has_means_by_type(model: list[str], tmp_path: Path) -> None:
    words = [*model, "task.source=embedded", "task.lengths=[4000]", "task.rows=1", "method=snapkv", "ratio=0.3"]
    result, rows = run(words, tmp_path)
    assert [row.fields["question_type"] for row in rows] == [*made.TYPES]
    assert result.protocol == "golden, growing budget" and {row.status for row in rows} == {"ok"}
    assert all(row.fields["bytes_rebuilt"] > 0 and row.fields["feed_tokens"] > 1000 for row in rows)
    table = (tmp_path / "longmemeval.csv").read_text().splitlines()
    assert table[0] == "question_type,rows,score_percent" and [line.split(",")[0] for line in table[1:]] == [
        *made.TYPES
    ]
    assert set(result.measures or {}) == {"refused", "turn_1"}


# --- the judge ---------------------------------------------------------------------------------


@dataclass
class Served:
    """What a server was asked, and what it says: codes and texts one after the other, the last one again and again."""

    address: str = ""
    says: list[tuple[int, str]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def reply(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    found = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            found.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.keys.append(self.headers["Authorization"])
            code, text = found.says.pop(0) if len(found.says) > 1 else found.says[0]
            if code == 0:  # the line breaks
                return
            self.send_response(code)
            if code == 302:
                self.send_header("Location", f"{found.address}/elsewhere")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(chat_judge, "PAUSES", (0, 0, 0))
    monkeypatch.delenv(KEY, raising=False)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("yes", True),
        ("**Yes.** It names the place.", True),
        ("No, though yes in part", False),
        ("<think>yes? no.</think>\nYes", True),
        ("Nothing to say", None),
        ("", None),
        ("Yesterday", None),
    ],
)
def test_a_judge_says_yes_or_no(text: str, verdict: bool | None, served: Served) -> None:
    served.says = [reply(text)]
    assert ChatJudge(served.address, "big").says_yes("Right?") is verdict
    assert served.asked[0]["messages"] == [{"role": "user", "content": "Right?"}] and served.keys == [None]
    assert (served.asked[0]["model"], served.asked[0]["temperature"]) == ("big", 0)


@pytest.mark.parametrize(
    "trouble",
    [(503, "busy"), (429, "slow down"), (0, ""), (200, "{"), (200, "[]"), (200, '{"choices": []}'),
     (200, '{"choices": [{"message": {"content": null}}]}'), (200, "[" * 100_000)],
)  # fmt: skip
def test_a_judge_in_trouble_is_asked_again(trouble: tuple[int, str], served: Served) -> None:
    served.says = [trouble, trouble, reply("yes")]
    assert ChatJudge(served.address, "big").says_yes("Right?") is True and len(served.asked) == 3
    served.says = [trouble]
    with pytest.raises(ConfigError, match="gave no verdict in 4 tries") as caught:
        ChatJudge(served.address, "big").says_yes("Right?")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("key", ["sk-secret", " sk-secret\n", "sk-secret\nX: y", "sk-s\u20acret"])
def test_the_key_comes_from_the_environment_and_stands_in_no_message(
    key: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, key)
    served.says = [(401, f"wrong key {key.strip()}")]
    with pytest.raises(ConfigError) as caught:
        ChatJudge(served.address, "big").says_yes("Right?")
    assert "secret" not in str(caught.value) and "task.judge" in str(caught.value)
    if key.strip() == "sk-secret":
        assert served.keys == ["Bearer sk-secret"] and "refuses to judge (401: wrong key …)" in str(caught.value)


def test_a_judge_that_sends_elsewhere_gets_no_key_there(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "sk-secret")
    served.says = [(302, "")]
    with pytest.raises(ConfigError, match="refuses to judge \\(302"):
        ChatJudge(served.address, "big").says_yes("Right?")
    assert len(served.asked) == 1


def test_a_judge_that_is_not_there_is_named(served: Served) -> None:
    with pytest.raises(ConfigError, match="gave no verdict in 4 tries"):
        ChatJudge("http://127.0.0.1:9/v1", "big").says_yes("Right?")
    check_address("https://example.org/v1")


def test_answers_wait_for_the_judge_who_goes_on_behind_the_last_verdict(
    model: list[str], tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(KEY, "sk-secret")
    put(tmp_path, ROWS)
    words = [f"task.judge={served.address}", "task.judge_model=big", f"data_dir={tmp_path}", "method=full"]
    result, rows = run([*model, *words], tmp_path / "run")
    assert [row.score for row in rows] == [None] * len(ROWS) and result.score is None and not served.asked
    assert any("Say yes or no" in note and "big at http" in note for note in result.notes)
    assert any("off by one count as right" in note for note in result.notes)
    command = ["--write", str(tmp_path / "run")]
    served.says = [reply("yes"), reply("no"), reply("Hm."), (400, "no such model")]
    assert rescore.main(command) == 2
    assert "refuses to judge (400: no such model)" in capsys.readouterr().err and len(served.asked) == 4
    assert read_run(tmp_path / "run")[0].score is None
    served.says = [reply("Yes.")]
    assert rescore.main(command) == 0
    assert len(served.asked) == 4 + 4  # the first three are there
    scored = read_samples(tmp_path / "run")
    assert [row.score for row in scored] == [1, 0, 0, 1, 1, 1, 1]
    measures = [row.fields["measures"] for row in scored]
    assert [one["unjudged"] for one in measures] == [0, 0, 1, 0, 0, 0, 0]
    assert read_run(tmp_path / "run")[0].score == pytest.approx(fmean([1, 0, 0, 1, 1, 1, 1]))
    question = served.asked[0]["messages"][0]["content"]
    assert "Where did my tea come from?" in question and "Uji" in question and rows[0].prediction.strip() in question
    whole = "".join(one["messages"][0]["content"] for one in served.asked)
    assert LONG in whole and "take up every point" in whole and "can't be known" in whole
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"sk-secret" not in path.read_bytes(), path
